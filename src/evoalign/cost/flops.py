# SPDX-License-Identifier: Apache-2.0
"""FLOPs by formula: of forward and backward passes, and of the noise and updates of ES.

They are those of matrix products, two per multiply-and-add. Padding, norms, activations, biases, rotary embeddings and
softmax are not counted (docs/concepts.md has the equations). The formula covers `FAMILIES` only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evoalign.engines.transformers.prefill import shared_prefix
from evoalign.errors import ModelError
from evoalign.models.layers import head_size, layers_of, windows
from evoalign.spaces import Space
from evoalign.types import Layout, TensorSpec

FAMILIES = frozenset({"gemma", "gemma2", "gemma3_text", "gpt_neox", "granite", "llama", "mistral", "olmo2", "opt",
                      "phi3", "qwen2", "qwen3", "smollm3"})  # fmt: skip
"""Values of `model_type` for which a test compares the formula with the operations that torch runs."""
ADAM_FLOPS = 14
"""Elementwise operations of AdamW per parameter: two moments, their corrections, root, decay and step."""
_READS_INPUT = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
_DROPOUTS = ("dropout", "hidden_dropout", "resid_pdrop")
_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear weight [rows, columns] = [out, in]; `layer` is None outside of layers."""

    name: str
    rows: int
    columns: int
    layer: int | None

    @property
    def numbers(self) -> int:
        """Number of weights."""
        return self.rows * self.columns


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model, as far as the formula needs it.

    `matrices` are applied to every token, the `head` (tied or not) only where logits are needed. `attention` is query
    heads times head_dim, which may differ from the hidden size; grouped keys and values reduce the projections and not
    the scores. `windows` has the most keys that a token attends to, by layer. For backward passes: `first` are endings
    of the names of weights that take a layer's input, and `last_again` says that a norm or dropout needs the output of
    a layer's last matrix, so that checkpointing has to recompute it.
    """

    matrices: tuple[Matrix, ...]
    head: Matrix
    attention: int
    windows: tuple[int | None, ...]
    parameters: int
    first: tuple[str, ...] = _READS_INPUT
    last_again: bool = False

    @property
    def reach(self) -> float:
        """Size of the smallest window."""
        return min((w for w in self.windows if w is not None), default=math.inf)

    @cached_property
    def numbers(self) -> int:
        """Number of weights applied to every token."""
        return sum(m.numbers for m in self.matrices)

    @cached_property
    def kinds(self) -> Counter[int | None]:
        """Number of layers by window."""
        return Counter(self.windows)


def shape_of(hf: Any, specs: Sequence[TensorSpec]) -> ModelShape:
    """Return the shape of a model from its transformers configuration and its tensors.

    Raises ModelError for a model that the formula does not cover, such as mixtures of experts and state-space layers.
    """
    text = hf.get_text_config()
    odd = [s.name for s in specs if s.kind == "other" and len(s.shape) > 1]
    kinds = _kinds(text)
    if text.model_type not in FAMILIES or odd or None in kinds:
        why = f"its tensor {odd[0]}" if odd else f"model type {text.model_type}"
        raise ModelError(f"the formula for FLOPs does not cover {why}; the budget has no FLOPs")
    linear = [Matrix(s.name, s.shape[0], s.shape[1], s.layer) for s in specs if s.kind == "linear"]
    heads = [m for m in linear if m.name.endswith(_HEADS)] or [
        Matrix(s.name, s.shape[0], s.shape[1], None) for s in specs if s.kind == "embedding"
    ]  # a tied head is the first embedding; others are for positions
    attention = {layer.num_attention_heads * head_size(layer) for layer in layers_of(hf)}
    if len(attention) > 1:
        raise ModelError("the formula for FLOPs does not cover layers of different sizes; the budget has no FLOPs")
    return ModelShape(
        matrices=tuple(m for m in linear if m != heads[0]),
        head=heads[0],
        attention=attention.pop(),
        windows=tuple(w if kind == "sliding_attention" else None for w, kind in zip(windows(hf), kinds, strict=True)),
        parameters=sum(math.prod(s.shape) for s in specs),
        first=_READS_INPUT + (("dense_h_to_4h",) if getattr(text, "use_parallel_residual", False) else ()),
        last_again=any("post_feedforward" in s.name for s in specs) or any(getattr(text, n, 0) for n in _DROPOUTS),
    )


def _kinds(text: Any) -> list[str | None]:
    """Return the attention type of each layer; None for one that the formula does not cover."""
    has_window = any(windows(text)) and getattr(text, "use_sliding_window", True)
    alike = "sliding_attention" if has_window else "full_attention"
    kinds = getattr(text, "layer_types", None) or [alike] * text.num_hidden_layers
    return [kind if kind in ("full_attention", "sliding_attention") else None for kind in kinds]


@dataclass(frozen=True, slots=True)
class Adapted:
    """Low-rank factors of rank `rank` next to the linear weights of these names."""

    rank: int
    weights: frozenset[str]

    def numbers(self, shape: ModelShape) -> int:
        """Return the size of the factors: rank * (in + out) per weight."""
        return self.rank * sum(m.rows + m.columns for m in shape.matrices if m.name in self.weights)


def keys_seen(start: int, tokens: int, window: int | None = None) -> int:
    """Return the keys of causal attention from positions start, start + 1, ...: min(position + 1, window) each."""
    end = start + tokens
    if window is None or end <= window:
        return (start + 1 + end) * tokens // 2
    inside = max(0, window - start)
    return (start + 1 + window) * inside // 2 + window * (tokens - inside)


def sequence_flops(shape: ModelShape, start: int, tokens: int, logits: int, adapted: Adapted | None = None) -> int:
    """Return the FLOPs of a forward pass from position `start`, with a cache of those before and `logits` logits."""
    return _sequence_flops(shape, adapted.numbers(shape) if adapted else 0, start, tokens, logits)


def _sequence_flops(shape: ModelShape, factors: int, start: int, tokens: int, logits: int) -> int:
    linear = 2 * (shape.numbers + factors) * tokens
    return linear + _attention(shape, start, tokens, shape.kinds) + 2 * shape.head.numbers * logits


def _attention(shape: ModelShape, start: int, tokens: int, kinds: Counter[int | None]) -> int:
    """Return the FLOPs of scores and values, two products of `attention` numbers per key, by layers of each window."""
    return 4 * shape.attention * sum(count * keys_seen(start, tokens, window) for window, count in kinds.items())


def forward_flops(shape: ModelShape, prompt_tokens: int, generated_tokens: int, adapted: Adapted | None = None) -> int:
    """Return the FLOPs of one completion with a cache of keys and values.

    The last generated token is not an input; the head is applied once per generated token.
    """
    return sequence_flops(shape, 0, prompt_tokens + max(0, generated_tokens - 1), generated_tokens, adapted)


def rollout_flops(
    shape: ModelShape,
    prompts: Sequence[tuple[int, ...]],
    generated: Sequence[int],
    adapted: Adapted | None = None,
    room: int | None = None,
    members: int = 1,
) -> int:
    """Return the FLOPs of completions, from the token ids of each one's prompt and the number of generated tokens.

    With several `members` that share the prompts, `generated` is ordered by member. A common prefix and repeated
    prompts are computed once, as the engines do. `room` is the largest possible length of prompt and completion: beyond
    a window, prompts of unequal lengths do not share their prefix.
    """
    distinct = list(dict.fromkeys(prompts))
    shared = shared_prefix(distinct) if len(distinct) > 1 else 0
    if len(set(map(len, distinct))) > 1 and (room or 0) > shape.reach:
        shared = 0
    factors = adapted.numbers(shape) if adapted else 0
    flops = _sequence_flops(shape, factors, 0, shared, 0) if shared else 0
    flops += sum(_sequence_flops(shape, factors, shared, len(p) - shared, 1) for p in distinct)
    lengths = [len(p) for p in prompts] * members
    decoded = Counter((p, n - 1) for p, n in zip(lengths, generated, strict=True) if n > 1)
    return members * flops + sum(k * _sequence_flops(shape, factors, p, n, n) for (p, n), k in decoded.items())


def backward_flops(
    shape: ModelShape,
    tokens: int,
    logits: int,
    adapted: Adapted | None = None,
    *,
    checkpointing: bool = False,
    recompute_head: bool = False,
) -> int:
    """Return the FLOPs of the backward pass of one sequence of `tokens`, with the loss on `logits` of them.

    Without factors all weights have gradients, including the embedding: twice the forward pass. With factors, gradients
    of activations flow down to the lowest weight with factors (with checkpointing, to the embedding), and only factors
    have weight gradients. `checkpointing` recomputes the layers except for their last product, which is not needed.
    `recompute_head`: the head's logits are recomputed as well.
    """
    low, through = 0, list(shape.matrices)
    if adapted is not None and not checkpointing:
        low = min((m.layer for m in through if m.name in adapted.weights and m.layer is not None), default=0)
        through = [m for m in through if _passes(shape, m, low)]
    flops = 2 * tokens * sum(m.numbers for m in through)
    flops += 2 * _attention(shape, 0, tokens, Counter(shape.windows[low:]))
    if adapted is None:
        flops += 2 * tokens * sum(m.numbers for m in shape.matrices)
    else:
        kept = {m.name for m in through}
        unused = sum(m.columns for m in shape.matrices if m.name in adapted.weights and m.name not in kept)
        flops += tokens * (4 * adapted.numbers(shape) - 2 * adapted.rank * unused)
    head = 1 + (adapted is None) + recompute_head
    flops += 2 * head * shape.head.numbers * logits
    if checkpointing:
        flops += sequence_flops(shape, 0, tokens, 0, adapted)
    if checkpointing and not shape.last_again:  # recomputing stops (torch: early stop) before a layer's last product
        last = {m.layer: m for m in shape.matrices if m.layer is not None}.values()
        saved = [adapted.rank * m.rows if adapted and m.name in adapted.weights else m.numbers for m in last]
        flops -= 2 * tokens * sum(saved)
    return flops


def _passes(shape: ModelShape, matrix: Matrix, lowest: int) -> bool:
    """Return whether a gradient flows to the input: not through the first weights of the lowest layer."""
    first = matrix.name.removesuffix(".weight").endswith(shape.first)
    return matrix.layer is None or matrix.layer > lowest or (matrix.layer == lowest and not first)


def noise_numbers(space: Space, layout: Layout) -> int:
    """Return how many numbers one member draws: for the factors if the noise is low-rank, else for all parameters."""
    if layout.rank and space.evolves_model:
        return layout.rank * sum(sum(t.shape) for t in layout.tensors)
    return layout.parameters


def es_flops(space: Space, layout: Layout, members: int, streams: int) -> int:
    """Return the FLOPs of making members and moving the mean: a multiply-and-add per number of noise.

    An antithetic pair is one of the `streams`, whose noise the update draws once. With low-rank noise, the update also
    computes the product of the factors, as large as the matrix.
    """
    product = 2 * layout.rank * layout.parameters if layout.rank and space.evolves_model else 0
    return 2 * noise_numbers(space, layout) * (members + streams) + product * streams
