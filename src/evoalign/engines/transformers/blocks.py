# SPDX-License-Identifier: Apache-2.0
"""The forward of the static decoder for models of the Llama, Qwen2 and Qwen3 families: four products per layer.

Members' terms are fused into the norms, the rotation and the gate (`evoalign.kernels.population`). Keys and values do
not move; rows address theirs by slot. So a step is a fixed sequence of kernels over fixed memory, and a CUDA graph can
hold it. q, k and v are one product, and so are gate and up: the model's own parameters become views of the joined
weights, so that a write to a parameter changes the joined weights too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from evoalign.engines.transformers.vectors import Vectors, vectors_of
from evoalign.kernels import attention, population
from evoalign.spaces.base import Slots

_MODELS = {
    llama.LlamaForCausalLM: (llama.LlamaDecoderLayer, llama.LlamaRMSNorm),
    qwen2.Qwen2ForCausalLM: (qwen2.Qwen2DecoderLayer, qwen2.Qwen2RMSNorm),
    qwen3.Qwen3ForCausalLM: (qwen3.Qwen3DecoderLayer, qwen3.Qwen3RMSNorm),
}
_ROTATIONS = ("default", "linear", "llama3")
"""Rotary embeddings whose angles depend only on the position."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHIFTED = "mlp.down_proj.weight"
"""The projection whose output a member's bias may shift."""


def obstacle(model: Any) -> str:
    """Return why the static decoder does not support a model, or an empty string."""
    if type(model) not in _MODELS:
        return f"{type(model).__name__} is not of the Llama, Qwen2 or Qwen3 family"
    layer_type, norm_type = _MODELS[type(model)]
    config, layers = model.config, model.model.layers
    kind = getattr(model.model.rotary_emb, "rope_type", "default")
    if kind not in _ROTATIONS:
        return f"its rotary embedding is of kind {kind}"
    if getattr(config, "is_heterogeneous", False):
        return "its layers differ in size"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "a layer does not attend to its whole past"
    for i, layer in enumerate(layers):
        if type(layer) is not layer_type or type(layer.input_layernorm) is not norm_type:
            return f"layer {i} is {type(layer).__name__}"
        for name in _PROJECTIONS:
            part = _projection(layer, name)
            if type(part) is not nn.Linear:
                return f"layer {i}: {name} is {type(part).__name__}"
        for names in (_PROJECTIONS[:3], _PROJECTIONS[4:6]):
            if len({_projection(layer, name).bias is None for name in names}) > 1:
                return f"layer {i}: of {', '.join(names)} some have a bias"
    return "" if type(model.lm_head) is nn.Linear else f"its head is {type(model.lm_head).__name__}"


def _projection(layer: Any, name: str) -> Any:
    return getattr(layer.self_attn if name in _PROJECTIONS[:4] else layer.mlp, name)


def _projections(model: Any) -> dict[str, Any]:
    """Return the projections of all layers by the name of their weight."""
    return {
        f"model.layers.{i}.{'self_attn' if name in _PROJECTIONS[:4] else 'mlp'}.{name}.weight": _projection(layer, name)
        for i, layer in enumerate(model.model.layers)
        for name in _PROJECTIONS
    }


