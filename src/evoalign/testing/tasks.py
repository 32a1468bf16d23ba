# SPDX-License-Identifier: Apache-2.0
"""What every task promises: splits that are there and repeat, prompts, pure and finite rewards, true gold answers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from evoalign.config import TaskConfig
from evoalign.errors import EvoalignError
from evoalign.rewards.functions import fresh
from evoalign.tasks import Data, Task
from evoalign.tasks.data.spool import held
from evoalign.types import Example

COMPLETIONS = (
    "", " ", "\n\n", "8", "No", "yes, of course\n", "<answer>1 + 1</answer>", "</think>\n<answer></answer>", "<answer>",
    "9**9**9", "((((", "0/0", "nan", "1e999", "\x00", "\ud800", "٣ ２ ²", "🧮" * 10, "a" * 100_000, "word " * 5_000,
    "<|im_end|>", "{}", "[]", "null", "\\", "'\"`", "-" * 1_000,
)  # fmt: skip
"""What a model may say: every task has to give each of these a finite reward."""
ROWS = 20
"""Rows of each split that the dearer checks look at."""

Check: TypeAlias = Callable[[Task, Data], None]


def check_task(task: Task, seed: int = 0) -> None:
    """All of `CHECKS` on the task's own data. Raises AssertionError.

    `check_refuses_empty` is for tasks that read `task.train_data`.
    """
    data = task.load_data(seed)
    for check in CHECKS:
        check(task, data)
    check_loading_repeats(task, seed)


def check_loading_repeats(task: Task, seed: int = 0) -> None:
    """One seed always gives the same splits in the same order."""
    first, second = task.load_data(seed), task.load_data(seed)
    assert list(first.train) == list(second.train), "the same seed gives another training split"
    assert list(first.test) == list(second.test), "the same seed gives another test split"
    assert list(first.validation) == list(second.validation), "the same seed gives another validation split"


def check_splits(task: Task, data: Data) -> None:
    """Training and test split have rows; what is asked for in validation is asked for nowhere else.

    A run warns of shared prompts and goes on; a task that hands out one row twice is wrong.
    """
    assert len(data.train) > 0, "the training split is empty"
    assert len(data.test) > 0, "the test split is empty"
    chosen_by = {id(row) for _, row in held(data.validation)}
    assert not any(id(row) in chosen_by for _, row in held(data.train)), "a validation row is a training row too"
    assert not any(id(row) in chosen_by for _, row in held(data.test)), "a validation row is a test row too"


def check_prompts(task: Task, data: Data) -> None:
    """A prompt is a string or messages, never empty, and the same each time."""
    for row in _rows(data):
        prompt = task.prompt(row)
        assert prompt, f"the prompt of {row} is empty"
        assert task.prompt(row) == prompt, f"the prompt of {row} is another the second time"
        if isinstance(prompt, str):
            continue
        for message in cast("list[dict[str, object]]", prompt):
            known = message.keys() >= {"role", "content"} and all(isinstance(v, str) for v in message.values())
            assert known, f"{message} is no message with role and content"


def check_gold_answers(task: Task, data: Data) -> None:
    """Every gold answer earns the maximum; `self_check` agrees."""
    task.self_check(data.train)
    task.self_check(data.test)
    task.self_check(data.validation)
    for row in _rows(data):
        gold = task.gold(row)
        if gold is not None:
            reward = task.rewards([gold], [row])[0]
            assert reward == task.max_reward, f"the gold answer {gold!r} earns {reward}, not {task.max_reward}"


def check_rewards(task: Task, data: Data) -> None:
    """Whatever is said earns one finite float, at most the maximum."""
    for row in _rows(data)[:5]:
        rewards = task.rewards(COMPLETIONS, [row] * len(COMPLETIONS))
        assert len(rewards) == len(COMPLETIONS), f"{len(rewards)} rewards for {len(COMPLETIONS)} completions"
        for text, reward in zip(COMPLETIONS, rewards, strict=True):
            assert type(reward) is float, f"the reward of {text[:40]!r} is {reward!r}, not a float"
            assert math.isfinite(reward), f"the reward of {text[:40]!r} is {reward}"
            assert reward <= task.max_reward, f"{text[:40]!r} earns {reward}, more than the maximum {task.max_reward}"


def check_rewards_are_pure(task: Task, data: Data) -> None:
    """A reward depends on its own text and row alone: not on the order, the batch or what was scored before."""
    rows = _rows(data)
    texts = [COMPLETIONS[i % len(COMPLETIONS)] for i in range(len(rows))]
    together = task.rewards(texts, rows)
    assert task.rewards(texts[::-1], rows[::-1]) == together[::-1], "rewards depend on the order of completions"
    alone = [task.rewards([text], [row])[0] for text, row in zip(texts, rows, strict=True)]
    assert alone == together, "a reward depends on what else is scored"
    before = fresh(rows)
    task.rewards(texts, rows)
    for text, row in zip(texts, rows, strict=True):
        task.compute_reward(task.clean(text), row)  # which `rewards` hands a copy
    assert rows == before, "scoring changes the rows"


def check_cleaning(task: Task, data: Data) -> None:
    """Cleaning a cleaned completion changes nothing, and a reward is that of the cleaned one."""
    row = _rows(data)[0]
    for text in COMPLETIONS:
        cleaned = task.clean(text)
        assert task.clean(cleaned) == cleaned, f"cleaning {text[:40]!r} twice gives another text"
        assert task.rewards([cleaned], [row]) == task.rewards([text], [row]), f"{text[:40]!r} earns more uncleaned"


def check_measures(task: Task, data: Data) -> None:
    """The same finite measures for every completion."""
    row = _rows(data)[0]
    names = task.measures(task.clean("8"), row).keys()
    for text in COMPLETIONS:
        measures = task.measures(task.clean(text), row)
        assert measures.keys() == names, f"{text[:40]!r} has measures {sorted(measures)}, others {sorted(names)}"
        for name, value in measures.items():
            assert math.isfinite(value), f"{name} of {text[:40]!r} is {value}"


CHECKS: tuple[Check, ...] = (
    check_splits,
    check_prompts,
    check_gold_answers,
    check_rewards,
    check_rewards_are_pure,
    check_cleaning,
    check_measures,
)


def check_refuses_empty(create: Callable[[TaskConfig], Task], config: TaskConfig) -> None:
    """Files without rows are refused with an EvoalignError of one line, never trained on."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("empty.jsonl", ""), ("blank.jsonl", "\n\n"), ("empty.json", "[]")):
            file = Path(folder) / name
            file.write_text(text, encoding="utf-8")
            own = config.model_copy(update={"train_data": str(file), "test_data": str(file)})
            _refused(create, own, text)


def _refused(create: Callable[[TaskConfig], Task], config: TaskConfig, text: str) -> None:
    try:
        data = create(config).load_data(0)
    except EvoalignError as error:
        assert "\n" not in str(error), f"the error for an empty file has several lines: {error}"
        return
    raise AssertionError(f"a file that holds {text!r} gives {len(data.train)} training rows and no error")


def _rows(data: Data) -> Sequence[Example]:
    return [*data.train[:ROWS], *data.test[:ROWS], *data.validation[:ROWS]]
