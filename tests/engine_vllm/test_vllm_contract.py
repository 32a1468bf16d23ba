# SPDX-License-Identifier: Apache-2.0
"""vLLM meets the contract of engines and generates the same tokens as engine transformers.

One engine per variant serves all tests of this file, its mean restored before each: a start takes seconds, and a
process can have one. Tests that need another engine are in test_vllm_engine.py.
"""

from dataclasses import dataclass

import pytest
import torch
import vllm.model_executor.layers.utils as layers
from served import SPACES, answers, config
from vllm.platforms import current_platform

import evoalign
from evoalign.checks import canary
from evoalign.checks.distance import moved, start_of
from evoalign.engines.transformers import TransformersEngine
from evoalign.engines.vllm.engine import VllmEngine
from evoalign.errors import CanaryError, DataError, EvoalignError
from evoalign.setup import Served
from evoalign.testing import engines as contract
from evoalign.testing.answers import written
from evoalign.types import MEAN, Request, Sampling, population

CONTRACT = ["lora", "lora, ab", "lowrank", "full"]
FORMS = [*CONTRACT, "lowrank, stock"]
"""One variant for each way in which vLLM serves members; the other spaces are served in one of these."""
MARKS = {
    **dict.fromkeys(SPACES, pytest.mark.long),
    **dict.fromkeys(FORMS, pytest.mark.releases),
    "subspace, sep_cma": (),
}
TIE = 1e-4


@dataclass
class Shared:
    """The engine of a variant, vLLM's own functions before it started, and its state at the start."""

    bench: contract.Bench
    before: tuple
    fingerprint: str
    state: dict[str, torch.Tensor]
    slots: dict[str, torch.Tensor]


def vllm_functions():
    """Return the functions of vLLM that a start replaces temporarily."""
    return current_platform.get_punica_wrapper(), layers.dispatch_cpu_unquantized_gemm


@pytest.fixture(scope="module")
def shared(request):
    before = vllm_functions()
    with contract.started(VllmEngine, config(request.param)) as bench:
        engine = bench.engine
        yield Shared(bench, before, engine.fingerprint(), dict(engine.state()), dict(engine.optimizer_state()))


@pytest.fixture
def bench(shared):
    """Return the variant's engine with its mean restored."""
    engine = shared.bench.engine
    engine.load(shared.state, shared.slots)
    assert engine.fingerprint() == shared.fingerprint
    return shared.bench


def of(*variants):
    """Parametrise a test by variants; pytest groups the tests of an engine."""
    return pytest.mark.parametrize("shared", variants, indirect=True, scope="module")


@pytest.mark.releases
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
@of(*CONTRACT)
def test_the_contract(bench, check):
    check(bench)


@of(*CONTRACT)
def test_load_restores_the_start_from_the_files(bench, shared):
    """A run does so for each placebo."""
    served = Served(bench.config, bench.tokens, bench.engine, bench.space, bench.layout, bench.facts)
    bench.engine.apply(bench.update())
    start = start_of(served)
    assert bench.engine.fingerprint() != shared.fingerprint and moved(served, start) > 0
    bench.engine.load(start)
    assert bench.engine.fingerprint() == shared.fingerprint and moved(served, start) == 0


@of(*(pytest.param(variant, marks=MARKS[variant]) for variant in SPACES))
def test_thirty_members_generate_the_same_as_in_process(bench, request):
    variant = request.node.callspec.params["shared"]
    requests = [Request(i, bench.tokens.encode(p), Sampling(24)) for i, p in enumerate(contract.PROMPTS)]
    plan = bench.plan((*population(30), MEAN))
    with contract.started(TransformersEngine, config(variant, "transformers")) as inside:
        assert inside.engine.fingerprint() == bench.engine.fingerprint()
        for b in (inside, bench):
            b.engine.apply(b.update())
        assert inside.engine.fingerprint() == bench.engine.fingerprint()
        want = answers(inside.engine, plan, requests)
    got = answers(bench.engine, plan, requests)
    assert got.keys() == want.keys() and len(got) == 31 * len(requests)
    assert len({r.token_ids for r in got.values()}) > 30
    parted = [key for key in got if got[key].token_ids != want[key].token_ids]
    assert len(parted) < len(got) / 10
    print(variant, "parted:", sorted(parted))
    for key in parted:
        check_tie(bench, plan, requests[key[1]], got[key], want[key])


def check_tie(bench, plan, request, one, other):
    """Check that the member's weights give both tokens the same logit where two completions differ."""
    place = next(i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b)
    model = written(bench, plan, one.member)
    ids = torch.tensor([[*request.prompt_ids, *one.token_ids[:place]]])
    with torch.inference_mode():
        logits = model(ids).logits[0, -1]
    assert abs(float(logits[one.token_ids[place]] - logits[other.token_ids[place]])) < TIE


@pytest.mark.releases
@of("lora")
def test_sampled_completions_of_long_prompts(bench):
    """On a CPU vLLM cannot continue a seeded completion whose prompt was computed in pieces."""
    warm = Sampling(4, temperature=0.8)
    requests = [Request(i, tuple(range(20, 220)), warm, seed=i) for i in range(2)]
    found = answers(bench.engine, bench.plan(population(30)), requests)
    assert len(found) == 60 and all(len(r.token_ids) for r in found.values())


@of("lowrank")
def test_canary_passes_for_prompts_longer_than_a_block_of_the_cache(bench):
    for length in (128, 129, 130):
        canary.check(bench.engine, bench.space, bench.layout, range(20, 20 + length), generation=0, width=0.05,
                     exact=bench.facts.deterministic)  # fmt: skip


