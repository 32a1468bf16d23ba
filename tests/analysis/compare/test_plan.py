# SPDX-License-Identifier: Apache-2.0
"""A comparison by a plan, on what it hangs, and its intervals over questions, on copies of one real run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from copied_runs import Copy, copy_run, edit, step_cost

from evoalign.analysis.compare import pages
from evoalign.analysis.compare.comparison import compare
from evoalign.analysis.compare.groups import read_plan
from evoalign.analysis.compare.tables import end_grid, pair_grids
from evoalign.errors import ConfigError
from evoalign.rundir import parquet
from evoalign.statistics import crossed, crossed_difference


@pytest.fixture(scope="module")
def runs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six seeds of ES and of GRPO, and two of a wide ES, 12 completions a step; ES gains one a step and GRPO two."""
    folder = tmp_path_factory.mktemp("planned")
    for seed in range(6):
        copy_run(source, folder / f"es_{seed}", seed=seed, reward=lambda s, seed=seed: s + 0.1 * seed)
        copy_run(source, folder / f"grpo_{seed}", seed=seed, method="grpo",
                 reward=lambda s, seed=seed: 2.0 * s - 0.2 * (seed % 3))  # fmt: skip
    for seed in range(2):
        copy_run(source, folder / f"wide_{seed}", seed=seed, sets={"es.sigma": 0.1},
                 reward=lambda s, seed=seed: -s + 0.3 * seed)  # fmt: skip
    return folder


END = "At the end of each run, budgets not matched, exploratory"
PLAN: dict[str, Any] = {
    "match": "completions", "limit": 48, "groups": {"ours": "es_*", "wide": "wide_*", "TRL": "grpo_*"},
    "primary": [["ours", "TRL"]], "alpha": 0.01,
}  # fmt: skip


def plan(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({**PLAN, **changes}))
    return path


