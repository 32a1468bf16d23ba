# SPDX-License-Identifier: Apache-2.0
"""Kernels on a GPU, torch on a GPU and torch on the CPU give the same bits. Skipped without a GPU."""

from functools import partial

import pytest
import torch
from number_checks import BITS, LAST, in_torch, make, moved, ordered, random, same, update
from number_checks import MODULE as NAME

from evoalign import kernels, noise, spaces
from evoalign.config import from_dict
from evoalign.engines import hash
from evoalign.types import MEAN, Member, Plan, TensorSpec

__all__ = ["in_torch"]  # a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

KEY = noise.key(3, "noise", "w")
WHOLE = 1 << 20
PARTS = [
    ((), None),
    ((33,), (slice(13, 30),)),
    ((129, 77), None),
    ((4096, 304), None),
    ((64, 4096), (slice(3, 60), slice(8, 4000))),
    ((64, 4096), (slice(3, 60), slice(5, 4001))),
    ((300, 1), None),
    ((300, 3), None),
    ((4, 65, 96), (slice(0, 4), slice(1, 64), slice(16, 80))),
    ((WHOLE, WHOLE), (slice(WHOLE - 20, WHOLE), slice(WHOLE - 3000, WHOLE - 3))),
    ((40_000_000_000,), (slice(2**35 - 20_000, 2**35 + 20_000),)),
]
SHAPE = (515, 776)


def scaled(device, shape, slices, dtype, generation=LAST):
    part = tuple(b - a for a, b in noise.bounds_of(shape, slices))
    return noise.scaled(KEY, shape, generation, [0, 9, LAST], (0.01, -0.3, 1.7), mean=random(part).to(device),
                        slices=slices, dtype=dtype)  # fmt: skip


def test_kernels_are_available():
    assert kernels.available("cuda") and not kernels.available("cpu") and not kernels.interpreted()


@pytest.mark.parametrize(("shape", "slices"), PARTS)
def test_normals(in_torch, shape, slices):
    members = [0, 9, LAST]
    got = noise.normals(KEY, shape, LAST, members, slices, "cuda")
    assert same(got, in_torch(noise.normals, KEY, shape, LAST, members, slices, "cuda"))
    assert same(got, noise.normals(KEY, shape, LAST, members, slices))


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize(("shape", "slices"), PARTS)
def test_scaled(in_torch, shape, slices, dtype):
    got = scaled("cuda", shape, slices, dtype)
    assert same(got, in_torch(scaled, "cuda", shape, slices, dtype))
    assert same(got, scaled("cpu", shape, slices, dtype))


@pytest.mark.parametrize("block", [64, 128, 256, 512])
@pytest.mark.parametrize("half", [True, False])
def test_tuning_changes_no_bit(block, half, monkeypatch):
    from evoalign.kernels import noise as kernel
    from evoalign.kernels import update as updates

    want = scaled("cpu", (129, 77), None, torch.bfloat16)
    dense = accumulated("full", "cpu", update(9))
    tuning = kernel.Tuning(block=block, half=half, keep=True)
    monkeypatch.setattr(kernel, "scaled", partial(kernel.scaled, tuning=tuning))
    monkeypatch.setattr(updates, "dense", partial(updates.dense, tuning=tuning))
    assert same(scaled("cuda", (129, 77), None, torch.bfloat16), want)
    assert all(same(a, b) for a, b in zip(accumulated("full", "cuda", update(9)), dense, strict=True))


@pytest.mark.parametrize("shape", [(3000, 1), (3000, 3), (3, 3000)])
def test_padded_outputs(shape):
    rows, columns = shape
    slots = torch.full((2, rows + 8, columns + 8), 7.0, dtype=torch.bfloat16, device="cuda")
    place = slots[:, :rows, :columns]
    noise.scaled(KEY, shape, 1, [4, 9], (0.5, 0.25), out=place)
    assert same(place, noise.scaled(KEY, shape, 1, [4, 9], (0.5, 0.25), dtype=torch.bfloat16))
    assert same(place, noise.normals(KEY, shape, 1, [4, 9]).mul_(torch.tensor([0.5, 0.25])[:, None, None]).bfloat16())
    place.fill_(7.0)
    assert bool((slots == 7.0).all())


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