def _joined(linears: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join the weights and biases of layers with the same input. The layers' own become views of the result."""
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
    """One layer: modules, whose weights are read at each call, and the joined weights and biases."""

    before: Any
    after: Any
    qkv: tuple[torch.Tensor, torch.Tensor | None]
    gate_up: tuple[torch.Tensor, torch.Tensor | None]
    o: Any
    down: Any
    q_norm: Any
    k_norm: Any


@dataclass(frozen=True, slots=True)
class _Activations:
    """Activations [T, H] between two layers, and the pending term of the last projection."""

    hidden: torch.Tensor
    residual: torch.Tensor | None
    source: population.Partial | None


Places: TypeAlias = torch.Tensor | slice
"""Places in the store: int64 [B], or a slice of B places."""


@dataclass(slots=True)
class Store:
    """Keys and values of all layers: [C, HK, room, D] each."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Activations between two layers, of B texts of T tokens: the last layer's output and the residual, [B, T, H]."""

    hidden: torch.Tensor
    residual: torch.Tensor

    def rows(self, texts: torch.Tensor) -> Hidden:
        """Select some texts, int64 [B]."""
        return Hidden(self.hidden[texts], self.residual[texts])


class Factors:
    """The factors of `slots` members on every projection, at fixed addresses: [S, 1, R, K] and [S, 1, N, R].

    Projections that do not evolve have zeros, shared by those of the same shape. `below` is the number of layers below
    the first that evolves. `vectors` are those of a dense space, whose members have no factors. `shifts` are the biases
    of down projections by layer, [S + 1, N] with zeros in row 0, if the adapters are `biased`.
    """

    def __init__(
        self,
        model: Any,
        names: Sequence[str],
        slots: int,
        rank: int,
        scaling: float,
        vectors: Sequence[str] = (),
        *,
        biased: bool = False,
    ) -> None:
        self.rank, self.scaling, self.vectors = rank, scaling, Vectors(model, vectors, slots)
        self._own: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.layers: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
        self.shifts: dict[int, torch.Tensor] = {}
        zeros: dict[tuple[int, ...], torch.Tensor] = {}
        wanted, self.below = set(names), 0
        for index, (weight, projection) in enumerate(_projections(model).items()):
            layer, place = divmod(index, len(_PROJECTIONS))
            if not place:
                self.layers.append(({}, {}))
            shapes = (slots, 1, rank, projection.in_features), (slots, 1, projection.out_features, rank)
            if weight in wanted:
                self.below = self.below if self._own else layer
                a, b = (projection.weight.new_zeros(shape) for shape in shapes)
                self._own[weight] = a, b
                if biased:
                    self.shifts[layer] = a.new_zeros(slots + 1, projection.out_features)
            else:
                a, b = (zeros.setdefault(shape, projection.weight.new_zeros(shape)) for shape in shapes)
            self.layers[-1][0][_PROJECTIONS[place]], self.layers[-1][1][_PROJECTIONS[place]] = a, b

    def slots(self) -> list[Slots]:
        """Return the memory to which a space writes the members' factors."""
        biases = [shift[1:] for shift in self.shifts.values()] or [None] * len(self._own)
        return [
            Slots(name, (slice(0, b.shape[2]), slice(0, a.shape[3])), a[:, 0], b[:, 0], bias)
            for (name, (a, b)), bias in zip(self._own.items(), biases, strict=True)
        ]


class Blocks:
    """The decoder layers of a model with the forward passes of the static decoder. The model must pass `obstacle`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config
        self.heads, self.shared = config.num_attention_heads, config.num_key_value_heads
        self.width: int = model.model.layers[0].self_attn.head_dim
        self._eps: float = config.rms_norm_eps
        self._layers: list[_Layer] = []
        for layer in model.model.layers:
            attended, mlp = layer.self_attn, layer.mlp
            qkv, gate_up = (attended.q_proj, attended.k_proj, attended.v_proj), (mlp.gate_proj, mlp.up_proj)
            norms = (getattr(attended, name, None) for name in ("q_norm", "k_norm"))
            before, after = layer.input_layernorm, layer.post_attention_layernorm
            joined = _joined(qkv), _joined(gate_up)
            self._layers.append(_Layer(before, after, *joined, attended.o_proj, mlp.down_proj, *norms))

    def unsupported(self, names: Sequence[str]) -> list[str]:
        """Return the weights among `names` that are no projection of a layer."""
        known = _projections(self.model)
        return [name for name in names if name not in known]

    def vector_bytes(self, names: Sequence[str]) -> int | None:
        """Return the bytes of one member's vectors, or None if one of `names` is not in `vectors_of`."""
        known = vectors_of(self.model)
        return None if set(names) - set(known) else sum(known[name].nbytes for name in names)

    def factor_bytes(self, names: Sequence[str], rank: int, *, biased: bool) -> int:
        """Return the bytes of one member's factors, and biases if there are any, on these weights."""
        wanted, size = set(names), self.model.lm_head.weight.itemsize
        parts = [p for name, p in _projections(self.model).items() if name in wanted]
        return sum(size * (rank * (p.in_features + p.out_features) + biased * p.out_features) for p in parts)

    def store(self, rows: int, room: int, before: Store | None = None, places: Sequence[int] = ()) -> Store:
        """Allocate memory for `rows` rows of `room` columns. The first are copies of `places` of a store `before`.

        That store is emptied layer by layer, so that both are never there whole.
        """
        like, shape, made = self.model.lm_head.weight, (rows, self.shared, room, self.width), Store([], [])
        index = torch.tensor(list(places), dtype=torch.int64, device=like.device)
        for i in range(len(self._layers)):
            for new, old in ((made.keys, before and before.keys), (made.values, before and before.values)):
                new.append(like.new_empty(shape))
                if old:
                    columns = min(room, old[i].shape[2])
                    new[-1][: len(index), :, :columns] = old[i][index, :, :columns]
                    old[i] = like.new_empty(0)
        return made

    def rotations(self, room: int) -> torch.Tensor:
        """Return the cosines, then the sines, of the first `room` positions: float32 [room, D]."""
        positions = torch.arange(room, device=self.model.device)[None]
        like = torch.empty(0, dtype=torch.float32, device=self.model.device)
        cosines, sines = self.model.model.rotary_emb(like, positions)
        half = cosines.shape[-1] // 2
        return torch.cat((cosines[0, :, :half], sines[0, :, :half]), dim=-1).contiguous()

    def step(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        begins: tuple[torch.Tensor, torch.Tensor],
        members: torch.Tensor,
        store: Store,
        rotations: torch.Tensor,
        factors: Factors,
        *,
        fixed: bool,
    ) -> torch.Tensor:
        """Return logits [B, V] after one more token per row, whose keys and values are added to the store.

        `tokens`, `positions` and `slots` of the store are int64 [B], `begins` as in `attention.decode`; `members` is
        int32 [B], -1 for the mean itself.
        """

        def attend(i: int, qkv: torch.Tensor) -> torch.Tensor:
            past = (store.keys[i], store.values[i], slots, positions, begins)
            return attention.decode(qkv, *past, heads=self.heads, scale=self.width**-0.5)

        terms = population.Terms(members, factors.rank, factors.scaling, fixed)
        entered = _Activations(embedding(tokens, self.model.model.embed_tokens.weight), None, None)
        found = self._run_layers(entered, slice(None), positions, terms, rotations, factors, attend)
        return self._logits(found, terms, factors)

    def read(
        self,
        tokens: torch.Tensor,
        start: int,
        rows: Places,
        last: torch.Tensor | None,
        members: torch.Tensor,
        store: Store,
        rotations: torch.Tensor,
        factors: Factors,
        *,
        layers: slice = slice(None),
        entered: Hidden | None = None,
        fixed: bool,
    ) -> torch.Tensor | Hidden:
        """Return logits [B, V] after the columns `last` [B] of texts `tokens` [B, T], which start at column `start`.

        Keys and values go to `rows` of the store, without a copy of what is there if they are a slice. Texts may be
        padded at the end; the padding is computed but never attended to. With `layers`, only these layers run, on
        `entered`. Without `last` the result is their activations, without the pending term of the last of them.
        """
        count, length = tokens.shape
        positions = torch.arange(start, start + length, device=tokens.device).repeat(count)
        mask = causal_lower_right(length, start + length) if start else None  # aligned at the last column

        def attend(i: int, qkv: torch.Tensor) -> torch.Tensor:
            heads = qkv.view(count, length, -1, self.width).transpose(1, 2)
            q, k, v = heads.split((self.heads, self.shared, self.shared), dim=1)
            for new, kept in ((k, store.keys[i]), (v, store.values[i])):
                kept[rows, :, start : start + length] = new
            if start:
                k, v = (kept[rows, :, : start + length] for kept in (store.keys[i], store.values[i]))
            if q.dtype == torch.float32:  # no memory-efficient kernel supports shared heads in float32
                k, v = (kept.repeat_interleave(self.heads // self.shared, dim=1) for kept in (k, v))
            found = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not start, enable_gqa=True)
            return found.transpose(1, 2).reshape(count * length, -1)

        terms = population.Terms(members.repeat_interleave(length), factors.rank, factors.scaling, fixed)
        if entered is None:
            begun = _Activations(embedding(tokens.flatten(), self.model.model.embed_tokens.weight), None, None)
        else:
            begun = _Activations(entered.hidden.flatten(0, 1), entered.residual.flatten(0, 1), None)
        ends = None if last is None else torch.arange(count, device=tokens.device) * length + last
        found = self._run_layers(begun, layers, positions, terms, rotations, factors, attend, ends)
        if ends is None:
            assert found.residual is not None
            return Hidden(found.hidden.view(count, length, -1), found.residual.view(count, length, -1))
        return self._logits(found, replace(terms, members=members), factors)

    def read_on(
        self,
        tokens: torch.Tensor,
        texts: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        bounds: tuple[int, int],
        rows: torch.Tensor,
        members: torch.Tensor,
        store: Store,
        rotations: torch.Tensor,
        factors: Factors,
    ) -> torch.Tensor:
        """Return logits [B, V] after texts of `lengths` [B] tokens, which follow the columns `starts` [B].

        `tokens` [N] has the texts one after another, and `texts` [N] each token's text: all int64. `bounds` are the
        longest length, and the column after the last text.
        """
        (width, end), ends, groups = bounds, lengths.cumsum(0), self.heads // self.shared
        offsets = torch.arange(len(tokens), device=tokens.device) - (ends - lengths)[texts]
        positions, columns = starts[texts] + offsets, torch.arange(end, device=tokens.device)
        mask = (columns <= (starts[:, None] + columns[:width])[..., None])[:, None]
        unset = (columns >= (starts + lengths)[:, None])[:, None, :, None]  # memory not yet written may hold NaN

        def attend(i: int, qkv: torch.Tensor) -> torch.Tensor:
            q, *new = qkv.view(len(tokens), -1, self.width).split((self.heads, self.shared, self.shared), dim=1)
            asked = q.new_zeros(len(rows), width, self.heads, self.width)
            asked[texts, offsets] = q
            past = list[torch.Tensor]()
            for some, kept in zip(new, (store.keys[i], store.values[i]), strict=True):
                kept[rows[texts], :, positions] = some
                past.append(kept[rows, :, :end].masked_fill_(unset, 0).repeat_interleave(groups, dim=1))
            found = scaled_dot_product_attention(asked.transpose(1, 2), *past, attn_mask=mask)
            return found[texts, :, offsets].flatten(1)

        terms = population.Terms(members[texts], factors.rank, factors.scaling, False)
        begun = _Activations(embedding(tokens, self.model.model.embed_tokens.weight), None, None)
        found = self._run_layers(begun, slice(None), positions, terms, rotations, factors, attend, ends - 1)
        return self._logits(found, replace(terms, members=members), factors)

    def _run_layers(
        self,
        begun: _Activations,
        layers: slice,
        positions: torch.Tensor,
        terms: population.Terms,
        rotations: torch.Tensor,
        factors: Factors,
        attend: Callable[[int, torch.Tensor], torch.Tensor],
        ends: torch.Tensor | None = None,
    ) -> _Activations:
        """Return what these layers make of tokens; the last layer of the model only of `ends`, int64 [B], if given."""
        hidden, residual, source = begun.hidden, begun.residual, begun.source
        plain, gain = terms, factors.vectors.gain
        if factors.below:
            plain = replace(terms, members=torch.full_like(terms.members, -1))
        for i in range(len(self._layers))[layers]:
            layer, (a, b) = self._layers[i], factors.layers[i]
            own = plain if i < factors.below else terms
            q_norm, k_norm = (None if norm is None else gain(norm) for norm in (layer.q_norm, layer.k_norm))
            (weight, shared), bias = layer.qkv, factors.vectors.biases.get(i)
            heads = population.Heads(self.heads, self.shared, self.width, q_norm, k_norm, self._eps, bias)
            into = (a["q_proj"], a["k_proj"], a["v_proj"])
            normed, dots = population.norm(hidden, residual, gain(layer.before), self._eps, own, into, source)
            residual = hidden if residual is None else residual
            qkv = linear(normed, weight, shared if bias is None else None)
            population.rotate(qkv, positions, rotations, dots, (b["q_proj"], b["k_proj"], b["v_proj"]), own, heads)
            attended = attend(i, qkv)
            if ends is not None and layer is self._layers[-1]:
                attended, residual, own = attended[ends], residual[ends], replace(own, members=own.members[ends])
            hidden = linear(attended, layer.o.weight, layer.o.bias)
            owed, into = population.Dot(attended, a["o_proj"], b["o_proj"]), (a["gate_proj"], a["up_proj"])
            normed, dots = population.norm(hidden, residual, gain(layer.after), self._eps, own, into, owed)
            gate_up = linear(normed, *layer.gate_up)
            gated, parts = population.gate(gate_up, dots, (b["gate_proj"], b["up_proj"]), a["down_proj"], own)
            hidden = linear(gated, layer.down.weight, layer.down.bias)
            if i in factors.shifts:
                hidden += factors.shifts[i][(own.members + 1).long()]
            source = population.Partial(parts, b["down_proj"])
        return _Activations(hidden, residual, source)

    def _logits(self, found: _Activations, terms: population.Terms, factors: Factors) -> torch.Tensor:
        gain = factors.vectors.gain(self.model.model.norm)
        normed, _ = population.norm(found.hidden, found.residual, gain, self._eps, terms, (), found.source)
        return linear(normed, self.model.lm_head.weight)
