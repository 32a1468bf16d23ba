# SPDX-License-Identifier: Apache-2.0
"""Measures of weight changes: inner products, sparsity, singular values, and overlap of singular directions.

One pass over the weights computes inner products of all targets' changes, tensor by tensor, and how many entries are
small. Cosines, norms and shares of any set of tensors follow from these sums.

With s_i the singular values of a matrix [m, n] and p_i = s_i / sum s:

    entropy rank        exp(-sum p_i log p_i)              (Roy and Vetterli 2007, the effective rank)
    participation rank  (sum s_i^2)^2 / sum s_i^4          (participation ratio of the energies)
    energy(k)           sum of the k largest s_i^2 / sum s_i^2

All are 1 for a matrix of rank 1 and at most min(m, n). By them a matrix of independent random entries is not of full
rank: its participation is near m n / (m + n). For an adapter whose B has random entries and whose A is fixed, with
G = A A^T, it is near (m (tr G)^2 + 2 tr G^2) / ((m + 1) tr G^2 + (tr G)^2), the expected numerator over the expected
denominator; the first is the case A = 1.

Squared singular values are eigenvalues of D D^T or D^T D, in float64. Those below max(m, n) times the rounding of the
largest count as 0, so singular values below some 1e-6 of the largest are not seen. Singular vectors of the other side
are the change times those of the smaller one, made orthonormal.

With U_a, U_b [m, k] the k largest left singular vectors of two changes, their overlap is

    |U_a^T U_b|^2 / k, the mean squared cosine of the principal angles         (Hu et al. 2021, eq. 4)

and likewise on the right side [n, k]. It is 1 for one subspace and 0 for orthogonal ones. For two random subspaces, as
of matrices of independent normal entries, its mean is k / m and its variance 2 (m - k)^2 / (m^2 (m - 1) (m + 2)). Over
several matrices the plain mean is taken, with equal weights.

Suffixes: K targets, M matrices, S sides (left, right), T thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from evoalign.analysis.weights import Weights
from evoalign.checks.distance import Change, Difference, Product, blocks, one_thread
from evoalign.errors import ModelError
from evoalign.report import watching
from evoalign.types import TensorSpec

Floats: TypeAlias = NDArray[np.float64]
BLOCK, LEAST = 1 << 17, 1 << 12
"""Numbers of all targets together that are read at a time, and of each of them at least."""
MATRIX_BLOCK = 1 << 22
"""Numbers of a matrix that are multiplied at a time."""
TOPS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of singular directions whose energy is reported."""
MOST = 16
"""Largest singular directions that are kept to be compared."""
SIZES = (1, 4, 16)
"""Numbers of directions that are compared."""
SIDES = ("left", "right")


def p_of(value: float, placebos: Sequence[float]) -> float | None:
    """Return the two-sided permutation p: (1 + placebos as far from 0) / (1 + placebos); None without placebos."""
    if not placebos:
        return None
    return (1 + sum(abs(other) >= abs(value) for other in placebos)) / (1 + len(placebos))


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over one tensor, or over several.

    `products_KK`: inner products of the changes. `base`: squared norm of the base model's weights. `squares_KK`: sum of
    the squared inner products of the rows of two changes. `below_KT`: number of entries whose change is at most each
    threshold, to float32 accuracy.
    """

    numbers: int
    base: float
    products_KK: Floats
    squares_KK: Floats
    below_KT: NDArray[np.int64]

    @property
    def norms(self) -> Floats:
        """L2 norms of the changes [K]."""
        return np.sqrt(np.diag(self.products_KK))

    @property
    def cosines(self) -> Floats:
        """Cosines [K, K]; NaN for a target that did not change."""
        return self._over_norms(self.products_KK)

    @property
    def spread(self) -> Floats:
        """Standard deviation [K, K] of the cosine if each row of one change had a random sign; NaN likewise."""
        return self._over_norms(np.sqrt(self.squares_KK))

    def _over_norms(self, values_KK: Floats) -> Floats:
        sizes_KK = np.outer(self.norms, self.norms)
        return np.divide(values_KK, sizes_KK, out=np.full_like(values_KK, np.nan), where=sizes_KK > 0)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measures of one tensor. `spectra` is None for a change without one.

    `overlaps` are [S, K, K], by the number of largest singular directions that are compared.
    """

    spec: TensorSpec
    sums: Sums
    spectra: tuple[Spectrum | None, ...]
    overlaps: Mapping[int, Floats]


def measure(
    weights: Sequence[Weights], absolute: Sequence[float], relative: Sequence[float], *, spectra: bool
) -> list[Measured]:
    """Measure all tensors of the base model.

    Thresholds are the `absolute` ones, then those `relative` to the root mean square of the base model's tensor. Raises
    ModelError that names a tensor with numbers that are not finite.
    """
    found: list[Measured] = []
    for spec in weights[0].base.specs.values():
        watching.stage(spec.name)
        with one_thread():
            sums = _sums(spec, weights, absolute, relative)
        changes = [w.changes.get(spec.name) if spectra else None for w in weights]
        parted = [change and decompose(change) for change in changes]
        overlaps = overlaps_of([one and one[1] for one in parted])
        found.append(Measured(spec, sums, tuple(one and one[0] for one in parted), overlaps))
    return found


