# SPDX-License-Identifier: Apache-2.0
"""What is asked and what counts as good: one object drives ES, evaluation, baselines and analysis."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, DataError, RewardError
from evoalign.plugins import own_settings
from evoalign.rewards.functions import failure, finite, shown
from evoalign.types import Example, Prompt


@dataclass(frozen=True, slots=True)
class Data:
    """The two splits of a task, in a fixed order."""

    train: Sequence[Example]
    test: Sequence[Example]


class Task(ABC):
    """Base of all tasks. A task of one's own defines `load_data`, `prompt` and `compute_reward`."""

    name: str
    max_reward: float = math.inf
    """What a perfect answer earns; infinite where there is no such thing."""
    from_config: bool = False
    """Set by `create`: the config alone makes the same task again, in another process too."""
    settings: ClassVar[type[BaseModel] | None] = None
    """A pydantic model of the settings that only this task has, which `options` then is one of; None takes all as they
    are, in a dict."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self.options: Any = own_settings(config.options, self.settings, "task", TaskConfig.model_fields)

    @classmethod
    def make(cls, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Task:
        """The task of a config. Raises ConfigError for reward functions, which only `custom` takes."""
        if rewards is not None or config.rewards:
            raise ConfigError(f"task {config.name} has a reward of its own; rewards go with task.name: custom")
        if config.reward_weights is not None:
            warnings.warn(f"task.reward_weights is of no use to task {config.name}; take it out", stacklevel=3)
        return cls(config)

    @abstractmethod
    def load_data(self, seed: int) -> Data:
        """Both splits. Raises DataError that names the file and the row."""

    @abstractmethod
    def prompt(self, example: Example) -> Prompt:
        """A raw string, or messages for the chat template."""

    @abstractmethod
    def compute_reward(self, text: str, example: Example) -> float:
        """The reward of one completion: a pure function of the cleaned text and the row."""

    def gold(self, example: Example) -> str | None:
        """A completion that earns `max_reward`, where one is known."""
        return None

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """Further figures of one cleaned completion for the evaluation, such as accuracy or exact match."""
        return {}

    def clean(self, text: str) -> str:
        """The completion as it is scored."""
        return text.strip() if self.config.strip else text

    def rewards(self, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """Rewards of completions, one example each, checked to be finite numbers. Raises RewardError."""
        return self.checked(
            [self.compute_reward(self.clean(t), e) for t, e in zip(texts, examples, strict=True)], texts, examples
        )

    def checked(self, rewards: Sequence[object], texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """The rewards as floats. Raises RewardError unless there is one finite number for each text."""
        if len(rewards) != len(texts):
            raise RewardError(
                f"task {self.name} gave {len(rewards)} rewards for {len(texts)} texts; give one for each",
                failure("value", f"task {self.name}", texts=texts),
            )
        return [self._number(*row) for row in zip(rewards, texts, examples, strict=True)]

    def _number(self, reward: object, text: str, example: Example) -> float:
        number = finite(reward)
        if number is None:
            raise RewardError(
                f"task {self.name} gave {shown(reward)} as the reward of {text[:80]!r}; a reward is one finite number",
                failure("value", f"task {self.name}", (self.prompt(example), text, example)),
            )
        return number

    def self_check(self, examples: Sequence[Example]) -> None:
        """Every gold answer must earn the maximum, where there is one. Raises DataError naming the first that fails."""
        if math.isinf(self.max_reward):
            return
        for row, example in enumerate(examples):
            answer = self.gold(example)
            if answer is None:
                continue
            reward = self.compute_reward(self.clean(answer), example)
            if reward != self.max_reward:
                raise DataError(
                    f"task {self.name}: the gold answer {answer!r} of row {row} earns {reward}, not {self.max_reward}; "
                    "mend the row or the reward"
                )

    def close(self) -> None:  # noqa: B027 (most tasks hold nothing)
        """Give back what the task holds, such as a worker process. Nothing here."""
