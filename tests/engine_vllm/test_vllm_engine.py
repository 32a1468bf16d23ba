# SPDX-License-Identifier: Apache-2.0
"""vLLM engines with other settings: journals, slots, queues, prefixes, errors at start. Each test starts one."""

import json
from dataclasses import replace

import pytest
import replicated
import torch
import vllm
from families import build
from served import SPACES, answers, config

import evoalign
from evoalign import engines, tokens
from evoalign.config import ModelConfig
from evoalign.engines.vllm.engine import VllmEngine
from evoalign.errors import ModelError
from evoalign.kernels import compiled
from evoalign.testing import engines as contract
from evoalign.testing.answers import same_up_to_ties, written
from evoalign.types import MEAN, Plan, Request, Sampling, population


@pytest.mark.long
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("variant", SPACES)
def test_each_check_of_the_contract_on_a_new_engine(variant, check):
    with contract.started(VllmEngine, config(variant)) as bench:
        check(bench)


@pytest.mark.first("lowrank")  # members in slots, and a mean that is written into the weights
@pytest.mark.parametrize("space", ["lora", "lowrank", "full", "singular", "subspace, cma", "subspace, sep_cma"])
def test_five_generations_have_the_same_journal(space, tmp_path):
    found = []
    for engine in ("vllm", "transformers"):
        tree = config(space, engine).model_dump(mode="json")
        length = {"max_tokens": 12}
        tree |= {"output_dir": str(tmp_path / engine), "sampling": length, "evaluation": length}
        tree |= {"task": {"name": "conciseness"}}
        tree["es"] |= {"num_generations": 5, "population_size": 8}
        evoalign.train(tree)
        lines = [json.loads(line) for line in (tmp_path / engine / "journal.jsonl").read_text().splitlines()]
        own = "static decoder" if compiled.here() else None
        wanted = f"vllm {vllm.__version__.partition('+')[0]}" if engine == "vllm" else own
        library = lines[0]["machine"].get("library")
        assert (library and library.partition("+")[0]) == wanted  # installations for a CPU add +cpu to the version
        found.append([{k: v for k, v in line.items() if k not in ("hash", "previous", "chain")} for line in lines[1:]])
    moved = [line for line in found[0] if any(line.get("coefficients", ()))]
    assert len(moved) >= 4
    assert found[0] == found[1]


def test_more_members_than_slots_generate_in_several_batches():
    plan, texts = None, []
    for members in (None, 4):
        with contract.started(VllmEngine, config("lora", engine={"members": members})) as bench:
            plan = bench.plan((*population(11), MEAN))
            texts.append({k: r.token_ids for k, r in answers(bench.engine, plan, bench.requests).items()})
    assert texts[0] == texts[1] and len(texts[0]) == 12 * len(contract.PROMPTS)


def test_preempted_and_queued_rows_keep_their_members():
    texts, counts = [], []
    for own in ({}, {"kv_cache_gib": 0.003}, {"max_num_seqs": 5}):
        with contract.started(VllmEngine, config("lowrank", engine=own)) as bench:
            scheduler, count = bench.engine.llm.llm_engine.engine_core.engine_core.scheduler, []
            preempt = scheduler._preempt_request
            scheduler._preempt_request = lambda *a, own=count, old=preempt, **k: (own.append(1), old(*a, **k))[1]
            ids = [tuple((7 * j * j + 3 * j + i) % 900 + 20 for j in range(90 + 9 * i)) for i in range(3)]
            requests = [Request(i, prompt, Sampling(40), seed=i) for i, prompt in enumerate(ids)]
            found = answers(bench.engine, bench.plan((*population(10), MEAN)), requests)
            texts.append({key: r.token_ids for key, r in found.items()})
            counts.append(len(count))
    assert counts[1] > 0
    assert texts[0] == texts[1] == texts[2]


def test_a_mixture_on_a_cpu_is_refused(tmp_path):
    made = config("lora").model_copy(update={"model": ModelConfig(name=str(build("qwen3_moe", tmp_path / "mixture")))})
    with pytest.raises(ModelError, match=r"mixture of experts, .* GPU"), contract.started(VllmEngine, made):
        pass


