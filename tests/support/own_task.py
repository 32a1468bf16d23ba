# SPDX-License-Identifier: Apache-2.0
"""A task of the user's own, in code."""

from collections.abc import Mapping, Sequence

from evoalign.config import TaskConfig
from evoalign.tasks import Data, Task
from evoalign.types import Example, Prompt


class Vowels(Task):
    """Say many vowels."""

    name = "vowels"

    def __init__(self, rows: Sequence[str] = ("One", "Two", "Three"), tests: Sequence[str] = ("Four",)) -> None:
        super().__init__(TaskConfig())
        self.rows, self.tests = rows, tests

    def load_data(self, seed: int) -> Data:
        train, test = ([{"question": text} for text in part] for part in (self.rows, self.tests))
        return Data(train, test)

    def prompt(self, example: Example) -> Prompt:
        return [{"role": "user", "content": f"What is {example['question']}?"}]

    def compute_reward(self, text: str, example: Example) -> float:
        return sum(c in "aeiou" for c in text) / (1 + len(text))

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        return {"length": float(len(text))}
