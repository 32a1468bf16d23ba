# SPDX-License-Identifier: Apache-2.0
"""The config sections of engines sglang and vllm-server. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from evoalign.config.base import Count, Gib, Place, Share, Word
from evoalign.config.engines import EngineSettings, MemoryUse
from evoalign.config.outside import ADDRESS, CERTIFICATES, FOLDER, INSIDE, PROGRAM, SECRET
from evoalign.models.forms import IN_SERVERS

if TYPE_CHECKING:
    import torch

    from evoalign.config import Config
    from evoalign.types import Layout, TensorSpec

Seconds = Annotated[float, Field(ge=0.1, le=10**6, allow_inf_nan=False)]


class ServerSettings(EngineSettings):
    """A server that is already running (`url`), or one that is started on this machine and ends with this process."""

    url: Annotated[Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/[^\s@]*)?$")] | None, ADDRESS] = None
    """Address of a running server, such as http://127.0.0.1:30000; None: one is started on this machine."""
    key_variable: Annotated[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None, SECRET] = None
    """Name of the environment variable that holds the server's key. A server started here gets a random key."""
    ca_file: Annotated[Place | None, CERTIFICATES] = None
    """Certificates to check an https address by; None: the system's."""
    python: Annotated[Place | None, PROGRAM] = None
    """The Python of the environment in which the server is installed; None: this one."""
    arguments: Annotated[list[str], PROGRAM] = Field(default_factory=list)
    """Further arguments of the command that starts the server, as in its documentation."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda)$"), INSIDE] = "auto"
    """Device of a server that is started here; auto: a GPU if there is one."""
    mean_device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$"), INSIDE] = "cpu"
    """Where this process keeps the float32 mean. That of `lora` is small; `lowrank` has one number per weight."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """GPUs over which each matrix is split."""
    memory_fraction: Annotated[Share, Field(gt=0)] | None = None
    """Share of the GPU's memory for weights, adapters and cache; None: the server's default."""
    context_length: Count | None = None
    """Longest prompt and completion together; None: the model's number of positions."""
    max_running: Count | None = None
    """Maximum number of sequences in one batch; None: the server's default."""
    members: Count | None = None
    """Adapters on the device at once; None: the population. A larger population is answered in several batches."""
    adapter_folder: Annotated[Place | None, FOLDER] = None
    """Folder where adapters are written, visible to the server too; None: in memory, /dev/shm."""
    concurrency: Count = 256
    """HTTP requests in flight at once; each has up to `batch` prompts of one member."""
    batch: Count = 16
    """Prompts of one member in one HTTP request."""
    start_timeout: Seconds | None = None
    """Seconds within which a server has to be ready. None: 10 for one at `url` when a run begins, 900 for one that is
    started here or that was lost."""
    timeout: Seconds = 300.0
    """Seconds without any completion after which a server that fails its health check counts as hung. One that passes
    it counts as hung after four times as long."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often in a run a server that died, hung or sent invalid replies is started, or waited for, again; then the
    run stops. Single requests that fail, or find the server busy, are repeated before that."""

    resources = frozenset({"url", "key_variable", "ca_file", "python", "arguments", "device", "mean_device"})
    resources |= {"tensor_parallel_size", "memory_fraction", "context_length", "max_running", "members"}
    resources |= {"adapter_folder", "concurrency", "batch", "start_timeout", "timeout", "restarts"}
    lighter = "use space lora, or set engine.mean_device cpu"
    # Latent attention decodes with a copy of kv_b_proj; vLLM's server calls Qwen2-MoE's gate by a name without adapter.
    unreached = frozenset({"kv_b_proj", "shared_expert_gate"})
    quantised = IN_SERVERS
    packed_in_float32 = False
    serves: ClassVar[str] = ""
    """The server's name in messages."""

    @model_validator(mode="after")
    def _one_or_the_other(self) -> ServerSettings:
        if self.url is not None and (self.python is not None or self.arguments):
            raise ValueError("url names a running server: python and arguments are for one that is started here")
        if self.url is None and self.key_variable is not None:
            raise ValueError("key_variable is for a server at url: one that is started here gets a random key")
        return self

    @property
    def where(self) -> str:
        return self.device

    @property
    def devices(self) -> int:
        return self.tensor_parallel_size

    def slots(self, config: Config) -> int:
        """Return how many adapters are on the device at once: the population's and the mean's."""
        population = config.es_.population_size if config.es_ is not None else 1
        return (self.members or population) + 1

    def held(
        self, config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, mean: int
    ) -> MemoryUse:
        """Return the bytes of all members' factors. The mean is in this process; the server sizes its own cache."""
        host = mean if self.mean_device == "cpu" and self.where != "cpu" else 0
        adapted = set(layout.modules)
        sides = sum(sum(t.shape) for t in specs if t.name in adapted)
        adapters = self.slots(config) * layout.rank * sides * dtype.itemsize
        return MemoryUse(bound="at least", setting="engine.memory_fraction", adapters=adapters, host=host)

    def limit(self) -> tuple[str, int] | None:
        return None if self.context_length is None else ("engine.context_length", self.context_length)

    def smaller(self, config: Config) -> str:
        return "lower engine.memory_fraction, engine.members or engine.max_running"


