# SPDX-License-Identifier: Apache-2.0
"""Mixtures on engine vllm, with vLLM's product for experts in plain torch: experts evolve in the stock form alone."""

import json
from dataclasses import replace

import plain_experts
import plugins
import pytest
import vllm
from families import build
from served import answers, config
from vllm.lora.request import LoRARequest

import evoalign
from evoalign import engines
from evoalign.config import from_dict
from evoalign.engines.vllm import start
from evoalign.engines.vllm.engine import VllmEngine
from evoalign.errors import ModelError
from evoalign.exporting.export import export
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import saved_folders
from evoalign.testing import engines as contract
from evoalign.types import MEAN, population

WIDE = {"head_dim": 32}
"""vLLM's attention on a CPU takes no heads of 8 or 16."""
CHANGES = {"qwen2_moe": {"hidden_size": 128}, "olmoe": {"hidden_size": 128}}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(start, "EXPERTS_ON_CPU", True)
    plain_experts.use(monkeypatch.setattr)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")

    def made(family):
        there = folder / family
        return there if there.exists() else build(family, there, **CHANGES.get(family, WIDE))

    return made


def over(folder, name, form="stock", **more):
    tree = config("lora", name).model_dump(mode="json") | {"model": {"name": str(folder), "dtype": "float32"}}
    own = {"population": form, **more} if name == "vllm" else more
    return from_dict(tree | {"engine": tree["engine"] | own})


def said(made):
    with contract.started(engines.create, made) as bench:
        requests = [replace(request, logprobs=True) for request in bench.requests]
        return bench.layout.modules, answers(bench.engine, bench.plan((*population(6), MEAN)), requests)


def apart(one, other):
    assert one.keys() == other.keys()
    return max(abs(one[key].logprobs[0] - other[key].logprobs[0]) for key in one)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "olmoe", "qwen2_moe"])
def test_members_answer_as_in_process(family, model):
    """Qwen2-MoE's experts take no adapters of PEFT; its shared expert's gate has two names in vLLM's model."""
    (theirs, vllm), (ours, process) = (said(over(model(family), name)) for name in ("vllm", "transformers"))
    assert theirs == ours and any(".experts." in name for name in ours) == (family != "qwen2_moe")
    assert apart(vllm, process) < 1e-4
    assert len({one.logprobs[0] for one in vllm.values()}) == len(vllm)


def test_in_other_forms_members_share_the_experts(model):
    modules, found = said(over(model("qwen3_moe"), "vllm", "auto"))
    assert modules and not any(".experts." in name for name in modules)
    assert len({one.logprobs[0] for one in found.values()}) == len(found)


def test_a_run_has_the_journal_of_the_same_run_in_process(model, tmp_path):
    found = []
    for name in ("vllm", "transformers"):
        length = {"max_tokens": 12}
        tree = over(model("qwen3_moe"), name).model_dump(mode="json")
        tree |= {"output_dir": str(tmp_path / name), "sampling": length, "evaluation": length}
        tree |= {"task": {"name": "conciseness"}}
        tree["es"] |= {"num_generations": 3, "population_size": 8}
        evoalign.train(tree)
        lines = [json.loads(line) for line in (tmp_path / name / "journal.jsonl").read_text().splitlines()]
        found.append([{k: v for k, v in line.items() if k not in ("hash", "previous", "chain")} for line in lines[1:]])
    assert any(any(line.get("coefficients", ())) for line in found[0])
    assert found[0] == found[1]


def test_each_of_two_workers_has_half_of_each_expert(model, tmp_path, monkeypatch):
    for folder in plugins.written(tmp_path, "plain_experts"):
        monkeypatch.syspath_prepend(folder)
    (_, one), (_, two) = (said(over(model("qwen3_moe"), "vllm", tensor_parallel_size=size)) for size in (1, 2))
    assert apart(one, two) < 1e-4


def test_the_exported_adapter_answers_in_plain_vllm(model, tmp_path):
    """An adapter of experts alone, as vLLM loads its files: greedy, as the run's mean in process, not as the base."""
    tree = over(model("qwen3_moe"), "transformers").model_dump(mode="json")
    tree |= {"output_dir": str(tmp_path / "run"), "sampling": {"max_tokens": 8}, "evaluation": {"max_tokens": 8}}
    tree |= {"task": {"name": "conciseness"}}
    tree["es"] |= {"num_generations": 2, "population_size": 8, "sigma": 0.3, "learning_rate": 0.3}
    tree["lora"] |= {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
    evoalign.train(tree)
    export(tmp_path / "run", tmp_path / "adapter")
    with contract.started(engines.create, from_dict(tree)) as bench:
        bench.engine.load(checkpoint.load(saved_folders(tmp_path / "run")[-1], bench.layout)[0])
        mean = {r.request: list(r.token_ids) for r in bench.engine.rollout(bench.plan((MEAN,)), bench.requests)}
    stops = list(bench.tokens.stop_ids)
    length = vllm.SamplingParams(temperature=0, max_tokens=contract.TOKENS, stop_token_ids=stops, detokenize=False)
    served = vllm.LLM(
        str(model("qwen3_moe")), dtype="float32", skip_tokenizer_init=True, enable_lora=True, max_lora_rank=8,
        kv_cache_memory_bytes=64 << 20, max_model_len=256, enforce_eager=True, generation_config="vllm",
    )  # fmt: skip
    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in bench.requests]

    def answered(adapter):
        found = served.generate(prompts, length, lora_request=adapter, use_tqdm=False)
        pairs = zip(bench.requests, found, strict=True)
        return {request.index: list(one.outputs[0].token_ids) for request, one in pairs}

    try:
        assert answered(LoRARequest("exported", 1, str(tmp_path / "adapter"))) == mean
        assert answered(None) != mean
    finally:
        served.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("form", ["stock", "auto"])
def test_the_dry_run_counts_the_memory_of_the_slots(form, model):
    made = over(model("qwen3_moe"), "vllm", form)
    with contract.started(VllmEngine, made) as bench:
        worker = bench.engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        layers = worker.model_runner.lora_manager._adapter_manager.modules.values()
        names = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
        linear = ("lora_a_stacked", "lora_b_stacked")
        taken = sum(
            tensor.nbytes for layer in layers for name in (names if hasattr(layer, names[0]) else linear)
            for tensor in getattr(layer, name)
        )  # fmt: skip
        held = made.engine.held(made, bench.engine.specs(), bench.layout, bench.engine.dtype, 0)
    assert held.adapters == taken


def test_a_mixture_without_a_model_of_vllm_is_refused(model):
    with pytest.raises(ModelError, match="transformers"), contract.started(VllmEngine, over(model("dots1"), "vllm")):
        pass


def test_a_run_of_lowrank_over_a_mixture_ends(model, tmp_path):
    tree = over(model("qwen3_moe"), "vllm").model_dump(mode="json")
    tree = {key: value for key, value in tree.items() if key not in ("lora", "space")} | {"space": "lowrank"}
    length = {"max_tokens": 4}
    tree |= {"output_dir": str(tmp_path), "sampling": length, "evaluation": length, "task": {"name": "conciseness"}}
    tree["es"] |= {"num_generations": 1, "population_size": 4}
    evoalign.train(tree)
    assert (tmp_path / "results" / "evaluation.json").exists()
