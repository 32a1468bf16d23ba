# SPDX-License-Identifier: Apache-2.0
"""The contract tests of engines pass on the transformers engine in all spaces, and fail on broken engines."""

from dataclasses import replace

import pytest
import torch
from plain_adapters import over

from evoalign.config import from_dict
from evoalign.engines.transformers import TransformersEngine
from evoalign.optimizer import cma
from evoalign.testing import engines as contract

CMA = {"sigma": 0.05, "optimizer": "cma", "population_size": 4}
SPACES = {
    "lora": {},
    "lora, ab": {"lora": {"rank": 2, "evolve": "ab", "alpha": 32}},
    "lowrank": {"lowrank": {"rank": 2}},
    "full": {},
    "norms": {},
    "singular": {},
    "subspace": {"space": {"name": "subspace", "dimension": 300}},
    "steering": {},
    "norms, adam": {"es": {"sigma": 0.05, "learning_rate": 0.02, "optimizer": "adam"}},
    "subspace, cma": {"space": {"name": "subspace", "dimension": 8}, "es": CMA},
    "subspace, sep_cma": {"space": {"name": "subspace", "dimension": 300}, "es": {**CMA, "optimizer": "sep_cma"}},
}


def config(folder, variant, dtype="float32", **more):
    name = over(folder) if variant == "singular" else folder
    tree = {
        "seed": 5, "space": variant.partition(",")[0], "model": {"name": str(name), "dtype": dtype},
        "engine": {"device": "cpu", "decoder": "library"},
        "es": {"sigma": 0.05, "learning_rate": 0.02}, **SPACES[variant], **more,
    }  # fmt: skip
    return from_dict(tree)


@pytest.fixture(scope="module")
def shared(request, random_qwen2):
    """An engine for all checks, and its state at the start."""
    variant, dtype, decoder = request.param
    made = config(random_qwen2, variant, dtype, engine={"device": "cpu", "decoder": decoder})
    with contract.started(TransformersEngine, made) as bench:
        yield bench, dict(bench.engine.state()), dict(bench.engine.optimizer_state())


@pytest.fixture
def bench(shared):
    """The engine with its mean restored."""
    found, state, slots = shared
    found.engine.load(state, slots)
    return found


def each(cases):
    """Parametrise a test by engines and checks; pytest groups the tests of an engine."""
    engines = pytest.mark.parametrize("shared", cases.values(), ids=cases, indirect=True, scope="module")
    checks = pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
    return lambda test: checks(engines(test))


@pytest.mark.first("lora-float32", "full-float32", "lowrank-float32", "singular-float32", "norms-float32",
                   "sep_cma-float32", "lora-bfloat16")  # fmt: skip
@each({f"{v}-{dtype}": (v, dtype, "library") for v in SPACES for dtype in ("float32", "bfloat16")})
def test_engine_passes_the_check(bench, check):
    check(bench)


@pytest.mark.first("lora-", "full-")
@each({v: (v, "float32", "static") for v in SPACES})
def test_static_decoder_passes_the_check(bench, check):
    check(bench)


@pytest.mark.slow
@pytest.mark.last("tiny-full")
@pytest.mark.parametrize(
    ("model", "variant", "rows"), [("tiny", "lora", None), ("tiny", "full", None), (None, "lowrank", 2)]
)
def test_check_engine_passes_on_the_tiny_model_and_with_small_batches(random_qwen2, model, variant, rows):
    engine = {"device": "cpu", "decoder": "library", "max_rows": rows}
    contract.check_engine(TransformersEngine, config(model or random_qwen2, variant, engine=engine))


# --- broken engines: each has one method in place of the engine's ---

Engine = TransformersEngine


def each(change):
    """Return a rollout whose completions are changed by a function of the plan and the completion."""

    def rollout(self, plan, requests):
        for found in Engine.rollout(self, plan, requests):
            yield replace(found, **change(plan, found))

    return rollout


def crossed(plan, rollout):
    """Members 0 and 2 get each other's completions."""
    other = {0: 2, 2: 0}.get(rollout.member.index) if len(plan.members) > 3 else None
    return {} if other is None else {"member": next(m for m in plan.members if m.index == other)}