class SglangConfig(ServerSettings):
    """An SGLang server, 0.5.17 or later. Starting one needs the extra `sglang`, here or in the environment of
    `python`."""

    name: Literal["sglang"]  # pyright: ignore[reportIncompatibleVariableOverride]
    api: Literal["generate", "chat"] = "generate"
    """Route of completions: SGLang's own, with up to `batch` prompts per request, or OpenAI's chat completions, with
    one. Both get token ids, so that they return the same."""
    transport: Literal["auto", "files", "tensors"] = "auto"
    """How adapters reach the server. `files`: in `adapter_folder`, which both see. `tensors`: within the request, with
    a checksum each; the server unpickles them, so it has to trust this process. auto: files for a server that is
    started here or at an address of this machine, tensors for others, which take 14 times as long (rank 8, SmolLM2)."""
    attention_backend: Annotated[Word | None, INSIDE] = None
    """A backend of SGLang, such as triton or fa3; None: its default, on a CPU torch_native."""
    sampling_backend: Annotated[Word | None, INSIDE] = None
    """pytorch or flashinfer; None: SGLang's default, on a CPU pytorch."""
    lora_backend: Annotated[Word | None, INSIDE] = None
    """csgmv or triton; None: SGLang's default, on a CPU torch_native."""
    max_total_tokens: Count | None = None
    """Tokens in the cache; None: what `memory_fraction` leaves, on a CPU 65,536."""
    cuda_graph: bool = True
    """false: a faster start and slower steps."""
    deterministic_inference: bool = False
    """SGLang's batch-invariant kernels, and seeded sampling, which all members then share. Not on a CPU, and its LoRA
    kernels are not batch-invariant."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the model's shapes, for benchmarks."""

    path = "evoalign.engines.server.sglang:SglangEngine"
    serves = "SGLang"
    resources = ServerSettings.resources | {"api", "transport", "attention_backend", "sampling_backend", "lora_backend"}
    resources |= {"max_total_tokens", "cuda_graph"}


class VllmServerConfig(ServerSettings):
    """vLLM's OpenAI-compatible server with runtime loading of adapters (VLLM_ALLOW_RUNTIME_LORA_UPDATING).

    It reads adapters from folders. On one GPU machine the engine `vllm`, in this process, is faster.
    """

    name: Literal["vllm-server"]  # pyright: ignore[reportIncompatibleVariableOverride]
    kv_cache_gib: Gib | None = None
    """Keys and values of a server that is started here. None: what `memory_fraction` leaves; 1 on the CPU."""
    enforce_eager: bool = False
    """No CUDA graphs: a faster start and slower steps."""

    quantised = IN_SERVERS | {"mxfp4-pack-quantized"}
    path = "evoalign.engines.server.vllm:VllmServerEngine"
    serves = "vLLM"
    resources = ServerSettings.resources | {"kv_cache_gib", "enforce_eager"}
