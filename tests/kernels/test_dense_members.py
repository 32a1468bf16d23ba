# SPDX-License-Identifier: Apache-2.0
"""Dense members that are written with a few launches get the bits of `Space.perturbed`, tensor by tensor."""

import pytest
import torch
from families import Bench, build, make_config
from number_checks import LAST, cases, count_launches, in_torch, random, same
from transformers import AutoModelForCausalLM

from evoalign import kernels, spaces
from evoalign.config import from_dict
from evoalign.engines.master import Master, whole
from evoalign.engines.specs import specs_of
from evoalign.engines.transformers.vectors import Vectors
from evoalign.spaces.base import Space
from evoalign.spaces.dense import DenseSlots, dense_writer
from evoalign.types import MEAN, Member, Plan, Request, Sampling, TensorSpec, population

__all__ = ["in_torch"]  # a fixture

SHAPES = {
    "cpu": [("norm", (21,)), ("linear", (9, 37)), ("norm", (21,)), ("bias", (12,)), ("linear", (9, 37)), ("bias", (7,)),
            ("norm", (16,)), ("embedding", (5, 64)), ("linear", (2, 3, 16))],
    "cuda": [("norm", (2048,)), ("linear", (515, 776)), ("norm", (2048,)), ("bias", (129,)), ("linear", (515, 776)),
             ("bias", (300,)), ("norm", (16,)), ("embedding", (3000, 64)), ("linear", (4, 33, 96))],
}  # fmt: skip
PAIRS = {"cpu": population(4, antithetic=True), "cuda": population(12, antithetic=True)}
CUTS = {
    "whole": lambda n: slice(0, n),
    "half": lambda n: slice(n // 4, n // 4 + max(1, n // 2)),
}


def make(space, dtype, device):
    specs = [TensorSpec(f"layers.{i}.self_attn.w{i}.{'weight' if kind != 'bias' else 'bias'}", shape, kind, i // 2, 0.1)
             for i, (kind, shape) in enumerate(SHAPES[device])]  # fmt: skip
    made = spaces.create(from_dict({"seed": 7, "space": space, "es": {"noise_multiplier": 0.3}}))
    return made, made.layout(specs, dtype)


def slots_of(layout, dtype, cut, count, device):
    """Return slots with gaps between rows and between members, filled with 7."""
    for i, t in enumerate(layout.tensors):
        part = tuple(CUTS[cut](n) for n in t.shape)
        sizes = [s.stop - s.start for s in part]
        room = torch.full((count, *sizes[:-1], sizes[-1] + 3 * (len(t.shape) == 1)), 7.0, dtype=dtype, device=device)
        yield DenseSlots(t.name, part, random(t.shape, i).to(device)[part], room[..., : sizes[-1]]), room


@pytest.mark.parametrize(
    ("device", "space", "dtype", "cut"),
    cases(
        [("full", torch.float32, "whole"), ("full", torch.bfloat16, "half"), ("norms", torch.float32, "half"),
         ("norms", torch.bfloat16, "whole"), ("full", torch.float16, "whole")],
        [(space, dtype, cut) for space in ("full", "norms") for dtype in (torch.float32, torch.bfloat16, torch.float16)
         for cut in CUTS],
    ),
)  # fmt: skip
def test_dense_writer_gives_all_tensors_the_bits_of_perturbed(monkeypatch, in_torch, device, space, dtype, cut):
    """On a GPU they are those of plain torch on the CPU, with pairs, the mean and the last counter word."""
    from evoalign.kernels import noise as kernel

    space, layout = make(space, dtype, device)
    assert len(layout.tensors) >= (5 if space.name == "norms" or dtype != torch.float32 else len(SHAPES[device]))
    everyone = (*PAIRS[device], MEAN, Member(30, LAST, -1))
    slots, rooms = zip(*slots_of(layout, dtype, cut, len(everyone) + 2, device), strict=True)
    write = dense_writer(space, layout, slots)
    assert write is not None
    launches = count_launches(monkeypatch, kernel, "_scaled")
    for generation, members in ((3, everyone[:2]), (LAST, everyone)):
        del launches[:]
        plan = Plan(generation, 0.01, members)
        write(plan, members)
        assert 0 < len(launches) < len(slots)
        for s in slots:
            for i, m in enumerate(members):
                want = in_torch(space.perturbed, layout, s.name, s.mean.cpu(), plan, m, s.slices).to(dtype)
                assert same(s.out[i], want), (s.name, m)
    for s, room in zip(slots, rooms, strict=True):
        assert bool((room[len(everyone) :] == 7).all()) and bool((room[..., s.out.shape[-1] :] == 7).all())


def test_dense_writer_keeps_the_sign_of_a_zero_of_the_mean():
    space, layout = make("norms", torch.float32, "cpu")
    slots = [s for s, _ in slots_of(layout, torch.float32, "whole", 2, "cpu")]
    for s in slots:
        s.mean.fill_(-0.0)
    dense_writer(space, layout, slots)(Plan(1, 0.1, (MEAN,)), (MEAN,))
    assert all(same(s.out[0], s.mean) for s in slots)


@pytest.mark.parametrize("method", ["perturbed", "noise"])
def test_dense_writer_leaves_overridden_methods_to_be_called(method):
    made, layout = make("norms", torch.float32, "cpu")
    own = type("Own", (type(made),), {"__module__": "own", method: lambda self, *arguments, **options: None})
    slots = [s for s, _ in slots_of(layout, torch.float32, "whole", 2, "cpu")]
    assert dense_writer(own(made.config), layout, slots) is None
    assert dense_writer(made, layout, []) is None


def test_dense_writer_is_for_devices_with_kernels(monkeypatch):
    made, layout = make("norms", torch.float32, "cpu")
    slots = [s for s, _ in slots_of(layout, torch.float32, "whole", 2, "cpu")]
    monkeypatch.setattr(kernels, "available", lambda device: False)
    assert dense_writer(made, layout, slots) is None


def test_master_writes_a_member_without_a_call_per_tensor(monkeypatch, in_torch):
    """Restoring is a copy of the mean. With the mean in host memory each tensor is written by itself."""
    space, layout = make("full", torch.bfloat16, "cpu")
    served = {t.name: random(t.shape, i).bfloat16() for i, t in enumerate(layout.tensors)}
    mean, plan = Master(space, layout, None, False, whole(served), torch.device("cpu")), Plan(4, 0.1, PAIRS["cpu"])
    for part in mean.moving:
        part.master.add_(1e-4)
    for member in (*plan.members[:2], None):
        want = {p.name: p.master if member is None else in_torch(
            space.perturbed, layout, p.name, p.master, plan, member) for p in mean.moving}  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(Space, "perturbed", lambda *arguments: pytest.fail("tensor by tensor"))
            mean.write(plan, member)
        assert all(same(served[name], t.bfloat16()) for name, t in want.items())
    assert Master(space, layout, None, False, whole(served), torch.device("meta"))._write is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_vectors_of_all_members_are_written_in_few_launches(monkeypatch, in_torch, family, tmp_path):
    from evoalign.kernels import noise as kernel

    model = AutoModelForCausalLM.from_pretrained(build(family, tmp_path / family), dtype=torch.bfloat16)
    space = spaces.create(from_dict({"seed": 7, "space": "norms", "es": {"sigma": 0.1}}))
    layout = space.layout(specs_of(model, lambda tensor: 0.1), torch.bfloat16)
    means = {t.name: random(t.shape, i) for i, t in enumerate(layout.tensors)}
    vectors = Vectors(model, list(means), 5)
    vectors.reset()
    plan = Plan(3, 0.1, (*population(3), MEAN))
    launches = count_launches(monkeypatch, kernel, "_scaled")
    vectors.writer(space, layout, means.__getitem__)(plan, plan.members)
    assert 0 < len(launches) < len(means) / 2
    parameters = dict(model.named_parameters())
    for name, mean in means.items():
        rows = vectors._rows[name]
        for row, member in zip(rows[1:], plan.members, strict=False):
            assert same(row, in_torch(space.perturbed, layout, name, mean, plan, member).bfloat16())
        assert all(same(rows[i], parameters[name].detach()) for i in (0, 5))


@pytest.mark.parametrize(
    ("device", "space", "dtype"),
    cases([], [(space, dtype) for space in ("full", "norms") for dtype in ("float32", "bfloat16")]),
)  # fmt: skip
def test_an_engine_serves_the_bits_of_perturbed(device, space, dtype, tmp_path):
    tree = {"engine": {"device": device, "decoder": "static"}, "model": {"dtype": dtype}}
    with Bench(make_config(build("qwen2", tmp_path / "m"), space, **tree)) as bench:
        bench.move()
        plan, mean, served = bench.plan(), bench.engine.mean, dict(bench.model.named_parameters())
        for member in plan.members[:2]:
            mean.write(plan, member)
            for p in mean.moving:
                want = bench.space.perturbed(bench.layout, p.name, p.master.cpu(), plan, member)
                assert same(served[p.name].detach(), want.to(served[p.name].dtype))
        mean.write(plan, None)
        if space == "norms":
            bench.ask(plan, [Request(0, (5, 6, 7), Sampling(2))])
            for name, rows in bench.engine._static._memory.factors.vectors._rows.items():
                for row, member in zip(rows[1:], plan.members, strict=False):
                    want = bench.space.perturbed(bench.layout, name, mean[name].cpu(), plan, member)
                    assert same(row, want.to(row.dtype))
