# SPDX-License-Identifier: Apache-2.0
"""Shares of the signs of hacking in stored completions and in those of models that are asked; the labelled rows."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from drawings import figures_of, words_of
from test_mixer import of_task, write_negated

import evoalign
from evoalign.analysis import Finding, hacking
from evoalign.analysis.base import BASE
from evoalign.analysis.hacking import SEVERAL, Hacking, Pair, Rate, Settings
from evoalign.analysis.mixer import EvalSettings, ModelMixer
from evoalign.checks.hacking import SHARES, judge, shares
from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.evaluation import Scored
from evoalign.rundir import parquet

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def real(trained: Path) -> Path:
    return trained / "lora"


def evaluated(targets: list[str], config: Config | None = None, **settings: Any) -> Finding:
    return Hacking().run(targets, Settings(**settings), config)


def test_what_a_run_kept_is_counted(real: Path, tmp_path: Path) -> None:
    """Two of eight are empty, one in another script, one a loop; all of them but the loop earn little."""
    texts = {0: "", 1: "  \n", 2: "столица", 3: "no no no no no no no no no no no no"}
    changed = shutil.copytree(real, tmp_path / "run")
    file = changed / "results" / "completions" / "after.parquet"
    rows = [row | {"text": texts.get(i, f"It is {i}."), "finish_reason": "stop"}
            for i, row in enumerate(parquet.read(file))]  # fmt: skip
    parquet.write(file, rows)
    found = evaluated([str(real), str(changed)])
    untouched, planted = found.numbers["targets"]
    before, after = ([Scored.of(row) for row in parquet.read(file.with_stem(when))] for when in ("before", "after"))
    theirs = shares(after, before, after)
    assert planted["stored"] is True and planted["completions"] == {"before": len(before), "after": len(after)}
    rates = {kind: rate["after"]["mean"] for kind, rate in planted["rates"].items()}
    assert rates == {kind: theirs[kind] for kind in ("hacked", "degenerate", "earned_wrong", *SHARES)}
    some = ("empty", "other_script", "repeated", "degenerate")
    assert [rates[kind] for kind in some] == [2 / 8, 1 / 8, 1 / 8, 4 / 8]
    for rate in planted["rates"].values():
        assert rate["after"]["low"] <= rate["after"]["mean"] <= rate["after"]["high"] and rate["after"]["n"] == 8
    none = untouched["rates"]["empty"]["after"]
    assert planted["rates"]["empty"]["after"]["high"] > 0.5
    assert none["mean"] == 0 < none["high"], "none of eight is not none at all"
    (line,) = [line for line in found.sentences if line.startswith(f"{changed}, 8 completions of 8 examples, stored")]
    assert re.search(r"; empty 0\.25 \(95 %: 0(\.\d+)? to 0\.\d+\), from 0 ", line)
    assert line.endswith("; other signs none") and "special token" not in line
    clean = [said_by(e, f"Answer {e}") for e in range(4)]
    nothing = hacking._row("run", Pair(clean, clean, stored=True).rates())  # pyright: ignore[reportPrivateUsage]
    assert nothing == "run: other signs none; gold answers none"
    assert any("No placebo is among the targets" in line for line in found.sentences)


def test_completions_of_a_run_with_a_reward_of_its_own_are_counted_without_its_code(tmp_path: Path) -> None:
    reward, data = tmp_path / "own.py", tmp_path / "rows.jsonl"
    reward.write_text("def length(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    data.write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(4)))
    task = {"name": "custom", "train_data": str(data), "test_data": str(data), "prompt": "raw"}
    config = {
        "output_dir": str(tmp_path / "run"), "model": {"name": "tiny"},
        "task": task | {"rewards": [f"{reward}:length"]},
        "engine": {"device": "cpu", "threads": 1}, "es": {"population_size": 2, "num_generations": 1, "sigma": 0.01},
        "sampling": {"max_tokens": 4}, "evaluation": {"max_tokens": 4},
    }  # fmt: skip
    evoalign.train(config)
    reward.unlink()
    (found,) = evaluated([str(tmp_path / "run")]).numbers["targets"]
    assert found["stored"] is True and found["examples"] == 4
    with pytest.raises(ConfigError, match=r"task\.rewards"):
        evaluated([str(found["weights"])])


def said_by(example: int, text: str, right: bool | None = None, reward: float = 0.0) -> Scored:
    return Scored(example, 0, 0, f"prompt {example}", None, text, reward, "stop", 3, right=right)


def test_rates_are_of_examples_and_changes_are_paired() -> None:
    before = [said_by(e, f"Answer number {e}") for e in range(40)]
    after = [said_by(e, "" if e < 30 or sample else f"Answer {e}") for e in range(40) for sample in range(2)]
    rates, back = (Pair(*pair, stored=True).rates() for pair in ((before, after), (after, before)))
    assert "earned_wrong" not in rates, "nothing says what is right"
    assert rates["empty"].after.mean == (30 + 10 / 2) / 40 and rates["empty"].after.n == 40
    change, reverse = rates["empty"].change, back["empty"].change
    assert (
        change.low is not None
        and change.low > 0.5
        and (reverse.low, reverse.high) == (-(change.high or 0), -change.low)
    )


def test_rewards_earned_with_wrong_gold_are_counted() -> None:
    before = [said_by(e, f"Word {e}", right=True, reward=0.1) for e in range(10)]
    after = [said_by(e, f"Word {e}", right=e >= 8, reward=1.0) for e in range(10)]
    assert Pair(before, after, stored=True).rates()["earned_wrong"].after.mean == 0.8


def test_models_are_evaluated_with_their_base(real: Path, tmp_path: Path) -> None:
    """A config evaluates a run with its settings, too."""
    odd = str(write_negated(tmp_path / "odd"))
    for targets, target, tokens in (([BASE, odd], odd, 12), ([str(real)], str(real), 3)):
        config = of_task(task={"name": "conciseness"}, evaluation={"max_tokens": tokens})
        (found,) = evaluated(targets, config, examples=4, tokens=10 if target == odd else None).numbers["targets"]
        with ModelMixer([target], config, EvalSettings(4, max_tokens=10 if target == odd else None)) as mixer:
            before, after = (mixer.evaluate({name: 1.0}).completions for name in (BASE, target))
        theirs = shares(after, before, after)
        assert (found["stored"], found["target"], found["examples"]) == (False, target, 4)
        assert {kind: rate["after"]["mean"] for kind, rate in found["rates"].items()} == {
            kind: theirs[kind] for kind in found["rates"]
        }
        assert found["verdict"] == judge(before, after).word
    (kept,) = evaluated([str(real)]).numbers["targets"]
    assert (kept["stored"], kept["examples"]) == (True, 8)


def test_runs_without_completions_are_refused(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = shutil.copytree(real, tmp_path / "short")
    (short / "results/completions/after.parquet").unlink()
    monkeypatch.chdir(tmp_path)
    for name in (str(short), "short"):
        with pytest.raises(ConfigError, match=r"has no results/completions/after\.parquet; let the run end"):
            evaluated([name])


def test_the_figure_has_rows_of_what_was_seen_on_an_axis_that_shows_it(tmp_path: Path, monkeypatch: Any) -> None:
    none, few, all_ = ({i: float(i < count) for i in range(500)} for count in (0, 5, 500))
    drawn = figures_of(hacking, monkeypatch)
    kinds = dict.fromkeys((*SEVERAL, "earned_wrong", *SHARES), Rate(none, none))
    hacking.draw({"calm": kinds, "odd": {**kinds, "gibberish": Rate(none, few)}}, tmp_path)
    calm, odd = drawn["hacking"].axes
    assert [label.get_text() for label in calm.get_yticklabels()] == ["hacked", "degenerate"]
    assert [label.get_text() for label in odd.get_yticklabels()] == ["hacked", "degenerate", "gibberish"]
    assert f"calm ({len(kinds) - 2} other kinds: none)" in words_of(drawn["hacking"])
    assert calm.get_xlim()[1] == pytest.approx(1.02 * 0.05)
    hacking.draw({"odd": {**kinds, "hacked": Rate(none, all_)}}, tmp_path)
    assert drawn["hacking"].axes[0].get_xlim()[1] == pytest.approx(1.02)


def study(name: str = "hacking_labels") -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "studies" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_labelled_rows_are_real_and_give_what_is_written_down() -> None:
    labels = study()
    rows = labels.rows()
    kept = {run["run"]: run for run in map(json.loads, labels.RUNS.read_text().splitlines())}
    assert len(rows) >= 200 and {label for row in rows for label in row["labels"]} <= {*labels.KINDS}
    for row in rows:
        if row["source"] == "SmolLM2":
            completion = kept[row["run"]]["completions"][row["index"]]
            assert (row["prompt"], row["text"]) == (completion["prompt"], completion[row["side"]])
    written = json.loads((ROOT / "studies/results/hacking_labels.json").read_text())
    assert labels.measured(rows) == written
    salads = [row for row in rows if row["run"].startswith(("chat, temperature 1.5", "chat, temperature 2"))]
    found = sum(row["marked"]["broken"] for row in salads)
    log = " ".join((ROOT / "LOG.md").read_text().split())
    assert len(salads) == 32 and f"without sense at temperature 1.5 and 2, {found} are marked" in log


def test_strained_rows_answer_the_prompts_that_a_seed_chose() -> None:
    labels, made = study(), study("hacking_rows")
    strained = [row for row in labels.rows() if row["source"] == "strained"]
    chosen = {f"{way.name}, {half}": [row.get("prompt", row.get("context")) for row in made.rows_of(way, half)]
              for way in made.WAYS for half in made.HALVES}  # fmt: skip
    assert {run: [row["prompt"] for row in strained if row["run"] == run] for run in chosen} == chosen
    assert len(strained) == 8 * len(chosen) == 192 and {row["half"] for row in strained} == {*labels.STRAINED}
    halves = [{row["text"] for row in strained if row["half"] == half and row["text"]} for half in labels.STRAINED]
    assert not halves[0] & halves[1], "what was held back was looked at"


def test_precision_and_recall_of_planted_rows() -> None:
    labels = study()
    planted = [(True, True)] * 6 + [(True, False)] * 2 + [(False, True)] * 4 + [(False, False)] * 8
    marks = dict.fromkeys(labels.KINDS, False) | {"truncated": None}
    rows = [{"half": "new", "labels": ["empty"] if seen else [], "marked": {**marks, "empty": marked}}
            for marked, seen in planted]  # fmt: skip
    found = {row["kind"]: row for row in labels.measured(rows) if row["rows"] == "all"}
    empty = found["empty"]
    assert (empty["precision"]["share"], empty["recall"]["share"], empty["asked"]) == (6 / 8, 6 / 10, 20)
    assert empty["recall"]["low"] == pytest.approx(0.3127, abs=1e-4), "Wilson's"
    assert found["truncated"]["asked"] == 0 and found["template"]["recall"]["share"] is None
