# SPDX-License-Identifier: Apache-2.0
"""Who answers which chunk of a rollout, until all are answered, whatever becomes of replicas."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from evoalign.engines.base import pairs_of
from evoalign.engines.ray import wire
from evoalign.engines.ray.team import FaultError, Seat, Team
from evoalign.types import Member, Plan, Request, Rollout

SLOW = 1.5
"""Times the usual after which a chunk is handed to a second replica that has nothing to do."""
REQUESTS = 64
"""Of the mean, or of requests that name their member, that a replica is handed at once."""
TICK = 0.5
"""Seconds at the most between two looks at what hangs or is slow."""


@dataclass(eq=False)
class Chunk:
    """Members and the requests that they answer; what is sent, and how many replicas have it now."""

    asked: list[tuple[Member, Request]]
    plan: bytes
    requests: Any
    holders: int = 0
    is_done: bool = False


@dataclass(eq=False)
class _Work:
    seat: Seat
    chunk: Chunk
    began: float = field(default_factory=time.monotonic)


def chunks_of(plan: Plan, requests: Sequence[Request], size: int) -> Iterator[tuple[Plan, Sequence[Request]]]:
    """Members with all that they answer, `size` at a time; what only some answer, or the mean alone, by request.

    Follows from the plan, the requests and `size`, and not from how many replicas there are.
    """
    shared = [r for r in requests if r.member is None]
    if len(plan.members) == 1:
        for part in _pieces(shared, REQUESTS):
            yield plan, part
    else:
        for members in _pieces(plan.members, size) if shared else ():
            yield Plan(plan.generation, plan.sigma, tuple(members)), shared
    for part in _pieces([r for r in requests if r.member is not None], REQUESTS):
        named = tuple(m for m in plan.members if any(r.member == m for r in part))
        yield Plan(plan.generation, plan.sigma, named), part


def _pieces(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


class Schedule:
    """The chunks of one rollout. `late` are chunks of former ones that slow replicas still have, by call."""

    def __init__(self, team: Team, late: dict[Any, _Work]) -> None:
        self._team, self._running = team, late
        self._ray = team.cluster.ray

    def run(self, plan: Plan, requests: Sequence[Request], size: int) -> Iterator[Rollout]:
        """All completions, chunk by chunk as they come."""
        sent: dict[int, Any] = {}
        todo: deque[Chunk] = deque()
        for part, asked in chunks_of(plan, requests, size):
            ref = sent.setdefault(id(asked), None) or self._ray.put(wire.requests_bytes(asked))
            sent[id(asked)] = ref
            todo.append(Chunk(pairs_of(part.members, asked), wire.plan_bytes(part), ref))
        try:
            yield from self._answers(todo, len(todo))
        finally:  # what slow replicas still have, or what is left half-way, is nobody's
            for work in self._running.values():
                work.chunk.is_done = True

    def _answers(self, todo: deque[Chunk], left: int) -> Iterator[Rollout]:
        spent = list[float]()
        while left:
            self._hand_out(todo, spent)
            for work, rollouts in self._finished():
                chunk = work.chunk
                chunk.holders -= 1
                if chunk.is_done:
                    continue
                if rollouts is not None:
                    spent.append(time.monotonic() - work.began)
                    chunk.is_done = True
                    left -= 1
                    yield from rollouts
                elif not chunk.holders:
                    todo.appendleft(chunk)

    def _hand_out(self, todo: deque[Chunk], spent: Sequence[float]) -> None:
        busy = {work.seat for work in self._running.values()}
        for seat in self._team.seats:
            if seat in busy or seat.joining is not None:
                continue
            chunk = todo.popleft() if todo else self._slow(spent)
            if chunk is None:
                return
            chunk.holders += 1
            self._running[seat.actor.rollout.remote(chunk.plan, chunk.requests)] = _Work(seat, chunk)

    def _slow(self, spent: Sequence[float]) -> Chunk | None:
        """A chunk that takes longer than is usual, and that one replica alone has."""
        if not spent:
            return None
        late = time.monotonic() - SLOW * statistics.median(spent)
        held = [w for w in self._running.values() if w.chunk.holders == 1 and not w.chunk.is_done and w.began < late]
        return min(held, key=lambda work: work.began).chunk if held else None

    def _finished(self) -> Iterator[tuple[_Work, list[Rollout] | None]]:
        """What ended: answers, or None of a replica that failed and was started again."""
        joining = {seat.joining: seat for seat in self._team.seats if seat.joining is not None}
        ready, _ = self._ray.wait([*self._running, *joining], num_returns=1, timeout=TICK)
        for ref in ready:
            if ref in joining:
                self._join(joining[ref])
                continue
            work = self._running.pop(ref)
            try:
                yield work, wire.rollouts_of(self._team.get(work.seat, ref), work.chunk.asked)
            except (FaultError, wire.GarbageError) as fault:
                yield work, self._again(work.seat, str(fault))
        now, patience = time.monotonic(), self._team.settings.patience
        for ref, work in list(self._running.items()):
            if now - work.began > patience:
                del self._running[ref]
                yield work, self._again(work.seat, f"gave no answer for {patience:g} s")

    def _again(self, seat: Seat, why: str) -> None:
        for ref in [ref for ref, work in self._running.items() if work.seat is seat]:
            del self._running[ref]
        self._team.revive(seat, why)

    def _join(self, seat: Seat) -> None:
        ref, seat.joining = seat.joining, None
        try:
            self._team.get(seat, ref)
        except FaultError as fault:
            self._team.revive(seat, str(fault))
