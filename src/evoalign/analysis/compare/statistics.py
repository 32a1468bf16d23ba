# SPDX-License-Identifier: Apache-2.0
"""Tests and intervals for the difference between two groups of runs: over seeds, over questions, and sensitivity.

The deciding test does not depend on the results: the exact paired permutation test if two groups share nearly all their
seeds (no distribution assumed; with n seeds its smallest p is 2 / 2^n), else Welch's t test over all runs. Other
tests are reported next to it. Intervals are 95 %, of `evoalign.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evoalign.analysis.compare.runs import Point, Run
from evoalign.statistics import FEWEST, LEVEL, Estimate, crossed, crossed_difference, difference, mean

NEARLY_ALL = 0.8
"""Groups are paired if they share this fraction of the larger group's seeds, and at least three. Pairing fewer would
leave out most runs."""
RESAMPLES = 9999
EXACT_SEEDS = 13
"""Up to this many pairs all 2^n sign patterns are evaluated; this is fewer than `RESAMPLES`."""
WILCOXON_SEEDS = 6
"""With fewer differing pairs, its two-sided p cannot be below 0.05."""
FAR = 100.0
"""Above this t statistic, an effect's interval uses the limit, since the exact search may not end."""
PERMUTATION, WELCH = "paired permutation", "Welch t"
SHARES = (0.5, 0.75, 1.0)
"""Fractions of the budget at which a difference is also computed."""
RIGHT_SHARES = ("accuracy", "exact")
"""Measures that can be the share of right answers; used per question if their mean agrees."""
Values = Mapping[int, float]
"""A measure by seed."""
RunPoint = tuple[Run, Point]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two groups compared: `difference` is the mean of a minus the mean of b, with its 95 % t interval.

    `effect` is the difference in standard deviations with Hedges' correction: of the paired differences, or for groups
    that are not paired, the root of the mean of both variances. Its interval assumes normal samples.
    `p` is that of `test`, the deciding one; `p_adjusted` includes Holm's correction over the pairs of one table;
    `p_smallest` is the smallest p of a permutation test with this number of seeds. `p_values` has all tests.
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
    """The difference with its interval for new runs and new questions, if the answers to each question are known."""


def compare(a: str, values_a: Values, b: str, values_b: Values) -> Pair:
    """Compare two groups; the one with the larger mean becomes `a`. They are paired by seed if `shared` allows it."""
    seeds = shared(values_a, values_b)
    x, y = (np.array([v[s] for s in seeds or sorted(v)], dtype=np.float64) for v in (values_a, values_b))
    if y.mean() > x.mean():
        a, b, x, y = b, a, y, x
    pair = Pair(a, b, len(x), len(y), bool(seeds), float(x.mean() - y.mean()))
    if min(len(x), len(y)) < 2:
        return pair
    return _paired(pair, x, y) if seeds else _unpaired(pair, x, y)


def shared(a: Mapping[int, Any], b: Mapping[int, Any]) -> list[int]:
    """Return the sorted seeds to pair two groups by; empty if they share too few."""
    both = sorted(a.keys() & b.keys())
    return both if len(both) >= max(FEWEST, NEARLY_ALL * max(len(a), len(b))) else []


def adjust(pairs: Sequence[Pair]) -> list[Pair]:
    """Apply Holm's correction over the tested pairs, which bounds the chance of any false claim."""
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
    options: dict[str, Any] = {"n_resamples": np.inf if exact else RESAMPLES, "rng": np.random.default_rng(0)}
    found: Any = stats.permutation_test((x, y), _mean_gap, permutation_type="samples", vectorized=True, **options)
    name = f"exact {PERMUTATION}" if exact else PERMUTATION
    smallest = max(2.0 / 2**n, 0.0 if exact else 2.0 / (RESAMPLES + 1))
    p_values = {name: float(found.pvalue)}
    pair = replace(pair, test=name, p=p_values[name], p_values=p_values, p_smallest=smallest)
    spread = float(gaps.std(ddof=1))
    if _is_flat(spread, x, y):
        return pair
    result: Any = stats.ttest_rel(x, y)
    p_values["paired t"] = float(result.pvalue)
    if np.count_nonzero(gaps) >= WILCOXON_SEEDS:
        signed: Any = stats.wilcoxon(gaps)
        p_values["Wilcoxon"] = float(signed.pvalue)
    interval = result.confidence_interval(1 - LEVEL)
    effect, low, high = _effect(float(gaps.mean()) / spread, n - 1, 1 / n**0.5)
    ends = {"low": float(interval.low), "high": float(interval.high)}
    return replace(pair, **ends, effect=effect, effect_low=low, effect_high=high)


def _mean_gap(x: Any, y: Any, axis: int) -> Any:
    return np.mean(x - y, axis=axis)


