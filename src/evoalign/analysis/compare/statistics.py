# SPDX-License-Identifier: Apache-2.0
"""What a few seeds can say: means with intervals, and tests between two groups of runs. scipy's, at 95 %.

Which test decides is fixed beforehand, not chosen by its result: the exact paired permutation test over the seeds that
two groups share (it assumes nothing of the distribution, and with n seeds can give no less than 2 / 2^n), and Welch's
t test where they share fewer than two. The others are reported beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

LEVEL = 0.05
FEWEST = 3
"""Runs from which an interval over seeds is given: two say next to nothing of their spread."""
RESAMPLES = 9999
EXACT_SEEDS = 13
"""So many pairs have 2^13 sign patterns, which is fewer than the resamples: all are gone through."""
COVERAGE = {3: 72, 5: 84, 8: 88, 12: 91}
"""In how many of 100 cases the bootstrap interval has the true mean in it, by the number of seeds: simulated with
20,000 normal samples each (`tests/analysis/test_comparison.py` does so again with fewer)."""
WILCOXON_SEEDS = 6
"""With fewer pairs that differ, its two-sided p can never be below 0.05."""
PERMUTATION, WELCH = "paired permutation", "Welch t"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over n runs and its 95 % interval; None where there is none, `why` says the reason."""

    mean: float
    n: int
    low: float | None = None
    high: float | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two groups compared: `difference` is the mean of a less that of b, with its 95 % t interval.

    `effect` is the difference in standard deviations with Hedges' correction: of the paired differences, or, of groups
    that are not paired, the root of the mean of both variances.
    `p` is that of `test`, the one that decides, `p_adjusted` after Holm's correction over the pairs of one table;
    `p_smallest` is what a permutation test over so many seeds gives at the least. `p_values` has all that were made.
    """

    a: str
    b: str
    n_a: int
    n_b: int
    paired: bool
    difference: float
    low: float | None = None
    high: float | None = None
    effect: float | None = None
    effect_low: float | None = None
    effect_high: float | None = None
    test: str | None = None
    p: float | None = None
    p_adjusted: float | None = None
    p_smallest: float | None = None
    p_values: Mapping[str, float] = field(default_factory=dict[str, float])


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and BCa bootstrap interval over runs (9,999 resamples, fixed seed), where there are three that differ.

    With few runs it is too narrow: see `COVERAGE`.
    """
    from scipy.stats import bootstrap

    values_R = np.asarray(values, dtype=np.float64)
    mean, n = float(values_R.mean()), len(values_R)
    if n < FEWEST:
        return Estimate(mean, n, why=f"{n} run{'s' if n > 1 else ''}: no interval")
    if np.ptp(values_R) == 0:
        return Estimate(mean, n, why="all runs alike: no interval")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a resample without spread: the result is then not finite
        found: Any = bootstrap((values_R,), np.mean, n_resamples=RESAMPLES, rng=np.random.default_rng(0))
    low, high = float(found.confidence_interval.low), float(found.confidence_interval.high)
    if not np.isfinite([low, high]).all():
        return Estimate(mean, n, why="the bootstrap gives no interval")
    return Estimate(mean, n, low, high)


def band(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and the ends of its 95 % t interval; of fewer than three runs, the mean alone, three times."""
    from scipy.stats import t

    values_R = np.asarray(values, dtype=np.float64)
    mean, n = float(values_R.mean()), len(values_R)
    if n < FEWEST:
        return mean, mean, mean
    half = float(t.ppf(1 - LEVEL / 2, n - 1)) * float(values_R.std(ddof=1)) / n**0.5
    return mean, mean - half, mean + half


def compare(a: str, values_a: Mapping[int, float], b: str, values_b: Mapping[int, float]) -> Pair:
    """Compare two groups of runs, each as values by seed; the one with the larger mean becomes `a`.

    Over the seeds that both have where these are two or more, and over all, unpaired, otherwise.
    """
    seeds = sorted(values_a.keys() & values_b.keys())
    paired = len(seeds) >= 2
    x, y = (np.array([v[s] for s in (seeds if paired else sorted(v))], dtype=np.float64) for v in (values_a, values_b))
    if y.mean() > x.mean():
        a, b, x, y = b, a, y, x
    pair = Pair(a, b, len(x), len(y), paired, float(x.mean() - y.mean()))
    if min(len(x), len(y)) < 2:
        return pair
    return _paired(pair, x, y) if paired else _unpaired(pair, x, y)


def adjust(pairs: Sequence[Pair]) -> list[Pair]:
    """Holm's correction over the pairs that were tested: the chance of even one false claim stays under 5 %."""
    tested = sorted((i for i, pair in enumerate(pairs) if pair.p is not None), key=lambda i: pairs[i].p or 0.0)
    adjusted, highest = list(pairs), 0.0
    for rank, i in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * (pairs[i].p or 0.0)))
        adjusted[i] = replace(pairs[i], p_adjusted=highest)
    return adjusted


