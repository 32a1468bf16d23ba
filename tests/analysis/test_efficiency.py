# SPDX-License-Identifier: Apache-2.0
"""What training takes to a threshold, with censored runs; variances between seeds against formulas of others."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copied_runs import Copy, edit, step_cost
from drawings import figures_of, words_of

from evoalign.analysis import Finding, efficiency
from evoalign.analysis.efficiency import Efficiency, Interval, Settings, Time, deviation, median, reached, robust_ratio
from evoalign.errors import ConfigError

A = [12.1, 9.7, 14.2, 10.9, 8.8, 13.0, 11.5]
B = [10.2, 10.8, 9.9, 10.4, 10.0, 10.7]


def rising(at: int, end: float = 1.0) -> Callable[[int], float]:
    return lambda step: end if step >= at else 0.0


def seeds(copy: Copy, name: str, at: list[int], factor: float = 1.0, **own: Any) -> None:
    """A group of runs; each is at 1 after so many steps, and 99 never."""
    for seed, step in enumerate(at):
        spread = 0.001 * seed * factor
        copy(
            f"{name}_{seed}", seed=seed, cost=lambda s: step_cost(s, factor),
            reward=lambda s, step=step, spread=spread: float(s >= step) + spread * (s > 0), **own,
        )  # fmt: skip


def analysed(folder: Path, threshold: float | None = None) -> Finding:
    return Efficiency().run([str(folder / "runs")], Settings(threshold=threshold))


def column(group: dict[str, Any], by: str, key: str = "amount") -> list[Any]:
    return [time[key] for time in group["times"][by]["runs"].values()]


def test_runs_that_never_reach_it_are_censored_and_not_left_out(copy: Copy, tmp_path: Path) -> None:
    seeds(copy, "es", [2, 4, 4, 99, 99], 2.0)
    seeds(copy, "grpo", [2, 2, 2, 2, 4], 1.0, method="grpo")
    found = analysed(tmp_path, 0.9)
    es, grpo = found.numbers["groups"]
    assert column(es, "completions") == [48, 96, 96, 144, 144] and column(grpo, "wall") == [1, 1, 1, 1, 2]
    assert column(es, "completions", "reached") == [True, True, True, False, False]
    middle = es["times"]["completions"]["median"]
    assert middle["mean"] == 96 > np.mean([48, 96, 96]), "a mean over those that reached it would be less"
    assert (middle["low"], middle["high"], middle["unbounded"]) == (48, None, ["high"])
    assert es["times"]["tokens"]["reached"]["mean"] == 0.6
    text = " ".join(found.sentences)
    assert "ES: runs that reach it 3 of 5" in text and "median completions 96 (95 %: 48 and above)" in text
    assert "placebos none, so drift alone may reach it" in text


def test_the_default_threshold_is_half_way_to_the_best_group(copy: Copy, tmp_path: Path) -> None:
    for seed in range(2):
        copy(f"low_{seed}", seed=seed, reward=rising(4, 0.4))
        copy(f"high_{seed}", seed=seed, reward=rising(4, 0.8), sets={"es.learning_rate": 0.05})
    found, lower = analysed(tmp_path), analysed(tmp_path, 0.5)
    assert found.numbers["threshold"] == pytest.approx(0.4) and found.numbers["given"] is False
    reached = ([sum(column(group, "tokens", "reached")) for group in one.numbers["groups"]] for one in (found, lower))
    assert [sorted(counts) for counts in reached] == [[2, 2], [0, 2]]
    with pytest.raises(ConfigError, match="threshold: 0 is what reward starts from"):
        analysed(tmp_path, 0.0)


def test_a_threshold_below_the_start_is_reached_from_above_and_has_to_be_given(copy: Copy, tmp_path: Path) -> None:
    copy("a", reward=lambda step: 1.0 - 0.2 * step)
    assert column(analysed(tmp_path, 0.3).numbers["groups"][0], "completions") == [48]
    with pytest.raises(ConfigError, match="no group ends above the start"):
        analysed(tmp_path)


def test_placebos_and_the_ratio_of_variances_are_reported(copy: Copy, tmp_path: Path) -> None:
    for seed in range(3):
        run = copy(f"es_{seed}", seed=seed, reward=rising(2, 1.0 + 0.1 * seed))
        placebo = {"before": 0.0, "real": 1.0, "placebos": [0.1, 0.95], "flip": None, "items": 3,
                   **{name: {"mean": 0.5, "n": 2} for name in ("gain", "drift", "signal")}, "share": None}  # fmt: skip
        edit(run / "results/evaluation.json", lambda tree, p=placebo: {**tree, "placebo": {"reward": p}})
        copy(f"grpo_{seed}", seed=seed, method="grpo", reward=rising(2, 1.0 + 0.01 * seed))
    found = analysed(tmp_path, 0.9)
    assert found.numbers["groups"][0]["placebos"] == {"known": 6, "reached": 3}
    (pair,) = found.numbers["pairs"]
    assert pair["variances"]["robust"]["mean"] == pytest.approx(100) and pair["variances"]["robust"]["low"] is None
    text = " ".join(found.sentences)
    assert "placebos that reach it 3 of 6" in text and "ratio of the variances between seeds 100 (3 runs" in text


def test_numbers_have_three_digits_and_commas() -> None:
    shown = [f"{Interval(v, 1, why='x')}" for v in (0.1234, 999, 999.6, 41234, 999_600, 1.25e12, inf, float("nan"))]
    wanted = ["0.123", "999", "1,000", "41,200", "1 M", "1.25 T", "not reached", "unknown"]
    assert shown == [f"{number} (x)" for number in wanted]


def test_groups_without_an_end_or_a_cost_say_so(copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy("a", reward=rising(2), cost=lambda _: None)
    unfinished = copy("b", method="grpo", reward=rising(2), cost=lambda _: None)
    (unfinished / "results/evaluation.json").unlink()
    (unfinished / "SHA256SUMS").unlink(missing_ok=True)
    drawn = figures_of(efficiency, monkeypatch)
    found = analysed(tmp_path, 0.5)
    assert [p.name for p in found.draw(tmp_path)] == ["efficiency_ends.png", "efficiency_ends.svg"]
    assert words_of(drawn["efficiency_ends"]).count("no run is finished") == 1
    assert "costs not reported" in " ".join(found.sentences)


def test_the_median_holds_what_was_planted_though_runs_are_cut_short() -> None:
    """Exponential times with median log 2, cut off at another time each."""
    random, hits = np.random.default_rng(0), 0
    for _ in range(400):
        real, end = random.exponential(size=9), random.uniform(0.3, 3.0, size=9)
        found = median([Time(float(min(t, e)), bool(t <= e)) for t, e in zip(real, end, strict=True)])
        assert found.low is not None and found.high is not None
        hits += found.low <= np.log(2) <= found.high
    assert hits / 400 >= 0.95


def test_medians_and_shares_of_small_samples() -> None:
    def times(values: list[float], never: int = 0) -> list[Time]:
        return [Time(v, True) for v in values] + [Time(100.0, False)] * never

    assert median(times([1, 2, 3], 4)).mean == inf and median(times([1, 2])).why == "2 runs: no interval"
    found = median(times([5, 1, 4, 2, 3, 6]))
    assert (found.mean, found.low, found.high) == (3.5, 1, 6)
    share = reached(times([1, 2, 3], 5))  # Clopper and Pearson, 3 of 8: 8.5 to 75.5 %
    assert (share.low, share.high) == pytest.approx((0.0852, 0.7551), abs=1e-4)


def test_spreads_against_formulas_of_others() -> None:
    from scipy import stats

    found, sd = robust_ratio(A, B), deviation(A)
    assert found.mean == pytest.approx(np.var(A, ddof=1) / np.var(B, ddof=1), rel=1e-12)
    chi = [np.sqrt(6 * np.var(A, ddof=1) / stats.chi2.ppf(p, 6)) for p in (0.975, 0.025)]
    np.testing.assert_allclose([sd.low, sd.high], chi, rtol=1e-10)
    assert robust_ratio([1.0] * 5, B).why == "all runs of a group end alike: no ratio"
    assert robust_ratio(A[:4], B).why == "4 runs: no interval" and robust_ratio(A[:1], B).why == "1 run: no spread"


@pytest.mark.slow
def test_the_robust_ratio_covers_normal_and_heavy_tailed_values() -> None:
    random = np.random.default_rng(2)
    for draw, n, least in ((random.normal, 8, 0.93), (lambda size: random.standard_t(4, size=size), 20, 0.91)):
        found = [robust_ratio(list(15.5**0.5 * draw(size=n)), list(draw(size=n))) for _ in range(1000)]
        assert np.mean([one.low <= 15.5 <= one.high for one in found]) >= least  # type: ignore[operator]
