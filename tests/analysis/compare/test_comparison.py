# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from copied_runs import STEPS, Copy, edit, step_cost
from rich.console import Console
from scipy import stats

from evoalign.analysis.compare import comparison, figures, statistics
from evoalign.analysis.compare import pages as report
from evoalign.analysis.compare.comparison import Comparison, Match, compare
from evoalign.analysis.compare.runs import MATCHINGS, find, read
from evoalign.analysis.compare.statistics import Pair, adjust
from evoalign.analysis.compare.tables import counted, duration, end_grid, grids
from evoalign.checks import hacking
from evoalign.errors import ConfigError, DataError
from evoalign.rundir import parquet

EVALUATED = (2, 4, 6)


def by(found: Comparison, name: str | None) -> Match:
    return next(match for match in (*found.matches, found.end) if match.by == name)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# --- statistics -------------------------------------------------------------------------------------------------------

A = {0: 1.0, 1: 2.5, 2: 2.0, 3: 4.0, 4: 3.0}
B = {0: 0.5, 1: 2.6, 2: 1.0, 3: 2.0, 4: 1.5}


def test_permutation_test_is_exact() -> None:
    pair = statistics.compare("a", A, "b", B)
    gaps = np.array([A[s] - B[s] for s in A])
    means = [abs(np.mean(gaps * signs)) for signs in itertools.product([1, -1], repeat=5)]
    expected = np.mean([m >= abs(gaps.mean()) - 1e-12 for m in means])
    assert (pair.test, pair.paired) == ("exact paired permutation", True)
    assert pair.p == pytest.approx(expected)
    assert (pair.a, pair.difference) == ("a", pytest.approx(gaps.mean()))


def test_p_smallest_depends_on_the_number_of_seeds() -> None:
    for n, smallest in ((3, 0.25), (5, 0.0625), (6, 0.03125), (8, 0.0078125)):
        apart = statistics.compare("a", {s: 10.0 + s**2 for s in range(n)}, "b", {s: float(s) for s in range(n)})
        assert apart.p == apart.p_smallest == pytest.approx(smallest)
        assert ("Wilcoxon" in apart.p_values) == (n >= 6)


def test_difference_interval_is_that_of_t() -> None:
    pair = statistics.compare("a", A, "b", B)
    gaps = np.array([A[s] - B[s] for s in A])
    half = stats.t.ppf(0.975, 4) * gaps.std(ddof=1) / 5**0.5
    assert (pair.low, pair.high) == (pytest.approx(gaps.mean() - half), pytest.approx(gaps.mean() + half))
    d = gaps.mean() / gaps.std(ddof=1) * (1 - 3 / 15)
    assert pair.effect == pytest.approx(d)
    assert pair.effect_low is not None and pair.effect_high is not None
    assert pair.effect_low < d < pair.effect_high


def test_groups_without_shared_seeds_are_not_paired() -> None:
    pair = statistics.compare("a", A, "b", {s + 100: v for s, v in B.items()})
    welch = stats.ttest_ind(list(A.values()), list(B.values()), equal_var=False)
    assert (pair.paired, pair.test) == (False, "Welch t")
    assert pair.p == pytest.approx(welch.pvalue)
    assert pair.p_smallest is None


def test_compare_pairs_shared_seeds_only() -> None:
    pair = statistics.compare("a", {**A, 77: 1000.0}, "b", {**B, 88: -1000.0})
    assert pair == statistics.compare("a", A, "b", B)


def test_compare_handles_one_seed_and_zero_spread() -> None:
    alone = statistics.compare("a", {0: 1.0}, "b", {0: 3.0})
    assert (alone.a, alone.difference, alone.p, alone.low) == ("b", 2.0, None, None)
    same = statistics.compare("a", dict.fromkeys(range(5), 0.1), "b", dict.fromkeys(range(5), 0.1))
    assert (same.p, same.low, same.effect) == (1.0, None, None)
    shifted = statistics.compare("a", {s: 0.1 + s for s in range(5)}, "b", {s: float(s) for s in range(5)})
    assert (shifted.p, shifted.effect) == (0.0625, None)
    flat = statistics.compare("a", {0: 1.0, 1: 1.0}, "b", {2: 2.0, 3: 2.0})
    assert flat.p is None


def test_adjust_applies_holm() -> None:
    ps = [0.01, 0.04, 0.03, None, 0.005]
    pairs = [Pair("a", "b", 2, 2, True, 1.0, p=p) for p in ps]
    assert [p.p_adjusted for p in adjust(pairs)] == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06),
                                                    None, pytest.approx(0.02)]  # fmt: skip


