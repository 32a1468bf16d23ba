# SPDX-License-Identifier: Apache-2.0
"""The contract tests of engines pass on the transformers engine in all spaces, and fail on broken engines."""

import pytest
import torch

from evoalign.config import from_dict
from evoalign.engines.transformers import TransformersEngine
from evoalign.testing import engines as contract

SPACES = {
    "lora": {},
    "lora, ab": {"lora": {"rank": 2, "evolve": "ab", "alpha": 32}},
    "lowrank": {"lowrank": {"rank": 2}},
    "full": {},
}


def config(folder, variant, dtype="float32", **more):
    tree = {
        "seed": 5, "space": variant.partition(",")[0], "model": {"name": str(folder), "dtype": dtype},
        "engine": {"device": "cpu", "decoder": "library"},
        "es": {"sigma": 0.05, "learning_rate": 0.02}, **SPACES[variant], **more,
    }  # fmt: skip
    return from_dict(tree)


@pytest.mark.first("lora-float32", "full-float32", "lowrank-float32")
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", SPACES)
def test_engine_passes_the_check(random_qwen2, variant, dtype, check):
    with contract.started(TransformersEngine, config(random_qwen2, variant, dtype)) as bench:
        check(bench)


@pytest.mark.slow
@pytest.mark.last("full")
@pytest.mark.parametrize("variant", ["lora", "full"])
def test_check_engine_passes_on_the_tiny_model(variant):
    contract.check_engine(TransformersEngine, config("tiny", variant))


@pytest.mark.slow
def test_check_engine_passes_with_small_batches(random_qwen2):
    contract.check_engine(
        TransformersEngine,
        config(random_qwen2, "lowrank", engine={"device": "cpu", "decoder": "library", "max_rows": 2}),
    )


@pytest.mark.first("lora-", "full-", others="long")
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("variant", SPACES)
def test_static_decoder_passes_the_check(random_qwen2, variant, check):
    engine = {"device": "cpu", "decoder": "static"}
    with contract.started(TransformersEngine, config(random_qwen2, variant, engine=engine)) as bench:
        check(bench)


class IgnoresAdapters(TransformersEngine):
    def _put_adapters(self, plan, members):
        return


class LosesOne(TransformersEngine):
    def rollout(self, plan, requests):
        yield from list(super().rollout(plan, requests))[1:]


class CrossesMembers(TransformersEngine):
    """Members 0 and 2 get each other's weights."""

    def rollout(self, plan, requests):
        crossed = {0: 2, 2: 0}
        for rollout in super().rollout(plan, requests):
            other = crossed.get(rollout.member.index) if len(plan.members) > 3 else None
            members = {m.index: m for m in plan.members}
            yield rollout if other is None else _of(rollout, member=members[other])


def _of(rollout, **changes):
    fields = {name: getattr(rollout, name) for name in rollout.__dataclass_fields__}
    return type(rollout)(**(fields | changes))


class Subtracts(TransformersEngine):
    """Leaves the rounding error of adding and subtracting in the mean."""

    def rollout(self, plan, requests):
        yield from super().rollout(plan, requests)
        for part in self.mean.parts:
            part.master.add_(1e-3).sub_(1e-3)


class ForgetsToServe(TransformersEngine):
    def start(self, *args, **kwargs):
        facts = super().start(*args, **kwargs)
        for part in self.mean.parts:
            part.served = None
        return facts


class TwiceTheStep(TransformersEngine):
    def apply(self, update):
        super().apply(update)
        super().apply(update)


class ConstantFingerprint(TransformersEngine):
    def fingerprint(self):
        return "0" * 64


class MovesOnZero(TransformersEngine):
    def apply(self, update):
        super().apply(update)
        self.mean.parts[0].master.add_(1e-3)


class SharesItsState(TransformersEngine):
    def state(self):
        yield from ((part.name, part.master) for part in self.mean.parts)


class ForgetsToLoad(TransformersEngine):
    def load(self, state):
        return


