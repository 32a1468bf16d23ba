# SPDX-License-Identifier: Apache-2.0
"""Real vLLM keeps the contract of engines and gives the in-process engine's members, tokens and journals."""

import json

import pytest
import torch

import evoalign
from evoalign import engines, spaces, tokens
from evoalign.checks import canary
from evoalign.config import from_dict
from evoalign.engines.transformers import TransformersEngine
from evoalign.engines.vllm import VllmEngine
from evoalign.engines.vllm import start as starting
from evoalign.errors import CanaryError, DataError, ModelError
from evoalign.testing import engines as contract
from evoalign.types import MEAN, Plan, Request, Sampling, population

SPACES = {
    "lora": {},
    "lora, ab": {"lora": {"rank": 2, "evolve": "ab", "alpha": 32}, "engine": {"population": "generic"}},
    "lowrank": {"lowrank": {"rank": 2}},
    "lowrank, stock": {"lowrank": {"rank": 9}, "engine": {"population": "stock"}},
    "full": {},
}
TIE = 1e-4


def config(variant="lora", name="vllm", **more):
    sections = {**SPACES.get(variant, {}), **more}
    own = {"kv_cache_gib": 0.125, "max_num_seqs": 96, "max_model_len": 256, **sections.pop("engine", {})}
    tree = {
        "seed": 5, "space": variant.partition(",")[0], "model": {"name": "tiny", "dtype": "float32"},
        "engine": {"name": name, **(own if name == "vllm" else {"device": "cpu"})},
        "es": {"sigma": 0.05, "learning_rate": 0.02, "population_size": 30}, **sections,
    }  # fmt: skip
    return from_dict(tree)


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("variant", ["lora", "lora, ab", "lowrank", "full"])
def test_the_contract(variant, check):
    with contract.started(VllmEngine, config(variant)) as bench:
        check(bench)


def answers(engine, plan, requests):
    return {(r.member.index, r.request): r for r in engine.rollout(plan, requests)}


@pytest.mark.parametrize("variant", SPACES)
def test_thirty_members_answer_as_in_process(variant):
    with contract.started(VllmEngine, config(variant)) as bench:
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
    """Where two answers part, the model with that member's weights written in finds both tokens equally likely."""
    place = next(i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b)
    model = contract._written(bench, plan, one.member)
    ids = torch.tensor([[*request.prompt_ids, *one.token_ids[:place]]])
    with torch.inference_mode():
        logits = model(ids).logits[0, -1]
    assert abs(float(logits[one.token_ids[place]] - logits[other.token_ids[place]])) < TIE


@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_five_generations_have_the_same_journal(space, tmp_path):
    found = []
    for engine in ("vllm", "transformers"):
        tree = config(space, engine).model_dump(mode="json")
        tree |= {
            "output_dir": str(tmp_path / engine),
            "evaluation": {"max_tokens": 12},
            "task": {"name": "conciseness"},
        }
        tree["es"] |= {"num_generations": 5, "population_size": 8}
        evoalign.train(tree)
        lines = [json.loads(line) for line in (tmp_path / engine / "journal.jsonl").read_text().splitlines()]
        found.append([{k: v for k, v in line.items() if k not in ("hash", "previous", "chain")} for line in lines[1:]])
    moved = [line for line in found[0] if any(line.get("coefficients", ()))]
    assert len(moved) >= 4
    assert found[0] == found[1]


def test_more_members_than_slots_take_turns():
    plan, texts = None, []
    for members in (None, 4):
        with contract.started(VllmEngine, config("lora", engine={"members": members})) as bench:
            plan = bench.plan((*population(11), MEAN))
            texts.append({k: r.token_ids for k, r in answers(bench.engine, plan, bench.requests).items()})
    assert texts[0] == texts[1] and len(texts[0]) == 12 * len(contract.PROMPTS)


