# SPDX-License-Identifier: Apache-2.0
"""How an ES gradient becomes a direction. Plain SGD needs no object: the direction is the gradient.

The gradient is in units of the noise's standard deviation (a mean of shaped scores times normals), so a direction
times `step * scale` is a move of the mean whatever the optimizer. State is float32, of the size of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from evoalign.config import EsConfig, OptimizerConfig


class Optimizer(Protocol):
    """Turns gradients into directions and keeps state by tensor name."""

    def direction(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """The direction, a tensor of its own. Called once a tensor and update, not where an update moves nothing."""
        ...

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Named state tensors, for a checkpoint."""
        ...

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put back what `state` gave."""
        ...


class _Stateful:
    """Named slots of state, zero at first."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self._slots: dict[str, torch.Tensor] = {}

    def _slot(self, slot: str, name: str, like: torch.Tensor) -> torch.Tensor:
        key = f"{slot}:{name}"
        if key not in self._slots:
            self._slots[key] = torch.zeros_like(like)
        return self._slots[key]

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from sorted(self._slots.items())

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._slots = {name: tensor.clone() for name, tensor in state.items()}


class Momentum(_Stateful):
    """Heavy ball: v = momentum * v + g (Polyak 1964)."""

    def direction(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        velocity = self._slot("velocity", name, gradient)
        velocity.mul_(self.config.momentum).add_(gradient)
        return velocity.clone()


class Adam(_Stateful):
    """Adam with bias correction (Kingma and Ba, arXiv 1412.6980, algorithm 1).

    The correction counts the updates that moved something: generations without variance, common at the start, would
    make the first steps too small.
    """

    def direction(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        beta1, beta2 = self.config.beta1, self.config.beta2
        mean, square = self._slot("mean", name, gradient), self._slot("square", name, gradient)
        count = int(self._slot("count", name, gradient.new_zeros(())).add_(1))
        mean.mul_(beta1).add_(gradient * (1 - beta1))
        square.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
        # Products with the reciprocal: CUDA divides by a number so, and the CPU would not. Its float32 square root
        # differs from the CPU's in the last bit (measured: 24 of 4,000); the float64 one, rounded, does not.
        root = (square * (1 / (1 - beta2**count))).double().sqrt_().float().add_(self.config.eps)
        return (mean * (1 / (1 - beta1**count))).div_(root)


def reach(es: EsConfig) -> float:
    """How many times as far as plain SGD an optimizer takes the mean at the same eta.

    One gradient moves the mean by 1 / (1 - momentum) times itself in all. Its norm is about that of one member's noise
    over sqrt(population_size), which Adam divides out: its steps are of the norm of the noise itself.
    """
    if es.optimizer.name == "momentum":
        return 1 / (1 - es.optimizer.momentum)
    return math.sqrt(es.population_size) if es.optimizer.name == "adam" else 1.0


def create(config: OptimizerConfig) -> Optimizer | None:
    """The optimizer a config names; None for SGD."""
    if config.name == "momentum":
        return Momentum(config)
    return Adam(config) if config.name == "adam" else None
