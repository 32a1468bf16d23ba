# SPDX-License-Identifier: Apache-2.0
"""Which engine answers, and its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, PositiveInt

from evoalign.config.base import PositiveFloat, Section, named


class TransformersConfig(Section):
    """The in-process engine, on the CPU or one GPU."""

    name: Literal["transformers"] = "transformers"
    device: str = "auto"
    """auto, cpu, cuda or cuda:K."""
    memory_gib: PositiveFloat | None = None
    """Room for the cache and logits of one chunk of rows. None: 2; half the free memory on a GPU that is not
    `deterministic`."""
    max_rows: PositiveInt | None = None
    """At most this many sequences in one batch; None leaves it to `memory_gib`."""
    threads: PositiveInt | None = None
    """CPU threads; None leaves torch's own choice."""


class VllmConfig(Section):
    """vLLM in this process, which all members share; needs the extra `vllm`. It takes the GPUs it finds."""

    name: Literal["vllm"]
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

    @property
    def device(self) -> str:
        """vLLM is built for one kind of device and takes it."""
        return "auto"


def _engine(value: object) -> object:
    """`vllm` is short for `{name: vllm}`, and no name means transformers."""
    value = named(value)
    return {"name": "transformers", **cast(Mapping[str, Any], value)} if isinstance(value, Mapping) else value


ENGINES: dict[str, type[Section]] = {"transformers": TransformersConfig, "vllm": VllmConfig}
EngineConfig = Annotated[
    Annotated[TransformersConfig | VllmConfig, Field(discriminator="name")], BeforeValidator(_engine)
]
"""Which engine answers the prompts, and its own settings."""
