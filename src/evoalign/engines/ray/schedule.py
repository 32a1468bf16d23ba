# SPDX-License-Identifier: Apache-2.0
"""Which replica answers which chunk of a rollout: the rules, without Ray or a clock, and the loop that applies them.

A free replica takes the next chunk, unless it is slow and the others will have finished all that are left before it has
finished one. Once all chunks are handed out, one that takes much longer than usual is given to a second replica as
well, and the first result counts.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from evoalign.engines.base import pairs_of
from evoalign.engines.ray.replicas import Replica, ReplicaError, ReplicaPool, checked_rollouts
from evoalign.types import Plan, Request, Rollout

REQUESTS = 64
"""Most requests per chunk, where the mean answers or requests name their member."""
SLOW = 1.5
"""A chunk that takes this many times the median is handed out again; a replica that takes as long is slow."""

W = TypeVar("W")


def chunks_of(plan: Plan, requests: Sequence[Request], size: int) -> Iterator[tuple[Plan, Sequence[Request]]]:
    """Split a rollout by `size` members, or by requests where one member, or only some, answer.

    The split depends only on the arguments and not on the number of replicas.
    """
    shared = [request for request in requests if request.member is None]
    if len(plan.members) == 1:
        for first in range(0, len(shared), REQUESTS):
            yield plan, shared[first : first + REQUESTS]
    elif shared:
        for first in range(0, len(plan.members), size):
            yield Plan(plan.generation, plan.sigma, plan.members[first : first + size]), shared
    named = [request for request in requests if request.member is not None]
    for first in range(0, len(named), REQUESTS):
        part = named[first : first + REQUESTS]
        members = tuple(m for m in plan.members if any(request.member == m for request in part))
        yield Plan(plan.generation, plan.sigma, members), part


@dataclass(eq=False)
class Chunk(Generic[W]):
    """A part of a rollout that one replica answers in one call."""

    load: Any
    """The work, which the rules do not look at."""
    holders: dict[W, float] = field(default_factory=dict)
    """Replicas that work on it, and since when."""
    is_done: bool = False


class Scheduler(Generic[W]):
    """The rules for the chunks of one rollout."""

    def __init__(self, chunks: Iterable[Chunk[W]]) -> None:
        self.todo = deque(chunks)
        """Chunks that no replica works on."""
        self.open = len(self.todo)
        """Number of chunks that are not done."""
        self.copies = 0
        """Number of chunks that were handed to a second replica."""
        self._running: dict[Chunk[W], None] = {}
        """Chunks in progress, in the order in which they were last handed out."""
        self._durations: list[float] = []
        """Seconds of all finished chunks, sorted."""
        self._last: dict[W, float] = {}
        """Seconds of each replica's last chunk."""

    def next(self, replica: W, now: float) -> Chunk[W] | None:
        """Hand the next chunk to a free replica; None if there is none for it now."""
        if self.todo:
            chunk = None if self._declines(replica, now) else self.todo.popleft()
        else:
            chunk = self._overdue(replica, now)
        if chunk is not None:
            chunk.holders[replica] = now
            self._running.pop(chunk, None)
            self._running[chunk] = None
        return chunk

    def finished(self, replica: W, chunk: Chunk[W], now: float) -> bool:
        """Record a result; return whether it is the first of this chunk."""
        seconds = now - chunk.holders.pop(replica, now)
        self._last[replica] = seconds
        if chunk.is_done:
            return False
        insort(self._durations, seconds)
        chunk.is_done = True
        self._running.pop(chunk, None)
        self.open -= 1
        return True

    def lost(self, replica: W, chunk: Chunk[W]) -> None:
        """Record that a replica will not finish its chunk."""
        chunk.holders.pop(replica, None)
        self._last.pop(replica, None)  # a new process may be faster
        if not chunk.is_done and not chunk.holders and chunk not in self.todo:
            self._running.pop(chunk, None)
            self.todo.appendleft(chunk)

    def _slow(self) -> float:
        return SLOW * self._durations[len(self._durations) // 2]

    def _declines(self, replica: W, now: float) -> bool:
        """Return whether the others will finish all chunks that are left before this slow replica finishes one.

        Others that are late with their current chunk are not counted.
        """
        own = self._last.get(replica, 0.0)
        if not own or own <= self._slow():
            return False
        others = 0
        for chunk in self._running:
            for other, began in chunk.holders.items():
                seconds = self._last.get(other)
                if seconds and now - began <= SLOW * seconds:
                    others += max(0, int((now + own - max(now, began + seconds)) / seconds))
        return others >= len(self.todo)

    def _overdue(self, replica: W, now: float) -> Chunk[W] | None:
        """Return the chunk that one other replica has had longest, if that is longer than usual."""
        for chunk in self._running if self._durations else ():
            if len(chunk.holders) == 1:
                ((holder, began),) = chunk.holders.items()
                if began >= now - self._slow():
                    return None
                if holder != replica:
                    self.copies += 1
                    return chunk
        return None


@dataclass(eq=False)
class Call:
    """A rollout call in progress. `scheduler` is None once the rollout is over and the result no longer needed."""

    replica: Replica
    actor: Any
    chunk: Chunk[Replica]
    began: float
    scheduler: Scheduler[Replica] | None


class Dispatcher:
    """Runs rollouts on a pool. Calls that slow replicas have not finished continue after their rollout."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool, self._ray = pool, pool.cluster.ray
        self._calls: dict[Any, Call] = {}
        self.copies = 0
        """Number of chunks so far that were handed to a second replica."""

    def run(self, plan: Plan, requests: Sequence[Request], size: int) -> Iterator[Rollout]:
        """Yield all rollouts, chunk by chunk as they are finished."""
        chunks: list[Chunk[Replica]] = []
        last: tuple[Sequence[Request], Any] = ((), None)
        for part, wanted in chunks_of(plan, requests, size):
            if wanted is not last[0]:  # chunks of other members with the same requests follow each other
                last = wanted, self._ray.put(wanted)  # the object store copies them to a host only once
            chunks.append(Chunk((part, *last)))
        scheduler = Scheduler(chunks)
        try:
            while scheduler.open:
                self._hand_out(scheduler)
                if not self._calls and self._pool.any_ready():
                    continue
                for call, rollouts in self._ended():
                    if call.scheduler is None:
                        continue
                    if rollouts is None:
                        scheduler.lost(call.replica, call.chunk)
                    elif scheduler.finished(call.replica, call.chunk, time.monotonic()):
                        yield from rollouts
        finally:
            self.copies += scheduler.copies
            for call in self._calls.values():
                call.scheduler = None

    def _hand_out(self, scheduler: Scheduler[Replica]) -> None:
        busy = {call.replica for call in self._calls.values()}
        for replica in self._pool.ready:
            now = time.monotonic()
            chunk = None if replica in busy else scheduler.next(replica, now)
            if chunk is not None:
                plan, _, stored = chunk.load
                ref = replica.actor.rollout.remote(plan, stored)
                self._calls[ref] = Call(replica, replica.actor, chunk, now, scheduler)

    def _ended(self) -> Iterator[tuple[Call, list[Rollout] | None]]:
        """Wait a moment; yield the calls that ended, with None for those of replicas that failed."""
        for ref in self._pool.poll(self._calls):
            call = self._calls.pop(ref, None)
            if call is None:
                continue  # its replica failed in this loop
            if call.actor is not call.replica.actor:
                yield call, None  # its replica was restarted for another reason
                continue
            try:
                plan, requests, _ = call.chunk.load
                yield call, checked_rollouts(self._pool.get(call.replica, ref), pairs_of(plan.members, requests))
            except ReplicaError as error:
                yield from self._failed(call, str(error))
        now, patience = time.monotonic(), self._pool.settings.patience
        for ref, call in list(self._calls.items()):
            if ref not in self._calls:
                continue
            if call.actor is not call.replica.actor:
                del self._calls[ref]
                yield call, None
            elif now - call.began > patience and not self._ray.wait([ref], timeout=0)[0]:
                del self._calls[ref]
                yield from self._failed(call, f"did not respond within {patience:g} s")

    def _failed(self, call: Call, why: str) -> Iterator[tuple[Call, None]]:
        """Restart a replica; yield this call and all others that it had."""
        yield call, None
        for ref, other in list(self._calls.items()):
            if other.replica is call.replica:
                del self._calls[ref]
                yield other, None
        self._pool.restart(call.replica, why)
