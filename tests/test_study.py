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


def call(*words: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "es_vs_grpo.py"), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("study")
    call("tune", "--task", "conciseness", "--to", folder, *SMALL, "--cells", "2", "--seeds", "100")
    return folder / "conciseness"


@pytest.mark.long
def test_search_chooses_the_best_cell_and_tells_its_budget(searched: Path) -> None:
    chosen = json.loads((searched / "chosen.json").read_text())
    assert set(chosen["methods"]) == {"lowrank", "grpo"}
    for name, found in chosen["methods"].items():
        results = json.loads((searched / "tune" / name / "results.json").read_text())
        assert found["validation"]["mean"]["reward"] == max(cell["mean"]["reward"] for cell in results["cells"])
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
def test_final_runs_have_the_chosen_settings_and_the_real_test_split(searched: Path) -> None:
    call("final", "--task", "conciseness", "--to", searched.parent, *SMALL, "--seeds", "0")
    chosen = json.loads((searched / "chosen.json").read_text())["methods"]["lowrank"]["settings"]
    config = load([searched / "final" / "lowrank" / "base" / "seed_0" / "config.yaml"])
    assert (config.es.sigma, config.es.learning_rate) == (chosen["es.sigma"], chosen["es.learning_rate"])
    assert config.task.test_data == "data/tasks/conciseness/conciseness_test.json"
    tuned = load([next((searched / "tune" / "lowrank").glob("*/seed_100/config.yaml"))])
    assert tuned.task.test_data == str(searched / "validation.json")


@pytest.mark.parametrize("name", result_pages.TABLES)
def test_result_page_has_its_parts_in_order_and_the_tables_of_its_rows(name: str) -> None:
    text = (result_pages.PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert text == result_pages.filled(name)
    parts = ("**Question.**", "**Setting.**", "**Answer.**", "**What failed.**", "```sh", "<!-- table")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_baseline_exits_when_a_figure_is_outside_its_range() -> None:
    for name, found in json.loads(baseline.BASELINES.read_text(encoding="utf-8")).items():
        assert found["range"][0] <= found["figure"] <= found["range"][1], name
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
    for rate, wanted in ((0.01, [0.005, 0.0025]), (0.02, [0.0141, 0.0283]), (0.04, [0.08, 0.16])):
        cells = es_vs_grpo.further(grid, {"es.sigma": 2.0, "es.learning_rate": rate})
        assert cells == [{"es.sigma": 2.0, "es.learning_rate": further} for further in wanted]


# --- the landscape ----------------------------------------------------------------------------------------------------

BELOW, ACROSS, ABOVE = (Estimate(mean, 8, mean - 1.0, mean + 1.0) for mean in (-2.0, 0.0, 2.0))


SIDES, LIKEWISE = ["not held", "not known", "held"], "not held: its placebos do likewise"


@pytest.mark.parametrize(
    ("more", "verdicts"),
    [
        ({}, SIDES),
        ({"above": False}, SIDES[::-1]),
        ({"limit": None}, ["", "", ""]),
        ({"against": BELOW}, ["not held", "not held", "held"]),  # not held by the other end where it has one
        ({"against": ACROSS}, ["not known", "not known", "held"]),
        ({"against": ABOVE}, ["not known", "not known", "held"]),
        ({"likewise": ABOVE}, [*SIDES[:2], LIKEWISE]),
        ({"likewise": ACROSS}, SIDES),
        ({"likewise": BELOW}, SIDES),
        ({"reliability": 0.09}, ["no evidence"] * 3),
        ({"reliability": 0.1}, SIDES),
        ({"censored": True}, [*SIDES[:2], "not known: the grid of the noise ends too early"]),
    ],
)
def test_a_claim_is_judged_by_its_interval_the_other_end_placebos_and_reliability(more: Any, verdicts: Any) -> None:
    judged = (landscape_claims.Claim("1", "n", x, **{"limit": 0.0, **more}).verdict for x in (BELOW, ACROSS, ABOVE))
    assert list(judged) == verdicts
    assert landscape_claims.Claim("1", "n", Estimate(5.0, 1, why="1 value"), 0.0).verdict == "not known"


def test_pairs_in_a_ring_count_what_neighbours_share() -> None:
    alike, apart = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0], [1.0, -1.0] * 3
    plain, found = statistics.mean(alike), landscape_claims.in_a_ring(alike)
    assert plain.high is not None and (found.mean, found.n, found.low) == (0.0, 6, pytest.approx(-(found.high or 0)))
    assert found.high == pytest.approx(plain.high * (5 / 3) ** 0.5)  # a third of the variance is shared with each side
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
