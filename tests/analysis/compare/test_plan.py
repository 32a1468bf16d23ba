# SPDX-License-Identifier: Apache-2.0
"""A comparison by a plan, on what it hangs, and its intervals over questions, on copies of one real run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from copied_runs import copy_run, edit, real_run, step_cost

from evoalign.analysis.compare import pages
from evoalign.analysis.compare.comparison import compare
from evoalign.analysis.compare.groups import read_plan
from evoalign.analysis.compare.tables import grids
from evoalign.errors import ConfigError
from evoalign.rundir import parquet
from evoalign.statistics import crossed, crossed_difference

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_run(tmp_path_factory.mktemp("planned") / "run", steps=4, every=1)


@pytest.fixture
def runs(source: Path, tmp_path: Path) -> Path:
    """Six seeds of each of three methods, 12 completions a step of ES; ES gains one a step and GRPO two."""
    for seed in range(6):
        copy_run(source, tmp_path / f"runs/es_{seed}", seed=seed, reward=lambda s, seed=seed: s + 0.1 * seed)
        copy_run(source, tmp_path / f"runs/wide_{seed}", seed=seed, sets={"es.sigma": 0.1},
                 reward=lambda s, seed=seed: -s + 0.3 * (seed % 2))  # fmt: skip
        copy_run(source, tmp_path / f"runs/grpo_{seed}", seed=seed, method="grpo",
                 reward=lambda s, seed=seed: 2.0 * s - 0.2 * (seed % 3))  # fmt: skip
    return tmp_path / "runs"


PLAN: dict[str, Any] = {
    "match": "completions",
    "limit": 36,
    "groups": {"ours": "es_*", "wide": "wide_*", "TRL": "grpo_*"},
    "primary": [["ours", "TRL"]],
    "alpha": 0.01,
}


END = "At the end of each run, budgets not matched, exploratory"


def plan(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({**PLAN, **changes}))
    return path


def test_plan_sets_budget_measure_pairs_and_level(runs: Path, tmp_path: Path) -> None:
    path = plan(tmp_path)
    found = compare(runs, plan=path)
    (match,) = found.matches
    assert (match.by, match.limit) == ("completions", 36)
    assert {t.point.step for s in match.standings for t in s.matched} == {3}, "48 were spent by all"
    by_pair = {frozenset((p.a, p.b)): p for p in match.pairs}
    primary = by_pair[frozenset(("ours", "TRL"))]
    assert primary.p_adjusted == primary.p == pytest.approx(2 / 2**6), "Holm's correction over one pair"
    assert [p.p_adjusted for pair, p in by_pair.items() if pair != {"ours", "TRL"}] == [None, None]
    said = pages.summary(found)
    assert said[0].startswith("At equal completions (36, as planned): not significant: TRL against ours")
    assert "with 6 seeds the smallest possible p is 0.0312" in said[0], "by the plan's level of 1 %"
    assert not any("wide" in line for line in said if "as planned" in line), "no claim that was not planned"
    assert said[1:] == [f"{END}: not in the plan, so not decided."]
    assert [grid.title for grid in grids(found)][-3:] == [END, f"{END}: tests", "Settings that differ"]
    written = pages.write(found, tmp_path / "out")
    tree = json.loads((tmp_path / "out/comparison.json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert tree["plan"]["sha256"] == digest and tree["plan"]["limit"] == 36 and tree["matches"][0]["planned"] is True
    assert f"As planned in plan.yaml (SHA-256 {digest})." in written[0].read_text()
    lax = pages.summary(compare(runs, plan=plan(tmp_path, alpha=0.05)))
    assert lax[0].startswith("At equal completions (36, as planned): TRL is above ours: +")


@pytest.mark.parametrize(("short", "seeds"), [("leave_out", [0, 1, 2, 3, 4]), ("at_end", [0, 1, 2, 3, 4, 5])])
def test_plan_notes_runs_that_ended_before_the_budget(
    source: Path, runs: Path, tmp_path: Path, short: str, seeds: list[int]
) -> None:
    """Without a plan it sets the budget for all."""
    (runs / "es_5").rename(tmp_path / "aside")
    brief = copy_run(source, runs / "es_5", seed=5, reward=float, cost=lambda s: step_cost(s, 0.5))
    match = compare(runs, plan=plan(tmp_path, short=short)).matches[0]
    ours = next(s for s in match.standings if s.group.label == "ours")
    assert [t.run.seed for t in ours.matched] == seeds and match.limit == 36
    said = "left out, as planned" if short == "leave_out" else "taken at its end, as planned"
    assert any(f"{brief} ended before the budget: {said}" in note for note in match.notes)
    unplanned = compare(runs, "completions").matches[0]
    assert unplanned.limit == 24
    assert any(f"it is the cost of {brief}" in note for note in unplanned.notes)


def test_run_reaches_a_budget_that_one_more_step_exceeds(runs: Path, tmp_path: Path) -> None:
    assert all(s.matched for s in compare(runs, plan=plan(tmp_path, limit=59)).matches[0].standings), "48 and 12 are 60"
    assert not any(s.matched for s in compare(runs, plan=plan(tmp_path, limit=60)).matches[0].standings)


def test_sensitivity_covers_budget_shares_and_single_runs(runs: Path, tmp_path: Path) -> None:
    match = compare(runs, plan=plan(tmp_path, limit=48)).matches[0]
    (found,) = match.sensitivity
    gaps = {step: [2.0 * step - 0.2 * (s % 3) - step - 0.1 * s for s in range(6)] for step in (2, 3, 4)}
    assert (found.a, found.b) == ("TRL", "ours")
    for (share, at), step in zip(found.at, (2, 3, 4), strict=True):
        assert at is not None and at.mean == pytest.approx(np.mean(gaps[step])), share
    without = [np.mean([g for i, g in enumerate(gaps[4]) if i != left]) for left in range(6)]
    assert found.without_one == (pytest.approx(min(without)), pytest.approx(max(without)))
    page = pages.markdown(compare(runs, plan=tmp_path / "plan.yaml"))
    assert "| difference \\[95 %\\] | at 50% of the budget | at 75% of the budget |" in page


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"primary": [["ours", "theirs"]]}, r"primary \['ours', 'theirs'\]: give two labels of groups"),
        ({"limit": 0}, "limit: "),
        ({"match": "steps"}, "match: "),
        ({"budget": 3}, "budget: Extra inputs"),
        ({"groups": {"ours": "es_*", "TRL": "nothing"}}, "name TRL=nothing matches no run"),
    ],
)
def test_compare_raises_for_a_wrong_plan(runs: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compare(runs, plan=plan(tmp_path, **changes))


SHIPPED = sorted((Path(__file__).parents[3] / "configs/comparison/plans").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_plans_are_valid(path: Path) -> None:
    """Their groups are those that the study makes, and each pair is decided with the seeds that it has."""
    found = read_plan(path).settings
    assert {pattern.split("/")[2] for pattern in found.groups.values()} == {"lora", "lowrank", "full", "grpo"}
    assert 2 / 2**12 * len(found.primary) < found.alpha


def test_read_plan_raises_for_a_bad_file(tmp_path: Path) -> None:
    for text in ("[1, 2]", "match: [", "\xff"):
        (tmp_path / "plan.yaml").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"plan\.yaml") as raised:
            read_plan(tmp_path / "plan.yaml")
        assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="is missing; give a plan"):
        read_plan(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="leave out --match"):
        compare(tmp_path, "wall", plan=plan(tmp_path))


# --- over questions ---------------------------------------------------------------------------------------------------


def answered(run: Path, rewards: list[float]) -> None:
    """Each question's final reward, and their mean as the run's."""
    file = run / "results/completions/after.parquet"
    rows = [{**row, "reward": rewards[row["example"]]} for row in parquet.read(file)]
    parquet.write(file, rows)
    edit(run / "results/evaluation.json", lambda tree: {**tree, "after": {**tree["after"], "reward": np.mean(rewards)}})


def test_end_has_intervals_over_runs_and_questions(source: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    hard = random.normal(size=8)
    values = {}
    for method in ("es", "grpo"):
        for seed in range(3):
            run = copy_run(source, tmp_path / f"runs/{method}_{seed}", seed=seed, method=method)
            rewards = hard + random.normal(size=8) / 4 + random.normal() / 4 + (method == "es")
            values[method, seed] = rewards
            answered(run, rewards.tolist())
    end = compare(tmp_path / "runs").end
    es, grpo = ([values[m, s] for s in range(3)] for m in ("es", "grpo"))
    assert end.standings[0].over_questions == crossed(es)
    (pair,) = end.pairs
    assert pair.over_questions == crossed_difference(es, grpo, paired=True)
    assert pair.over_questions.items == 8 and pair.over_questions.low is not None and pair.low is not None
    assert pair.over_questions.low < pair.low, "new questions differ, too"
    assert "over 8 questions too: " in " ".join(pages.summary(compare(tmp_path / "runs")))
    assert "\\[95 %, over runs and questions\\]" in pages.markdown(compare(tmp_path / "runs"))


def test_answers_that_disagree_with_the_mean_are_not_used(source: Path, tmp_path: Path) -> None:
    for seed in range(3):
        run = copy_run(source, tmp_path / f"runs/{seed}", seed=seed)
        answered(run, [float(seed + i) for i in range(8)])
    assert compare(tmp_path / "runs").end.standings[0].over_questions is not None
    edit(run / "results/evaluation.json", lambda tree: {**tree, "after": {**tree["after"], "reward": 99.0}})
    assert compare(tmp_path / "runs").end.standings[0].over_questions is None
