# SPDX-License-Identifier: Apache-2.0
"""Noise, hashes and updates in Triton's interpreter, in C and on a GPU against plain torch, bit for bit."""

from __future__ import annotations

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from number_checks import BITS, CUDA, LAST, MODULE, in_torch, make, moved, ordered, random, same, update

from evoalign import kernels, noise
from evoalign.engines import hash as hashes
from evoalign.kernels import compiled, products
from evoalign.types import MEAN, Member, Plan, Update, population

__all__ = ["in_torch"]  # a fixture

KEY = (1, LAST)
WHOLE = 1 << 20
"""Rows and columns of a matrix with 2^37 Philox blocks."""
PARTS = [
    ((), None), ((33,), None), ((33,), (slice(13, 30),)), ((13, 7), None), ((13, 8), (slice(2, 9),)),
    ((13, 7), (slice(3, 9), slice(2, 5))), ((5, 300), (slice(1, 4), slice(3, 299))),
    ((5, 304), (slice(1, 4), slice(8, 296))), ((896, 1), (slice(3, 890), slice(0, 1))), ((40, 257), None),
    ((2, 1, 9), None), ((3, 5, 9), (slice(1, 3), slice(0, 5), slice(2, 7))),
    ((3, 5, 9), (slice(0, 3), slice(1, 4), slice(2, 7))),
    ((WHOLE, WHOLE), (slice(WHOLE - 2, WHOLE), slice(WHOLE - 30, WHOLE - 3))),
    ((40_000_000_000,), (slice(2**35 - 20, 2**35 + 20),)),
]  # fmt: skip
LARGE = [
    ((), None), ((33,), (slice(13, 30),)), ((129, 77), None), ((4096, 304), None),
    ((64, 4096), (slice(3, 60), slice(8, 4000))), ((64, 4096), (slice(3, 60), slice(5, 4001))), ((300, 1), None),
    ((300, 3), None), ((4, 65, 96), (slice(0, 4), slice(1, 64), slice(16, 80))),
    ((WHOLE, WHOLE), (slice(WHOLE - 20, WHOLE), slice(WHOLE - 3000, WHOLE - 3))),
    ((40_000_000_000,), (slice(2**35 - 20_000, 2**35 + 20_000),)),
]  # fmt: skip
FORMS = ("triton", "c", "threads")
MATRIX = {"triton": (13, 23), "c": (41, 300), "threads": (41, 300), "cuda": (515, 776)}
"""Shapes of matrices by form: the interpreter is slow."""


def by_form(names, cpu, cuda):
    """Parametrise over the form and tuples of `names`: `cpu` for each form of the CPU, `cuda` for a GPU."""
    cases = [pytest.param(form, *case, id=f"{form}-{i}-") for form in FORMS for i, case in enumerate(cpu)]
    cases += [pytest.param("cuda", *case, id=f"cuda-{i}-", marks=CUDA) for i, case in enumerate(cuda)]
    return pytest.mark.parametrize(("form", *names), cases, indirect=["form"])