def tempered(plan, rollout):
    """Return log-probabilities of another temperature."""
    return {"logprobs": rollout.logprobs and tuple(2 * p - 1.0 for p in rollout.logprobs)}


def loses_one(self, plan, requests):
    yield from list(Engine.rollout(self, plan, requests))[1:]


def subtracts(self, plan, requests):
    """Leave the rounding error of adding and subtracting in the mean."""
    yield from Engine.rollout(self, plan, requests)
    for part in self.mean.parts:
        part.master.add_(1e-3).sub_(1e-3)


def draws_apart(self, plan, requests):
    """Draw with another seed for each member."""
    for member in plan.members:
        own = [replace(r, seed=r.seed * 7 + member.index) for r in requests]
        yield from Engine.rollout(self, replace(plan, members=(member,)), own)


def forgets_to_serve(self, *args, **kwargs):
    facts = Engine.start(self, *args, **kwargs)
    for part in self.mean.parts:
        part.served = None
    return facts


def twice_the_step(self, update):
    for _ in range(2):
        Engine.apply(self, update)


def moves_on_zero(self, update):
    Engine.apply(self, update)
    self.mean.parts[0].master.add_(1e-3)


def shares_its_state(self):
    yield from ((part.name, part.master) for part in self.mean.parts)


def nothing(self, *args):
    return


def constant(self):
    return "0" * 64


PLAIN = "plain transformers"
WRONG = [
    ("_put_adapters", nothing, "lowrank", "check_members_differ", "have equal completions"),
    ("_put_adapters", nothing, "lowrank", "check_members_are_their_own", PLAIN),
    ("rollout", loses_one, "lora", "check_rollouts", "requested"),
    ("rollout", each(crossed), "lowrank", "check_members_are_their_own", PLAIN),
    ("rollout", subtracts, "full", "check_rollouts_leave_the_mean", "changes the fingerprint"),
    ("start", forgets_to_serve, "full", "check_mean_is_plain", PLAIN),
    ("apply", twice_the_step, "lowrank", "check_apply", "differs from the formula"),
    ("fingerprint", constant, "lora", "check_apply", "does not change the fingerprint"),
    ("fingerprint", constant, "lora", "check_state", "not the weights_hash"),
    ("apply", moves_on_zero, "full", "check_zero_coefficients", "all coefficients zero"),
    ("state", shares_its_state, "lora", "check_state", "an update changes"),
    ("load", nothing, "full", "check_state", "does not restore the fingerprint"),
    ("rollout", each(lambda _, r: {"text": r.text + "."}), "lora", "check_rollouts", "its tokens decode to"),
    ("rollout", draws_apart, "lora", "check_common_random_numbers", "draw different tokens"),
    ("rollout", each(lambda *_: {"logprobs": None}), "lora", "check_rollouts", "no log-probabilities"),
    ("rollout", each(tempered), "lora", "check_mean_is_plain", "log-probabilities differ"),
]


@pytest.mark.parametrize(("method", "wrong", "space", "check", "message"), WRONG)
def test_check_raises_when_the_engine_is_wrong(random_qwen2, method, wrong, space, check, message):
    broken = type("Broken", (Engine,), {method: wrong})
    with pytest.raises(AssertionError, match=message), contract.started(broken, config(random_qwen2, space)) as bench:
        getattr(contract, check)(bench)


def test_check_apply_raises_when_cma_es_moves_by_half(random_qwen2, monkeypatch):
    """The engine's own optimizer and that of the check have the same code."""
    gradient = cma.Adapted.gradient
    monkeypatch.setattr(cma.Adapted, "gradient", lambda *given: gradient(*given) / 2)
    made = config(random_qwen2, "subspace, cma")
    with pytest.raises(AssertionError, match="differs from the formula"), contract.started(Engine, made) as bench:
        contract.check_apply(bench)


def test_check_specs_raises_for_names_that_the_model_does_not_have(random_qwen2):
    """As of an engine whose model has fused matrices. It cannot start."""
    with contract.started(Engine, config(random_qwen2, "full")) as bench:
        fused = [replace(s, name=s.name.replace("q_proj", "qkv_proj")) for s in bench.engine.specs()]
        bench.engine.specs = lambda: fused
        with pytest.raises(AssertionError, match=r"is not a tensor of the Hugging Face model|is not listed"):
            contract.check_specs(bench)


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
