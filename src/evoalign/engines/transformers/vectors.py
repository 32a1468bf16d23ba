# SPDX-License-Identifier: Apache-2.0
"""Members' own gains of norms and biases of q, k and v: the static decoder serves such a dense space in one batch.

The numbers are those that a member has when it is served alone: `Space.perturbed`, rounded once to the served dtype.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from evoalign.spaces.base import Master, Space, Write
from evoalign.spaces.dense import DenseSlots, dense_writer
from evoalign.types import Layout, Member, Plan

_VECTOR = re.compile(
    r"model\.norm\.weight|model\.layers\.\d+\.((input|post_attention)_layernorm\.weight|"
    r"self_attn\.([qk]_norm\.weight|[qkv]_proj\.bias))"
)


def vectors_of(model: Any) -> dict[str, nn.Parameter]:
    """Return the gains of norms and the biases of q, k and v by name."""
    return {name: one for name, one in model.named_parameters() if _VECTOR.fullmatch(name)}


class Vectors:
    """The vectors `names` of a model for the mean and `slots` members, at fixed addresses: [S + 1, N] each.

    Row 0 is the mean's, and row i + 1 that of slot i. `biases` are those of q, k and v by layer, joined.
    """

    def __init__(self, model: Any, names: Sequence[str], slots: int) -> None:
        self._names, self._own = names, vectors_of(model)
        self._rows: dict[str, torch.Tensor] = {}
        self._gains: dict[nn.Module, torch.Tensor] = {}
        self.biases: dict[int, torch.Tensor] = {}
        for i in range(len(model.model.layers)):
            biases = [f"model.layers.{i}.self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")]
            if set(biases) & set(names):
                sizes = [len(self._own[name]) for name in biases]
                self.biases[i] = self._own[biases[0]].data.new_empty(slots + 1, sum(sizes))
                self._rows |= zip(biases, self.biases[i].split(sizes, dim=1), strict=True)
        for name in names:
            if name not in self._rows:
                self._rows[name] = self._own[name].data.new_empty(slots + 1, len(self._own[name]))
                self._gains[model.get_submodule(name.rpartition(".")[0])] = self._rows[name]

    def gain(self, norm: Any) -> torch.Tensor:
        """Return the gains of a norm: [S + 1, N], or the model's own [N] if members share it."""
        own = self._gains.get(norm)
        return norm.weight if own is None else own

    def reset(self) -> None:
        """Fill all rows with the mean, as the model serves it now."""
        for name, rows in self._rows.items():
            rows.copy_(self._own[name].data)

    def writer(self, space: Space, layout: Layout, master: Master) -> Write:
        """Return a function that writes every member's vectors to slots 0, 1, ...; the mean must not move."""
        slots = [DenseSlots(n, (slice(None),), master(n), self._rows[n][1:]) for n in self._names]
        launch = dense_writer(space, layout, slots)

        def write(plan: Plan, members: Sequence[Member]) -> None:
            for s in slots:
                for row, member in zip(s.out, members, strict=False):
                    space.perturbed(layout, s.name, s.mean, plan, member, out=row)

        return launch or write
