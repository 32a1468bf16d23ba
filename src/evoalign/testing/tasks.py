# SPDX-License-Identifier: Apache-2.0
"""Contract tests of tasks: repeatable splits, valid prompts, pure and finite rewards, correct gold answers."""

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
"""Possible completions; a task must give each of them a finite reward."""
ROWS = 20
"""Rows of each split that the more expensive checks use."""

Check: TypeAlias = Callable[[Task, Data], None]


def check_task(task: Task, seed: int = 0) -> None:
    """Run all of `CHECKS` on the task's data, and `check_loading_repeats`. Raises AssertionError.

    `check_refuses_empty` is for tasks that read `task.train_data`.
    """
    data = task.load_data(seed)
    for check in CHECKS:
        check(task, data)
    check_loading_repeats(task, seed)


def check_loading_repeats(task: Task, seed: int = 0) -> None:
    """Require that a seed always gives the same splits in the same order."""
    first, second = task.load_data(seed), task.load_data(seed)
    assert list(first.train) == list(second.train), "load_data returns another training split for the same seed"
    assert list(first.test) == list(second.test), "load_data returns another test split for the same seed"
    assert list(first.validation) == list(second.validation), "load_data repeats with another validation split"


def check_splits(task: Task, data: Data) -> None:
    """Require that training and test split have rows, and that no validation row is in another split.

    This compares rows. Equal prompts of different rows only make a run warn.
    """
    assert len(data.train) > 0, "the training split is empty"
    assert len(data.test) > 0, "the test split is empty"
    chosen_by = {id(row) for _, row in held(data.validation)}
    assert not any(id(row) in chosen_by for _, row in held(data.train)), "a validation row is in the training split too"
    assert not any(id(row) in chosen_by for _, row in held(data.test)), "a validation row is also in the test split"


def check_prompts(task: Task, data: Data) -> None:
    """Require that a prompt is a string or messages, not empty, and the same each time."""
    for row in _rows(data):
        prompt = task.prompt(row)
        assert prompt, f"the prompt of {row} is empty"
        assert task.prompt(row) == prompt, f"the prompt of {row} changes the second time"
        if isinstance(prompt, str):
            continue
        for message in cast("list[dict[str, object]]", prompt):
            known = message.keys() >= {"role", "content"} and all(isinstance(v, str) for v in message.values())
            assert known, f"{message} is not a message with strings as role and content"


def check_gold_answers(task: Task, data: Data) -> None:
    """Require that each gold answer has the maximum reward, and that `self_check` passes."""
    task.self_check(data.train)
    task.self_check(data.test)
    task.self_check(data.validation)
    for row in _rows(data):
        gold = task.gold(row)
        if gold is not None:
            reward = task.rewards([gold], [row])[0]
            assert reward == task.max_reward, f"the gold answer {gold!r} has reward {reward}, not {task.max_reward}"


def check_rewards(task: Task, data: Data) -> None:
    """Require one finite float of at most `max_reward` for every completion."""
    for row in _rows(data)[:5]:
        rewards = task.rewards(COMPLETIONS, [row] * len(COMPLETIONS))
        assert len(rewards) == len(COMPLETIONS), f"{len(rewards)} rewards for {len(COMPLETIONS)} completions"
        for text, reward in zip(COMPLETIONS, rewards, strict=True):
            assert type(reward) is float, f"the reward of {text[:40]!r} is {reward!r}, not a float"
            assert math.isfinite(reward), f"the reward of {text[:40]!r} is {reward}"
            assert reward <= task.max_reward, f"the reward of {text[:40]!r} is {reward}, above max_reward"


def check_rewards_are_pure(task: Task, data: Data) -> None:
    """Require that a reward depends on its text and row only, not on the order, the batch or earlier calls."""
    rows = _rows(data)
    texts = [COMPLETIONS[i % len(COMPLETIONS)] for i in range(len(rows))]
    together = task.rewards(texts, rows)
    assert task.rewards(texts[::-1], rows[::-1]) == together[::-1], "rewards depend on the order of completions"
    alone = [task.rewards([text], [row])[0] for text, row in zip(texts, rows, strict=True)]
    assert alone == together, "a reward depends on the other completions of the batch"
    before = fresh(rows)
    task.rewards(texts, rows)
    for text, row in zip(texts, rows, strict=True):
        task.compute_reward(task.clean(text), row)  # `rewards` passes it a copy of the row
    assert rows == before, "compute_reward changes the rows"


def check_cleaning(task: Task, data: Data) -> None:
    """Require that cleaning twice equals cleaning once, and that it does not change the reward."""
    row = _rows(data)[0]
    for text in COMPLETIONS:
        cleaned = task.clean(text)
        assert task.clean(cleaned) == cleaned, f"cleaning {text[:40]!r} a second time changes it"
        assert task.rewards([cleaned], [row]) == task.rewards([text], [row]), (
            f"cleaning {text[:40]!r} changes its reward"
        )


def check_measures(task: Task, data: Data) -> None:
    """Require measures of the same names for every completion, each finite or, where it does not apply, None."""
    row = _rows(data)[0]
    names = task.measures(task.clean("8"), row).keys()
    for text in COMPLETIONS:
        measures = task.measures(task.clean(text), row)
        assert measures.keys() == names, f"{text[:40]!r} has measures {sorted(measures)}, others {sorted(names)}"
        for name, value in measures.items():
            assert value is None or math.isfinite(value), f"{name} of {text[:40]!r} is {value}"


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
    """Require that files without rows are refused with an EvoalignError of one line."""
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
    raise AssertionError(f"a file with content {text!r} gives {len(data.train)} training rows and no error")


def _rows(data: Data) -> Sequence[Example]:
    return [*data.train[:ROWS], *data.test[:ROWS], *data.validation[:ROWS]]
