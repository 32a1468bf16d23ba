# SPDX-License-Identifier: Apache-2.0
"""What training takes to a threshold, censored runs among it; variances between seeds against formulas of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calling import caller
from compared import Copy, edit, step_cost
from drawn import figures_of, words_of
from evoalign.analysis.efficiency import compute, figure
from evoalign.analysis.efficiency.command import Settings
from evoalign.analysis.efficiency.compute import Efficiency, efficiency
from evoalign.analysis.efficiency.measures import (
    Time,
    _rank,  # pyright: ignore[reportPrivateUsage]
    deviation,
    median,
    reached,
    robust_ratio,
    times_ratio,
    variances_ratio,
)
from evoalign.errors import ConfigError

A = [12.1, 9.7, 14.2, 10.9, 8.8, 13.0, 11.5]
B = [10.2, 10.8, 9.9, 10.4, 10.0, 10.7]


def rising(at: int, end: float = 1.0) -> Callable[[int], float]:
    """0 until so many steps, then `end`."""
    return lambda step: end if step >= at else 0.0


def seeds(copy: Copy, name: str, at: list[int], factor: float = 1.0, **own: Any) -> None:
    """A group of runs; each is at 1 after so many steps, and 99 never."""
    for seed, step in enumerate(at):
        spread = 0.001 * seed * factor
        copy(
            f"{name}_{seed}", seed=seed, cost=lambda s: step_cost(s, factor),
            reward=lambda s, step=step, spread=spread: float(s >= step) + spread * (s > 0), **own,
        )  # fmt: skip


# --- whole analyses ---


def test_runs_that_never_reach_it_are_censored_and_not_left_out(copy: Copy, tmp_path: Path) -> None:
    seeds(copy, "es", [2, 4, 4, 99, 99], 2.0)
    seeds(copy, "grpo", [2, 2, 2, 2, 4], 1.0, method="grpo")
    found = efficiency([str(tmp_path / "runs")], Settings(threshold=0.9))
    es, grpo = found.groups
    assert [t.amount for t in es.of("completions")] == [48, 96, 96, 144, 144]
    assert [t.reached for t in es.of("completions")] == [True, True, True, False, False]
    lucky = float(np.mean([48, 96, 96]))
    told = median(es.of("completions"))
    assert told.mean == 96 and lucky < told.mean, "a mean over those that reached it would be less"
    assert (told.low, told.high) == (48, inf)
    assert [t.amount for t in grpo.of("wall")] == [1, 1, 1, 1, 2]
    numbers = found.numbers["groups"][0]["times"]
    assert numbers["tokens"]["median"]["unbounded"] == ["high"] and numbers["tokens"]["reached"]["mean"] == 0.6
    (pair,) = found.numbers["pairs"]
    assert pair["times"]["completions"]["low"] >= 2 and pair["times"]["completions"]["unbounded"]
    said = " ".join(found.sentences)
    assert "ES: 3 of 5 runs reach it" in said and "96 (95 %: 48 and no upper end) completions" in said
    assert "no placebo is known" in said


def test_the_default_threshold_is_half_way_to_the_best_group(copy: Copy, tmp_path: Path) -> None:
    for seed in range(2):
        copy(f"low_{seed}", seed=seed, reward=rising(4, 0.4))
        copy(f"high_{seed}", seed=seed, reward=rising(4, 0.8), sets={"es.learning_rate": 0.05})
    found = efficiency([str(tmp_path / "runs")], Settings())
    assert found.threshold == pytest.approx(0.4) and found.numbers["given"] is False
    assert "an outcome of these runs" in found.sentences[0]
    assert {len([t for t in g.of("tokens") if t.reached]) for g in found.groups} == {2}
    lower = efficiency([str(tmp_path / "runs")], Settings(threshold=0.5))
    assert {sum(t.reached for t in g.of("tokens")) for g in lower.groups} == {0, 2}
    with pytest.raises(ConfigError, match="threshold: 0 is what reward starts from"):
        efficiency([str(tmp_path / "runs")], Settings(threshold=0.0))


def test_a_threshold_below_the_start_is_reached_from_above(copy: Copy, tmp_path: Path) -> None:
    copy("a", reward=lambda step: 1.0 - 0.2 * step)
    found = efficiency([str(tmp_path / "runs")], Settings(threshold=0.3))
    assert [t.amount for t in found.groups[0].of("completions")] == [48]


def test_nothing_gained_has_no_threshold_of_its_own(copy: Copy, tmp_path: Path) -> None:
    copy("a", reward=lambda step: 1.0 - 0.1 * step)
    with pytest.raises(ConfigError, match="nothing to be half-way to; give a threshold"):
        efficiency([str(tmp_path / "runs")], Settings())


def test_placebos_stand_beside_and_few_seeds_are_said(copy: Copy, tmp_path: Path) -> None:
    for seed in range(3):
        run = copy(f"es_{seed}", seed=seed, reward=rising(2, 1.0 + 0.1 * seed))
        placebo = {"before": 0.0, "real": 1.0, "placebos": [0.1, 0.95], "flip": None, "items": 3,
                   **{name: {"mean": 0.5, "n": 2} for name in ("gain", "drift", "signal")}, "share": None}  # fmt: skip
        edit(run / "results/evaluation.json", lambda tree, p=placebo: {**tree, "placebo": {"reward": p}})
        copy(f"grpo_{seed}", seed=seed, method="grpo", reward=rising(2, 1.0 + 0.01 * seed))
    found = efficiency([str(tmp_path / "runs")], Settings(threshold=0.9))
    assert found.groups[0].placebos == (6, 3)
    said = " ".join(found.sentences)
    assert "of 6 placebos (shuffled coefficients), 3 end there" in said
    assert "ratio of the variances between seeds (3 and 3 seeds) 100 (95 %: 2.56 to 3,900) if ends are normal" in said
    assert "standard deviations 10 to 1" in said
    assert "So few seeds tell a ratio to a factor of several" in said


def test_why_there_is_no_interval_is_said_once_of_a_group_and_large_numbers_have_commas(
    copy: Copy, tmp_path: Path
) -> None:
    for method, times in (("es", 10.0), ("grpo", 20.0)):
        copy(method, method=method, reward=rising(5), cost=lambda step, times=times: step_cost(step, times))
    said = efficiency([str(tmp_path / "runs")], Settings(threshold=0.5)).sentences
    for line in (line for line in said if "in the median" in line):
        assert line.count("no interval") == 1 and line.endswith(" FLOPs (1 run: no interval of the median).")
        assert "e+" not in line
    assert any(" 42,000 tokens; " in line and line.startswith("ES: ") for line in said), said
    (pair,) = [line for line in said if "x 0.5 of the completions; x 0.5 of the tokens" in line]
    assert pair.count("no interval") == 1
    shown = [compute._number(v) for v in (0.1234, 999, 999.6, 41234, 999_600, 1.25e12)]  # pyright: ignore
    assert shown == ["0.123", "999", "1,000", "41,200", "1 M", "1.25 T"]


def test_the_command_writes_numbers_words_and_figures(
    copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = caller(monkeypatch, capsys, 300)
    seeds(copy, "es", [2, 4, 99])
    done = run("analyze", "efficiency", tmp_path / "runs", "--set", "threshold=0.5", "--to", tmp_path / "out")
    assert done.code == 0, done.err
    assert "2 of 3 runs reach it" in done.out
    assert json.loads((tmp_path / "out/efficiency.json").read_text())["numbers"]["threshold"] == 0.5
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "efficiency.json", "efficiency_times.png", "efficiency_times.svg", "efficiency_ends.png",
        "efficiency_ends.svg",
    }  # fmt: skip
    assert run("analyze", "efficiency", tmp_path / "runs", "--set", "measure=nonsense").code == 2


def test_a_row_without_an_end_says_so(copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy("a", reward=rising(2))
    unfinished = copy("b", method="grpo", reward=rising(2))
    (unfinished / "results/evaluation.json").unlink()
    (unfinished / "SHA256SUMS").unlink(missing_ok=True)
    drawn = figures_of(figure, monkeypatch)
    efficiency([str(tmp_path / "runs")], Settings(threshold=0.5)).draw(tmp_path)
    assert words_of(drawn["efficiency_ends"]).count("no run has come to its end") == 1


def test_a_finding_draws_without_costs(copy: Copy, tmp_path: Path) -> None:
    copy("a", cost=lambda _: None, reward=rising(2))
    found = efficiency([str(tmp_path / "runs")], Settings(threshold=0.5))
    assert isinstance(found, Efficiency) and "do not say what they took" in " ".join(found.sentences)
    assert [p.name for p in found.draw(tmp_path)] == ["efficiency_ends.png", "efficiency_ends.svg"]


# --- measures ---


def times(values: list[float], never: int = 0) -> list[Time]:
    return [Time(v, True) for v in values] + [Time(100.0, False)] * never


def test_the_median_holds_what_was_planted_though_runs_are_cut_short() -> None:
    """Exponential times with median log 2, cut off at another time each."""
    random, hits = np.random.default_rng(0), 0
    for _ in range(400):
        real, end = random.exponential(size=9), random.uniform(0.3, 3.0, size=9)
        found = median([Time(float(min(t, e)), bool(t <= e)) for t, e in zip(real, end, strict=True)])
        assert found.low is not None and found.high is not None
        hits += found.low <= np.log(2) <= found.high
    assert hits / 400 >= 0.95


def test_a_median_that_is_not_reached() -> None:
    assert median(times([1, 2, 3], 4)).mean == inf
    assert median(times([1, 2])).why == "2 runs: no interval of the median"
    found = median(times([5, 1, 4, 2, 3, 6]))
    assert (found.mean, found.low, found.high) == (3.5, 1, 6)


def test_the_share_that_reached_it_against_a_table() -> None:
    found = reached(times([1, 2, 3], 5))  # Clopper and Pearson, 3 of 8: 8.5 to 75.5 %
    assert (found.low, found.high) == (pytest.approx(0.0852, abs=1e-4), pytest.approx(0.7551, abs=1e-4))


def test_ranks_against_all_orders() -> None:
    """Mann and Whitney's U counted by hand."""
    for n, m in ((3, 3), (4, 4), (3, 6), (5, 7)):
        us = [sum(r - i for i, r in enumerate(chosen)) for chosen in combinations(range(n + m), n)]
        want = max((k for k in range(n * m + 1) if np.mean([u < k for u in us]) <= 0.025), default=0)
        assert _rank(n, m) == want
    assert _rank(3, 3) == 0 and _rank(4, 4) == 1


