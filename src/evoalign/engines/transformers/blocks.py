# SPDX-License-Identifier: Apache-2.0
"""One decode step of a model of Llama's kind, without the library: four products a layer, and what is between them.

What members add is folded into the norms, the rotation and the gate (`evoalign.kernels.population`); keys and values
lie still, and rows find theirs by number. So a step is a fixed sequence of kernels over fixed memory, and a CUDA graph
can hold it. The products of q, k and v, and of gate and up, are one each: the model's own parameters become views of
the joined weights, so whoever writes them writes these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from evoalign.kernels import attention, population
from evoalign.spaces.base import Slots

_MODELS = {
    llama.LlamaForCausalLM: (llama.LlamaDecoderLayer, llama.LlamaRMSNorm),
    qwen2.Qwen2ForCausalLM: (qwen2.Qwen2DecoderLayer, qwen2.Qwen2RMSNorm),
    qwen3.Qwen3ForCausalLM: (qwen3.Qwen3DecoderLayer, qwen3.Qwen3RMSNorm),
}
_ROTATIONS = ("default", "linear", "llama3")
"""Kinds whose angles depend on the position alone."""
_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def obstacle(model: Any) -> str:
    """Why a model is none of this kind, in words; empty where it is."""
    if type(model) not in _MODELS:
        return f"{type(model).__name__} is not of the Llama, Qwen2 or Qwen3 family"
    layer_type, norm_type = _MODELS[type(model)]
    config, layers = model.config, model.model.layers
    kind = getattr(model.model.rotary_emb, "rope_type", "default")
    if kind not in _ROTATIONS:
        return f"its rotary embedding is of kind {kind}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "a layer does not attend to its whole past"
    for i, layer in enumerate(layers):
        if type(layer) is not layer_type or type(layer.input_layernorm) is not norm_type:
            return f"layer {i} is {type(layer).__name__}"
        for name in _PARTS:
            part = _part(layer, name)
            if type(part) is not nn.Linear:
                return f"layer {i}: {name} is {type(part).__name__}"
        for names in (_PARTS[:3], _PARTS[4:6]):
            if len({_part(layer, name).bias is None for name in names}) > 1:
                return f"layer {i}: of {', '.join(names)} some have a bias"
    return "" if type(model.lm_head) is nn.Linear else f"its head is {type(model.lm_head).__name__}"


def _part(layer: Any, name: str) -> Any:
    return getattr(layer.self_attn if name in _PARTS[:4] else layer.mlp, name)


def _weight(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{'self_attn' if name in _PARTS[:4] else 'mlp'}.{name}.weight"


def _joined(linears: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and biases of layers that read the same input, as one: theirs become views."""
    sizes = [one.out_features for one in linears]
    found: list[torch.Tensor | None] = []
    for name in ("weight", "bias"):
        own = [getattr(one, name) for one in linears]
        if any(one is None for one in own):
            found.append(None)
            continue
        whole = torch.cat([one.data for one in own])
        for one, part in zip(own, whole.split(sizes), strict=True):
            one.data = part
        found.append(whole)
    weight, bias = found
    assert weight is not None
    return weight, bias


@dataclass(frozen=True, slots=True)
class _Layer:
    """Modules whose weights are read where they are, and joined ones."""

    before: Any
    after: Any
    qkv: tuple[torch.Tensor, torch.Tensor | None]
    gate_up: tuple[torch.Tensor, torch.Tensor | None]
    o: Any
    down: Any
    q_norm: Any
    k_norm: Any


@dataclass(frozen=True, slots=True)
class _Between:
    """Tokens between two layers: `Entered`'s, [T, H], and what members of the last layer owe."""

    hidden: torch.Tensor
    residual: torch.Tensor | None
    source: population.Partial | None

    def at(self, tokens: torch.Tensor) -> _Between:
        """Some tokens."""
        assert self.residual is not None and self.source is not None
        source = population.Partial(self.source.dots[tokens], self.source.b)
        return _Between(self.hidden[tokens], self.residual[tokens], source)


