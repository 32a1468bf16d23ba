# SPDX-License-Identifier: Apache-2.0
"""How much the largest singular directions of two changes have in common, beside what random directions have.

Of a matrix [m, n] with U_a, U_b [m, k] the k largest left singular vectors of two changes, the overlap is

    |U_a^T U_b|^2 / k, the mean squared cosine of the principal angles         (Hu et al. 2021, eq. 4)

and alike on the right side [n, k]. It is 1 for one subspace and 0 for orthogonal ones. Of two random subspaces, as the
singular directions of matrices of independent normal entries are, it is k / m in the mean, and its variance is
2 (m - k)^2 / (m^2 (m - 1) (m + 2)). Of several matrices the plain mean is taken, with equal weights.

Suffixes: K targets, M matrices, S sides (left, right).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from evoalign.analysis.similarity import chance
from evoalign.analysis.similarity.spectrum import Directions

SIZES = (1, 4, 16)
"""Numbers of directions that are compared."""
SIDES = ("left", "right")
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one pair on one side, the mean over so many `matrices`. `chance` and `spread` are of random subspaces.

    `placebos` is what those came to, and `p` how often they overlap as much.
    """

    value: float
    chance: float
    spread: float
    matrices: int
    placebos: tuple[float, ...]
    p: float | None


def overlaps_of(found: Sequence[Directions | None]) -> dict[int, Floats]:
    """Of one matrix by the number of directions: [S, K, K], NaN where a change has fewer."""
    ranks_K = np.array([0 if one is None else one.left.shape[1] for one in found])
    sizes = [k for k in SIZES if k <= ranks_K.max(initial=0)]
    sides = [[getattr(one, side) for one in found if one is not None] for side in SIDES]
    squares = [_squared_cosines(one) for one in sides] if sizes else []
    kept, starts_K = np.flatnonzero(ranks_K), np.cumsum(ranks_K) - ranks_K
    result: dict[int, Floats] = {}
    for k in sizes:
        able = np.array([i for i in kept if ranks_K[i] >= k])
        at = (starts_K[able][:, None] + np.arange(k)).ravel()
        own_SKK = np.full((len(SIDES), len(found), len(found)), np.nan)
        for own_KK, square in zip(own_SKK, squares, strict=True):
            cells = square[np.ix_(at, at)].reshape(len(able), k, len(able), k)
            own_KK[np.ix_(able, able)] = cells.sum((1, 3)) / k
        result[k] = own_SKK
    return result


def _squared_cosines(vectors: Sequence[torch.Tensor]) -> Floats:
    """Of all with all."""
    joined = torch.cat(list(vectors), dim=1)
    return (joined.T @ joined).double().square().numpy()


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Of several matrices: means over those where both changes have so many directions; NaN where none has."""

    values_SKK: Floats
    chances_SKK: Floats
    spreads_SKK: Floats
    matrices_KK: NDArray[np.int64]

    def pair(self, i: int, j: int, at: Sequence[tuple[int, ...]]) -> tuple[Overlap, ...]:
        """Of two targets, left and right, beside the columns that stand for them; nothing where there is no matrix."""
        count = int(self.matrices_KK[i, j])
        if count == 0:
            return ()
        found: list[Overlap] = []
        for values_KK, chances_KK, spreads_KK in zip(self.values_SKK, self.chances_SKK, self.spreads_SKK, strict=True):
            placebos = tuple(float(values_KK[a, b]) for a, b in at if self.matrices_KK[a, b])
            value, expected, spread = (float(of[i, j]) for of in (values_KK, chances_KK, spreads_KK))
            found.append(Overlap(value, expected, spread, count, placebos, chance.p_of(value, placebos)))
        return tuple(found)


def together(found: Sequence[tuple[tuple[int, ...], Mapping[int, Floats]]]) -> dict[int, Overlaps]:
    """Of matrices by their shapes and overlaps, by the number of directions."""
    result: dict[int, Overlaps] = {}
    for k in SIZES:
        chosen = [(shape, own[k]) for shape, own in found if k in own]
        if not chosen:
            continue
        values_MSKK = np.stack([own_SKK for _, own_SKK in chosen])
        sides_MS11 = np.array([shape for shape, _ in chosen], dtype=np.float64)[:, :, None, None]
        known_MSKK = ~np.isnan(values_MSKK)
        matrices_KK = known_MSKK[:, 0].sum(0)
        over = np.where(matrices_KK, matrices_KK, np.nan)
        result[k] = Overlaps(
            values_SKK=np.where(known_MSKK, values_MSKK, 0).sum(0) / over,
            chances_SKK=(known_MSKK * k / sides_MS11).sum(0) / over,
            spreads_SKK=np.sqrt((known_MSKK * variance_by_chance(sides_MS11, k)).sum(0)) / over,
            matrices_KK=matrices_KK,
        )
    return result


def variance_by_chance(m: Floats, k: int) -> Floats:
    """Of the overlap of two random subspaces of k dimensions in m."""
    return 2 * (m - k) ** 2 / (m**2 * np.maximum(m - 1, 1) * (m + 2))
