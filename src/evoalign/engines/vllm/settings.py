# SPDX-License-Identifier: Apache-2.0
"""The config section of engine vllm, and the adapter slots that follow from it. Imports no torch and no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, cast

from pydantic import Field, model_validator

from evoalign.config.base import Count, Gib, Word
from evoalign.config.engines import CardGib, EngineSettings, MemoryUse, Serving
from evoalign.config.outside import INSIDE
from evoalign.errors import ConfigError
from evoalign.models.forms import IN_SERVERS

if TYPE_CHECKING:
    import torch

    from evoalign.config import Config
    from evoalign.types import Layout, TensorSpec

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks for which vLLM can allocate slots."""
KERNEL_RANK = 16
"""Highest rank that the population kernels support."""
EXPERT_RANK = 128
"""Highest rank of experts' adapters, of vLLM 0.26."""
SMALL = (8, 32, 64, 128, 256)
"""Sizes of small batches for which a CUDA graph is captured."""


class VllmConfig(EngineSettings):
    """vLLM in this process, with all members in one batch; needs the extra `vllm`. Uses the GPUs it finds."""

    name: Literal["vllm"]  # pyright: ignore[reportIncompatibleVariableOverride]
    tensor_parallel_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """GPUs over which each matrix is split."""
    gpu_memory_utilization: Annotated[float, Field(ge=1e-3, le=1)] = 0.9
    """Share of a GPU's memory for the weights, the float32 master, the adapters and the cache together."""
    gpu_memory_gib: CardGib | None = None
    """Size that the GPU is treated as, to rehearse a smaller one: the whole process stays below it. None: its own."""
    kv_cache_gib: Gib | None = None
    """Memory for keys and values. None: what `gpu_memory_utilization` leaves; 1 on the CPU."""
    max_num_seqs: Count = 1024
    """Maximum number of sequences in one batch; further ones wait."""
    max_num_batched_tokens: Count | None = None
    """Maximum number of tokens in one step; None: vLLM's default."""
    max_model_len: Count | None = None
    """Longest prompt and completion together; None: the model's number of positions."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy: random weights of the model's shapes, for benchmarks."""
    enforce_eager: bool = False
    """No CUDA graphs: a faster start and slower steps."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """vLLM's seed for dummy weights. None: the run's. Completions are seeded by prompt and sample."""
    attention_backend: Annotated[Word | None, INSIDE] = None
    """A backend of vLLM, such as FLASH_ATTN or TRITON_ATTN; None: vLLM's default."""
    population: Literal["auto", "deep", "generic", "stock"] = "auto"
    """How each row's low-rank term is computed. `deep`: inside the kernels of norm, rotation and activation (Qwen2,
    Qwen3, Llama). `generic`: one kernel per layer, any model. `stock`: vLLM's multi-LoRA, which alone gives members
    their own experts. auto: the first that fits."""
    members: Count | None = None
    """Adapters on the GPU at once; None: the population. A larger population is answered in several batches."""
    master: Literal["device", "host"] = "device"
    """Where the float32 mean of `lowrank` and `full` is kept; `host` frees 4 bytes per weight and slows updates."""

    path = "evoalign.engines.vllm.engine:VllmEngine"
    resources = frozenset({"tensor_parallel_size", "gpu_memory_utilization", "kv_cache_gib", "max_num_seqs"})
    resources |= {"max_num_batched_tokens", "max_model_len", "enforce_eager", "attention_backend", "population"}
    resources |= {"members", "master", "gpu_memory_gib"}
    younger = frozenset({"gpu_memory_gib"})
    takes_mixtures = False
    own_experts = "moves them in its slower form alone; set engine.population stock, or use engine transformers"
    unreached = frozenset({"kv_b_proj"})  # DeepSeek's latent attention decodes with a copy of its weight
    quantised = IN_SERVERS | {"mxfp4-pack-quantized"}
    packed_in_float32 = False
    lighter = "lower engine.members, raise engine.tensor_parallel_size, set engine.master host"

    @model_validator(mode="after")
    def _cap_is_of_one_process(self) -> VllmConfig:
        if self.gpu_memory_gib is not None and self.tensor_parallel_size > 1:
            raise ValueError(
                f"gpu_memory_gib {self.gpu_memory_gib:g} limits one process, and tensor_parallel_size "
                f"{self.tensor_parallel_size} starts one per GPU; remove one of them"
            )
        return self

    @property
    def device(self) -> str:
        """The former name of `where`."""
        return self.where

    @property
    def devices(self) -> int:
        return self.tensor_parallel_size

    @property
    def carries_experts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.population == "stock"

    def slots(self, config: Config) -> int:
        """Return how many adapters are on the GPU at once: the population, and the mean where it is an adapter."""
        from evoalign import spaces

        population = config.es.population_size if config.es_ is not None else 1
        return (self.members or population) + spaces.create(config).has_mean_adapter

    def allocated_slots(self, config: Config) -> int:
        """Return how many slots vLLM allocates. In the stock form its CPU kernels use the last one, which stays zero,
        for rows of the base model."""
        return self.slots(config) + (self.form(config) == "stock")

    def form(self, config: Config) -> str:
        """Return the form to request: `deep` (where the model allows), `generic` or `stock`. Raises ConfigError."""
        from evoalign import spaces

        rank = spaces.create(config).rank
        if rank <= KERNEL_RANK:
            return "deep" if self.population == "auto" else self.population
        if self.population in ("auto", "stock"):
            return "stock"
        raise ConfigError(
            f"engine.population {self.population} supports ranks up to {KERNEL_RANK}, not {rank}; lower the rank or "
            "use stock"
        )

    def held(
        self, config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, mean: int
    ) -> MemoryUse:
        """Return the bytes of the adapter slots, which vLLM allocates on every layer, and of the smallest useful cache:
        vLLM takes all that `gpu_memory_utilization` leaves."""
        from evoalign.engines.specs import on_gpu
        from evoalign.spaces.targets import LINEAR

        adapters = 0
        if layout.rank:
            evolves = set(layout.modules)
            targets = {lora_target(s) for s in specs if s.name in evolves}
            sides = sum(sum(s.shape) for s in specs if s.kind in LINEAR and lora_target(s) in targets)
            adapters = self.allocated_slots(config) * slot_rank(layout.rank) * sides * dtype.itemsize
        return MemoryUse(
            cache=(self.kv_cache_gib or 1.0) * 2**30,
            bound="at least",
            setting="engine.kv_cache_gib",
            adapters=adapters,
            host=mean if self.master == "host" and on_gpu(config) else 0,
        )

    def serving(self, config: Config) -> Serving:
        from evoalign import spaces

        is_adapter = spaces.create(config).carrier == "adapter"
        sizes = [] if self.enforce_eager else graph_sizes(self.max_num_seqs)
        return Serving(
            share=self.gpu_memory_utilization,
            cache=None if self.kv_cache_gib is None else self.kv_cache_gib * 2**30,
            rows=self.max_num_seqs,
            reserved=self.max_num_seqs,
            step=self.max_num_batched_tokens,
            graphs=len(sizes) * (2 if is_adapter else 1),  # with members and without
            slots=self.allocated_slots(config) if is_adapter else 0,
            members=self.members or (config.es.population_size if config.es_ is not None else 1),
            context=self.max_model_len or 0,
            mean_on_host=self.master == "host",
            devices=self.tensor_parallel_size,
            cap=self.gpu_memory_gib,
            advice="lower engine.max_num_seqs, engine.max_num_batched_tokens, engine.members or the rank, or raise "
            "engine.gpu_memory_utilization",
        )

    def refused_on_gpu(self, config: Config, specs: Sequence[TensorSpec]) -> str | None:
        from evoalign import spaces
        from evoalign.models.quantised import quantised_of

        packed, experts = quantised_of(config.model), any(s.kind == "expert" for s in specs)
        if config.deterministic and (packed is not None or experts):
            what = "the adapters of experts" if packed is None else f"packed weights ({packed.words})"
            return (
                f"deterministic: vLLM's products for {what} may depend on the rows of a batch on a GPU; remove it, "
                "or use engine transformers"
            )
        if experts and (rank := spaces.create(config).rank) > EXPERT_RANK:
            return (
                f"{config.space.name}.rank {rank}: vLLM's product for experts takes ranks up to {EXPERT_RANK}; lower it"
            )
        return None

    def limit(self) -> tuple[str, int] | None:
        return None if self.max_model_len is None else ("engine.max_model_len", self.max_model_len)

    def smaller(self, config: Config) -> str:
        host = config.section.evolves_model and self.master == "device"
        mean = ", or set engine.master host" if host else ""
        cap = "" if self.gpu_memory_gib is None else f"raise engine.gpu_memory_gib {self.gpu_memory_gib:g}, or "
        return f"{cap}lower engine.gpu_memory_utilization, engine.kv_cache_gib or engine.max_num_seqs{mean}"


