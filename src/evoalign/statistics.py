# SPDX-License-Identifier: Apache-2.0
"""Intervals at 95 %, by formula and without random draws: the same numbers give the same bits.

How often each really holds what it is an interval of is simulated by `benchmarks/coverage.py` for few and for many
values, even, skewed and heavy-tailed ones; `benchmarks/README.md` has the table. Array suffixes: S seeds (or placebos,
or whatever is drawn anew), I items (test examples), N values.
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
"""Values from which an interval is given: two say next to nothing of their spread."""
FEWEST_IQM = 5
"""Values from which the interquartile mean has one: the range of four holds the median in 87.5 % of cases."""
RANKS = 0.925
"""What the interval of the interquartile mean holds at the least, where its ranks allow no 95 %."""
FLAT = 1e-12
"""A spread below so much of the largest value is one of rounding."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was estimated, mostly a mean, from n values, and its 95 % interval; None where none is, and `why` it is not.

    `items` is how many test examples each of the n is a mean over, where the interval is for new ones of these too.
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
    """Whether there is an interval, without 0 in it."""
    return found.low is not None and found.high is not None and not found.low <= 0 <= found.high


def mean(values: ArrayLike) -> Estimate:
    """Student's t interval of the mean of [N] values.

    Exact for normal values; too wide for heavy tails; of skewed ones too short, see `interquartile_mean`.
    """
    values_N = np.asarray(values, dtype=np.float64)
    return _of(float(values_N.mean()), len(values_N), lambda: _half_mean(values_N))


def difference(a: ArrayLike, b: ArrayLike) -> Estimate:
    """Welch's t interval of mean(a) - mean(b), of [N] and [M] values that are not paired. `n` is the smaller number."""
    a_N, b_M = (np.asarray(values, dtype=np.float64) for values in (a, b))

    def half() -> float:
        square, df = welch([(float(v.var(ddof=1)) / len(v), len(v) - 1) for v in (a_N, b_M)])
        return t_of(df) * square**0.5

    fewest = min(len(a_N), len(b_M))
    return _of(float(a_N.mean() - b_M.mean()), fewest, half, of=np.concatenate([a_N, b_M]))


