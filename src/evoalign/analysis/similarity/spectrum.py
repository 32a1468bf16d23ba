# SPDX-License-Identifier: Apache-2.0
"""Singular values and largest singular directions of the change of one matrix, by the Gram matrix of its smaller side.

With s_i the singular values of a matrix [m, n] and p_i = s_i / sum s:

    entropy rank        exp(-sum p_i log p_i)              (Roy and Vetterli 2007, the effective rank)
    participation rank  (sum s_i^2)^2 / sum s_i^4          (participation ratio of the energies)
    energy(k)           sum of the k largest s_i^2 / sum s_i^2

All are 1 for a matrix of rank 1 and at most min(m, n). A matrix of independent random entries is not of full rank by
them: its participation is near m n / (m + n). That of an adapter whose B has random entries and whose A is fixed, with
G = A A^T, is near (m (tr G)^2 + 2 tr G^2) / ((m + 1) tr G^2 + (tr G)^2), the expected numerator over the expected
denominator; the first is the case A = 1.

Squares of singular values are eigenvalues of D D^T or D^T D; those that are not above max(m, n) times the rounding of
the largest cannot be told from 0 and count as 0: singular values below some 1e-6 of the largest are not seen. All of
this is in float64. Singular vectors of the other side are the change times those of the smaller one, made orthonormal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evoalign.checks.distance import Change, Difference, Product, blocks

BLOCK = 1 << 22
"""Numbers of a matrix that are multiplied at a time."""
TOPS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of singular directions whose energy is told."""
MOST = 16
"""Largest singular directions that are kept to be compared."""


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Of one matrix's change. `of_noise` is the participation rank of random entries of its shape, or of its factors.

    `energy` has the share of the squared norm in the so many largest singular directions, by their number.
    """

    entropy: float
    participation: float
    of_noise: float
    energy: dict[int, float]


@dataclass(frozen=True, slots=True)
class Directions:
    """The largest singular directions of a matrix [m, n], at most 16: `left` [m, k] and `right` [n, k], float32.

    Columns are orthonormal, largest singular value first. There are as many as singular values that are not 0.
    """

    left: torch.Tensor
    right: torch.Tensor


def decompose(change: Change) -> tuple[Spectrum, Directions] | None:
    """None of a change that is no matrix, or is all 0."""
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
    """Expected participation rank of a matrix [m, n] of independent random entries; of an adapter of such a B."""
    m, n = change.shape
    if not isinstance(change, Product):
        return (m * n + 2) / (m + n + 1)
    gram = change.a.double() @ change.a.double().T
    trace, square = float(gram.trace()) ** 2, float(gram.square().sum())
    return (m * trace + 2 * square) / ((m + 1) * square + trace)


def cut(change: Change, rank: int) -> Product:
    """The nearest matrix of so low a rank, largest singular direction first: `a` [k, in], `b` [out, k], float32."""
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
    """Squared singular values, float64, largest first, and the directions of the largest."""
    q, core, p = _core(change)
    u, s, v = torch.linalg.svd(core)
    energies = s.square()
    k = _above(energies, change.shape)
    return energies, Directions((q @ u[:, :k]).float(), (v[:k] @ p).T.float())


def _of_rows(change: Difference) -> tuple[torch.Tensor, Directions]:
    """As of an adapter. All values and a few vectors take a quarter of the time of all vectors."""
    from scipy.linalg import eigh

    gram, whole = _gram(change)
    found = torch.linalg.eigvalsh(gram).flip(0)
    energies = torch.where(found > _floor(found, change.shape), found, 0.0)
    k, n = _above(energies, change.shape), len(gram)
    if k == 0:
        return energies, Directions(torch.empty(change.shape[0], 0), torch.empty(change.shape[1], 0))
    vectors = torch.from_numpy(eigh(gram.numpy(), subset_by_index=[n - k, n - 1], driver="evr")[1]).flip(1)
    other = torch.linalg.qr(_other_side(change, whole, vectors))[0]
    left, right = (other, vectors) if whole is None else (vectors, other)
    return energies, Directions(left.float(), right.float())


def _floor(energies: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What a squared singular value has to be above, to be told from 0."""
    return max(shape) * torch.finfo(energies.dtype).eps * energies[:1]


def _above(energies: torch.Tensor, shape: tuple[int, ...]) -> int:
    """How many directions are kept."""
    return min(MOST, int((energies > _floor(energies, shape)).sum()))


def _core(change: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q [out, r] with orthonormal columns, a core [r, r'], P [r', in] with orthonormal rows: Q core P is the change."""
    p, of_a = torch.linalg.qr(change.a.double().T)
    q, of_b = torch.linalg.qr(change.b.double())
    return q, change.scaling * of_b @ of_a.T, p.T


def _gram(change: Difference) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the smaller side, float64; and all rows where the matrix is wide, so never of a table of words."""
    if change.shape[0] < change.shape[1]:
        whole = torch.cat([change.rows(at) for at in blocks(change.shape, BLOCK)])
        return whole @ whole.T, whole
    found = torch.zeros(change.shape[1], change.shape[1], dtype=torch.float64)
    for at in blocks(change.shape, BLOCK):
        rows = change.rows(at)
        found.addmm_(rows.T, rows)
    return found, None


def _other_side(change: Difference, whole: torch.Tensor | None, vectors: torch.Tensor) -> torch.Tensor:
    """The change times vectors of its smaller side."""
    if whole is not None:
        return whole.T @ vectors
    return torch.cat([change.rows(at) @ vectors for at in blocks(change.shape, BLOCK)])