@dataclass(slots=True)
class Store:
    """Keys and values of all layers: [C, HK, room, D] each."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Entered:
    """Between two layers, of B texts of T tokens: what the last layer gave, and what it adds to, [B, T, H] each."""

    hidden: torch.Tensor
    residual: torch.Tensor

    def rows(self, texts: torch.Tensor) -> Entered:
        """Those of some texts, int64 [B]."""
        return Entered(self.hidden[texts], self.residual[texts])


class Factors:
    """The factors of `slots` members on every projection, at addresses that stay: [S, 1, R, K] and [S, 1, N, R].

    Projections without members have zeros, which those of one shape share. `below` counts the layers before the first
    that has members.
    """

    def __init__(self, model: Any, names: Sequence[str], slots: int, rank: int, scaling: float) -> None:
        self.rank, self.scaling = rank, scaling
        self._zeros: dict[tuple[int, ...], torch.Tensor] = {}
        self._own: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.layers: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
        wanted = set(names)
        for i, layer in enumerate(model.model.layers):
            all_a, all_b = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
            for name in _PARTS:
                part = _part(layer, name)
                whole = _weight(i, name)
                shapes = (slots, 1, rank, part.in_features), (slots, 1, part.out_features, rank)
                a, b = (self._made(shape, part.weight, whole in wanted) for shape in shapes)
                all_a[name], all_b[name] = a, b
                if whole in wanted:
                    self._own[whole] = a, b
            self.layers.append((all_a, all_b))
        held = [any(_weight(i, name) in wanted for name in _PARTS) for i in range(len(self.layers))]
        self.below = held.index(True) if any(held) else 0

    def _made(self, shape: tuple[int, ...], like: torch.Tensor, own: bool) -> torch.Tensor:
        if own:
            return like.new_zeros(shape)
        return self._zeros.setdefault(shape, like.new_zeros(shape))

    def slots(self) -> list[Slots]:
        """Where a space writes what members have."""
        return [
            Slots(name, (slice(0, b.shape[2]), slice(0, a.shape[3])), a[:, 0], b[:, 0])
            for name, (a, b) in self._own.items()
        ]


class Blocks:
    """A model without `obstacle`, as steps of decoding ask it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config
        self.heads, self.shared = config.num_attention_heads, config.num_key_value_heads
        self.width: int = model.model.layers[0].self_attn.head_dim
        self._eps: float = config.rms_norm_eps
        self._layers = list(self._made(model.model.layers))

    @staticmethod
    def _made(layers: Sequence[Any]) -> Iterator[_Layer]:
        for layer in layers:
            attended, mlp = layer.self_attn, layer.mlp
            yield _Layer(
                layer.input_layernorm, layer.post_attention_layernorm,
                _joined([attended.q_proj, attended.k_proj, attended.v_proj]), _joined([mlp.gate_proj, mlp.up_proj]),
                attended.o_proj, mlp.down_proj,
                getattr(attended, "q_norm", None), getattr(attended, "k_norm", None),
            )  # fmt: skip

    def strange(self, names: Sequence[str]) -> list[str]:
        """Those of some weights that are no projection of a layer."""
        known = {_weight(i, name) for i in range(len(self._layers)) for name in _PARTS}
        return [name for name in names if name not in known]

    def factor_bytes(self, names: Sequence[str], rank: int) -> int:
        """Of one member's factors on these weights."""
        wanted, size = set(names), self.model.lm_head.weight.itemsize
        parts = {_weight(i, n): _part(layer, n) for i, layer in enumerate(self.model.model.layers) for n in _PARTS}
        return sum(rank * size * (p.in_features + p.out_features) for n, p in parts.items() if n in wanted)

    def store(self, rows: int, room: int) -> Store:
        """Memory for so many rows of so many columns."""
        like: torch.Tensor = self.model.lm_head.weight

        def made() -> list[torch.Tensor]:
            return [like.new_empty(rows, self.shared, room, self.width) for _ in self._layers]

        return Store(made(), made())

    def rotations(self, room: int) -> torch.Tensor:
        """Cosines, then sines, of so many positions: float32 [room, D]."""
        positions = torch.arange(room, device=self.model.device)[None]
        like = torch.empty(0, dtype=torch.float32, device=self.model.device)
        cosines, sines = self.model.model.rotary_emb(like, positions)
        half = cosines.shape[-1] // 2
        return torch.cat((cosines[0, :, :half], sines[0, :, :half]), dim=-1).contiguous()

    def step(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, members: torch.Tensor,
        store: Store, rotations: torch.Tensor, factors: Factors, *, fixed: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Logits [B, V] after one more token a row, whose keys and values the store gets.

        int64 [B] each: `tokens`, `positions` and `slots` of the store; `members` int32 [B], -1 for the mean itself.
        """

        def attend(i: int, qkv: torch.Tensor) -> torch.Tensor:
            return attention.decode(
                qkv, store.keys[i], store.values[i], slots, positions, heads=self.heads, scale=self.width**-0.5
            )

        hidden = embedding(tokens, self.model.model.embed_tokens.weight)
        found = self._through(
            _Between(hidden, None, None), slice(None), positions, members, rotations, factors, attend, fixed=fixed
        )
        return self._logits(found, members, factors, fixed=fixed)

    def read(
        self, tokens: torch.Tensor, start: int, rows: torch.Tensor, last: torch.Tensor | None, members: torch.Tensor,
        store: Store, rotations: torch.Tensor, factors: Factors, *,
        layers: slice = slice(None), entered: Entered | None = None, fixed: bool,
    ) -> torch.Tensor | Entered:  # fmt: skip
        """Logits [B, V] after the columns `last` [B] of texts `tokens` [B, T], which follow the first `start` columns.

        Keys and values go to `rows` of the store, int64 [B]. Texts may be filled up at their ends: what is there is
        computed, and seen by nobody. Some `layers` alone go on from what `entered` them. Without `last` what they come
        to is the answer; what members of the last of them owe is not in it.
        """
        count, length = tokens.shape
        positions = torch.arange(start, start + length, device=tokens.device).repeat(count)
        # Whole heads of queries see columns up to their own: the last of all columns is that of the last query.
        mask = causal_lower_right(length, start + length) if start else None

        def attend(i: int, qkv: torch.Tensor) -> torch.Tensor:
            heads = qkv.view(count, length, -1, self.width).transpose(1, 2)
            q, k, v = heads.split((self.heads, self.shared, self.shared), dim=1)
            for new, kept in ((k, store.keys[i]), (v, store.values[i])):
                kept[rows, :, start : start + length] = new
            if start:
                k, v = (kept[rows, :, : start + length] for kept in (store.keys[i], store.values[i]))
            if q.dtype == torch.float32:  # of whose shared heads no kernel knows that keeps no scores
                k, v = (kept.repeat_interleave(self.heads // self.shared, dim=1) for kept in (k, v))
            found = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not start, enable_gqa=True)
            return found.transpose(1, 2).reshape(count * length, -1)

        owners = members.repeat_interleave(length)
        if entered is None:
            begun = _Between(embedding(tokens.flatten(), self.model.model.embed_tokens.weight), None, None)
        else:
            begun = _Between(entered.hidden.flatten(0, 1), entered.residual.flatten(0, 1), None)
        found = self._through(begun, layers, positions, owners, rotations, factors, attend, fixed=fixed)
        assert found.residual is not None
        if last is None:
            return Entered(found.hidden.view(count, length, -1), found.residual.view(count, length, -1))
        ends = torch.arange(count, device=tokens.device) * length + last
        return self._logits(found.at(ends), members, factors, fixed=fixed)

    def _through(
        self, begun: _Between, layers: slice, positions: torch.Tensor, members: torch.Tensor, rotations: torch.Tensor,
        factors: Factors, attend: Callable[[int, torch.Tensor], torch.Tensor], *, fixed: bool,
    ) -> _Between:  # fmt: skip
        """These layers, on what lies before them."""
        hidden, residual, source = begun.hidden, begun.residual, begun.source
        terms: Any = {"rank": factors.rank, "scaling": factors.scaling}
        nobody = torch.full_like(members, -1) if factors.below else members
        for i in range(len(self._layers))[layers]:
            layer, (a, b) = self._layers[i], factors.layers[i]
            who = nobody if i < factors.below else members
            norm = partial(population.norm, eps=self._eps, members=who, fixed=fixed, **terms)
            into = (a["q_proj"], a["k_proj"], a["v_proj"])
            normed, dots = norm(hidden, residual, layer.before.weight, into_a=into, source=source)
            residual = hidden if residual is None else residual
            qkv = linear(normed, *layer.qkv)
            population.rotate(
                qkv, positions, rotations, dots, (b["q_proj"], b["k_proj"], b["v_proj"]), who,
                heads=self.heads, kv_heads=self.shared, head_dim=self.width, eps=self._eps,
                q_norm=None if layer.q_norm is None else layer.q_norm.weight,
                k_norm=None if layer.k_norm is None else layer.k_norm.weight, **terms,
            )  # fmt: skip
            attended = attend(i, qkv)
            hidden = linear(attended, layer.o.weight, layer.o.bias)
            source = population.Dot(attended, a["o_proj"], b["o_proj"])
            into = (a["gate_proj"], a["up_proj"])
            normed, dots = norm(hidden, residual, layer.after.weight, into_a=into, source=source)
            gated, parts = population.gate(
                linear(normed, *layer.gate_up), dots, (b["gate_proj"], b["up_proj"]), a["down_proj"], who,
                fixed=fixed, **terms,
            )  # fmt: skip
            hidden = linear(gated, layer.down.weight, layer.down.bias)
            source = population.Partial(parts, b["down_proj"])
        return _Between(hidden, residual, source)

    def _logits(self, found: _Between, members: torch.Tensor, factors: Factors, *, fixed: bool) -> torch.Tensor:
        normed, _ = population.norm(
            found.hidden, found.residual, self.model.model.norm.weight, self._eps, members, rank=factors.rank,
            scaling=factors.scaling, source=found.source, fixed=fixed,
        )  # fmt: skip
        return linear(normed, self.model.lm_head.weight)