def settings_of(config: Config) -> VllmConfig:
    """Return the config's engine section."""
    return cast(VllmConfig, config.engine)


def lora_target(spec: TensorSpec) -> str:
    """Return vLLM's name for the layers that get slots if this matrix has adapters; all experts of a layer get them."""
    from evoalign.spaces.targets import module_of

    return "experts" if spec.kind == "expert" else module_of(spec.name)


def slot_rank(rank: int) -> int:
    """Return the smallest slot rank that holds an adapter of `rank`. Raises ConfigError above the largest."""
    found = next((size for size in RANKS if rank <= size), None)
    if found is None:
        raise ConfigError(f"rank {rank}: engine vllm supports adapters of rank {RANKS[-1]} at most; lower it")
    return found


def graph_sizes(most: int, rows: Iterable[int] = ()) -> list[int]:
    """Return the batch sizes to capture; each is captured twice at the start, with members and without.

    A step is padded to the next size. Up to 256 rows the time is that of reading the weights, so that padding costs
    little; above, at most half of the rows are padding. `rows` are sizes of whole batches, which then need none.
    """
    grid = (n for k in range(most.bit_length()) for n in (2**k, 3 * 2 ** (k - 1)) if n in SMALL or n > max(SMALL))
    return sorted({n for n in (*grid, *rows, most) if n <= most})
