# SPDX-License-Identifier: Apache-2.0
"""benchmarks/es_vs_grpo.py on the tiny model, and the result pages from the committed rows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evoalign import statistics
from evoalign.config import load
from evoalign.cost.budget import Cost
from evoalign.statistics import Estimate

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "studies")]
import baseline  # noqa: E402
import es_vs_grpo  # noqa: E402
import landscape_claims  # noqa: E402
import result_pages  # noqa: E402

SMALL = ("--set", "task.test_size=8", "--methods", "lowrank,grpo", "--jobs", "2", "--seconds", "0.01")


pytestmark = pytest.mark.slow


def call(*words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "es_vs_grpo.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def there(folder: Path) -> tuple[str, ...]:
    return ("--task", "conciseness", "--to", str(folder), *SMALL)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("study")
    call("tune", *there(folder), "--cells", "2", "--seeds", "100")
    return folder


@pytest.fixture(scope="module")
def study(searched: Path) -> Path:
    call("final", *there(searched), "--seeds", "0")
    return searched


@pytest.mark.long
def test_search_chooses_the_best_cell_and_tells_its_budget(searched: Path) -> None:
    chosen = json.loads((searched / "conciseness" / "chosen.json").read_text())
    assert set(chosen["methods"]) == {"lowrank", "grpo"}
    for name, found in chosen["methods"].items():
        results = json.loads((searched / "conciseness" / "tune" / name / "results.json").read_text())
        best = max(cell["mean"]["reward"] for cell in results["cells"])
        assert found["validation"]["mean"]["reward"] == best
        assert (found["budget"]["trials"], found["budget"]["runs"], found["budget"]["not_done"]) == (2, 2, 0)
        assert found["budget"]["completions"] == 2 * 2 * 64  # cells, generations, completions of each


def test_choice_is_the_best_mean_among_cells_of_which_every_seed_is_done(tmp_path: Path) -> None:
    def cell(name: str, *rewards: float | None) -> dict[str, object]:
        done = [r for r in rewards if r is not None]
        cost = Cost(completions=10, wall_seconds=2.0).as_dict()
        runs = [{"state": "failed"} if r is None else {"state": "done", "training": cost} for r in rewards]
        return {"name": name, "settings": {}, "runs": runs, "mean": {"reward": sum(done) / len(done)}, "std": {}}

    cells = [cell("low", 0.1, 0.2), cell("best", 0.5, 0.3), cell("half", 0.9, None), cell("middle", 0.3, 0.4)]
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "results.json").write_text(json.dumps({"cells": cells}))
    (found,) = es_vs_grpo.choose(tmp_path).values()
    assert found["cell"] == "best"
    spent = found["budget"]
    assert (spent["trials"], spent["runs"], spent["not_done"]) == (4, 8, 1)
    assert (spent["completions"], spent["wall_seconds"]) == (70, 14.0)


@pytest.mark.long
def test_final_runs_have_the_chosen_settings_and_the_real_test_split(study: Path) -> None:
    chosen = json.loads((study / "conciseness" / "chosen.json").read_text())["methods"]
    config = load([study / "conciseness" / "final" / "lowrank" / "base" / "seed_0" / "config.yaml"])
    assert config.es.sigma == chosen["lowrank"]["settings"]["es.sigma"]
    assert config.es.learning_rate == chosen["lowrank"]["settings"]["es.learning_rate"]
    assert config.task.test_data == "data/tasks/conciseness/conciseness_test.json"
    tuned = load([next((study / "conciseness" / "tune" / "lowrank").glob("*/seed_100/config.yaml"))])
    assert tuned.task.test_data == str(study / "conciseness" / "validation.json")


@pytest.mark.parametrize("name", result_pages.TABLES)
def test_result_page_has_the_tables_of_its_rows(name: str) -> None:
    assert (result_pages.PAGES / f"{name}.md").read_text(encoding="utf-8") == result_pages.filled(name)


@pytest.mark.parametrize("name", result_pages.TABLES)
def test_result_page_opens_with_question_setting_answer_failures_and_commands(name: str) -> None:
    text = (result_pages.PAGES / f"{name}.md").read_text(encoding="utf-8")
    parts = ("**Question.**", "**Setting.**", "**Answer.**", "**What failed.**", "```sh", "<!-- table")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_baseline_exits_when_a_figure_is_outside_its_range() -> None:
    known = json.loads(baseline.BASELINES.read_text(encoding="utf-8"))
    for name, found in known.items():
        low, high = found["range"]
        assert low <= found["figure"] <= high, name
    baseline.check({"replay lora, journal bytes per generation": 1490, "a figure without a range": 1e9})
    with pytest.raises(SystemExit, match="replay lora"):
        baseline.check({"replay lora, journal bytes per generation": 5000})


@pytest.mark.last("countdown")
@pytest.mark.parametrize(("task", "count"), [("countdown", 500), ("conciseness", 48)])
def test_validation_rows_are_new_and_the_same_each_time(task: str, count: int, tmp_path: Path) -> None:
    first, second = (es_vs_grpo.write_validation(task, tmp_path / str(i)) for i in range(2))
    assert first.read_bytes() == second.read_bytes()
    rows = json.loads(first.read_text())
    key = {"countdown": es_vs_grpo._problem, "conciseness": lambda row: row["prompt"]}[task]
    files = list((ROOT / "data" / "tasks" / task).glob(f"{task}*.json"))  # what configs/comparison trains and tests on
    assert files
    shipped = {key(row) for file in files for row in json.loads(file.read_text())}
    found = {key(row) for row in rows}
    assert len(found) == count and not found & shipped


def test_second_round_lies_beyond_an_edge_and_else_between_neighbours() -> None:
    grid = {"es.sigma": [1.0, 2.0], "es.learning_rate": [0.01, 0.02, 0.04]}
    tried = {rate: es_vs_grpo.further(grid, {"es.sigma": 2.0, "es.learning_rate": rate}) for rate in (0.01, 0.02, 0.04)}
    assert all(cell["es.sigma"] == 2.0 for cells in tried.values() for cell in cells)
    rates = {rate: [cell["es.learning_rate"] for cell in cells] for rate, cells in tried.items()}
    assert rates == {0.01: [0.005, 0.0025], 0.02: [0.0141, 0.0283], 0.04: [0.08, 0.16]}


# --- the landscape ----------------------------------------------------------------------------------------------------

BELOW, ACROSS, ABOVE = (Estimate(mean, 8, mean - 1.0, mean + 1.0) for mean in (-2.0, 0.0, 2.0))


def verdict(found: Estimate, limit: float | None = 0.0, **more: Any) -> str:
    return landscape_claims.Claim("1", "a number", found, limit, **more).verdict


def test_a_claim_is_judged_by_the_side_on_which_its_interval_lies() -> None:
    held = ["not held", "not known", "held"]
    assert [verdict(found) for found in (BELOW, ACROSS, ABOVE)] == held
    assert [verdict(found, above=False) for found in (BELOW, ACROSS, ABOVE)] == held[::-1]
    assert verdict(Estimate(5.0, 1, why="1 value")) == "not known"
    assert verdict(ABOVE, None) == ""


def test_a_claim_is_not_held_by_the_other_end_where_it_has_one() -> None:
    assert verdict(BELOW, against=ABOVE) == verdict(BELOW, against=ACROSS) == "not known"
    assert verdict(ACROSS, against=BELOW) == "not held"
    assert verdict(ABOVE, against=BELOW) == "held"


def test_what_placebos_do_likewise_is_not_held() -> None:
    assert verdict(ABOVE, likewise=ABOVE) == "not held: its placebos do likewise"
    assert verdict(ABOVE, likewise=ACROSS) == verdict(ABOVE, likewise=BELOW) == "held"
    assert verdict(BELOW, likewise=ABOVE) == "not held" and verdict(ACROSS, likewise=ABOVE) == "not known"


def test_a_cosine_of_what_is_not_reliable_says_nothing() -> None:
    assert [verdict(found, reliability=0.09) for found in (BELOW, ACROSS, ABOVE)] == ["no evidence"] * 3
    assert verdict(ABOVE, reliability=0.1) == "held"


def test_pairs_in_a_ring_count_what_neighbours_share() -> None:
    alike, apart = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0], [1.0, -1.0] * 3
    plain, found = statistics.mean(alike), landscape_claims.in_a_ring(alike)
    assert plain.high is not None
    assert (found.mean, found.n) == (0.0, 6)
    assert found.high == pytest.approx(plain.high * (5 / 3) ** 0.5)  # a third of the variance is shared with each side
    assert found.low == pytest.approx(-found.high)
    for values in (apart, alike[2:5], [1.0] * 6):  # no shared variance, too few, no interval
        assert landscape_claims.in_a_ring(values) == statistics.mean(values)


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        ([7.0, 8.0, 9.0, 11.0], 0.25),
        ([float(i) for i in range(20)], 4.5 / 18.5),  # the means of steps 4 and 5, and of 18 and 19
        ([0.0] * 4 + [1.0] * 16, 1.0),
        ([0.0] * 10 + [1.0] * 10, 0.0),
        ([4.0] + [6.0] * 9 + [5.0] * 10, 2.0),
    ],
)
def test_what_the_first_quarter_of_the_steps_gains(rewards: list[float], share: float) -> None:
    assert landscape_claims.first_quarter({"rewards": rewards}) == pytest.approx(share)


def test_ranks_correlate_with_ties_and_an_interval_from_five_on() -> None:
    found = landscape_claims.rank_correlation([1, 2, 3, 4, 5], [10, 20, 30, 50, 40])
    assert found.mean == pytest.approx(0.9) and found.n == 5
    assert (found.low, found.high) == pytest.approx((0.0860767, 0.9934378), abs=1e-6)
    assert landscape_claims.rank_correlation([1, 1, 2], [1, 2, 3]).mean == pytest.approx(3**0.5 / 2)
    assert landscape_claims.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]).low is None
