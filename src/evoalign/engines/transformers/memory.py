# SPDX-License-Identifier: Apache-2.0
"""Bytes that a chunk of rows takes, by formula: from the model's shapes and the lengths alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PREFILL_TOKENS = 1024
"""A prefill has room for so many tokens at least, for few at a time leave a GPU idle."""
COLUMNS = 64
"""Columns of fixed memory come in so many, so that prompts of another length find graphs that fit."""
WRITTEN = 12
"""Bytes of a token that is written down beside fixed memory: its id and its log-probability."""
STATIC_TYPES = ("llama", "qwen2", "qwen3")
"""`model_type`s that the static decoder knows."""
_IN_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes: bytes of a token in the cache, of its activations, and of a pair of a query and a key.

    Activations are those of one layer, for no more are alive at once: 4 numbers for each of the widest matrix and 6
    for each of the hidden size. tests/engines/test_memory.py holds them to the tensors that live in a forward.
    """

    cache: int
    activations: int
    pair: int
    vocabulary: int

    @classmethod
    def of(cls, model: Any) -> Footprint:
        """Of a causal language model as it is served."""
        shapes = [(name, p.shape) for name, p in model.named_parameters()]
        return cls.of_shapes(model.config, shapes, model.dtype.itemsize)

    @classmethod
    def of_shapes(cls, config: Any, shapes: Iterable[tuple[str, Sequence[int]]], size: int) -> Footprint:
        """Of a model that need not be loaded: its configuration, names and shapes of its tensors, bytes of a number."""
        text = config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        experts = getattr(text, "num_experts_per_tok", None) or 1
        # A mask of booleans and what a kernel makes of it; without a kernel the scores, also in float32.
        kernel = getattr(config, "_attn_implementation", None) != "eager"
        return cls(
            cache=2 * text.num_hidden_layers * heads * head_dim * size,
            activations=(4 * _widest(shapes) * experts + 6 * text.hidden_size) * size,
            pair=1 + size if kernel else 12 * text.num_attention_heads + size,
            vocabulary=text.vocab_size,
        )

    def row(self, tokens: int, *, greedy: bool) -> int:
        """Of one row while it is decoded: its cache and its logits."""
        return self.cache * tokens + self.logits(greedy=greedy)

    def logits(self, *, greedy: bool) -> int:
        """Of one row's: greedy takes them and a copy, sampling sorts them in float64 with their indices (measured)."""
        return (12 if greedy else 40) * self.vocabulary

    def prefill(self, width: int, columns: int) -> int:
        """Of one row of `width` tokens while it is read, beside its cache of `columns` by then."""
        return width * (self.activations + self.pair * columns)

    def least(self, tokens: int) -> int:
        """What has to stay free beside the rows: a prefill of one row, or of `PREFILL_TOKENS` in short ones."""
        return max(1, PREFILL_TOKENS // tokens) * self.prefill(tokens, tokens)


def columns(tokens: int) -> int:
    """Of fixed memory for so many tokens."""
    return -(-tokens // COLUMNS) * COLUMNS


def _widest(shapes: Iterable[tuple[str, Sequence[int]]]) -> int:
    """The longest side of a matrix in a layer."""
    sides = [max(shape[-2:]) for name, shape in shapes if len(shape) > 1 and _IN_LAYER.search(name)]
    return max(sides, default=torch.iinfo(torch.int16).max)
