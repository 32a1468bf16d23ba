# SPDX-License-Identifier: Apache-2.0
"""How far training moved the weights: the L2 norm of their change from the base model, and its share of the base's.

The change is that of the effective weights, tensor by tensor, as `checks.changes` reads it; sums are float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from evoalign.checks.changes import Base, Product, changes_of, difference
from evoalign.config import Config
from evoalign.errors import ModelError
from evoalign.setup import Served
from evoalign.types import MEAN, MEAN_PLAN


@dataclass(frozen=True, slots=True)
class Distance:
    """L2 norm of the change of the effective weights; `relative` to that of all the base model's parameters."""

    l2: float
    relative: float


def distance_of_mean(served: Served) -> Distance:
    """Of an engine's mean, in float32. Raises ModelError where it cannot be determined, with the reason."""
    base = Base(served.config, served.layout.torch_dtype)
    if served.space.evolves_model:
        return _distance((base.difference(name, tensor).square() for name, tensor in served.engine.state()), base)
    if served.space.carrier != "adapter":
        raise ModelError(f"space {served.space.name} evolves tensors beside the model that are no adapter")
    return _distance(_of_adapter(served), base)


def distance_of(policy: nn.Module | str | Path, config: Config) -> Distance:
    """Of a live model, PEFT's too, or of a saved one: a folder with a PEFT adapter or a Hugging Face checkpoint.

    `config` names the base model. Raises ModelError where it cannot be determined, with the reason.
    """
    base = Base(config)
    return _distance((change.square() for change in changes_of(policy, base).values()), base)


def start_of(served: Served) -> Mapping[str, torch.Tensor]:
    """The mean before training, float32 on the CPU by name: what `Engine.load` takes to go back to it.

    Of the model's own tensors each is read from its files when it is asked for, and rounded as it is served. Raises
    ModelError where they cannot be determined, with the reason.
    """
    layout, space = served.layout, served.space
    if space.evolves_model:
        return _Start(Base(served.config, layout.torch_dtype), [t.name for t in (*layout.tensors, *layout.frozen)])
    return {t.name: space.start(layout, t.name, "cpu") for t in (*layout.tensors, *layout.frozen)}


def moved(served: Served, start: Mapping[str, torch.Tensor]) -> float:
    """L2 norm of the change of all numbers that evolve: of an adapter those of its factors, not of their product."""
    return math.sqrt(math.fsum(difference(tensor, start[name]).square() for name, tensor in served.engine.state()))


class _Start(Mapping[str, torch.Tensor]):
    """The model's own tensors of these names, in float32."""

    def __init__(self, base: Base, names: Sequence[str]) -> None:
        self._base, self._names = base, dict.fromkeys(names)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._base.served(name).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _distance(squares: Iterable[float], base: Base) -> Distance:
    """From the squared norms of all changes."""
    l2 = math.sqrt(math.fsum(squares))
    norm = math.sqrt(math.fsum(base.square(name) for name in base.specs))
    if not math.isfinite(l2) or not norm:
        raise ModelError("the weights are not finite numbers")
    return Distance(l2, l2 / norm)


def _of_adapter(served: Served) -> Iterator[float]:
    """Of the mean's adapter, whose factors the space gives in float32."""
    state, layout = dict(served.engine.state()), replace(served.layout, dtype="float32")
    for module in dict.fromkeys(t.module for t in layout.tensors):
        adapter = served.space.adapter(layout, module, state.__getitem__, MEAN_PLAN, (MEAN,))
        if adapter is None:
            raise ModelError(f"space {served.space.name} has no adapter of its mean for {module}")
        yield Product(adapter.a[0], adapter.b[0], adapter.scaling).square()
