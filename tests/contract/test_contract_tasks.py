# SPDX-License-Identifier: Apache-2.0
"""The contract tests of tasks pass on all registered tasks, and fail on broken ones."""

import itertools

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
        rows = ROWS.get(name)
        file = None if rows is None else written(tmp_path / "rows.jsonl", rows)
        config = TaskConfig(name=name, train_data=file, prompt=prompt, **MORE.get(name, {}))
        if name == "safety":
            return Safety(config, RuleScorer())
        return Custom(config, [length]) if name == "custom" else create(config)

    return made


FORMS = [("conciseness", None), ("conciseness", "raw"), ("countdown", None), ("countdown", "chat"),
         ("countdown", "short"), ("custom", None), ("custom", "chat"), ("gsm8k", None), ("gsm8k", "raw"),
         ("math", None), ("math", "raw"), ("safety", None), ("safety", "chat"), ("safety", "raw"),
         ("constraints", None), ("tool_calls", None), ("word_problems", None), ("word_problems", "raw"),
         ("guess", None), ("shopping", None), ("sums", None), ("environment", None)]  # fmt: skip
PLAYED = "harness"
"""A task that scores no completion by itself: its program does."""
NAMES = [name for name in TASKS if name not in (PLAYED, "likelihood")]  # that scores no text
MORE = {"environment": {"environment": f"{__file__}:Counting"}, PLAYED: {"command": "./play.sh {example}"}}
"""Settings that a task needs."""
ROWS = {
    "gsm8k": GSM8K,
    "math": MATH,
    "safety": [{"prompt": f"Is it safe to lift {i} bricks?"} for i in range(10)],
    "custom": [{"prompt": f"Say {i} letters.", "length": i} for i in range(1, 11)],
    "environment": [{"prompt": f"Count to {i}.", "most": i} for i in range(1, 11)],
}


class Counting:
    """An environment of TRL."""

    def reset(self, most, **columns):
        self.left = most

    def count(self, number: int) -> str:
        """Count.

        Args:
            number: The next number.
        """
        self.left -= 1
        return f"{self.left} left"

    def get_reward(self):
        return float(-self.left)


def test_every_registered_task_is_tested():
    assert {name for name, _ in FORMS} == set(NAMES)


@pytest.mark.parametrize(("name", "prompt"), FORMS)
def test_task_passes_check_task(make, name, prompt):
    contract.check_task(make(name, prompt))


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_task_passes_the_check(make, name, check):
    task = make(name)
    check(task, task.load_data(1))


@pytest.mark.parametrize("name", TASKS)
def test_task_refuses_empty_data(name):
    rewards = [length] if name == "custom" else None
    contract.check_refuses_empty(lambda config: create(config, rewards), TaskConfig(name=name, **MORE.get(name, {})))


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


class NoGold(Good):
    def gold(self, example):
        return None


class WrongGold(Good):
    def gold(self, example):
        return "x"


def writes(self, text, example):
    example["said"] = [*example.get("said", []), text]
    return Good.compute_reward(self, text, example)


def strict(self, text, example):
    return float(text.encode() == example["word"].encode())


def shuffled(self, seed):
    return Data([{"word": f"w{next(counter)}"}], [{"word": "c"}])


WRONG = [
    (Good, "load_data", lambda self, seed: Data([{"word": "a"}], []), "test split is empty"),
    (Good, "load_data", shuffled, "another training split"),
    (Good, "prompt", lambda *_: "", "prompt of .* is empty"),
    (Good, "prompt", lambda *_: [{"role": "user", "text": "hello"}], "not a message with strings as role and content"),
    (WrongGold, "self_check", lambda *_: None, "gold answer 'x' has reward 0.0"),
    (NoGold, "compute_reward", lambda self, text, example: float(len(text)), "above max_reward"),
    (NoGold, "rewards", lambda self, texts, examples: [0.0 if t else float("inf") for t in texts], "is inf"),
    (NoGold, "compute_reward", lambda *_: -float(next(counter)), "depend"),
    (Good, "compute_reward", writes, "changes the rows"),
    (NoGold, "rewards", lambda self, texts, examples: [-float(len(texts))] * len(texts), "on the other completions"),
    (NoGold, "clean", lambda self, text: text[1:], "cleaning .* second time"),
    (Good, "measures", lambda self, text, example: {"words": 1.0} if text else {}, "has measures"),
]


def test_custom_task_passes_check_task():
    contract.check_task(Good(TaskConfig()))


@pytest.mark.parametrize(("task", "method", "wrong", "message"), WRONG)
def test_check_task_raises_when_the_task_is_wrong(task, method, wrong, message):
    with pytest.raises(AssertionError, match=message):
        contract.check_task(type("Broken", (task,), {method: wrong})(TaskConfig()))


def test_check_task_raises_what_the_task_raises():
    with pytest.raises(Exception, match=r"gold answers do not earn 1\.0: 'x' of row 0 earns 0.0"):
        contract.check_task(WrongGold(TaskConfig()))
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        contract.check_task(type("Strict", (Good,), {"compute_reward": strict})(TaskConfig()))


def test_check_refuses_empty_raises_when_a_task_accepts_empty_data():
    accepting = type("Accepting", (Good,), {"load_data": lambda *_: Data([], [])})
    with pytest.raises(AssertionError, match="0 training rows and no error"):
        contract.check_refuses_empty(accepting, TaskConfig())