def total(found: Iterable[Measured], names: Collection[str]) -> Sums:
    """Return the sums over the tensors of these names."""
    chosen = [one.sums for one in found if one.spec.name in names]
    return Sums(
        numbers=sum(s.numbers for s in chosen),
        base=math.fsum(s.base for s in chosen),
        products_KK=np.sum([s.products_KK for s in chosen], axis=0),
        squares_KK=np.sum([s.squares_KK for s in chosen], axis=0),
        below_KT=np.sum([s.below_KT for s in chosen], axis=0),
    )


def _sums(spec: TensorSpec, weights: Sequence[Weights], absolute: Sequence[float], relative: Sequence[float]) -> Sums:
    numbers, base = math.prod(spec.shape), weights[0].base.square(spec.name)
    changed = {k: w.changes[spec.name] for k, w in enumerate(weights) if spec.name in w.changes}
    products_KK, squares_KK = np.zeros((2, len(weights), len(weights)))
    limits = np.array([*absolute, *(share * math.sqrt(base / numbers) for share in relative)], dtype=np.float32)
    below_KT = np.full((len(weights), len(limits)), numbers, dtype=np.int64)
    below_KT[list(changed)] = 0
    at_KK = np.ix_(list(changed), list(changed))
    for at in blocks(spec.shape, max(LEAST, BLOCK // len(changed))) if changed else ():
        rows = torch.stack([(own := change.rows(at)).reshape(len(own), -1) for change in changed.values()])
        of_row = torch.bmm(rows.transpose(0, 1), rows.permute(1, 2, 0))  # [rows, K, K]
        products_KK[at_KK] += of_row.sum(0).numpy()
        squares_KK[at_KK] += of_row.square_().sum(0).numpy()
        for k, size in zip(changed, rows.float().abs_().numpy(), strict=True):
            below_KT[k] += np.array([np.count_nonzero(size <= limit) for limit in limits], dtype=np.int64)
    if not np.isfinite(products_KK).all():
        raise ModelError(f"the change of {spec.name} is not of finite numbers")
    return Sums(numbers, base, products_KK, squares_KK, below_KT)


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Ranks of one matrix's change. `of_noise`: participation rank of random entries of its shape, or of its factors.

    `energy`: share of the squared norm in the largest singular directions, by their number.
    """

    entropy: float
    participation: float
    of_noise: float
    energy: dict[int, float]


Directions: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The largest singular directions of a matrix [m, n], at most 16: left [m, k] and right [n, k], float32.

Columns are orthonormal, largest singular value first. Directions with a singular value of 0 are left out.
"""


def decompose(change: Change) -> tuple[Spectrum, Directions] | None:
    """Return spectrum and directions of a change; None if it is no matrix, or all 0."""
    if len(change.shape) != 2:
        return None
    energies, directions = _of_factors(change) if isinstance(change, Product) else _of_rows(change)
    total = float(energies.sum())
    if total == 0:
        return None
    s, shares = energies.sqrt(), energies / total
    p = s / s.sum()
    spectrum = Spectrum(
        entropy=float(torch.special.entr(p).sum().exp()),
        participation=1 / float(shares.square().sum()),
        of_noise=participation_of_noise(change),
        energy={k: min(1.0, float(shares[:k].sum())) for k in TOPS if k <= min(change.shape)},
    )
    return spectrum, directions


def participation_of_noise(change: Change) -> float:
    """Return the expected participation rank of a matrix [m, n] of random entries, or of an adapter with such a B."""
    m, n = change.shape
    if not isinstance(change, Product):
        return (m * n + 2) / (m + n + 1)
    gram = change.a.double() @ change.a.double().T
    trace, square = float(gram.trace()) ** 2, float(gram.square().sum())
    return (m * trace + 2 * square) / ((m + 1) * square + trace)


def cut(change: Change, rank: int) -> Product:
    """Return the nearest matrix of a rank k, largest singular direction first: `a` [k, in], `b` [out, k], float32."""
    if isinstance(change, Product):
        b, core, a = _core(change)
        u, s, v = torch.linalg.svd(core)
        factors = v[:rank] @ a, b @ (u[:, :rank] * s[:rank])
    else:
        gram, whole = _gram(change)
        vectors = torch.linalg.eigh(gram)[1].flip(1)[:, :rank]
        other = _other_side(change, whole, vectors)
        factors = (vectors.T, other) if whole is None else (other.T, vectors)
    return Product(factors[0].float(), factors[1].float(), 1.0)


def _of_factors(change: Product) -> tuple[torch.Tensor, Directions]:
    """Return squared singular values, float64, largest first, and the largest directions."""
    q, core, p = _core(change)
    u, s, v = torch.linalg.svd(core)
    energies = s.square()
    k = _above(energies, change.shape)
    return energies, ((q @ u[:, :k]).float(), (v[:k] @ p).T.float())


def _of_rows(change: Difference) -> tuple[torch.Tensor, Directions]:
    """Return the same for a dense change. All values and a few vectors take a quarter of the time of all vectors."""
    from scipy.linalg import eigh

    gram, whole = _gram(change)
    found = torch.linalg.eigvalsh(gram).flip(0)
    energies = torch.where(found > _floor(found, change.shape), found, 0.0)
    k, n = _above(energies, change.shape), len(gram)
    if k == 0:
        return energies, (torch.empty(change.shape[0], 0), torch.empty(change.shape[1], 0))
    vectors = torch.from_numpy(eigh(gram.numpy(), subset_by_index=[n - k, n - 1], driver="evr")[1]).flip(1)
    other = torch.linalg.qr(_other_side(change, whole, vectors))[0]
    left, right = (other, vectors) if whole is None else (vectors, other)
    return energies, (left.float(), right.float())


def _floor(energies: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the value below which a squared singular value counts as 0."""
    return max(shape) * torch.finfo(energies.dtype).eps * energies[:1]


def _above(energies: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Return the number of directions to keep."""
    return min(MOST, int((energies > _floor(energies, shape)).sum()))


def _core(change: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Q [out, r] and P [r', in], orthonormal, and a core [r, r'] such that Q core P is the change."""
    p, of_a = torch.linalg.qr(change.a.double().T)
    q, of_b = torch.linalg.qr(change.b.double())
    return q, change.scaling * of_b @ of_a.T, p.T


def _gram(change: Difference) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the float64 Gram matrix of a weight change over its smaller side, and the change itself if it is wide."""
    if change.shape[0] < change.shape[1]:
        whole = torch.cat([change.rows(at) for at in blocks(change.shape, MATRIX_BLOCK)])
        return whole @ whole.T, whole
    found = torch.zeros(change.shape[1], change.shape[1], dtype=torch.float64)
    for at in blocks(change.shape, MATRIX_BLOCK):
        rows = change.rows(at)
        found.addmm_(rows.T, rows)
    return found, None


def _other_side(change: Difference, whole: torch.Tensor | None, vectors: torch.Tensor) -> torch.Tensor:
    """Return the change times vectors of its smaller side."""
    if whole is not None:
        return whole.T @ vectors
    return torch.cat([change.rows(at) @ vectors for at in blocks(change.shape, MATRIX_BLOCK)])


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of one pair on one side, the mean over `matrices` matrices, and of its `placebos` with their `p`.

    `chance` and `spread`: mean and standard deviation for random subspaces.
    """

    value: float
    chance: float
    spread: float
    matrices: int
    placebos: tuple[float, ...]
    p: float | None


def overlaps_of(found: Sequence[Directions | None]) -> dict[int, Floats]:
    """Return the overlaps of one matrix by number of directions: [S, K, K], NaN where a change has fewer."""
    ranks_K = np.array([0 if one is None else one[0].shape[1] for one in found])
    sizes = [k for k in SIZES if k <= ranks_K.max(initial=0)]
    joined = [torch.cat(side, dim=1) for side in zip(*(one for one in found if one is not None), strict=True) if sizes]
    squares = [(side.T @ side).double().square().numpy() for side in joined]  # of all directions with all
    starts_K = np.cumsum(ranks_K) - ranks_K
    result: dict[int, Floats] = {}
    for k in sizes:
        able = np.flatnonzero(ranks_K >= k)
        at = (starts_K[able][:, None] + np.arange(k)).ravel()
        result[k] = np.full((len(SIDES), len(found), len(found)), np.nan)
        for own_KK, square in zip(result[k], squares, strict=True):
            cells = square[np.ix_(at, at)].reshape(len(able), k, len(able), k)
            own_KK[np.ix_(able, able)] = cells.sum((1, 3)) / k
    return result


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Means over the matrices where both changes have enough directions; NaN where there is none."""

    values_SKK: Floats
    chances_SKK: Floats
    spreads_SKK: Floats
    matrices_KK: NDArray[np.int64]

    def pair(self, i: int, j: int, at: Sequence[tuple[int, ...]]) -> dict[str, Overlap]:
        """Return the overlaps of two targets by side, with those of their placebos; {} without a matrix."""
        count = int(self.matrices_KK[i, j])
        found: dict[str, Overlap] = {}
        for s, side in enumerate(SIDES if count else ()):
            value, chance, spread = (float(of[s, i, j]) for of in (self.values_SKK, self.chances_SKK, self.spreads_SKK))
            placebos = tuple(float(self.values_SKK[s, a, b]) for a, b in at if self.matrices_KK[a, b])
            found[side] = Overlap(value, chance, spread, count, placebos, p_of(value, placebos))
        return found


def together(found: Sequence[tuple[tuple[int, ...], Mapping[int, Floats]]]) -> dict[int, Overlaps]:
    """Combine the overlaps of matrices, given with their shapes, by number of directions."""
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
    """Return the variance of the overlap of two random subspaces of k dimensions in m."""
    return 2 * (m - k) ** 2 / (m**2 * np.maximum(m - 1, 1) * (m + 2))
