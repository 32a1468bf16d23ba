# SPDX-License-Identifier: Apache-2.0
"""Points of reward and cost: shares by hand, differences by prompt, files that are none, and the figure."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run
from rich.console import Console
from rule_scorer import RuleScorer
from scipy import stats
from small_runs import UNCHECKED

import evoalign
from evoalign import analysis, statistics
from evoalign.analysis import Finding
from evoalign.analysis.safety import Settings
from evoalign.config import from_dict
from evoalign.errors import ConfigError, DataError
from evoalign.statistics import Estimate
from evoalign.tasks.safety import LABELS, Safety

Point = tuple[str, float, float]


def safety(names: list[str], *, all_pairs: bool = False) -> Finding:
    return analysis.find("safety").run(names, Settings(all_pairs))


def written(file: Path, points: Sequence[Point]) -> str:
    rows = [{"prompt": p, "response": "x", "reward": r, "cost": c} for p, r, c in points]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    random = np.random.default_rng(0)
    base = [(f"Q{i}", float(random.normal()), float(random.normal() + 1)) for i in range(40)]
    better = [(f" Q{i} ", r + 1 + 0.1 * float(random.normal()), c - 2) for i, (_, r, c) in enumerate(base)]
    return [written(tmp_path / "base.jsonl", base), written(tmp_path / "better.jsonl", better[:30][::-1])]


def read(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_shares_are_those_counted_by_hand(files: list[str]) -> None:
    (numbers,) = safety(files[:1]).numbers["models"]
    points = read(files[0])
    signs = dict(zip(("helpful_safe", "helpful_unsafe", "unhelpful_safe", "unhelpful_unsafe"),
                     ((True, True), (True, False), (False, True), (False, False)), strict=True))  # fmt: skip
    for label in LABELS:
        share = np.mean([(p["reward"] > 0, p["cost"] <= 0) == signs[label] for p in points])
        assert numbers[label]["mean"] == pytest.approx(share)
    assert numbers["safe"]["mean"] == pytest.approx(np.mean([p["cost"] <= 0 for p in points]))
    assert numbers["safe"]["low"] >= 0 and numbers["safe"]["high"] <= 1
    reward = [p["reward"] for p in points]
    low, high = stats.t.interval(0.95, len(reward) - 1, np.mean(reward), stats.sem(reward))
    assert (numbers["reward"]["low"], numbers["reward"]["high"]) == pytest.approx((low, high))


def test_differences_are_paired_by_prompt_whatever_the_order(files: list[str]) -> None:
    """Unpaired, an effect of one standard deviation in 30 would be as sure, but its interval ten times as wide."""
    found = safety(files)
    (pair,) = found.numbers["differences"]
    first = {p["prompt"]: p for p in read(files[0])}
    gaps = [p["reward"] - first[p["prompt"].strip()]["reward"] for p in read(files[1])]
    assert pair["prompts"] == 30 and pair["reward"]["mean"] == pytest.approx(np.mean(gaps))
    assert pair["reward"]["high"] - pair["reward"]["low"] < 0.2
    assert pair["cost"]["mean"] == pytest.approx(-2)
    assert "reward" in found.sentences[-1] and f"minus {files[0]} on 30 prompts" in found.sentences[-1]


def test_significant_measures_are_named(files: list[str], tmp_path: Path) -> None:
    found = safety(files)
    (pair,) = found.numbers["differences"]
    sentence, measures = found.sentences[-1], ("safe", *LABELS, "reward", "cost")
    assert all(f" {name} {pair[name]['mean']:+.3g} (" in sentence for name in measures)
    moved = sentence.partition("significant of 7 measures, uncorrected ")[2].split(", ")
    assert moved == [name for name in measures if statistics.is_sure(Estimate(**pair[name]))]
    assert {"safe", "helpful_safe", "helpful_unsafe", "reward"} <= {*moved} and "unhelpful_safe" not in moved
    assert pair["cost"]["low"] is None, "all of its differences are alike"
    same = written(tmp_path / "same.jsonl", [(p["prompt"], p["reward"], p["cost"]) for p in read(files[0])])
    assert safety([files[0], same]).sentences[-1].endswith("uncorrected none")


def test_answers_to_one_prompt_count_as_one_and_other_prompts_are_not_paired(tmp_path: Path) -> None:
    points = [("A", 1.0, -1.0), ("A", 3.0, 1.0), ("B", 0.0, -1.0), ("C", 1.0, -1.0)]
    found = safety([written(tmp_path / "p.jsonl", points), written(tmp_path / "d.jsonl", [("D", 1.0, 1.0)])])
    numbers, _ = found.numbers["models"]
    assert (numbers["answers"], numbers["prompts"]) == (4, 3)
    assert numbers["reward"]["mean"] == pytest.approx(1.0) and numbers["safe"]["mean"] == pytest.approx(2.5 / 3)
    assert "prompts in common none" in found.sentences[-1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"prompt": "a", "reward": "1", "cost": 0', "line 1: reward is '1'; a point has prompt, response, reward and"),
        ('"prompt": "a", "reward": 1', "line 1: cost is None"),
        ('"prompt": "a", "reward": true, "cost": 0', "reward is True"),
        ('"prompt": "a", "reward": NaN, "cost": 0', "reward is nan"),
        ('"prompt": " ", "reward": 1, "cost": 0', "line 1: prompt is"),
    ],
)
def test_lines_without_a_point_are_refused(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(f"{{{line}}}\n")
    with pytest.raises(DataError, match=said):
        safety([str(tmp_path / "p.jsonl")])


def test_it_is_drawn_with_all_models(files: list[str], tmp_path: Path) -> None:
    names = [*files, *(written(tmp_path / f"{i}.jsonl", [("A", 1, 1)]) for i in range(3))]
    found = safety(names)
    (tmp_path / "out").mkdir()
    wrote = found.write(tmp_path / "out", "safety")
    assert sorted(path.name for path in wrote) == ["safety.json", "safety.png", "safety.svg"]
    assert len(found.numbers["models"]) == 5 and len(found.numbers["differences"]) == 4
    every = safety(names, all_pairs=True).numbers["differences"]
    assert len({(row["beside"], row["target"]) for row in every}) == 10


def test_a_run_and_its_start_are_compared_and_others_refused(tmp_path: Path, run: Run) -> None:
    """Also by the command that the run ends with."""
    for name, words in (("train", ("sea", "sky")), ("test", ("sun", "moon", "wind"))):
        rows = [{"prompt": f"Tell me about the {word}."} for word in words]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "output_dir": "run", "es": {"sigma": 0.02, "num_generations": 1, "population_size": 2},
        "task": {"name": "safety", "train_data": "train.jsonl", "test_data": "test.jsonl"},
        "evaluation": {"max_tokens": 6}, "checks": UNCHECKED,
    }  # fmt: skip
    told, task = io.StringIO(), Safety(from_dict(tree).task, RuleScorer())
    result = evoalign.train(tree, task=task, console=Console(file=told, width=10_000))
    (command,) = (line for line in told.getvalue().splitlines() if "analyze safety" in line)
    assert run(*shlex.split(command, comments=True)[1:]).code == 0
    found = safety(["run/results/points_before.jsonl", "run"])
    before, after = found.numbers["models"]
    assert before["safe"]["mean"] == pytest.approx(result.before.measures["safe_share"])
    assert after["cost"]["mean"] == pytest.approx(result.after.measures["reward/cost"])
    assert found.numbers["differences"][0]["prompts"] == 3
    Path("run/results/points.jsonl").unlink()
    give = r"give a finished run of task safety, or a points file \(JSON lines of prompt, response, reward, cost\)"
    folder, missing = f"is a folder and no run; {give}", rf"no file no\.jsonl; {give}"
    for name, said in (("run", "only finished runs of task safety"), (".", folder), ("no.jsonl", missing)):
        with pytest.raises(ConfigError, match=said):
            safety([name])
