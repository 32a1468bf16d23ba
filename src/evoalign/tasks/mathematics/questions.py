# SPDX-License-Identifier: Apache-2.0
"""What tasks of mathematics share: a right answer to each question, 1 for it and 0 for any other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, DataError
from evoalign.tasks import data
from evoalign.tasks.base import Data, Task
from evoalign.tasks.mathematics import answers
from evoalign.types import Example, Prompt


class Questions(Task):
    """One earns 1.0 for the answer that gold is equal to, as mathematics, and 0.0 for any other, or for none.

    It is compared in the process of the grader: see `answers`.
    """

    max_reward = 1.0
    isolated = True
    per_call = 8  # an answer may take seconds to compare
    takes_system_prompt = True
    columns_read: ClassVar[tuple[str, ...]]
    """The columns that a row needs; the first one is the question."""
    source: ClassVar[tuple[str, str]]
    """The published training and test split, where the config names none."""
    form: ClassVar[str]
    """The published form of a row, for errors."""
    chat: ClassVar[str]
    raw: ClassVar[str]
    """The two prompts, where {} is the question."""

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        if config.prompt not in (None, "chat", "raw"):
            raise ConfigError(f"task.prompt: {self.name} has chat and raw, not {config.prompt}")
        answers.require(self.name)

    @abstractmethod
    def right(self, example: Example) -> str | None:
        """The right answer of a row; None where it has none."""

    @abstractmethod
    def final(self, text: str) -> str | None:
        """The answer that a completion comes to; None where it gives none."""

    def load_data(self, seed: int) -> Data:
        """The files of the config, or what is published on the hub. Raises DataError that says what to do without."""
        try:
            return data.load(self.config, seed, self._check, self.source)
        except DataError as error:
            if self.config.train_data is not None:
                raise
            raise DataError(
                f"{error}; task.train_data is not set, so that task {self.name} loads {' and '.join(self.source)} from "
                "the hub: without a network, set task.train_data and task.test_data to files with rows of "
                f"{self.form}"
            ) from error

    def prompt(self, example: Example) -> Prompt:
        question = example[self.columns_read[0]]
        if self.config.prompt == "raw":
            return self.raw.replace("{}", question, 1)
        return self.with_system([{"role": "user", "content": self.chat.replace("{}", question, 1)}])

    def compute_reward(self, text: str, example: Example) -> float:
        answer, right = self.final(text), self.right(example)
        return float(answer is not None and right is not None and answers.is_equal(answer, right))

    def is_right(self, text: str, example: Example) -> bool:
        return self.compute_reward(text, example) == 1.0

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """`accuracy`, and `answered`: whether there is a final answer where it was asked for."""
        return {"accuracy": self.compute_reward(text, example), "answered": float(self.final(text) is not None)}

    def _check(self, where: str, row: dict[str, Any]) -> Example:
        if not row.keys() >= set(self.columns_read):
            raise data.lacking(where, row, self.config, f"expected {self.form}", *self.columns_read)
        for column in self.columns_read:
            if not isinstance(row[column], str) or not row[column].strip():
                raise DataError(f"{where}: no text in {column}; expected {self.form}")
        if self.right(row) is None:
            raise DataError(f"{where}: it has no final answer; expected {self.form}")
        return row
