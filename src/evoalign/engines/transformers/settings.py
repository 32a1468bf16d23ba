# SPDX-License-Identifier: Apache-2.0
"""The settings of the in-process engine, and the memory that a batch needs. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from evoalign.config.base import Count, Gib
from evoalign.config.engines import CardGib, EngineSettings, MemoryUse, Serving
from evoalign.config.outside import INSIDE
from evoalign.models import layers

if TYPE_CHECKING:
    import torch

    from evoalign.config import Config
    from evoalign.config.decoding import SamplingConfig
    from evoalign.types import Layout, Sampling, TensorSpec

DEFAULT_MEMORY_GIB = 2.0
FREE_PART = 0.5
"""Part of a GPU's free memory for a batch if `engine.memory_gib` is not set; the rest is for transformers."""

PREFILL_TOKENS = 1024
"""Tokens for which a prefill always has room, because small prefills leave a GPU idle."""
COLUMNS = 64
"""Granularity of columns of fixed memory, so that prompts of similar length share graphs."""
WRITTEN = 12
"""Bytes per generated token in fixed memory besides its cache: the id and the log-probability."""
STATIC_TYPES = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that the static decoder supports."""
_IN_LAYER = re.compile(r"\.\d+\.")
_WIDEST = 32767
"""Assumed width of a model without matrices in layers."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a model: bytes per token of cache, per token of activations, and per pair of a query and a key.

    Activations are those of one layer, because no more are alive at once: 4 numbers per unit of the widest matrix and 6
    per unit of the hidden size. tests/engines/test_memory.py compares this with the tensors alive in a forward.
    """

    cache: int
    activations: int
    pair: int
    vocabulary: int

    @classmethod
    def of(cls, model: Any) -> Footprint:
        """Return the footprint of a loaded causal language model."""
        from evoalign.models.tensors import packed_shapes

        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()} | packed_shapes(model)
        return cls.of_shapes(model.config, shapes.items(), model.dtype.itemsize)

    @classmethod
    def of_shapes(cls, config: Any, shapes: Iterable[tuple[str, Sequence[int]]], size: int) -> Footprint:
        """Return the footprint from a configuration, the names and shapes of tensors, and bytes per number."""
        text = config.get_text_config()
        experts = getattr(text, "num_experts_per_tok", None) or 1
        sides = [max(shape[-2:]) for name, shape in shapes if len(shape) > 1 and _IN_LAYER.search(name)]
        # With an attention kernel: a boolean mask and its form in the kernel. Without: the scores, also in float32.
        kernel = getattr(config, "_attn_implementation", None) != "eager"
        return cls(
            cache=layers.cached(config) * size,
            activations=(4 * max(sides, default=_WIDEST) * experts + 6 * text.hidden_size) * size,
            pair=1 + size
            if kernel
            else 12 * max(layer.num_attention_heads for layer in layers.layers_of(config)) + size,
            vocabulary=text.vocab_size,
        )

    def row(self, tokens: int, sampling: Sampling | SamplingConfig) -> int:
        """Return the bytes of one row while it is decoded: its cache and its logits."""
        return self.cache * tokens + self.logits(sampling)

    def logits(self, sampling: Sampling | SamplingConfig) -> int:
        """Return the bytes of one row's logits and of a draw from them, which with `top_p` sorts in float64."""
        each = 12 if sampling.temperature == 0 else 16 if sampling.top_p == 1 else 40
        return each * self.vocabulary

    def prefill(self, width: int, columns: int) -> int:
        """Return the bytes to read one row of `width` tokens, without its cache of `columns`."""
        return width * (self.activations + self.pair * columns)

    def least(self, tokens: int) -> int:
        """Return the bytes to keep free: for a prefill of one row, or of `PREFILL_TOKENS` in short rows."""
        return max(1, PREFILL_TOKENS // tokens) * self.prefill(tokens, tokens)


def columns(tokens: int) -> int:
    """Return the columns of fixed memory for `tokens` tokens."""
    return -(-tokens // COLUMNS) * COLUMNS


class TransformersConfig(EngineSettings):
    """The in-process engine, on a CPU or one GPU."""

    name: Literal["transformers"] = "transformers"  # pyright: ignore[reportIncompatibleVariableOverride]
    device: Annotated[str, INSIDE] = "auto"
    """auto, cpu, cuda or cuda:K."""
    memory_gib: Gib | None = None
    """Memory for the cache, the logits and the activations of one batch. None: 2, or half the free memory on a GPU that
    is not `deterministic`."""
    gpu_memory_gib: CardGib | None = None
    """Size that the GPU is treated as, to rehearse a smaller one: the whole process stays below it. None: its own."""
    max_rows: Count | None = None
    """At most this many sequences in one batch; None leaves it to `memory_gib`."""
    decoder: Literal["auto", "library", "static"] = "auto"
    """How tokens are decoded. `library`: by the forward of transformers, for any model. `static`: over fixed memory, on
    a GPU as CUDA graphs, for models of the Llama, Qwen2 and Qwen3 families. `auto`: `static` if it supports the model,
    on a GPU, or on a CPU in float32 if evoalign was installed with a C compiler. In GRPO the policy itself decodes by
    `library`. With `rollouts: engine` or `es`, completions and evaluations come from a copy of it with `static`,
    and with `auto` in mixed precision on a GPU."""
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads; None keeps the default of torch."""

    path = "evoalign.engines.transformers.engine:TransformersEngine"
    resources = frozenset({"device", "memory_gib", "gpu_memory_gib", "max_rows", "threads", "decoder"})
    younger = frozenset({"decoder", "gpu_memory_gib"})
    serves_here = True
    carries_experts = True
    carries_bias = True
    quantised = frozenset({"awq", "fp8", "gptq", "bitsandbytes", "float-quantized", "int-quantized", "pack-quantized"})

    @model_validator(mode="after")
    def _cap_is_of_a_gpu(self) -> TransformersConfig:
        if self.gpu_memory_gib is not None and self.device == "cpu":
            raise ValueError(
                f"gpu_memory_gib {self.gpu_memory_gib:g} limits a GPU, and device is cpu; remove one of them"
            )
        return self

    @property
    def where(self) -> str:
        return self.device

    @property
    def scores_given(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.decoder == "library"

    def in_process(self) -> EngineSettings:
        """Return settings for models that are compared with one in training, which `library` decodes."""
        return self.model_copy(update={"decoder": "library"})

    def for_copy(self, *, mixed_on_gpu: bool) -> EngineSettings | None:
        """Return these settings where the static decoder completes."""
        return self if self.decoder == "static" or (self.decoder == "auto" and mixed_on_gpu) else None

    def held(
        self, config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, mean: int
    ) -> MemoryUse:
        note = "; unset, half the free memory of a GPU that is not deterministic"
        return MemoryUse((self.memory_gib or DEFAULT_MEMORY_GIB) * 2**30, setting="engine.memory_gib", note=note)

    def batch_bytes(
        self, config: Config, specs: Sequence[TensorSpec], dtype: torch.dtype, rows: int, prompt: int
    ) -> float:
        from evoalign.engines.specs import on_gpu
        from evoalign.kernels import compiled
        from evoalign.models.origin import model_config

        drawn, model = (config.sampling, config.evaluation), model_config(config.model)
        footprint = Footprint.of_shapes(model, [(spec.name, spec.shape) for spec in specs], dtype.itemsize)
        most = max(s.max_tokens for s in drawn)
        supported = on_gpu(config) or (dtype.itemsize == 4 and compiled.here())
        supported = supported and model.model_type in STATIC_TYPES
        fixed = self.decoder == "static" or (self.decoder == "auto" and supported)
        rows = min(rows, self.max_rows or rows)
        tokens, written = (columns(prompt + most), WRITTEN * most) if fixed else (prompt + most, 0)
        deterministic = not on_gpu(config) if config.deterministic is None else config.deterministic
        # The static decoder reads prompts in pieces; when deterministic, the pieces have a fixed size.
        reading = footprint.least(prompt) if fixed and deterministic else rows * footprint.prefill(prompt, prompt)
        row = max(footprint.row(tokens, s) for s in drawn)
        wanted = float(rows * (row + written) + reading)
        if self.memory_gib is None and on_gpu(config) and not config.deterministic:
            return wanted
        return min(wanted, (self.memory_gib or DEFAULT_MEMORY_GIB) * 2**30)

    def serving(self, config: Config) -> Serving | None:
        from evoalign.engines.specs import on_gpu

        if not on_gpu(config) and self.gpu_memory_gib is None:
            return None
        room = self.memory_gib or (DEFAULT_MEMORY_GIB if config.deterministic else None)
        return Serving(
            part=FREE_PART,
            cache=None if room is None else room * 2**30,
            rows=self.max_rows,
            step=PREFILL_TOKENS,
            cap=self.gpu_memory_gib,
            advice="set engine.memory_gib, or lower sampling.max_tokens or the rank",
        )

    def unpacks(self, form: str, bits: int | None) -> bool:
        return form != "bitsandbytes" or bits != 4

    def smaller(self, config: Config) -> str:
        cap = "" if self.gpu_memory_gib is None else f"raise engine.gpu_memory_gib {self.gpu_memory_gib:g}, or "
        return f"{cap}lower engine.memory_gib or engine.max_rows"
