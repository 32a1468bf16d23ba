# SPDX-License-Identifier: Apache-2.0
"""The tasks: what is asked and what counts as good. A new built-in is one file and one entry in `TASKS`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError
from evoalign.plugins import load_object
from evoalign.tasks.base import Data, Task
from evoalign.tasks.conciseness import Conciseness
from evoalign.tasks.countdown import Countdown
from evoalign.tasks.custom import Custom

__all__ = ["TASKS", "Data", "Task", "create"]

TASKS: dict[str, type[Task]] = {task.name: task for task in (Conciseness, Countdown, Custom)}


def create(config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Task:
    """The task that a config names: a built-in, or a Task of the user's own as `package.module:Class`.

    `rewards` are Python functions in place of the import paths of `task.rewards`, for `custom` only.
    Raises ConfigError.
    """
    if (rewards is not None or config.rewards) and config.name != Custom.name:
        raise ConfigError(f"task {config.name} has a reward of its own; rewards go with task.name: custom")
    if config.name == Custom.name:
        return Custom(config, rewards)
    return _named(config.name)(config)


def _named(name: str) -> type[Task]:
    if name in TASKS:
        return TASKS[name]
    if ":" not in name:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        raise ConfigError(f"unknown task {name!r}; {hint}: {', '.join(TASKS)}, or package.module:Class")
    task = load_object(name, "task.name")
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ConfigError(f"task.name: {name} is not a subclass of evoalign.tasks.Task")
    return task
