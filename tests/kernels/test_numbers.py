# SPDX-License-Identifier: Apache-2.0
"""Noise, hashes and updates in Triton's interpreter and in C against plain torch, bit for bit."""

from __future__ import annotations

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from number_checks import BITS, LAST, in_torch, make, moved, ordered, random, same, update

from evoalign import kernels, noise
from evoalign.engines import hash as hashes
from evoalign.kernels import compiled, products
from evoalign.types import Update, population

__all__ = ["in_torch"]  # a fixture

KEY = (1, LAST)
WHOLE = 1 << 20
"""Rows and columns of a matrix with 2^37 Philox blocks."""
PARTS = [
    ((), None),
    ((33,), None),
    ((33,), (slice(13, 30),)),
    ((13, 7), None),
    ((13, 8), (slice(2, 9),)),
    ((13, 7), (slice(3, 9), slice(2, 5))),
    ((5, 300), (slice(1, 4), slice(3, 299))),
    ((5, 304), (slice(1, 4), slice(8, 296))),
    ((896, 1), (slice(3, 890), slice(0, 1))),
    ((40, 257), None),
    ((2, 1, 9), None),
    ((3, 5, 9), (slice(1, 3), slice(0, 5), slice(2, 7))),
    ((3, 5, 9), (slice(0, 3), slice(1, 4), slice(2, 7))),
    ((WHOLE, WHOLE), (slice(WHOLE - 2, WHOLE), slice(WHOLE - 30, WHOLE - 3))),
    ((40_000_000_000,), (slice(2**35 - 20, 2**35 + 20),)),
]
parts = pytest.mark.parametrize(("shape", "slices"), PARTS)


@pytest.fixture(params=["triton", "c", "threads"])
def form(request, monkeypatch):
    """Choose the form, with small programs or pieces, so that a few elements need several; C with one and 3 threads."""
    from evoalign.kernels import noise as kernel

    before = torch.get_num_threads()
    if request.param == "triton":
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


def size_of(shape, slices):
    return [b - a for a, b in noise.bounds_of(shape, slices)]


@pytest.mark.first("c-", "threads-", "triton-turned-shape5-", others="long")
@parts
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

        def draw(dtype=dtype, members=members, widths=widths):
            out = torch.zeros(len(members), *[n + 3 for n in size], dtype=dtype)
            view = out[(slice(None), *[slice(1, 1 + n) for n in size])]
            noise.scaled(KEY, shape, 5, members, widths, mean=centre, slices=slices, out=view)
            more = {"mean": centre, "dtype": dtype, "slices": slices, "device": "cpu"}
            alone = noise.scaled(KEY, shape, 5, members, widths, **more)
            return out, alone, noise.normals(KEY, shape, LAST, members, slices)

        for got, want in zip(draw(), in_torch(draw), strict=True):
            assert same(got, want)


@pytest.mark.first("shape4-", others="long")
@parts
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


@pytest.mark.first("-shape0", "-shape1", others="long")
@pytest.mark.parametrize("shape", [(20, 1), (20, 3), (3, 20), (6, 300)])
def test_scaled_writes_padded_and_transposed_outputs(in_torch, form, shape):
    """Write to memory like an engine's slots; nothing else is changed."""
    rows, columns = shape
    draw = partial(noise.scaled, KEY, shape, 1, [4, 9], (0.5, 0.25))
    want = in_torch(draw).bfloat16()
    for out in (torch.full((2, rows + 2, columns + 8), 7.0, dtype=torch.bfloat16),
                torch.full((2, columns + 8, rows + 2), 7.0, dtype=torch.bfloat16).mT):  # fmt: skip
        place = out[:, 1 : rows + 1, :columns]
        assert draw(out=place).data_ptr() == place.data_ptr()
        assert same(place, want)
        place.fill_(7.0)
        assert bool((out == 7.0).all())


def test_an_empty_part(form):
    assert noise.normals(KEY, (4, 3), 0, [1], (slice(2, 2),)).shape == (1, 0, 3)
    assert noise.normals(KEY, (4, 3), 0, []).shape == (0, 4, 3)


