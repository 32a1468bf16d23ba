# SPDX-License-Identifier: Apache-2.0
"""The settings that engines over HTTP share. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator

from evoalign.config.base import Count, Place, Share
from evoalign.config.engines import EngineSettings, MemoryUse
from evoalign.config.outside import ADDRESS, CERTIFICATES, FOLDER, INSIDE, PROGRAM, SECRET

if TYPE_CHECKING:
    import torch

    from evoalign.config import Config
    from evoalign.types import Layout, TensorSpec

Seconds = Annotated[float, Field(ge=0.1, le=10**6, allow_inf_nan=False)]


class ServerSettings(EngineSettings):
    """A server that runs already (`url`), or one that is started here and ends with this process."""

    url: Annotated[Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/[^\s@]*)?$")] | None, ADDRESS] = None
    """Address of a server that runs already, such as http://127.0.0.1:30000; None: one is started on this machine."""
    key_variable: Annotated[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None, SECRET] = None
    """Name of the environment variable that holds the server's key. One that is started here has a key of its own."""
    ca_file: Annotated[Place | None, CERTIFICATES] = None
    """Certificates to check an https address by; None: the system's."""
    python: Annotated[Place | None, PROGRAM] = None
    """The Python of the environment in which the server is installed; None: this one."""
    arguments: Annotated[list[str], PROGRAM] = Field(default_factory=list)
    """Further words of the command that starts the server, as its own documentation has them."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda)$"), INSIDE] = "auto"
    """What a server that is started here serves from; auto: a GPU if there is one."""
    mean_device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$"), INSIDE] = "cpu"
    """Where this process keeps the float32 mean. That of `lora` is small; `lowrank` has one number a weight."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """GPUs over which each matrix is split."""
    memory_fraction: Annotated[Share, Field(gt=0)] | None = None
    """Share of the GPU's memory for weights, adapters and cache; None leaves the server's own choice."""
    context_length: Count | None = None
    """Longest prompt and completion together; None: as many positions as the model has."""
    max_running: Count | None = None
    """At most this many sequences in one batch; None leaves the server's own choice."""
    members: Count | None = None
    """Adapters on the device at once; None: the population. A larger population takes its turns."""
    adapter_folder: Annotated[Place | None, FOLDER] = None
    """Where adapters are written for the server to read, a folder that both see; None: in memory, /dev/shm."""
    concurrency: Count = 256
    """HTTP requests in flight at once; each has up to `batch` prompts of one member."""
    batch: Count = 16
    """Prompts of one member in one HTTP request."""
    start_timeout: Seconds | None = None
    """Seconds within which a server has to be ready. None: 10 for one at `url` when a run begins, 900 for one that is
    started here, or that was lost."""
    timeout: Seconds = 300.0
    """Seconds without any answer, while some are owed, after which a server that is not well counts as hung; one that
    says that it is well, after four times as many."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often in a run a server that died, hung or answered nonsense is started, or waited for, again; then the run
    stops. Single requests that do not get through, or find it busy, are sent again before that."""

    resources = frozenset({
        "url", "key_variable", "ca_file", "python", "arguments", "device", "mean_device", "tensor_parallel_size",
        "memory_fraction", "context_length", "max_running", "members", "adapter_folder", "concurrency", "batch",
        "start_timeout", "timeout", "restarts",
    })  # fmt: skip
    lighter = "use space lora, or set engine.mean_device cpu"
    serves: ClassVar[str] = ""
    """The server's name, as people know it."""

    @model_validator(mode="after")
    def _one_or_the_other(self) -> ServerSettings:
        if self.url is not None and (self.python is not None or self.arguments):
            raise ValueError("url names a server that runs already: python and arguments are for one started here")
        if self.url is None and self.key_variable is not None:
            raise ValueError("key_variable is for a server at url: one that is started here has a key of its own")
        return self

    @property
    def where(self) -> str:
        return self.device

    @property
    def devices(self) -> int:
        return self.tensor_parallel_size

    def slots(self, config: Config) -> int:
        """Adapters on the device at once: the population's, and that of the mean."""
        population = config.es_.population_size if config.es_ is not None else 1
        return (self.members or population) + 1

    def held(
        self, config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, mean: int
    ) -> MemoryUse:
        """Room for every member's factors; what the cache takes is the server's choice. The mean lies in this process,
        mostly in the host's memory."""
        host = mean if self.mean_device == "cpu" and self.where != "cpu" else 0
        sides = sum(sum(t.shape) for t in specs if t.name in {e.module for e in layout.tensors})
        room = self.slots(config) * layout.rank * sides * dtype.itemsize
        return MemoryUse(bound="at least", setting="engine.memory_fraction", adapters=room, host=host)

    def limit(self) -> tuple[str, int] | None:
        return None if self.context_length is None else ("engine.context_length", self.context_length)

    def smaller(self, config: Config) -> str:
        return "lower engine.memory_fraction, engine.members or engine.max_running"
