# SPDX-License-Identifier: Apache-2.0
"""The tasks: what is asked and what counts as good. A new built-in is one file and one line in `config/task.py`."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from evoalign.config import GraderConfig, TaskConfig
from evoalign.config.task import TASKS as SHIPPED
from evoalign.errors import ConfigError
from evoalign.plugins import load_object
from evoalign.tasks.base import Data, Split, Task
from evoalign.tasks.custom import Custom
from evoalign.tasks.isolated import task as isolation

__all__ = ["PLAIN", "TASKS", "Custom", "Data", "Split", "Task", "create", "isolate", "with_sources"]

TASKS: dict[str, type[Task]] = {name: load_object(path, "task.name") for name, path in SHIPPED.items()}
PLAIN = {name: task for name, task in TASKS.items() if task is not Custom}
"""Those that run no code of the user's: what they measure is known."""


def create(config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Task:
    """The task that a config names: a built-in, or a Task of the user's own as `package.module:Class`.

    `rewards` are Python functions in place of the import paths of `task.rewards`, for `custom` only.
    Raises ConfigError.
    """
    task = _named(config.name).make(config, rewards)
    if config.reward_weights is not None and config.name in TASKS and not isinstance(task, Custom):
        warnings.warn(f"task {config.name} makes no use of task.reward_weights; take it out", stacklevel=2)
    # What a script defines is in no module that another process could import.
    own = (config.name, *config.rewards, config.fitness or "")
    task.from_config = rewards is None and not any(path.startswith("__main__:") for path in own)
    return task


def with_sources(config: TaskConfig) -> TaskConfig:
    """The config with the files that its task takes where it names no training data, under their own names."""
    shipped = TASKS[config.name].shipped if config.name in TASKS else None
    if config.train_data is not None or shipped is None:
        return config
    return config.model_copy(update={"train_data": shipped[0], "test_data": config.test_data or shipped[1]})


def isolate(task: Task, grader: GraderConfig) -> Task:
    """The task with its scoring in a process that can be killed, where that is the user's own code, or can hang by what
    a model says; else the task. `grader.batch` is put into `per_call`, where the task has none of its own.

    Take it before `load_data`, and load the data before the engine: that starts the worker. `close` it at the end.
    """
    harmless = type(task) in PLAIN.values() and not task.isolated and task.set_objective is None
    if not isinstance(task, isolation.Isolated):
        task.per_call = type(task).per_call or (None if task.asks_scorer else grader.batch)
    # Models that score are loaded once, in this process, whoever's class asks them.
    if harmless or task.asks_scorer or not grader.isolated or isinstance(task, isolation.Isolated):
        return task
    if not isolation.SUPPORTED:
        warnings.warn("this system cannot isolate reward functions: one that hangs will hang the run", stacklevel=2)
        return task
    return isolation.Isolated(task, grader)


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
