# SPDX-License-Identifier: Apache-2.0
"""CMA-ES (Hansen, arXiv 1604.00772) and sep-CMA-ES (Ros and Hansen, PPSN 2008), computed by the package `cmaes`.

Members are not drawn from N(0, I) but from N(0, sigma^2 C), which the ranks of the scores adapt: `adapted` gives this
noise to a space. The package gets the counter noise in place of random numbers, and the shaped coefficients in place of
function values. Its numbers are in units of the width of the noise at generation 0, so that it starts from the mean 0,
sigma 1 and C = I, whatever the tensors' scales are.

Deviations from the package: a generation without variance in the scores is skipped, as with every optimizer. Matrix
products, decompositions and exponentials are those of numpy, whose last bits depend on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evoalign import noise
from evoalign.config import EsConfig
from evoalign.errors import CheckpointError, ConfigError
from evoalign.types import Layout, Slices, Update

MOST = {"cma": 2_000, "sep_cma": 10_000}
"""Numbers that may evolve, by optimizer."""
WORKSPACE = 2**33
"""Bytes that the package may use to add one generation to a full covariance."""
NAME = "cma"
"""Stands where the slots of other optimizers have a tensor's name."""
_VECTORS = {"mean": "_mean", "path_sigma": "_p_sigma", "path_c": "_pc"}
_NUMBERS = {"sigma": "_sigma", "generation": "_g"}