def _unpaired(pair: Pair, x: Any, y: Any) -> Pair:
    from scipy import stats

    var_x, var_y = float(x.var(ddof=1)), float(y.var(ddof=1))
    if _is_flat((var_x + var_y) ** 0.5, x, y):
        return pair
    result: Any = stats.ttest_ind(x, y, equal_var=False)
    interval, p = result.confidence_interval(1 - LEVEL), float(result.pvalue)
    spread, error = ((var_x + var_y) / 2) ** 0.5, (var_x / len(x) + var_y / len(y)) ** 0.5
    effect, low, high = _effect(pair.difference / spread, float(result.df), error / spread)
    ends = {"low": float(interval.low), "high": float(interval.high)}
    effects = {"effect": effect, "effect_low": low, "effect_high": high}
    return replace(pair, **ends, **effects, test=WELCH, p=p, p_values={WELCH: p})


def _is_flat(spread: float, x: Any, y: Any) -> bool:
    """Return whether the spread is only rounding, so that a t statistic would be meaningless."""
    return spread <= 1e-12 * float(np.abs(np.concatenate([x, y])).max())


def _effect(d: float, df: float, error: float) -> tuple[float | None, float | None, float | None]:
    """Return the standardised difference with Hedges' correction, and its interval; None for fewer than 2 df.

    `error` is the standard error divided by the spread. d / error has a noncentral t distribution with noncentrality
    effect / error: the interval holds the noncentralities that this t allows (Steiger and Fouladi 1997). Exact for
    normal pairs.
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


# --- over questions ---------------------------------------------------------------------------------------------------


def over_questions(taken: Sequence[RunPoint], measure: str) -> Estimate | None:
    """Return the mean over runs and questions; None if a run's answers are unknown or questions differ.

    Runs keep the completions of their last step only, so earlier points have none.
    """
    rows = _rows(taken, measure)
    return None if rows is None else crossed(rows)


def difference_over_questions(a: Sequence[RunPoint], b: Sequence[RunPoint], measure: str) -> Estimate | None:
    """Return the mean of a minus that of b over runs and questions, paired by seed if `shared` allows it."""
    rows = _rows([*a, *b], measure)
    if rows is None:
        return None
    by_a = {run.seed: row for (run, _), row in zip(a, rows, strict=False)}
    by_b = {run.seed: row for (run, _), row in zip(b, rows[len(a) :], strict=True)}
    seeds = shared(by_a, by_b)
    x, y = ([by_seed[seed] for seed in seeds or sorted(by_seed)] for by_seed in (by_a, by_b))
    return crossed_difference(x, y, paired=bool(seeds))


def _rows(taken: Sequence[RunPoint], measure: str) -> list[tuple[float, ...]] | None:
    rows: list[tuple[float, ...]] = []
    for run, point in taken:
        row = run.items.get("right" if measure in RIGHT_SHARES else measure)
        if row is None or run.questions is None or not run.finished or point.step != run.steps:
            return None
        if not np.isclose(np.mean(row), point.measures[measure], rtol=1e-9, atol=1e-12):
            return None  # the measure is not the mean over questions
        rows.append(row)
    same = len({run.questions for run, _ in taken}) == 1 and len(set(map(len, rows))) == 1
    return rows if same else None


# --- sensitivity ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The difference a - b at fractions of the budget (None without runs there), and its range without one run."""

    a: str
    b: str
    at: tuple[tuple[float, Estimate | None], ...]
    without_one: tuple[float, float] | None


def sensitivity(a: str, b: str, values: Callable[[str, float], Values]) -> Sensitivity:
    """Recompute a difference; `values(label, share)` gives a group's values within a share of the budget."""
    at: list[tuple[float, Estimate | None]] = []
    for share in SHARES:
        x, y = values(a, share), values(b, share)
        at.append((share, _gap(x, y) if x and y else None))
    x, y = values(a, 1.0), values(b, 1.0)
    seeds = shared(x, y)
    if seeds:
        gaps = [x[seed] - y[seed] for seed in seeds]
        without = [(sum(gaps) - one) / (len(gaps) - 1) for one in gaps]
    elif min(len(x), len(y)) > 1:
        without = [_gap({s: v for s, v in x.items() if s != seed}, y).mean for seed in x]
        without += [_gap(x, {s: v for s, v in y.items() if s != seed}).mean for seed in y]
    else:
        return Sensitivity(a, b, tuple(at), None)
    return Sensitivity(a, b, tuple(at), (min(without), max(without)))


def _gap(a: Values, b: Values) -> Estimate:
    seeds = shared(a, b)
    return mean([a[s] - b[s] for s in seeds]) if seeds else difference(list(a.values()), list(b.values()))
