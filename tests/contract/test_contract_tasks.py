# SPDX-License-Identifier: Apache-2.0
"""The contract tests of tasks pass on all registered tasks, and fail on broken ones."""

import itertools
import json

import pytest
from math_rows import GSM8K, MATH, written
from rule_scorer import RuleScorer

from evoalign.config import TaskConfig
from evoalign.tasks import TASKS, Custom, Data, Task, create
from evoalign.tasks.safety import Safety
from evoalign.testing import tasks as contract


def length(text, example):
    """A reward of the simple form."""
    return -abs(len(text) - example["length"])


@pytest.fixture
def make(tmp_path):
    """Makes a registered task: (name, form of the prompt) -> Task."""

    def made(name, prompt=None):
        if name == "safety":
            file = written(tmp_path / "rows.jsonl", [{"prompt": f"Is it safe to lift {i} bricks?"} for i in range(10)])
            return Safety(TaskConfig(name=name, train_data=file, prompt=prompt), RuleScorer())
        if name in ROWS:
            return create(TaskConfig(name=name, train_data=written(tmp_path / "rows.jsonl", ROWS[name]), prompt=prompt))
        if name != "custom":
            return create(TaskConfig(name=name, prompt=prompt))
        rows = [{"prompt": f"Say {i} letters.", "length": i} for i in range(1, 11)]
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return Custom(TaskConfig(name="custom", train_data=str(file), prompt=prompt), [length])

    return made


FORMS = [("conciseness", None), ("conciseness", "raw"), ("countdown", None), ("countdown", "chat"),
         ("countdown", "short"), ("custom", None), ("custom", "chat"), ("gsm8k", None), ("gsm8k", "raw"),
         ("math", None), ("math", "raw"), ("safety", None), ("safety", "chat"), ("safety", "raw")]  # fmt: skip
ROWS = {"gsm8k": GSM8K, "math": MATH}


def test_every_registered_task_is_tested():
    assert {name for name, _ in FORMS} == set(TASKS)


@pytest.mark.parametrize(("name", "prompt"), FORMS)
def test_task_passes_check_task(make, name, prompt):
    contract.check_task(make(name, prompt))


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", TASKS)
def test_task_passes_the_check(make, name, check):
    task = make(name)
    check(task, task.load_data(1))


@pytest.mark.parametrize("name", TASKS)
def test_task_refuses_empty_data(name):
    rewards = [length] if name == "custom" else None
    contract.check_refuses_empty(lambda config: create(config, rewards), TaskConfig(name=name))


class Good(Task):
    name = "good"
    max_reward = 1.0

    def load_data(self, seed):
        return Data([{"word": "a"}, {"word": "b"}], [{"word": "c"}])

    def prompt(self, example):
        return f"Say {example['word']}"

    def compute_reward(self, text, example):
        return float(text == example["word"])

    def gold(self, example):
        return example["word"]


counter = itertools.count()


class NoTest(Good):
    def load_data(self, seed):
        return Data(super().load_data(seed).train, [])


class Shuffled(Good):
    def load_data(self, seed):
        return Data([{"word": f"w{next(counter)}"}], [{"word": "c"}])


class EmptyPrompt(Good):
    def prompt(self, example):
        return ""


class OddPrompt(Good):
    def prompt(self, example):
        return [{"role": "user", "text": "hello"}]


class WrongGold(Good):
    def gold(self, example):
        return "x"


class WrongGoldUnchecked(WrongGold):
    def self_check(self, examples):
        return


class TooGenerous(Good):
    def compute_reward(self, text, example):
        return float(len(text))

    def gold(self, example):
        return None


class NotFinite(Good):
    def rewards(self, texts, examples):
        return [float("inf") if not t else 0.0 for t in texts]

    def gold(self, example):
        return None


class Counts(Good):
    def compute_reward(self, text, example):
        return -float(next(counter))

    def gold(self, example):
        return None


class Writes(Good):
    def compute_reward(self, text, example):
        example["said"] = [*example.get("said", []), text]
        return super().compute_reward(text, example)


class Centred(Good):
    def rewards(self, texts, examples):
        return [r - len(texts) for r in super().rewards(texts, examples)]

    def gold(self, example):
        return None


class CleansTwice(Good):
    def clean(self, text):
        return text[1:]

    def gold(self, example):
        return None


class OddMeasures(Good):
    def measures(self, text, example):
        return {"words": 1.0} if text else {}


class Strict(Good):
    def compute_reward(self, text, example):
        return 1.0 if text.encode() == example["word"].encode() else 0.0


class AcceptsNothing(Good):
    """Trains on an empty file."""

    def load_data(self, seed):
        return Data([], [])


def test_custom_task_passes_check_task():
    contract.check_task(Good(TaskConfig()))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (NoTest, AssertionError, "test split is empty"),
        (Shuffled, AssertionError, "another training split"),
        (EmptyPrompt, AssertionError, "prompt of .* is empty"),
        (OddPrompt, AssertionError, "not a message with strings as role and content"),
        (WrongGold, Exception, "gold answers do not earn 1.0: 'x' of row 0 earns 0.0"),
        (WrongGoldUnchecked, AssertionError, "gold answer 'x' has reward 0.0"),
        (TooGenerous, AssertionError, "above max_reward"),
        (NotFinite, AssertionError, "is inf"),
        (Counts, AssertionError, "depend"),
        (Writes, AssertionError, "changes the rows"),
        (Centred, AssertionError, "depends on the other completions"),
        (CleansTwice, AssertionError, "cleaning .* second time"),
        (OddMeasures, AssertionError, "has measures"),
        (Strict, UnicodeEncodeError, "surrogates not allowed"),
    ],
)
def test_check_task_raises_when_the_task_is_wrong(wrong, error, message):
    with pytest.raises(error, match=message):
        contract.check_task(wrong(TaskConfig()))


def test_check_refuses_empty_raises_when_a_task_accepts_empty_data():
    with pytest.raises(AssertionError, match="0 training rows and no error"):
        contract.check_refuses_empty(AcceptsNothing, TaskConfig())