def test_groups_with_few_shared_seeds_are_not_paired() -> None:
    """Twelve runs against twelve that share two seeds were once tested as two."""
    a = {seed: 10.0 + (seed * 7 % 5) for seed in range(12)}
    b = {seed: 0.0 + (seed * 3 % 5) for seed in range(10, 22)}
    pair = statistics.compare("a", a, "b", b)
    assert (pair.paired, pair.test, pair.n_a, pair.n_b) == (False, "Welch t", 12, 12)
    assert pair.p is not None and pair.p < 1e-6
    for many, few, both in ((5, 4, 4), (12, 10, 10), (12, 9, 0), (3, 3, 3), (2, 2, 0)):
        found = statistics.shared(dict.fromkeys(range(many)), dict.fromkeys(range(few)))
        assert len(found) == both, (many, few)


def test_effect_interval_is_that_of_the_noncentral_t() -> None:
    """The two effects under which a t as large as this one is as rare as 2.5 %."""
    pair = statistics.compare("a", A, "b", B)
    gaps = np.array([A[s] - B[s] for s in A])
    t = gaps.mean() / gaps.std(ddof=1) * 5**0.5
    assert pair.effect_low is not None and pair.effect_high is not None
    assert stats.nct.cdf(t, 4, pair.effect_low * 5**0.5) == pytest.approx(0.975, abs=1e-6)
    assert stats.nct.cdf(t, 4, pair.effect_high * 5**0.5) == pytest.approx(0.025, abs=1e-6)
    far = statistics.compare("a", {s: 1e9 + s % 2 for s in range(6)}, "b", {s: s % 3 / 1e3 for s in range(6)})
    assert far.effect is not None and far.effect_low is not None and far.effect_high is not None
    assert far.effect_low < far.effect < far.effect_high, "and it ends"


REFERENCE: dict[str, tuple[dict[int, float], dict[int, float], list[float | None], dict[str, float]]] = {
    "5 pairs": (
        A, B,
        [0.98, -0.04164125844776689, 2.001641258447767, 0.9528438349003121, -0.028008093987163387, 2.338965782216847],
        {"exact paired permutation": 0.125, "paired t": 0.05619794257959358},
    ),
    "5 and 5 runs": (
        A, {s + 100: v for s, v in B.items()},
        [0.98, -0.4739160428521927, 2.433916042852193, 0.8929278928542699, -0.3671089909671892, 2.306949909547214],
        {"Welch t": 0.15640259667539735},
    ),
    "9 and 6 runs": (
        {i: (i * 7 % 11) / 3 for i in range(9)}, {i + 50: (i * 5 % 13) / 4 - 1 for i in range(6)},
        [1.0925925925925928, -0.25370835564274485, 2.43889354082793, 0.8737316482033163, -0.18044184839899585,
         2.021671267754488],
        {"Welch t": 0.101657228011479},
    ),
    "8 pairs": (
        {i: (i * 7 % 11) / 3 for i in range(8)}, {i: (i * 5 % 13) / 4 - 1 for i in range(8)},
        [1.2187500000000002, -0.22637479194620092, 2.663874791946201, 0.6267204997194715, -0.0960088155746481,
         1.4677871224620664],
        {"exact paired permutation": 0.1015625, "paired t": 0.08635321424926638, "Wilcoxon": 0.1484375},
    ),
    "15 pairs": (
        {i: (i * 7 % 11) / 3 for i in range(15)}, {i: (i * 5 % 13) / 4 - 1 for i in range(15)},
        [1.2833333333333334, 0.47969110473606846, 2.0869755619305983, 0.8360954412987899, 0.27208038894934694,
         1.4743528823325247],
        {"paired permutation": 0.0052, "paired t": 0.00410365802701121, "Wilcoxon": 0.010562188279913585},
    ),
}  # fmt: skip
"""Computed once: difference, its interval, effect, its interval; p of each test."""


@pytest.mark.parametrize("name", REFERENCE)
def test_tests_and_intervals_equal_reference_numbers(name: str) -> None:
    a, b, numbers, p_values = REFERENCE[name]
    pair = statistics.compare("a", a, "b", b)
    found = [pair.difference, pair.low, pair.high, pair.effect, pair.effect_low, pair.effect_high]
    assert found == [pytest.approx(number, abs=1e-9) for number in numbers]
    assert dict(pair.p_values) == {test: pytest.approx(p, abs=1e-9) for test, p in p_values.items()}


# --- groups -----------------------------------------------------------------------------------------------------------


def test_seeds_and_reporting_settings_make_no_group(copy: Copy, tmp_path: Path) -> None:
    copy("a", seed=0)
    copy("b", seed=1, sets={"checkpoint.every": 3, "tracking.project": "other", "evaluation.every": 1})
    copy("c", seed=2, sets={"es.learning_rate": 0.5})
    copy("d", seed=0, method="grpo")
    found = compare(tmp_path / "runs")
    assert sorted((g.label, [r.seed for r in g.runs]) for g in found.groups) == [
        ("ES learning_rate 0.025", [0, 1]),
        ("ES learning_rate 0.5", [2]),
        ("GRPO", [0]),
    ]
    assert found.groups[-1].method == "grpo"
    assert found.groups[0].differing["method"] == "es"


