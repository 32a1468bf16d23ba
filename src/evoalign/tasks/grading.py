# SPDX-License-Identifier: Apache-2.0
"""Grading during decoding: completions are scored in fixed pieces, each as soon as it is complete.

A piece is `Task.per_call` consecutive completions in the order of `rollouts.collect`. The columns and errors depend on
that order alone, not on when completions arrive or on the number of graders. A thread waits for another process that
scores. A task of this process scores between two steps of the engine; on a GPU the static decoder has launched the next
step by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Self

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, EvoalignError, RewardError
from evoalign.plugins import FAILURES, raised
from evoalign.rewards.objective import Columns
from evoalign.tasks.base import Data, Task
from evoalign.tasks.data import held_back
from evoalign.tasks.isolated.task import Isolated
from evoalign.types import Example, Rollout


def pieces(count: int, size: int | None) -> Iterator[range]:
    """Split `count` indices into ranges of `size`; None: one range."""
    size = size or max(1, count)
    return (range(first, min(first + size, count)) for first in range(0, max(1, count), size))


def scored(task: Task, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
    """Return the checked columns of completions, computed in pieces of `task.per_call`. Raises RewardError."""
    parts: list[Columns] = []
    try:
        for piece in pieces(len(texts), task.per_call):
            part = slice(piece.start, piece.stop)
            found = task.columns(texts[part], [task.handed(e) for e in examples[part]])
            parts.append(task.checked_columns(found, texts[part], examples[part]))
    except EvoalignError:
        raise
    except FAILURES as error:  # also raised for values without a length
        raise RewardError(f"task {task.name} failed to score: {raised(error)}; fix it") from error
    return joined(task, parts)


def joined(task: Task, parts: Sequence[Columns]) -> Columns:
    """Concatenate the columns of pieces. Raises RewardError if their names differ."""
    for part in parts:
        if part.keys() != parts[0].keys():
            raise RewardError(
                f"task {task.name} returned the columns {', '.join(parts[0])} for some completions and "
                f"{', '.join(part)} for others; return the same columns for all, with None where one does not apply"
            )
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def with_validation(task: Task, data: Data, asked: TaskConfig) -> Data:
    """Return the data with the validation split that the settings request and `load_data` did not create.

    `asked` are the settings of the run; a task object that the user passed has settings too. Raises ConfigError,
    DataError.
    """
    path = asked.validation_data or task.config.validation_data
    size = asked.validation_size or task.config.validation_size
    if data.validation or path is size is None:
        return data
    if path is not None or size is None:
        raise ConfigError(
            f"task.validation_data: load_data of task {task.name} returns no validation split; let it read {path}, "
            "as evoalign.tasks.data.load does, or set only task.validation_size"
        )
    train, validation = held_back(data.train, size, f"the training split of task {task.name}")
    return replace(data, train=train, validation=validation)


class Grading:
    """Scores completions of `examples`, in a thread if the task scores in another process.

    On exit, cancels pending work and ends the thread.
    """

    def __init__(self, task: Task, examples: Sequence[Example]) -> None:
        self.task, self.examples = task, examples
        waits = task.per_call is not None and isinstance(task, Isolated) and task.scores_in_thread
        self.threads = ThreadPoolExecutor(1, "evoalign-grading") if waits else None
        self.scores_here = task.per_call is not None and not isinstance(task, Isolated)

    def __enter__(self) -> Self:
        if self.threads is not None and isinstance(self.task, Isolated):
            self.task.stopping = Event()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.threads is not None and isinstance(self.task, Isolated):
            if self.task.stopping is not None:
                self.task.stopping.set()
            self.threads.shutdown(cancel_futures=True)
            self.task.stopping = None

    def of(self, rows: Sequence[int]) -> Answers:
        """Return the collector for one rollout; `rows` are the example indices in canonical order."""
        return Answers(self, rows)


class Answers:
    """Completions of one rollout. Call `take` for each, then `columns`."""

    def __init__(self, grading: Grading, rows: Sequence[int]) -> None:
        self._grading, self._rows = grading, rows
        self._pieces = list(pieces(len(rows), grading.task.per_call))
        self._texts = [""] * len(rows)
        self._left = [len(piece) for piece in self._pieces]
        self._begun: dict[int, Future[Columns]] = {}
        self._failed = len(self._pieces)

    def take(self, place: int, rollout: Rollout) -> None:
        """Add one completion at its place in canonical order."""
        self._texts[place] = rollout.text
        piece = place // len(self._pieces[0])
        self._left[piece] -= 1
        if self._left[piece]:
            return
        if self._grading.threads is not None:
            self._begun[piece] = self._grading.threads.submit(self._score, piece)
        elif self._grading.scores_here:
            self._begun[piece] = done = Future[Columns]()
            try:
                done.set_result(self._score(piece))
            except Exception as error:  # raised by `columns`, unless an earlier piece fails too
                done.set_exception(error)

    def columns(self) -> Columns:
        """Return the columns after the last `take`. Raises the EvoalignError of the first failing piece."""
        assert not any(self._left)
        parts = [
            self._begun[piece].result() if piece in self._begun else self._score(piece)
            for piece in range(len(self._pieces))
        ]
        return joined(self._grading.task, parts)

    def _score(self, number: int) -> Columns:
        piece, grading = self._pieces[number], self._grading
        if number > self._failed:  # its result is not needed, and it may take as long as the piece that failed
            raise CancelledError
        try:
            rows = self._rows[piece.start : piece.stop]
            return scored(grading.task, self._texts[piece.start : piece.stop], [grading.examples[r] for r in rows])
        except BaseException:
            self._failed = min(self._failed, number)
            raise
