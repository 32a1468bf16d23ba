# SPDX-License-Identifier: Apache-2.0
"""What inner products of points tell of a way: principal components, alignment of steps, movement beyond drift.

Everything here needs the Gram matrix of the points alone. Array suffixes: P points, S steps between them, K placebos,
C components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from evoalign.noise import row_blocks
from evoalign.statistics import FEWEST, LEVEL, Estimate, t_of
from evoalign.types import Slices

Floats = NDArray[np.float64]
NUMBERS = 1 << 25
"""Of all points together that are held at a time, in float64: 256 MiB."""


def gram(
    blocks: Iterable[tuple[str, tuple[int, ...]]], points: int, change: Callable[[str, Slices], torch.Tensor]
) -> Floats:
    """[P, P] inner products over all tensors, summed in float64 block by block; `change` gives [P, *block]."""
    total = torch.zeros(points, points, dtype=torch.float64)
    for name, shape in blocks:
        for slices in row_blocks(shape, max(1, NUMBERS // max(1, points))):
            values = change(name, slices).reshape(points, -1).double()
            total += values @ values.T
    return total.numpy()


@dataclass(frozen=True, slots=True)
class Map:
    """`places_PC` of all points on the first two components of those that were fitted, in units of the weights.

    `shares_C`: of the spread of the fitted ones about their mean.
    """

    places_PC: Floats
    shares_C: Floats


def principal(gram_PP: Floats, fitted: Sequence[int]) -> Map:
    """Principal components by the Gram matrix of the fitted points about their mean; the others are projected.

    The sign of a component is that in which the place farthest from 0 is positive.
    """
    chosen = np.asarray(fitted)
    mean_P = gram_PP[:, chosen].mean(1)
    centred_PF = gram_PP[:, chosen] - mean_P[:, None] - mean_P[chosen][None, :] + mean_P[chosen].mean()
    values, vectors = np.linalg.eigh(centred_PF[chosen])
    order = np.argsort(values)[::-1][:2]
    top_C = np.clip(values[order], 0, None)
    whole = float(np.clip(values, 0, None).sum())
    scale_C = np.where(top_C > 1e-12 * max(whole, 1e-300), top_C, np.inf) ** -0.5
    places_PC = centred_PF @ vectors[:, order] * scale_C
    far_C = places_PC[np.abs(places_PC).argmax(0), np.arange(places_PC.shape[1])]
    places_PC = places_PC * np.where(far_C < 0, -1.0, 1.0)
    places_PC = np.pad(places_PC, ((0, 0), (0, 2 - places_PC.shape[1])))
    return Map(places_PC, np.pad(top_C / whole if whole else top_C * 0, (0, 2 - len(top_C))))


@dataclass(frozen=True, slots=True)
class Way:
    """Of one way from 0: `distances_P` from the start, cosines of each step with the next and with all other steps.

    `shares_C`: of its spread on the first two principal components of itself.
    """

    distances_P: Floats
    next_S: Floats
    rest_S: Floats
    shares_C: Floats

    @property
    def along(self) -> float:
        """Mean cosine of a step with the next one."""
        return _mean(self.next_S)

    @property
    def onward(self) -> float:
        """Mean cosine of a step with the sum of all other steps, which has no part of it."""
        return _mean(self.rest_S)


def way(gram_PP: Floats) -> Way:
    """Of points in their order, the first of which is the start. A step that moves nothing has no cosine (NaN)."""
    count = len(gram_PP)
    change_SP = np.eye(count)[1:] - np.eye(count)[:-1]
    steps_SS = change_SP @ gram_PP @ change_SP.T
    rest_SS = np.ones((count - 1, count - 1)) - np.eye(count - 1)
    rest_S = np.einsum("ij,ij->i", rest_SS, steps_SS)
    length_S = np.sqrt(np.clip(np.diag(steps_SS), 0, None))
    rests_S = np.sqrt(np.clip(np.einsum("ij,jk,ik->i", rest_SS, steps_SS, rest_SS), 0, None))
    next_S = _cosines(np.diag(steps_SS, 1), length_S[:-1] * length_S[1:])
    far_P = np.diag(gram_PP) - 2 * gram_PP[0] + gram_PP[0, 0]
    shares = principal(gram_PP, range(count)).shares_C
    return Way(np.sqrt(np.clip(far_P, 0, None)), next_S, _cosines(rest_S, length_S * rests_S), shares)


@dataclass(frozen=True, slots=True)
class Beside:
    """A number of a run beside the same of its placebos. `excess` is what it has above their mean.

    Its interval is that in which the run lies were it one placebo more, of normal values, turned round: it has 0 in it
    where the run is no more than that. `reached`: how many placebos come to the run; `p` is one-sided by it.
    """

    value: float
    placebos: tuple[float, ...]
    excess: Estimate
    reached: int
    p: float

    @property
    def is_beyond(self) -> bool:
        """Whether the run has surely more than its placebos."""
        return self.p <= LEVEL and self.excess.low is not None and self.excess.low > 0


def beside(value: float, placebos: Sequence[float]) -> Beside:
    """Placebos that are no number (ways that never moved) do not count."""
    known_K = np.array([p for p in placebos if np.isfinite(p)])
    reached = int((known_K >= value).sum())
    p = (1 + reached) / (1 + len(known_K))
    mean = value - (float(known_K.mean()) if len(known_K) else 0.0)
    if len(known_K) < FEWEST or not np.isfinite(value):
        why = f"{len(known_K)} placebos: no interval" if np.isfinite(value) else "it never moved"
        return Beside(value, tuple(map(float, known_K)), Estimate(mean, len(known_K), why=why), reached, p)
    half = t_of(len(known_K) - 1) * float(known_K.std(ddof=1)) * sqrt(1 + 1 / len(known_K))
    excess = Estimate(mean, len(known_K), mean - half, mean + half)
    return Beside(value, tuple(map(float, known_K)), excess, reached, p)


def signal_share(distance: float, placebos: Sequence[float]) -> Estimate:
    """The share of a run's squared distance from the start that is more than its placebos': 1 - mean(d_k^2) / d^2.

    Squared, for what is signal and what is noise are at right angles, and their squares add up. The interval: the
    noise of the run has a square s^2 of the placebos' spread, and its part along the signal adds 2 |signal| times that
    part, whose variance is |noise|^2 over as many directions as noise has, by the placebos 2 |noise|^4 / var(d_k^2).
    Below 0 where the run went less far than its placebos.
    """
    squares_K, distance = np.square(np.asarray(placebos, dtype=np.float64)), float(distance)
    n = len(squares_K)
    if not distance:
        return Estimate(float("nan"), n, why="it never moved: no share")
    if not n:
        return Estimate(float("nan"), n, why="no placebo: no share")
    noise, square = float(squares_K.mean()), distance**2
    share = 1 - noise / square
    if n < FEWEST or not noise:
        return Estimate(share, n, why=f"{n} placebos: no interval")
    variance = float(squares_K.var(ddof=1)) * (1 + 1 / n + 2 * max(square - noise, 0.0) / noise)
    half = t_of(n - 1) * sqrt(variance) / square
    return Estimate(share, n, share - half, min(1.0, share + half))


def _cosines(products_S: Floats, lengths_S: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(lengths_S > 0, np.clip(products_S / lengths_S, -1, 1), np.nan)


def _mean(values_S: Floats) -> float:
    known = values_S[np.isfinite(values_S)]
    return float(known.mean()) if len(known) else float("nan")
