# SPDX-License-Identifier: Apache-2.0
"""FLOPs by formula, of forward and backward passes and of what ES makes and moves.

They are those of matrix products, two a multiply-and-add, of real tokens: padding, norms, activations, biases, rotary
embeddings and softmax are left out (docs/concepts/budget.md has the equations). The formula knows the shapes of
`FAMILIES`, and refuses to guess at any other.
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
from evoalign.spaces import Space
from evoalign.types import Layout, TensorSpec

FAMILIES = frozenset({"gemma", "gemma2", "gemma3_text", "gpt_neox", "granite", "llama", "mistral", "olmo2", "opt",
                      "phi3", "qwen2", "qwen3", "smollm3"})  # fmt: skip
"""`model_type`s whose formula is tested against a count of the operations that torch runs."""
ADAM_FLOPS = 14
"""Elementwise operations of AdamW a trained number: two moments, their corrections, root, decay and step."""
_READS_INPUT = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
_DROPOUTS = ("dropout", "hidden_dropout", "resid_pdrop")
_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear weight [rows, columns] = [out, in]; `layer` None: of no layer."""

    name: str
    rows: int
    columns: int
    layer: int | None

    @property
    def numbers(self) -> int:
        """Of the matrix."""
        return self.rows * self.columns


@dataclass(frozen=True)
class ModelShape:
    """What the formula needs of a model.

    `matrices` are applied to every token, the `head` (tied or not) only where logits are wanted. `attention` is query
    heads times head_dim, which is not always the hidden size; grouped keys and values make their projections smaller,
    not the scores. `windows` holds the most keys a token of each layer sees. For backward passes: `first` are ends of
    the names of what reads a layer's input, and `last_again` says that a norm or dropout needs the output of a layer's
    last matrix, so that checkpointing has to compute that too.
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
        """The narrowest window."""
        return min((w for w in self.windows if w is not None), default=math.inf)

    @cached_property
    def numbers(self) -> int:
        """In all that every token is multiplied with."""
        return sum(m.numbers for m in self.matrices)

    @cached_property
    def kinds(self) -> Counter[int | None]:
        """How many layers have each window."""
        return Counter(self.windows)


def shape_of(hf: Any, specs: Sequence[TensorSpec]) -> ModelShape:
    """The shape of a model, from its transformers configuration and its tensors.

    Raises ModelError for a model that the formula does not know: mixtures of experts, state-space layers, and whatever
    is not in `FAMILIES`.
    """
    text = hf.get_text_config()
    odd = [s.name for s in specs if s.kind == "other" and len(s.shape) > 1]
    kinds = _kinds(text)
    if text.model_type not in FAMILIES or odd or None in kinds:
        why = f"its tensor {odd[0]}" if odd else f"model type {text.model_type}"
        raise ModelError(f"the formula for FLOPs does not know {why}; they are left out of the budget")
    linear = [Matrix(s.name, s.shape[0], s.shape[1], s.layer) for s in specs if s.kind == "linear"]
    heads = [m for m in linear if m.name.endswith(_HEADS)] or [
        Matrix(s.name, s.shape[0], s.shape[1], None) for s in specs if s.kind == "embedding"
    ]  # a tied head is the first embedding; others hold positions
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelShape(
        matrices=tuple(m for m in linear if m != heads[0]),
        head=heads[0],
        attention=text.num_attention_heads * head_dim,
        windows=tuple(text.sliding_window if kind == "sliding_attention" else None for kind in kinds),
        parameters=sum(math.prod(s.shape) for s in specs),
        first=_READS_INPUT + (("dense_h_to_4h",) if getattr(text, "use_parallel_residual", False) else ()),
        last_again=any("post_feedforward" in s.name for s in specs) or any(getattr(text, n, 0) for n in _DROPOUTS),
    )


def _kinds(text: Any) -> list[str | None]:
    """How each layer attends; None for a way that the formula does not know."""
    has_window = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    alike = "sliding_attention" if has_window else "full_attention"
    kinds = getattr(text, "layer_types", None) or [alike] * text.num_hidden_layers
    return [kind if kind in ("full_attention", "sliding_attention") else None for kind in kinds]


@dataclass(frozen=True, slots=True)
class Adapted:
    """Low-rank factors of rank `rank` beside the linear weights of these names."""

    rank: int
    weights: frozenset[str]

    def numbers(self, shape: ModelShape) -> int:
        """In the factors: rank * (in + out) a weight."""
        return self.rank * sum(m.rows + m.columns for m in shape.matrices if m.name in self.weights)


def keys_seen(start: int, tokens: int, window: int | None = None) -> int:
    """Keys that causal attention looks at from positions start, start + 1, ...: min(position + 1, window) each."""
    end = start + tokens
    if window is None or end <= window:
        return (start + 1 + end) * tokens // 2
    inside = max(0, window - start)
    return (start + 1 + window) * inside // 2 + window * (tokens - inside)


def sequence_flops(shape: ModelShape, start: int, tokens: int, logits: int, adapted: Adapted | None = None) -> int:
    """Forward through the model for the positions from `start`, the ones before in a cache; logits of so many."""
    return _sequence_flops(shape, adapted.numbers(shape) if adapted else 0, start, tokens, logits)


def _sequence_flops(shape: ModelShape, factors: int, start: int, tokens: int, logits: int) -> int:
    return (
        2 * (shape.numbers + factors) * tokens
        + _attention(shape, start, tokens, shape.kinds)
        + 2 * shape.head.numbers * logits
    )


def _attention(shape: ModelShape, start: int, tokens: int, kinds: Counter[int | None]) -> int:
    """Scores and values, two products of `attention` numbers a key, of so many layers of each window."""
    return 4 * shape.attention * sum(count * keys_seen(start, tokens, window) for window, count in kinds.items())


def forward_flops(shape: ModelShape, prompt_tokens: int, generated_tokens: int, adapted: Adapted | None = None) -> int:
    """One completion with a cache of keys and values.

    The last token that is generated is not read any more; each one that is generated takes the head once.
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
    """Completions of one member: token ids of each one's prompt, and how many tokens it generated.

    Of several `members` that were asked the same prompts: what each generated, member by member.

    What prompts begin with in common is read once, and so is a prompt that is asked several times, as the engines do.
    `room` is the longest prompt and completion together that could come: beyond a window, prompts of unequal lengths
    do not share their beginning.
    """
    distinct = list(dict.fromkeys(prompts))
    shared = shared_prefix(distinct) if len(distinct) > 1 else 0
    if len(set(map(len, distinct))) > 1 and (room or 0) > shape.reach:
        shared = 0
    factors = adapted.numbers(shape) if adapted else 0
    flops = _sequence_flops(shape, factors, 0, shared, 0) if shared else 0
    flops += sum(_sequence_flops(shape, factors, shared, len(p) - shared, 1) for p in distinct)
    lengths = [len(p) for p in prompts] * members
    answers = Counter((p, n - 1) for p, n in zip(lengths, generated, strict=True) if n > 1)
    return members * flops + sum(k * _sequence_flops(shape, factors, p, n, n) for (p, n), k in answers.items())


