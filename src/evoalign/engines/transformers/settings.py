# SPDX-License-Identifier: Apache-2.0
"""The settings of the in-process engine, and what follows from them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from evoalign.config.base import Count, Gib
from evoalign.config.engines import EngineSettings, MemoryUse
from evoalign.config.outside import INSIDE

if TYPE_CHECKING:
    import torch

    from evoalign.config import Config
    from evoalign.types import Layout, TensorSpec

DEFAULT_MEMORY_GIB = 2.0


class TransformersConfig(EngineSettings):
    """The in-process engine, on the CPU or one GPU."""

    name: Literal["transformers"] = "transformers"  # pyright: ignore[reportIncompatibleVariableOverride]
    device: Annotated[str, INSIDE] = "auto"
    """auto, cpu, cuda or cuda:K."""
    memory_gib: Gib | None = None
    """Room for the cache, the logits and the activations of one chunk of rows. None: 2; half the free memory on a GPU
    that is not `deterministic`."""
    max_rows: Count | None = None
    """At most this many sequences in one batch; None leaves it to `memory_gib`."""
    decoder: Literal["auto", "library", "static"] = "auto"
    """How tokens are decoded: `library`, any model, by the library's forward; `static`, models of the Llama, Qwen2 and
    Qwen3 families alone, by steps over fixed memory that a GPU repeats as CUDA graphs. auto: `static` where it can be
    on a GPU, and on a CPU in float32 if evoalign was installed with a C compiler. A model that is being trained is
    decoded by the library."""
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads; None leaves torch's own choice."""

    path = "evoalign.engines.transformers.engine:TransformersEngine"
    resources = frozenset({"device", "memory_gib", "max_rows", "threads", "decoder"})
    younger = frozenset({"decoder"})
    serves_here = True
    carries_experts = True

    @property
    def where(self) -> str:
        return self.device

    def in_process(self) -> EngineSettings:
        """A model that is being trained is decoded by the library, and so is what is compared with it."""
        return self.model_copy(update={"decoder": "library"})

    def held(
        self, config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, mean: int
    ) -> MemoryUse:
        note = "; unset, half the free memory of a GPU that is not deterministic"
        return MemoryUse((self.memory_gib or DEFAULT_MEMORY_GIB) * 2**30, setting="engine.memory_gib", note=note)

    def batch_bytes(
        self, config: Config, specs: Sequence[TensorSpec], dtype: torch.dtype, rows: int, prompt: int
    ) -> float:
        from evoalign.engines.specs import on_gpu
        from evoalign.engines.transformers.memory import STATIC_TYPES, WRITTEN, Footprint, columns
        from evoalign.kernels import compiled
        from evoalign.models.origin import model_config

        drawn, model = (config.sampling, config.evaluation), model_config(config.model)
        footprint = Footprint.of_shapes(model, [(spec.name, spec.shape) for spec in specs], dtype.itemsize)
        most, greedy = max(s.max_tokens for s in drawn), not any(s.temperature for s in drawn)
        fits = on_gpu(config) or (dtype.itemsize == 4 and compiled.here())
        fits = fits and model.model_type in STATIC_TYPES
        fixed = self.decoder == "static" or (self.decoder == "auto" and fits)
        rows = min(rows, self.max_rows or rows)
        tokens, written = (columns(prompt + most), WRITTEN * most) if fixed else (prompt + most, 0)
        deterministic = not on_gpu(config) if config.deterministic is None else config.deterministic
        # The static decoder reads few prompts at a time, and as many as there is room for unless it has to repeat.
        reading = footprint.least(prompt) if fixed and deterministic else rows * footprint.prefill(prompt, prompt)
        wanted = float(rows * (footprint.row(tokens, greedy=greedy) + written) + reading)
        if self.memory_gib is None and on_gpu(config) and not config.deterministic:
            return wanted
        return min(wanted, (self.memory_gib or DEFAULT_MEMORY_GIB) * 2**30)

    def smaller(self, config: Config) -> str:
        return "lower engine.memory_gib or engine.max_rows"