@pytest.mark.releases
@of("lowrank")
def test_start_leaves_vllm_unchanged_for_other_engines(shared):
    assert vllm_functions() == shared.before


def ignores_adapters(engine):
    """Never write the members' factors, so that all slots stay unchanged."""
    rpc = engine.rpc
    return {"rpc": lambda method, *arguments: [] if method == "es_put" else rpc(method, *arguments)}


def one_for_all(engine):
    """Generate all members with one adapter."""
    generate = engine._generate

    def generated(members, requests):
        for member, slot in members:
            yield from generate([(member, None if slot is None else 0)], requests)

    return {"_generate": generated}


@pytest.mark.parametrize("broken", [None, ignores_adapters, one_for_all])
@of("lowrank")
def test_canary_detects_an_adapter_that_is_not_applied(bench, broken, monkeypatch):
    def sing():
        canary.check(bench.engine, bench.space, bench.layout, bench.requests[0].prompt_ids, generation=0, width=0.05)

    list(bench.engine.rollout(bench.plan(population(30), wider=0.0), bench.requests[:1]))  # zeros in all slots
    for name, method in broken(bench.engine).items() if broken else ():
        monkeypatch.setattr(bench.engine, name, method)
    if broken is None:
        sing()
        return
    with pytest.raises(CanaryError):
        sing()


@of("lora")
def test_a_failed_worker_and_a_prompt_that_is_too_long_are_reported(bench):
    with pytest.raises(evoalign.EvoalignError, match="es_nothing"):
        bench.engine.rpc("es_nothing")
    with pytest.raises(DataError, match="256 positions"):
        list(bench.engine.rollout(bench.plan(population(2)), [Request(0, (5,) * 250, Sampling(8))]))


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has\nmore to say")
LINE = r"\(CUDA out of memory. Tried to allocate 2.00 GiB\); [^\n]*engine.gpu_memory_utilization, [^\n]*$"


@pytest.mark.parametrize(
    ("raised", "reported", "message"), [(KeyboardInterrupt(), KeyboardInterrupt, None), (FULL, EvoalignError, LINE)]
)
@of("lowrank")
def test_a_rollout_that_fails_leaves_nothing_in_flight(bench, raised, reported, message, monkeypatch):
    """Requests left in flight would be taken for those of the next rollout. Out of memory is reported in one line."""
    core, plan, calls = bench.engine.llm.llm_engine.engine_core, bench.plan(population(3)), []
    want = answers(bench.engine, plan, bench.requests)

    def failing():
        calls.append(1)
        if len(calls) == 3:
            raise raised
        return type(core).get_output(core)

    with monkeypatch.context() as patch:
        patch.setattr(core, "get_output", failing)
        with pytest.raises(reported, match=message):
            answers(bench.engine, bench.plan(population(3), wider=10.0), bench.requests)
    assert len(calls) == 3 and not core.engine_core.scheduler.has_unfinished_requests()
    assert answers(bench.engine, plan, bench.requests) == want


@of("lowrank")
def test_completions_are_yielded_at_the_step_they_end_in(bench, monkeypatch):
    core, steps, seen = bench.engine.llm.llm_engine.engine_core, [], {}

    def counted():
        steps.append(1)
        return type(core).get_output(core)

    monkeypatch.setattr(core, "get_output", counted)
    requests = [Request(i, bench.requests[0].prompt_ids, Sampling(n)) for i, n in enumerate((3, 9, 6))]
    for rollout in bench.engine.rollout(bench.plan(population(4)), requests):
        seen[rollout.member.index, rollout.request] = len(steps)
        assert (
            rollout.finish_reason == "stop" or len(rollout.token_ids) == requests[rollout.request].sampling.max_tokens
        )
    for member in range(4):
        assert seen[member, 0] <= seen[member, 2] <= seen[member, 1]
    assert len(set(seen.values())) > 1


@of("lowrank")
def test_an_abandoned_rollout_is_aborted_and_not_mixed_up(bench):
    """A frame may keep the abandoned generator alive."""
    plan = bench.plan(population(3))
    want = answers(bench.engine, plan, bench.requests)
    requests = [Request(i, r.prompt_ids, Sampling(2 + 20 * (i > 0))) for i, r in enumerate(bench.requests)]
    left = bench.engine.rollout(plan, requests)
    next(left)
    assert answers(bench.engine, plan, bench.requests) == want
    with pytest.raises(EvoalignError, match="one rollout at a time"):
        list(left)


@of("lowrank")
def test_a_stop_text_ends_a_completion_at_its_token(bench):
    """vLLM searches for none, and would continue to max_tokens."""
    plan, ended = bench.plan((MEAN,)), 0
    for request in bench.requests:
        (whole,) = bench.engine.rollout(plan, [Request(0, request.prompt_ids, Sampling(40), logprobs=True)])
        if len(whole.text) < 6:
            continue
        middle = whole.text[len(whole.text) // 2 :][:3]
        request = Request(0, request.prompt_ids, Sampling(40, stop=(middle,)), logprobs=True)
        (found,) = bench.engine.rollout(plan, [request])
        assert found.finish_reason == "stop" and found.text == whole.text[: whole.text.index(middle)]
        count = next(n for n in range(41) if middle in bench.tokens.decode(whole.token_ids[:n]))
        assert found.token_ids == whole.token_ids[:count] and len(found.logprobs) == count
        assert found.logprobs == pytest.approx(whole.logprobs[:count], abs=1e-5)
        ended += count < len(whole.token_ids)
    assert ended
