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
from test_mixer import base_weights, of_task, plain, write

import evoalign
from evoalign import statistics, tokens
from evoalign.analysis import forgetting
from evoalign.analysis.forgetting import Course, Forgetting, Settings, measure, with_scores
from evoalign.analysis.mixer import effective
from evoalign.analysis.targets import locate
from evoalign.config import load, to_yaml
from evoalign.errors import ConfigError, DataError
from evoalign.rundir.directory import saved_folders

SMALL = Settings(examples=6, pieces=5, window=12, placebos=3)
WORDS = "The quick brown fox jumps over the lazy dog, and then it sleeps until the rain has gone away again. " * 3


@pytest.fixture(scope="module")
def folder(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, another task, and a text."""
    root = tmp_path_factory.mktemp("forgetting")
    (root / "run").symlink_to(trained / "lora")
    (root / "other.yaml").write_text(to_yaml(of_task(task={"name": "countdown"}, evaluation={"max_tokens": 24})))
    (root / "text.txt").write_text(WORDS)
    return root


def nats(model: Any, window: int, pieces: int) -> list[float]:
    ids = tokens.load(of_task().model).encode_text(WORDS)
    cut = [torch.tensor([ids[i : i + window]]) for i in range(0, min(len(ids), window * pieces), window)]
    return [float(model(input_ids=piece, labels=piece).loss.detach()) for piece in cut]


@pytest.mark.slow
def test_perplexity_and_accuracy_of_checkpoints_and_placebos(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder / "run"
    settings = replace(SMALL, tasks=(folder / "other.yaml",), text=folder / "text.txt")
    task, text = measure([locate(str(run), None)], settings)
    saved = saved_folders(run)
    assert task.probe == "countdown accuracy" and task.steps == text.steps == tuple(range(3 - len(saved), 3))
    np.testing.assert_allclose(text.base_E, nats(plain(), 12, 5), rtol=1e-4)
    for weights, own_E in zip(saved, text.own_E, strict=True):
        model = plain()
        merged = effective(locate(str(weights), None), torch.float32)
        model.load_state_dict({**model.state_dict(), **merged})
        model.tie_weights()
        np.testing.assert_allclose(own_E, nats(model, 12, 5), rtol=1e-4)
    asked = load([folder / "other.yaml"])
    wanted = evoalign.evaluate(str(saved[-1]), config=asked, split="test").measures_E["accuracy"]
    assert list(task.own_E[-1]) == list(wanted[:6])
    assert len(task.placebo_KE) == len(text.placebo_KE) == 3
    assert len({tuple(p) for p in text.placebo_KE}) == 3 and not np.array_equal(text.placebo_KE[0], text.own_E[-1])
    monkeypatch.setattr(forgetting, "measure", lambda *_: [task, text])
    (_, line, *_) = Forgetting().run([str(run)], settings).sentences
    assert "by 3 placebos" in line and "perplexity" in line and "beyond placebos" in line


def test_a_broken_model_is_worse_and_an_equal_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    write(Path("same"), base_weights())
    write(Path("broken"), {n: p + torch.randn_like(p) for n, p in base_weights().items()})
    settings = replace(SMALL, pieces=8, examples=8, window=40)
    same, broken = measure([locate(name, of_task()) for name in ("same", "broken")], settings)
    found = Forgetting().run(["same", "broken"], settings, of_task())
    assert list(same.base_E) == list(same.own_E[0]) and broken.changes[0].low is not None and broken.changes[0].low > 0
    assert "no significant change" in found.sentences[0] and ", worse" in found.sentences[1]
    course = found.numbers["courses"][1]
    assert course["points"][0]["perplexity"] > course["base"]["perplexity"]


def test_one_more_placebo_does_not_forget_more_than_noise() -> None:
    """Placebos differ among each other: an interval of their mean alone lies beside 0 for half of them."""
    random, said = np.random.default_rng(0), 0
    base_E = random.normal(size=40)
    for _ in range(200):
        ends_KE = base_E + random.normal(size=(9, 1)) + 0.3 * random.normal(size=(9, 40))
        course = Course("run", "p", True, False, (1,), base_E, (ends_KE[0],), tuple(ends_KE[1:]))
        said += statistics.is_sure(course.beyond)
    assert said < 20
    far = Course("run", "p", True, False, (1,), base_E, (ends_KE[0] - 20,), tuple(ends_KE[1:]))
    assert far.beyond is not None and statistics.is_sure(far.beyond) and far.beyond.mean < -15


def test_without_a_text_the_test_prompts_are_read_and_the_trained_task_is_marked(folder: Path) -> None:
    (folder / "own.yaml").write_text((folder / "run" / "config.yaml").read_text())
    run, settings = [str(folder / "run")], replace(SMALL, placebos=0, pieces=3, examples=3)
    found = Forgetting().run(run, settings)
    (course,) = found.numbers["courses"]
    assert course["probe"] == "nats per token of the test prompts" and course["items"] == 3
    assert course["drift"] is None and course["beyond_drift"] is None
    text = " ".join(found.sentences)
    assert "text=FILE" in text and "set placebos=5" in text and "tasks=[other.yaml]" in text
    found = Forgetting().run(run, replace(settings, tasks=(folder / "own.yaml",), examples=2))
    assert found.numbers["courses"][0]["trained"] and "trained on" in found.sentences[0]


def test_examples_that_a_measure_does_not_apply_to_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward may be None of some; numbers are JSON all the same."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "def brief(text, example):\n    return None if '2' in example['prompt'] else -float(len(text))\n"
        "def one(text, example):\n    return 1.0\n"
    )
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"What is {i}?"}) + "\n" for i in range(6)))
    rewards = {"rewards": ["own.py:brief", "own.py:one"], "train_data": "rows.jsonl", "test_data": "rows.jsonl"}
    config = of_task(task={"name": "custom", **rewards}, grader={"isolated": False})
    Path("own.yaml").write_text(to_yaml(config))
    write(Path("same"), base_weights())
    settings = replace(SMALL, tasks=(Path("own.yaml"),), measure="reward/brief")
    numbers = Forgetting().run(["same"], settings, config).numbers
    assert numbers["courses"][0]["items"] == 5 and json.dumps(numbers, allow_nan=False)
    apart = [np.array([1.0, np.nan]), np.array([np.nan, 1.0])]  # as where it depends on the answer
    with pytest.raises(ConfigError, match="reward/brief applies to no evaluated example"):
        with_scores(apart, "custom reward/brief")


def test_refusals_name_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    odd, empty = tmp_path / "odd.txt", tmp_path / "empty.txt"
    odd.write_bytes(b"\xff\xfe\xff")
    empty.write_bytes(b"")
    nonsense = Settings(tasks=(folder / "other.yaml",), measure="nonsense", placebos=0)
    for settings, error, said in ((Settings(examples=0), ConfigError, "examples: 0"),
                                  (Settings(text=odd), ConfigError, r"odd.txt is not UTF-8"),
                                  (Settings(text=empty, placebos=0), DataError, "no text of two tokens"),
                                  (nonsense, ConfigError, "has no nonsense; it has")):  # fmt: skip
        with pytest.raises(error, match=said):
            Forgetting().run([str(folder / "run")], settings)