def on_gpu(test):
    for mark in CUDA:
        test = mark(test)
    return test


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Choose the form, with small programs or pieces, so that a few elements need several; C with one and 3 threads."""
    from evoalign.kernels import noise as kernel

    before = torch.get_num_threads()
    if request.param == "cuda":
        assert kernels.available("cuda") and not kernels.available("cpu") and not kernels.interpreted()
    elif request.param == "triton":
        monkeypatch.setattr(kernel, "scaled", partial(kernel.scaled, tuning=kernel.Tuning(block=16)))
        assert kernels.available("cpu") and kernels.interpreted()
    else:
        if shutil.which("cc") is None:  # a build that fails is no reason to leave these out
            pytest.skip("no C compiler here")
        monkeypatch.delenv("TRITON_INTERPRET")
        monkeypatch.setattr(compiled, "_PIECE", 64)
        torch.set_num_threads(1 if request.param == "c" else 3)
        assert compiled.available("cpu") and not kernels.available("cpu")
    yield request.param
    torch.set_num_threads(before)


def device_of(form):
    return "cuda" if form == "cuda" else "cpu"


def size_of(shape, slices):
    return [b - a for a, b in noise.bounds_of(shape, slices)]


def assert_same(got, *others):
    for other in others:
        assert all(same(a, b) for a, b in zip(got, other, strict=True))


@pytest.mark.first("none-c-", "none-threads-", "plain-c-", "plain-threads-", "turned-c-", "turned-threads-",
                   "turned-triton-5-", "cuda")  # fmt: skip
@by_form(("shape", "slices"), PARTS, LARGE)
@pytest.mark.parametrize("around", ["none", "plain", "turned"])
def test_noise_has_the_same_bits(in_torch, form, around, shape, slices):
    """Of any part, around any mean, into any memory of any dtype, pairs and single members."""
    size = size_of(shape, slices)
    centre = None if around == "none" else random(size)
    centre = centre.T.contiguous().T if around == "turned" and len(size) == 2 else centre
    for dtype, members, widths in (
        (torch.bfloat16, [3, 3, 9, 3], [0.0123456789, -0.1, 0.2, -3e-4]),
        (torch.float32, [LAST], [1e-3]),
        (torch.float16, [LAST], [1e-3]),
    ):

        def draw(device, dtype=dtype, members=members, widths=widths):
            mean = None if centre is None else centre.to(device)
            out = torch.zeros(len(members), *[n + 3 for n in size], dtype=dtype, device=device)
            view = out[(slice(None), *[slice(1, 1 + n) for n in size])]
            noise.scaled(KEY, shape, 5, members, widths, mean=mean, slices=slices, out=view)
            more = {"mean": mean, "dtype": dtype, "slices": slices, "device": device}
            alone = noise.scaled(KEY, shape, 5, members, widths, **more)
            return out, alone, noise.normals(KEY, shape, LAST, members, slices, device)

        device = device_of(form)
        assert_same(draw(device), in_torch(draw, device), *([draw("cpu")] if device == "cuda" else []))


@pytest.mark.first("shape4-")
@pytest.mark.parametrize(("shape", "slices"), PARTS)
def test_the_whole_table_gives_the_bits_of_half(monkeypatch, in_torch, shape, slices):
    from evoalign.kernels import noise as kernel

    monkeypatch.setattr(kernel, "scaled", partial(kernel.scaled, tuning=kernel.Tuning(block=16, half=False)))
    args = (KEY, shape, 0, [0, LAST], slices)
    assert same(noise.normals(*args), in_torch(noise.normals, *args))


def test_zero_width_keeps_the_signs_of_zeros(in_torch, form):
    draw = partial(noise.scaled, KEY, (64,), 0, [3], [0.0])
    assert same(draw(), in_torch(draw)) and bool((draw().view(torch.int32) != 0).any())
    around = partial(draw, mean=torch.tensor([0.0, -0.0]).repeat(32))
    assert same(around(), in_torch(around))


@pytest.mark.parametrize("x", [3.4028234e38, 1e-45, float("inf"), -0.0, 1.00390625, 1.01171875])
def test_rounding_to_bfloat16_is_that_of_torch_at_the_edges(in_torch, form, x):
    draw = partial(noise.scaled, (1, 2), (1, 9), 0, [0], [0.0], mean=torch.full((1, 9), x), dtype=torch.bfloat16)
    assert same(draw(), in_torch(draw))


def test_nan_stays_nan(form):
    mean = torch.full((1, 9), float("nan"))
    assert noise.scaled((1, 2), (1, 9), 0, [0], [0.0], mean=mean, dtype=torch.bfloat16).isnan().all()


@pytest.mark.first("-0-", "-1-", "cuda")
@by_form(("shape",), [((20, 1),), ((20, 3),), ((3, 20),), ((6, 300),)], [((3000, 1),), ((3000, 3),), ((3, 3000),)])
def test_scaled_writes_padded_and_transposed_outputs(in_torch, form, shape):
    """Write to memory like an engine's slots; nothing else is changed."""
    (rows, columns), device = shape, device_of(form)
    draw = partial(noise.scaled, KEY, shape, 1, [4, 9], (0.5, 0.25))
    want = in_torch(draw).bfloat16()
    for out in (torch.full((2, rows + 2, columns + 8), 7.0, dtype=torch.bfloat16, device=device),
                torch.full((2, columns + 8, rows + 2), 7.0, dtype=torch.bfloat16, device=device).mT):  # fmt: skip
        place = out[:, 1 : rows + 1, :columns]
        assert draw(out=place).data_ptr() == place.data_ptr()
        assert same(place, want)
        place.fill_(7.0)
        assert bool((out == 7.0).all())


def test_an_empty_part(form):
    assert noise.normals(KEY, (4, 3), 0, [1], (slice(2, 2),)).shape == (1, 0, 3)
    assert noise.normals(KEY, (4, 3), 0, []).shape == (0, 4, 3)


@by_form(("shape", "slices"), PARTS, LARGE)
def test_hash_has_the_same_bits(in_torch, form, shape, slices):
    tensor = random(size_of(shape, slices)).to(device_of(form))
    for of in (tensor, tensor.bfloat16()):
        got = hashes.tensor_sum(of, shape, slices)
        for device in {"cpu", device_of(form)}:
            assert (got - in_torch(hashes.tensor_sum, of.to(device), shape, slices)) % (1 << 64) == 0
        assert (got - hashes.tensor_sum(-of, shape, slices)) % (1 << 64) != 0


