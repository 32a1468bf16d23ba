# SPDX-License-Identifier: Apache-2.0
"""The settings of vLLM, and what a config asks of it, as vLLM takes it. Imports no vLLM and no torch, so that configs
and estimates need none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from evoalign.config.base import PositiveFloat
from evoalign.config.engines import EngineSettings, Held
from evoalign.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from evoalign.config import Config
    from evoalign.types import Layout, TensorSpec

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has slots for."""
KERNEL_RANK = 16
"""Highest rank of the population kernels."""


class VllmConfig(EngineSettings):
    """vLLM in this process, which all members share; needs the extra `vllm`. It takes the GPUs it finds."""

    name: Literal["vllm"]  # pyright: ignore[reportIncompatibleVariableOverride]
    tensor_parallel_size: PositiveInt = 1
    """GPUs over which each matrix is split."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for the weights, the float32 master, the adapters and the cache together."""
    kv_cache_gib: PositiveFloat | None = None
    """Room for keys and values. None: what `gpu_memory_utilization` leaves; 1 on the CPU."""
    max_num_seqs: PositiveInt = 1024
    """At most this many sequences in one batch; more wait their turn."""
    max_num_batched_tokens: PositiveInt | None = None
    """At most this many tokens in one step; None leaves vLLM's own choice."""
    max_model_len: PositiveInt | None = None
    """Longest prompt and completion together; None: as many positions as the model has."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy: random weights of the model's shapes, to measure with."""
    enforce_eager: bool = False
    """No CUDA graphs: a faster start and slower steps."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """vLLM's own seed, of dummy weights. None: the run's. Completions are seeded by prompt and sample."""
    attention_backend: str | None = None
    """One of vLLM's, such as FLASH_ATTN or TRITON_ATTN; None leaves vLLM's own choice."""
    population: Literal["auto", "deep", "generic", "stock"] = "auto"
    """How rows get their members' terms. `deep`: inside the kernels of norm, rotation and activation (Qwen2, Qwen3,
    Llama). `generic`: one kernel a layer, any model. `stock`: vLLM's own multi-LoRA. auto: the first that fits."""
    members: PositiveInt | None = None
    """Adapters on the GPU at once; None: the population. A larger population takes its turns."""
    master: Literal["device", "host"] = "device"
    """Where the float32 mean of `lowrank` and `full` lies; `host` frees 4 bytes a weight and makes updates slower."""

    path = "evoalign.engines.vllm.engine:VllmEngine"
    resources = frozenset({
        "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_gib", "max_num_seqs", "max_num_batched_tokens",
        "max_model_len", "enforce_eager", "attention_backend", "population", "members", "master",
    })  # fmt: skip
    lighter = "lower engine.members, raise engine.tensor_parallel_size, set engine.master host"

    @property
    def devices(self) -> int:
        """GPUs."""
        return self.tensor_parallel_size

    def held(self, config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, mean: int) -> Held:
        """Room for every member's factors, and the least cache that is worth starting with: vLLM takes all that
        `gpu_memory_utilization` leaves."""
        from evoalign.engines.specs import on_gpu

        return Held(
            cache=(self.kv_cache_gib or 1.0) * 2**30,
            bound="at least",
            setting="engine.kv_cache_gib",
            adapters=_slot_bytes(config, layout, specs, dtype),
            host=mean if self.master == "host" and on_gpu(config) else 0,
        )

    def limit(self) -> tuple[str, int] | None:
        """`max_model_len`, where it is set."""
        return None if self.max_model_len is None else ("engine.max_model_len", self.max_model_len)

    def smaller(self, config: Config) -> str:
        """A smaller cache, and a mean in host memory where it is one of weights."""
        host = config.space.name != "lora" and self.master == "device"
        mean = ", or set engine.master host" if host else ""
        return f"lower engine.gpu_memory_utilization, engine.kv_cache_gib or engine.max_num_seqs{mean}"


def settings(config: Config) -> VllmConfig:
    """The config's engine section."""
    assert isinstance(config.engine, VllmConfig)
    return config.engine


def slots(config: Config) -> int:
    """Adapters on the GPU at once: the population and, where its mean is one as well, that of the mean."""
    own = settings(config).members or config.es.population_size
    return own + (config.space.name != "lowrank")


def room(config: Config) -> int:
    """Slots that vLLM makes: on a CPU its own kernels give rows of the base model the last one, which stays zero."""
    return slots(config) + (form(config) == "stock")


def rank(config: Config) -> int:
    """Rank of the adapters; a space of one's own says it as `rank` among its settings."""
    if config.space.name == "lora":
        return config.lora.rank
    return config.lowrank.rank if config.space.name == "lowrank" else int(config.space.options.get("rank", 16))


def slot_rank(wanted: int) -> int:
    """The smallest rank of vLLM's that holds an adapter. Raises ConfigError above the largest."""
    for size in RANKS:
        if wanted <= size:
            return size
    raise ConfigError(f"rank {wanted}: engine vllm takes adapters of rank {RANKS[-1]} at most; lower it")


def scaling(config: Config) -> float:
    """What the population kernels multiply a member's term with; elsewhere it is folded into B."""
    return config.lora.alpha / config.lora.rank if config.space.name == "lora" else 1.0


def form(config: Config) -> str:
    """How rows get their members' terms: `deep` (where the model allows), `generic` or `stock`. Raises ConfigError."""
    wanted = settings(config).population
    if rank(config) <= KERNEL_RANK:
        return "deep" if wanted == "auto" else wanted
    if wanted in ("auto", "stock"):
        return "stock"
    raise ConfigError(
        f"engine.population {wanted} takes ranks up to {KERNEL_RANK}, not {rank(config)}; lower the rank or use stock"
    )


def _slot_bytes(config: Config, layout: Layout, specs: Sequence[TensorSpec], dtype: torch.dtype) -> int:
    """vLLM keeps room for every member's factors, at a rank of its own choice and on every layer."""
    from evoalign.spaces.base import module_of

    if not layout.rank:
        return 0
    modules = {module_of(t.module) for t in layout.tensors}
    sides = sum(sum(s.shape) for s in specs if s.kind == "linear" and module_of(s.name) in modules)
    return room(config) * slot_rank(layout.rank) * sides * dtype.itemsize
