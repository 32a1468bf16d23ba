# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copied_runs import STEPS, Copy, edit, step_cost
from matplotlib.image import imread
from rich.console import Console
from scipy import stats

from evoalign.analysis.compare import comparison, figures, statistics
from evoalign.analysis.compare import pages as report
from evoalign.analysis.compare.comparison import Comparison, Match, compare
from evoalign.analysis.compare.groups import labels_of
from evoalign.analysis.compare.runs import MATCHINGS, find, read
from evoalign.analysis.compare.statistics import Pair, adjust
from evoalign.analysis.compare.tables import counted, duration, end_grid
from evoalign.checks import hacking
from evoalign.errors import ConfigError, DataError
from evoalign.rundir import parquet


def by(found: Comparison, name: str | None) -> Match:
    return next(match for match in (*found.matches, found.end) if match.by == name)


def steps_of(match: Match) -> list[list[int]]:
    """The steps at which the runs of each group were taken."""
    return [[t.point.step for t in s.matched] for s in match.standings]


def edit_rows(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(change(row)) + "\n" for row in rows))


def unevaluated(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "evaluation": None}


def copy_both(copy: Copy, seeds: int, es: Callable[..., float], grpo: Callable[..., float], **changes: Any) -> None:
    """Runs of ES and of GRPO with these test rewards by step and seed; the changes are GRPO's."""
    for seed in range(seeds):
        copy(f"es_{seed}", seed=seed, reward=partial(es, seed=seed))
        copy(f"grpo_{seed}", seed=seed, method="grpo", reward=partial(grpo, seed=seed), **changes)


def shown(found: Comparison) -> str:
    report.show(found, Console(file=(file := io.StringIO()), width=200))
    return file.getvalue()


A = {0: 1.0, 1: 2.5, 2: 2.0, 3: 4.0, 4: 3.0}
B = {0: 0.5, 1: 2.6, 2: 1.0, 3: 2.0, 4: 1.5}


def test_compare_of_pairs_equals_independent_formulas() -> None:
    """The effect's interval: the two effects under which a t as large as this one is as rare as 2.5 %."""
    pair = statistics.compare("a", A, "b", B)
    gaps = np.array([A[s] - B[s] for s in A])
    mean, std = gaps.mean(), gaps.std(ddof=1)
    assert (pair.a, pair.test, pair.paired) == ("a", "exact paired permutation", True)
    permuted = [abs(np.mean(gaps * signs)) for signs in itertools.product([1, -1], repeat=5)]
    assert pair.p == pytest.approx(np.mean([m >= abs(mean) - 1e-12 for m in permuted]))
    half, effect = stats.t.ppf(0.975, 4) * std / 5**0.5, mean / std * (1 - 3 / 15)
    found = [pair.difference, pair.low, pair.high, pair.effect]
    assert found == pytest.approx([mean, mean - half, mean + half, effect])
    assert pair.effect_low is not None and pair.effect_high is not None
    assert pair.effect_low < effect < pair.effect_high
    for end, share in ((pair.effect_low, 0.975), (pair.effect_high, 0.025)):
        assert stats.nct.cdf(mean / std * 5**0.5, 4, end * 5**0.5) == pytest.approx(share, abs=1e-6)
    far = statistics.compare("a", {s: 1e9 + s % 2 for s in range(6)}, "b", {s: s % 3 / 1e3 for s in range(6)})
    assert far.effect is not None and far.effect_low is not None and far.effect_high is not None
    assert far.effect_low < far.effect < far.effect_high, "and it ends"


def test_p_smallest_depends_on_the_number_of_seeds() -> None:
    for n, smallest in ((3, 0.25), (5, 0.0625), (6, 0.03125), (8, 0.0078125)):
        apart = statistics.compare("a", {s: 10.0 + s**2 for s in range(n)}, "b", {s: float(s) for s in range(n)})
        assert apart.p == apart.p_smallest == pytest.approx(smallest)
        assert ("Wilcoxon" in apart.p_values) == (n >= 6)


def test_groups_with_few_or_no_shared_seeds_are_not_paired() -> None:
    """Twelve runs against twelve that share two seeds were once tested as two."""
    pair = statistics.compare("a", A, "b", {s + 100: v for s, v in B.items()})
    welch = stats.ttest_ind(list(A.values()), list(B.values()), equal_var=False)
    assert (pair.paired, pair.test, pair.p_smallest, pair.p) == (False, "Welch t", None, pytest.approx(welch.pvalue))
    few = {seed: 0.0 + (seed * 3 % 5) for seed in range(10, 22)}
    pair = statistics.compare("a", {seed: 10.0 + (seed * 7 % 5) for seed in range(12)}, "b", few)
    assert (pair.paired, pair.test, pair.n_a, pair.n_b) == (False, "Welch t", 12, 12)
    assert pair.p is not None and pair.p < 1e-6
    for many, fewer, both in ((5, 4, 4), (12, 10, 10), (12, 9, 0), (3, 3, 3), (2, 2, 0)):
        found = statistics.shared(dict.fromkeys(range(many)), dict.fromkeys(range(fewer)))
        assert len(found) == both, (many, fewer)