def test_hash_of_special_numbers_strides_and_parts(in_torch, form):
    tensor, turned = random((40, 30)), random((40, 30)).T.contiguous().T
    special = torch.tensor([0.0, -0.0, 1e-45, float("inf"), -float("inf"), float("nan"), 3.4e38])
    for of, want in ((special, special), (turned, tensor)):
        assert (hashes.tensor_sum(of) - in_torch(hashes.tensor_sum, want)) % (1 << 64) == 0
    parts = [(slice(0, 4), slice(0, 30)), (slice(4, 40), slice(0, 10)), (slice(4, 40), slice(10, 30))]
    total = sum(hashes.tensor_sum(tensor[p], tensor.shape, p) for p in parts)
    assert (total - hashes.tensor_sum(tensor)) % (1 << 64) == 0
    own = hashes.weights_hash_of_sums([("w", tensor.shape, total)])
    assert own == hashes.weights_hash([("w", tensor)])


def place_of(part, shape):
    """Return a part of a matrix: all of it, rows and columns that are not aligned, or the last number."""
    return tuple({"whole": slice(0, n), "half": slice(1, n // 2 + 1), "corner": slice(n - 1, n)}[part] for n in shape)


SPACES = [("full", 1, "B"), ("lora", 3, "A"), ("lora", 3, "B"), ("lowrank", 1, "B"), ("lowrank", 3, "B")]


@pytest.mark.first(
    "8-True-torch.bfloat16-sgd-0.125-half", "9-False-torch.float32-adam-0.0-whole"
)  # fmt: skip
@pytest.mark.parametrize("part", ["whole", "half"])
@pytest.mark.parametrize(("optimizer", "decay"), [("sgd", 0.0), ("sgd", 0.125), ("adam", 0.0)])
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize(("size", "antithetic"), [(9, False), (8, True)])
@pytest.mark.parametrize(("space", "rank", "factor"), SPACES)
def test_updates_have_the_same_bits(
    in_torch, form, space, rank, factor, dtype, size, antithetic, optimizer, decay, part
):
    up, matrix = update(size, antithetic=antithetic, decay=decay), MATRIX[form]
    factors = {"A": (rank, matrix[1]), "B": (matrix[0], rank)}
    shape = factors[factor] if space == "lora" else matrix
    place = place_of(part, shape)
    call = partial(moved, space, rank, dtype, up, place, shape=matrix, factor=factor, optimizer=optimizer)
    (got, served), (want, served_in_torch) = call(), in_torch(call)
    assert same(got, want) and same(served, served_in_torch)
    assert not torch.equal(got, random(shape))
    assert same(served[place], got[place].to(dtype))


@on_gpu
@pytest.mark.parametrize("decay", [0.0, 0.125])
@pytest.mark.parametrize("size", [1, 30, 257])
@pytest.mark.parametrize("part", [None, (slice(3, 514), slice(5, 700))])
def test_updates_on_a_gpu_have_the_bits_of_a_cpu(in_torch, part, size, decay):
    call = partial(moved, "full", 2, torch.bfloat16, update(size, decay=decay), part, shape=MATRIX["cuda"])
    assert_same(call(device="cuda"), in_torch(partial(call, device="cuda")), call())


@pytest.mark.parametrize("served", BITS, ids=str)
def test_one_number_moves_alone_and_is_served_in_any_dtype(in_torch, form, served):
    call = partial(moved, "full", 1, torch.float32, update(1), place_of("corner", (41, 300)), served=served)
    assert_same(call(), in_torch(call))


@on_gpu
@pytest.mark.parametrize("space", ["full", "lowrank"])
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_updates_on_a_gpu_serve_any_dtype(dtype, space):
    master, served = moved(space, 2, torch.bfloat16, update(4), shape=MATRIX["cuda"], device="cuda", served=dtype)
    assert same(served, master.to(dtype))


@pytest.mark.first("half-0.0")
@pytest.mark.parametrize("decay", [0.0, 0.125])
@pytest.mark.parametrize("part", ["whole", "half", "corner"])
def test_lowrank_moves_are_the_ordered_sum(form, part, decay):
    """Each product is rounded and added in order, so that shards get the bits of the whole."""
    shape = MATRIX[form]
    up, (made, layout), before, place = (
        update(7, decay=decay),
        make("lowrank", shape=shape),
        random(shape),
        place_of(part, shape),
    )
    got, served = moved("lowrank", 2, torch.bfloat16, up, place, shape=shape)
    want = ordered(made, layout, MODULE, up, before, random(shape, 1))
    assert same(got[place], want[place])
    assert same(served[place], want[place].bfloat16())
    untouched = torch.ones(got.shape, dtype=torch.bool)
    untouched[place] = False
    assert same(got[untouched], before[untouched]) and not served[untouched].any()


@on_gpu
def test_lowrank_moves_on_a_gpu_are_the_ordered_sum(in_torch):
    """A shard has the bits of the whole, which are those of an ordered sum on the CPU."""
    up, shape = update(30, decay=0.125), MATRIX["cuda"]
    made, layout = make("lowrank", shape=shape)
    want = ordered(made, layout, MODULE, up, random(shape), random(shape, 1))
    call = partial(moved, "lowrank", 2, torch.bfloat16, up, shape=shape, device="cuda")
    got, _ = call()
    assert same(got, want)
    for part in [(slice(0, 100), slice(0, 776)), (slice(17, 515), slice(301, 700))]:
        assert same(call(part)[0][part], want[part])
    library, move = (t.cpu().double() - random(shape).double() for t in (in_torch(call)[0], got))
    assert float((library - move).norm() / move.norm()) < 1e-4


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("space", ["lowrank", "full"])
def test_updates_without_noise_only_decay(form, space, decay):
    """Pairs whose weights cancel, and members without width."""
    pairs = Update(0, 0, population(4, antithetic=True), (1.0, 1.0, -1.0, -1.0), 0.01, 0.005, decay)
    shape = MATRIX[form]
    before, start = random(shape), random(shape, 1)
    for up in (pairs, update(4, sigma=0.0, decay=decay)) if space == "lowrank" else (pairs,):
        assert same(moved(space, 2, torch.float32, up, shape=shape)[0], before - (before - start) * decay)


def test_products_are_added_one_after_another(form):
    """Against the definition in numpy, number by number: no library's order, no fused operation."""
    rng = np.random.default_rng(1)
    left, right = (rng.normal(size=(19, n)).astype(np.float32) for n in (23, 270))
    total = np.zeros((23, 270), np.float32)
    for a, b in zip(left, right, strict=True):
        total = total + a[:, None] * b[None]
    start = rng.normal(size=total.shape).astype(np.float32)
    want = start + total * np.float32(1 / 7) * np.float32(0.3)
    master, (rows, columns) = torch.from_numpy(start.copy()), products.factors(19, 23, 270, torch.device("cpu"))
    rows.copy_(torch.from_numpy(left))
    columns.copy_(torch.from_numpy(right))
    products.move(master, None, None, rows, columns, 7, 0.3, 0.0)
    assert np.array_equal(master.numpy().view(np.int32), want.view(np.int32))


@on_gpu
@pytest.mark.parametrize("block", [64, 128, 256, 512])
@pytest.mark.parametrize("half", [True, False])
def test_tuning_changes_no_bit(block, half, monkeypatch):
    from evoalign.kernels import noise as kernel
    from evoalign.kernels import update as updates

    def found(device):
        mean = random((129, 77)).to(device)
        drawn = noise.scaled(KEY, (129, 77), LAST, [0, 9, LAST], (0.01, -0.3, 1.7), mean=mean, dtype=torch.bfloat16)
        return drawn, *moved("full", 2, torch.bfloat16, update(9), shape=MATRIX["cuda"], device=device)

    want, tuning = found("cpu"), kernel.Tuning(block=block, half=half, keep=True)
    monkeypatch.setattr(kernel, "scaled", partial(kernel.scaled, tuning=tuning))
    monkeypatch.setattr(updates, "dense", partial(updates.dense, tuning=tuning))
    assert_same(found("cuda"), want)


@on_gpu
def test_noise_addresses_more_than_2_to_the_31_elements():
    """Addresses and masks exceed 32 bits."""
    count = 2**31 + 5000
    if torch.cuda.mem_get_info()[0] < 2.5 * count:
        pytest.skip("needs 6 GB of GPU memory")
    out = torch.empty(1, count, dtype=torch.bfloat16, device="cuda")
    noise.scaled(KEY, (count,), 1, [4], (0.5,), out=out)
    for start in (0, 2**30 - 500, 2**31 - 500, count - 1000):
        part = (slice(start, start + 1000),)
        want = noise.scaled(KEY, (count,), 1, [4], (0.5,), slices=part, dtype=torch.bfloat16)
        assert same(out[:, part[0]], want), start


@on_gpu
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_dense_members_are_written_to_served_weights(dtype):
    shape, part = MATRIX["cuda"], (slice(5, 500), slice(16, 760))
    made, layout = make("full", shape=shape)
    plan = Plan(3, 0.01, (Member(0, LAST, -1),))
    for member in (*plan.members, MEAN):
        master, served = random(shape).cuda(), torch.zeros(shape, dtype=dtype, device="cuda")
        made.perturbed(layout, MODULE, master, plan, member, None, served)
        want = made.perturbed(layout, MODULE, random(shape), plan, member)
        assert same(served, want.to(dtype))
        served.zero_()
        made.perturbed(layout, MODULE, master[part], plan, member, part, served[part])
        assert same(served[part], want[part].to(dtype)) and not served[:5].any() and not served[:, :16].any()