def backward_flops(
    shape: ModelShape,
    tokens: int,
    logits: int,
    adapted: Adapted | None = None,
    *,
    checkpointing: bool = False,
    recompute_head: bool = False,
) -> int:
    """Backward of one sequence of `tokens`, the loss being on `logits` of them.

    Without factors all weights take gradients, the embedding among them: twice the forward. With them, activations'
    gradients flow down to the lowest weight that has factors (with checkpointing, to the embedding), and only
    factors take weights' gradients. `checkpointing` computes the layers again, but for their last product, which
    nothing needs. `recompute_head`: so does a head that keeps no logits.
    """
    low = 0 if adapted is None or checkpointing else min(_layers(shape, adapted), default=0)
    through = [m for m in shape.matrices if adapted is None or checkpointing or _passes(shape, m, low)]
    flops = 2 * tokens * sum(m.numbers for m in through) + 2 * _attention(
        shape, 0, tokens, Counter(shape.windows[low:])
    )
    if adapted is None:
        flops += 2 * tokens * sum(m.numbers for m in shape.matrices)
    else:
        kept = {m.name for m in through}
        unused = sum(m.columns for m in shape.matrices if m.name in adapted.weights and m.name not in kept)
        flops += tokens * (4 * adapted.numbers(shape) - 2 * adapted.rank * unused)
    head = 1 + (adapted is None) + recompute_head
    flops += 2 * head * shape.head.numbers * logits
    return flops + (_again(shape, tokens, adapted) if checkpointing else 0)


def _layers(shape: ModelShape, adapted: Adapted) -> set[int]:
    return {m.layer for m in shape.matrices if m.name in adapted.weights and m.layer is not None}


def _passes(shape: ModelShape, matrix: Matrix, lowest: int) -> bool:
    """Whether a gradient goes through to the input; what reads the input of the lowest layer passes none on."""
    first = matrix.name.removesuffix(".weight").endswith(shape.first)
    return matrix.layer is None or matrix.layer > lowest or (matrix.layer == lowest and not first)


def _again(shape: ModelShape, tokens: int, adapted: Adapted | None) -> int:
    """A second forward of the layers, which ends (torch: early stop) before the last product of each."""
    flops = sequence_flops(shape, 0, tokens, 0, adapted)
    if shape.last_again:
        return flops
    last = {m.layer: m for m in shape.matrices if m.layer is not None}.values()
    saved = [adapted.rank * m.rows if adapted and m.name in adapted.weights else m.numbers for m in last]
    return flops - 2 * tokens * sum(saved)


def noise_numbers(space: Space, layout: Layout) -> int:
    """Normals of one member: of the factors where noise is low-rank, else of what evolves."""
    if layout.rank and space.evolves_model:
        return layout.rank * sum(sum(t.shape) for t in layout.tensors)
    return layout.parameters


def es_flops(space: Space, layout: Layout, members: int, streams: int) -> int:
    """Making members and moving the mean: multiply and add a number of noise, for each.

    An antithetic pair is one of the `streams`, whose noise the update makes once. With low-rank noise, the update is
    also the product of the factors, as large as the matrix.
    """
    product = 2 * layout.rank * layout.parameters if layout.rank and space.evolves_model else 0
    return 2 * noise_numbers(space, layout) * (members + streams) + product * streams
