# SPDX-License-Identifier: Apache-2.0
"""The population path in vLLM itself, on the CPU in float32: every form answers as vLLM's own LoRA kernels do."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.worker.cpu_worker import CPUWorker

from evoalign.engines.vllm import deep, population
from evoalign.engines.vllm.rows import Rows
from evoalign.errors import ModelError
from evoalign.models import tiny

MEMBERS = 30
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = ([5, 9, 17, 33, 2, 40], [11, 3, 60, 7, 21, 8, 90, 14, 2])


class PopulationWorker(CPUWorker):
    """A worker that serves a population and lets the test write the slots."""

    asked: dict[str, Any]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        population.install(**self.asked)
        super().load_model(*args, **kwargs)
        self.active = population.attach(self.model_runner.get_model(), self.model_runner)

    def es_register(self) -> None:
        population.register(self.model_runner.lora_manager, MEMBERS)

    def es_write(self, seed: int, strength: float) -> None:
        """New factors for all members, in place: the same for the same seed, whatever the form."""
        fold = self.asked["scaling"] / population.scaling()
        rank = self.asked["rank"]
        slots = population.stacked(self.model_runner.get_model())
        for index, name in enumerate(sorted(slots)):
            slot, source = slots[name], torch.Generator().manual_seed(1000 * seed + index)
            for tensor, scale in ((slot.a, slot.a.shape[3] ** -0.5), (slot.b, strength * fold)):
                drawn = torch.randn(tensor.shape, generator=source) * scale
                tensor.zero_()
                if tensor is slot.a:
                    tensor[:, :, :rank] = drawn[:, :, :rank]
                else:
                    tensor[..., :rank] = drawn[..., :rank]


@dataclass
class Served:
    """An engine and what the worker says of it."""

    llm: LLM
    worker: Any

    def answers(self, asks: list[tuple[int, int]], length: int = 8) -> dict[tuple[int, int], list[int]]:
        """Greedy tokens of (member or -1, prompt) in one batch; lengths differ, so that rows leave and move up."""
        members = [None if m < 0 else LoRARequest(f"member{m}", m + 1, "resident") for m, _ in asks]
        sampling = [
            SamplingParams(temperature=0, max_tokens=length + m % 3, ignore_eos=True, detokenize=False) for m, _ in asks
        ]
        prompts = [{"prompt_token_ids": PROMPTS[p]} for _, p in asks]
        outputs = self.llm.generate(prompts, sampling, lora_request=members, use_tqdm=False)
        return {ask: list(o.outputs[0].token_ids) for ask, o in zip(asks, outputs, strict=True)}


@contextmanager
def serve(
    model: Path, form: str, rank: int = 1, slot_rank: int = 1, targets: tuple[str, ...] = ALL, **more: Any
) -> Iterator[Served]:
    """An engine on the CPU with one slot a member. One at a time: they share vLLM's process groups."""
    PopulationWorker.asked = {"form": form, "rank": rank, "scaling": 0.5, "fixed": False}
    llm = LLM(
        str(model), worker_cls=f"{__name__}.{PopulationWorker.__name__}", dtype="float32", enforce_eager=True,
        skip_tokenizer_init=True, enable_lora=True, max_loras=MEMBERS, max_cpu_loras=MEMBERS, max_lora_rank=slot_rank,
        lora_target_modules=list(targets), kv_cache_memory_bytes=64 << 20, max_num_seqs=64, max_model_len=64,
        enable_prefix_caching=False, max_num_batched_tokens=256, **more,
    )  # fmt: skip
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    worker.es_register()
    try:
        yield Served(llm, worker)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm, worker
        gc.collect()
        population.install("stock", 1, 1.0, fixed=False)


def random_model(folder: Path, family: str) -> Path:
    """A random model of head dimension 32, without a tokenizer."""
    import transformers

    torch.manual_seed(3)
    common = dict(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1, head_dim=32,
    )  # fmt: skip
    if family == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    else:
        scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, rope_parameters=scaled))
    model.to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tiny": tiny(),
        "qwen3": random_model(folder / "qwen3", "qwen3"),
        "llama": random_model(folder / "llama", "llama"),
    }


def asked() -> list[tuple[int, int]]:
    """Every member, and the base model among them, with each prompt."""
    return [(m, p) for p in range(len(PROMPTS)) for m in (*range(10), -1, *range(10, MEMBERS))]


def everything(served: Served) -> list[dict[tuple[int, int], list[int]]]:
    """Two generations of members by member and prompt, and the base model alone before, between and after."""
    base = [(-1, p) for p in range(len(PROMPTS))]
    found = [served.answers(base)]
    for seed in (1, 2):
        served.worker.es_write(seed, 0.3)
        found += [served.answers(asked()), served.answers(base)]
    return found


def without_base(answers: dict[tuple[int, int], list[int]]) -> dict[tuple[int, int], list[int]]:
    """vLLM 0.32's own kernels for CPUs give rows of the base model the last slot's adapter in a mixed batch."""
    return {ask: tokens for ask, tokens in answers.items() if ask[0] >= 0}


@pytest.mark.parametrize(("rank", "slot_rank"), [(1, 1), (3, 8)])
@pytest.mark.parametrize("family", ["tiny", "qwen3", "llama"])
def test_every_form_answers_as_vllm_does(models, family, rank, slot_rank):
    with serve(models[family], "stock", rank, slot_rank) as served:
        base, first, _, second, _ = everything(served)
    assert len({tuple(t[:8]) for t in first.values()}) > MEMBERS, "members hardly differ: this would show nothing"
    assert sum(first[ask] == second[ask] for ask in first) < MEMBERS
    for form in ("generic", "deep"):
        with serve(models[family], form, rank, slot_rank) as served:
            assert served.worker.active == (form, "")
            found = everything(served)
        assert [without_base(found[1]), without_base(found[3])] == [without_base(first), without_base(second)], form
        assert found[0] == found[2] == found[4] == base, form
        for mixed in (found[1], found[3]):
            assert {ask: mixed[ask] for ask in base} == base, form
