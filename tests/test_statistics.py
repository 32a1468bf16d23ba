# SPDX-License-Identifier: Apache-2.0
"""Intervals against formulas written again, against scipy, and by simulation."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from evoalign import statistics
from evoalign.statistics import Estimate, crossed, crossed_difference, crossed_p, interquartile_mean, paired, ratio

Ends = tuple[float | None, float | None]


def ends(found: Estimate) -> Ends:
    return found.low, found.high


def test_a_mean_has_the_interval_of_student() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 9.0]
    assert ends(statistics.mean(values)) == pytest.approx(stats.t.interval(0.95, 4, np.mean(values), stats.sem(values)))
    assert statistics.mean([0.1] * 4).mean == pytest.approx(0.1)


RATES = np.random.default_rng(0).normal(size=(9, 9))
TENS = [10, 14, 19, 11, 13]
NONE_OF = {
    "2 values": [statistics.mean([1.0, 2.0]), crossed(RATES[:2]), ratio([1.0, 2.0], [3.0, 4.0])],
    "1 value": [crossed(RATES[:, :1])],
    "4 values": [interquartile_mean([1.0, 2.0, 3.0, 4.0])],
    "all alike": [statistics.mean([0.1] * 4), interquartile_mean([3.0] * 6), crossed(np.ones((3, 4))),
                  ratio([3 * x for x in TENS], TENS), *(paired([x] * 245, [x] * 245) for x in (0.0, 1.0, 0.3))],
    "the denominator is not known to differ from 0": [ratio([3.0, 5.0, 8.0, 4.0, 6.0], [1.0, 2.0, 9.0, 0.1, 30.0])],
}  # fmt: skip


@pytest.mark.parametrize(("found", "why"), [(found, why) for why, several in NONE_OF.items() for found in several])
def test_without_an_interval_the_reason_is_given(found: Estimate, why: str) -> None:
    assert found.low is None and found.high is None and str(found.why).startswith(f"{why}: no interval")


@pytest.mark.parametrize(("n", "k", "held"), [(5, 1, 0.9375), (8, 2, 0.9297), (12, 3, 0.9614), (20, 6, 0.9586)])
def test_the_middle_half_has_an_interval_of_ranks(n: int, k: int, held: float) -> None:
    """Chances by counting coin flips: k and less of n."""
    assert ends(interquartile_mean(np.arange(n)[::-1])) == (k - 1, n - k)
    assert 1 - 2 * sum(math.comb(n, j) for j in range(k)) / 2**n == pytest.approx(held, abs=1e-4)
    assert interquartile_mean([0, 1, 2, 3, 1000]).mean == 2.0, "one at each end is left out"


def test_seeds_and_items_each_have_their_part() -> None:
    random = np.random.default_rng(0)
    seeds, items = random.normal(size=(4, 1)), random.normal(size=(1, 7))
    t_s, t_i = stats.t.ppf(0.975, [3, 6])
    both = crossed(seeds + items)
    half = (t_s**2 * seeds.var(ddof=1) / 4 + t_i**2 * items.var(ddof=1) / 7) ** 0.5
    assert both.high == pytest.approx((seeds + items).mean() + half) and (both.n, both.items) == (4, 7)
    assert ends(crossed(seeds + 0 * items)) == pytest.approx(ends(statistics.mean(seeds[:, 0])))
    assert ends(crossed(0 * seeds + items)) == pytest.approx(ends(statistics.mean(items[0])))


def test_what_is_random_in_every_cell_counts_once() -> None:
    """Its part of the items' mean square is taken out: by hand, from the table of an analysis of variance."""
    values = np.array([[1.0, 2.0, 4.0], [5.0, 8.0, 7.0], [6.0, 8.0, 15.0]])
    rows, columns = values.mean(1), values.mean(0)
    rest = sum((values[s, i] - rows[s] - columns[i] + values.mean()) ** 2 for s in range(3) for i in range(3)) / 4
    t = stats.t.ppf(0.975, 2)
    square = t**2 * (3 * rows.var(ddof=1) + 3 * columns.var(ddof=1) - rest) / 9
    found = crossed(values)
    assert found.high is not None and (found.high - values.mean()) ** 2 == pytest.approx(square)


def test_p_is_that_of_student_for_seeds_alone_and_agrees_with_the_interval() -> None:
    random = np.random.default_rng(3)
    seeds = random.normal(size=(4, 1)) + 1.0
    assert crossed_p(seeds + np.zeros((4, 9))) == pytest.approx(stats.ttest_1samp(seeds[:, 0], 0.0).pvalue)
    for shift in np.linspace(-2.0, 2.0, 9):
        values = random.normal(size=(4, 9)) + shift
        found = crossed_p(values)
        assert found is not None and (found < 0.05) == statistics.is_sure(crossed(values))
    assert crossed_p(np.array([[1.0, 2.0]] * 4)) is None, "two items have no interval"
    assert crossed_p(np.tile(1.0 + 1e-3 * np.arange(400.0), (4, 1))) == statistics.SMALLEST


def test_a_difference_on_the_same_items() -> None:
    random = np.random.default_rng(1)
    items = 10 * random.normal(size=(1, 30))
    a, b = items + random.normal(size=(5, 30)), items + random.normal(size=(5, 30)) - 1
    assert crossed_difference(a, b, paired=True) == crossed(a - b)
    apart = crossed_difference(a, b[:4], paired=False)
    assert (apart.mean, apart.n, apart.items) == (pytest.approx(a.mean() - b[:4].mean()), 4, 30)
    assert apart.low is not None and apart.high is not None
    assert apart.low > 0 and apart.high - apart.low < 2, "what items have in common is no part of it"


