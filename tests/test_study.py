# SPDX-License-Identifier: Apache-2.0
"""benchmarks/es_vs_grpo.py from the search to the page, on the real tiny model: two methods, two cells, one seed."""

import csv
import io
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
sys.path.insert(0, str(ROOT / "benchmarks"))
import landscape_page  # noqa: E402
import study_page  # noqa: E402
import sweep_pages  # noqa: E402

import es_vs_grpo  # noqa: E402

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


@pytest.mark.long
@pytest.mark.parametrize("task", ["countdown", "conciseness"])
def test_the_committed_numbers_are_by_the_present_statistics(task: str) -> None:
    tree = json.loads((ROOT / f"benchmarks/results/es_vs_grpo/{task}.json").read_text())
    assert study_page.renewed(tree) == tree


@pytest.mark.long
def test_page_from_the_runs_and_again_from_the_numbers(study: Path, tmp_path: Path) -> None:
    where = ("--task", "conciseness", "--docs", str(tmp_path / "docs"), "--results", str(tmp_path / "results"))
    call("page", *where, "--from", str(study))
    page = (tmp_path / "docs" / "conciseness.md").read_text()
    assert "ES lowrank" in page and "GRPO" in page
    for line in page.splitlines():
        if line.startswith("!["):
            assert (tmp_path / "docs" / line.split("](")[1].rstrip(")")).is_file(), line
    files = [tmp_path / "docs" / "conciseness.md", *sorted((tmp_path / "docs" / "data").iterdir())]
    texts = [file.read_text() for file in files]
    for file in files:
        assert file == files[0] or f"(data/{file.name})" in page
        file.unlink()
    call("page", *where)
    assert [file.read_text() for file in files] == texts and len(files) == 4


@pytest.mark.parametrize("task", ["countdown", "conciseness"])
def test_the_committed_page_and_tables_are_those_of_the_committed_numbers(task: str) -> None:
    tree = json.loads((ROOT / f"benchmarks/results/es_vs_grpo/{task}.json").read_text())
    assert (ROOT / f"docs/results/{task}.md").read_text() == study_page.page(tree)
    tables = study_page.tables(tree)
    for name, text in tables.items():
        assert (ROOT / f"docs/results/data/{task}_{name}.csv").read_text() == text
    rows = list(csv.DictReader(io.StringIO(tables["tests"])))
    assert len(rows) == sum(len(m["pairs"]) for found in tree["measures"].values() for m in found["matches"])
    assert len(list(csv.DictReader(io.StringIO(tables["seeds"])))) == sum(map(len, tree["runs"].values()))


def test_the_tables_of_the_landscape_are_those_of_the_committed_rows() -> None:
    page, studies = landscape_page.PAGE.read_text(), landscape_page.read()
    assert list(studies) == list(landscape_page.STUDIES)
    assert landscape_page.with_tables(page, studies) == page


def test_the_committed_sweeps_are_those_of_the_committed_numbers() -> None:
    tree = json.loads((ROOT / "studies/results/sweeps.json").read_text())
    assert (ROOT / "docs/results/sweeps.md").read_text() == sweep_pages.page(tree)


@pytest.mark.long
def test_pack_holds_what_the_page_needs_and_no_weights(study: Path, tmp_path: Path) -> None:
    call("pack", "--from", str(study), "--file", str(tmp_path / "x.tgz"))
    subprocess.run(["tar", "xzf", "x.tgz"], cwd=tmp_path, check=True)
    unpacked = tmp_path / study.name
    assert not list(unpacked.rglob("*.safetensors"))
    figures = tmp_path / "figures"
    ours = study_page.collect(study / "conciseness", "conciseness", figures)
    theirs = study_page.collect(unpacked / "conciseness", "conciseness", figures)
    assert theirs["runs"] == ours["runs"] and theirs["samples"] == ours["samples"]
    assert theirs["searches"] == ours["searches"]


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


def test_words_name_a_winner_only_where_the_test_does() -> None:
    pairs = [
        {"a": "GRPO", "b": "ES lora", "p_adjusted": 0.01},
        {"a": "GRPO", "b": "ES full", "p_adjusted": 0.2},
        {"a": "ES lowrank", "b": "GRPO", "p_adjusted": 0.04},
        {"a": "ES lowrank", "b": "ES lora", "p_adjusted": None},
    ]
    assert study_page.told_apart(pairs) == "GRPO > ES lora; ES lowrank > GRPO"
    assert study_page.told_apart(pairs[1:2]) == "none"
    groups = [{"label": "GRPO", "estimate": {"mean": 1.0}}, {"label": "ES lora", "estimate": {"mean": 0.5}}]
    short = [{"by": "flops", "pairs": pairs, "groups": [groups[0], {"label": "ES lora", "estimate": None}]}]
    matches = [{"by": "wall", "pairs": pairs, "groups": groups}, *short]
    assert study_page._leaders({"measures": {"reward": {"matches": matches}}}) == [
        "The highest mean reward is that of GRPO at equal wall time.",
        "At equal FLOPs nothing is said of ES lora: no evaluation of it lies within the budget.",
        *(
            f"GRPO against ES at equal {by}: above ES lora; below ES lowrank; no significant difference from ES full."
            for by in ("wall time", "FLOPs")
        ),
    ]


