# SPDX-License-Identifier: Apache-2.0
"""What a model lost beside its task: perplexity against plain transformers, accuracy against `evaluate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_lab import ES, of_task, plain, write

import evoalign
from calling import caller
from evoalign import tokens
from evoalign.analysis.forgetting.command import Settings
from evoalign.analysis.forgetting.compute import Course, _known, _of_course, forgetting  # pyright: ignore[reportPrivateUsage]
from evoalign.analysis.forgetting.points import Accuracy
from evoalign.analysis.lab import effective
from evoalign.analysis.targets import locate
from evoalign.config import load, to_yaml
from evoalign.errors import ConfigError, DataError
from evoalign.rundir.directory import saved_folders
from plain import UNCHECKED

SMALL = Settings(examples=6, pieces=5, window=12, placebos=3)
WORDS = "The quick brown fox jumps over the lazy dog, and then it sleeps until the rain has gone away again. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of conciseness with three checkpoints, another task, and a text."""
    root = tmp_path_factory.mktemp("forgetting")
    evoalign.train({
        "output_dir": str(root / "run"), "seed": 3, "es": {**ES, "num_generations": 2, "sigma": 0.1},
        "evaluation": {"max_tokens": 8}, "model": {"name": "tiny", "dtype": "float32"}, "checks": UNCHECKED,
        "checkpoint": {"every": 1, "keep_last": 3},
    })  # fmt: skip
    other = of_task(task={"name": "countdown"}, evaluation={"max_tokens": 24})
    (root / "other.yaml").write_text(to_yaml(other))
    (root / "text.txt").write_text(WORDS)
    return root


def nats(model: Any, window: int, pieces: int) -> list[float]:
    """By the loss of plain transformers."""
    ids = tokens.load(of_task().model).encode_text(WORDS)
    cut = [torch.tensor([ids[i : i + window]]) for i in range(0, min(len(ids), window * pieces), window)]
    with torch.no_grad():
        return [float(model(input_ids=piece, labels=piece).loss) for piece in cut]


@pytest.mark.slow
def test_perplexity_and_accuracy_over_checkpoints_beside_placebos(folder: Path) -> None:
    run = folder / "run"
    settings = replace(SMALL, tasks=(folder / "other.yaml",), text=folder / "text.txt")
    found = forgetting([str(run)], settings, None)
    task, text = found.courses
    saved = saved_folders(run)
    assert task.probe == "countdown accuracy" and task.steps == text.steps == tuple(range(3 - len(saved), 3))
    np.testing.assert_allclose(text.base_E, nats(plain(), 12, 5), rtol=1e-4)
    for weights, own_E in zip(saved, text.own_E, strict=True):
        model = plain()
        merged = effective(locate(str(weights), None), torch.float32)
        model.load_state_dict({**model.state_dict(), **merged})
        model.tie_weights()
        np.testing.assert_allclose(own_E, nats(model, 12, 5), rtol=1e-4)
    asked = load([folder / "other.yaml"], needs_es=False)
    wanted = evoalign.evaluate(str(saved[-1]), config=asked, split="test").measures_E["accuracy"]
    assert list(task.own_E[-1]) == list(wanted[:6])
    assert len(task.placebo_KE) == len(text.placebo_KE) == 3
    assert len({tuple(p) for p in text.placebo_KE}) == 3 and not np.array_equal(text.placebo_KE[0], text.own_E[-1])
    said = " ".join(found.sentences)
    assert "3 placebos change it by" in said and "(perplexity" in said and "No placebo" not in said


def test_a_broken_model_is_told_from_one_that_did_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    start = {name: p.detach() for name, p in plain().named_parameters()}
    write(tmp_path / "same", start)
    write(tmp_path / "broken", {n: p + torch.randn_like(p) for n, p in start.items()})
    config = of_task()
    found = forgetting(["same", "broken"], replace(SMALL, pieces=8, examples=8, window=40), config)
    same, broken = found.courses
    assert list(same.base_E) == list(same.own_E[0]) and broken.changes[0].low is not None and broken.changes[0].low > 0
    assert "not shown to be any" in found.sentences[0] and "worse by" in found.sentences[1]
    assert found.numbers["courses"][1]["points"][0]["perplexity"] > found.numbers["courses"][1]["base"]["perplexity"]


def test_the_worst_of_checkpoints_is_said_to_be_the_worst_of_so_many() -> None:
    own_E = tuple(np.full(4, mean) for mean in (0.5, 0.2, 0.4))
    for falls, worst, way in ((True, 0.2, "low"), (False, 0.5, "high")):
        (line, *_) = _of_course(Course("run", "probe", falls, False, (1, 2, 3), np.full(4, 0.6), own_E, ()))
        assert line.endswith(f"; the worst of its 3 checkpoints {worst}, and the worst of 3 is {way} by chance, too.")


