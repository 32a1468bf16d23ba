# SPDX-License-Identifier: Apache-2.0
"""Singular values of the change of one matrix, by the Gram matrix of its smaller side, in float64.

With s_i the singular values of a matrix [m, n] and p_i = s_i / sum s:

    entropy rank        exp(-sum p_i log p_i)              (Roy and Vetterli 2007, the effective rank)
    participation rank  (sum s_i^2)^2 / sum s_i^4          (participation ratio of the energies)
    energy(k)           sum of the k largest s_i^2 / sum s_i^2

All are 1 for a matrix of rank 1 and at most min(m, n). A matrix of independent random entries is not of full rank by
them: its participation is near m n / (m + n). That of an adapter whose B has random entries and whose A is fixed, with
G = A A^T, is near (m (tr G)^2 + 2 tr G^2) / ((m + 1) tr G^2 + (tr G)^2), the expected numerator over the expected
denominator; the first is the case A = 1.

Squares of singular values are eigenvalues of D D^T or D^T D; those that are not above max(m, n) times the rounding of
the largest cannot be told from 0 and count as 0: singular values below some 1e-6 of the largest are not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evoalign.checks.changes import Change, Product, blocks

BLOCK = 1 << 22
"""Numbers of a matrix that are multiplied at a time."""
TOPS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of singular directions whose energy is told."""


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Of one matrix's change. `of_noise` is the participation rank of random entries of its shape, or of its factors.

    `energy` has the share of the squared norm in the so many largest singular directions, by their number.
    """

    entropy: float
    participation: float
    of_noise: float
    energy: dict[int, float]


def spectrum(change: Change) -> Spectrum | None:
    """None of a change that is no matrix, or is all 0."""
    if len(change.shape) != 2:
        return None
    energies = _energies(change)
    total = float(energies.sum())
    if total == 0:
        return None
    s, shares = energies.sqrt(), energies / total
    p = s / s.sum()
    return Spectrum(
        entropy=float(torch.special.entr(p).sum().exp()),
        participation=1 / float(shares.square().sum()),
        of_noise=participation_of_noise(change),
        energy={k: min(1.0, float(shares[:k].sum())) for k in TOPS if k <= min(change.shape)},
    )


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
        vectors = torch.linalg.eigh(_gram(change))[1].flip(1)[:, :rank]
        if _is_wide(change):
            factors = vectors.T @ _whole(change), vectors
        else:
            factors = vectors.T, torch.cat([change.rows(at) @ vectors for at in blocks(change.shape, BLOCK)])
    return Product(factors[0].float(), factors[1].float(), 1.0)


def _energies(change: Change) -> torch.Tensor:
    """Squared singular values, float64, largest first."""
    if isinstance(change, Product):
        return torch.linalg.svdvals(_core(change)[1]).square()
    found = torch.linalg.eigvalsh(_gram(change)).flip(0)
    floor = max(change.shape) * torch.finfo(found.dtype).eps * found[:1]
    return torch.where(found > floor, found, 0.0)


def _core(change: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q [out, r] with orthonormal columns, a core [r, r'], P [r', in] with orthonormal rows: Q core P is the change."""
    p, of_a = torch.linalg.qr(change.a.double().T)
    q, of_b = torch.linalg.qr(change.b.double())
    return q, change.scaling * of_b @ of_a.T, p.T


def _gram(change: Change) -> torch.Tensor:
    """Of the smaller side."""
    if _is_wide(change):
        whole = _whole(change)
        return whole @ whole.T
    found = torch.zeros(change.shape[1], change.shape[1], dtype=torch.float64)
    for at in blocks(change.shape, BLOCK):
        rows = change.rows(at)
        found.addmm_(rows.T, rows)
    return found


def _is_wide(change: Change) -> bool:
    return change.shape[0] < change.shape[1]


def _whole(change: Change) -> torch.Tensor:
    """All rows, float64: of a wide matrix alone, so never of a table of words."""
    return torch.cat([change.rows(at) for at in blocks(change.shape, BLOCK)])
