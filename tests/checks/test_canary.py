# SPDX-License-Identifier: Apache-2.0
"""The canary passes healthy engines of every space, and catches each way in which members are silently lost."""

import dataclasses
import math

import pytest
import torch
from families import Bench, ByLibrary, build, make_config

from evoalign import engines
from evoalign.checks import canary
from evoalign.engines import ABSENT
from evoalign.engines.transformers import TransformersEngine
from evoalign.errors import CanaryError, ModelError, NotFiniteError
from evoalign.testing import engines as contract
from evoalign.types import MEAN, EvolvedTensor, Layout, Member, Plan, Request, Rollout, Sampling, Update

AB = {"lora": {"rank": 2, "evolve": "ab"}}
VARIANTS = {"lora": {}, "lora, ab": AB, "lowrank": {"lowrank": {"rank": 2}}, "full": {}}
LOWER = r"with noise of es\.sigma .*; lower es\.sigma$"
PROMPT = (31, 45, 99, 120, 31)  # after it no model of these tests is sure of a token, on any processor


def made(folder, variant, dtype="float32", **tree):
    return make_config(folder, variant.partition(",")[0], **{"model": {"dtype": dtype}, **VARIANTS[variant], **tree})


def sing(bench, generation=0, **options):
    given = {"width": bench.config.es.width, "exact": True, **options}
    canary.check(bench.engine, bench.space, bench.layout, PROMPT, generation=generation, **given)