def test_a_ratio_has_the_interval_of_fieller() -> None:
    top, bottom = np.array([3.0, 5.0, 8.0, 4.0, 6.0]), np.array([10.0, 14.0, 19.0, 11.0, 13.0])
    t, cov, x, y = stats.t.ppf(0.975, 4), np.cov(top, bottom) / 5, top.mean(), bottom.mean()
    roots = np.roots([y**2 - t**2 * cov[1, 1], -2 * (x * y - t**2 * cov[0, 1]), x**2 - t**2 * cov[0, 0]])
    found = ratio(top, bottom)
    assert found.mean == x / y and ends(found) == pytest.approx(tuple(sorted(roots)))
    assert ends(ratio(-top, bottom)) == ends(ratio(top, -bottom)) == pytest.approx(tuple(sorted(-roots)))
    assert math.isnan(ratio([1.0, 2.0], [1.0, -1.0]).mean)


def test_a_ratio_over_seeds_and_items() -> None:
    """Where the denominator is one number for all, it is the interval of the mean, divided."""
    values = np.random.default_rng(2).normal(5, 1, size=(4, 12))
    whole, found = crossed(values), ratio(values, np.full(12, 2.0))
    assert whole.low is not None and whole.high is not None
    assert ends(found) == pytest.approx((whole.low / 2, whole.high / 2)) and (found.n, found.items) == (4, 12)


def test_shares_have_an_interval_where_nothing_changed() -> None:
    """Bonett and Price: one is added to each way."""
    before, after = [0.0] * 8 + [1.0] * 2, [0.0] * 5 + [1.0] * 5
    won, lost = 4 / 12, 1 / 12
    half = 1.959964 * ((won + lost - (won - lost) ** 2) / 12) ** 0.5
    found, same = paired(before, after), paired(before, before)
    assert (found.mean, found.low, found.high) == pytest.approx((0.3, won - lost - half, won - lost + half))
    assert same.low is not None and same.high is not None and same.low == pytest.approx(-same.high) and same.high > 0.2
    assert paired([0.0], [1.0]).high == 1.0, "never beyond what a share can be"
    assert (paired([0.0] * 12, [0.0] * 12, shares=True).high or 0) > 0, "of others some may be solved"


def test_other_values_have_that_of_student_and_what_is_missing_does_not_count() -> None:
    assert paired([0.1, math.nan, 0.0, 1.0], [1.0, 3.0, 0.5, 4.0]) == statistics.mean([0.9, 0.5, 3.0])
    assert paired([math.nan], [1.0]).n == 0 and math.isnan(paired([math.nan], [1.0]).mean)


def share(make: Callable[[np.random.Generator], Estimate], of: float, samples: int) -> float:
    random = np.random.default_rng(0)
    drawn = np.array([ends(make(random)) for _ in range(samples)], dtype=float)
    assert np.isfinite(drawn).all()
    return float(np.mean((drawn[:, 0] <= of) & (of <= drawn[:, 1])))


def layout(random: np.random.Generator, seeds: int, items: int = 40) -> np.ndarray:
    return random.normal(size=(seeds, 1)) + 2 * random.normal(size=(1, items)) + random.normal(size=(seeds, items))


@pytest.mark.parametrize("n", [3, 12])
def test_intervals_hold_the_truth_in_95_of_100_normal_samples(n: int) -> None:
    """Of 600 samples a share of 95 % is 92.3 to 97.7 % in 998 of 1,000 cases; studies/coverage.py has all cells."""
    for make, of, most in (
        (lambda r: statistics.mean(r.normal(size=n)), 0.0, 0.977),
        (lambda r: crossed(layout(r, n)), 0.0, 0.99),
        (lambda r: crossed_difference(layout(r, n), layout(r, n), paired=False), 0.0, 0.999),
        (lambda r: statistics.beside((one := layout(r, n + 1))[0], one[1:]), 0.0, 0.977),
        (lambda r: ratio(r.normal(2, 1, size=20), r.normal(5, 1, size=20)), 0.4, 0.977),
    ):
        assert 0.923 <= share(make, of, 600) <= most


STUDIES = Path(__file__).parents[1] / "studies"


@pytest.fixture(scope="module")
def simulation() -> Any:
    return runpy.run_path(str(STUDIES / "coverage.py")), json.loads((STUDIES / "results/coverage.json").read_text())


def test_rows_of_coverage_cover_every_interval(simulation: Any) -> None:
    found, rows = simulation
    assert len("\n".join(found["as_table"](rows)).splitlines()) > 40
    assert [(row["interval"], row["family"], row["n"]) for row in rows] == [cell[:3] for cell in found["cells"]()]


@pytest.mark.long
def test_the_rows_of_coverage_are_what_a_simulation_gives(simulation: Any) -> None:
    """400 samples of other random numbers: within five standard errors of what is written down."""
    found, rows = simulation
    for row, (name, family, n, one) in zip(rows, found["cells"](), strict=True):
        share = found["measured"](name, family, n, lambda r, one=one: one(r.spawn(1)[0]), 400).share
        error = (max(row["share"] * (1 - row["share"]), 0.002) / 400) ** 0.5
        assert abs(share - row["share"]) < 5 * error, (name, family, n, share, row["share"])


def test_the_printed_interval_holds_0_for_runs_of_es_without_signal(simulation: Any) -> None:
    """Of 400 toy runs 92 to 98 %, with whole pairs and one-sided; the one conditional on the run far less often."""
    found, _ = simulation
    of_null, conditional, random = found["of_null"], found["of_null_conditional"], np.random.default_rng(1)
    for antithetic in (True, False):
        assert 0.92 <= np.mean([of_null(random, 5, antithetic=antithetic) for _ in range(400)]) <= 0.985
    assert np.mean([conditional(random, 5) for _ in range(200)]) < 0.8