def test_plan_sets_budget_measure_pairs_and_level(runs: Path, tmp_path: Path) -> None:
    path = plan(tmp_path)
    found = compare(runs, plan=path)
    (match,) = found.matches
    assert (match.by, match.limit) == ("completions", 48)
    assert {t.point.step for s in match.standings for t in s.matched} == {4}, "72 were spent by all"
    by_pair = {frozenset((p.a, p.b)): p for p in match.pairs}
    primary = by_pair.pop(frozenset(("ours", "TRL")))
    assert primary.p_adjusted == primary.p == pytest.approx(2 / 2**6), "Holm's correction over one pair"
    assert [p.p_adjusted for p in by_pair.values()] == [None, None]
    said = pages.summary(found)
    assert said[0].startswith("At equal completions (48, as planned): not significant: TRL against ours")
    assert "with 6 seeds the smallest possible p is 0.0312" in said[0], "by the plan's level of 1 %"
    assert not any("wide" in line for line in said if "as planned" in line), "no claim that was not planned"
    assert said[1:] == [f"{END}: not in the plan, so not decided."]
    assert [grid.title for grid in (end_grid(found), *pair_grids(found.end))] == [END, f"{END}: tests"]
    written = pages.write(found, tmp_path / "out")
    tree = json.loads((tmp_path / "out/comparison.json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert tree["plan"]["sha256"] == digest and tree["plan"]["limit"] == 48 and tree["matches"][0]["planned"] is True
    assert f"As planned in plan.yaml (SHA-256 {digest})." in written[0].read_text()
    lax = pages.summary(compare(runs, plan=plan(tmp_path, alpha=0.05)))
    assert lax[0].startswith("At equal completions (48, as planned): TRL is above ours: +")


def test_plan_notes_runs_that_ended_before_the_budget(source: Path, runs: Path, tmp_path: Path) -> None:
    """Without a plan it sets the budget for all."""
    brief = copy_run(source, tmp_path / "es_5", seed=5, reward=float, cost=lambda s: step_cost(s, 0.5))
    paths = [brief, *(run for run in runs.iterdir() if run.name != "es_5")]
    for short, seeds, note in (("leave_out", range(5), "left out"), ("at_end", range(6), "taken at its end")):
        match = compare(paths, plan=plan(tmp_path, short=short)).matches[0]
        ours = next(s for s in match.standings if s.group.label == "ours")
        assert [t.run.seed for t in ours.matched] == [*seeds] and match.limit == 48
        assert any(f"{brief} ended before the budget: {note}, as planned" in found for found in match.notes)
    unplanned = compare(paths, "completions").matches[0]
    assert unplanned.limit == 36 and any(f"it is the cost of {brief}" in note for note in unplanned.notes)


def test_run_reaches_a_budget_that_one_more_step_exceeds(runs: Path, tmp_path: Path) -> None:
    assert all(s.matched for s in compare(runs, plan=plan(tmp_path, limit=83)).matches[0].standings), "72 and 12 are 84"
    assert not any(s.matched for s in compare(runs, plan=plan(tmp_path, limit=84)).matches[0].standings)


def test_sensitivity_covers_budget_shares_and_single_runs(runs: Path, tmp_path: Path) -> None:
    compared = compare(runs, plan=plan(tmp_path, limit=72))
    (found,) = compared.matches[0].sensitivity
    gaps = {step: [2.0 * step - 0.2 * (s % 3) - step - 0.1 * s for s in range(6)] for step in (2, 4, 6)}
    assert (found.a, found.b) == ("TRL", "ours")
    for (share, at), step in zip(found.at, (2, 4, 6), strict=True):
        assert at is not None and at.mean == pytest.approx(np.mean(gaps[step])), share
    without = [np.mean([g for i, g in enumerate(gaps[6]) if i != left]) for left in range(6)]
    assert found.without_one == pytest.approx((min(without), max(without)))
    page = pages.markdown(compared)
    assert "| difference \\[95 %\\] | at 50% of the budget | at 75% of the budget |" in page


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"primary": [["ours", "theirs"]]}, r"primary \['ours', 'theirs'\]: give two labels of groups"),
        ({"limit": 0}, "limit: "),
        ({"match": "steps"}, "match: "),
        ({"budget": 3}, "budget: Extra inputs"),
        ({"groups": {"ours": "es_*", "TRL": "nothing"}}, "name TRL=nothing matches no run"),
    ],
)
def test_compare_raises_for_a_wrong_plan(runs: Path, tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        compare([runs / "es_0", runs / "grpo_0"], plan=plan(tmp_path, **changes))


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


def answered(run: Path, rewards: list[float]) -> None:
    """Each question's final reward, and their mean as the run's."""
    file = run / "results/completions/after.parquet"
    parquet.write(file, [{**row, "reward": rewards[row["example"]]} for row in parquet.read(file)])
    edit(run / "results/evaluation.json", lambda tree: {**tree, "after": {**tree["after"], "reward": np.mean(rewards)}})


def test_end_has_intervals_over_runs_and_questions(copy: Copy, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    hard = random.normal(size=8)
    values: dict[str, list[Any]] = {"es": [], "grpo": []}
    for method, of_seeds in values.items():
        for seed in range(3):
            of_seeds.append(hard + random.normal(size=8) / 4 + random.normal() / 4 + (method == "es"))
            answered(copy(f"{method}_{seed}", seed=seed, method=method), of_seeds[-1].tolist())
    found = compare(tmp_path / "runs")
    assert found.end.standings[0].over_questions == crossed(values["es"])
    (pair,) = found.end.pairs
    assert pair.over_questions == crossed_difference(values["es"], values["grpo"], paired=True)
    assert pair.over_questions.items == 8 and pair.over_questions.low is not None and pair.low is not None
    assert pair.over_questions.low < pair.low, "new questions differ, too"
    assert "over 8 questions too: " in " ".join(pages.summary(found))
    assert "\\[95 %, over runs and questions\\]" in pages.markdown(found)
    es_0 = tmp_path / "runs/es_0/results/evaluation.json"  # answers that disagree with the mean are not used
    edit(es_0, lambda tree: {**tree, "after": {**tree["after"], "reward": 99.0}})
    assert compare(tmp_path / "runs").end.standings[0].over_questions is None
