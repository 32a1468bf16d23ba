# SPDX-License-Identifier: Apache-2.0
"""What is being done right now, inside a generation, an evaluation or a probe, for whoever shows it.

The work says where it is: `rollouts.collect`, the one door to an engine, counts completions, and whoever scores or
updates names that. A display has its `Watch` in place while it is shown and reads it from a thread of its own. Where
none is in place, a count goes nowhere. Counting is an addition a completion; nothing is printed or measured here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Work:
    """One phase: `done` of `total` pieces (0: it has none), with `tokens` made. `past`: what it took the last time."""

    phase: str
    total: int = 0
    began: float = 0.0
    past: float | None = None
    done: int = 0
    tokens: int = 0

    def left(self, now: float) -> float | None:
        """Seconds to the end of the phase, None where nothing tells. Engines may answer all at once at the end, so
        that how long the same took before says more than how many are done."""
        spent = now - self.began
        if self.past is not None and spent <= self.past:
            return self.past - spent
        return spent / self.done * (self.total - self.done) if 0 < self.done < self.total else None


class Watch:
    """Where the work is: `work`, None between phases, in the `stage`, the `number`-th of `of` (0: it has no others)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.work: Work | None = None
        self.stage, self.number, self.of = "", 0, 0
        self._took: dict[tuple[str, int], float] = {}

    @contextmanager
    def at(self, work: Work) -> Generator[None]:
        """A phase, which may be within another; how long it took is remembered for the next one of its size."""
        around, kind = self.work, (work.phase, work.total)
        work.began, work.past = self.clock(), self._took.get(kind)
        self.work = work
        try:
            yield
        finally:
            self._took[kind] = self.clock() - work.began
            self.work = around


_WATCH: ContextVar[Watch | None] = ContextVar("evoalign_watch", default=None)


@contextmanager
def watched(watch: Watch) -> Generator[bool]:
    """The watch is told of all work inside; whether it is, for where another one is in place, that one stays."""
    if _WATCH.get() is not None:
        yield False
        return
    token = _WATCH.set(watch)
    try:
        yield True
    finally:
        _WATCH.reset(token)


@contextmanager
def phase(name: str, total: int = 0) -> Generator[Work]:
    """A phase of so many pieces; whoever works counts `done` and `tokens` in what this gives."""
    work, watch = Work(name, total), _WATCH.get()
    with nullcontext() if watch is None else watch.at(work):
        yield work


def stage(name: str, number: int = 0, of: int = 0) -> None:
    """What comes now: the `number`-th of `of` alike, counted from 1."""
    watch = _WATCH.get()
    if watch is not None:
        watch.stage, watch.number, watch.of = name, number, of


def count(stages: int) -> None:
    """So many stages follow, each of which says by `begin` that it begins."""
    stage("", 0, stages)


def begin(name: str) -> None:
    """The next of the stages that were counted."""
    watch = _WATCH.get()
    if watch is not None:
        stage(name, watch.number + 1, watch.of)


def each(items: Iterable[T], name: str | None = None) -> Generator[T]:
    """The items, each of which is a stage of this name, or of its own."""
    for item in items:
        begin(str(item) if name is None else name)
        yield item