def test_an_interrupted_rollout_leaves_nothing_in_flight(monkeypatch):
    with contract.started(VllmEngine, config("lowrank")) as bench:
        plan = bench.plan(population(3))
        want = answers(bench.engine, plan, bench.requests)
        inside, step, calls = bench.engine.llm.llm_engine, bench.engine.llm.llm_engine.step, []

        def interrupted():
            calls.append(None)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(inside, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answers(bench.engine, bench.plan(population(3), wider=10.0), bench.requests)
        assert len(calls) == 3 and not inside.has_unfinished_requests()
        assert answers(bench.engine, plan, bench.requests) == want


def test_preempted_and_queued_rows_keep_their_members():
    texts, counts = [], []
    for own in ({}, {"kv_cache_gib": 0.004}, {"max_num_seqs": 5}):
        with contract.started(VllmEngine, config("lowrank", engine=own)) as bench:
            scheduler, count = bench.engine.llm.llm_engine.engine_core.engine_core.scheduler, []
            preempt = scheduler._preempt_request
            scheduler._preempt_request = lambda *a, own=count, old=preempt, **k: (own.append(1), old(*a, **k))[1]
            ids = [tuple((7 * j * j + 3 * j + i) % 900 + 20 for j in range(90 + 9 * i)) for i in range(3)]
            requests = [Request(i, prompt, Sampling(60), seed=i) for i, prompt in enumerate(ids)]
            found = answers(bench.engine, bench.plan((*population(16), MEAN)), requests)
            texts.append({key: r.token_ids for key, r in found.items()})
            counts.append(len(count))
    assert counts[1] > 0
    assert texts[0] == texts[1] == texts[2]


def test_sampled_completions_of_long_prompts():
    """vLLM cannot go on with a seeded completion whose prompt was computed in pieces, on a CPU."""
    with contract.started(VllmEngine, config("lora")) as bench:
        warm = Sampling(4, temperature=0.8)
        requests = [Request(i, tuple(range(20, 220)), warm, seed=i) for i in range(2)]
        found = answers(bench.engine, bench.plan(population(30)), requests)
        assert len(found) == 60 and all(len(r.token_ids) for r in found.values())


def test_the_canary_of_a_prompt_longer_than_a_block_of_the_cache():
    settings = config("lowrank")
    with contract.started(VllmEngine, settings) as bench:
        for length in (128, 129, 130):
            canary.check(bench.engine, bench.space, bench.layout, range(20, 20 + length), generation=0, width=0.05,
                         exact=bench.facts.deterministic)  # fmt: skip


def test_another_vllm_of_this_process_is_as_vllm_makes_it():
    import vllm.model_executor.layers.utils as layers
    from vllm.platforms import current_platform

    before = current_platform.get_punica_wrapper(), layers.dispatch_cpu_unquantized_gemm
    with contract.started(VllmEngine, config("lowrank")):
        assert (current_platform.get_punica_wrapper(), layers.dispatch_cpu_unquantized_gemm) == before


class IgnoresAdapters(VllmEngine):
    """Members' factors are never written: all slots stay zero."""

    def rpc(self, method, *arguments):
        return [] if method == "es_put" else super().rpc(method, *arguments)


class OneForAll(VllmEngine):
    """All members are asked under one adapter."""

    def _ask(self, members, requests):
        for member, slot in members:
            yield from super()._ask([(member, None if slot is None else 0)], requests)


class OneSalt(VllmEngine):
    """What was computed of a prompt with old weights is found again."""

    def _salt(self):
        return "one"


@pytest.mark.parametrize("broken", [IgnoresAdapters, OneForAll])
def test_the_canary_catches_an_adapter_that_is_not_applied(broken):
    settings = config("lowrank")
    loaded = tokens.load(settings.model)
    engine = broken(settings, loaded)
    space = spaces.create(settings)
    layout = space.layout(engine.specs(), engine.dtype)
    engine.start(space, layout, None, False)
    with pytest.raises(CanaryError):
        canary.check(engine, space, layout, loaded.encode("Solve: 3 + 5 ="), generation=0, width=0.05)
    engine.close()


def test_a_stale_prefix_would_be_seen():
    long = "Solve: 3 + 5 = 8. " * 12  # caches keep whole blocks of tokens
    seen = {}
    for kind in (OneSalt, VllmEngine):
        with contract.started(kind, config("lowrank", deterministic=False)) as bench:
            request = [Request(0, bench.tokens.encode(long), Sampling(4), logprobs=True)]
            plan = Plan(0, 0.0, (MEAN,))
            before = answers(bench.engine, plan, request)[-1, 0].logprobs
            for _ in range(20):
                bench.engine.apply(bench.update())
            after = answers(bench.engine, plan, request)[-1, 0]
            want = contract._written(bench, plan, MEAN)
            ids = torch.tensor([[*request[0].prompt_ids, *after.token_ids]])
            with torch.inference_mode():
                logits = want(ids).logits[0, len(request[0].prompt_ids) - 1].log_softmax(-1)
            seen[kind] = abs(float(logits[after.token_ids[0]]) - after.logprobs[0])
            assert before != after.logprobs
    assert seen[VllmEngine] < 1e-3 < seen[OneSalt]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"engine": {"max_model_len": 10**6}}, "set engine.max_model_len to the longest"),
        ({"engine": {"kv_cache_gib": 1e-6}}, "raise engine.kv_cache_gib, which is 1e-06"),
        ({"engine": {"attention_backend": "NO_SUCH"}}, "NO_SUCH"),
        ({"lowrank": {"rank": 20}, "engine": {"population": "deep"}}, "ranks up to 16"),
        ({"engine": {"tensor_parallel_size": 5}}, "tensor_parallel_size 5 does not divide"),
    ],
)
def test_what_cannot_start_is_told_plainly(more, says):
    settings = config("lowrank", **more)
    with pytest.raises(evoalign.EvoalignError, match=says) as error:
        engines.create(settings, tokens.load(settings.model))
    assert "\n" not in str(error.value)


def test_a_form_that_was_asked_for_by_name_is_not_replaced():
    settings = config("lora", lora={"target_modules": ["down_proj"]}, engine={"population": "deep"})
    told = r"population deep does not fit: layer 0: self_attn\.qkv_proj has no members"
    with pytest.raises(ModelError, match=told), contract.started(VllmEngine, settings):
        pass
    settings = config("lora", lora={"target_modules": ["down_proj"]})
    with contract.started(VllmEngine, settings) as bench:
        assert "generic form" in bench.facts.note and "has no members" in bench.facts.note


def test_a_worker_that_fails_is_told_in_a_line():
    told = pytest.raises(evoalign.EvoalignError, match="vLLM failed in es_nothing")
    with contract.started(VllmEngine, config("lora")) as bench, told:
        bench.engine.rpc("es_nothing")


def test_a_prompt_that_is_too_long_is_refused():
    with (
        contract.started(VllmEngine, config("lora", engine={"max_model_len": 32})) as bench,
        pytest.raises(DataError, match="the 32 positions of"),
    ):
        list(bench.engine.rollout(bench.plan(population(2)), [Request(0, (5,) * 30, Sampling(8))]))


def test_other_releases_are_refused(monkeypatch):
    monkeypatch.setattr(starting, "_version", lambda package: "0.19.1")
    with pytest.raises(ModelError, match=r"knows vLLM 0\.26 to .* 0\.19\.1 is installed"):
        starting.check_version()
    monkeypatch.setattr(starting, "_version", lambda package: None)
    with pytest.raises(ModelError, match=r"evoalign\[vllm\]"):
        starting.check_version()
