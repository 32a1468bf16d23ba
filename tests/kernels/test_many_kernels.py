# SPDX-License-Identifier: Apache-2.0
"""Many matrices in a few launches get the same bits as each alone, and nothing else is written."""

import pytest
import torch
from number_checks import BITS, ordered, random, same, update

from evoalign import noise, spaces
from evoalign.config import from_dict
from evoalign.errors import ConfigError, ModelError
from evoalign.spaces import Lora, LowRank, MeanPart, Slots
from evoalign.spaces.base import Adapter
from evoalign.types import MEAN, Member, Plan, TensorSpec, Update

SHAPES = [(21, 37), (8, 64), (21, 37), (8, 64), (9, 530)]
SPECS = [TensorSpec(f"layers.{i}.w.weight", s, "linear", i // 2, 0.1 * (1 + i // 2)) for i, s in enumerate(SHAPES)]
WHOLE = {s.name: (slice(0, s.shape[0]), slice(0, s.shape[1])) for s in SPECS}
ROWS = {n: (slice(r.stop // 4, r.stop // 2), c) for n, (r, c) in WHOLE.items()}
COLUMNS = {n: (r, slice(c.stop // 2, c.stop)) for n, (r, c) in WHOLE.items()}
MEMBERS = (Member(0, 7, 1), Member(1, 7, -1), Member(2, 2**32 - 1, 1), MEAN)
VARIANTS = ("lowrank", "lora", "lora, ab")


def make(variant, rank, dtype=torch.bfloat16, specs=SPECS):
    name, _, evolve = variant.partition(", ")
    made = spaces.create(from_dict({
        "seed": 7, "space": name, "es": {"noise_multiplier": 0.3}, "lowrank": {"rank": rank},
        "lora": {"rank": rank, "evolve": evolve or "b", "alpha": 5},
    }))  # fmt: skip
    return made, made.layout(specs, dtype)


def slots_of(layout, cut, pad, rank, count=6):
    """Return slots as in an engine: more than members, of a padded rank, filled with 7."""
    for name, (rows, columns) in cut.items():
        a = torch.full((count, 1, rank + pad, columns.stop - columns.start), 7.0, dtype=layout.torch_dtype)
        b = torch.full((count, 1, rows.stop - rows.start, rank + pad), 7.0, dtype=layout.torch_dtype)
        yield Slots(name, (rows, columns), a[:, 0, :rank], b[:, 0, :, :rank])


def count_launches(monkeypatch, module, kernel):
    """Return a list to which each launch of a kernel is added."""
    launches, inner = [], getattr(module, kernel)

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return inner[grid]

    monkeypatch.setattr(module, kernel, Counted())
    return launches


@pytest.mark.first("lora-1-0", others="long")
@pytest.mark.parametrize(
    ("rank", "pad", "cut", "dtype"),
    [(1, 0, "whole", torch.bfloat16), (1, 7, "rows", torch.float32), (2, 0, "columns", torch.bfloat16),
     (8, 0, "columns", torch.float16), (3, 5, "rows", torch.bfloat16)],
)  # fmt: skip
@pytest.mark.parametrize("variant", VARIANTS)
def test_writer_gives_all_matrices_the_bits_of_each_alone(monkeypatch, variant, cut, rank, pad, dtype):
    from evoalign.kernels import noise as kernel

    space, layout = make(variant, rank, dtype)
    cut = {"whole": WHOLE, "rows": ROWS, "columns": COLUMNS}[cut]
    means = {t.name: random(t.shape, i) for i, t in enumerate((*layout.tensors, *layout.frozen))}
    slots = list(slots_of(layout, cut, pad, rank))
    launches = count_launches(monkeypatch, kernel, "_scaled")
    write = space.writer(layout, means.__getitem__, slots)
    for generation, members in ((3, MEMBERS[1:]), (2**32 - 1, MEMBERS)):
        plan = Plan(generation, 0.01, members)
        del launches[:]
        write(plan, members)
        assert 0 < len(launches) < len(slots) * (2 if variant != "lora" else 1)
        for s in slots:
            want = space.adapter(layout, s.module, means.__getitem__, plan, members, s.slices)
            assert same(s.a[: len(members)], want.a.expand(len(members), -1, -1)) and same(s.b[: len(members)], want.b)
    for s in slots:
        assert bool((s.a[len(MEMBERS) :] == 7).all()) and bool((s.b[len(MEMBERS) :] == 7).all())
        for factor in (s.a, s.b):
            stored = factor.untyped_storage()
            whole = torch.tensor([], dtype=factor.dtype).set_(stored)
            assert int((whole != 7).sum()) <= len(MEMBERS) * factor[0].numel()


@pytest.mark.slow
def test_jobs_share_a_launch_for_parts_at_other_offsets():
    """Parts with the same strides differ in where a Philox call and the next row begin."""
    from evoalign.kernels.noise import Job, Jobs

    places = [((3, 37), 5), ((3, 40), 8), ((3, 40), 5), ((3, 48), 8), ((3, 37), 6), ((3, 40), 16)]
    jobs = [
        Job(noise.key(3, "noise", str(i)), shape, [(0, 3), (first, first + 16)], torch.zeros(2, 3, 16))
        for i, (shape, first) in enumerate(places)
    ]
    Jobs(jobs).draw(noise.table(), 4, [1, 6], torch.ones(len(jobs), 2, dtype=torch.float64))
    for job, (shape, first) in zip(jobs, places, strict=True):
        assert same(job.out, noise._normals(job.key, shape, 4, [1, 6], (slice(0, 3), slice(first, first + 16)), "cpu"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_writer_writes_the_mean(variant):
    space, layout = make(variant, 2)
    means = {t.name: random(t.shape, i) for i, t in enumerate((*layout.tensors, *layout.frozen))}
    slots = list(slots_of(layout, WHOLE, 0, 2))
    space.writer(layout, means.__getitem__, slots)(Plan(0, 0.0, (MEAN,)), (MEAN,))
    for s in slots:
        want = space.adapter(layout, s.module, means.__getitem__, Plan(0, 0.0, (MEAN,)), (MEAN,), s.slices)
        for factor, own in zip((s.a, s.b), (None, None) if want is None else (want.a, want.b), strict=True):
            assert same(factor[:1], torch.zeros_like(factor[:1]) if own is None else own)
            assert bool((factor[1:] == 7).all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_writer_calls_overridden_methods(variant):
    """A subclass with its own methods is called matrix by matrix."""
    base = type(make(variant, 1)[0])
    assert base in (Lora, LowRank)

    class Still(base):
        def adapter(self, layout, module, master, plan, members, slices=None, out=None):
            return Adapter(*(factor.fill_(5.0) for factor in out), self.scaling)

    _, layout = make(variant, 2)
    space = Still(make(variant, 2)[0].config)
    slots = list(slots_of(layout, WHOLE, 0, 2))
    means = {t.name: random(t.shape) for t in (*layout.tensors, *layout.frozen)}
    space.writer(layout, means.__getitem__, slots)(Plan(0, 0.1, MEMBERS), MEMBERS)
    assert all(bool((s.a[:4] == 5).all()) and bool((s.b[:4] == 5).all()) for s in slots)


def test_writer_refuses_missing_adapters_and_other_scalings():
    class Mute(LowRank):
        def adapter(self, layout, module, master, plan, members, slices=None, out=None):
            return None

    class Loud(LowRank):
        def adapter(self, layout, module, master, plan, members, slices=None, out=None):
            return Adapter(*out, 2.0)

    made, layout = make("lowrank", 2)
    slots = list(slots_of(layout, WHOLE, 0, 2))
    for space, error, said in ((Mute, ModelError, "no adapter for members"), (Loud, ConfigError, "scaling")):
        write = space(made.config).writer(layout, None, slots)
        with pytest.raises(error, match=said):
            write(Plan(0, 0.1, MEMBERS), MEMBERS)


def parts_of(layout, cut, served, start, turned=False):
    """Return parts of whole tensors, row-major or column-major in memory."""
    for i, (name, part) in enumerate(cut.items()):
        shape = layout[name].shape
        kept = [random(shape, i), random(shape, 100 + i) if start else None, None]
        kept[2] = None if served is None else torch.zeros(shape, dtype=served)
        kept = [t if t is None or not turned else t.T.contiguous().T for t in kept]
        yield MeanPart(name, part, *(None if t is None else t[part] for t in kept)), kept


def moved_alone(space, layout, cut, up, served, start):
    found = []
    for part, kept in parts_of(layout, cut, served, start):
        space.accumulate(layout, part.master, part.name, part.slices, up, part.start, None, part.served)
        found.append(kept)
    return found


@pytest.mark.slow
@pytest.mark.last("rank 8", "whole", "turned")
@pytest.mark.parametrize(
    ("rank", "cut", "turned", "memory"),
    [(1, WHOLE, False, 1 << 25), (2, ROWS, False, 5000), (8, COLUMNS, False, 1), (2, COLUMNS, True, 1 << 25)],
    ids=["whole, rank 1", "rows, in two batches", "columns, one by one, rank 8", "turned columns"],
)
def test_mover_gives_all_matrices_the_bits_of_each_alone(monkeypatch, rank, cut, turned, memory):
    from evoalign.kernels import update as kernel

    monkeypatch.setattr(spaces.lowrank, "_ROOM", memory)
    space, layout = make("lowrank", rank)
    ups = [update(3, decay=0.125), update(4, antithetic=True)]
    mine = list(parts_of(layout, cut, torch.bfloat16, True, turned))
    launches = count_launches(monkeypatch, kernel, "_product")
    move = space.mover(layout, [part for part, _ in mine])
    start = {p.name: kept[1].clone() for p, kept in mine}
    want = {p.name: kept[0].clone() for p, kept in mine}
    for up in ups:
        del launches[:]
        move(up)
        assert len(launches) == len(cut) if memory == 1 else 0 < len(launches) < len(cut)
        for part, kept in mine:
            place = cut[part.name]
            want[part.name][place] = ordered(space, layout, part.name, up, want[part.name], start[part.name])[place]
            assert same(kept[0], want[part.name]) and same(part.served, part.master.bfloat16())
            untouched = torch.ones(kept[0].shape, dtype=torch.bool)
            untouched[place] = False
            assert not kept[2][untouched].any()


@pytest.mark.slow
@pytest.mark.last("0.0-", "None", "served1")
@pytest.mark.parametrize("served", [None, *BITS])
@pytest.mark.parametrize("decay", [0.0, 0.125])
def test_accumulate_equals_the_reference_move(served, decay):
    space, layout = make("lowrank", 3)
    up, mine = update(4, decay=decay), list(parts_of(layout, ROWS, served, decay != 0))
    space.mover(layout, [part for part, _ in mine])(up)
    for (_, kept), alone in zip(mine, moved_alone(space, layout, ROWS, up, served, decay != 0), strict=True):
        for got, want in zip(kept, alone, strict=True):
            assert got is want is None or same(got, want)


@pytest.mark.slow
def test_mover_skips_zero_coefficients_and_refuses_decay_without_start():
    space, layout = make("lowrank", 2)
    mine = list(parts_of(layout, WHOLE, None, True))
    move = space.mover(layout, [p for p, _ in mine])
    before = [kept[0].clone() for _, kept in mine]
    up = update(3)
    for nothing in (Update(0, 0, up.members, (0.0,) * 3, 0.01, 0.5, 0.125), update(3, sigma=0.0)):
        move(nothing)
        assert all(same(kept[0], b) for (_, kept), b in zip(mine, before, strict=True))
    move(update(4, sigma=0.0, decay=0.25))  # no noise has no weight, and the decay stays
    for (_, kept), b in zip(mine, before, strict=True):
        assert same(kept[0], b - (b - kept[1]) * 0.25)
    bare = space.mover(layout, [MeanPart(p.name, p.slices, p.master) for p, _ in mine])
    with pytest.raises(ConfigError, match=r"decay.*0\.5"):
        bare(update(3, decay=0.5))


@pytest.mark.slow
def test_mover_leaves_layers_of_scale_zero_unchanged():
    """A layer of scale 0 among others."""
    still = [TensorSpec(s.name, s.shape, s.kind, s.layer, 0.0 if s.layer == 1 else 0.1) for s in SPECS]
    space, layout = make("lowrank", 1, specs=still)
    mine = list(parts_of(layout, WHOLE, None, False))
    space.mover(layout, [p for p, _ in mine])(update(4))
    for i, (part, kept) in enumerate(mine):
        assert same(kept[0], random(part.master.shape, i)) == (still[i].layer == 1)


def test_mover_exists_only_on_devices_with_kernels(monkeypatch):
    space, layout = make("lowrank", 1)
    parts = [p for p, _ in parts_of(layout, WHOLE, None, False)]
    assert space.mover(layout, parts) and space.mover(layout, []) is None

    class Own(LowRank):
        def noise(self, *args):
            return super().noise(*args)

    assert Own(space.config).mover(layout, parts) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert space.mover(layout, parts) is None
    assert noise.bounds_of((3, 4), None) == [(0, 3), (0, 4)]