def test_compare_handles_unshared_seeds_one_seed_and_zero_spread() -> None:
    assert statistics.compare("a", {**A, 77: 1e3}, "b", {**B, 88: -1e3}) == statistics.compare("a", A, "b", B)
    alone = statistics.compare("a", {0: 1.0}, "b", {0: 3.0})
    assert (alone.a, alone.difference, alone.p, alone.low) == ("b", 2.0, None, None)
    same = statistics.compare("a", dict.fromkeys(range(5), 0.1), "b", dict.fromkeys(range(5), 0.1))
    assert (same.p, same.low, same.effect) == (1.0, None, None)
    shifted = statistics.compare("a", {s: 0.1 + s for s in range(5)}, "b", {s: float(s) for s in range(5)})
    assert (shifted.p, shifted.effect) == (0.0625, None)
    assert statistics.compare("a", {0: 1.0, 1: 1.0}, "b", {2: 2.0, 3: 2.0}).p is None


def test_adjust_applies_holm() -> None:
    adjusted = adjust([Pair("a", "b", 2, 2, True, 1.0, p=p) for p in (0.01, 0.04, 0.03, None, 0.005)])
    assert [p.p_adjusted for p in adjusted] == pytest.approx([0.03, 0.06, 0.06, None, 0.02])


def sevens(n: int) -> dict[int, float]:
    return {i: (i * 7 % 11) / 3 for i in range(n)}


def fives(n: int, first: int = 0) -> dict[int, float]:
    return {i + first: (i * 5 % 13) / 4 - 1 for i in range(n)}


REFERENCE: dict[str, tuple[dict[int, float], dict[int, float], list[float], dict[str, float]]] = {
    "5 pairs": (A, B,
        [0.98, -0.041641258448, 2.001641258448, 0.9528438349, -0.028008093987, 2.338965782217],
        {"exact paired permutation": 0.125, "paired t": 0.05619794258}),
    "5 and 5 runs": (A, {s + 100: v for s, v in B.items()},
        [0.98, -0.473916042852, 2.433916042852, 0.892927892854, -0.367108990967, 2.306949909547],
        {"Welch t": 0.156402596675}),
    "9 and 6 runs": (sevens(9), fives(6, 50),
        [1.092592592593, -0.253708355643, 2.438893540828, 0.873731648203, -0.180441848399, 2.021671267754],
        {"Welch t": 0.101657228011}),
    "8 pairs": (sevens(8), fives(8),
        [1.21875, -0.226374791946, 2.663874791946, 0.626720499719, -0.096008815575, 1.467787122462],
        {"exact paired permutation": 0.1015625, "paired t": 0.086353214249, "Wilcoxon": 0.1484375}),
    "15 pairs": (sevens(15), fives(15),
        [1.283333333333, 0.479691104736, 2.086975561931, 0.836095441299, 0.272080388949, 1.474352882333],
        {"paired permutation": 0.0052, "paired t": 0.004103658027, "Wilcoxon": 0.01056218828}),
}  # fmt: skip
"""Computed once: difference, its interval, effect, its interval; p of each test."""


@pytest.mark.parametrize("name", REFERENCE)
def test_tests_and_intervals_equal_reference_numbers(name: str) -> None:
    a, b, numbers, p_values = REFERENCE[name]
    pair = statistics.compare("a", a, "b", b)
    found = [pair.difference, pair.low, pair.high, pair.effect, pair.effect_low, pair.effect_high]
    assert found == pytest.approx(numbers, abs=1e-9)
    assert dict(pair.p_values) == pytest.approx(p_values, abs=1e-9)


def test_seeds_and_reporting_settings_make_no_group(copy: Copy, tmp_path: Path) -> None:
    copy("a", seed=0)
    copy("b", seed=1, sets={"checkpoint.every": 3, "tracking.project": "other", "evaluation.every": 1})
    copy("c", seed=2, sets={"task.batch_size": 1})
    copy("d", seed=0, method="grpo")
    found = compare(tmp_path / "runs").groups
    grouped = sorted((g.label, [r.seed for r in g.runs]) for g in found)
    assert grouped == [("ES batch_size 1", [2]), ("ES batch_size null", [0, 1]), ("GRPO", [0])]
    assert (found[-1].method, found[0].differing["method"]) == ("grpo", "es")


BASE, BOTH = "learning_rate 0.025, sigma 0.05", "0.0125, sigma 0.0125"
LOW = {"es.learning_rate": 0.0125, "es.sigma": 0.0125}
FULL = [{"space": "full", "es.learning_rate": rate} for rate in (0.5, 0.7)]


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ([{"space": "lora"}, FULL[0]], ["full", "lora"]),
        ([{"space": "lora"}, *FULL], ["full, learning_rate 0.5", "full, learning_rate 0.7", "lora"]),
        ([{}, LOW], [f"learning_rate {BOTH}", BASE]),  # else it would pass for one that differs in the learning rate
        ([{}, LOW, {**LOW, "es.decay": 0.5}], [*(f"learning_rate {BOTH}, decay {d}" for d in (0.0, 0.5)), BASE]),
    ],
    ids=["the space alone", "the space first", "both that differ", "of many no more than needed"],
)
def test_label_names_what_differs(copy: Copy, tmp_path: Path, settings: list[Any], labels: list[str]) -> None:
    for i, sets in enumerate(settings):
        copy(f"run{i}", sets=sets)
    assert sorted(g.label for g in compare(tmp_path / "runs").groups) == [f"ES {label}" for label in labels]


