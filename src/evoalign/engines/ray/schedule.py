# SPDX-License-Identifier: Apache-2.0
"""The chunks of a rollout, put to replicas by the rules of `deal` until all are answered, whatever becomes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evoalign.engines.base import pairs_of
from evoalign.engines.ray import wire
from evoalign.engines.ray.calls import FaultError
from evoalign.engines.ray.deal import Chunk, Deal
from evoalign.engines.ray.team import Seat, Team
from evoalign.types import Member, Plan, Request, Rollout

REQUESTS = 64
"""Of the mean, or of requests that name their member, that a replica is handed at once."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Members and the requests that they answer, and what is sent of both."""

    members: tuple[Member, ...]
    pairs: list[tuple[Member, Request]]
    sent: bytes
    shared: Any
    """Of Ray's store, which a host gets once."""


@dataclass(eq=False)
class Work:
    """What a replica was asked. `deal` is None once its rollout is over, and the answer is nobody's."""

    seat: Seat
    actor: Any
    chunk: Chunk[Seat]
    began: float
    deal: Deal[Seat] | None


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
    """The rollouts of a team. Calls that slow replicas have not answered outlive theirs."""

    def __init__(self, team: Team) -> None:
        self._team, self._ray = team, team.cluster.ray
        self._running: dict[Any, Work] = {}
        self.record: dict[str, Any] = {}
        """Who scored what of the last rollout, where answers are checked."""
        self.counts = {"copies": 0, "checked": 0, "sent_bytes": 0, "received_bytes": 0}

    def run(self, plan: Plan, requests: Sequence[Request], size: int) -> Iterator[Rollout]:
        """All completions: chunk by chunk as they come or, where answers are checked, once all are believed."""
        audit = self._team.audit
        chunks = [Chunk[Seat](asked) for asked in self._asked(plan, requests, size)]
        draws = audit.draws(plan, chunks) if audit else None
        deal = Deal(audit.shuffled(chunks) if audit else chunks, draws, self._team.may_check)
        try:
            for chunk in self._believed(deal):
                if not audit:
                    yield from chunk.believed
            if audit:
                self.record = audit.record(chunks, self._team.expelled)
                self.counts["checked"] += sum(chunk.wanted > 1 for chunk in chunks)
                yield from (rollout for chunk in chunks for rollout in chunk.believed)
        finally:  # what slow replicas still have, or what is left half-way, is nobody's
            self.counts["copies"] += deal.copies
            for work in self._running.values():
                work.deal = None

    def _asked(self, plan: Plan, requests: Sequence[Request], size: int) -> Iterator[Asked]:
        last: Sequence[Request] | None = None
        put: Any = None
        for part, asked in chunks_of(plan, requests, size):
            if asked is not last:  # chunks of other members with the same requests follow each other
                data = wire.asked_bytes(part, asked)
                self.counts["sent_bytes"] += len(data)
                last, put = asked, self._ray.put(data)
            members = wire.members_bytes(part.members)
            yield Asked(part.members, pairs_of(part.members, asked), members, put)

    def _believed(self, deal: Deal[Seat]) -> Iterator[Chunk[Seat]]:
        """Chunks as they are done; one that a replica alone answered that was wrong later comes again."""
        began = time.monotonic()
        while deal.open:
            self._hand_out(deal)
            if not self._running and self._team.settled():
                self._hand_out(deal)
            if not self._running:
                self._team.await_more(f"{deal.open} chunks are left that no replica can answer or check", began)
                continue
            began = time.monotonic()
            for work, answer in self._finished():
                if work.deal is None:
                    continue
                if answer is None:
                    deal.lost(work.seat, work.chunk)
                    continue
                was_done = work.chunk.is_done
                for wrong in deal.answered(work.seat, work.chunk, answer, time.monotonic()):
                    self._expel(deal, wrong)
                if work.chunk.is_done and not was_done:
                    yield work.chunk

    def _hand_out(self, deal: Deal[Seat]) -> None:
        busy = {work.seat for work in self._running.values()}
        for seat in self._team.ready:
            now = time.monotonic()
            chunk = None if seat in busy else deal.next(seat, now)
            if chunk is not None:
                asked: Asked = chunk.load
                self.counts["sent_bytes"] += len(asked.sent)
                self._running[seat.actor.rollout.remote(asked.sent, asked.shared)] = Work(
                    seat, seat.actor, chunk, now, deal
                )

    def _finished(self) -> Iterator[tuple[Work, list[Rollout] | None]]:
        """What ended: answers, or None of a replica that failed and was started again."""
        for ref in self._team.poll(self._running):
            work = self._running.pop(ref, None)
            if work is None:
                continue  # of a replica that failed meanwhile
            if work.actor is not work.seat.actor:  # it was started again since, and its work is lost
                yield work, None
                continue
            try:
                data = self._team.get(work.seat, ref)
                self.counts["received_bytes"] += len(data) if isinstance(data, bytes) else 0
                yield work, wire.rollouts_of(data, work.chunk.load.pairs)
            except (FaultError, wire.GarbageError) as fault:
                yield from self._again(work, str(fault))
        now, patience = time.monotonic(), self._team.settings.patience
        for ref, work in list(self._running.items()):
            if ref not in self._running:
                continue
            if work.actor is not work.seat.actor:
                del self._running[ref]
                yield work, None
            elif now - work.began > patience and not self._ray.wait([ref], timeout=0)[0]:
                del self._running[ref]
                yield from self._again(work, f"gave no answer for {patience:g} s")

    def _again(self, work: Work, why: str) -> Iterator[tuple[Work, None]]:
        """A replica failed: all that it has is lost."""
        yield work, None
        for lost in self._forget(work.seat):
            yield lost, None
        self._team.revive(work.seat, why)

    def _forget(self, seat: Seat) -> list[Work]:
        refs = [ref for ref, work in self._running.items() if work.seat is seat]
        return [self._running.pop(ref) for ref in refs]

    def _expel(self, deal: Deal[Seat], seat: Seat) -> None:
        self._forget(seat)
        deal.disown(seat)
        self._team.expel(seat, "gave another answer than two others")
