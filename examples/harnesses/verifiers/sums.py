# SPDX-License-Identifier: Apache-2.0
"""A taskset of verifiers with one task: the row in the JSON file `example`."""

import json
import re
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["Sums"]


class Row(vf.TaskData):
    """A question and its answer."""

    answer: str


class Sum(vf.Task[Row]):
    """Scores the last message of the model."""

    @vf.reward
    async def close(self, trace: vf.Trace) -> float:
        """Return 1 for the answer, and less the further the last number is from it."""
        numbers = re.findall(r"\d{1,6}", trace.last_reply)
        return 1 / (1 + abs(int(numbers[-1]) - int(self.data.answer)) / 10) if numbers else 0.0

    @vf.metric
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1 if the answer is in the last message."""
        return float(self.data.answer in trace.last_reply)


class Config(vf.TasksetConfig):
    """Settings of the taskset."""

    example: str = ""


class Sums(vf.Taskset[Sum, Config]):
    """The one task."""

    def load(self) -> list[Sum]:
        """Return the task."""
        row = json.loads(Path(self.config.example).read_text(encoding="utf-8"))
        return [Sum(Row(prompt=row["question"], answer=row["answer"]), self.config.task)]
