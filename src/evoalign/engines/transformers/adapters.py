# SPDX-License-Identifier: Apache-2.0
"""Members' low-rank terms in the forward of transformers: y += scaling * ((x A^T) B^T + bias), by the row's member.

Linear layers have forward hooks. In a *grouped* batch every member has the same number of consecutive rows, and one
batched product serves all members without copying a factor. In a *ragged* batch (rows have left) each row has its
member's factors, gathered once when the rows change.

Experts of a mixture are fused tensors with a gate between the two products of an expert, so a hook is not enough:
`ExpertAdapters` replaces the forward of a layer's experts while members have adapters. It computes what transformers
computes (`eager` and `grouped_mm`) with the terms added to each product: for the token x of member m at expert e,
y += scaling * B[e, m] (A[e, m] x). Without adapters the original forward runs.

Shapes of experts: N tokens, K experts per token, S = N K pairs of the two, E experts, M members, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from evoalign.errors import ModelError
from evoalign.models.tensors import FUSED, Part, experts_of
from evoalign.spaces.base import Adapter

ROOM = 1 << 24
"""Factor elements that are gathered at a time, one set per pair."""
Members = Callable[[int, int, torch.device], torch.Tensor]
"""Returns the member of each token, from the numbers of tokens and members and the device."""


def modules_of(model: nn.Module, weights: Iterable[str]) -> Mapping[str, nn.Module]:
    """Return the modules with the weights of these names; those of experts are in one module per layer."""
    experts = experts_of(model)
    return {
        name: experts[name].module if name in experts else model.get_submodule(name.removesuffix(".weight"))
        for name in weights
    }


class Adapters:
    """Members' adapters on linear weights of a model, and the member of each row.

    `modules` are the modules with the weights of these names.
    """

    def __init__(self, model: nn.Module, weights: Iterable[str]) -> None:
        experts, names = experts_of(model), list(weights)
        self.modules = modules_of(model, names)
        self._layers = {n: _Layer(self) for n in names if n not in experts}
        self._handles = [self.modules[n].register_forward_hook(layer) for n, layer in self._layers.items()]
        self._experts = {n: experts[n] for n in names if n in experts}
        self._mixtures = {e.module: ExpertAdapters(e.module, self._members) for e in self._experts.values()}
        self.rows: torch.Tensor | None = None
        self.version = 0
        self.factors: dict[str, Adapter | None] = {}
        """The current adapter of each weight."""

    def set(self, name: str, adapter: Adapter | None) -> None:
        """Set the members' factors on one weight, or remove them."""
        self.factors[name] = adapter
        if name in self._experts:
            if adapter is not None and adapter.bias is not None:
                raise ModelError(f"adapters of experts have no bias, and that of {name} has one; leave experts out")
            expert = self._experts[name]
            self._mixtures[expert.module].put(expert.part, expert.index, adapter)
        else:
            self._layers[name].put(adapter)

    def group(self) -> None:
        """Declare that rows of the next batches are in equal consecutive groups, in the members' order."""
        self.rows = None
        self.version += 1

    def scatter(self, rows: torch.Tensor) -> None:
        """Declare that row i of the next batches belongs to member `rows[i]`."""
        self.rows = rows
        self.version += 1

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        for mixture in self._mixtures.values():
            mixture.remove()

    def _members(self, tokens: int, members: int, device: torch.device) -> torch.Tensor:
        """Return the member of each token, with the rows' tokens in order: int64 [tokens]."""
        rows = None if members == 1 else self.rows
        owners = torch.arange(members, device=device) if rows is None else rows
        return owners.repeat_interleave(tokens // len(owners))


class _Layer:
    """The hook of one linear layer."""

    def __init__(self, owner: Adapters) -> None:
        self._owner = owner
        self._adapter: Adapter | None = None
        self._down = self._up = torch.empty(0)
        self._bias: torch.Tensor | None = None
        self._version = -1

    def put(self, adapter: Adapter | None) -> None:
        self._adapter = adapter
        self._version = -1

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        adapter = self._adapter
        if adapter is None or not output.numel():
            return
        if self._version != self._owner.version:
            # down [G or 1, in, R], up [G, R, out] and bias [G, 1, out], for one product per group
            rows, down, up, bias = self._owner.rows, adapter.a.transpose(1, 2), adapter.b.transpose(1, 2), adapter.bias
            if rows is not None and len(up) > 1:
                down, up = down if len(down) == 1 else down[rows], up[rows]
                bias = None if bias is None else bias[rows]
            self._down, self._up = (down[0] if len(down) == 1 else down), up
            self._bias = None if bias is None else bias[:, None].to(output.dtype)
            self._version = self._owner.version
        groups = len(self._up)
        x = inputs[0].reshape(groups, -1, inputs[0].shape[-1])
        y = output.view(groups, -1, output.shape[-1])
        hidden = x @ self._down
        # Under autocast the layer's output is in half precision, and in-place operators do not cast.
        y.baddbmm_(hidden, self._up.to(y.dtype), alpha=adapter.scaling)
        if self._bias is not None:
            y.add_(self._bias, alpha=adapter.scaling)


class ExpertAdapters:
    """Members' adapters on the experts of one layer, stacked: `a` [E, M or 1, R, in], `b` [E, M, out, R]."""

    def __init__(self, module: nn.Module, members: Members) -> None:
        self._module: Any = module
        self._members = members
        self._experts = len(self._module.gate_up_proj)
        self._adapters: dict[Part, dict[int, Adapter]] = {part: {} for parts in FUSED.values() for part in parts}
        self._stacks: dict[Part, Adapter] | None = {}
        self._own = vars(module).get("forward")
        self._plain = module.forward
        module.forward = self.forward

    def put(self, part: Part, index: int, adapter: Adapter | None) -> None:
        """Set the members' factors on one matrix of one expert, or remove them."""
        self._stacks = None
        if adapter is None:
            self._adapters[part].pop(index, None)
        else:
            self._adapters[part][index] = adapter

    def remove(self) -> None:
        """Restore the original forward."""
        del self._module.forward
        if self._own is not None:
            self._module.forward = self._own

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, [N, H], like the original forward."""
        if self._stacks is None:
            self._stacks = self._stacked()
        if not self._stacks:
            return self._plain(hidden_states, top_k_index, top_k_weights)
        tokens, chosen = top_k_index.shape
        expert, order = top_k_index.reshape(-1).sort(stable=True)
        token, counts = order // chosen, torch.bincount(expert, minlength=self._experts).tolist()
        members = len(next(iter(self._stacks.values())).b[0])
        pairs = _Pairs(expert, self._members(tokens, members, token.device)[token], counts)
        fused = self._product("gate_up_proj", hidden_states[token], pairs)
        out = self._product("down_proj", self._module._apply_gate(fused), pairs)
        out = out * top_k_weights.reshape(-1)[order, None]
        # Sorted back and summed by token. Adding in place on a GPU would have no fixed order.
        sorted_back = torch.empty_like(out).index_copy_(0, order, out)
        return sorted_back.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    def _product(self, parameter: str, x: torch.Tensor, pairs: _Pairs) -> torch.Tensor:
        """Return x [S, in] times each pair's expert, plus its member's terms: [S, out]."""
        weight, stacks = getattr(self._module, parameter), self._stacks or {}
        y = _by_expert(x, weight, pairs.counts)
        parts = FUSED[parameter]
        for part, columns in zip(parts, y.chunk(len(parts), dim=-1), strict=True):
            if part in stacks:
                _add_terms(columns, x, stacks[part], pairs)
        return y

    def _stacked(self) -> dict[Part, Adapter]:
        """Stack the factors of all experts. The adapters become views of the stack, so that memory is not doubled."""
        found: dict[Part, Adapter] = {}
        for part, adapters in self._adapters.items():
            if adapters:
                one = next(iter(adapters.values()))
                none = Adapter(torch.zeros_like(one.a), torch.zeros_like(one.b), one.scaling)
                every = [adapters.get(i, none) for i in range(self._experts)]
                stack = Adapter(torch.stack([e.a for e in every]), torch.stack([e.b for e in every]), one.scaling)
                for i in adapters:
                    adapters[i] = Adapter(stack.a[i], stack.b[i], one.scaling)
                found[part] = stack
        return found


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of a token and an expert, sorted by expert: `expert` [S], `member` [S], and the `counts` per expert."""

    expert: torch.Tensor
    member: torch.Tensor
    counts: list[int]


def _by_expert(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiply consecutive rows of x [S, in], `counts` per expert, by the transposed weight [out, in] of the expert."""
    y = x.new_empty(len(x), weight.shape[1], dtype=torch.promote_types(x.dtype, weight.dtype))
    start = 0
    for index, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            y[rows] = nn.functional.linear(x[rows], weight[index])
            start += count
    return y


def _add_terms(y: torch.Tensor, x: torch.Tensor, stack: Adapter, pairs: _Pairs) -> None:
    """Add scaling * B (A x) of each pair's expert and member to y [S, out], in place."""
    members = stack.b.shape[1]
    shared = stack.a.shape[1] == 1
    hidden = _by_expert(x.to(stack.a.dtype), stack.a[:, 0], pairs.counts) if shared else None
    a, b = stack.a.flatten(0, 1), stack.b.flatten(0, 1)
    place = pairs.expert * members + pairs.member
    step = max(1, ROOM // (a.shape[1] * max(a.shape[2], b.shape[1])))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        at = place[rows]
        h = hidden[rows, :, None] if hidden is not None else torch.bmm(a[at], x[rows, :, None].to(a.dtype))
        y[rows].add_(torch.bmm(b[at], h)[..., 0].to(y.dtype), alpha=stack.scaling)
