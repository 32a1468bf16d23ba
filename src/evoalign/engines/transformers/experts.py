# SPDX-License-Identifier: Apache-2.0
"""Each token adds its own member's low-rank terms inside the experts that it is sent to.

Between the two products of an expert lies its gate, so no hook from outside will do: while members have adapters, this
stands in for the `forward` of a layer's experts. What it computes is what transformers computes (its `eager` and
`grouped_mm`), with the terms added to each product: for the token x of member m at expert e, y += scaling * B[e, m]
(A[e, m] x). Without adapters the library's own forward answers.

Shapes: N tokens, K experts each, S = N K pairs of the two, E experts, M members, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from evoalign.models.tensors import FUSED, Part
from evoalign.spaces.base import Adapter

ROOM = 1 << 24
"""Numbers of factors that are gathered at a time, one set a pair."""
Members = Callable[[int, int, torch.device], torch.Tensor]
"""Whose each of so many tokens is, of so many members."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """Factors of all experts: `a` [E, M or 1, R, in], `b` [E, M, out, R]."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class ExpertAdapters:
    """Members' adapters on the experts of one layer."""

    def __init__(self, module: nn.Module, members: Members) -> None:
        self._module: Any = module
        self._members = members
        self._experts = len(self._module.gate_up_proj)
        self._adapters: dict[Part, dict[int, Adapter]] = {part: {} for parts in FUSED.values() for part in parts}
        self._stacks: dict[Part, _Stack] | None = {}
        self._own = vars(module).get("forward")
        self._plain = module.forward
        module.forward = self.forward

    def put(self, part: Part, index: int, adapter: Adapter | None) -> None:
        """Put the members' factors on one matrix of one expert, or none."""
        self._stacks = None
        if adapter is None:
            self._adapters[part].pop(index, None)
        else:
            self._adapters[part][index] = adapter

    def remove(self) -> None:
        """The library's forward answers again."""
        del self._module.forward
        if self._own is not None:
            self._module.forward = self._own

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the module's own: what the experts of each token answer, weighted and summed, [N, H]."""
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
        # Put back and summed by token, not added in place: on a GPU, additions to one place have no order.
        sorted_back = torch.empty_like(out).index_copy_(0, order, out)
        return sorted_back.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    def _product(self, parameter: str, x: torch.Tensor, pairs: _Pairs) -> torch.Tensor:
        """x [S, in] times each pair's expert, and its member's terms: [S, out]."""
        weight, stacks = getattr(self._module, parameter), self._stacks or {}
        y = _by_expert(x, weight, pairs.counts)
        parts = FUSED[parameter]
        for part, columns in zip(parts, y.chunk(len(parts), dim=-1), strict=True):
            if part in stacks:
                _add_terms(columns, x, stacks[part], pairs)
        return y

    def _stacked(self) -> dict[Part, _Stack]:
        """The factors as the products want them; each adapter is then a view of them, so that they lie here once."""
        found: dict[Part, _Stack] = {}
        for part, adapters in self._adapters.items():
            if adapters:
                one = next(iter(adapters.values()))
                none = Adapter(torch.zeros_like(one.a), torch.zeros_like(one.b), one.scaling)
                every = [adapters.get(i, none) for i in range(self._experts)]
                stack = _Stack(torch.stack([e.a for e in every]), torch.stack([e.b for e in every]), one.scaling)
                for i in adapters:
                    adapters[i] = Adapter(stack.a[i], stack.b[i], one.scaling)
                found[part] = stack
        return found


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Tokens with an expert each, by expert: `expert` and `member` of each [S]; `counts` of each expert."""

    expert: torch.Tensor
    member: torch.Tensor
    counts: list[int]


def _by_expert(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Consecutive rows of x [S, in], so many of each expert, times the transpose of that expert's weight [out, in]."""
    y = x.new_empty(len(x), weight.shape[1], dtype=torch.promote_types(x.dtype, weight.dtype))
    start = 0
    for index, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            y[rows] = nn.functional.linear(x[rows], weight[index])
            start += count
    return y


def _add_terms(y: torch.Tensor, x: torch.Tensor, stack: _Stack, pairs: _Pairs) -> None:
    """y [S, out] += scaling * B (A x), of each pair's expert and member."""
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
