# SPDX-License-Identifier: Apache-2.0
"""What a few seeds can say: tests between two groups of runs. scipy's, at 95 %. Intervals are of `evoalign.statistics`.

Which test decides is fixed beforehand, not chosen by its result: the exact paired permutation test where two groups
share nearly all their seeds (it assumes nothing of the distribution, and with n seeds can give no less than 2 / 2^n),
and Welch's t test over all runs where they do not. The others are reported beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evoalign.statistics import FEWEST, LEVEL, Estimate, t_of, welch

NEARLY_ALL = 0.8
"""Of the seeds of the larger group, the share that both have to have, and at least three, to be compared as pairs. A
test of the few that are shared would leave most of the runs out."""
RESAMPLES = 9999
EXACT_SEEDS = 13
"""So many pairs have 2^13 sign patterns, which is fewer than the resamples: all are gone through."""
WILCOXON_SEEDS = 6
"""With fewer pairs that differ, its two-sided p can never be below 0.05."""
FAR = 100.0
"""A t statistic so large has the interval of its limit; the search for that of smaller ones ends."""
PERMUTATION, WELCH = "paired permutation", "Welch t"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two groups compared: `difference` is the mean of a less that of b, with its 95 % t interval.

    `effect` is the difference in standard deviations with Hedges' correction: of the paired differences, or, of groups
    that are not paired, the root of the mean of both variances. Its interval is for normal samples.
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
    over_questions: Estimate | None = None
    """The difference with its interval for new runs and new questions, where answers to each question are known."""


def compare(a: str, values_a: Mapping[int, float], b: str, values_b: Mapping[int, float]) -> Pair:
    """Compare two groups of runs, each as values by seed; the one with the larger mean becomes `a`.

    Over the seeds that both have where these are nearly all (`NEARLY_ALL`); otherwise over all runs, unpaired.
    """
    seeds = shared(values_a, values_b)
    x, y = (np.array([v[s] for s in seeds or sorted(v)], dtype=np.float64) for v in (values_a, values_b))
    paired = bool(seeds)
    if y.mean() > x.mean():
        a, b, x, y = b, a, y, x
    pair = Pair(a, b, len(x), len(y), paired, float(x.mean() - y.mean()))
    if min(len(x), len(y)) < 2:
        return pair
    return _paired(pair, x, y) if paired else _unpaired(pair, x, y)


def shared(a: Mapping[int, Any], b: Mapping[int, Any]) -> list[int]:
    """The seeds by which two groups are compared as pairs, sorted; none where they are not."""
    both = sorted(a.keys() & b.keys())
    return both if len(both) >= max(FEWEST, NEARLY_ALL * max(len(a), len(b))) else []


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
    effect, low, high = _effect(float(gaps.mean()) / spread, n - 1, 1 / n**0.5)
    return replace(
        pair, low=float(interval.low), high=float(interval.high), effect=effect, effect_low=low, effect_high=high,
        test=name, p=p_values[name], p_smallest=_smallest(n), p_values=p_values,
    )  # fmt: skip


def _unpaired(pair: Pair, x: Any, y: Any) -> Pair:
    from scipy.special import stdtr

    variances = float(x.var(ddof=1)), float(y.var(ddof=1))
    if _is_flat(sum(variances) ** 0.5, x, y):
        return pair
    square, df = welch([(v / len(values), len(values) - 1) for v, values in zip(variances, (x, y), strict=True)])
    spread, error, half = (sum(variances) / 2) ** 0.5, square**0.5, t_of(df) * square**0.5
    p = 2 * float(stdtr(df, -abs(pair.difference) / error))
    effect, low, high = _effect(pair.difference / spread, df, error / spread)
    return replace(
        pair, low=pair.difference - half, high=pair.difference + half, effect=effect, effect_low=low, effect_high=high,
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


def _effect(d: float, df: float, error: float) -> tuple[float | None, float | None, float | None]:
    """Standardised difference, with Hedges' correction, and its interval; `error` is the standard error by the spread.

    d / error has a noncentral t distribution, whose noncentrality over `error` is the effect: the interval holds the
    noncentralities that this t allows (Steiger and Fouladi 1997). Exact for normal pairs. The correction needs two
    degrees of freedom.
    """
    from scipy.special import chdtri, nctdtrinc

    if df < 2:
        return None, None, None
    t, tails = d / error, (1 - LEVEL / 2, LEVEL / 2)
    if abs(t) < FAR:
        low, high = (float(nctdtrinc(df, tail, t)) for tail in tails)
    else:
        low, high = (t * (float(chdtri(df, tail)) / df) ** 0.5 for tail in tails)
    return (1 - 3 / (4 * df - 1)) * d, low * error, high * error
