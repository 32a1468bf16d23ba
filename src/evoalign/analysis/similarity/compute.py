# SPDX-License-Identifier: Apache-2.0
"""One pass over the weights: inner products of all targets' changes, tensor by tensor, and how many entries are small.

Cosines, norms and shares of any set of tensors follow from these sums. Suffixes: K targets, T thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from evoalign.analysis.similarity.overlap import overlaps_of
from evoalign.analysis.similarity.spectrum import Spectrum, decompose
from evoalign.analysis.weights import Weights
from evoalign.checks.distance import blocks, one_thread
from evoalign.errors import ModelError
from evoalign.report import watching
from evoalign.types import TensorSpec

BLOCK, LEAST = 1 << 17, 1 << 12
"""Numbers of all targets together that are looked at at a time, and of one of them at least."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one tensor, or of several together.

    `products_KK` are inner products of the changes, `base` is the squared norm of the base model's own numbers.
    `squares_KK` are the squares of the inner products of each row of one change with that of the other, summed.
    `below_KT` counts entries whose change is at most each threshold, to float32 accuracy.
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
        """[K, K], NaN with a target that did not change."""
        return self._over_norms(self.products_KK)

    @property
    def spread(self) -> Floats:
        """Standard deviation of the cosine if each row of one change had a random sign, [K, K]; NaN as above."""
        return self._over_norms(np.sqrt(self.squares_KK))

    def _over_norms(self, values_KK: Floats) -> Floats:
        sizes_KK = np.outer(self.norms, self.norms)
        return np.divide(values_KK, sizes_KK, out=np.full_like(values_KK, np.nan), where=sizes_KK > 0)


@dataclass(frozen=True, slots=True)
class Measured:
    """One tensor. `spectra` has None where a change has none.

    `overlaps` are [S, K, K] of the two sides, by how many of the largest singular directions are compared.
    """

    spec: TensorSpec
    sums: Sums
    spectra: tuple[Spectrum | None, ...]
    overlaps: Mapping[int, Floats]


def measure(
    weights: Sequence[Weights], absolute: Sequence[float], relative: Sequence[float], *, spectra: bool
) -> list[Measured]:
    """All tensors of the base model.

    Thresholds are `absolute` ones, and then those `relative` to the root mean square of the base model's tensor.
    Raises ModelError for numbers that are not finite, naming the tensor.
    """
    found: list[Measured] = []
    for spec in weights[0].base.specs.values():
        watching.stage(spec.name)
        with one_thread():
            sums = _sums(spec, weights, absolute, relative)
        changes = [w.changes.get(spec.name) if spectra else None for w in weights]
        parted = [None if c is None else decompose(c) for c in changes]
        overlaps = overlaps_of([None if one is None else one[1] for one in parted])
        found.append(Measured(spec, sums, tuple(None if one is None else one[0] for one in parted), overlaps))
    return found


def total(found: Iterable[Measured], names: Collection[str]) -> Sums:
    """The tensors of these names together."""
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