def test_a_ratio_of_times_holds_what_was_planted() -> None:
    random, hits = np.random.default_rng(1), 0
    for _ in range(300):
        a, b = 3 * random.lognormal(size=6), random.lognormal(size=7)
        found = times_ratio([Time(float(min(t, 12)), bool(t <= 12)) for t in a], times(list(map(float, b))))
        assert found.low is not None and found.high is not None
        hits += found.low <= 3 <= found.high
    assert hits / 300 >= 0.93
    assert times_ratio(times([2.0, 4.0, 8.0]), times([1.0, 2.0, 4.0])).mean == 2
    assert times_ratio(times([2.0, 4.0, 8.0]), times([1.0, 2.0, 4.0])).low is None


def test_variances_against_formulas_of_others() -> None:
    from scipy import stats

    found, sd = variances_ratio(A, B), deviation(A)
    ratio = np.var(A, ddof=1) / np.var(B, ddof=1)
    ends = [ratio / stats.f.ppf(p, 6, 5) for p in (0.975, 0.025)]
    np.testing.assert_allclose([found.mean, found.low, found.high], [ratio, *ends], rtol=1e-10)
    chi = [np.sqrt(6 * np.var(A, ddof=1) / stats.chi2.ppf(p, 6)) for p in (0.975, 0.025)]
    np.testing.assert_allclose([sd.low, sd.high], chi, rtol=1e-10)
    assert variances_ratio([1.0, 1.0, 1.0], B).why == "all runs of a group end alike: no ratio"
    assert variances_ratio(A[:2], B).why == "2 runs: no interval" and robust_ratio(A[:4], B).low is None


@pytest.mark.slow
def test_the_robust_ratio_holds_where_f_does_not() -> None:
    """Of 8 and 8 normal values both; of heavy tails, of more values, the robust one alone."""
    random = np.random.default_rng(2)

    def held(of: Callable[..., Any], draw: Callable[[int], Any], n: int, planted: float) -> float:
        hits = 0
        for _ in range(1000):
            found = of(list(planted**0.5 * draw(n)), list(draw(n)))
            hits += found.low <= planted <= found.high
        return hits / 1000

    def heavy(n: int) -> Any:
        return random.standard_t(4, size=n)

    assert 0.935 <= held(variances_ratio, lambda n: random.normal(size=n), 8, 15.5) <= 0.965
    assert held(robust_ratio, lambda n: random.normal(size=n), 8, 15.5) >= 0.93
    assert held(variances_ratio, heavy, 20, 15.5) < 0.87
    assert held(robust_ratio, heavy, 20, 15.5) >= 0.91
