# SPDX-License-Identifier: Apache-2.0
"""Conciseness: complete with the length of the target (Qiu et al., arXiv 2509.24372, section 4.2).

The reward is `-|len(completion) - len(target)|` in characters (code points), without the prompt. With `task.strip`,
white space around the completion does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evoalign.errors import DataError
from evoalign.tasks import data
from evoalign.tasks.base import Data, Task
from evoalign.types import Example, Prompt

MORE = "data/tasks/conciseness/questions_train.json"
"""203 further questions of the same form."""
DATA = ("data/tasks/conciseness/conciseness_train.json", "data/tasks/conciseness/conciseness_test.json")
FORMS = (("prompt", "target"), ("question", "answer"))
"""Column names of the JSON list and of the JSONL file."""


class Conciseness(Task):
    """Rows of {prompt, target} or {question, answer}; `prompt: chat` (default, one user message) or `raw`."""

    name = "conciseness"
    max_reward = 0.0
    shipped = DATA
    per_call = 16
    takes_system_prompt = True
    forms = ("chat", "raw")

    def load_data(self, seed: int) -> Data:
        if self.config.train_data is not None:
            return data.load(self.config, seed, self._check, self.shipped)
        few = (
            f"task.train_data is not set, and the default is the 2 published rows; set task.train_data: {MORE} for 203"
        )
        if (self.config.train_size or 0) > 2:
            raise DataError(f"task.train_size is {self.config.train_size}, but {few}")
        self.notes = [few]
        return data.load(self.config, seed, self._check, self.shipped)

    def prompt(self, example: Example) -> Prompt:
        question = _columns(example)[0]
        return question if self.config.prompt == "raw" else self.with_system([{"role": "user", "content": question}])

    def compute_reward(self, text: str, example: Example) -> float:
        return float(-abs(len(text) - len(_columns(example)[1])))

    def gold(self, example: Example) -> str | None:
        return _columns(example)[1]

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """Return the measures. `normalized` maps rewards from -2000 to 1 linearly onto 0 to 1."""
        reward = self.compute_reward(text, example)
        return {
            "reward": reward,
            "normalized": (reward + 2000) / 2001,
            "exact": float(text.strip() == _columns(example)[1].strip()),
            "characters": float(len(text)),
        }

    def _check(self, where: str, row: dict[str, Any]) -> Example:
        form = next((f for f in FORMS if f[0] in row and f[1] in row), None)
        if form is None:
            what = "expected prompt and target, or question and answer"
            raise data.lacking(where, row, self.config, what, *FORMS[0])
        for column in form:
            if not isinstance(row[column], str):
                raise DataError(f"{where}: {column} is {row[column]!r}; expected a string")
        if not row[form[0]]:
            raise DataError(f"{where}: {form[0]} is empty")
        return row


def _columns(example: Example) -> tuple[str, str]:
    """Return question and answer."""
    question, answer = next(form for form in FORMS if form[0] in example and form[1] in example)
    return example[question], example[answer]


def target_of(example: Example) -> str:
    """Return the target of a row."""
    return _columns(example)[1]