def accumulated(space, device, up, part=(slice(0, SHAPE[0]), slice(0, SHAPE[1])), dtype=torch.bfloat16):
    return moved(space, 2, torch.bfloat16, up, part, shape=SHAPE, device=device, served=dtype)


@pytest.mark.parametrize("decay", [0.0, 0.125])
@pytest.mark.parametrize("size", [1, 30, 257])
@pytest.mark.parametrize("part", [(slice(0, 515), slice(0, 776)), (slice(3, 514), slice(5, 700))])
def test_dense_updates(in_torch, part, size, decay):
    args = ("full", "cuda", update(size, decay=decay), part)
    got, there, here = accumulated(*args), in_torch(accumulated, *args), accumulated("full", "cpu", *args[2:])
    for i in range(2):
        assert same(got[i], there[i]) and same(got[i], here[i])


@pytest.mark.parametrize("dtype", BITS)
def test_served_dtypes(dtype):
    up, part = update(4), (slice(0, 515), slice(0, 776))
    for space in ("full", "lowrank"):
        master, served = accumulated(space, "cuda", up, part, dtype)
        assert same(served, master.to(dtype))


def test_lowrank_updates_are_the_ordered_sum(in_torch):
    """A shard has the bits of the whole, which are those of an ordered sum on the CPU."""
    up = update(30, decay=0.125)
    got, _ = accumulated("lowrank", "cuda", up)
    made, layout = make("lowrank", shape=SHAPE)
    want = ordered(made, layout, NAME, up, random(SHAPE), random(SHAPE, 1))
    assert same(got, want)
    for part in [(slice(0, 100), slice(0, 776)), (slice(17, 515), slice(301, 700))]:
        assert same(accumulated("lowrank", "cuda", up, part)[0][part], want[part])
    library = in_torch(accumulated, "lowrank", "cuda", up)[0].cpu().double() - random(SHAPE).double()
    move = got.cpu().double() - random(SHAPE).double()
    assert float((library - move).norm() / move.norm()) < 1e-4


MANY = [(512, 768), (515, 776), (512, 768), (1200, 64), (64, 1200), (515, 776), (1, 33)]


