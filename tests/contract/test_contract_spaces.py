# SPDX-License-Identifier: Apache-2.0
"""The contract tests of spaces pass on all registered spaces, and fail on broken ones."""

import pytest
import torch

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
    "full, exclude": {"full": {"exclude": ["embed", "norm"]}},
}
WIDTHS = [{"sigma": 0.01}, {"noise_multiplier": 0.3}]


def config(variant, width=WIDTHS[0]):
    return from_dict({"seed": 5, "space": variant.partition(",")[0], "es": dict(width), **VARIANTS[variant]})


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


class Stream(Full):
    """Noise from one random stream: it depends on the other members."""

    def noise(self, layout, name, generation, members, slices=None, device="cpu"):
        torch.manual_seed(generation)
        whole = torch.randn(len(members), *layout[name].shape)
        return whole if slices is None else whole[(slice(None), *slices)]


class SameSeed(Full):
    """The published code's first form: equal shapes get equal noise."""

    def noise(self, layout, name, generation, members, slices=None, device="cpu"):
        same = next(t.name for t in layout.tensors if t.shape == layout[name].shape)
        return super().noise(layout, same, generation, members, slices, device)


class OtherSlice(Full):
    """A slice draws as if it were a tensor."""

    def noise(self, layout, name, generation, members, slices=None, device="cpu"):
        whole = super().noise(layout, name, generation, members)
        if slices is None:
            return whole
        sizes = [s.stop - s.start for s in slices]
        return whole.reshape(len(members), -1)[:, : torch.Size(sizes).numel()].reshape(-1, *sizes)


class TooWide(Full):
    def noise(self, layout, name, generation, members, slices=None, device="cpu"):
        return super().noise(layout, name, generation, members, slices, device) * 1.1


class Deaf(LowRank):
    """Members are the mean."""

    def adapter(self, layout, module, master, plan, members):
        made = super().adapter(layout, module, master, plan, members)
        return made and type(made)(made.a, made.b * 0, made.scaling)


class NoSigns(LowRank):
    def adapter(self, layout, module, master, plan, members):
        made = super().adapter(layout, module, master, plan, members)
        signs = torch.tensor([float(m.sign) for m in members])[:, None, None].to(layout.torch_dtype)
        return made and type(made)(made.a, made.b * signs, made.scaling)


class Narrow(Lora):
    """Members are narrower than the layout says."""

    def adapter(self, layout, module, master, plan, members):
        return super().adapter(
            layout, module, master, type(plan)(plan.generation, plan.sigma / 2, plan.members), members
        )


class StepOverSigma(Full):
    """Divides the step by sigma once more."""

    def accumulate(self, layout, master, name, slices, update, start=None, optimizer=None):
        before = master.clone()
        super().accumulate(layout, master, name, slices, update, start, optimizer)
        master.copy_(before + (master - before) / update.sigma)


class AlwaysMoves(Full):
    def accumulate(self, layout, master, name, slices, update, start=None, optimizer=None):
        super().accumulate(layout, master, name, slices, update, start, optimizer)
        master.mul_(0.999)


class NoDecay(Full):
    def accumulate(self, layout, master, name, slices, update, start=None, optimizer=None):
        super().accumulate(layout, master, name, slices, type(update)(*_without_decay(update)))


def _without_decay(update):
    return (update.index, update.generation, update.members, update.coefficients, update.sigma, update.step, 0.0)


class Twice(Full):
    def layout(self, specs, dtype):
        made = super().layout(specs, dtype)
        return type(made)((*made.tensors, made.tensors[0]), made.seed, made.dtype)


class Unreal(Full):
    def layout(self, specs, dtype):
        return super().layout([type(s)("x" + s.name, s.shape, s.kind, s.layer, s.mean_abs) for s in specs], dtype)


class Biases(LowRank):
    def layout(self, specs, dtype):
        made = super().layout(specs, dtype)
        bias = Full(self.config).layout([s for s in specs if s.kind == "bias"], dtype).tensors
        return type(made)((*made.tensors, *bias), made.seed, made.dtype, rank=made.rank)


class ChangedAtTheStart(Lora):
    def start(self, layout, name, device):
        return super().start(layout, name, device) + 0.1


WRONG = [
    (Stream, "depends on the (other members|order of members)"),
    (SameSeed, "have the same noise"),
    (OtherSlice, "differs? from the slices? of the whole"),
    (TooWide, "variance 1.2"),
    (Deaf, "equals the mean in"),
    (NoSigns, "members 0 and 1 are equal|member 1 is not mean"),
    (Narrow, "is not mean . sign . sigma . scale . noise"),
    (StepOverSigma, "documented formula"),
    (AlwaysMoves, "all coefficients zero|documented formula|updating .* by slices"),
    (NoDecay, "decay of"),
    (Twice, "names repeat"),
    (Unreal, "which the model does not have"),
    (Biases, "only linear weights can have an adapter"),
    (ChangedAtTheStart, "tensors at the start change"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=lambda w: getattr(w, "__name__", ""))
def test_check_space_raises_when_the_space_is_wrong(wrong, message):
    space = wrong(from_dict({"space": wrong.name, "es": {"sigma": 0.01}}))
    with pytest.raises(AssertionError, match=message):
        contract.check_space(space)