def interquartile_mean(values: ArrayLike) -> Estimate:
    """Mean of the middle half of [N] values (IQM; Agarwal et al. 2021, arXiv 2108.13264) with an interval of ranks.

    The interval lies between two order statistics, by ranks that hold the median with the probability nearest to 95 %
    that is above `RANKS`, whatever the distribution (Conover 1999, section 3.2); the IQM lies near the median.
    The bootstrap that goes with the IQM there is too short for a few values of one task.
    """
    from scipy.stats import binom, trim_mean

    values_N = np.sort(np.asarray(values, dtype=np.float64))
    n = len(values_N)
    middle = float(trim_mean(values_N, 0.25))
    if n < FEWEST_IQM:
        return Estimate(middle, n, why=f"{n} value{'s' if n > 1 else ''}: no interval of the interquartile mean")
    ranks = range(1, n // 2 + 1)
    held = {k: 1 - 2 * float(binom.cdf(k - 1, n, 0.5)) for k in ranks}
    k = min((k for k in ranks if held[k] >= RANKS), key=lambda k: abs(held[k] - (1 - LEVEL)))
    found = Estimate(middle, n, float(values_N[k - 1]), float(values_N[n - k]))
    return Estimate(middle, n, why="all alike: no interval") if found.low == found.high else found


def crossed(values: ArrayLike) -> Estimate:
    """Interval of the mean of [S, I] values for new seeds and new items at once; every seed has every item.

    Of seed s and item i the model is mean + seed + item + rest, the last three random. Where seeds or items alone are
    drawn anew, an interval says less than it seems to. See `_two_ways` for the formula.
    """
    values_SI = np.asarray(values, dtype=np.float64)
    found = _of(float(values_SI.mean()), len(values_SI), lambda: _half_crossed(values_SI), min(values_SI.shape))
    return replace(found, items=values_SI.shape[1])


def crossed_difference(a: ArrayLike, b: ArrayLike, *, paired: bool) -> Estimate:
    """Interval of mean(a) - mean(b) for new seeds and new items: [S, I] and [T, I] on the same items.

    `paired`: the seeds are the same ones, in the same order, and only differences are looked at.
    """
    a_SI, b_TI = (np.asarray(values, dtype=np.float64) for values in (a, b))
    if paired:
        return crossed(a_SI - b_TI)
    gap_I = a_SI.mean(0) - b_TI.mean(0)
    fewest = min(len(a_SI), len(b_TI), len(gap_I))

    def half() -> float:
        parts = [_parts(values) for values in (a_SI, b_TI)]
        seeds, df = welch([(part.seeds, len(v) - 1) for part, v in zip(parts, (a_SI, b_TI), strict=True)])
        items = float(gap_I.var(ddof=1)) / len(gap_I)
        return _two_ways(seeds, df, items, len(gap_I) - 1, sum(part.rest for part in parts))

    found = _of(float(a_SI.mean() - b_TI.mean()), min(len(a_SI), len(b_TI)), half, fewest)
    return replace(found, items=len(gap_I))


def beside(one: ArrayLike, others: ArrayLike) -> Estimate:
    """Interval of mean(one) - mean(others), [I] and [S, I] on the same items, that has 0 in it were the one of them.

    For new items, and for seeds that the one is a further one of, of normal values: it is as far from the mean of the
    others as they are, so their spread counts S + 1 times as much as in `crossed`, where the one is given.
    """
    one_I, others_SI = (np.asarray(values, dtype=np.float64) for values in (one, others))
    s, i = others_SI.shape
    gap_I = one_I - others_SI.mean(0)

    def half() -> float:
        parts = _parts(others_SI)
        items = float(gap_I.var(ddof=1)) / i
        return _two_ways(parts.seeds * (s + 1), s - 1, items, i - 1, parts.rest * (s + 1))

    return replace(_of(float(gap_I.mean()), s, half, min(s, i), of=[*one_I, *others_SI.flat]), items=i)


def ratio(top: ArrayLike, bottom: ArrayLike) -> Estimate:
    """Sum of `top` over sum of `bottom`, and Fieller's interval: all ratios r that the mean of top - r bottom allows.

    [N] each: over N clusters, such as prompts with the sums over what was drawn for them (Cochran 1977, section 6.3).
    [S, I], where either may be [I]: over both at once, as `crossed`. No interval where that of `bottom` has 0 in it.
    Fieller, J. Royal Statistical Society B 16 (1954).
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
    """Interval of the mean of after - before over [N] examples; examples where either is NaN do not count.

    Of values that are 0 or 1 alone: Bonett and Price (2012, Statistics in Medicine 31), the Wald interval with one
    added to the examples that went either way. It is an interval also where none did, where t would be of no width and
    hold nothing. Of others: t. `shares` says that no other values can be; else both have to be seen, for a number that
    happens to be 1 (or 0) everywhere tells nothing of what it can be.
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
    """Its interval within what can be: of a share 0 to 1, of a divergence 0 to infinity."""
    if found.low is None or found.high is None:
        return found
    return replace(found, low=max(low, found.low), high=min(high, found.high))


def share(marked: ArrayLike) -> Estimate:
    """Estimate the mean of per-example shares [N]; it has an interval also where all of them are 0 or all 1."""
    marked_N = np.asarray(marked, dtype=np.float64)
    return bounded(paired(np.zeros(len(marked_N)), marked_N, shares=True))


def between(values: Floats, low: float, high: float) -> Estimate:
    """The mean of [N] values that can be from low to high: Student's t of these and of one more at either end.

    As one success and one failure are added to a share (Agresti and Coull 1998): where all values are at one end, or
    nearly, their own spread says nothing of how far away the next may be.
    """
    if len(values) < FEWEST:
        return mean(values)
    found = mean(np.append(values, [low, high]))
    return bounded(replace(found, mean=float(values.mean()), n=len(values)), low, high)


def welch(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The sum of (squared standard error, degrees of freedom), and Satterthwaite's degrees of freedom of it."""
    total = sum(v for v, _ in parts)
    spread = sum(v**2 / df for v, df in parts)
    return total, total**2 / spread if spread > 0 else min(df for _, df in parts)


# --- halves of intervals ----------------------------------------------------------------------------------------------


def _of(
    centre: float, n: int, half: Callable[[], float], fewest: int | None = None, of: ArrayLike | None = None
) -> Estimate:
    """`fewest` is the smallest of the numbers that the interval is over, where that is not n; `of` are the values."""
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


def t_of(df: float) -> float:
    """The two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(df, 1 - LEVEL / 2))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Squared standard errors of a mean over [S, I]: by its seeds, by its items; what is left is in both of them."""

    seeds: float
    items: float
    rest: float


def _parts(values_SI: Floats) -> _Parts:
    """Mean squares of the two-way layout without replication, over S I (Searle, Casella, McCulloch 1992, chapter 4)."""
    s, i = values_SI.shape
    seeds_S, items_I = values_SI.mean(1), values_SI.mean(0)
    rest_SI = values_SI - seeds_S[:, None] - items_I[None, :] + values_SI.mean()
    rest = float((rest_SI**2).sum()) / ((s - 1) * (i - 1)) / (s * i)
    return _Parts(float(seeds_S.var(ddof=1)) / s, float(items_I.var(ddof=1)) / i, rest)


def _half_crossed(values_SI: Floats) -> float:
    s, i = values_SI.shape
    parts = _parts(values_SI)
    return _two_ways(parts.seeds, s - 1, parts.items, i - 1, parts.rest)


def _two_ways(seeds: float, seeds_df: float, items: float, items_df: float, rest: float) -> float:
    """Half the interval: each source by its own t, squares added; what both have in them counts once.

    As Howe's (1974) for sums of variances. One t with Satterthwaite's degrees of freedom holds 89 to 92 % with three
    seeds, this 94 to 98 % (benchmarks/coverage.py). Never shorter than items or seeds alone would be.
    """
    by_seeds, by_items = t_of(seeds_df) ** 2 * seeds, t_of(items_df) ** 2
    return max(by_seeds + by_items * max(items - rest, 0.0), by_items * items) ** 0.5


def _fieller(top: Floats, bottom: Floats, centre: float, side: float, half: Callable[[Floats], float]) -> float:
    """The end on one side: the ratio at which the interval of top - ratio bottom just has 0 in it."""
    from scipy.optimize import brentq

    def outside(r: float) -> float:
        gap = top - r * bottom
        return abs(float(gap.mean())) - half(gap)

    step = half(top - centre * bottom) / abs(float(bottom.mean()))
    inner, outer = centre, centre + side * step
    while outside(outer) < 0:  # ends, since bottom's own interval is away from 0
        inner, outer = outer, centre + 2 * (outer - centre)
    found: Any = brentq(outside, inner, outer, xtol=FLAT * max(abs(centre), step))
    return float(found)


def _of_shares(gaps_N: Floats) -> Estimate:
    """Differences of -1, 0 and 1."""
    from scipy.special import ndtri

    n = len(gaps_N)
    lost, won = (float((gaps_N == way).sum() + 1) / (n + 2) for way in (-1, 1))
    centre, half = won - lost, float(ndtri(1 - LEVEL / 2)) * ((won + lost - (won - lost) ** 2) / (n + 2)) ** 0.5
    return Estimate(float(gaps_N.mean()), n, max(-1.0, centre - half), min(1.0, centre + half))
