# SPDX-License-Identifier: Apache-2.0
"""95 % confidence intervals by formula, without random numbers: the same values give the same bits.

`studies/coverage.py` simulates the coverage of each for small and large samples of normal, skewed and heavy-tailed
values; `--table` prints the table. Array suffixes: S seeds (or placebos), I items (test examples), N values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.05
FEWEST = 3
"""Fewest values for an interval: two say almost nothing about the spread."""
FEWEST_PLACEBOS = round(1 / LEVEL) - 1
"""Fewest placebos that allow a p of at most `LEVEL`: the p of a run that exceeds k placebos is 1 / (k + 1)."""
FEWEST_IQM = 5
"""Fewest values for an interval of the interquartile mean: the range of four covers the median in 87.5 % of cases."""
RANKS = 0.925
"""Lowest coverage of the interval of the interquartile mean, where its ranks cannot reach 95 %."""
FLAT = 1e-12
"""A spread below this share of the largest value is a rounding error."""
SMALLEST = 1e-12
"""Smallest p that is computed."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate from n values, mostly a mean, with its 95 % interval; None where there is none, and `why`.

    `items` is the number of test examples that each of the n is a mean over, if the interval is for new examples too.
    """

    mean: float
    n: int
    low: float | None = None
    high: float | None = None
    why: str | None = None
    items: int | None = None

    def __format__(self, spec: str) -> str:
        """Format the mean with its interval, or with the reason why it has none. The default `spec` is `.3g`."""
        spec = spec or ".3g"
        if self.low is None or self.high is None:
            return f"{self.mean:{spec}} ({self.why})"
        return f"{self.mean:{spec}} (95 %: {self.low:{spec}} to {self.high:{spec}})"

    def tree(self) -> dict[str, Any]:
        """Return the fields for JSON, which has no NaN: such a mean is None."""
        return {**asdict(self), "mean": self.mean if math.isfinite(self.mean) else None}


def is_sure(found: Estimate) -> bool:
    """Return whether there is an interval that excludes 0."""
    return found.low is not None and found.high is not None and not found.low <= 0 <= found.high


def mean(values: ArrayLike) -> Estimate:
    """Return Student's t interval of the mean of [N] values.

    Exact for normal values, too wide for heavy tails, too short for skewed values, see `interquartile_mean`.
    """
    values_N = np.asarray(values, dtype=np.float64)
    return _of(float(values_N.mean()), len(values_N), lambda: _half_mean(values_N))


def difference(a: ArrayLike, b: ArrayLike) -> Estimate:
    """Return Welch's t interval of mean(a) - mean(b), for unpaired [N] and [M] values. `n` is the smaller number."""
    a_N, b_M = (np.asarray(values, dtype=np.float64) for values in (a, b))

    def half() -> float:
        square, df = welch([(float(v.var(ddof=1)) / len(v), len(v) - 1) for v in (a_N, b_M)])
        return t_of(df) * square**0.5

    fewest = min(len(a_N), len(b_M))
    return _of(float(a_N.mean() - b_M.mean()), fewest, half, of=np.concatenate([a_N, b_M]))


def interquartile_mean(values: ArrayLike) -> Estimate:
    """Return the mean of the middle half of [N] values (IQM; Agarwal et al. 2021, arXiv 2108.13264) with a rank
    interval.

    The interval is that of the median, see `ranks_of`; the IQM is near it. The bootstrap of that paper gives intervals
    that are too short for a few values of one task.
    """
    from scipy.stats import trim_mean

    values_N = np.sort(np.asarray(values, dtype=np.float64))
    n = len(values_N)
    middle = float(trim_mean(values_N, 0.25))
    if n < FEWEST_IQM:
        return Estimate(middle, n, why=f"{n} value{'s' if n > 1 else ''}: no interval of the interquartile mean")
    k = ranks_of(n)
    found = Estimate(middle, n, float(values_N[k - 1]), float(values_N[n - k]))
    return Estimate(middle, n, why="all alike: no interval") if found.low == found.high else found


