# SPDX-License-Identifier: Apache-2.0
"""Many matrices in a few launches get the same bits as each alone, and nothing else is written."""

from dataclasses import replace

import pytest
import torch
from number_checks import BITS, LAST, cases, count_launches, ordered, random, same, update

from evoalign import noise, spaces
from evoalign.config import from_dict
from evoalign.errors import ConfigError, ModelError
from evoalign.spaces import Lora, LowRank, MeanPart, Slots
from evoalign.spaces.base import Adapter
from evoalign.spaces.steering import Steering
from evoalign.testing.spaces import SPECS
from evoalign.types import MEAN, EvolvedTensor, Member, Plan, TensorSpec, Update

SHAPES = {"cpu": [(21, 37), (8, 64), (21, 37), (8, 64), (9, 530)],
          "cuda": [(512, 768), (515, 776), (512, 768), (1200, 64), (64, 1200), (515, 776), (1, 33)]}  # fmt: skip
MEMBERS = {"cpu": (Member(0, 7, 1), Member(1, 7, -1), Member(2, LAST, 1), MEAN),
           "cuda": (*(Member(i, i * 97, 1 - 2 * (i % 2)) for i in range(29)), Member(29, LAST, 1), MEAN)}  # fmt: skip
CUTS = {
    "whole": lambda r, c: (slice(0, r), slice(0, c)),
    "rows": lambda r, c: (slice(r // 4, r // 2), slice(0, c)),
    "columns": lambda r, c: (slice(0, r), slice(c // 2, c)),
    "both": lambda r, c: tuple(slice(n // 3, n // 3 + max(1, n // 2)) for n in (r, c)),
}
VARIANTS = ("lowrank", "lora", "lora, ab")


def specs_of(device, rank=1):
    specs = [TensorSpec(f"layers.{i}.w.weight", s, "linear", i // 2, 0.1 * (1 + i // 2))
             for i, s in enumerate(SHAPES[device])]  # fmt: skip
    return [s for s in specs if rank <= min(s.shape)]


def make(variant, rank, dtype=torch.bfloat16, specs=None):
    name, _, evolve = variant.partition(", ")
    made = spaces.create(from_dict({
        "seed": 7, "space": name, "es": {"noise_multiplier": 0.3}, "lowrank": {"rank": rank},
        "lora": {"rank": rank, "evolve": evolve or "b", "alpha": 5},
    }))  # fmt: skip
    return made, made.layout(specs or specs_of("cpu"), dtype)


def cut_of(kind, specs):
    return {s.name: CUTS[kind](*s.shape) for s in specs}


WHOLE = cut_of("whole", specs_of("cpu"))


def slots_of(layout, cut, pad, rank, count=6, device="cpu"):
    """Return slots as in an engine: more than members, of a padded rank, filled with 7."""
    for name, (rows, columns) in cut.items():
        a = torch.full((count, 1, rank + pad, columns.stop - columns.start), 7.0, dtype=layout.torch_dtype)
        b = torch.full((count, 1, rows.stop - rows.start, rank + pad), 7.0, dtype=layout.torch_dtype)
        yield Slots(name, (rows, columns), a.to(device)[:, 0, :rank], b.to(device)[:, 0, :, :rank])


def means_of(layout):
    return {t.name: random(t.shape, i) for i, t in enumerate((*layout.tensors, *layout.frozen))}


@pytest.mark.first("cpu-lora-whole-1-0", "cuda")
@pytest.mark.parametrize(
    ("device", "variant", "cut", "rank", "pad", "dtype"),
    cases(
        [(variant, *case) for variant in VARIANTS for case in [
            ("whole", 1, 0, torch.bfloat16), ("rows", 1, 7, torch.float32), ("columns", 2, 0, torch.bfloat16),
            ("columns", 8, 0, torch.float16), ("rows", 3, 5, torch.bfloat16)]],
        [(variant, cut, *rank, torch.bfloat16) for variant in VARIANTS for cut in ("whole", "both")
         for rank in ((1, 0), (1, 7), (2, 0), (8, 0), (8, 8))],
    ),
)  # fmt: skip
def test_writer_gives_all_matrices_the_bits_of_each_alone(monkeypatch, device, variant, cut, rank, pad, dtype):
    """On a GPU they are those of each alone on the CPU."""
    from evoalign.kernels import noise as kernel

    specs = specs_of(device, rank)
    space, layout = make(variant, rank, dtype, specs)
    means, everyone = means_of(layout), MEMBERS[device]
    there = {name: mean.to(device) for name, mean in means.items()}
    slots = list(slots_of(layout, cut_of(cut, specs), pad, rank, len(everyone) + 2, device))
    launches = count_launches(monkeypatch, kernel, "_scaled") if device == "cpu" else None
    write = space.writer(layout, there.__getitem__, slots)
    for generation, members in ((3, everyone[1:]), (LAST, everyone)):
        plan = Plan(generation, 0.01, members)
        if launches is not None:
            del launches[:]
        write(plan, members)
        assert launches is None or 0 < len(launches) <= 2 * len({spec.shape for spec in specs})
        for s in slots:
            want = space.adapter(layout, s.module, means.__getitem__, plan, members, s.slices)
            assert same(s.a[: len(members)], want.a.expand(len(members), -1, -1)) and same(s.b[: len(members)], want.b)
    for factor in (factor for s in slots for factor in (s.a, s.b)):
        assert bool((factor[len(everyone) :] == 7).all())
        whole = torch.tensor([], dtype=factor.dtype, device=device).set_(factor.untyped_storage())
        assert int((whole != 7).sum()) <= len(everyone) * factor[0].numel()


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
    means, slots, plan = means_of(layout), list(slots_of(layout, WHOLE, 0, 2)), Plan(0, 0.0, (MEAN,))
    space.writer(layout, means.__getitem__, slots)(plan, (MEAN,))
    for s in slots:
        want = space.adapter(layout, s.module, means.__getitem__, plan, (MEAN,), s.slices)
        for factor, own in zip((s.a, s.b), (None, None) if want is None else (want.a, want.b), strict=True):
            assert same(factor[:1], torch.zeros_like(factor[:1]) if own is None else own)
            assert bool((factor[1:] == 7).all())


def test_tensors_are_found_by_name(monkeypatch):
    """A mixture has tens of thousands: to search for each in a list of all takes minutes."""
    space, layout = make("lora", 2)
    slots, plan = list(slots_of(layout, WHOLE, 0, 2)), Plan(3, 0.01, MEMBERS["cpu"])

    def compared(self, other):
        pytest.fail(f"{self.name} was compared with {other.name}")

    monkeypatch.setattr(EvolvedTensor, "__eq__", compared)
    means = {name: space.start(layout, name, "cpu") for name in layout.by_name}
    space.writer(layout, means.__getitem__, slots)(plan, plan.members)
    assert all(space.adapter(layout, s.module, means.__getitem__, plan, plan.members).a.any() for s in slots)


@pytest.mark.parametrize("has_bias", [True, False])
def test_writer_writes_biases_or_zeros(has_bias):
    class Some(Steering):
        def adapter(self, *given):
            found = super().adapter(*given)
            return found if has_bias else replace(found, bias=None)

    space = (Steering if has_bias else Some)(from_dict({"space": "steering", "es": {"sigma": 0.3}}))
    layout, plan = space.layout(SPECS, torch.float32), Plan(1, 0.3, MEMBERS["cpu"])
    means = {t.name: torch.randn(t.shape) for t in layout.tensors} | {
        t.name: torch.zeros(t.shape) for t in layout.frozen
    }
    cut = cut_of("whole", [spec for spec in SPECS if spec.name in layout.modules])
    slots = [replace(s, bias=torch.full((5, s.b.shape[1]), 7.0)) for s in slots_of(layout, cut, 0, 1)]
    space.writer(layout, means.__getitem__, slots)(plan, plan.members)
    for s in slots:
        want = space.adapter(layout, s.module, means.__getitem__, plan, plan.members)
        assert torch.equal(s.bias[:4], want.bias if has_bias else torch.zeros_like(s.bias[:4]))
        assert not s.b[:4].any() and bool((s.bias[4:] == 7).all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_writer_calls_overridden_methods(variant):
    """A subclass with its own methods is called matrix by matrix."""
    made, layout = make(variant, 2)
    assert type(made) in (Lora, LowRank)

    class Still(type(made)):
        def adapter(self, layout, module, master, plan, members, slices=None, out=None):
            return Adapter(*(factor.fill_(5.0) for factor in out), self.scaling)

    slots = list(slots_of(layout, WHOLE, 0, 2))
    Still(made.config).writer(layout, means_of(layout).__getitem__, slots)(Plan(0, 0.1, MEMBERS["cpu"]), MEMBERS["cpu"])
    assert all(bool((s.a[:4] == 5).all()) and bool((s.b[:4] == 5).all()) for s in slots)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda out: None, ModelError, "no adapter for members"),
        (lambda out: Adapter(*out, 2.0), ConfigError, "scaling"),
    ],
)
def test_writer_refuses_missing_adapters_and_other_scalings(returned, error, message):
    class Wrong(LowRank):
        def adapter(self, layout, module, master, plan, members, slices=None, out=None):
            return returned(out)

    made, layout = make("lowrank", 2)
    write = Wrong(made.config).writer(layout, None, list(slots_of(layout, WHOLE, 0, 2)))
    with pytest.raises(error, match=message):
        write(Plan(0, 0.1, MEMBERS["cpu"]), MEMBERS["cpu"])


def parts_of(layout, cut, served, start, turned=False, device="cpu"):
    """Return parts of whole tensors, row-major or column-major in memory."""
    for i, (name, part) in enumerate(cut.items()):
        shape = layout[name].shape
        kept = [random(shape, i), random(shape, 100 + i) if start else None]
        kept.append(None if served is None else torch.zeros(shape, dtype=served))
        kept = [t if t is None else (t.T.contiguous().T if turned else t).to(device) for t in kept]
        yield MeanPart(name, part, *(None if t is None else t[part] for t in kept)), kept


@pytest.mark.last("rank 8", "whole, rank 1", "turned")
@pytest.mark.first("cuda", others="slow")
@pytest.mark.parametrize(
    ("device", "rank", "cut", "turned", "memory"),
    [
        pytest.param("cpu", 1, "whole", False, 1 << 25, id="whole, rank 1"),
        pytest.param("cpu", 2, "rows", False, 5000, id="rows, in two batches"),
        pytest.param("cpu", 8, "columns", False, 1, id="columns, one by one, rank 8"),
        pytest.param("cpu", 2, "columns", True, 1 << 25, id="turned columns"),
        *cases([], [(r, cut, False, m) for r in (1, 2, 8) for cut in ("whole", "both") for m in (1, 1 << 25)]),
    ],
)
def test_mover_gives_all_matrices_the_bits_of_each_alone(monkeypatch, device, rank, cut, turned, memory):
    """Each is the ordered sum on the CPU, and shards have the bits of the whole."""
    from evoalign.kernels import update as kernel

    monkeypatch.setattr(spaces.lowrank, "_ROOM", memory)
    specs = specs_of(device, rank)
    (space, layout), cut = make("lowrank", rank, specs=specs), cut_of(cut, specs)
    mine = list(parts_of(layout, cut, torch.bfloat16, True, turned, device))
    launches = count_launches(monkeypatch, kernel, "_product") if device == "cpu" else None
    move = space.mover(layout, [part for part, _ in mine])
    start = {p.name: kept[1].cpu().clone() for p, kept in mine}
    want = {p.name: kept[0].cpu().clone() for p, kept in mine}
    cpu = [update(3, decay=0.125), update(4, antithetic=True)]
    for up in cpu if device == "cpu" else [update(30, decay=0.125), update(29), update(30)]:
        if launches is not None:
            del launches[:]
        move(up)
        if launches is not None:
            assert len(launches) == len(cut) if memory == 1 else 0 < len(launches) < len(cut)
        for part, kept in mine:
            place = cut[part.name]
            want[part.name][place] = ordered(space, layout, part.name, up, want[part.name], start[part.name])[place]
            assert same(kept[0], want[part.name]) and same(part.served, part.master.bfloat16())
            untouched = torch.ones(kept[0].shape, dtype=torch.bool)
            untouched[place] = False
            assert not kept[2].cpu()[untouched].any()


@pytest.mark.slow
@pytest.mark.last("0.0-", "None", "served1")
@pytest.mark.parametrize("served", [None, *BITS])
@pytest.mark.parametrize("decay", [0.0, 0.125])
def test_accumulate_equals_the_reference_move(served, decay):
    space, layout = make("lowrank", 3)
    up, rows = update(4, decay=decay), cut_of("rows", specs_of("cpu"))
    mine, alone = (list(parts_of(layout, rows, served, decay != 0)) for _ in range(2))
    space.mover(layout, [part for part, _ in mine])(up)
    for (_, kept), (part, other) in zip(mine, alone, strict=True):
        space.accumulate(layout, part.master, part.name, part.slices, up, part.start, None, part.served)
        for got, want in zip(kept, other, strict=True):
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
    still = [TensorSpec(s.name, s.shape, s.kind, s.layer, 0.0 if s.layer == 1 else 0.1) for s in specs_of("cpu")]
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