def test_what_the_search_found_and_the_final_runs_lack_is_told() -> None:
    cells = [
        {"settings": {"es.sigma": 0.01}, "rewards": [0.3, 0.5]},
        {"settings": {"es.sigma": 0.02}, "rewards": [0.5, 0.7]},
        {"settings": {"es.sigma": 0.03}, "rewards": [0.9]},
    ]
    found = {"settings": {"es.sigma": 0.01}, "validation": {"mean": {"reward": 0.4}}}
    chosen = {"seeds": [1, 2], "methods": {"lora": found}}
    (better,) = study_page._better({"lora": cells}, chosen)
    assert better.startswith("**ES lora may do better than on this page**: es.sigma 0.02 reached 0.6 ")
    (cut_off,) = study_page._cut_off({"lora": cells}, chosen)
    assert cut_off.startswith("ES lora: es.sigma 0.03 has 1 of 2 runs")
    assert not study_page._better({"lora": cells[:1]}, chosen) and not study_page._cut_off({"lora": cells[:2]}, chosen)


def test_second_round_lies_beyond_an_edge_and_else_between_neighbours() -> None:
    grid = {"es.sigma": [1.0, 2.0], "es.learning_rate": [0.01, 0.02, 0.04]}
    tried = {rate: es_vs_grpo.further(grid, {"es.sigma": 2.0, "es.learning_rate": rate}) for rate in (0.01, 0.02, 0.04)}
    assert all(cell["es.sigma"] == 2.0 for cells in tried.values() for cell in cells)
    rates = {rate: [cell["es.learning_rate"] for cell in cells] for rate, cells in tried.items()}
    assert rates == {0.01: [0.005, 0.0025], 0.02: [0.0141, 0.0283], 0.04: [0.08, 0.16]}


def test_a_better_cell_than_that_of_the_final_runs_is_told() -> None:
    chosen = {"seeds": [1, 2], "methods": {"grpo": {"settings": {"grpo.learning_rate": 1e-4},
                                                    "validation": {"mean": {"reward": 0.5}}}}}  # fmt: skip
    cells = [{"settings": {"grpo.learning_rate": rate}, "rewards": rewards}
             for rate, rewards in ((1e-4, [0.5, 0.5]), (3e-5, [0.6, 0.5]), (1e-5, [0.9]))]  # fmt: skip
    (line,) = study_page._better({"grpo": cells}, chosen)
    assert "grpo.learning_rate 3e-05 reached 0.55" in line
    assert not study_page._better({"grpo": cells[:1]}, chosen)


# --- the landscape ----------------------------------------------------------------------------------------------------

BELOW, ACROSS, ABOVE = (Estimate(mean, 8, mean - 1.0, mean + 1.0) for mean in (-2.0, 0.0, 2.0))


def verdict(found: Estimate, limit: float | None = 0.0, **more: Any) -> str:
    return landscape_page.Claim("1", "a number", found, limit, **more).verdict


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
    assert verdict(ABOVE, likewise=ABOVE) == "not held: of its placebos likewise"
    assert verdict(ABOVE, likewise=ACROSS) == verdict(ABOVE, likewise=BELOW) == "held"
    assert verdict(BELOW, likewise=ABOVE) == "not held" and verdict(ACROSS, likewise=ABOVE) == "not known"


def test_a_cosine_of_what_is_not_reliable_says_nothing() -> None:
    assert [verdict(found, reliability=0.09) for found in (BELOW, ACROSS, ABOVE)] == ["no evidence"] * 3
    assert verdict(ABOVE, reliability=0.1) == "held"


def test_pairs_in_a_ring_count_what_neighbours_share() -> None:
    alike, apart = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0], [1.0, -1.0] * 3
    plain, found = statistics.mean(alike), landscape_page.in_a_ring(alike)
    assert plain.high is not None
    assert (found.mean, found.n) == (0.0, 6)
    assert found.high == pytest.approx(plain.high * (5 / 3) ** 0.5)  # a third of the variance is shared with each side
    assert found.low == pytest.approx(-found.high)
    for values in (apart, alike[2:5], [1.0] * 6):  # no shared variance, too few, no interval
        assert landscape_page.in_a_ring(values) == statistics.mean(values)


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
    assert landscape_page.first_quarter({"rewards": rewards}) == pytest.approx(share)


def test_ranks_correlate_with_ties_and_an_interval_from_five_on() -> None:
    found = landscape_page.rank_correlation([1, 2, 3, 4, 5], [10, 20, 30, 50, 40])
    assert found.mean == pytest.approx(0.9) and found.n == 5
    assert (found.low, found.high) == pytest.approx((0.0860767, 0.9934378), abs=1e-6)
    assert landscape_page.rank_correlation([1, 1, 2], [1, 2, 3]).mean == pytest.approx(3**0.5 / 2)
    assert landscape_page.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]).low is None
