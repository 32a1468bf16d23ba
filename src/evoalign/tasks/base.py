# SPDX-License-Identifier: Apache-2.0
"""What is asked and what counts as good: one object drives ES, evaluation, baselines and analysis."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from evoalign.config import TaskConfig
from evoalign.errors import DataError, RewardError
from evoalign.types import Example, Prompt


@dataclass(frozen=True, slots=True)
class Data:
    """The two splits of a task, in a fixed order."""

    train: Sequence[Example]
    test: Sequence[Example]


class Task(ABC):
    """Base of all tasks. A task of one's own defines `load_data`, `prompt` and `compute_reward`."""

    name: ClassVar[str]
    max_reward: float = math.inf
    """What a perfect answer earns; infinite where there is no such thing."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

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
        rewards = [self.compute_reward(self.clean(t), e) for t, e in zip(texts, examples, strict=True)]
        for text, reward in zip(texts, cast("list[object]", rewards), strict=True):
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise RewardError(
                    f"task {self.name} gave {reward!r} as the reward of {text[:80]!r}; a reward is one finite number"
                )
        return [float(r) for r in rewards]

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
