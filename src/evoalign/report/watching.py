# SPDX-License-Identifier: Apache-2.0
"""Progress counters within a generation, an evaluation or a probe.

`rollouts.collect`, through which all completions come, counts them; scoring and updates are phases too. A display
installs its `Watch` with `watched`, and reads it from another thread. Without a watch, counts are dropped. Counting
costs an addition per completion; nothing is printed here.
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
    """One phase: `done` of `total` pieces (0: not counted), and `tokens`. `past`: seconds it took the last time."""

    phase: str
    total: int = 0
    began: float = 0.0
    past: float | None = None
    done: int = 0
    tokens: int = 0

    def left(self, now: float) -> float | None:
        """Return the seconds to the end of the phase, None if not known.

        Engines may return all completions at once, so the time of the last such phase is preferred to the count.
        """
        spent = now - self.began
        if self.past is not None and spent <= self.past:
            return self.past - spent
        return spent / self.done * (self.total - self.done) if 0 < self.done < self.total else None


class Watch:
    """Current state: the phase `work` (None between phases) of `stage`, the stage `number` (from 1) of `of` stages."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.work: Work | None = None
        self.stage, self.number, self.of = "", 0, 0
        self._took: dict[tuple[str, int], float] = {}

    @contextmanager
    def at(self, work: Work) -> Generator[None]:
        """Run a phase, which may be within another; its time is kept for the next phase of its size."""
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
    """Install the watch; yields False, and changes nothing, if another one is installed."""
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
    """Run a phase of `total` pieces; the caller counts `done` and `tokens` of the yielded `Work`."""
    work, watch = Work(name, total), _WATCH.get()
    with nullcontext() if watch is None else watch.at(work):
        yield work


def stage(name: str, number: int = 0, of: int = 0) -> None:
    """Set the current stage, number `number` of `of`, counted from 1."""
    watch = _WATCH.get()
    if watch is not None:
        watch.stage, watch.number, watch.of = name, number, of


def count(stages: int) -> None:
    """Announce the number of stages, each of which calls `begin`."""
    stage("", 0, stages)


def begin(name: str) -> None:
    """Begin the next stage."""
    watch = _WATCH.get()
    if watch is not None:
        stage(name, watch.number + 1, watch.of)


def each(items: Iterable[T], name: str | None = None) -> Generator[T]:
    """Yield the items, each as a stage with this name, or its own."""
    for item in items:
        begin(str(item) if name is None else name)
        yield item
