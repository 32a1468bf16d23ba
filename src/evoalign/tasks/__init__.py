# SPDX-License-Identifier: Apache-2.0
"""Tasks: prompts and rewards. To add a built-in task, write one file and add a line to `config/task.py`."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evoalign.config import GraderConfig, TaskConfig
from evoalign.config.joint import DECODING, SettingConfig
from evoalign.config.task import TASKS as SHIPPED
from evoalign.errors import ConfigError
from evoalign.plugins import load_object
from evoalign.tasks.base import Data, Split, Task
from evoalign.tasks.custom import Custom
from evoalign.tasks.environment import Environment
from evoalign.tasks.isolated import task as isolation

__all__ = [
    "PLAIN",
    "TASKS",
    "Custom",
    "Data",
    "Split",
    "Task",
    "create",
    "is_same",
    "isolate",
    "prompts_alike",
    "refuse_unread",
    "takes_any_form",
    "with_sources",
]

TASKS: dict[str, type[Task]] = {name: load_object(path, "task.name") for name, path in SHIPPED.items()}
OF_PROMPTS = ("name", "prompt", "system_prompt", "template_kwargs", "options")
"""Settings of a task that decide its prompts besides its rows."""
PLAIN = {name: task for name, task in TASKS.items() if task not in (Custom, Environment)}
"""Tasks without user code, whose measures are known in advance."""


def create(config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Task:
    """Create the task that a config names: a built-in one, or a user's Task as `package.module:Class`.

    `rewards` are Python functions to use instead of `task.rewards`, for `custom` only. Raises ConfigError.
    """
    task = _class_of(config).make(config, rewards)
    if config.reward_weights is not None and config.name in TASKS and not task.takes_weights:
        warnings.warn(f"task {config.name} ignores task.reward_weights; remove it", stacklevel=2)
    # Another process cannot import what a script defines.
    own = (config.name, *config.rewards, config.fitness or "")
    task.from_config = rewards is None and not any(path.startswith("__main__:") for path in own)
    return task


def takes_any_form(config: TaskConfig) -> bool:
    """Return whether the prompts are the rows' own, so that `task.prompt` decides between text and messages."""
    cls = _class_of(config)
    return issubclass(cls, Custom) and cls.prompt is Custom.prompt


def is_same(one: TaskConfig, other: TaskConfig) -> bool:
    """Return whether two configs name the same task."""
    return one.name == other.name


def prompts_alike(one: TaskConfig, other: TaskConfig) -> bool:
    """Return whether two configs make the same prompts of the same rows."""
    return all(getattr(one, name) == getattr(other, name) for name in OF_PROMPTS)


def _class_of(config: TaskConfig) -> type[Task]:
    """Return the class that a config names. Raises ConfigError."""
    cls: Any = TASKS.get(config.name)
    if cls is None and ":" not in config.name:
        near = difflib.get_close_matches(config.name, TASKS, n=1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        raise ConfigError(f"unknown task {config.name!r}; {hint}: {', '.join(TASKS)}, or package.module:Class")
    cls = cls or load_object(config.name, "task.name")
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise ConfigError(f"task.name: {config.name} is not a subclass of evoalign.tasks.Task")
    return cls


def refuse_unread(task: Task, settings: Mapping[str, SettingConfig]) -> None:
    """Raise ConfigError for a setting that neither the sampling, the prompt nor the reward reads.

    Checked for built-in tasks without user code, which read no further columns, and for the functions of `custom`.
    Other user code gets whole rows, so that what it reads is not known.
    """
    functions = task.functions if isinstance(task, Custom) and type(task) is Custom else ()
    if not functions and type(task) not in PLAIN.values():
        return
    for name, setting in settings.items():
        if name in DECODING or setting.kind == "text" or any(function.reads(name) for function in functions):
            continue
        near = difflib.get_close_matches(name, DECODING, n=1)
        raise ConfigError(
            f"task.settings.{name} has no effect: neither the sampling nor task {task.name} reads it; "
            + (f"did you mean {near[0]}? If not, " if near else "")
            + "remove it, or use a task or a reward function that reads it"
        )


def with_sources(config: TaskConfig) -> TaskConfig:
    """Return the config with the default data files of its task filled in, if it names no training data."""
    shipped = TASKS[config.name].shipped if config.name in TASKS else None
    if config.train_data is not None or shipped is None:
        return config
    return config.model_copy(update={"train_data": shipped[0], "test_data": config.test_data or shipped[1]})


def isolate(task: Task, grader: GraderConfig) -> Task:
    """Return the task with its scoring in a process that can be killed, if it runs user code or a completion can hang
    it; else return the task.

    Call it before `load_data`, which starts the worker, and load the data before the engine. Close the task at the end.
    """
    harmless = type(task) in PLAIN.values() and not task.isolated and task.set_objective is None
    # Scoring models are loaded once, in this process, also for custom tasks.
    if harmless or task.asks_scorer or isinstance(task, isolation.Isolated):
        return task
    if grader.isolated and not isolation.SUPPORTED:
        warnings.warn("this system cannot isolate reward functions: one that hangs will hang the run", stacklevel=2)
        grader = grader.model_copy(update={"isolated": False})
    return isolation.Isolated(task, grader)