def ranks_of(n: int) -> int:
    """Return the k for which the k-th smallest and the k-th largest of n values are an interval of the median.

    Its coverage is the nearest to 95 % that is above `RANKS`, for any distribution (Conover 1999, section 3.2).
    """
    from scipy.stats import binom

    held = {k: 1 - 2 * float(binom.cdf(k - 1, n, 0.5)) for k in range(1, n // 2 + 1)}
    return min((k for k in held if held[k] >= RANKS), key=lambda k: abs(held[k] - (1 - LEVEL)))


def crossed(values: ArrayLike) -> Estimate:
    """Return the interval of the mean of [S, I] values for new seeds and new items at once; every seed has every item.

    The model is mean + seed + item + rest, the last three random. An interval for new seeds or new items alone would be
    too narrow. See `_two_ways` for the formula.
    """
    values_SI = np.asarray(values, dtype=np.float64)
    found = _of(float(values_SI.mean()), len(values_SI), lambda: _half_crossed(values_SI), min(values_SI.shape))
    return replace(found, items=values_SI.shape[1])


def crossed_p(values: ArrayLike) -> float | None:
    """Return the two-sided p of `crossed` for a mean of 0: the level at which an end of its interval is 0.

    None where `crossed` has no interval, and `SMALLEST` for a smaller one.
    """
    from scipy.optimize import brentq

    values_SI = np.asarray(values, dtype=np.float64)
    centre = abs(float(values_SI.mean()))
    if crossed(values_SI).low is None:
        return None
    if _half_crossed(values_SI, SMALLEST) <= centre:
        return SMALLEST

    def outside(level: float) -> float:
        return _half_crossed(values_SI, level) - centre

    found: Any = brentq(outside, SMALLEST, 1.0, xtol=SMALLEST)
    return float(found)


def crossed_difference(a: ArrayLike, b: ArrayLike, *, paired: bool) -> Estimate:
    """Return the interval of mean(a) - mean(b) for new seeds and new items: [S, I] and [T, I] on the same items.

    `paired`: the seeds are equal and in the same order, and only differences are used.
    """
    a_SI, b_TI = (np.asarray(values, dtype=np.float64) for values in (a, b))
    if paired:
        return crossed(a_SI - b_TI)
    gap_I = a_SI.mean(0) - b_TI.mean(0)
    fewest = min(len(a_SI), len(b_TI), len(gap_I))

    def half() -> float:
        (a_seeds, _, a_rest), (b_seeds, _, b_rest) = _parts(a_SI), _parts(b_TI)
        seeds, df = welch([(a_seeds, len(a_SI) - 1), (b_seeds, len(b_TI) - 1)])
        items = float(gap_I.var(ddof=1)) / len(gap_I)
        return _two_ways(seeds, df, items, len(gap_I) - 1, a_rest + b_rest)

    found = _of(float(a_SI.mean() - b_TI.mean()), min(len(a_SI), len(b_TI)), half, fewest)
    return replace(found, items=len(gap_I))


def beside(one: ArrayLike, others: ArrayLike) -> Estimate:
    """Return the interval of mean(one) - mean(others), [I] and [S, I] on the same items.

    It contains 0 in 95 % of cases where `one` is a further draw of the others, for normal values, new items and new
    seeds: the spread of the others then counts S + 1 times as much as in `crossed`.
    """
    one_I, others_SI = (np.asarray(values, dtype=np.float64) for values in (one, others))
    s, i = others_SI.shape
    gap_I = one_I - others_SI.mean(0)

    def half() -> float:
        seeds, _, rest = _parts(others_SI)
        items = float(gap_I.var(ddof=1)) / i
        return _two_ways(seeds * (s + 1), s - 1, items, i - 1, rest * (s + 1))

    return replace(_of(float(gap_I.mean()), s, half, min(s, i), of=[*one_I, *others_SI.flat]), items=i)


def ratio(top: ArrayLike, bottom: ArrayLike) -> Estimate:
    """Return sum of `top` / sum of `bottom` with Fieller's interval: all r for which the interval of top - r bottom has
    0.

    [N] each: over N clusters, such as prompts with sums over their samples (Cochran 1977, section 6.3). [S, I], where
    either may be [I]: over seeds and items, as `crossed`. No interval where that of `bottom` contains 0. Fieller, J.
    Royal Statistical Society B 16 (1954).
    """
    top_, bottom_ = np.broadcast_arrays(np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64))
    n, items = len(top_), top_.shape[1] if top_.ndim == 2 else None
    whole = float(bottom_.mean())
    if whole == 0:
        return Estimate(float("nan"), n, why="the denominator is 0: no ratio", items=items)
    found = Estimate(float(top_.mean()) / whole, n, items=items)
    half = _half_crossed if items is not None else _half_mean
    if min(top_.shape) < FEWEST:
        return replace(found, why=_few(min(top_.shape)))
    if half(bottom_) >= abs(whole):
        return replace(found, why="the denominator is not known to differ from 0: no interval")
    if _is_flat(half(top_ - found.mean * bottom_), top_):
        return replace(found, why="all alike: no interval")
    low, high = (_fieller(top_, bottom_, found.mean, side, half) for side in (-1.0, 1.0))
    return replace(found, low=low, high=high)


def paired(before: ArrayLike, after: ArrayLike, *, shares: bool = False) -> Estimate:
    """Return the interval of the mean of after - before over [N] examples, without examples where either is NaN.

    For values of only 0 and 1: Bonett and Price (2012, Statistics in Medicine 31), the Wald interval with one example
    added that changed in either direction. It has a width also where no example changed, unlike t. For other values: t.
    `shares` says that only 0 and 1 are possible; otherwise both have to occur, since a number that is 1 (or 0)
    everywhere may have other values in new examples.
    """
    pairs_N2 = np.stack([np.asarray(values, dtype=np.float64) for values in (before, after)], axis=-1)
    pairs_N2 = pairs_N2[~np.isnan(pairs_N2).any(axis=1)]
    if not len(pairs_N2):
        return Estimate(float("nan"), 0, why="no value: no interval")
    gaps_N = pairs_N2[:, 1] - pairs_N2[:, 0]
    if np.isin(pairs_N2, (0.0, 1.0)).all() and (shares or np.ptp(pairs_N2) > 0):
        return _of_shares(gaps_N)
    return mean(gaps_N)


def bounded(found: Estimate, low: float = 0.0, high: float = 1.0) -> Estimate:
    """Clip an interval to the possible range, such as 0 to 1 for a share."""
    if found.low is None or found.high is None:
        return found
    return replace(found, low=max(low, found.low), high=min(high, found.high))


def share(marked: ArrayLike) -> Estimate:
    """Estimate the mean of per-example shares [N]; it has an interval also where all of them are 0 or all 1."""
    return bounded(paired(np.zeros(np.shape(marked)), marked, shares=True))


def between(values: Floats, low: float, high: float) -> Estimate:
    """Return the mean of [N] values between low and high, with the t interval of these and one more value at either
    end.

    It extends the added success and failure of Agresti and Coull (1998) for shares: where nearly all values are at one
    end, their spread says nothing about how far away the next may be.
    """
    if len(values) < FEWEST:
        return mean(values)
    found = mean(np.append(values, [low, high]))
    return bounded(replace(found, mean=float(values.mean()), n=len(values)), low, high)


def welch(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the sum of squared standard errors, and its degrees of freedom by Satterthwaite."""
    total = sum(v for v, _ in parts)
    spread = sum(v**2 / df for v, df in parts)
    return total, total**2 / spread if spread > 0 else min(df for _, df in parts)


def _of(
    centre: float, n: int, half: Callable[[], float], fewest: int | None = None, of: ArrayLike | None = None
) -> Estimate:
    """Make an estimate. `fewest` is the smallest number of seeds or items, by default n; `of` are the values."""
    if (n if fewest is None else fewest) < FEWEST:
        return Estimate(centre, n, why=_few(n if fewest is None else fewest))
    width = half()
    if not np.isfinite(width):
        return Estimate(centre, n, why="too large for an interval")
    if _is_flat(width, centre if of is None else of):
        return Estimate(centre, n, why="all alike: no interval")
    return Estimate(centre, n, centre - width, centre + width)


def _few(n: int) -> str:
    return f"{n} value{'s' if n > 1 else ''}: no interval"


def _is_flat(width: float, values: ArrayLike) -> bool:
    return width <= FLAT * float(np.abs(values).max())


def _half_mean(values_N: Floats) -> float:
    return t_of(len(values_N) - 1) * float(values_N.std(ddof=1)) / len(values_N) ** 0.5


def t_of(df: float, level: float = LEVEL) -> float:
    """Return the two-sided quantile of Student's t; 95 % unless there is another `level`."""
    from scipy.special import stdtrit

    return float(stdtrit(df, 1 - level / 2))


def _parts(values_SI: Floats) -> tuple[float, float, float]:
    """Return squared standard errors of a mean over [S, I] by seeds, by items (both with the rest), and by the rest.

    They are mean squares of a two-way layout without replication, over S I (Searle et al. 1992, chapter 4).
    """
    s, i = values_SI.shape
    seeds_S, items_I = values_SI.mean(1), values_SI.mean(0)
    rest_SI = values_SI - seeds_S[:, None] - items_I[None, :] + values_SI.mean()
    rest = float((rest_SI**2).sum()) / ((s - 1) * (i - 1)) / (s * i)
    return float(seeds_S.var(ddof=1)) / s, float(items_I.var(ddof=1)) / i, rest


def _half_crossed(values_SI: Floats, level: float = LEVEL) -> float:
    s, i = values_SI.shape
    seeds, items, rest = _parts(values_SI)
    return _two_ways(seeds, s - 1, items, i - 1, rest, level)


def _two_ways(seeds: float, seeds_df: float, items: float, items_df: float, rest: float, level: float = LEVEL) -> float:
    """Return half the interval: squares of both sources, each with its own t, and the rest counted once.

    As Howe (1974) for sums of variances. With three seeds it covers 94 to 98 %, a single t with Satterthwaite's degrees
    of freedom 89 to 92 % (studies/coverage.py). It is never shorter than for items or seeds alone.
    """
    by_seeds, by_items = t_of(seeds_df, level) ** 2 * seeds, t_of(items_df, level) ** 2
    return max(by_seeds + by_items * max(items - rest, 0.0), by_items * items) ** 0.5


def _fieller(top: Floats, bottom: Floats, centre: float, side: float, half: Callable[[Floats], float]) -> float:
    """Return one end: the ratio at which an end of the interval of top - ratio bottom is 0."""
    from scipy.optimize import brentq

    def outside(r: float) -> float:
        gap = top - r * bottom
        return abs(float(gap.mean())) - half(gap)

    step = half(top - centre * bottom) / abs(float(bottom.mean()))
    inner, outer = centre, centre + side * step
    while outside(outer) < 0:  # terminates, since the interval of bottom excludes 0
        inner, outer = outer, centre + 2 * (outer - centre)
    found: Any = brentq(outside, inner, outer, xtol=FLAT * max(abs(centre), step))
    return float(found)


def _of_shares(gaps_N: Floats) -> Estimate:
    """Return the interval of differences of -1, 0 and 1."""
    from scipy.special import ndtri

    n = len(gaps_N)
    lost, won = (float((gaps_N == way).sum() + 1) / (n + 2) for way in (-1, 1))
    centre, half = won - lost, float(ndtri(1 - LEVEL / 2)) * ((won + lost - (won - lost) ** 2) / (n + 2)) ** 0.5
    return Estimate(float(gaps_N.mean()), n, max(-1.0, centre - half), min(1.0, centre + half))