def with_engine(monkeypatch, engine):
    monkeypatch.setattr(engines, "create", engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.mark.first("lora-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_healthy_engine_passes_at_the_start_and_after_twenty_generations(folder, variant, dtype):
    antithetic = variant != "lora, ab"
    with Bench(made(folder, variant, dtype, es={"antithetic": antithetic, "population_size": 4})) as bench:
        sing(bench)
        start, width = bench.engine.fingerprint(), bench.config.es.width
        for generation in range(20):
            update = Update(generation, generation, bench.members, (1.5, -0.5, -0.8, 0.3), width, 0.5 * width)
            bench.engine.apply(update)
        assert bench.engine.fingerprint() != start
        sing(bench, 20)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("width", [1e-10, 1e-3, 10.0])
def test_any_width_of_noise_passes_on_the_shipped_model(variant, width):
    with Bench(made("tiny", variant)) as bench:
        sing(bench, width=width)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_false_alarm_in_fifty_seeds(folder, variant):
    for seed in range(50):
        with Bench(made(folder, variant, seed=seed)) as bench:
            sing(bench, seed)


@pytest.mark.parametrize(
    ("space", "more"),
    [*(("lora", {"model": {"dtype": dtype}, "lora": {"target_modules": [module], "target_layers": [1]}})
       for dtype in ("float32", "bfloat16") for module in ("q_proj", "k_proj", "o_proj", "down_proj")),
     ("lowrank", {"engine": {"max_rows": 1}}), ("lowrank", {"es": {"noise_multiplier": 1e-5, "learning_rate": 0.01}})],
)  # fmt: skip
def test_one_matrix_chunks_of_one_row_and_narrow_noise_by_layers_pass(folder, space, more):
    with Bench(made(folder, space, **more)) as bench:
        sing(bench, width=bench.config.es.width)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_goes_on_as_if_there_had_been_no_canary(folder, variant):
    requests = [Request(0, PROMPT, Sampling(8, temperature=1.0), 3, logprobs=True)]
    said = []
    for sings in (False, True):
        with Bench(made(folder, variant, es={"population_size": 4})) as bench:
            if sings:
                sing(bench)
            first = bench.ask(bench.plan(0), requests)
            bench.move()
            if sings:
                sing(bench, 1)
            said.append({**first, **{("later", *k): v for k, v in bench.ask(bench.plan(1), requests).items()}})
    assert said[0] == said[1]


def test_its_noise_is_of_no_generation_of_a_run_and_new_each_time(folder, monkeypatch):
    seen = []

    class Watched(TransformersEngine):
        def rollout(self, plan, requests):
            seen.extend([plan.generation] if plan.members != (MEAN,) else [])
            return super().rollout(plan, requests)

    with_engine(monkeypatch, Watched)
    with Bench(made(folder, "lora")) as bench:
        sing(bench, 0)
        sing(bench, 7)
    assert set(seen) == {2**32 - 1, 2**32 - 8}  # the noise counter's word has 32 bits; runs count up from 0


class Ignores(ByLibrary):
    """Members' adapters or weights never arrive."""

    def _put_adapters(self, plan, members):
        return

    def _serve(self, plan, member):
        return


class OneForAll(ByLibrary):
    """Every member is the first one."""

    def _put_adapters(self, plan, members):
        super()._put_adapters(plan, [members[0]] * len(members))

    def _serve(self, plan, member):
        super()._serve(plan, None if member is None else plan.members[0])


class IgnoresSigns(ByLibrary):
    def _put_adapters(self, plan, members):
        super()._put_adapters(plan, [dataclasses.replace(m, sign=abs(m.sign)) for m in members])

    def _serve(self, plan, member):
        super()._serve(plan, member and dataclasses.replace(member, sign=abs(member.sign)))


class LeavesTheLast(ByLibrary):
    """The mean is answered with the weights of the last member."""

    last = None

    def _put_adapters(self, plan, members):
        if tuple(members) == (MEAN,) and self.last is not None:
            plan, members = self.last
        self.last = plan, members[-1:]
        super()._put_adapters(plan, members)

    def _serve(self, plan, member):
        if member is not None:
            super()._serve(plan, member)


class Subtracts(TransformersEngine):
    """Restores by subtraction: the master is another in its last bits."""

    def rollout(self, plan, requests):
        yield from super().rollout(plan, requests)
        if plan.members != (MEAN,):
            for part in self.mean.parts:
                part.master.add_(0.1).sub_(0.1)


class DropsOddNames(TransformersEngine):
    def load(self, state, optimizer=None):
        own = dict(self.state())
        super().load({**own, **{n: t for n, t in state.items() if n in own}}, optimizer)


class BaseForTheAbsent(TransformersEngine):
    """As servers do that are asked for an adapter that they do not know."""

    def rollout(self, plan, requests):
        members = tuple(MEAN if m == ABSENT else m for m in plan.members)
        for rollout, member in zip(super().rollout(dataclasses.replace(plan, members=members), requests),
                                   plan.members, strict=True):  # fmt: skip
            yield dataclasses.replace(rollout, member=member)


class StaleWithoutNoise(TransformersEngine):
    """Adapters of an earlier load stand in for those that are empty."""

    def rollout(self, plan, requests):
        return super().rollout(dataclasses.replace(plan, sigma=plan.sigma or 1.0), requests)


class KeepsTheFirstWidth(TransformersEngine):
    """Adapters are cached by generation and member, without the width of their noise."""

    def __init__(self, *given):
        super().__init__(*given)
        self.first = {}

    def rollout(self, plan, requests):
        sigma = self.first.setdefault(plan.generation, plan.sigma) if plan.members == canary.MEMBERS else plan.sigma
        return super().rollout(dataclasses.replace(plan, sigma=sigma), requests)


class LosesOne(TransformersEngine):
    def rollout(self, plan, requests):
        yield from list(super().rollout(plan, requests))[: 2 if len(plan.members) > 1 else None]


BROKEN = [
    (Ignores, "member 0 gives the completion of the unperturbed model: the engine ignores", list(VARIANTS)),
    (OneForAll, "members 0 and 2 are alike: .* all members the same", list(VARIANTS)),
    (IgnoresSigns, "members of opposite sign are alike", ["lora", "lowrank", "full"]),
    (LeavesTheLast, r"the engine serves weights of a member", list(VARIANTS)),
    (Subtracts, "sampling members changed the mean", ["lora", "lowrank", "full"]),
    (DropsOddNames, "loads evoalign.checks.canary.no_such_tensor without an error", list(VARIANTS)),
    (BaseForTheAbsent, "a member that does not exist", list(VARIANTS)),
    (StaleWithoutNoise, "members without noise", list(VARIANTS)),
    (KeepsTheFirstWidth, "member 0 gives the completion of the unperturbed model", list(VARIANTS)),
    (LosesOne, "no completion of member 2", list(VARIANTS)),
]


@pytest.mark.first("lora-float32", "lowrank-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("engine", "message", "variant"),
    [(engine, message, variant) for engine, message, variants in BROKEN for variant in variants],
    ids=lambda v: getattr(v, "__name__", v if v in VARIANTS else ""),
)
def test_each_fault_is_caught(folder, monkeypatch, engine, message, variant, dtype):
    with_engine(monkeypatch, engine)
    with Bench(made(folder, variant, dtype)) as bench, pytest.raises(CanaryError, match=message):
        sing(bench)


class AlikeByChance(TransformersEngine):
    """Member 2 answers as the mean does, for the first noise, however wide: so do unsure models of random weights."""

    mean_says: Rollout

    def rollout(self, plan, requests):
        for rollout in super().rollout(plan, requests):
            if rollout.member == MEAN:
                self.mean_says = rollout
            tied = plan.sigma > 0 and plan.generation == canary.address(0) and rollout.member.index == 2
            yield dataclasses.replace(self.mean_says, member=rollout.member) if tied else rollout


@pytest.mark.parametrize("variant", VARIANTS)
def test_members_alike_by_chance_get_other_noise(folder, monkeypatch, variant):
    with_engine(monkeypatch, AlikeByChance)
    with Bench(made(folder, variant)) as bench:
        sing(bench)


class Overflows(TransformersEngine):
    """What wide noise comes to on a CPU whose sums turn an overflow into no number, rather than infinity."""

    def rollout(self, plan, requests):
        if plan.sigma > 1e20:
            raise NotFiniteError("the model's logits are not numbers")
        return super().rollout(plan, requests)


@pytest.mark.parametrize(
    ("variant", "sigma", "engine"),
    [("lora", 1e5, None), ("lora, ab", 1e3, None), ("lowrank", 1e8, None), ("full", 1e30, None),
     *((variant, 1e30, Overflows) for variant in VARIANTS)],
)  # fmt: skip
def test_noise_that_destroys_the_model_or_leaves_no_numbers_is_no_fault_of_the_engine(
    monkeypatch, variant, sigma, engine
):
    """What a norm makes of noise alone, or of an overflow, is the same for all members."""
    if engine:
        with_engine(monkeypatch, engine)
    es = {"sigma": sigma, "learning_rate": sigma}
    with Bench(made("tiny", variant, es=es)) as bench, pytest.raises(CanaryError, match=LOWER):
        sing(bench)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [Ignores, OneForAll, LeavesTheLast], ids=lambda e: e.__name__)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gross_faults_are_caught_where_an_engine_is_not_exact(folder, monkeypatch, engine, variant):
    with_engine(monkeypatch, engine)
    with Bench(made(folder, variant, "bfloat16")) as bench, pytest.raises(CanaryError):
        sing(bench, exact=False)


def test_the_public_contract_has_it(folder):
    assert contract.check_canary in contract.CHECKS
    with (
        contract.started(BaseForTheAbsent, made(folder, "lowrank")) as bench,
        pytest.raises(AssertionError, match="does not exist"),
    ):
        contract.check_canary(bench)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("noise", [-1, 1 << 32])
def test_the_engine_refuses_a_member_that_cannot_be_and_answers_nobody(folder, variant, noise):
    with Bench(made(folder, variant)) as bench:
        plan = Plan(0, 0.1, (MEAN, Member(3, noise, 1)))
        with pytest.raises(ModelError, match=rf"member 3 .*{noise}"):
            next(iter(bench.engine.rollout(plan, [Request(0, PROMPT, Sampling(2))])))


def test_the_engine_refuses_members_whom_the_space_gives_no_adapter(folder):
    with Bench(made(folder, "lowrank")) as bench:
        bench.space.adapter = lambda *_: None
        with pytest.raises(ModelError, match=r"space lowrank has no adapter for members \[0\]"):
            list(bench.engine.rollout(Plan(0, 0.1, (Member(0, 0, 1),)), [Request(0, PROMPT, Sampling(2))]))
        list(bench.engine.rollout(Plan(0, 0.0, (MEAN,)), [Request(0, PROMPT, Sampling(2))]))
    assert 1 << 32 <= ABSENT.noise < torch.iinfo(torch.int64).max and not ABSENT.is_mean


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (([1, 2], [-0.1, -2.0]), ([1, 2], [-0.1, -2.0]), 0.0), (([1, 2], [-0.1, -2.0]), ([1, 2], [-0.2, -2.25]), 0.25),
        (([1, 2, 3], [-0.1, -0.9, -5.0]), ([1, 4, 3], [-0.1, -0.92, -1.0]), 0.02),  # a tie ends the likeness
        (([1, 2], [-0.1, -0.01]), ([1, 4], [-0.1, -0.01]), math.inf),  # both sure, of different tokens
        (([1, 2], [-0.1, -0.1]), ([1], [-0.1]), math.inf), (([1], [-0.1]), ([1], [math.nan]), math.inf),
        (([1, 2], None), ([1, 2], None), 0.0), (([1, 2], None), ([1, 3], None), math.inf),
    ],
)  # fmt: skip
def test_the_distance_of_two_answers(one, other, apart):
    one, other = (Rollout(MEAN, 0, tuple(t), "", "length", logs and tuple(logs)) for t, logs in (one, other))
    assert canary.distance(one, other) == canary.distance(other, one) == pytest.approx(apart)


def test_widths_grow_tenfold_until_the_noise_is_enormous():
    layout = Layout((EvolvedTensor("a", (2, 2), "a", 0.1), EvolvedTensor("b", (2, 2), "b", 0.01)), 0, "float32")
    assert list(canary.widths(layout, 1.0)) == [10.0, 100.0, 1000.0, 10000.0]
    silent = dataclasses.replace(layout, tensors=(EvolvedTensor("a", (2, 2), "a", 0.0),))
    with pytest.raises(CanaryError, match=r"has width 0.*set es\.sigma"):
        list(canary.widths(silent, 1.0))