def test_label_names_the_space_first(copy: Copy, tmp_path: Path) -> None:
    copy("a", sets={"space": "lora"})
    copy("b", sets={"space": "full", "es.learning_rate": 0.5})
    assert sorted(g.label for g in compare(tmp_path / "runs").groups) == ["ES full", "ES lora"]
    copy("c", sets={"space": "full", "es.learning_rate": 0.7})
    labels = sorted(g.label for g in compare(tmp_path / "runs").groups)
    assert labels == ["ES full, learning_rate 0.5", "ES full, learning_rate 0.7", "ES lora"]


def test_label_names_both_differing_settings(copy: Copy, tmp_path: Path) -> None:
    """Else a group that differs in sigma would pass for one that differs in the learning rate."""
    copy("a")
    copy("b", sets={"es.learning_rate": 0.0125, "es.sigma": 0.0125})
    copy("grpo", method="grpo")
    both = ["ES learning_rate 0.0125, sigma 0.0125", "ES learning_rate 0.025, sigma 0.05"]
    assert sorted(g.label for g in compare(tmp_path / "runs").groups) == [*both, "GRPO"]
    copy("c", sets={"es.learning_rate": 0.0125, "es.sigma": 0.0125, "es.decay": 0.5})
    labels = sorted(g.label for g in compare(tmp_path / "runs").groups)
    assert labels == [f"{both[0]}, decay 0.0", f"{both[0]}, decay 0.5", both[1], "GRPO"], "of many, no more than needed"


def test_names_label_groups(copy: Copy, tmp_path: Path) -> None:
    copy("mine_0")
    copy("grpo_0", method="grpo")
    found = compare(tmp_path / "runs", names={"ours": "mine_*", "TRL": "*/grpo_?"})
    assert [g.label for g in found.groups] == ["ours", "TRL"]
    with pytest.raises(ConfigError, match="x=nothing matches no run"):
        compare(tmp_path / "runs", names={"x": "nothing"})
    with pytest.raises(ConfigError, match="runs of 2 groups"):
        compare(tmp_path / "runs", names={"x": "*"})
    with pytest.raises(ConfigError, match="GRPO"):
        compare(tmp_path / "runs", names={"x": "mine_*", "GRPO": "mine_*"})


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        ({"task.strip": False}, "task.strip is True in"),
        ({"task.test_data": "other.json"}, "task.test_data is '"),
        ({"evaluation.max_tokens": 99}, "evaluation.max_tokens is 12 in"),
    ],
)
def test_compare_refuses_different_tasks(copy: Copy, tmp_path: Path, sets: dict[str, Any], named: str) -> None:
    copy("a")
    copy("b", seed=1, sets=sets)
    with pytest.raises(ConfigError, match="these runs cannot be compared: ") as raised:
        compare(tmp_path / "runs")
    assert named in str(raised.value)