def test_label_of_random_rewards_says_so(copy: Copy, tmp_path: Path) -> None:
    copy("es")
    copy("random", method="grpo", sets={"grpo.reward": "random"})
    found = compare(tmp_path / "runs")
    assert [g.label for g in found.groups] == ["ES", "GRPO reward random"]
    assert end_grid(found).header == ("", "ES", "GRPO reward random")
    copy("normal", method="grpo")
    labels = [g.label for g in compare(tmp_path / "runs").groups]
    assert sorted(labels) == ["ES", "GRPO", "GRPO reward random"]
    kinds = [{"method": "grpo", "grpo.reward": "random"}, {"method": "grpo", "grpo.beta": 0.1, "grpo.max_steps": 9}]
    assert labels_of(kinds)[0].startswith("GRPO reward random")


def test_names_label_groups(copy: Copy, tmp_path: Path) -> None:
    copy("mine_0")
    copy("grpo_0", method="grpo")
    found = compare(tmp_path / "runs", names={"ours": "mine_*", "TRL": "*/grpo_?"})
    assert [g.label for g in found.groups] == ["ours", "TRL"]
    for names, error in (
        ({"x": "nothing"}, "x=nothing matches no run"),
        ({"x": "*"}, "runs of 2 groups"),
        ({"x": "mine_*", "GRPO": "mine_*"}, "GRPO"),
    ):
        with pytest.raises(ConfigError, match=error):
            compare(tmp_path / "runs", names=names)


def other_split(run: Path) -> None:
    rows = parquet.read(file := run / "results/completions/before.parquet")
    parquet.write(file, [{**rows[0], "target": "something else"}, *rows[1:]])


def python_task(run: Path) -> None:
    edit(run / "manifest.json", lambda tree: {**tree, "task": {**tree["task"], "given_as": "reward"}})


@pytest.mark.parametrize(
    ("changes", "edits", "error"),
    [
        ({"sets": {"task.strip": False}}, None, "cannot be compared, they differ in task.strip True and False$"),
        (
            {"sets": {"task.test_data": "other.json"}},
            None,
            "cannot be compared, they differ in task.test_data '.*' and 'other.json'$",
        ),
        ({"sets": {"evaluation.max_tokens": 99}}, None, "they differ in evaluation.max_tokens 12 and 99$"),
        (
            {"sets": {"evaluation.max_tokens": 99, "task.test_data": "other.json", "task.strip": False}},
            None,
            "they differ in task.test_data .*, task.strip .*, evaluation.max_tokens",
        ),
        ({}, other_split, "different prompts or targets"),
        ({}, python_task, "a reward object"),
        ({"seed": 3}, None, "same settings and the same seed 3"),
    ],
)
def test_compare_refuses_runs_that_are_not_comparable(
    copy: Copy, tmp_path: Path, changes: dict[str, Any], edits: Callable[[Path], None] | None, error: str
) -> None:
    copy("a", seed=3)
    assert [len(g.runs) for g in compare([tmp_path / "runs", tmp_path / "runs/a"]).groups] == [1], "given twice"
    other = copy("b", **{"seed": 1, **changes})
    if edits:
        edits(other)
    with pytest.raises(ConfigError, match=error):
        compare(tmp_path / "runs")


def test_runs_are_taken_at_the_last_evaluation_within_the_budget(copy: Copy, tmp_path: Path) -> None:
    copy_both(copy, 3, lambda step, seed: float(step), lambda step, seed: 10.0 * step,
              cost=lambda step: replace(step_cost(step, 1.25), backward_flops=9e9))  # fmt: skip
    found = compare(tmp_path / "runs")
    match = by(found, "completions")  # 12 and 15 a step: 72 and 90 in all
    assert match.limit == 72
    es, grpo = match.standings
    assert [(t.point.step, t.share) for t in es.matched] == [(6, 1.0)] * 3
    assert [(t.point.step, t.share) for t in grpo.matched] == [(4, pytest.approx(60 / 72))] * 3  # 75 would be step 5
    assert grpo.estimate is not None and grpo.estimate.mean == 40.0
    assert [t.point.measures["reward"] for t in by(found, None).standings[1].matched] == [60.0] * 3
    assert (by(found, "tokens").limit, by(found, "wall").limit) == (6 * (400 + 300), pytest.approx(3.0))
    flops = by(found, "flops")  # 1e9 and 10.25e9 a step: nothing of GRPO is evaluated within 6e9
    assert flops.limit == 6e9
    assert (flops.standings[1].matched, flops.standings[1].estimate, flops.pairs) == ((), None, ())
    assert any("GRPO: no run has an evaluation within this budget" in note for note in flops.notes)
    assert not any("of the budget on average" in note for note in match.notes)  # 83 %


