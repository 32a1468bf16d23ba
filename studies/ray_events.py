# SPDX-License-Identifier: Apache-2.0
"""Generations of `engine: ray` in virtual time: replicas are numbers, and `Scheduler` hands out the chunks.

One driver does one thing after the other, as `Dispatcher` does: it asks `Scheduler` for every free replica, waits for
the next result or for `TICK`, and checks that result. What each of these takes is given. Used by ray_straggler.py and
ray_simulation.py.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evoalign.engines.ray.replicas import TICK
from evoalign.engines.ray.schedule import Chunk, Scheduler


@dataclass(eq=False)
class Worker:
    """A replica: how long it takes in units of a usual one, and when it fails next."""

    place: int
    slowness: float = 1.0
    fails_at: float = math.inf


@dataclass(frozen=True)
class Costs:
    """Seconds of the driver: of handing out a chunk, of taking an answer, of each completion in it, and of each replica
    that it goes through between two answers."""

    dispatch: float = 0.0
    answer: float = 0.0
    completion: float = 0.0
    look: float = 0.0


@dataclass(eq=False)
class _Event:
    worker: Worker
    chunk: Chunk[Worker] | None
    """None: it is back after a failure."""
    scheduler: Scheduler[Worker] | None
    failed: bool = False


class Cluster:
    """Replicas and their driver, whose clock continues from one rollout to the next.

    `seconds(worker, members)` draws what a chunk takes; `comes_back()` draws what a failed replica takes until it works
    again, and when it fails next.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        seconds: Callable[[Worker, int], float],
        costs: Costs,
        prompts: int = 1,
        comes_back: Callable[[], tuple[float, float]] | None = None,
        rules: type[Scheduler[Worker]] = Scheduler,
    ) -> None:
        self.workers, self.costs, self.prompts = workers, costs, prompts
        self.clock = 0.0
        self.copies = self.failures = 0
        self.busy = 0.0
        """Seconds of the driver in which it did not wait."""
        self._seconds, self._comes_back, self._rules = seconds, comes_back, rules
        self._free = dict.fromkeys(range(len(workers)))
        self._events: list[tuple[float, int, _Event]] = []
        self._count = itertools.count()

    def rollout(self, sizes: Sequence[int]) -> float:
        """Return the seconds until chunks of these sizes are finished."""
        began, scheduler = self.clock, self._rules([Chunk[Worker](size) for size in sizes])
        while scheduler.open:
            self._hand_out(scheduler)
            self._works(self.costs.look * len(self.workers))
            until = self.clock + TICK
            if self._events and self._events[0][0] <= until:
                self._ended(scheduler)
            else:
                self.clock = until
        self.copies += scheduler.copies
        return self.clock - began

    def _hand_out(self, scheduler: Scheduler[Worker]) -> None:
        for place in sorted(self._free) if scheduler.todo else tuple(self._free):
            chunk = scheduler.next(self.workers[place], self.clock)
            if chunk is not None:
                del self._free[place]
                self._works(self.costs.dispatch)
                self._start(self.workers[place], chunk, scheduler)
            elif not scheduler.todo:
                return  # what is late is so for all that are free: `Dispatcher` asks them too, to the same end

    def _start(self, worker: Worker, chunk: Chunk[Worker], scheduler: Scheduler[Worker]) -> None:
        ends = self.clock + self._seconds(worker, chunk.load)
        if worker.fails_at < ends:
            self._push(max(self.clock, worker.fails_at), _Event(worker, chunk, scheduler, failed=True))
        else:
            self._push(ends, _Event(worker, chunk, scheduler))

    def _works(self, seconds: float) -> None:
        self.clock += seconds
        self.busy += seconds

    def _push(self, when: float, event: _Event) -> None:
        heapq.heappush(self._events, (when, next(self._count), event))

    def _ended(self, scheduler: Scheduler[Worker]) -> None:
        when, _, event = heapq.heappop(self._events)
        self.clock = max(self.clock, when)
        if event.failed and event.chunk is not None:
            assert self._comes_back is not None
            self.failures += 1
            takes, lasts = self._comes_back()
            event.worker.fails_at = self.clock + takes + lasts
            self._push(self.clock + takes, _Event(event.worker, None, None))
            if event.scheduler is scheduler:
                scheduler.lost(event.worker, event.chunk)
            return
        self._free[event.worker.place] = None
        if event.chunk is not None:  # of an earlier rollout too, it is fetched and parsed
            self._works(self.costs.answer + self.costs.completion * event.chunk.load * self.prompts)
            if event.scheduler is scheduler:
                scheduler.finished(event.worker, event.chunk, self.clock)


def sizes_of(members: int, chunk: int) -> list[int]:
    """How many members each chunk of a generation has."""
    return [min(chunk, members - first) for first in range(0, members, chunk)]


class Undeclined(Scheduler[Worker]):
    """The rules without the one that a slow worker leaves to the others what they will have done before it."""

    def _declines(self, replica: Worker, now: float) -> bool:
        return False
