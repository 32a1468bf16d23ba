# SPDX-License-Identifier: Apache-2.0
"""Any space of few numbers, with members from the distribution that CMA-ES adapts (`evoalign.optimizer.cma`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch

from evoalign.errors import ConfigError
from evoalign.optimizer import Optimizer
from evoalign.optimizer.cma import Cma
from evoalign.spaces.base import Master, Slots, Space, Write
from evoalign.types import Layout, Slices, Summation, Update


class Adapted(Space):
    """The noise and the moves of CMA-ES in place of a space's own; `adapted` derives it from the space's class."""

    cma: Cma
    plain: Space
    """The space with its own noise."""

    def __reduce__(self) -> tuple[Any, ...]:
        return adapted, (self.plain, self.cma)

    @property
    def optimizer(self) -> Cma:
        return self.cma

    @property
    def summation(self) -> Summation:
        """`own`: numpy's matrix products and decompositions."""
        return "own"

    def noise(
        self,
        layout: Layout,
        name: str,
        generation: int,
        members: Sequence[int],
        slices: Slices | None = None,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Return the members' distances from the mean in units of the noise's width at generation 0."""
        drawn = torch.from_numpy(self.cma.offsets(generation, members))
        part = drawn[:, _columns(layout, name)].view(len(members), *layout[name].shape)
        return part[(slice(None), *(slices or ()))].to(device, torch.float32)

    def gradient(self, layout: Layout, name: str, update: Update, slices: Slices, device: torch.device) -> torch.Tensor:
        """Return the move of the mean, in the same units."""
        moved = torch.from_numpy(self.cma.move(update))[_columns(layout, name)]
        return moved.view(layout[name].shape)[slices].to(device, torch.float32)

    def _launch(self, layout: Layout, master: Master, slots: Sequence[Slots]) -> Write | None:
        return None


def adapted(space: Space, optimizer: Optimizer | None) -> Space:
    """Return the space itself, or with CMA-ES one that draws members from it. Raises ConfigError for own noise."""
    if not isinstance(optimizer, Cma):
        return space
    if space.summation != "ordered":
        raise ConfigError(
            f"space {space.name} has its own noise or update, which es.optimizer {optimizer.es.optimizer.name} would "
            "replace; use sgd"
        )
    made = cast(Adapted, type(type(space).__name__, (Adapted, type(space)), {})(space.config))
    made.cma, made.plain = optimizer, space
    return made


def _columns(layout: Layout, name: str) -> slice:
    """Return the places of a tensor's numbers among those of all evolved tensors."""
    names, sizes = [t.name for t in layout.tensors], [math.prod(t.shape) for t in layout.tensors]
    stop = list(accumulate(sizes))[names.index(name)]
    return slice(stop - math.prod(layout[name].shape), stop)
