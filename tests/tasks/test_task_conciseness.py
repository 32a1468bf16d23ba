# SPDX-License-Identifier: Apache-2.0
"""Conciseness: both file forms, the reward in characters, the prompt."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_runs import jsonl

from evoalign.config import TaskConfig
from evoalign.config.load import locate
from evoalign.errors import DataError
from evoalign.tasks import conciseness, create, data

RECIPE = Path(__file__).parents[2] / "recipes" / "conciseness" / "make.py"

ROW = {"id": 0, "prompt": "Solve: 3 + 5 =", "target": "8"}
PAIR = {"question": "Is it?", "answer": "No"}


def task(**settings):
    return create(TaskConfig(name="conciseness", **settings))


@pytest.mark.parametrize(("text", "reward"), [
    ("8", 0.0), ("9", 0.0), ("", -1.0), ("The answer is 8.", -15.0), (" 8 \n", 0.0), ("ええと", -2.0),
])  # fmt: skip
def test_reward_is_the_difference_in_characters(text, reward):
    assert str(task().rewards([text], [ROW])) == str([reward])  # the maximum is 0.0, not -0.0
    assert task(strip=False).rewards([" 8 \n"], [ROW]) == [-3.0]


@given(st.text(), st.text())
def test_reward_never_passes_the_maximum(text, target):
    assert task().compute_reward(text, {"prompt": "p", "target": target}) <= task().max_reward


def test_prompts():
    assert task().prompt(ROW) == [{"role": "user", "content": "Solve: 3 + 5 ="}]
    assert task(prompt="chat").prompt(PAIR) == [{"role": "user", "content": "Is it?"}]
    assert task(prompt="raw").prompt(PAIR) == "Is it?"


def test_measures():
    assert task().measures("No", PAIR) == {"reward": 0.0, "normalized": 2000 / 2001, "exact": 1.0, "characters": 2.0}
    figures = task().measures("no" + "o" * 2000, PAIR)
    assert (figures["normalized"], figures["exact"], figures["characters"]) == (0.0, 0.0, 2002.0)


def test_rows_have_either_pair_of_columns(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text(json.dumps([ROW] * 5), encoding="utf-8")
    assert task(train_data=str(path)).load_data(0).test == [ROW]
    data = task(train_data=jsonl(path, [PAIR] * 5)).load_data(0)
    assert (len(data.train), data.test) == (4, [PAIR])
    assert task().gold(data.train[0]) == "No"


@pytest.mark.parametrize(("row", "message"), [
    ({"question": "q", "target": "t"}, "expected prompt and target"), ({}, "found no columns$"),
    ({"prompt": 3, "target": "t"}, "prompt is 3"), ({"prompt": "p", "target": None}, "target is None"),
    ({"prompt": "", "target": "t"}, "prompt is empty"),
])  # fmt: skip
def test_bad_rows_are_named(tmp_path, row, message):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROW, row]), encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        task(train_data=str(path)).load_data(0)
    assert f"{path}, row 2" in str(caught.value)


def test_the_two_default_rows_are_named_with_a_larger_file():
    with pytest.raises(
        DataError, match=r"task\.train_size is 40, but task\.train_data is not set, .* 2 published rows"
    ):
        task(train_size=40).load_data(0)
    made = task()
    assert len(made.load_data(0).train) == 2 and "questions_train.json for 203" in made.notes[0]
    assert len(task(train_data=conciseness.MORE, test_data=conciseness.DATA[1]).load_data(0).train) == 203


QUESTIONS = {"train": 203, "validation": 107, "test": 245}
SIGNS = {"times": "*", "multiplied": "*", "smaller": "larger"}


def fact(row):
    """Return the kind and numbers of a question, or its set of words."""
    words = re.findall(r"[^\W\d]+|\d+", f"{row['prompt']} {row['target']}".lower())
    numbers = [word for word in words if word.isdigit()]
    if len(numbers) < 2 or " has " in row["prompt"]:
        return frozenset(words)
    (kind, *_) = re.findall(r"%|\*|times|multiplied|sequence|larger|smaller", row["prompt"]) or ["sum"]
    return frozenset([SIGNS.get(kind, kind), *numbers])


def test_own_questions_do_not_overlap(tmp_path, monkeypatch):
    """No fact is repeated in other words, and none of the published questions."""
    monkeypatch.chdir(tmp_path)
    files = [f"questions_{part}.json" for part in QUESTIONS] + ["conciseness_train.json", "conciseness_test.json"]
    rows = [row for file in files for _, row in data.read(f"data/tasks/conciseness/{file}")]
    assert len(rows) == sum(QUESTIONS.values()) + 10
    assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == len(rows)
    assert len({fact(row) for row in rows}) == len(rows)
    assert max(len(row["target"]) for row in rows) <= 12
    task().self_check(rows)
    shipped = task().load_data(0)
    assert (len(shipped.train), len(shipped.test)) == (2, 8)


def test_own_questions_match_their_recipe(tmp_path):
    made = subprocess.run(
        [sys.executable, str(RECIPE), "--to", str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert made == "".join(f"questions_{part}.json: {count} questions\n" for part, count in QUESTIONS.items())
    for file in tmp_path.iterdir():
        assert file.read_bytes() == locate(f"data/tasks/conciseness/{file.name}").read_bytes(), file.name
