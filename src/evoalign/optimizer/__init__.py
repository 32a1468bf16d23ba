# SPDX-License-Identifier: Apache-2.0
"""Optimizers turn an ES gradient into a direction. SGD needs none: its direction is the gradient.

The gradient is in units of the noise's standard deviation (a mean of shaped scores times normals), so the mean
moves by the direction times `step * scale` with every optimizer. State is float32, of the size of the mean, except that
of CMA-ES, in `evoalign.optimizer.cma`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from evoalign import shaping
from evoalign.config import EsConfig, OptimizerConfig
from evoalign.optimizer.cma import Cma
from evoalign.types import Layout


class Optimizer(Protocol):
    """Turns gradients into directions and keeps state by tensor name."""

    def direction(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return the direction as a new tensor. Called once per tensor for each update that moves something."""
        ...

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield named state tensors, for a checkpoint."""
        ...

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the output of `state`."""
        ...


class _Stateful:
    """Base with named slots of state, initially zero."""

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

    The correction counts only updates that moved something. Counting generations without variance, which are common at
    the start, would make the first steps too small.
    """

    def direction(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        beta1, beta2 = self.config.beta1, self.config.beta2
        mean, square = self._slot("mean", name, gradient), self._slot("square", name, gradient)
        count = int(self._slot("count", name, gradient.new_zeros(())).add_(1))
        mean.mul_(beta1).add_(gradient * (1 - beta1))
        square.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
        # Multiply by the reciprocal, because CUDA divides by a scalar this way and the CPU does not. The float32 square
        # root of CUDA differs from the CPU's in the last bit (24 of 4,000); the float64 root, rounded, does not.
        root = (square * (1 / (1 - beta2**count))).double().sqrt_().float().add_(self.config.eps)
        return (mean * (1 / (1 - beta1**count))).div_(root)


def reach(es: EsConfig, scale: float | None = None, pairs: float = math.sqrt(2)) -> float | None:
    """Return how far training moves the mean compared with SGD, z-scores and members without pairs, at the same eta.

    `scale` is the root mean square of the coefficients; by default the shaping's, and None is returned if it
    depends on the scores. Pairs share their noise, so that at equal eta and population a step is `pairs` times as long:
    sqrt(1 - rho), where rho is the correlation of the fitness in a pair, at most sqrt(2) if the reward is linear in the
    noise. With momentum, one gradient moves the mean by 1 / (1 - momentum) times itself in total. A gradient's norm
    is about that of one member's noise over sqrt(population_size). Adam normalises it, whatever the coefficients, so
    its steps have the norm of the noise. None for CMA-ES, which adapts the noise's width.
    """
    if es.optimizer.adapts_noise:
        return None
    if es.optimizer.name == "adam":
        return math.sqrt(es.population_size)
    if scale is None:
        scale = shaping.scale(es.shaping, es.population_size, paired=es.antithetic)
    if scale is None:
        return None
    scale *= pairs if es.antithetic else 1.0
    return scale / (1 - es.optimizer.momentum) if es.optimizer.name == "momentum" else scale


def create(es: EsConfig, layout: Layout) -> Optimizer | None:
    """Return the configured optimizer, or None for SGD. Raises ConfigError if CMA-ES cannot evolve this layout."""
    config = es.optimizer
    if config.adapts_noise:
        return Cma(es, layout)
    if config.name == "momentum":
        return Momentum(config)
    return Adam(config) if config.name == "adam" else None