def _paired(pair: Pair, x: Any, y: Any) -> Pair:
    from scipy import stats

    n, gaps = len(x), x - y
    exact = n <= EXACT_SEEDS
    permutation_test: Callable[..., Any] = stats.permutation_test
    found: Any = permutation_test(
        (x, y), _mean_gap, permutation_type="samples", vectorized=True,
        n_resamples=np.inf if exact else RESAMPLES, rng=np.random.default_rng(0),
    )  # fmt: skip
    name = f"exact {PERMUTATION}" if exact else PERMUTATION
    p_values = {name: float(found.pvalue)}
    spread = float(gaps.std(ddof=1))
    if _is_flat(spread, x, y):
        return replace(pair, test=name, p=p_values[name], p_values=p_values, p_smallest=_smallest(n))
    result: Any = stats.ttest_rel(x, y)
    p_values["paired t"] = float(result.pvalue)
    if np.count_nonzero(gaps) >= WILCOXON_SEEDS:
        signed: Any = stats.wilcoxon(gaps)
        p_values["Wilcoxon"] = float(signed.pvalue)
    interval = result.confidence_interval(1 - LEVEL)
    effect, low, high = _effect(float(gaps.mean()) / spread, n - 1, 1 / n)
    return replace(
        pair, low=float(interval.low), high=float(interval.high), effect=effect, effect_low=low, effect_high=high,
        test=name, p=p_values[name], p_smallest=_smallest(n), p_values=p_values,
    )  # fmt: skip


def _unpaired(pair: Pair, x: Any, y: Any) -> Pair:
    from scipy import stats

    variances = float(x.var(ddof=1)), float(y.var(ddof=1))
    if _is_flat(sum(variances) ** 0.5, x, y):
        return pair
    result: Any = stats.ttest_ind(x, y, equal_var=False)
    interval, p = result.confidence_interval(1 - LEVEL), float(result.pvalue)
    d = pair.difference / (sum(variances) / 2) ** 0.5
    effect, low, high = _effect(d, float(result.df), 1 / len(x) + 1 / len(y))
    return replace(
        pair, low=float(interval.low), high=float(interval.high), effect=effect, effect_low=low, effect_high=high,
        test=WELCH, p=p, p_values={WELCH: p},
    )  # fmt: skip


def _mean_gap(x: Any, y: Any, axis: int) -> Any:
    return np.mean(x - y, axis=axis)


def _is_flat(spread: float, x: Any, y: Any) -> bool:
    """Whether there is no spread beyond rounding, so that a t statistic would be one of noise in the last bit."""
    return spread <= 1e-12 * float(np.abs(np.concatenate([x, y])).max())


def _smallest(n: int) -> float:
    """The smallest two-sided p of a permutation test over n pairs."""
    return max(2.0 / 2**n, 2.0 / (RESAMPLES + 1) if n > EXACT_SEEDS else 0.0)


def _effect(d: float, df: float, variance: float) -> tuple[float | None, float | None, float | None]:
    """Standardised difference and interval. `variance` is that of d where there is no effect.

    Hedges' correction needs two degrees of freedom. The interval is the large-sample one of Hedges and Olkin (1985,
    5.B): with few seeds it is a guide and no more.
    """
    from scipy.stats import norm

    if df < 2:
        return None, None, None
    correction = 1 - 3 / (4 * df - 1)
    half = float(norm.ppf(1 - LEVEL / 2)) * (variance + d**2 / (2 * (df + 1))) ** 0.5
    return correction * d, correction * (d - half), correction * (d + half)