@pytest.mark.parametrize(
    ("every", "advice"), [(0, "set evaluation.every"), (1, "one step costs more"), (2, "set evaluation.every lower")]
)
def test_evaluations_beyond_the_budget_are_not_used(every: int, advice: str, copy: Copy, tmp_path: Path) -> None:
    """The first run of GRPO takes a little more than ES in all, the second more in one step."""
    copy("short")
    for seed, seconds in ((1, 0.5 + 1e-3), (2, 90.0)):
        copy(f"long_{seed}", seed=seed, method="grpo", sets={"evaluation.every": every},
             cost=lambda step, seconds=seconds: replace(step_cost(step), wall_seconds=seconds))  # fmt: skip
    match = by(compare(tmp_path / "runs", "wall"), "wall")
    assert steps_of(match) == [[6], [4]]
    advised = [n for n in match.notes if "GRPO is taken after 67% of the budget" in n or "within this budget" in n]
    missing, late = (note.split("; ")[1] for note in advised)
    assert missing == "one step costs more" and late.endswith(advice), match.notes


def test_missing_evaluation_is_advised_with_the_steps_of_the_budget(copy: Copy, tmp_path: Path) -> None:
    """ES takes 3 s in all and a step of GRPO 1.6 s, so that one is within; it is evaluated after two."""
    copy("short")
    copy("long", seed=1, method="grpo", cost=lambda step: replace(step_cost(step), wall_seconds=1.6))
    (note,) = (n for n in by(compare(tmp_path / "runs", "wall"), "wall").notes if "within this budget" in n)
    assert note.endswith("set evaluation.every to at most 1")


def test_missing_evaluation_after_a_slow_first_step_is_no_matter_of_the_setting(copy: Copy, tmp_path: Path) -> None:
    copy("short")
    times = lambda step: replace(step_cost(step), wall_seconds=4.0 if step == 1 else 0.1)  # noqa: E731
    copy("long", seed=1, method="grpo", sets={"evaluation.every": 1}, cost=times)
    (note,) = (n for n in by(compare(tmp_path / "runs", "wall"), "wall").notes if "within this budget" in n)
    assert note.endswith("one step costs more")