class OddNames(TransformersEngine):
    """Has fused names, as the model of an engine may."""

    def specs(self):
        return [type(s)(s.name.replace("q_proj", "qkv_proj"), *(getattr(s, n) for n in
                ("shape", "kind", "layer", "mean_abs"))) for s in super().specs()]  # fmt: skip


class OtherText(TransformersEngine):
    def rollout(self, plan, requests):
        for rollout in super().rollout(plan, requests):
            yield _of(rollout, text=rollout.text + ".")


class DrawsApart(TransformersEngine):
    """Each member draws with another seed."""

    def rollout(self, plan, requests):
        for member in plan.members:
            own = [type(r)(r.index, r.prompt_ids, r.sampling, r.seed * 7 + member.index, r.logprobs) for r in requests]
            yield from super().rollout(type(plan)(plan.generation, plan.sigma, (member,)), own)


class NoLogprobs(TransformersEngine):
    def rollout(self, plan, requests):
        for rollout in super().rollout(plan, requests):
            yield _of(rollout, logprobs=None)


class Tempered(TransformersEngine):
    """Log-probabilities of another temperature."""

    def rollout(self, plan, requests):
        for r in super().rollout(plan, requests):
            yield _of(r, logprobs=r.logprobs and tuple(2 * p - 1.0 for p in r.logprobs))


WRONG = [
    (IgnoresAdapters, "lowrank", "check_members_differ", "have equal completions"),
    (IgnoresAdapters, "lowrank", "check_members_are_their_own", "plain transformers"),
    (LosesOne, "lora", "check_rollouts", "requested"),
    (CrossesMembers, "lowrank", "check_members_are_their_own", "plain transformers"),
    (Subtracts, "full", "check_rollouts_leave_the_mean", "changes the fingerprint"),
    (ForgetsToServe, "full", "check_mean_is_plain", "plain transformers"),
    (TwiceTheStep, "lowrank", "check_apply", "differs from the formula"),
    (ConstantFingerprint, "lora", "check_apply", "does not change the fingerprint"),
    (ConstantFingerprint, "lora", "check_state", "not the weights_hash"),
    (MovesOnZero, "full", "check_zero_coefficients", "all coefficients zero"),
    (SharesItsState, "lora", "check_state", "an update changes"),
    (ForgetsToLoad, "full", "check_state", "does not restore the fingerprint"),
    (OddNames, "full", "check_specs", "is not a tensor of the Hugging Face model|is not listed"),
    (OtherText, "lora", "check_rollouts", "its tokens decode to"),
    (DrawsApart, "lora", "check_common_random_numbers", "draw different tokens"),
    (NoLogprobs, "lora", "check_rollouts", "no log-probabilities"),
    (Tempered, "lora", "check_mean_is_plain", "log-probabilities differ"),
]


@pytest.mark.parametrize(("wrong", "space", "check", "message"), WRONG, ids=lambda w: getattr(w, "__name__", None))
def test_check_raises_when_the_engine_is_wrong(random_qwen2, wrong, space, check, message):
    made = config(random_qwen2, space)
    with pytest.raises(AssertionError, match=message):
        if wrong is OddNames:  # such an engine cannot even start
            _specs_only(wrong, made)
        with contract.started(wrong, made) as bench:
            getattr(contract, check)(bench)


def _specs_only(wrong, made):
    with contract.started(TransformersEngine, made) as bench:
        bench.engine.specs = wrong.specs.__get__(_Renamed(bench.engine))
        contract.check_specs(bench)


class _Renamed(OddNames):
    def __init__(self, engine):
        self.model = engine.model


def test_started_closes_the_engine_when_start_fails(random_qwen2):
    closed = []

    class Fails(TransformersEngine):
        def start(self, *args, **kwargs):
            raise RuntimeError("no room")

        def close(self):
            closed.append(True)

    with pytest.raises(RuntimeError, match="no room"), contract.started(Fails, config(random_qwen2, "lora")):
        pass
    assert closed == [True]
    assert torch.is_grad_enabled()
