# SPDX-License-Identifier: Apache-2.0
"""Each row of a batch adds its own member's low-rank term: y += scaling * (x A^T) B^T, in forward hooks.

Rows come in two arrangements. In a *grouped* batch every member has the same number of consecutive rows, and one
batched product serves all members without copying a factor. In a *ragged* one (rows have left) each row takes its
member's factors, gathered once when the rows change.

The experts of a mixture are no layers of their own: see `evoalign.engines.transformers.experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from evoalign.engines.transformers.experts import ExpertAdapters
from evoalign.models.tensors import experts_of
from evoalign.spaces.base import Adapter


class Adapters:
    """Members' adapters on linear weights of a model, and which row belongs to which member.

    `modules` are those that hold the weights of these names.
    """

    def __init__(self, model: nn.Module, weights: Iterable[str]) -> None:
        experts, names = experts_of(model), list(weights)
        self.modules: Mapping[str, nn.Module] = {
            n: experts[n].module if n in experts else model.get_submodule(n.removesuffix(".weight")) for n in names
        }
        self._layers = {n: _Layer(self) for n in names if n not in experts}
        self._handles = [self.modules[n].register_forward_hook(layer) for n, layer in self._layers.items()]
        self._experts = {n: experts[n] for n in names if n in experts}
        self._mixtures = {e.module: ExpertAdapters(e.module, self._members) for e in self._experts.values()}
        self.rows: torch.Tensor | None = None
        self.version = 0
        self.factors: dict[str, Adapter | None] = {}
        """What was put on each weight."""

    def set(self, name: str, adapter: Adapter | None) -> None:
        """Put the members' factors on one weight, or none."""
        self.factors[name] = adapter
        if name in self._experts:
            expert = self._experts[name]
            self._mixtures[expert.module].put(expert.part, expert.index, adapter)
        else:
            self._layers[name].put(adapter)

    def group(self) -> None:
        """The rows of all following batches come in equal consecutive groups, in the members' order."""
        self.rows = None
        self.version += 1

    def scatter(self, rows: torch.Tensor) -> None:
        """Row i of all following batches belongs to member `rows[i]`."""
        self.rows = rows
        self.version += 1

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        for mixture in self._mixtures.values():
            mixture.remove()

    def _members(self, tokens: int, members: int, device: torch.device) -> torch.Tensor:
        """Whose each of so many tokens is, the rows' tokens one after another: int64 [tokens]."""
        rows = None if members == 1 else self.rows
        owners = torch.arange(members, device=device) if rows is None else rows
        return owners.repeat_interleave(tokens // len(owners))


class _Layer:
    """The hook of one linear layer."""

    def __init__(self, owner: Adapters) -> None:
        self._owner = owner
        self._adapter: Adapter | None = None
        self._down = self._up = torch.empty(0)
        self._version = -1

    def put(self, adapter: Adapter | None) -> None:
        self._adapter = adapter
        self._version = -1

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        adapter = self._adapter
        if adapter is None or not output.numel():
            return
        if self._version != self._owner.version:
            self._arrange(adapter, self._owner.rows)
            self._version = self._owner.version
        groups = len(self._up)
        x = inputs[0].reshape(groups, -1, inputs[0].shape[-1])
        y = output.view(groups, -1, output.shape[-1])
        hidden = x @ self._down
        # Under autocast the layer answers in half precision, and operators in place do not cast by themselves.
        y.baddbmm_(hidden, self._up.to(y.dtype), alpha=adapter.scaling)

    def _arrange(self, adapter: Adapter, rows: torch.Tensor | None) -> None:
        """Factors as the products want them: down [G or 1, in, R], up [G, R, out]."""
        down, up = adapter.a.transpose(1, 2), adapter.b.transpose(1, 2)
        if rows is not None and len(up) > 1:
            down = down if len(down) == 1 else down[rows]
            up = up[rows]
        self._down, self._up = (down[0] if len(down) == 1 else down), up