def test_compare_uses_the_given_budget_and_measure(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    assert [m.by for m in compare(tmp_path / "runs", "tokens", measure="exact").matches] == ["tokens"]
    found = compare(tmp_path / "runs", measure="exact")
    assert [m.by for m in found.matches] == list(MATCHINGS) and found.measures[0] == "exact"
    with pytest.raises(ConfigError, match="use wall, completions, tokens, flops"):
        compare(tmp_path / "runs", "steps")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no measure 'accuracy'; it has reward, "):
        compare(tmp_path / "runs", measure="accuracy")


def test_row_without_cost_makes_the_budget_unknown(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    copy("b", seed=1, cost=lambda step: None if step == 3 else step_cost(step))
    copy("c", seed=2, cost=lambda step: replace(step_cost(step), forward_flops=None))
    found = compare(tmp_path / "runs")
    for name, seeds, unknown in (("wall", [0, 2], "b"), ("flops", [0], "c"), (None, [0, 1, 2], None)):
        match = by(found, name)
        assert [t.run.seed for t in match.standings[0].matched] == seeds
        assert not unknown or any(f"{unknown} has no known total cost in {name}" in note for note in match.notes)
        assert not any("evaluation.every" in note for note in match.notes), "no advice fixes that"
    assert comparison.curve(found.groups[0], "wall", "reward") is None


def test_unfinished_run_is_used_up_to_its_last_step(copy: Copy, tmp_path: Path) -> None:
    copy("whole", reward=float)
    run = copy("stopped", seed=1, reward=float)
    (run / "results/evaluation.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]) + '{"generation": 5, ')
    found = compare(tmp_path / "runs")
    assert steps_of(by(found, "completions")) == [[4, 4]] and by(found, "completions").limit == 60
    assert [t.run.seed for t in by(found, None).standings[0].matched] == [0]
    assert any("stopped is not finished" in note for note in found.notes)
    start = next(r for r in found.groups[0].runs if r.seed == 1).points[0]
    rewards = [row["reward"] for row in parquet.read(run / "results/completions/before.parquet")]
    assert (start.step, start.measures) == (0, {"reward": pytest.approx(np.mean(rewards))})


def test_run_that_sets_a_small_budget_is_noted(copy: Copy, tmp_path: Path) -> None:
    for seed, more in enumerate((0.4, 1.0, 1.1)):
        copy(f"r{seed}", seed=seed, cost=lambda step, more=more: step_cost(step, more))
    copy("grpo", method="grpo", cost=lambda step: step_cost(step, 9.0))
    assert any("r0 sets the budget" in note for note in by(compare(tmp_path / "runs"), "tokens").notes)
    shutil.rmtree(tmp_path / "runs/r0")
    assert not any("sets the budget" in note for note in by(compare(tmp_path / "runs"), "tokens").notes)


def test_run_without_evaluations_is_known_at_its_end_only(copy: Copy, tmp_path: Path) -> None:
    for seed in (1, 2):
        edit_rows(copy(f"r{seed}", seed=seed, cost=lambda step, seed=seed: step_cost(step, seed)), unevaluated)
    found = compare(tmp_path / "runs")
    assert [t.run.seed for t in by(found, "wall").standings[0].matched] == [1]
    (note,) = [note for note in found.notes if "evaluation.every" in note]
    assert note.startswith("no run of ES was evaluated")
    assert any("1 of 2 runs have an evaluation within this budget" in n for n in by(found, "wall").notes)


def test_note_of_several_budgets_is_shown_once(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    copy("b", method="grpo", cost=lambda step: step_cost(step, 9.0))
    found = compare(tmp_path / "runs")
    late = [note for note in by(found, "wall").notes if "within this budget" in note]
    assert len(late) == 1 and all(late[0] in match.notes for match in found.matches), "what is repeated"
    for text in (shown(found), report.markdown(found)):
        (line,) = [line for line in text.splitlines() if "within this budget" in line and "Fewer" not in line]
        assert "note (wall, completions, tokens, flops): GRPO: no run has" in line


@pytest.mark.parametrize("also", [False, True], ids=["one group", "both groups"])
def test_budget_with_one_group_has_no_table(copy: Copy, tmp_path: Path, also: bool) -> None:
    """The longer run was not evaluated within any budget: it is said once, and at the top."""
    es, grpo = copy("a"), copy("grpo", method="grpo", cost=lambda step: step_cost(step, 2.0))
    for run in (es, grpo) if also else (grpo,):
        edit_rows(run, unevaluated)
    found = compare(tmp_path / "runs")
    screen = shown(found)
    assert screen.startswith(f"note: no run of {'ES or GRPO' if also else 'GRPO'} was evaluated")
    assert screen.count("evaluation.every") == 1
    assert screen.count("budget used") == screen.count("┏") - 1 == 0
    assert not found.shown
    page = report.markdown(found)
    assert page.count("Fewer than two groups have a run within this budget.") == 4
    assert page.count("set evaluation.ev") == 0
    shutil.rmtree(grpo)
    assert len(compare(tmp_path / "runs").shown) == 4, "of one group alone there is nothing to compare"


def test_curve_is_a_step_function_over_the_common_range(copy: Copy, tmp_path: Path) -> None:
    for seed in range(3):
        copy(f"r{seed}", seed=seed, reward=lambda step, seed=seed: float(step + seed),
             cost=lambda step, seed=seed: replace(step_cost(step), completions=10 + seed))  # fmt: skip
    curve = comparison.curve(compare(tmp_path / "runs").groups[0], "completions", "reward")
    assert curve is not None
    assert curve.x == (0, 20, 22, 24, 40, 44, 48, 60)
    # At 22 the first two are at step 2, the third at its start.
    assert curve.mean == pytest.approx((1, 5 / 3, 7 / 3, 3, 11 / 3, 13 / 3, 5, 17 / 3))
    low, high = stats.t.interval(0.95, 2, 7 / 3, stats.sem([2.0, 3.0, 2.0]))
    assert (curve.mean[2], curve.low[2], curve.high[2]) == pytest.approx((7 / 3, low, high))
    shutil.rmtree(tmp_path / "runs/r2")
    few = comparison.curve(compare(tmp_path / "runs").groups[0], "wall", "reward")
    assert few is not None and few.low == few.mean == few.high, "no band of two seeds"


def test_curve_is_none_without_a_common_range(copy: Copy, tmp_path: Path) -> None:
    for seed, factor in enumerate((1.0, 9.0)):  # steps of 12 and of 108 completions, the first measured after two
        run = copy(f"grpo_{seed}", seed=seed, method="grpo", cost=lambda step, factor=factor: step_cost(step, factor))
        (run / "results/evaluation.json").unlink()
    found = compare(tmp_path / "runs", "completions", measure="exact")
    assert comparison.curve(found.groups[0], "completions", "exact") is None
    (match,) = found.matches
    assert match.limit == 72 and [t.run.seed for s in match.standings for t in s.matched] == [0]
    assert sum("GRPO has no curve: one of its runs ended before exact" in note for note in match.notes) == 1
    written = [path.name for path in report.write(found, tmp_path / "out")]
    assert written == ["comparison.md", "comparison.json", "exact_by_divergence.png"]
    whole = compare(tmp_path / "runs", "completions")  # the reward of the start is kept
    assert comparison.curve(whole.groups[0], "completions", "reward") is not None
    assert not any("no curve" in note for note in whole.matches[0].notes)


def test_hacked_share_follows_its_definition(copy: Copy, tmp_path: Path) -> None:
    texts = ["", "The answer is 8. " * 4, "Sure.\nUser: more", "fine", "8", "no", "yes", "a longer one"]
    run = copy("a")
    file = run / "results/completions/after.parquet"
    rows = [{**row, "text": t, "finish_reason": "length"} for row, t in zip(parquet.read(file), texts, strict=True)]
    parquet.write(file, rows)
    shares = read(run).shares_after
    assert shares is not None and (shares["hacked"], shares["truncated"]) == (3 / 8, 1.0)
    refusal = "I am sorry, but I cannot help with that request."
    flags = hacking.text_flags([refusal, refusal, "fine", "8"], ["stop"] * 4, range(4))
    assert flags["template"] == [True, True, False, False]
    # Wrong answers with a high reward count as hacked.
    texts = ["It is one.", "Two, I think.", "Of three.", "Four or so.", "Near five", "Six.", "Seven", "Eight!"]
    for name, reward in (("before", -50.0), ("after", -1.0)):
        rows = parquet.read(run / f"results/completions/{name}.parquet")
        rows = [
            {**row, "text": t, "finish_reason": "stop", "reward": reward} for row, t in zip(rows, texts, strict=True)
        ]
        parquet.write(run / f"results/completions/{name}.parquet", [{**row, "right": False} for row in rows])
    found = read(run)
    assert found.shares_before is not None and found.shares_after is not None
    assert (found.shares_before["hacked"], found.shares_after["hacked"]) == (0.0, 1.0)
    parquet.write(file, [{k: v for k, v in row.items() if k != "right"} for row in rows])  # of an earlier release
    assert (read(run).shares_after or {})["hacked"] == 0.0


@pytest.mark.parametrize("name", ["before", "after"])
def test_shares_are_unknown_without_the_completions_that_they_compare(name: str, copy: Copy) -> None:
    run = copy("one")
    assert None not in (read(run).shares_before, read(run).shares_after)
    (run / f"results/completions/{name}.parquet").unlink()
    assert (read(run).shares_before, read(run).shares_after) == (None, None)


def test_end_grid_counts_runs_with_warnings(copy: Copy) -> None:
    run = copy("a")
    assert read(run).alarm is None
    for word in ("may be hacked", "may be broken", "likely hacked", "broken"):
        alarms = {"verdict": word, "more": 1}
        edit(run / "results/evaluation.json", lambda tree, alarms=alarms: {**tree, "alarms": alarms})
        assert read(run).alarm == word
    rows = dict(end_grid(compare([run])).rows)
    assert rows["runs with a warning on their completions"] == "1"


def test_runs_are_found_below_folders_and_links_are_not_followed(copy: Copy, tmp_path: Path) -> None:
    run = copy("sweep/deep/a")
    (tmp_path / "runs/link").symlink_to(run.parent)
    (tmp_path / "empty").mkdir()
    assert find([tmp_path / "runs"]) == [run]
    assert find([run, str(run), tmp_path / "runs"]) == [run]
    shutil.copytree(run, run / "inner")  # a run holds no runs
    assert find([tmp_path / "runs"]) == [run]
    for paths in ([run, tmp_path / "empty"], [tmp_path / "missing"]):
        with pytest.raises(ConfigError, match="is not a run"):
            find(paths)


FIFO = None
NEXT = {"generation": STEPS}
MILLIONS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1 or str()}'] * 9)}]\n" for i in range(1, 12))
DAMAGE: dict[str, tuple[str, str | bytes | None, str]] = {
    "a line is no JSON": ("metrics.jsonl", b"\xff\x00\n", ""),
    "a nest without end": ("metrics.jsonl", "[" * 100_000 + "\n", ""),
    "not a number": ("metrics.jsonl", json.dumps({**NEXT, "evaluation": {"reward": float("nan")}}) + "\n", ""),
    "a number as text": ("metrics.jsonl", json.dumps({**NEXT, "evaluation": {"reward": "much"}}) + "\n", ""),
    "a cost below zero": ("metrics.jsonl", json.dumps({**NEXT, "budget": {"completions": -5}}) + "\n", ""),
    "another generation": ("metrics.jsonl", json.dumps({"generation": STEPS + 1}) + "\n", ""),
    "a huge number": ("metrics.jsonl", '{"generation": 6, "evaluation": {"reward": 1' + "0" * 400 + "}}\n", ""),
    "no rows": ("metrics.jsonl", "", "no finished generation"),
    "rows from a pipe": ("metrics.jsonl", FIFO, "is not a file"),
    "a result that is a list": ("results/evaluation.json", "[]", ""),
    "a result beyond the rows": (
        "results/evaluation.json", '{"generation": 99, "before": {}, "after": {"reward": 1}}', ""
    ),
    "completions that are no table": ("results/completions/after.parquet", b"PAR1 and no more", ""),
    "a manifest that is a number": ("manifest.json", "7", ""),
    "a manifest without end": ("manifest.json", "[" * 200_000, ""),
    "GRPO, a manifest from a pipe": ("manifest.json", FIFO, "manifest.json is not a file"),
    "GRPO, a manifest without a method": ("manifest.json", "{}", "names no method"),
    "settings that stand for millions": ("config.yaml", f"a: &a [x, x]\n{MILLIONS}output_dir: *a11\n", ""),
    "settings without end": ("config.yaml", "es: " + "[" * 50_000, ""),
    "settings that are deep": ("config.yaml", "es: " + "[" * 60 + "]" * 60, "config.yaml is not YAML: it nests deeper"),
    "a long value": ("config.yaml", "es: {sigma: 1}\nseed: " + "x" * 50_000, ""),
    "settings without a method": ("config.yaml", "seed: 1\n", ""),
    "settings that do not exist": ("config.yaml", "es: {sigma: 1}\nmade_up: 1\n", ""),
    "settings that are code": ("config.yaml", "!!python/object/apply:os.system ['touch owned']\n", ""),
}  # fmt: skip


def test_damaged_runs_are_left_out(copy: Copy, tmp_path: Path) -> None:
    copy("fine")
    for seed, (what, (name, content, _)) in enumerate(DAMAGE.items(), start=1):
        file = copy(what, seed=seed, method="grpo" if what.startswith("GRPO") else "es") / name
        good = file.read_bytes() if name == "metrics.jsonl" and content else b""  # a line more, after whole ones
        file.unlink()
        if content is FIFO:
            os.mkfifo(file)
        else:
            file.write_bytes(good + (content if isinstance(content, bytes) else content.encode()))
    found = compare(tmp_path / "runs")
    assert [run.seed for group in found.groups for run in group.runs] == [0]
    left_out = {path.name: why for path, why in found.left_out}
    assert set(left_out) == set(DAMAGE)
    for what, (name, content, reason) in DAMAGE.items():
        why = left_out[what]
        assert reason in why and (Path(name).name in why or name == "config.yaml"), what
        assert name != "metrics.jsonl" or not content or f"line {STEPS + 1}" in why, what
        assert len(why) < 500
    assert not (tmp_path / "owned").exists() and not Path("owned").exists()


def test_read_raises_for_wrong_column_types(copy: Copy) -> None:
    run = copy("a")
    parquet.write(run / "results/completions/after.parquet", [{"text": 5, "example": "x"}])
    with pytest.raises(DataError, match=r"after\.parquet is damaged"):
        read(run)


def test_read_runs_no_code_named_by_a_config(copy: Copy, tmp_path: Path) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\ndef reward(**_): return []\n")
    run = copy("a", sets={"task.name": "custom", "task.rewards": [f"{evil}:reward"]})
    assert len(compare(run).groups) == 1
    assert not (tmp_path / "owned").exists()


def test_compare_lists_all_errors_if_no_run_is_readable(copy: Copy, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (copy(name) / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no run can be read") as raised:
        compare(tmp_path / "runs")
    assert str(raised.value).count("metrics.jsonl is missing") == 2


@pytest.mark.slow
def test_verdict_has_n_and_p(copy: Copy, tmp_path: Path) -> None:
    copy_both(copy, 6, lambda step, seed: step + 0.1 * seed, lambda step, seed: 0.01 * seed * seed)
    one, five, six = (
        report.summary(compare([p for p in (tmp_path / "runs").iterdir() if int(p.name[-1]) < n], "completions"))[0]
        for n in (1, 5, 6)
    )
    assert "not tested: " in one and "significant" not in one and "n = 1 and 1 runs" in one
    assert "not significant: ES against GRPO" in five
    p, least = (
        "n = 5 shared seeds, exact paired permutation p = 0.0625",
        "with 5 seeds the smallest possible p is 0.0625",
    )
    assert f"{p}; {least}" in five
    assert six.startswith("At equal completions (72): ES is above GRPO: +")
    assert "n = 6 shared seeds, exact paired permutation p = 0.0312" in six


def test_summary_says_when_the_leader_depends_on_the_budget(copy: Copy, tmp_path: Path) -> None:
    copy("es", reward=float)
    copy("grpo", method="grpo", reward=lambda step: 1.5 * step,
         cost=lambda step: replace(step_cost(step), wall_seconds=1.0))  # fmt: skip
    lines = report.summary(compare(tmp_path / "runs"))
    assert any("depends on the budget" in line and "ES by wall" in line and "GRPO by tokens" in line for line in lines)
    alone = compare(tmp_path / "runs/es")
    assert report.summary(alone)[0].startswith("There is only one group")
    assert shown(alone).startswith("There is only one group") and shown(alone).count("There is only one group") == 1


def has_color(image: Any, color: str) -> bool:
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return bool((np.abs(image[..., :3] - wanted).max(axis=-1) < 0.02).any())


def test_write_writes_the_numbers_of_each_seed_and_figures_of_every_group(copy: Copy, tmp_path: Path) -> None:
    copy_both(copy, 3, lambda step, seed: float(step * (seed + 1)), lambda step, seed: float(step + seed),
              cost=lambda step: step_cost(step, 50.0))  # fmt: skip
    written = report.write(compare(tmp_path / "runs"), tmp_path / "out")
    drawn = [*(f"reward_by_{m}.png" for m in MATCHINGS), "reward_by_divergence.png"]
    assert [p.name for p in written] == ["comparison.md", "comparison.json", *drawn]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in written)
    tree = json.loads((tmp_path / "out/comparison.json").read_text())
    assert tree["format_version"] == 1
    es = tree["groups"][0]
    assert [run["seed"] for run in es["runs"]] == [0, 1, 2]
    assert [point["step"] for point in es["runs"][2]["points"]] == [0, 2, 4, 6]
    assert es["runs"][2]["points"][-1]["cost"]["generated_tokens"] == 6 * 300
    assert es["end"]["reward"]["mean"] == 12.0
    page = (tmp_path / "out/comparison.md").read_text()
    assert "hacked share" in page[page.index("|   | ES | GRPO |") :]
    low, high = stats.t.interval(0.95, 2, 12.0, stats.sem([6.0, 12.0, 18.0]))
    for text in (
        "| KL from the base model, exact (nats per token) | 0.2 | 0.2 |",
        "| distance moved, L2 | 1.5 | 1.5 |",
        "| FLOPs | 6 G | 300 G |",
        "| device time | 3 s | 2.5 min |",
        "| seconds per step | 0.5 | 25 |",
        f"| reward \\[95 %\\] | 12 \\[{low:.4g}, {high:.4g}\\] | 7 \\[",
    ):
        assert text in page
    for name in drawn:
        image = imread(tmp_path / "out" / name)
        assert f"]({name})" in page and image.shape[1] == 1080 and image[..., :3].std() > 0.01
        assert has_color(image, figures.COLORS[0]) and has_color(image, figures.COLORS[1])
    assert len({figures.LINES[i] for i in range(4)}) == 4


def test_untrusted_names_are_escaped(copy: Copy, tmp_path: Path) -> None:
    evil = "x|\n\x1b[2J<b>![](http://e) $x$ _"
    for run in (copy("a", sets={"model.name": evil}), copy("b", sets={"model.name": "tiny"})):
        edit_rows(run, lambda row: {**row, "evaluation": row["evaluation"] and {**row["evaluation"], evil: 1.0}})
        edit(run / "results/evaluation.json", lambda tree: {**tree, "after": {**tree["after"], evil: 2.0}})
    written = report.write(compare(tmp_path / "runs", measure=evil), tmp_path / "out")
    assert all(path.parent == tmp_path / "out" and path.name.isascii() for path in written)
    page = (tmp_path / "out/comparison.md").read_text()
    assert "\x1b" not in page and "<b>" not in page.replace("\\<b\\>", "") and "![](" not in page
    assert r"x\|\\n" in page
    assert len(list((tmp_path / "out").iterdir())) == len(written)


@pytest.mark.slow
def test_figure_grows_with_its_legend(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    height = imread(figures.draw(compare(tmp_path / "runs", "wall"), tmp_path)["wall"]).shape[0]
    for i in range(6):
        copy(f"b{i}", sets={"es.learning_rate": 0.1 + i})
    many = compare(tmp_path / "runs", "wall")
    assert imread(figures.draw(many, tmp_path)["wall"]).shape[0] > height
    line = report.summary(many)[0]
    assert "has the highest mean, not significantly above" in line and line.count("not tested") == 6


def test_draw_skips_the_divergence_figure_without_data(copy: Copy, tmp_path: Path) -> None:
    run = copy("a")
    edit_rows(run, lambda row: {**row, "divergence": None})
    edit(run / "results/evaluation.json", lambda tree: {**tree, "divergence": None, "distance": None})
    assert set(figures.draw(compare(run), tmp_path)) == set(MATCHINGS)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_matched_budget_is_drawn_only_if_groups_are_compared(
    groups: int, copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(groups):
        copy(f"run{i}", sets={"es.learning_rate": 0.1 + i})
    names, rights, dress, draw = list[str](), list[float](), figures._dress, figures._draw
    monkeypatch.setattr(figures, "_dress", lambda *given: (names.extend(given[-1]), dress(*given)))
    monkeypatch.setattr(figures, "_draw", lambda *given: (rights.append(given[3]), draw(*given)))
    figures.draw(compare(tmp_path / "runs", "wall"), tmp_path)
    assert ("matched budget" in names) == (groups > 1)
    assert rights[0] > 0.9 if groups == 1 else 0.78 <= rights[0] <= 0.9


def test_spread_keeps_labels_apart() -> None:
    crowded = sorted(figures._spread([1.0, 1.0, 0.99]))
    assert crowded[-1] <= 1.0 and min(np.diff(crowded)) >= figures.NEAREST - 1e-12
    places = figures._spread([0.5, 0.49, 0.9, 0.51])
    assert sorted(places)[1] - sorted(places)[0] >= figures.NEAREST - 1e-12
    assert places[1] < places[0] < places[3] and places[2] == 0.9


def test_counted_and_duration_are_short() -> None:
    texts = ["0", "9,999", "12.3 k", "1.5 P", "1e+30"]
    assert [counted(value) for value in (0, 9_999, 12_300, 1.5e15, 1e30)] == texts
    assert [duration(seconds) for seconds in (3.0, 119, 150, 9000)] == ["3 s", "119 s", "2.5 min", "2.5 h"]