class Cma:
    """CMA-ES or sep-CMA-ES over all numbers of a layout."""

    def __init__(self, es: EsConfig, layout: Layout) -> None:
        self.es, self.layout = es, layout
        self._covariance, self._lock = "covariance" if es.optimizer.name == "cma" else "variances", Lock()
        self.load({})

    def __reduce__(self) -> tuple[Any, ...]:
        return Cma, (self.es, self.layout), dict(self.state())

    def __setstate__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.load(state)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the output of `state`; nothing starts anew. Raises CheckpointError if it is incomplete."""
        self._package = strategy(self.es, self.layout)
        slots = {**_VECTORS, **_NUMBERS, self._covariance: "_C"}
        if state and set(state) != (wanted := {f"{slot}:{NAME}" for slot in slots}):
            odd = sorted(set(state) ^ wanted)[0]
            raise CheckpointError(f"the state of es.optimizer {self.es.optimizer.name} is damaged: see {odd}")
        for slot, attribute in slots.items() if state else ():
            value: Any = state[f"{slot}:{NAME}"].cpu().double().numpy().copy()
            setattr(self._package, attribute, value if value.ndim else float(value))
        self._package._g = int(self._package._g)
        self._begin(None)

    def _begin(self, told: Update | None) -> None:
        """Forget what was computed from the state before. A decomposition of C changes its last bits: keep it as is."""
        self._told, self._kept = told, self._package._C
        self._spread: NDArray[np.float64] | None = None
        self._drawn: dict[int, NDArray[np.float64]] = {}
        self._generation = -1

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the mean, the evolution paths, C, sigma and the number of updates, in float64."""
        yield f"{self._covariance}:{NAME}", torch.from_numpy(self._kept)
        for slot, attribute in {**_VECTORS, **_NUMBERS}.items():
            yield f"{slot}:{NAME}", torch.tensor(getattr(self._package, attribute), dtype=torch.float64)

    def offsets(self, generation: int, members: Sequence[int]) -> NDArray[np.float64]:
        """Return x - mean of members of the next generation, [M, numbers], in the order of the layout's tensors."""
        return np.stack(self._points(generation, members)) - self._package.mean

    def _points(self, generation: int, members: Sequence[int]) -> list[NDArray[np.float64]]:
        with self._lock:  # an engine may decode in several threads, and the package changes C when it decomposes it
            if generation != self._generation:
                self._drawn, self._generation = {}, generation
            if missing := [m for m in dict.fromkeys(members) if m not in self._drawn]:
                keys = [(noise.key(self.layout.seed, "noise", t.name), t.shape) for t in self.layout.tensors]
                normals = [noise.normals(key, shape, generation, missing) for key, shape in keys]
                z_MN = torch.cat([drawn.flatten(1) for drawn in normals], 1).double().numpy()
                self._drawn.update(zip(missing, map(self._point, z_MN), strict=True))
            return [self._drawn[m] for m in members]

    def _point(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `ask` of the package for these normals. It would compute B D, n^3 operations, for each member."""
        spread = self._spread
        if spread is None:
            found = self._package._eigen_decomposition()
            spread = self._spread = found[0] * found[1] if isinstance(found, tuple) else found
        y = spread.dot(z) if spread.ndim == 2 else spread * z
        return self._package.mean + self._package._sigma * y

    def move(self, update: Update) -> NDArray[np.float64]:
        """Return the move of the mean. The update changes the state once, for however many parts it is requested.

        Raises ConfigError if the update is not of a whole generation.
        """
        if update is self._told:
            return self._moved
        if len(update.members) != self.es.population_size or any(m.sign != 1 for m in update.members):
            raise ConfigError(
                f"es.optimizer {self.es.optimizer.name} ranks whole generations of {self.es.population_size} members, "
                f"and an update has {len(update.members)}, or pairs; was the journal edited?"
            )
        points = self._points(update.generation, [m.noise for m in update.members])
        before = self._package.mean.copy()
        self._package.tell([(x, -c) for x, c in zip(points, update.coefficients, strict=True)])
        self._moved = self._package.mean - before
        self._begin(update)
        return self._moved

    def direction(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient: that of `Adapted` is the move of the mean."""
        return gradient


class Adapted:
    """The noise and the moves of CMA-ES, put before the class of a space of few numbers by `adapted`."""

    optimizer: Cma
    plain: Any
    """The space with its own noise."""

    def __reduce__(self) -> tuple[Any, ...]:
        return adapted, (self.plain, self.optimizer)

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
        drawn = torch.from_numpy(self.optimizer.offsets(generation, members))
        part = drawn[:, _columns(layout, name)].view(len(members), *layout[name].shape)
        return part[(slice(None), *(slices or ()))].to(device, torch.float32)

    def gradient(self, layout: Layout, name: str, update: Update, slices: Slices, device: torch.device) -> torch.Tensor:
        """Return the move of the mean, in the same units."""
        moved = torch.from_numpy(self.optimizer.move(update))[_columns(layout, name)]
        return moved.view(layout[name].shape)[slices].to(device, torch.float32)


def adapted(space: Any, optimizer: Any) -> Any:
    """Return the space itself, or with CMA-ES one that draws members from it. Raises ConfigError for own noise."""
    if not isinstance(optimizer, Cma):
        return space
    if space.summation != "ordered":
        raise ConfigError(
            f"space {space.name} has its own noise or update, which es.optimizer {optimizer.es.optimizer.name} would "
            "replace; use sgd"
        )
    return space.derived(Adapted, {"optimizer": optimizer, "plain": space})


def _columns(layout: Layout, name: str) -> slice:
    """Return the places of a tensor's numbers among those of all evolved tensors."""
    names, sizes = [t.name for t in layout.tensors], [math.prod(t.shape) for t in layout.tensors]
    stop = list(accumulate(sizes))[names.index(name)]
    return slice(stop - math.prod(layout[name].shape), stop)


def strategy(es: EsConfig, layout: Layout) -> Any:
    """Return the package's optimizer before the first generation. Raises ConfigError if it cannot serve this run."""
    try:
        from cmaes import CMA, SepCMA
    except ImportError as error:
        raise ConfigError("es.optimizer cma and sep_cma need the package cmaes: pip install 'evoalign[cma]'") from error
    name, numbers, size = es.optimizer.name, layout.parameters, es.population_size
    if not 2 <= numbers <= MOST[name]:
        larger = ", sep_cma (at most 10,000)" if MOST[name] < numbers <= MOST["sep_cma"] else ""
        raise ConfigError(
            f"es.optimizer {name} is for 2 to {MOST[name]:,} numbers, and {numbers:,} evolve; use sgd{larger}, or a "
            "space of other size, such as subspace with space.dimension 500"
        )
    most = WORKSPACE // (16 * numbers**2)
    if name == "cma" and size > most:
        raise ConfigError(
            f"es.population_size {size} with es.optimizer cma and {numbers:,} numbers takes more than "
            f"{WORKSPACE >> 30} GiB per update; use at most {most}, or sep_cma"
        )
    made: Any = (CMA if name == "cma" else SepCMA)(mean=np.zeros(numbers), sigma=1.0, population_size=size)
    if made._c1 + made._cmu > 1:  # variances would become negative
        raise ConfigError(
            f"es.population_size {size} is too large for es.optimizer {name} with {numbers:,} numbers: the learning "
            f"rates of the variances sum to {made._c1 + made._cmu:.2g}, more than 1; lower it, or use cma"
        )
    return made


def shape_of(slot: str, numbers: int) -> tuple[int, ...]:
    """Return the shape of a slot of the state, of a layout of this many numbers."""
    return (numbers,) * (2 if slot == "covariance" else 0 if slot in _NUMBERS else 1)