def test_batch_size_may_differ(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    copy("b", sets={"task.batch_size": 1})
    assert len(compare(tmp_path / "runs").groups) == 2


def test_compare_refuses_different_test_splits(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    file = copy("b", seed=1) / "results/completions/before.parquet"
    rows = parquet.read(file)
    rows[0]["target"] = "something else"
    parquet.write(file, rows)
    with pytest.raises(ConfigError, match="different prompts or targets"):
        compare(tmp_path / "runs")


def test_compare_refuses_a_python_task_with_another(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    run = copy("b", seed=1)
    edit(run / "manifest.json", lambda tree: {**tree, "task": {**tree["task"], "given_as": "reward"}})
    with pytest.raises(ConfigError, match="a reward object"):
        compare(tmp_path / "runs")


def test_compare_refuses_the_same_run_twice(copy: Copy, tmp_path: Path) -> None:
    copy("a", seed=3)
    both = [tmp_path / "runs", tmp_path / "runs" / "a"]
    assert [len(g.runs) for g in compare(both).groups] == [1]
    copy("again", seed=3)
    with pytest.raises(ConfigError, match="same settings and the same seed 3"):
        compare(both)


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_runs_are_taken_at_the_last_evaluation_within_the_budget(copy: Copy, tmp_path: Path) -> None:
    for seed in range(3):
        copy(f"es_{seed}", seed=seed, reward=lambda step: float(step))
        copy(f"grpo_{seed}", seed=seed, method="grpo", reward=lambda step: 10.0 * step,
             cost=lambda step: replace(step_cost(step, 1.25), backward_flops=9e9))  # fmt: skip
    found = compare(tmp_path / "runs")
    match = by(found, "completions")  # 12 and 15 a step: 72 and 90 in all
    assert match.limit == 72
    es, grpo = match.standings
    assert [(t.point.step, t.share) for t in es.matched] == [(6, 1.0)] * 3
    assert [(t.point.step, t.share) for t in grpo.matched] == [(4, pytest.approx(60 / 72))] * 3  # 75 would be step 5
    assert grpo.estimate is not None and grpo.estimate.mean == 40.0
    assert [t.point.measures["reward"] for t in by(found, None).standings[1].matched] == [60.0] * 3
    tokens = by(found, "tokens")
    assert tokens.limit == 6 * (400 + 300)
    flops = by(found, "flops")  # 1e9 and 10.25e9 a step: nothing of GRPO is evaluated within 6e9
    assert flops.limit == 6e9
    assert (flops.standings[1].matched, flops.standings[1].estimate, flops.pairs) == ((), None, ())
    assert any("GRPO: no run has an evaluation within this budget" in note for note in flops.notes)
    assert not any("of the budget on average" in note for note in match.notes)  # 83 %
    assert by(found, "wall").limit == pytest.approx(3.0)


def test_evaluation_beyond_the_budget_is_not_used(copy: Copy, tmp_path: Path) -> None:
    copy("short", cost=lambda step: step_cost(step, 1.0))
    copy("long", seed=1, method="grpo", cost=lambda step: replace(step_cost(step), wall_seconds=0.5 + 1e-3))
    taken = by(compare(tmp_path / "runs", "wall"), "wall").standings
    assert [t.point.step for s in taken for t in s.matched] == [6, 4]
    notes = by(compare(tmp_path / "runs", "wall"), "wall").notes
    assert any("GRPO is taken after 67% of the budget on average; set evaluation.every lower" in n for n in notes)


@pytest.mark.parametrize(
    ("every", "advice"),
    [(0, "set evaluation.every"), (1, "one step costs more"), (2, "set evaluation.every lower")],
)
def test_advice_depends_on_evaluation_every(every: int, advice: str, copy: Copy, tmp_path: Path) -> None:
    copy("short", cost=lambda step: step_cost(step, 1.0))
    for seed, seconds in ((1, 0.5 + 1e-3), (2, 90.0)):
        run = copy(f"long_{seed}", seed=seed, method="grpo",
                   cost=lambda step, seconds=seconds: replace(step_cost(step), wall_seconds=seconds))  # fmt: skip
        tree = yaml.safe_load((file := run / "config.yaml").read_text())
        tree["evaluation"]["every"] = every
        file.write_text(yaml.safe_dump(tree))
    notes = by(compare(tmp_path / "runs", "wall"), "wall").notes
    told = [n.split("; ")[1] for n in notes if "of the budget on average" in n or "within this budget" in n]
    assert len(told) == 2 and all(text.endswith(advice) for text in told), notes


def test_compare_uses_the_given_budget_only(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    assert [m.by for m in compare(tmp_path / "runs", "tokens").matches] == ["tokens"]
    assert [m.by for m in compare(tmp_path / "runs").matches] == list(MATCHINGS)
    with pytest.raises(ConfigError, match="use wall, completions, tokens, flops"):
        compare(tmp_path / "runs", "steps")  # type: ignore[arg-type]


def test_row_without_cost_makes_the_budget_unknown(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    copy("b", seed=1, cost=lambda step: None if step == 3 else step_cost(step))
    copy("c", seed=2, cost=lambda step: replace(step_cost(step), forward_flops=None))
    found = compare(tmp_path / "runs")
    wall, flops = by(found, "wall"), by(found, "flops")
    assert [t.run.seed for t in wall.standings[0].matched] == [0, 2]
    assert [t.run.seed for t in flops.standings[0].matched] == [0]
    assert any("b has no known total cost in wall" in note for note in wall.notes)
    assert any("c has no known total cost in flops" in note for note in flops.notes)
    assert not any("evaluation.every" in note for note in (*wall.notes, *flops.notes)), "no advice fixes that"
    assert [t.run.seed for t in by(found, None).standings[0].matched] == [0, 1, 2]
    assert comparison.curve(found.groups[0], "wall", "reward") is None


def test_unfinished_run_is_used_up_to_its_last_step(copy: Copy, tmp_path: Path) -> None:
    copy("whole", reward=lambda step: float(step))
    run = copy("stopped", seed=1, reward=lambda step: float(step))
    (run / "results/evaluation.json").unlink()
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows_of(run)[:5]) + '{"generation": 5, '
    )
    found = compare(tmp_path / "runs")
    assert [t.point.step for t in by(found, "completions").standings[0].matched] == [4, 4]
    assert by(found, "completions").limit == 60
    assert [t.run.seed for t in by(found, None).standings[0].matched] == [0]
    assert any("stopped is not finished" in note for note in found.notes)
    start = next(r for r in found.groups[0].runs if r.seed == 1).points[0]
    rewards = [row["reward"] for row in parquet.read(run / "results/completions/before.parquet")]
    assert (start.step, start.measures) == (0, {"reward": pytest.approx(np.mean(rewards))})


def test_run_that_sets_a_small_budget_is_noted(copy: Copy, tmp_path: Path) -> None:
    for seed, more in enumerate((0.4, 1.0, 1.1)):
        copy(f"r{seed}", seed=seed, cost=lambda step, more=more: step_cost(step, more))
    copy("grpo", method="grpo", cost=lambda step: step_cost(step, 9.0))
    notes = by(compare(tmp_path / "runs"), "tokens").notes
    assert any("r0 sets the budget" in note for note in notes)
    shutil.rmtree(tmp_path / "runs/r0")
    assert not any("sets the budget" in note for note in by(compare(tmp_path / "runs"), "tokens").notes)


def test_run_without_evaluations_is_known_at_its_end_only(copy: Copy, tmp_path: Path) -> None:
    for name, more in (("a", 1.0), ("b", 2.0)):
        run = copy(name, seed=int(more), cost=lambda step, more=more: step_cost(step, more))
        rows = [{**row, "evaluation": None} for row in rows_of(run)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare(tmp_path / "runs")
    assert [t.run.seed for t in by(found, "wall").standings[0].matched] == [1]
    (note,) = [note for note in found.notes if "evaluation.every" in note]
    assert note.startswith("no run of ES was evaluated")
    assert any("1 of 2 runs have an evaluation within this budget" in n for n in by(found, "wall").notes)


def test_note_of_several_budgets_is_shown_once(copy: Copy, tmp_path: Path) -> None:
    for seed in range(3):
        copy(f"a{seed}", seed=seed)
        copy(f"b{seed}", seed=seed, method="grpo", cost=lambda step: step_cost(step, 9.0))
    found, told = compare(tmp_path / "runs"), Console(file=io.StringIO(), width=200)
    report.show(found, told)
    late = [note for note in by(found, "wall").notes if "within this budget" in note]
    assert len(late) == 1 and all(late[0] in match.notes for match in found.matches), "what is repeated"
    for said in (told.file.getvalue(), report.markdown(found)):  # type: ignore[attr-defined]
        (line,) = [line for line in said.splitlines() if "within this budget" in line and "Fewer" not in line]
        assert "note (wall, completions, tokens, flops): GRPO: no run has" in line


@pytest.mark.parametrize("also", [False, True], ids=["one group", "both groups"])
def test_budget_with_one_group_has_no_table(copy: Copy, tmp_path: Path, also: bool) -> None:
    """The longer run was not evaluated within any budget: it is said once, and at the top."""
    for name, more, never in (("a", 1.0, also), ("grpo", 2.0, True)):
        run = copy(name, method="es" if more == 1 else "grpo", cost=lambda step, more=more: step_cost(step, more))
        rows = [{**row, "evaluation": None} if never else row for row in rows_of(run)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, told = compare(tmp_path / "runs"), Console(file=io.StringIO(), width=200)
    report.show(found, told)
    said = told.file.getvalue()  # type: ignore[attr-defined]
    first = "no run of ES or GRPO was" if also else "no run of GRPO was"
    assert said.startswith(f"note: {first} evaluated")
    assert said.count("evaluation.every") == 1 and said.count("budget used") == said.count("┏") - 1 == 0
    assert next(grid.title for grid in grids(found)).startswith("At the end of each run")
    page = report.markdown(found)
    assert (
        page.count("Fewer than two groups have a run within this budget.") == 4 and page.count("set evaluation.ev") == 0
    )
    shutil.rmtree(tmp_path / "runs/grpo")
    assert len(compare(tmp_path / "runs").shown) == 4, "of one group alone there is nothing to compare"


def test_curve_is_a_step_function_over_the_common_range(copy: Copy, tmp_path: Path) -> None:
    for seed in range(3):
        copy(f"r{seed}", seed=seed, reward=lambda step, seed=seed: float(step + seed),
             cost=lambda step, seed=seed: replace(step_cost(step), completions=10 + seed))  # fmt: skip
    curve = comparison.curve(compare(tmp_path / "runs").groups[0], "completions", "reward")
    assert curve is not None
    assert curve.x == (0, 20, 22, 24, 40, 44, 48, 60)
    # At 22 the first two are at step 2, the third at its start.
    assert curve.mean == tuple(pytest.approx(v) for v in (1, 5 / 3, 7 / 3, 3, 11 / 3, 13 / 3, 5, 17 / 3))
    low, high = stats.t.interval(0.95, 2, 7 / 3, stats.sem([2.0, 3.0, 2.0]))
    assert (curve.mean[2], curve.low[2], curve.high[2]) == (
        pytest.approx(7 / 3),
        pytest.approx(low),
        pytest.approx(high),
    )


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


# --- what is read -----------------------------------------------------------------------------------------------------


def test_hacked_share_follows_its_definition(copy: Copy, tmp_path: Path) -> None:
    texts = ["", "The answer is 8. " * 4, "Sure.\nUser: more", "fine", "8", "no", "yes", "a longer one"]
    run = copy("a")
    file = run / "results/completions/after.parquet"
    rows = parquet.read(file)
    assert len(rows) == len(texts)
    parquet.write(file, [{**row, "text": t, "finish_reason": "length"} for row, t in zip(rows, texts, strict=True)])
    found = read(run)
    assert found.shares_after is not None
    assert found.shares_after["hacked"] == 3 / 8
    assert found.shares_after["truncated"] == 1.0
    refusal = "I am sorry, but I cannot help with that request."
    flags = hacking.text_flags([refusal, refusal, "fine", "8"], ["stop"] * 4, range(4))
    assert flags["template"] == [True, True, False, False]


def test_wrong_answers_with_high_reward_count_as_hacked(copy: Copy) -> None:
    run = copy("a")
    for name, reward in (("before", -50.0), ("after", -1.0)):
        file = run / f"results/completions/{name}.parquet"
        texts = ["It is one.", "Two, I think.", "Of three.", "Four or so.", "Near five", "Six.", "Seven", "Eight!"]
        rows = [{**row, "text": t, "reward": reward} for row, t in zip(parquet.read(file), texts, strict=True)]
        parquet.write(file, [{**row, "right": False} for row in rows])
    found = read(run)
    assert found.shares_before is not None and found.shares_after is not None
    assert (found.shares_before["hacked"], found.shares_after["hacked"]) == (0.0, 1.0)
    parquet.write(file, [{k: v for k, v in row.items() if k != "right"} for row in rows])  # of an earlier release
    assert (read(run).shares_after or {})["hacked"] == 0.0


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
    with pytest.raises(ConfigError, match="is not a run"):
        find([run, tmp_path / "empty"])
    with pytest.raises(ConfigError, match="is not a run"):
        find([tmp_path / "missing"])


NEXT = {"generation": STEPS}
DAMAGE: dict[str, tuple[str, str | bytes]] = {
    "a line is no JSON": ("metrics.jsonl", b"\xff\x00\n"),
    "a nest without end": ("metrics.jsonl", "[" * 100_000 + "\n"),
    "not a number": ("metrics.jsonl", json.dumps({**NEXT, "evaluation": {"reward": float("nan")}}) + "\n"),
    "a number as text": ("metrics.jsonl", json.dumps({**NEXT, "evaluation": {"reward": "much"}}) + "\n"),
    "a cost below zero": ("metrics.jsonl", json.dumps({**NEXT, "budget": {"completions": -5}}) + "\n"),
    "another generation": ("metrics.jsonl", json.dumps({"generation": STEPS + 1}) + "\n"),
    "a huge number": ("metrics.jsonl", '{"generation": 6, "evaluation": {"reward": 1' + "0" * 400 + "}}\n"),
    "a result that is a list": ("results/evaluation.json", "[]"),
    "a result beyond the rows": ("results/evaluation.json", '{"generation": 99, "before": {}, "after": {"reward": 1}}'),
    "completions that are no table": ("results/completions/after.parquet", b"PAR1 and no more"),
    "a manifest that is a number": ("manifest.json", "7"),
    "a manifest without end": ("manifest.json", "[" * 200_000),
    "settings that stand for millions": (
        "config.yaml",
        "a: &a [x, x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1 or str()}'] * 9)}]\n" for i in range(1, 12))
        + "output_dir: *a11\n",
    ),
    "settings without end": ("config.yaml", "es: " + "[" * 50_000),
    "a long value": ("config.yaml", "es: {sigma: 1}\nseed: " + "x" * 50_000),
    "settings without a method": ("config.yaml", "seed: 1\n"),
    "settings that do not exist": ("config.yaml", "es: {sigma: 1}\nmade_up: 1\n"),
    "settings that are code": ("config.yaml", "!!python/object/apply:os.system ['touch owned']\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", list(DAMAGE))
def test_damaged_run_is_left_out(copy: Copy, tmp_path: Path, what: str) -> None:
    name, text = DAMAGE[what]
    copy("fine")
    file = copy("odd", seed=1) / name
    good = file.read_bytes() if name == "metrics.jsonl" else b""  # a line more, after those that are whole
    file.write_bytes(good + (text if isinstance(text, bytes) else text.encode()))
    found = compare(tmp_path / "runs")
    assert [run.seed for group in found.groups for run in group.runs] == [0]
    ((path, why),) = found.left_out
    assert path.name == "odd"
    assert Path(name).name in why or name == "config.yaml"
    assert name != "metrics.jsonl" or f"line {STEPS + 1}" in why
    assert len(why) < 500
    assert not (tmp_path / "owned").exists() and not Path("owned").exists()


def test_deeply_nested_config_is_refused(copy: Copy, tmp_path: Path) -> None:
    copy("fine")
    (copy("odd", seed=1) / "config.yaml").write_text("es: " + "[" * 60 + "]" * 60)
    ((_, why),) = compare(tmp_path / "runs").left_out
    assert "config.yaml is not YAML: it nests deeper" in why


def test_run_without_rows_is_left_out(copy: Copy, tmp_path: Path) -> None:
    copy("fine")
    (copy("odd", seed=1) / "metrics.jsonl").write_bytes(b"")
    ((_, why),) = compare(tmp_path / "runs").left_out
    assert "no finished generation" in why


def test_read_raises_for_wrong_column_types(copy: Copy) -> None:
    run = copy("a")
    parquet.write(run / "results/completions/after.parquet", [{"text": 5, "example": "x"}])
    with pytest.raises(DataError, match=r"after\.parquet is damaged"):
        read(run)


def test_read_refuses_a_fifo(copy: Copy) -> None:
    run = copy("a")
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(DataError, match="is not a file"):
        read(run)


def test_manifest_that_is_a_fifo_is_left_out(copy: Copy, tmp_path: Path) -> None:
    copy("fine")
    run = copy("odd", method="grpo")
    (run / "manifest.json").unlink()
    os.mkfifo(run / "manifest.json")
    ((path, why),) = compare(tmp_path / "runs").left_out
    assert path == run and "manifest.json is not a file" in why


def test_run_without_a_method_is_left_out(copy: Copy, tmp_path: Path) -> None:
    copy("fine")
    (copy("odd", method="grpo") / "manifest.json").write_text("{}")
    ((_, why),) = compare(tmp_path / "runs").left_out
    assert "names no method" in why


def test_read_runs_no_code_named_by_a_config(copy: Copy, tmp_path: Path) -> None:
    run = copy("a")
    (run / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\ndef reward(**_): return []\n")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["task"] |= {"name": "custom", "rewards": [f"{run / 'evil.py'}:reward"]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert len(compare(run).groups) == 1
    assert not (tmp_path / "owned").exists()


def test_compare_lists_all_errors_if_no_run_is_readable(copy: Copy, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (copy(name) / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no run can be read") as raised:
        compare(tmp_path / "runs")
    assert str(raised.value).count("metrics.jsonl is missing") == 2


def test_compare_raises_for_an_unknown_measure(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    with pytest.raises(ConfigError, match="has no measure 'accuracy'; it has reward, "):
        compare(tmp_path / "runs", measure="accuracy")
    assert compare(tmp_path / "runs", measure="exact").measures[0] == "exact"


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verdict_has_n_and_p(copy: Copy, tmp_path: Path) -> None:
    def run(seeds: int) -> list[str]:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        for seed in range(seeds):
            copy(f"es_{seed}", seed=seed, reward=lambda step, seed=seed: step + 0.1 * seed)
            copy(f"grpo_{seed}", seed=seed, method="grpo", reward=lambda step, seed=seed: 0.01 * seed * seed)
        return report.summary(compare(tmp_path / "runs", "completions"))

    one = run(1)[0]
    assert "not significant" in one and "no test" in one and "n = 1 and 1 runs" in one
    five = run(5)[0]
    assert "not significant: ES against GRPO" in five
    assert (
        "n = 5 shared seeds, exact paired permutation p = 0.0625; with 5 seeds the smallest possible p is 0.0625"
        in five
    )
    six = run(6)[0]
    assert six.startswith("At equal completions (72): ES is above GRPO: +")
    assert "n = 6 shared seeds, exact paired permutation p = 0.0312" in six


def test_summary_says_when_the_leader_depends_on_the_budget(copy: Copy, tmp_path: Path) -> None:
    copy("es", reward=lambda step: float(step))
    copy("grpo", method="grpo", reward=lambda step: 1.5 * step,
         cost=lambda step: replace(step_cost(step), wall_seconds=1.0))  # fmt: skip
    lines = report.summary(compare(tmp_path / "runs"))
    assert any("depends on the budget" in line and "ES by wall" in line and "GRPO by tokens" in line for line in lines)
    alone, screen = compare(tmp_path / "runs/es"), io.StringIO()
    assert report.summary(alone)[0].startswith("There is only one group")
    report.show(alone, Console(file=screen, width=200))
    assert (
        screen.getvalue().startswith("There is only one group")
        and screen.getvalue().count("There is only one group") == 1
    )


def test_files_have_the_numbers_of_each_seed(copy: Copy, tmp_path: Path) -> None:
    for seed in range(3):
        copy(f"es_{seed}", seed=seed, reward=lambda step, seed=seed: float(step * (seed + 1)))
        copy(f"grpo_{seed}", seed=seed, method="grpo", reward=lambda step, seed=seed: float(step + seed))
    written = report.write(compare(tmp_path / "runs"), tmp_path / "out")
    names = ["comparison.md", "comparison.json", *(f"reward_by_{m}.png" for m in MATCHINGS),
             "reward_by_divergence.png"]  # fmt: skip
    assert [p.name for p in written] == names
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(names)
    tree = json.loads((tmp_path / "out/comparison.json").read_text())
    assert tree["format_version"] == 1
    es = tree["groups"][0]
    assert [run["seed"] for run in es["runs"]] == [0, 1, 2]
    assert [point["step"] for point in es["runs"][2]["points"]] == [0, *EVALUATED]
    assert es["runs"][2]["points"][-1]["cost"]["generated_tokens"] == 6 * 300
    assert es["end"]["reward"]["mean"] == 12.0
    page = (tmp_path / "out/comparison.md").read_text()
    for name in names[2:]:
        assert f"]({name})" in page
    header = page.index("|   | ES | GRPO |")
    assert "hacked share" in page[header:]
    assert "| KL from the base model, exact (nats per token) | 0.2 | 0.2 |" in page
    assert "| distance moved, L2 | 1.5 | 1.5 |" in page
    assert "| FLOPs | 6 G | 6 G |" in page
    assert "| device time | 3 s | 3 s |" in page
    assert "| seconds per step | 0.5 | 0.5 |" in page
    low, high = stats.t.interval(0.95, 2, 12.0, stats.sem([6.0, 12.0, 18.0]))
    assert f"| reward \\[95 %\\] | 12 \\[{low:.4g}, {high:.4g}\\] | 7 \\[" in page


def test_untrusted_names_are_escaped(copy: Copy, tmp_path: Path) -> None:
    evil = "x|\n\x1b[2J<b>![](http://e) $x$ _"
    for run, model in ((copy("a"), evil), (copy("b"), "tiny")):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["model"]["name"] = model
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        rows = [{**row, "evaluation": row["evaluation"] and {**row["evaluation"], evil: 1.0}} for row in rows_of(run)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        edit(run / "results/evaluation.json", lambda tree: {**tree, "after": {**tree["after"], evil: 2.0}})
    found = compare(tmp_path / "runs", measure=evil)
    written = report.write(found, tmp_path / "out")
    assert all(path.parent == tmp_path / "out" and path.name.isascii() for path in written)
    page = (tmp_path / "out/comparison.md").read_text()
    assert "\x1b" not in page and "<b>" not in page.replace("\\<b\\>", "") and "![](" not in page
    assert r"x\|\\n" in page
    assert len(list((tmp_path / "out").iterdir())) == len(written)


def pixels(path: Path) -> Any:
    from matplotlib.image import imread

    return imread(path)[..., :3]


def has_color(image: Any, color: str) -> bool:
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return bool((np.abs(image - wanted).max(axis=-1) < 0.02).any())


@pytest.mark.slow
def test_figures_show_every_group(copy: Copy, tmp_path: Path) -> None:
    for seed in range(3):
        copy(f"es_{seed}", seed=seed, reward=lambda step, seed=seed: float(step * (seed + 1)))
        copy(f"grpo_{seed}", seed=seed, method="grpo", reward=lambda step, seed=seed: float(step + seed),
             cost=lambda step: step_cost(step, 50.0))  # fmt: skip
    drawn = figures.draw(compare(tmp_path / "runs"), tmp_path)
    assert set(drawn) == {*MATCHINGS, "divergence"}
    for path in drawn.values():
        image = pixels(path)
        assert image.shape[1] == 1080 and image.std() > 0.01
        assert has_color(image, figures.COLORS[0]) and has_color(image, figures.COLORS[1])
    assert len({figures.LINES[i] for i in range(4)}) == 4


@pytest.mark.slow
def test_figure_grows_with_its_legend(copy: Copy, tmp_path: Path) -> None:
    copy("a")
    few = figures.draw(compare(tmp_path / "runs", "wall"), tmp_path)["wall"]
    height = pixels(few).shape[0]
    for i in range(6):
        copy(f"b{i}", sets={"es.learning_rate": 0.1 + i})
    many = compare(tmp_path / "runs", "wall")
    assert pixels(figures.draw(many, tmp_path)["wall"]).shape[0] > height
    line = report.summary(many)[0]
    assert "has the highest mean, not significantly above" in line
    assert line.count("not tested") == 6


def test_curve_has_no_band_for_few_seeds(copy: Copy, tmp_path: Path) -> None:
    copy("a", seed=0, reward=lambda step: float(step))
    copy("b", seed=1, reward=lambda step: 2.0 * step)
    found = comparison.curve(compare(tmp_path / "runs").groups[0], "wall", "reward")
    assert found is not None and found.low == found.mean == found.high


def test_draw_skips_the_divergence_figure_without_data(copy: Copy, tmp_path: Path) -> None:
    run = copy("a")
    rows = [{**row, "divergence": None} for row in rows_of(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    edit(run / "results/evaluation.json", lambda tree: {**tree, "divergence": None, "distance": None})
    drawn = figures.draw(compare(run), tmp_path / "out") if (tmp_path / "out").mkdir() is None else {}
    assert set(drawn) == set(MATCHINGS)


def test_spread_keeps_labels_apart() -> None:
    crowded = sorted(figures._spread([1.0, 1.0, 0.99]))
    assert crowded[-1] <= 1.0 and min(np.diff(crowded)) >= figures.NEAREST - 1e-12
    places = figures._spread([0.5, 0.49, 0.9, 0.51])
    assert sorted(places)[1] - sorted(places)[0] >= figures.NEAREST - 1e-12
    assert places[2] == 0.9
    assert places[1] < places[0] < places[3]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (9_999, "9,999"), (12_300, "12.3 k"), (1.5e15, "1.5 P"), (1e30, "1e+30")]
)
def test_counted_is_short(value: float, text: str) -> None:
    assert counted(value) == text


@pytest.mark.parametrize(("value", "text"), [(3.0, "3 s"), (119, "119 s"), (150, "2.5 min"), (9000, "2.5 h")])
def test_duration_is_short(value: float, text: str) -> None:
    assert duration(value) == text