@pytest.mark.releases
def test_salts_prevent_stale_prefixes(monkeypatch):
    """A prefix computed with old weights is reused under the same salt, and never under ours."""
    with contract.started(VllmEngine, config("lowrank", deterministic=False)) as bench:
        long = bench.tokens.encode("Solve: 3 + 5 = 8. " * 12)  # caches hold whole blocks of tokens
        request, plan = [Request(0, long, Sampling(4), logprobs=True)], Plan(0, 0.0, (MEAN,))

        def off():
            """Return the error of the first token's log-probability after updates, compared with transformers."""
            before = answers(bench.engine, plan, request)[-1, 0].logprobs
            for _ in range(20):
                bench.engine.apply(bench.update())
            after = answers(bench.engine, plan, request)[-1, 0]
            ids = torch.tensor([[*long, *after.token_ids]])
            with torch.inference_mode():
                logits = written(bench, plan, MEAN)(ids).logits[0, len(long) - 1].log_softmax(-1)
            assert before != after.logprobs
            return abs(float(logits[after.token_ids[0]]) - after.logprobs[0])

        assert off() < 1e-3
        monkeypatch.setattr(bench.engine, "_salt", lambda: "one")
        assert off() > 1e-3


@pytest.mark.releases
def test_later_turn_of_a_session_uses_the_cache_of_its_own_member():
    """Also where members have left, so that others have their adapters' slots."""
    with contract.started(VllmEngine, config("lowrank", deterministic=False)) as bench:
        manager = bench.engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        known, own = [], manager.get_computed_blocks
        manager.get_computed_blocks = lambda *a, **k: (found := own(*a, **k), known.append(found[1]))[0]
        plan = bench.plan(population(6))
        long = bench.tokens.encode("Solve: 3 + 5 = 8. " * 8)
        first = answers(bench.engine, plan, [Request(0, long, Sampling(120, 1.0), session=1)])
        later = [
            Request(i, (*long, *r.token_ids, *long[:9]), Sampling(4), logprobs=True, member=r.member, session=1)
            for i, r in enumerate(first.values())
        ]
        known.clear()
        found = answers(bench.engine, plan, later)
        assert max(known) > len(long), "whole blocks of tokens, of the completion too"
        common = bench.tokens.encode("Solve: 3 + 5 = 8. " * 14)  # a whole block that all members have read
        answers(bench.engine, plan, [Request(0, common, Sampling(1), session=2)])
        # Without the first member the others have the slots of those before them.
        moved = [replace(r, index=r.index + 10, prompt_ids=common, session=2) for r in later if r.member.index]
        found |= answers(bench.engine, plan, moved)
        known.clear()
        wanted = answers(bench.engine, plan, [replace(r, session=None) for r in (*later, *moved)])
        assert max(known) == 0
        for key, want in wanted.items():
            assert found[key].token_ids == want.token_ids
            assert found[key].logprobs == pytest.approx(want.logprobs, abs=1e-4)
        assert len({r.logprobs for r in wanted.values()}) == len(wanted)


@pytest.mark.releases
def test_close_resets_the_pool_of_cuda_graphs():
    """vLLM keeps one memory pool for the CUDA graphs of all engines, which is freed with the first one's graphs."""
    from vllm.platforms import current_platform

    with contract.started(VllmEngine, config("lowrank")):
        type(current_platform)._global_graph_pool = object()
    assert type(current_platform)._global_graph_pool is None


@pytest.mark.releases
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"engine": {"max_model_len": 10**6}}, "engine.max_model_len"),
        ({"engine": {"kv_cache_gib": 1e-6}}, "engine.kv_cache_gib.* 1e-06"),
        ({"engine": {"attention_backend": "NO_SUCH"}}, "NO_SUCH"),
        ({"lowrank": {"rank": 20}, "engine": {"population": "deep"}}, "ranks up to 16"),
        ({"engine": {"tensor_parallel_size": 5}}, "tensor_parallel_size 5"),
    ],
)
def test_start_reports_the_setting_in_one_line(more, words):
    settings = config("lowrank", **more)
    with pytest.raises(evoalign.EvoalignError, match=words) as error:
        engines.create(settings, tokens.load(settings.model))
    assert "\n" not in str(error.value)


@pytest.mark.releases
def test_a_form_set_by_name_is_not_replaced():
    settings = config("lora", lora={"target_modules": ["down_proj"]}, engine={"population": "deep"})
    message = r"population deep .*self_attn\.qkv_proj has no members"
    with pytest.raises(ModelError, match=message), contract.started(VllmEngine, settings):
        pass
    settings = config("lora", lora={"target_modules": ["down_proj"]})
    with contract.started(VllmEngine, settings) as bench:
        assert "generic form" in bench.facts.note and "has no members" in bench.facts.note


@pytest.mark.parametrize("space, lose", [pytest.param("lora", True, marks=pytest.mark.long), ("lowrank", False)])
def test_two_replicas_in_ray_actors_are_one_engine(space, lose):
    replicated.check_life(config(space), replicated.equal, lose)


@pytest.mark.long
def test_each_replica_launches_a_server_at_a_separate_port():
    replicated.check_life(config(name="vllm-server"), same_up_to_ties, lose=True)
