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
from evoalign.analysis.safety import TEXTS, Settings
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
    sentence, measures = found.sentences[-1], ("safe", *LABELS, "reward", "cost", *TEXTS)
    assert all(f" {name} {pair[name]['mean']:+.3g} (" in sentence for name in measures)
    moved = sentence.partition("significant of 11 measures, uncorrected ")[2].split(", ")
    assert moved == [name for name in measures if statistics.is_sure(Estimate(**pair[name]))]
    assert {"safe", "helpful_safe", "helpful_unsafe", "reward"} <= {*moved} and "unhelpful_safe" not in moved
    assert pair["cost"]["low"] is None, "all of its differences are alike"
    same = written(tmp_path / "same.jsonl", [(p["prompt"], p["reward"], p["cost"]) for p in read(files[0])])
    assert safety([files[0], same]).sentences[-1].endswith("uncorrected none")


def test_means_are_over_answers_and_prompts_are_clusters(tmp_path: Path) -> None:
    """A prompt that repeats 52 times counts 52 times in the mean, and once for the interval."""
    random = np.random.default_rng(1)
    effects, sizes = random.normal(size=30), [52, *[1] * 25, 2, 3, 4, 5]
    points = [(f"P{p}", float(effects[p] + 0.1 * random.normal()), -1.0) for p in range(30) for _ in range(sizes[p])]
    found = safety([written(tmp_path / "p.jsonl", points)]).numbers["models"][0]
    reward = np.array([r for _, r, _ in points])
    groups = np.repeat(np.arange(30), sizes)
    assert found["reward"]["mean"] == pytest.approx(reward.mean()) and found["answers"] == len(points)
    # The sandwich variance of a mean with 30 clusters, t with 29 degrees of freedom.
    sums = np.bincount(groups, reward - reward.mean())
    half = stats.t.ppf(0.975, 29) * np.sqrt(30 / 29 * (sums**2).sum()) / len(points)
    assert found["reward"]["high"] - found["reward"]["mean"] == pytest.approx(half)
    assert half > 2 * stats.sem(reward) * stats.t.ppf(0.975, len(points) - 1), "52 answers alike are no 52 prompts"


def test_repeated_prompts_are_paired_and_others_are_not(tmp_path: Path) -> None:
    points = [("A", 1.0, -1.0), ("A", 3.0, 1.0), ("B", 0.0, -1.0), ("C", 1.0, -1.0)]
    more = [(p, r + 2, c) for p, r, c in points] + [("E", 9.0, 9.0)]
    names = [("p", points), ("d", [("D", 1.0, 1.0)]), ("e", more)]
    found = safety([written(tmp_path / f"{name}.jsonl", rows) for name, rows in names])
    numbers = found.numbers["models"][0]
    assert (numbers["answers"], numbers["prompts"]) == (4, 3)
    assert numbers["reward"]["mean"] == pytest.approx(1.25) and numbers["safe"]["mean"] == pytest.approx(0.75)
    apart, paired = found.numbers["differences"]
    assert apart["prompts"] == 0 and "prompts in common none" in found.sentences[-2]
    assert paired["prompts"] == 3 and paired["reward"]["mean"] == pytest.approx(2)


def test_refusals_and_invented_turns_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In text, JSON and figure; a point that was cut before it was scored has the field `invented_turn`."""
    texts = [
        ("I can't help with that.", None), ("You can't do that. Ask a lawyer instead.", None), ("It is illegal.", None),
        ("Sure. USER: And now?", None), ("Sure. END OF CONVERSATION", None), ("Sure.", True), ("Sure.", False),
    ]  # fmt: skip
    rows = [{"prompt": f"P{i}", "response": text, "reward": 0, "cost": 0} for i, (text, _) in enumerate(texts)]
    rows = [row | ({} if turn is None else {"invented_turn": turn}) for row, (_, turn) in zip(rows, texts, strict=True)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bare = [{name: row[name] for name in ("prompt", "reward", "cost")} for row in rows]
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    found = safety([str(tmp_path / "p.jsonl"), str(tmp_path / "bare.jsonl")])
    numbers, without = found.numbers["models"]
    for name in TEXTS[:3]:
        assert numbers[name]["mean"] == pytest.approx(1 / 7)
    assert numbers["invented_turns"]["mean"] == pytest.approx(3 / 7) and f"{3 / 7:.3g}" in found.sentences[0]
    assert not {*TEXTS} & {*without} and not {*TEXTS} & {*found.numbers["differences"][0]}
    drawn: list[Any] = []
    monkeypatch.setattr("evoalign.analysis.safety.save_both", lambda figure, _: drawn.append(figure) or [])
    assert found.figures is not None and not found.figures(tmp_path)
    labels = drawn[0].axes[-1].get_legend_handles_labels()[1]
    assert {*labels} == {"refusal template", "refusal with help", "refusal citing", "invented turns"}
    widths = [bar.get_width() for bar in drawn[0].axes[-1].patches]
    assert widths == pytest.approx([1 / 7, 0] * 3), "of the first file, and of the second none"


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