@parts
def test_hash_has_the_same_bits(in_torch, form, shape, slices):
    tensor = random(size_of(shape, slices))
    for of in (tensor, tensor.bfloat16()):
        got = hashes.tensor_sum(of, shape, slices)
        assert (got - in_torch(hashes.tensor_sum, of, shape, slices)) % (1 << 64) == 0
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


def matrix_of(form):
    """Return the shape of a matrix: the interpreter is slow."""
    return (21, 37) if form == "triton" else (41, 300)


def place_of(part, shape):
    """Return a part of a matrix: all of it, rows and columns that are not aligned, or the last number."""
    return tuple({"whole": slice(0, n), "half": slice(1, n // 2 + 1), "corner": slice(n - 1, n)}[part] for n in shape)


SPACES = [("full", 1, "B"), ("lora", 3, "A"), ("lora", 3, "B"), ("lowrank", 1, "B"), ("lowrank", 3, "B")]


@pytest.mark.first(
    "8-True-torch.bfloat16-sgd-0.125-half", "9-False-torch.float32-adam-0.0-whole", others="long"
)  # fmt: skip
@pytest.mark.parametrize("part", ["whole", "half"])
@pytest.mark.parametrize(("optimizer", "decay"), [("sgd", 0.0), ("sgd", 0.125), ("adam", 0.0)])
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize(("size", "antithetic"), [(9, False), (8, True)])
@pytest.mark.parametrize(("space", "rank", "factor"), SPACES)
def test_updates_have_the_same_bits(
    in_torch, form, space, rank, factor, dtype, size, antithetic, optimizer, decay, part
):
    up, matrix = update(size, antithetic=antithetic, decay=decay), matrix_of(form)
    factors = {"A": (rank, matrix[1]), "B": (matrix[0], rank)}
    shape = factors[factor] if space == "lora" else matrix
    place = place_of(part, shape)
    call = partial(moved, space, rank, dtype, up, place, shape=matrix, factor=factor, optimizer=optimizer)
    (got, served), (want, served_in_torch) = call(), in_torch(call)
    assert same(got, want) and same(served, served_in_torch)
    assert not torch.equal(got, random(shape))
    assert same(served[place], got[place].to(dtype))


@pytest.mark.parametrize("served", BITS, ids=str)
def test_one_number_moves_alone_and_is_served_in_any_dtype(in_torch, form, served):
    call = partial(moved, "full", 1, torch.float32, update(1), place_of("corner", (41, 300)), served=served)
    for got, want in zip(call(), in_torch(call), strict=True):
        assert same(got, want)


@pytest.mark.first("half-0.0", others="long")
@pytest.mark.parametrize("decay", [0.0, 0.125])
@pytest.mark.parametrize("part", ["whole", "half", "corner"])
def test_lowrank_moves_are_the_ordered_sum(form, part, decay):
    """Each product is rounded and added in order, so that shards get the bits of the whole."""
    shape = matrix_of(form)
    up, (made, layout), before, place = (
        update(7, decay=decay),
        make("lowrank", shape=shape),
        random(shape),
        place_of(part, shape),
    )
    got, served = moved("lowrank", 2, torch.bfloat16, up, place, shape=shape)
    want = ordered(made, layout, "layers.0.w.weight", up, before, random(shape, 1))
    assert same(got[place], want[place])
    assert same(served[place], want[place].bfloat16())
    untouched = torch.ones(got.shape, dtype=torch.bool)
    untouched[place] = False
    assert same(got[untouched], before[untouched]) and not served[untouched].any()


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("space", ["lowrank", "full"])
def test_updates_without_noise_only_decay(form, space, decay):
    """Pairs whose weights cancel, and members without width."""
    pairs = Update(0, 0, population(4, antithetic=True), (1.0, 1.0, -1.0, -1.0), 0.01, 0.005, decay)
    shape = matrix_of(form)
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
