# SPDX-License-Identifier: Apache-2.0
"""How much a difference hangs on the budget, and on any one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from evoalign.analysis.compare.statistics import shared
from evoalign.statistics import Estimate, difference, mean

SHARES = (0.5, 0.75, 1.0)
Values = Mapping[int, float]
"""By seed."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The mean of a less that of b at shares of the budget, None where one has no run, and without each run in turn."""

    a: str
    b: str
    at: tuple[tuple[float, Estimate | None], ...]
    without_one: tuple[float, float] | None


def sensitivity(a: str, b: str, values: Callable[[str, float], Values]) -> Sensitivity:
    """`values` are those of a group within a share of the budget."""
    at = [(share, gap(x, y) if (x := values(a, share)) and (y := values(b, share)) else None) for share in SHARES]
    return Sensitivity(a, b, tuple(at), _without_one(values(a, 1.0), values(b, 1.0)))


def gap(a: Values, b: Values) -> Estimate:
    """The difference and its t interval, by seeds where these are compared as pairs."""
    seeds = shared(a, b)
    if seeds:
        return mean([a[seed] - b[seed] for seed in seeds])
    return difference(list(a.values()), list(b.values()))


def _without_one(a: Values, b: Values) -> tuple[float, float] | None:
    """From the least to the largest difference without one run, or, of pairs, without one seed."""
    seeds = shared(a, b)
    if seeds:
        gaps = [a[seed] - b[seed] for seed in seeds]
        found = [(sum(gaps) - one) / (len(gaps) - 1) for one in gaps]
    elif min(len(a), len(b)) > 1:
        found = [gap(_less(a, seed), b).mean for seed in a] + [gap(a, _less(b, seed)).mean for seed in b]
    else:
        return None
    return min(found), max(found)


def _less(values: Values, seed: int) -> Values:
    return {s: v for s, v in values.items() if s != seed}
