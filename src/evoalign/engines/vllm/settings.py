# SPDX-License-Identifier: Apache-2.0
"""The settings of vLLM, and what follows from them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from evoalign.config.base import Count, Gib, Word
from evoalign.config.engines import EngineSettings, MemoryUse
from evoalign.config.outside import INSIDE

if TYPE_CHECKING:
    import torch

    from evoalign.config import Config
    from evoalign.types import Layout, TensorSpec


class VllmConfig(EngineSettings):
    """vLLM in this process, which all members share; needs the extra `vllm`. It takes the GPUs it finds."""

    name: Literal["vllm"]  # pyright: ignore[reportIncompatibleVariableOverride]
    tensor_parallel_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """GPUs over which each matrix is split."""
    gpu_memory_utilization: Annotated[float, Field(ge=1e-3, le=1)] = 0.9
    """Share of a GPU's memory for the weights, the float32 master, the adapters and the cache together."""
    kv_cache_gib: Gib | None = None
    """Room for keys and values. None: what `gpu_memory_utilization` leaves; 1 on the CPU."""
    max_num_seqs: Count = 1024
    """At most this many sequences in one batch; more wait their turn."""
    max_num_batched_tokens: Count | None = None
    """At most this many tokens in one step; None leaves vLLM's own choice."""
    max_model_len: Count | None = None
    """Longest prompt and completion together; None: as many positions as the model has."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy: random weights of the model's shapes, to measure with."""
    enforce_eager: bool = False
    """No CUDA graphs: a faster start and slower steps."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """vLLM's own seed, of dummy weights. None: the run's. Completions are seeded by prompt and sample."""
    attention_backend: Annotated[Word | None, INSIDE] = None
    """One of vLLM's, such as FLASH_ATTN or TRITON_ATTN; None leaves vLLM's own choice."""
    population: Literal["auto", "deep", "generic", "stock"] = "auto"
    """How rows get their members' terms. `deep`: inside the kernels of norm, rotation and activation (Qwen2, Qwen3,
    Llama). `generic`: one kernel a layer, any model. `stock`: vLLM's own multi-LoRA. auto: the first that fits."""
    members: Count | None = None
    """Adapters on the GPU at once; None: the population. A larger population takes its turns."""
    master: Literal["device", "host"] = "device"
    """Where the float32 mean of `lowrank` and `full` lies; `host` frees 4 bytes a weight and makes updates slower."""

    path = "evoalign.engines.vllm.engine:VllmEngine"
    resources = frozenset({
        "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_gib", "max_num_seqs", "max_num_batched_tokens",
        "max_model_len", "enforce_eager", "attention_backend", "population", "members", "master",
    })  # fmt: skip
    takes_mixtures = False
    lighter = "lower engine.members, raise engine.tensor_parallel_size, set engine.master host"

    @property
    def device(self) -> str:
        """The former name of `where`."""
        return self.where

    @property
    def devices(self) -> int:
        return self.tensor_parallel_size

    def held(
        self, config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, mean: int
    ) -> MemoryUse:
        """Room for every member's factors, and the least cache that is worth starting with: vLLM takes all that
        `gpu_memory_utilization` leaves."""
        from evoalign.engines.specs import on_gpu
        from evoalign.engines.vllm import adapters

        return MemoryUse(
            cache=(self.kv_cache_gib or 1.0) * 2**30,
            bound="at least",
            setting="engine.kv_cache_gib",
            adapters=adapters.slot_bytes(config, layout, specs, dtype),
            host=mean if self.master == "host" and on_gpu(config) else 0,
        )

    def limit(self) -> tuple[str, int] | None:
        return None if self.max_model_len is None else ("engine.max_model_len", self.max_model_len)

    def smaller(self, config: Config) -> str:
        host = config.section.evolves_model and self.master == "device"
        mean = ", or set engine.master host" if host else ""
        return f"lower engine.gpu_memory_utilization, engine.kv_cache_gib or engine.max_num_seqs{mean}"
