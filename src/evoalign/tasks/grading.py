# SPDX-License-Identifier: Apache-2.0
"""Completions are scored as they come: in fixed pieces, each as soon as all of it is there, while others are decoded.

A piece is `Task.per_call` completions that follow one another in the order of `rollouts.collect`. What is scored
together follows from that order alone, and so do the columns and the error that is raised: not from when completions
come, nor from how many score. A thread waits for another process that scores. What this process scores itself is
scored when all is there: Python runs one thread at a time, and decoding would wait for it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Event

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, EvoalignError, RewardError
from evoalign.plugins import FAILURES, raised
from evoalign.rewards.objective import Columns
from evoalign.tasks.base import Data, Task
from evoalign.tasks.data import held_back
from evoalign.types import Example, Rollout


def pieces(count: int, size: int | None) -> Iterator[range]:
    """The places of so many completions, `size` at a time; None: all at once."""
    size = size or max(1, count)
    return (range(first, min(first + size, count)) for first in range(0, max(1, count), size))


def scored(task: Task, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
    """`task.columns`, as many at once as the task says, whatever one of one's own makes of it. Raises RewardError."""
    parts = [slice(piece.start, piece.stop) for piece in pieces(len(texts), task.per_call)]
    return joined(task, [_scored(task, texts[part], examples[part]) for part in parts])


def _scored(task: Task, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
    try:
        return task.checked_columns(task.columns(texts, [task.handed(e) for e in examples]), texts, examples)
    except EvoalignError:
        raise
    except FAILURES as error:  # also of values that have no length
        raise RewardError(f"task {task.name} failed to score: {raised(error)}; fix it") from error


def joined(task: Task, parts: Sequence[Columns]) -> Columns:
    """The columns of pieces, one after another. Raises RewardError where they are not the same ones."""
    for part in parts:
        if part.keys() != parts[0].keys():
            raise RewardError(
                f"task {task.name} gave the columns {', '.join(parts[0])} of some completions and {', '.join(part)} of "
                "others; give the same ones of all, with None where one does not apply"
            )
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def with_validation(task: Task, data: Data, asked: TaskConfig) -> Data:
    """The splits of a task of one's own that gives none for validation, as the settings say.

    `asked` are those of the run; a task that was handed over has settings too. Raises ConfigError, DataError: what is
    asked for is not passed over.
    """
    path = asked.validation_data or task.config.validation_data
    size = asked.validation_size or task.config.validation_size
    if data.validation or path is size is None:
        return data
    if path is not None or size is None:
        raise ConfigError(
            f"task.validation_data: the load_data of task {task.name} gives no validation split; let it read {path}, "
            "as evoalign.tasks.data.load does, or set task.validation_size alone"
        )
    train, validation = held_back(data.train, size, f"the training split of task {task.name}")
    return replace(data, train=train, validation=validation)


class Grading:
    """Scores the completions of `examples`, in a thread if the task scores in another process."""

    def __init__(self, task: Task, examples: Sequence[Example]) -> None:
        self.task, self.examples, self.stopping = task, examples, Event()
        waits = task.per_call is not None and task.scores_elsewhere
        self.threads = ThreadPoolExecutor(1, "evoalign-grading") if waits else None

    def of(self, rows: Sequence[int]) -> Answers:
        """The completions of one rollout: the place of each one's row among the examples, in canonical order."""
        return Answers(self, rows)

    def columns(self, texts: Sequence[str], rows: Sequence[int]) -> Columns:
        """Those of one piece. Raises EvoalignError."""
        return scored(self.task, texts, [self.examples[row] for row in rows])


@contextmanager
def grading(task: Task, examples: Sequence[Example]) -> Generator[Grading]:
    """While entered, completions are scored; whatever ends it ends that, too, and no thread is left."""
    found = Grading(task, examples)
    if found.threads is None:
        yield found
        return
    task.stopping = found.stopping
    try:
        yield found
    finally:
        found.stopping.set()
        found.threads.shutdown(cancel_futures=True)
        task.stopping = None


class Answers:
    """The completions of one rollout. Whoever collects them calls `take`, and then `columns`."""

    def __init__(self, grading: Grading, rows: Sequence[int]) -> None:
        self._grading, self._rows = grading, rows
        self._pieces = list(pieces(len(rows), grading.task.per_call))
        self._texts = [""] * len(rows)
        self._left = [len(piece) for piece in self._pieces]
        self._begun: dict[int, Future[Columns]] = {}
        self._failed = len(self._pieces)

    def take(self, place: int, rollout: Rollout) -> None:
        """One completion, at its place in canonical order."""
        self._texts[place] = rollout.text
        piece = place // len(self._pieces[0])
        self._left[piece] -= 1
        if not self._left[piece] and self._grading.threads is not None:
            self._begun[piece] = self._grading.threads.submit(self._score, piece)

    def columns(self) -> Columns:
        """All of them, once all are there. Raises EvoalignError: that of the first piece that has one."""
        assert not any(self._left)
        parts = [
            self._begun[piece].result() if piece in self._begun else self._score(piece)
            for piece in range(len(self._pieces))
        ]
        return joined(self._grading.task, parts)

    def _score(self, number: int) -> Columns:
        piece = self._pieces[number]
        if number > self._failed:  # nobody will ask for it, and each may take as long as the one that failed
            raise CancelledError
        try:
            return self._grading.columns(self._texts[piece.start : piece.stop], self._rows[piece.start : piece.stop])
        except BaseException:
            self._failed = min(self._failed, number)
            raise
