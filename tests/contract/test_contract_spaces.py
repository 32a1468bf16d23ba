# SPDX-License-Identifier: Apache-2.0
"""The contract tests of spaces pass on all registered spaces, and fail on broken ones."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from plain_adapters import adapter

from evoalign.config import from_dict
from evoalign.spaces import SPACES, Full, Lora, LowRank, create
from evoalign.testing import spaces as contract

VARIANTS = {
    "lora": {},
    "lora, ab": {"lora": {"rank": 3, "evolve": "ab"}},
    "lora, some modules": {"lora": {"rank": 2, "alpha": 5, "target_layers": [1], "target_modules": ["q_proj"]}},
    "lowrank": {},
    "lowrank, rank 3": {"lowrank": {"rank": 3}},
    "full": {},
    "norms": {},
    "singular": {"space": {"name": "singular", "share": 0.7}},
    "subspace": {"space": {"name": "subspace", "dimension": 40}, "lora": {"rank": 2}},
    "steering": {},
    "steering, layers": {"lora": {"target_layers": [1]}},
    "full, exclude": {"full": {"exclude": ["embed", "norm"]}},
}
WIDTHS = [{"sigma": 0.01}, {"noise_multiplier": 0.3}]


@cache
def adapter_of_specs():
    linear = {s.name: s.shape for s in contract.SPECS if s.kind == "linear"}
    return adapter(Path(tempfile.mkdtemp()), linear)


def config(variant, width=WIDTHS[0]):
    model = {"model": {"name": str(adapter_of_specs()), "base": "tiny"}} if variant == "singular" else {}
    return from_dict({**model, "seed": 5, "space": variant.partition(",")[0], "es": dict(width), **VARIANTS[variant]})


def test_every_registered_space_is_tested():
    assert {v.partition(",")[0] for v in VARIANTS} == set(SPACES)


@pytest.mark.first("sigma-torch.float32")
@pytest.mark.last("bfloat16")
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS, ids=lambda w: next(iter(w)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_space_passes_the_check(variant, width, dtype, check):
    space = create(config(variant, width))
    check(space, space.layout(contract.SPECS, dtype), contract.SPECS)


# --- broken spaces: each has one method in place of the space's ---


def stream(self, layout, name, generation, members, slices=None, device="cpu"):
    """Draw from one random stream: noise depends on the other members."""
    torch.manual_seed(generation)
    whole = torch.randn(len(members), *layout[name].shape)
    return whole if slices is None else whole[(slice(None), *slices)]


def same_seed(self, layout, name, *args):
    """Draw equal noise for equal shapes, the published code's first form."""
    return Full.noise(self, layout, next(t.name for t in layout.tensors if t.shape == layout[name].shape), *args)


def other_slice(self, layout, name, generation, members, slices=None, device="cpu"):
    """Draw a slice as if it were a tensor."""
    whole = Full.noise(self, layout, name, generation, members)
    if slices is None:
        return whole
    sizes = [s.stop - s.start for s in slices]
    return whole.reshape(len(members), -1)[:, : torch.Size(sizes).numel()].reshape(-1, *sizes)


def too_wide(self, *args):
    return Full.noise(self, *args) * 1.1


def adapters_of(change):
    """Return an `adapter` whose B is changed by a function of B and the members."""

    def adapter(self, layout, module, master, plan, members):
        made = LowRank.adapter(self, layout, module, master, plan, members)
        return made and type(made)(made.a, change(made.b, members), made.scaling)

    return adapter


def no_signs(b, members):
    return b * torch.tensor([float(m.sign) for m in members])[:, None, None].to(b.dtype)


def narrow(self, layout, module, master, plan, members):
    """Return members that are narrower than the layout says."""
    return Lora.adapter(self, layout, module, master, replace(plan, sigma=plan.sigma / 2), members)


def step_over_sigma(self, layout, master, name, slices, update, *more):
    """Divide the step by sigma once more."""
    before = master.clone()
    Full.accumulate(self, layout, master, name, slices, update, *more)
    master.copy_(before + (master - before) / update.sigma)


def always_moves(self, layout, master, *args):
    Full.accumulate(self, layout, master, *args)
    master.mul_(0.999)


def no_decay(self, layout, master, name, slices, update, start=None, optimizer=None):
    Full.accumulate(self, layout, master, name, slices, replace(update, decay=0.0))


def twice(self, specs, dtype):
    made = Full.layout(self, specs, dtype)
    return replace(made, tensors=(*made.tensors, made.tensors[0]))


def unreal(self, specs, dtype):
    return Full.layout(self, [replace(s, name=f"x{s.name}") for s in specs], dtype)


def biases(self, specs, dtype):
    made = LowRank.layout(self, specs, dtype)
    return replace(
        made, tensors=(*made.tensors, *Full(self.config).layout([s for s in specs if s.kind == "bias"], dtype).tensors)
    )


def changed_at_the_start(self, layout, name, device):
    return Lora.start(self, layout, name, device) + 0.1


WRONG = [
    (Full, "noise", stream, "depends on the (other members|order of members)"),
    (Full, "noise", same_seed, "have the same noise"),
    (Full, "noise", other_slice, "differs? from the slices? of the whole"),
    (Full, "noise", too_wide, "variance 1.2"),
    (LowRank, "adapter", adapters_of(lambda b, members: b * 0), "equals the mean in"),
    (LowRank, "adapter", adapters_of(no_signs), "members 0 and 1 are equal|member 1 is not mean"),
    (Lora, "adapter", narrow, "is not mean . sign . sigma . scale . noise"),
    (Full, "accumulate", step_over_sigma, "documented formula"),
    (Full, "accumulate", always_moves, "all coefficients zero|documented formula|updating .* by slices"),
    (Full, "accumulate", no_decay, "decay of"),
    (Full, "layout", twice, "names repeat"),
    (Full, "layout", unreal, "which the model does not have"),
    (LowRank, "layout", biases, "only linear weights can have an adapter"),
    (Lora, "start", changed_at_the_start, "tensors at the start change"),
]


@pytest.mark.parametrize(("space", "method", "wrong", "message"), WRONG)
def test_check_space_raises_when_the_space_is_wrong(space, method, wrong, message):
    broken = type("Broken", (space,), {method: wrong})
    with pytest.raises(AssertionError, match=message):
        contract.check_space(broken(from_dict({"space": space.name, "es": {"sigma": 0.01}})))
