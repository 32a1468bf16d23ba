# SPDX-License-Identifier: Apache-2.0
"""Which GPUs hold a run, by the shapes of config.json files; no weights and no GPU are needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from safetensors.torch import save_file

from evoalign import spaces
from evoalign.config import Config, from_dict
from evoalign.cost import cards
from evoalign.cost.cards import Card, Work
from evoalign.cost.weights import weight_bytes
from evoalign.engines.gpu import OUTSIDE, SHARED
from evoalign.engines.specs import specs_of_config
from evoalign.engines.vllm.settings import EXPERT_RANK
from evoalign.preflight import plan
from evoalign.setup import layout_of
from evoalign.training.train import dry_run

ROOT = Path(__file__).resolve().parents[2]
W4A16 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}},
}  # fmt: skip
SIZES = {  # hidden size, layers, heads, heads of keys and values, MLP, vocabulary
    "7b": (3584, 28, 28, 4, 18944, 152064),
    "32b": (5120, 64, 40, 8, 27648, 152064),
    "70b": (8192, 80, 64, 8, 28672, 128256),
    "tiny": (64, 2, 4, 2, 128, 256),
}
WORK = Work(128, 160)
DATA = {f"{split}_data": str(ROOT / f"data/tasks/conciseness/questions_{split}.json") for split in ("train", "test")}
TASK = {"name": "conciseness", "batch_size": 4, **DATA}
SMALL = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.95, "max_model_len": 512}


def model(folder: Path, size: str, quantised: dict[str, Any] | None = None, *, tied: bool = False) -> str:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
             "vocab_size")  # fmt: skip
    tree = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768,
        "tie_word_embeddings": tied, **dict(zip(names, SIZES[size], strict=True)),
        **({"quantization_config": quantised} if quantised else {}),
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tree))
    return str(folder)


def run(name: str, engine: dict[str, Any], rank: int = 1, members: int = 32, **more: Any) -> Config:
    return from_dict({
        "model": {"name": name}, "space": "lora", "lora": {"rank": rank}, "engine": engine,
        "es": {"sigma": 0.01, "learning_rate": 0.005, "population_size": members}, **more,
    })  # fmt: skip


def fitting(config: Config) -> tuple[cards.CardEstimate, dict[float, Card]]:
    specs = specs_of_config(config)
    found = cards.card_estimate(config, specs, layout_of(spaces.create(config), specs, torch.bfloat16), WORK)
    assert found is not None
    return found, {card.size: card for card in found.cards()}


def test_weights_without_files_follow_from_bits_and_groups(tmp_path: Path) -> None:
    config = run(model(tmp_path, "32b", W4A16), {"name": "vllm"})
    specs = specs_of_config(config)
    size = weight_bytes(config, specs, torch.bfloat16)
    matrices = 64 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 27648)
    packed, others = matrices * (4 + 16 / 128) / 8, 2 * 2 * 152064 * 5120
    assert packed + others < size < packed + others + 3e6  # norms and biases
    assert 18e9 < size < 19.5e9
    dense = run(model(tmp_path, "32b"), {"name": "vllm"})
    assert weight_bytes(dense, specs, torch.bfloat16) > 65e9


def test_weights_of_a_packed_base_are_the_tensors_of_its_files(tmp_path: Path) -> None:
    name = model(tmp_path, "tiny", W4A16, tied=True)
    embedding = torch.zeros(256, 64, dtype=torch.bfloat16)
    save_file(
        {
            "model.embed_tokens.weight": embedding,
            "model.layers.0.mlp.down_proj.weight_packed": torch.zeros(64, 16, dtype=torch.int32),
            "model.layers.0.mlp.down_proj.weight_scale": torch.zeros(64, 1, dtype=torch.bfloat16),
            "model.layers.0.mlp.down_proj.flag": torch.zeros(3, dtype=torch.bool),
            "lm_head.weight": embedding.clone(),
        },
        tmp_path / "model.safetensors",
    )
    config = run(name, {"name": "vllm"})
    assert weight_bytes(config, specs_of_config(config), torch.bfloat16) == 256 * 64 * 2 + 64 * 16 * 4 + 64 * 2 + 3


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": "../model.safetensors"}}])
def test_a_damaged_index_leaves_the_size_by_bits(index: dict[str, Any], tmp_path: Path) -> None:
    config = run(model(tmp_path / "model", "tiny", W4A16), {"name": "vllm"})
    specs = specs_of_config(config)
    by_bits = weight_bytes(config, specs, torch.bfloat16)
    save_file({"a": torch.zeros(9)}, tmp_path / "model.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(config, specs, torch.bfloat16) == by_bits


def test_weights_in_8_bits_of_bitsandbytes_are_dense(tmp_path: Path) -> None:
    for bits, dense in ((8, True), (4, False)):
        how = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
        config = run(model(tmp_path, "tiny", how), {"name": "transformers"})
        specs = specs_of_config(config)
        whole = 2 * sum(torch.Size(s.shape).numel() for s in specs)
        assert (weight_bytes(config, specs, torch.bfloat16) == whole) == dense


def test_weights_are_dense_where_the_engine_unpacks_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run(model(tmp_path, "tiny", W4A16), {"name": "vllm"})
    specs = specs_of_config(config)
    packed = weight_bytes(config, specs, torch.bfloat16)
    dense = config.model_copy(update={"engine": run("tiny", {"name": "transformers"}).engine})
    assert weight_bytes(dense, specs, torch.bfloat16) == 2 * sum(torch.Size(s.shape).numel() for s in specs) > packed
    held = run(config.model.name, {"name": "ray", "replica": {"name": "vllm"}})
    assert weight_bytes(held, specs, torch.bfloat16) == packed


def test_32b_in_4_bits_fits_24_gib_at_rank_1_and_not_at_rank_16(tmp_path: Path) -> None:
    name = model(tmp_path, "32b", W4A16)
    plan_1, found = fitting(run(name, {"name": "vllm", "gpu_memory_gib": 23.5, **SMALL}))
    card, capped = found[23.6], found[23.5]
    assert not card.lacks and card.members is not None and card.members > 32
    per_token = 64 * 2 * 8 * 128 * 2
    assert card.tokens == int(card.left / per_token) and card.at_once == int(card.left / (160 * per_token))
    assert capped.left == pytest.approx(card.left - 0.1 * 0.95 * 2**30)
    assert card.context == int(card.left / 128 / per_token) < 160  # 128 completions do not all fit at once
    slot = 2 * 64 * (2 * (5120 + 5120) + 2 * (5120 + 1024) + 3 * (5120 + 27648))
    assert plan_1.parts["adapters of 33 slots"] == 33 * slot
    used = sum(plan_1.parts.values()) + plan_1.step(23.6) + card.left
    assert used == pytest.approx(0.95 * 23.6 * 2**30 - SHARED)
    assert capped.tokens == pytest.approx(12_720, abs=600), "the tokens that vLLM 0.26 had on an H200"
    _, found = fitting(run(name, {"name": "vllm", **SMALL}, rank=16))
    assert found[23.6].lacks.startswith("lacks 5.") and not found[47.4].lacks
    one = 16 * slot + 160 * per_token  # what one more member takes; the mean keeps its slot
    assert found[47.4].members == int((found[47.4].left + 32 * 16 * slot) / one)
    assert found[47.4].members != int((found[47.4].left + 33 * 16 * slot) / one)


def test_full_share_of_a_card_leaves_the_context_out(tmp_path: Path) -> None:
    name = model(tmp_path, "7b")
    found = [fitting(run(name, {"name": "vllm", **SMALL, "gpu_memory_utilization": u}))[1] for u in (0.99, 1.0)]
    assert found[0][23.6].left == found[1][23.6].left
    assert found[1][23.6].left + sum(fitting(run(name, {"name": "vllm", **SMALL}))[0].parts.values()) < (
        23.6 * 2**30 - OUTSIDE
    )


def test_larger_models_and_dense_ones(tmp_path: Path) -> None:
    _, dense = fitting(run(model(tmp_path / "a", "70b"), {"name": "vllm", **SMALL}))
    assert all(card.lacks for card in dense.values())
    _, packed = fitting(run(model(tmp_path / "b", "70b", W4A16), {"name": "vllm", **SMALL}))
    assert packed[23.6].lacks and packed[47.4].at_once and not packed[79.1].lacks
    split, two = fitting(run(model(tmp_path / "a", "70b"), {"name": "vllm", **SMALL, "tensor_parallel_size": 4}))
    assert two[47.4].label == "4 x 48 GiB" and not two[47.4].lacks and split.parts["weights"] < 36e9
    _, seven = fitting(run(model(tmp_path / "c", "7b"), {"name": "vllm", **SMALL}))
    assert not seven[23.6].lacks and seven[23.6].members


def test_context_that_the_cache_does_not_hold_names_the_setting(tmp_path: Path) -> None:
    name = model(tmp_path, "7b")
    engine = {"name": "vllm", **SMALL, "kv_cache_gib": 0.125}
    _, found = fitting(run(name, {**engine, "max_model_len": 4096}))
    tokens = found[79.1].tokens
    assert found[79.1].left == 2**27 and tokens == 2**27 // (28 * 2 * 4 * 128 * 2)
    assert found[79.1].lacks == f"needs engine.max_model_len of at most {tokens:,}"
    assert not fitting(run(name, {**engine, "max_model_len": tokens}))[1][79.1].lacks
    _, unset = fitting(run(name, {**engine, "max_model_len": None}))
    assert "engine.max_model_len" in unset[79.1].lacks, "the model has 32,768 positions"


def test_steps_and_graphs_follow_the_settings(tmp_path: Path) -> None:
    name = model(tmp_path, "7b")
    usual, _ = fitting(run(name, {"name": "vllm"}))
    assert usual.step(47.4) == 1024 * 152064 * 16, "logits"
    few, _ = fitting(run(name, {"name": "vllm", "max_num_seqs": 8}))
    assert few.step(79.1) == 2 * few.step(47.4) == 16384 * 3 * (18944 + 3584) * 2, "activations"
    small, _ = fitting(run(name, {"name": "vllm", **SMALL}))
    assert small.step(79.1) == small.step(23.6) < usual.step(23.6)
    eager, _ = fitting(run(name, {"name": "vllm", **SMALL, "enforce_eager": True}))
    assert eager.parts["CUDA graphs"] == 0 < small.parts["CUDA graphs"] < usual.parts["CUDA graphs"]


def test_a_master_in_host_memory_takes_none_of_the_gpu(tmp_path: Path) -> None:
    name = model(tmp_path, "7b")
    device = fitting(run(name, {"name": "vllm", **SMALL}, space="full"))[0].parts["mean"]
    host = fitting(run(name, {"name": "vllm", **SMALL, "master": "host"}, space="full"))[0].parts["mean"]
    assert device > 28e9 and host == 0


def test_transformers_divides_what_is_free(tmp_path: Path) -> None:
    name = model(tmp_path, "7b")
    free, found = fitting(run(name, {"device": "cuda"}))
    whole = 23.6 * 2**30 - OUTSIDE - sum(free.parts.values())
    factors = 2 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)) * 32
    assert found[23.6].left == pytest.approx(whole / 2 - free.step(23.6) - factors)
    _, fixed = fitting(run(name, {"device": "cuda", "memory_gib": 2}))
    assert fixed[23.6].left == fixed[79.1].left < 2**31
    config = run(name, {"device": "cpu"})
    assert config.engine.serving(config) is None
    config = run(name, {"name": "ray", "replica": {"gpu_memory_gib": 12}})
    assert fitting(config)[1][12].left < 0, "a replica's cap plans a GPU on any machine"


def test_dry_run_prints_the_table_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = model(tmp_path, "32b", W4A16)
    config = run(name, {"name": "vllm", **SMALL, "gpu_memory_gib": 20}, task=TASK, output_dir=str(tmp_path / "run"))
    text = "\n".join(dry_run(config))
    assert "memory on a GPU, estimated: weights 17.89 GiB, adapters of 33 slots 0.52 GiB" in text
    assert text.count("weights 17.89 GiB") == 2, "both lines are of a GPU, which serves bfloat16"
    rows = {line.strip()[:9].strip(): line for line in text.splitlines() if line.startswith("  ")}
    assert " yes " in rows["48 GiB (4"] and "no, " in rows["capped at"]
    assert "with all 128 of a generation at once" in text and "where a card is too small: lower" in text


def test_doctor_compares_with_the_cap_and_names_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def sizes(_: object = None) -> tuple[int, int]:
        return 140 << 30, 141 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", sizes)
    name = model(tmp_path, "7b")
    assert plan.free_memory(run(name, {"name": "vllm", "gpu_memory_gib": 10})) == (10 << 30) - OUTSIDE
    assert plan.free_memory(run(name, {"name": "vllm"})) == 140 << 30
    case = plan.Case(run(name, {"name": "vllm", **SMALL}, task=TASK))
    for check in (plan.check_task, plan.check_targets):
        check(case)
    line = "; GPUs that hold the run, estimated: 24 GiB yes, 48 GiB yes, 80 GiB yes"
    assert plan.check_memory(case).detail.endswith(line)
    case.task = None
    assert "GPUs" not in plan.check_memory(case).detail


def test_dry_run_says_what_a_gpu_refuses(tmp_path: Path) -> None:
    mixture, stock = str(build("qwen3_moe", tmp_path / "mixture")), {"name": "vllm", "population": "stock"}
    packed = model(tmp_path / "packed", "tiny", W4A16 | {"ignore": ["lm_head", "re:.*"]})
    over = {"task": TASK, "output_dir": str(tmp_path / "run"), "deterministic": True}
    cases = [run(packed, {"name": "vllm"}, **over), run(mixture, stock, **over), run(mixture, {"name": "vllm"}, **over)]
    cases.append(run(mixture, stock, rank=EXPERT_RANK + 1, **over | {"deterministic": None}))
    found = [case.engine.refused_on_gpu(case, specs_of_config(case)) for case in cases]
    assert [why and why.partition(" ")[0] for why in found] == ["deterministic:", "deterministic:", None, "lora.rank"]
    assert f"  refused on a GPU: {found[1]}" in dry_run(cases[1])
    replicas = run(mixture, {"name": "ray", "replica": stock}, **over)
    assert replicas.engine.refused_on_gpu(replicas, specs_of_config(replicas)) == found[1]