def test_a_run_that_is_one_placebo_more_is_not_said_to_forget_more_than_noise() -> None:
    """Placebos differ among each other: an interval of their mean alone lies beside 0 for half of them."""
    random, said = np.random.default_rng(0), 0
    base_E = random.normal(size=40)
    for _ in range(200):
        ends_KE = base_E + random.normal(size=(9, 1)) + 0.3 * random.normal(size=(9, 40))
        course = Course("run", "p", True, False, (1,), base_E, (ends_KE[0],), tuple(ends_KE[1:]))
        said += "by noise alone" in " ".join(_of_course(course))
    assert said < 20
    far = Course("run", "p", True, False, (1,), base_E, (ends_KE[0] - 20,), tuple(ends_KE[1:]))
    assert "more is forgotten than by noise alone" in " ".join(_of_course(far))


def test_without_a_text_the_test_prompts_are_read(folder: Path) -> None:
    found = forgetting([str(folder / "run")], replace(SMALL, placebos=0, pieces=3, examples=3), None)
    (course,) = found.courses
    assert course.probe == "nats a token of the test prompts" and len(course.base_E) == 3
    said = " ".join(found.sentences)
    assert "give one that has nothing to do with the task" in said and "No placebo was asked" in said
    assert "No task was asked" in said


def test_a_task_that_was_trained_on_is_said_to_be(folder: Path) -> None:
    own = folder / "own.yaml"
    own.write_text((folder / "run" / "config.yaml").read_text())
    found = forgetting([str(folder / "run")], replace(SMALL, placebos=0, tasks=(own,), examples=2), None)
    assert found.courses[0].trained and "it is a task that the target was trained on" in found.sentences[0]


def test_examples_that_a_measure_does_not_apply_to_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward may be None of some; numbers are JSON all the same."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "def brief(text, example):\n    return None if '2' in example['prompt'] else -float(len(text))\n"
        "def one(text, example):\n    return 1.0\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"What is {i}?"}) + "\n" for i in range(6)))
    task = {"name": "custom", "train_data": "rows.jsonl", "test_data": "rows.jsonl",
            "rewards": ["own.py:brief", "own.py:one"]}  # fmt: skip
    config = of_task(task=task, grader={"isolated": False})
    (tmp_path / "own.yaml").write_text(to_yaml(config))
    write(tmp_path / "same", {name: p.detach() for name, p in plain().named_parameters()})
    settings = replace(SMALL, tasks=(Path("own.yaml"),), measure="reward/brief")
    found = forgetting(["same"], settings, config)
    assert len(found.courses[0].base_E) == 5 and np.isfinite(found.courses[0].base_E).all()
    (tmp_path / "out").mkdir()
    found.write(tmp_path / "out", "forgetting")
    assert json.loads((tmp_path / "out/forgetting.json").read_text())["numbers"]["courses"][0]["items"] == 5
    apart = [np.array([1.0, np.nan]), np.array([np.nan, 1.0])]  # as where it depends on the answer
    with pytest.raises(ConfigError, match="reward/brief applies to no example"):
        _known(apart, Accuracy(config, "reward/brief"))


def test_the_command_writes_numbers_words_and_figures(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = caller(monkeypatch, capsys, 300)
    sets = [w for text in (f"tasks=[{folder / 'other.yaml'}]", "placebos=1", "examples=2", "pieces=2")
            for w in ("--set", text)]  # fmt: skip
    done = run("analyze", "forgetting", folder / "run", *sets, "--to", tmp_path / "out")
    assert done.code == 0, done.err
    tree = json.loads((tmp_path / "out/forgetting.json").read_text())["numbers"]
    assert [course["probe"] for course in tree["courses"]] == ["countdown accuracy", "nats a token of the test prompts"]
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"forgetting.json", "forgetting.png", "forgetting.svg"}


def test_refusals_name_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    run = [str(folder / "run")]
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="is given twice"):
        forgetting(run * 2, SMALL, None)
    with pytest.raises(ConfigError, match="examples: 0 is none"):
        forgetting(run, replace(SMALL, examples=0), None)
    with pytest.raises(ConfigError, match=r"odd.txt is not UTF-8"):
        forgetting(run, replace(SMALL, text=tmp_path / "odd.txt"), None)
    with pytest.raises(DataError, match="no text of two tokens"):
        forgetting(run, replace(SMALL, text=tmp_path / "empty.txt", placebos=0), None)
    with pytest.raises(ConfigError, match="has no nonsense; it has"):
        forgetting(run, replace(SMALL, tasks=(folder / "other.yaml",), measure="nonsense", placebos=0), None)