def many(space, rank):
    made = spaces.create(from_dict({
        "seed": 7, "space": space, "es": {"noise_multiplier": 0.3}, "lowrank": {"rank": rank},
        "lora": {"rank": rank, "evolve": "ab"},
    }))  # fmt: skip
    specs = [TensorSpec(f"layers.{i}.w.weight", s, "linear", i // 2, 0.01 * (1 + i)) for i, s in enumerate(MANY)]
    return made, made.layout(specs, torch.bfloat16), [s for s in specs if rank <= min(s.shape)]


def cut_of(shape, sharded):
    """Return a whole matrix, or rows and columns as on one of several ranks, not all aligned."""
    return tuple(slice(n // 3, n // 3 + max(1, n // 2)) if sharded else slice(0, n) for n in shape)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("rank", "pad"), [(1, 0), (1, 7), (2, 0), (8, 0), (8, 8)])
@pytest.mark.parametrize("space", ["lowrank", "lora"])
def test_factors_of_all_matrices_at_once(space, rank, pad, sharded):
    made, layout, specs = many(space, rank)
    means = {t.name: random(t.shape, i) for i, t in enumerate((*layout.tensors, *layout.frozen))}
    there = {name: mean.cuda() for name, mean in means.items()}
    members = (*(Member(i, i * 97, 1 - 2 * (i % 2)) for i in range(29)), Member(29, LAST, 1))
    slots = []
    for s in specs:
        rows, columns = cut_of(s.shape, sharded)
        a = torch.full((32, 1, rank + pad, columns.stop - columns.start), 7.0, dtype=torch.bfloat16, device="cuda")
        b = torch.full((32, 1, rows.stop - rows.start, rank + pad), 7.0, dtype=torch.bfloat16, device="cuda")
        slots.append(spaces.Slots(s.name, (rows, columns), a[:, 0, :rank], b[:, 0, :, :rank]))
    write = made.writer(layout, there.__getitem__, slots)
    for generation in (3, LAST):
        plan = Plan(generation, 0.01, members)
        write(plan, members)
        for s in slots:
            want = made.adapter(layout, s.module, means.__getitem__, plan, members, s.slices)
            assert same(s.a[:30], want.a) and same(s.b[:30], want.b), s.module
            assert bool((s.a[30:] == 7).all()) and bool((s.b[30:] == 7).all())


@pytest.mark.parametrize("memory", [1, 1 << 25], ids=["one at a time", "all"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 8])
def test_moves_of_all_matrices_at_once(monkeypatch, rank, sharded, memory):
    """Compare with each whole matrix alone: shards must have the same bits."""
    monkeypatch.setattr(spaces.lowrank, "_ROOM", memory)
    made, layout, specs = many("lowrank", rank)
    kept = {s.name: [random(s.shape, i).cuda(), random(s.shape, 50 + i).cuda()] for i, s in enumerate(specs)}
    served = {s.name: torch.zeros(s.shape, dtype=torch.bfloat16, device="cuda") for s in specs}
    alone = {name: master.clone() for name, (master, _) in kept.items()}
    cuts = {s.name: cut_of(s.shape, sharded) for s in specs}
    move = made.mover(layout, [
        spaces.MeanPart(n, cut, kept[n][0][cut], kept[n][1][cut], served[n][cut]) for n, cut in cuts.items()
    ])  # fmt: skip
    for up in (update(30, decay=0.125), update(29), update(30)):
        move(up)
        for name, cut in cuts.items():
            whole = tuple(slice(0, n) for n in alone[name].shape)
            made.accumulate(layout, alone[name], name, whole, up, kept[name][1])
            assert same(kept[name][0][cut], alone[name][cut]), name
            assert same(served[name][cut], alone[name][cut].bfloat16())
            outside = torch.ones(alone[name].shape, dtype=torch.bool, device="cuda")
            outside[cut] = False
            assert not served[name][outside].any()


@pytest.mark.parametrize("dtype", BITS)
def test_dense_members_are_written_to_served_weights(dtype):
    made, layout = make("full", shape=SHAPE)
    plan = Plan(3, 0.01, (Member(0, LAST, -1),))
    part = (slice(5, 500), slice(16, 760))
    for member in (*plan.members, MEAN):
        master = random(SHAPE).cuda()
        served = torch.zeros(SHAPE, dtype=dtype, device="cuda")
        made.perturbed(layout, NAME, master, plan, member, None, served)
        want = made.perturbed(layout, NAME, random(SHAPE), plan, member)
        assert same(served, want.to(dtype))
        served.zero_()
        made.perturbed(layout, NAME, master[part], plan, member, part, served[part])
        assert same(served[part], want[part].to(dtype)) and not served[:5].any() and not served[:, :16].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "slices"), PARTS)
def test_hash_sums(in_torch, shape, slices, dtype):
    size = tuple(b - a for a, b in noise.bounds_of(shape, slices))
    tensor = random(size).to(dtype)
    want = hash.tensor_sum(tensor, shape, slices)
    assert (hash.tensor_sum(tensor.cuda(), shape, slices) - want) % (1 << 64) == 0
    assert (in_torch(hash.tensor_sum, tensor.cuda(), shape, slices) - want) % (1 << 64) == 0
