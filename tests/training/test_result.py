# SPDX-License-Identifier: Apache-2.0
"""What a run that ends in garbage says of itself, whatever its reward does."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import evoalign
from evoalign.checks import fluency
from evoalign.checks.verdict import judge
from evoalign.errors import ModelError
from evoalign.rundir.directory import RunDir
from evoalign.training.result import judged_again


def short(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    return [-float(len(text.strip())) for text in completions]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    rows = [{"prompt": f"What is {a} + {b}?"} for a in range(4) for b in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = str(folder / "rows.jsonl")
    return {"task": {"name": "custom", "train_data": data, "test_data": data}, "lora": {"rank": 1},
            "grader": {"isolated": False}, "engine": {"device": "cpu", "threads": 1},
            "output_dir": str(folder / "run"), **changes}  # fmt: skip


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[evoalign.Result, str]:
    """Noise far too wide, steps far too long, and a reward that an empty text earns."""
    folder = tmp_path_factory.mktemp("broken")
    told = Console(file=io.StringIO(), width=120)
    tree = settings(
        folder,
        es={"num_generations": 4, "population_size": 4, "sigma": 2.0, "learning_rate": 4.0},
        evaluation={"max_tokens": 24},
        checks={"control_every": 2, "placebo": 0},
    )
    result = evoalign.train(tree, reward=short, console=told)
    return result, told.file.getvalue()  # type: ignore[attr-defined]


def test_what_alarms_stands_above_the_table_with_completions(broken: tuple[evoalign.Result, str]) -> None:
    result, told = broken
    assert result.verdict is not None and result.verdict.word is not None
    word = result.verdict.word
    above, below = told.split("\ntest split", 1)
    assert f"{word.upper()}: what the test completions say, whatever they earn" in above
    assert "of the test completions are broken" in above and "for example" in above
    assert len(result.verdict.shown) == 2
    assert f"{word}, by what it says; " in below  # and not the bare word learning
    assert not any(line.startswith("learning") for line in told.splitlines())


def test_the_verdict_is_written_down(broken: tuple[evoalign.Result, str]) -> None:
    result, _ = broken
    assert result.verdict is not None
    written = json.loads((result.path / "results/evaluation.json").read_text())["alarms"]
    assert written == json.loads(json.dumps(result.verdict.as_dict()))
    assert written["verdict"] == result.verdict.word and written["reasons"]
    assert written["shares"]["after"]["degenerate"] > 0.5
    assert written["nats_a_token"]["before"] > 0
    again = judged_again(RunDir(result.path), result.before, result.after)
    assert (again.word, again.reasons) == (result.verdict.word, result.verdict.reasons)


def test_a_result_without_alarms_is_judged_by_its_texts(broken: tuple[evoalign.Result, str], tmp_path: Path) -> None:
    result, _ = broken
    assert judged_again(RunDir(tmp_path), result.before, result.after) == judge(
        result.before.completions, result.after.completions
    )


def test_nats_that_cannot_be_measured_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise ModelError("it does not fit")

    monkeypatch.setattr(fluency, "measure", refuse)
    told = Console(file=io.StringIO(), width=120)
    es = {"num_generations": 1, "population_size": 2, "sigma": 0.01, "learning_rate": 0.005}
    tree = settings(tmp_path, es=es, evaluation={"max_tokens": 4}, checks={"control_every": 0, "placebo": 0})
    result = evoalign.train(tree, reward=short, console=told)
    line = "warning: nats a token were not measured (it does not fit); the run is whole without them; to measure them, "
    assert line in told.file.getvalue()  # type: ignore[attr-defined]
    written = json.loads((result.path / "results/evaluation.json").read_text())["alarms"]
    assert written["nats_a_token"] is None and written["verdict"] is None
