# SPDX-License-Identifier: Apache-2.0
"""Intervals for times of which some are known from below alone, and for ratios of variances. None draws at random.

Array suffixes: N runs of a group, M of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, exp, inf, isfinite, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign.statistics import FEWEST, FEWEST_IQM, LEVEL, RANKS

Floats = NDArray[np.float64]
FEWEST_ROBUST = 5
"""Values of each group that the robust ratio needs: fewer cannot be trimmed, and say nothing of their tails."""


@dataclass(frozen=True, slots=True)
class Between:
    """An estimate from n values and its interval at 95 %. `mean` and `high` may be infinite: not reached.

    `low` and `high` None where there is no interval, and `why`.
    """

    mean: float
    n: int
    low: float | None = None
    high: float | None = None
    why: str | None = None

    def tree(self) -> dict[str, Any]:
        """As JSON has it: infinite is None, and `unbounded` says which are so."""
        ends = {"mean": self.mean, "low": self.low, "high": self.high}
        far = [name for name, value in ends.items() if value is not None and not isfinite(value)]
        return {**{k: None if k in far else v for k, v in ends.items()}, "n": self.n, "why": self.why, "unbounded": far}


@dataclass(frozen=True, slots=True)
class Time:
    """What a run took until it was seen at the threshold; one that never was took more than `amount`."""

    amount: float
    reached: bool

    @property
    def most(self) -> float:
        """The largest that it can be."""
        return self.amount if self.reached else inf


def median(times: Sequence[Time]) -> Between:
    """The median over runs, and an interval of ranks, whatever the distribution.

    The interval lies between two order statistics: the lower of the times that runs took at the least, the upper of
    those at the most, infinite for a run that never reached the threshold. So it holds the median at least as often as
    without censoring, when it is by ranks of `RANKS` or more (95 % where n allows). Infinite: half or more never did.
    """
    from scipy.stats import binom

    n = len(times)
    least_N, most_N = sorted(t.amount for t in times), sorted(t.most for t in times)
    middle = (most_N[(n - 1) // 2] + most_N[n // 2]) / 2
    if n < FEWEST_IQM:
        return Between(middle, n, why=_few(n, "no interval of the median"))
    held = {k: 1 - 2 * float(binom.cdf(k - 1, n, 0.5)) for k in range(1, n // 2 + 1)}
    k = min((k for k in held if held[k] >= RANKS), key=lambda k: abs(held[k] - (1 - LEVEL)))
    return Between(middle, n, least_N[k - 1], most_N[n - k])


def reached(times: Sequence[Time]) -> Between:
    """The share of runs that reached it, with the exact interval of Clopper and Pearson (1934)."""
    from scipy.stats import binomtest

    n = len(times)
    count = sum(t.reached for t in times)
    test: Any = binomtest
    found = test(count, n).proportion_ci(1 - LEVEL, method="exact")
    return Between(count / n, n, float(found.low), float(found.high))


def times_ratio(a: Sequence[Time], b: Sequence[Time]) -> Between:
    """How many times as much runs of a take as runs of b: Hodges and Lehmann's estimate, with its exact interval.

    The median of all ratios of a run of a to one of b, and two of their order statistics, by the distribution of Mann
    and Whitney's U. For times that differ by a factor; ranks alone count, so their distribution may be any. Runs that
    never reached the threshold widen it: the lower end takes the least that ratios can be, the upper end the most.
    """
    least = sorted(x.amount / y.most for x in a for y in b)
    most = sorted(x.most / y.amount for x in a for y in b)
    n, pairs = min(len(a), len(b)), len(least)
    low, high = (float((v[(pairs - 1) // 2] + v[pairs // 2]) / 2) for v in (least, most))
    middle = sqrt(low * high) if isfinite(high) and low > 0 else float("nan")
    k = _rank(len(a), len(b))
    if not k:
        return Between(middle, n, why=f"{len(a)} and {len(b)} runs: no interval of the ratio")
    if least[k - 1] == 0 and most[-k] == inf:
        return Between(middle, n, why="too many runs never reached it: the ratio may be any")
    return Between(middle, n, least[k - 1], most[-k])


def _rank(n: int, m: int) -> int:
    """The largest k with P(U < k) of at most 2.5 %, by counting; 0 where none has."""
    counts = np.zeros(n * m + 1)
    counts[0] = 1
    for i in range(1, n + 1):  # Gaussian binomial coefficient (n + m over n), factor by factor
        for u in range(n * m, m + i - 1, -1):
            counts[u] -= counts[u - m - i]
        for u in range(i, n * m + 1):
            counts[u] += counts[u - i]
    below = np.cumsum(counts) / comb(n + m, n)
    return int((below <= LEVEL / 2).sum())


def deviation(values: Sequence[float]) -> Between:
    """The standard deviation between runs, with the interval of chi-squared: exact where values are normal."""
    from scipy.special import chdtri

    values_N = np.asarray(values, dtype=np.float64)
    n = len(values_N)
    if n < 2:
        return Between(float("nan"), n, why="1 run: no spread")
    sd = float(values_N.std(ddof=1))
    if n < FEWEST or _is_flat(values_N):
        return Between(sd, n, why=_few(n, "no interval") if n < FEWEST else "all alike: no interval")
    low, high = (sd * sqrt((n - 1) / float(chdtri(n - 1, tail))) for tail in (LEVEL / 2, 1 - LEVEL / 2))
    return Between(sd, n, low, high)


def variances_ratio(a: Sequence[float], b: Sequence[float]) -> Between:
    """var(a) / var(b) with the interval of F: exact where both are normal, far too short where tails are heavy."""
    from scipy.special import fdtri

    a_N, b_M = (np.asarray(values, dtype=np.float64) for values in (a, b))
    found = _ratio(a_N, b_M, FEWEST)
    if found.why is not None:
        return found
    n, m = len(a_N), len(b_M)
    low, high = (found.mean / float(fdtri(n - 1, m - 1, p)) for p in (1 - LEVEL / 2, LEVEL / 2))
    return Between(found.mean, min(n, m), low, high)


def robust_ratio(a: Sequence[float], b: Sequence[float]) -> Between:
    """var(a) / var(b) with Bonett's interval (2006, Computational Statistics and Data Analysis 50).

    The logarithm of the ratio is normal with a variance by the kurtosis of both samples together, about their trimmed
    means: for large samples it holds whatever the distribution, where that is one for both but for place and width.
    """
    from scipy.special import ndtri
    from scipy.stats import trim_mean

    both = [np.asarray(values, dtype=np.float64) for values in (a, b)]
    found = _ratio(both[0], both[1], FEWEST_ROBUST)
    if found.why is not None:
        return found
    z, fourth, second, total = float(ndtri(1 - LEVEL / 2)), 0.0, 0.0, 0
    for values in both:
        n = len(values)
        centre = float(trim_mean(values, min(0.49, 1 / (2 * sqrt(n - 4)))))
        fourth += float(((values - centre) ** 4).sum())
        second += float(((values - values.mean()) ** 2).sum())
        total += n
    kurtosis = total * fourth / second**2
    square, small = 0.0, 1.0
    for values, way in zip(both, (1, -1), strict=True):
        n = len(values)
        square += (kurtosis - (n - 3) / n) / (n - 1)
        small *= (n / (n - z)) ** way
    centre, half = log(small * found.mean), z * sqrt(max(square, 0.0))
    return Between(found.mean, found.n, exp(centre - half), exp(centre + half))


def _ratio(a_N: Floats, b_M: Floats, fewest: int) -> Between:
    n = min(len(a_N), len(b_M))
    if n < 2:
        return Between(float("nan"), n, why="1 run: no spread")
    if _is_flat(b_M) or _is_flat(a_N):
        return Between(float("nan"), n, why="all runs of a group end alike: no ratio")
    why = None if n >= fewest else _few(n, "no interval")
    return Between(float(a_N.var(ddof=1) / b_M.var(ddof=1)), n, why=why)


def _is_flat(values_N: Floats) -> bool:
    return float(np.ptp(values_N)) <= 1e-12 * float(np.abs(values_N).max())


def _few(n: int, what: str) -> str:
    return f"{n} run{'' if n == 1 else 's'}: {what}"
