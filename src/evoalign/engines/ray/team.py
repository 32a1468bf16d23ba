# SPDX-License-Identifier: Apache-2.0
"""The replicas: each in its seat, started again where it dies, hangs or errs, and brought to where the others are."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from evoalign.config import Config
from evoalign.engines.ray.audit import Audit
from evoalign.engines.ray.calls import FaultError, answer
from evoalign.engines.ray.cluster import Cluster
from evoalign.engines.ray.replica import Replica
from evoalign.engines.ray.settings import RayConfig
from evoalign.engines.ray.wire import GarbageError, Stand, stand_of
from evoalign.errors import EvoalignError
from evoalign.types import Facts

LOG = logging.getLogger("evoalign.engine.ray")
TICK = 0.5
"""Seconds at the most between two looks at what hangs, is slow, or has found room."""
ENDING = 15.0
"""Seconds that replicas have to end in order; a server in one has ten of them."""
LOADS = 4
"""Times what the first ones took, within which a replica has to load the model where `patience` is less."""
COPY_RATE = 0.5e9
"""Bytes a second at which a mean is copied, until one was."""


Stage = Literal["waiting", "loading", "catching up", "ready", "out"]
"""`waiting` has no room yet; `loading` is told nothing of the run; `catching up` is told all, and given nothing to
answer; `out` is thrown out."""


@dataclass(eq=False)
class Seat:
    """One replica: its actor, and what it was told to which no answer was awaited, in order."""

    place: int
    actor: Any = None
    stage: Stage = "waiting"
    told: list[Any] = field(default_factory=list[Any])
    joining: Any = None
    """Answers when the replica has come through its stage."""
    since: float = 0.0
    restarts: int = 0
    copies: bool = False
    """Whether the mean that it catches up to is another's."""
    distrusts_copy: bool = False
    kind: str = ""
    """Device and libraries: answers are compared among equals."""
    host: str = ""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """What it took to come here, by stage."""


class Team:
    """All seats. `begin`, `loaded` and `updates` are what a new replica is told to catch up."""

    def __init__(self, config: Config) -> None:
        assert isinstance(config.engine, RayConfig)
        self.settings = config.engine
        self._config = config.model_copy(update={"engine": self.settings.replica})
        self.cluster = Cluster(config)
        self._ray = self.cluster.ray
        self.audit = Audit(self.settings.audit) if self.settings.audit else None
        self.begin: tuple[Any, ...] | None = None
        self.mean_bytes = 0
        self.loaded: list[tuple[str, str, Any]] = []
        self.with_slots = False
        self.updates: list[bytes] = []
        self.known: dict[int, str] = {}
        """The hash of the mean after so many updates."""
        self.expelled: dict[int, str] = {}
        self.facts: Facts | None = None
        """What the first replica said."""
        self.seats = [Seat(place) for place in range(self.settings.replicas)]
        self._update_seconds, self._copy_rate = 0.0, COPY_RATE
        self.load_seconds = 0.0
        """That the first replicas took to load the model."""
        for place in self.cluster.placed():
            seat = self.seats[place]
            self._seat_actor(seat)
            seat.stage, seat.joining = "ready", None

    @property
    def join_limit(self) -> float:
        """Seconds that a stage of joining may take: to load a model may take longer than any answer."""
        return max(self.settings.patience, LOADS * self.load_seconds)

    # --- who there is

    @property
    def ready(self) -> list[Seat]:
        """Those that stand where the run does."""
        return [seat for seat in self.seats if seat.stage == "ready"]

    def settled(self) -> Seat:
        """A replica that stands where the run does; waits for one where none does."""
        began = time.monotonic()
        while not self.ready:
            if not any(seat.joining for seat in self.seats):
                self.await_room("no replica is left")
            self.poll(())
            if time.monotonic() - began > 2 * self.join_limit:
                self._give_up(f"no replica came to where the run is for {2 * self.join_limit:.0f} s")
        return self.ready[0]

    def await_room(self, why: str) -> None:
        """Nobody is at work and nobody joins: wait for room on the cluster. Raises EvoalignError where none comes."""
        began = time.monotonic()
        while not self.welcome():
            waiting = any(seat.stage == "waiting" for seat in self.seats)
            if not waiting or time.monotonic() - began > self.settings.patience:
                self._give_up(why)
            time.sleep(TICK)

    def await_more(self, why: str, since: float) -> None:
        """Those who are here cannot go on alone: look after who joins. Raises EvoalignError where nobody does, or has
        for long."""
        if any(seat.joining for seat in self.seats):
            if time.monotonic() - since > 2 * self.join_limit:
                self._give_up(why)
            self.poll(())
        else:
            self.await_room(why)

    def _give_up(self, why: str) -> NoReturn:
        out = "; ".join(f"replica {place} {reason}" for place, reason in self.expelled.items())
        raise EvoalignError(f"{why}{f' ({out})' if out else ''}: give the run replicas and resume it")

    # --- what they are told and asked

    def tell(self, method: str, *args: Any) -> None:
        """Every replica is told, and nobody waits: an actor does one thing after the other."""
        for seat in self.seats:
            if seat.stage in ("catching up", "ready"):
                seat.told.append(getattr(seat.actor, method).remote(*args))

    def ask(self, method: str, *args: Any) -> Any:
        """The answer of one replica, of another one where that fails."""
        while True:
            seat = self.settled()
            try:
                return self.get(seat, getattr(seat.actor, method).remote(*args))
            except FaultError as fault:
                self.revive(seat, str(fault))

    def ask_all(self, method: str, *args: Any) -> dict[Seat, Any]:
        """What every replica says that stands where the run does; those that fail are started again and left out.
        Raises EvoalignError where one refuses, once all have answered: Ray prints a refusal that nobody fetches."""
        refs = {seat: getattr(seat.actor, method).remote(*args) for seat in self.ready}
        found: dict[Seat, Any] = {}
        refused: EvoalignError | None = None
        for seat, ref in refs.items():
            try:
                found[seat] = self.get(seat, ref)
            except FaultError as fault:
                self.revive(seat, str(fault))
            except EvoalignError as error:
                refused = refused or error
        if refused:
            raise refused
        return found

    def stand(self) -> str:
        """The hash of the mean, of one replica."""
        while True:
            seat = self.settled()
            try:
                return self._stood(seat, self.get(seat, seat.actor.fingerprint.remote())).weights_hash
            except (FaultError, GarbageError) as fault:
                self.revive(seat, str(fault))

    def stands(self) -> dict[Seat, str]:
        """The hash of each replica's mean."""
        found: dict[Seat, str] = {}
        for seat, said in self.ask_all("fingerprint").items():
            try:
                found[seat] = self._stood(seat, said).weights_hash
            except GarbageError as fault:
                self.revive(seat, str(fault))
        return found

    def _stood(self, seat: Seat, said: object) -> Stand:
        stand = stand_of(said)
        if stand.update_seconds:
            self._update_seconds = stand.update_seconds
        if stand.copied_bytes and stand.copied_seconds:
            self._copy_rate = stand.copied_bytes / stand.copied_seconds
        if stand.updates != len(self.updates) and seat.stage == "ready":
            raise GarbageError(f"has made {stand.updates} updates and not {len(self.updates)}")
        return stand

    def get(self, seat: Seat, ref: Any) -> Any:
        """What a call came to, after all that the seat was told before. Raises FaultError, and EvoalignError where the
        engine itself says that it was asked for what cannot be."""
        told, seat.told = seat.told, []
        found: Any = None
        for one in (*told, ref):
            try:
                found = answer(self._ray, one, self.settings.patience)
            except EvoalignError as error:
                if seat.stage == "ready":
                    raise
                raise FaultError(f"cannot join: {error}") from error
        return found

    # --- coming and going

    def poll(self, refs: Iterable[Any]) -> list[Any]:
        """Those of some calls that have ended, after at most a moment; who joins meanwhile goes a stage further."""
        joining = {seat.joining: seat for seat in self.seats if seat.joining is not None}
        self.welcome()
        waited = [*refs, *joining]
        if not waited:
            return []
        ready, _ = self._ray.wait(waited, num_returns=1, timeout=TICK)
        for ref in [ref for ref in ready if ref in joining]:
            self._arrived(joining[ref])
        for seat in joining.values():
            if seat.joining is None or time.monotonic() - seat.since <= self.join_limit:
                continue
            if not self._ray.wait([seat.joining], timeout=0)[0]:  # else it came while nobody looked
                self._overdue(seat)
        return [ref for ref in ready if ref not in joining]

    def welcome(self) -> bool:
        """Seats for which there is room by now get a replica; whether any did."""
        waiting = {seat.place: seat for seat in self.seats if seat.stage == "waiting"}
        placed = [waiting[place] for place in self.cluster.placed() if place in waiting] if waiting else []
        for seat in placed:
            LOG.info("replica %d has found room and joins", seat.place)
            self._load(seat)
        return bool(placed)

    def revive(self, seat: Seat, why: str) -> None:
        """Start a replica anew, and let it catch up. Raises EvoalignError where that was done too often, or where this
        process has lost the cluster."""
        if seat.stage == "out":
            return
        self.cluster.check()
        seat.restarts += 1
        if seat.restarts > self.settings.restarts:
            raise EvoalignError(
                f"replica {seat.place} {why}; it was started again {self.settings.restarts} times (engine.restarts)"
            )
        count = f"{seat.restarts} of {self.settings.restarts} times"
        LOG.warning("replica %d %s; it is started again (%s), others do its work", seat.place, why, count)
        seat.distrusts_copy |= seat.copies
        self._ray.kill(seat.actor)
        if seat.place in self.cluster.placed():
            self._load(seat)
        else:  # its host went with it
            seat.actor, seat.stage, seat.joining, seat.told = None, "waiting", None, []

    def expel(self, seat: Seat, why: str) -> None:
        """Throw a replica out for good."""
        LOG.warning("replica %d %s; it is thrown out", seat.place, why)
        self.expelled[seat.place] = why
        seat.stage, seat.joining, seat.told = "out", None, []
        self._end(seat)

    def _end(self, seat: Seat) -> None:
        self._ray.kill(seat.actor)
        self.cluster.vacate(seat.place)

    def may_check(self, seat: Seat, others: Sequence[Seat]) -> bool:
        """Whether a replica can check what others answered: one of the same kind, and on another host if any is."""
        if any(seat.kind != other.kind for other in others):
            return False
        hosts = {other.host for other in others}
        if seat.host not in hosts:
            return True
        return all(s.host in hosts for s in self.ready if s.kind == seat.kind and s not in others)

    def _seat_actor(self, seat: Seat) -> None:
        seat.actor = self.cluster.actor(Replica, seat.place, self._config, str(Path.cwd()))
        seat.since, seat.copies = time.monotonic(), False
        seat.told = [seat.actor.about.remote()]

    def _load(self, seat: Seat) -> None:
        self._seat_actor(seat)
        if self.begin is None:
            seat.stage, seat.joining = "ready", None
            return
        seat.stage, seat.joining = "loading", seat.actor.start.remote(*self.begin)

    def _catch_up(self, seat: Seat) -> None:
        """From the start of the run to where the others are. What comes later, all are told."""
        seat.stage, donor = "catching up", next(iter(self.ready), None)
        seat.copies = donor is not None and self._copying_pays(seat)
        if donor is not None and seat.copies:
            backend = "nccl" if self.cluster.gpus >= 1 else "gloo"
            where = donor.actor.listen.remote(backend, self.cluster.address(donor.place))
            donor.told.append(donor.actor.give.remote())
            seat.told.append(seat.actor.take.remote(where, backend, self.cluster.address(seat.place)))
        else:
            if self.loaded:
                seat.told += [seat.actor.keep.remote(*one) for one in self.loaded]
                seat.told.append(seat.actor.load.remote(self.with_slots))
            if self.updates:
                seat.told.append(seat.actor.apply.remote(self.updates))
        seat.joining = seat.actor.fingerprint.remote()

    def _copying_pays(self, seat: Seat) -> bool:
        wanted = self.settings.catch_up
        if seat.distrusts_copy or wanted == "replay" or not (self.updates or self.loaded):
            return False
        return wanted == "copy" or len(self.updates) * self._update_seconds > self.mean_bytes / self._copy_rate

    def _arrived(self, seat: Seat) -> None:
        ref, seat.joining = seat.joining, None
        updates = len(self.updates)
        try:
            said = self.get(seat, ref)
            seat.seconds[seat.stage] = time.monotonic() - seat.since
            if seat.stage == "loading":
                odd = self.seen(seat, said)
                if odd:
                    self.expel(seat, odd)
                    return
                seat.since = time.monotonic()
                self._catch_up(seat)
                return
            stand = self._stood(seat, said)
            if stand.updates > updates:
                raise GarbageError(f"says that it has made {stand.updates} updates of {updates}")
            if self.known.get(stand.updates, stand.weights_hash) != stand.weights_hash:
                raise GarbageError(f"came to another mean than the others after {stand.updates} of {updates} updates")
        except (FaultError, GarbageError) as fault:
            self.revive(seat, str(fault))
            return
        seat.stage, seat.distrusts_copy = "ready", False
        how = "a copy" if seat.copies else "replaying"
        took = ", ".join(f"{stage} {s:.1f} s" for stage, s in seat.seconds.items())
        LOG.info("replica %d joins after %d updates, by %s (%s)", seat.place, stand.updates, how, took)

    def seen(self, seat: Seat, said: Any) -> str:
        """Keep what a replica said as it started, as far as answers depend on it; why it can be none of this run's, if
        so. Raises GarbageError."""
        facts, kind = said if isinstance(said, tuple) and len(cast(Any, said)) == 2 else (None, None)
        if not isinstance(facts, Facts) or not isinstance(kind, str):
            raise GarbageError("answered what are no facts of an engine")
        first, self.facts = self.facts, self.facts or facts
        seat.kind, seat.host = kind, self.cluster.node(seat.place)
        if first is not None and (facts.model_hash, facts.dtype) != (first.model_hash, first.dtype):
            return "loaded other weights than the others: give all hosts the same model"
        if first is not None and first.deterministic and not facts.deterministic:
            return "repeats no answer to the bit, as the others do"
        kinds = {other.kind for other in self.ready if other is not seat}
        if self.audit and seat.stage == "loading" and kinds and kind not in kinds:
            return f"is of another kind ({kind}) than those that can check it"
        return ""

    def _overdue(self, seat: Seat) -> None:
        """Of who joins: not where its host is away, since then there is no room yet."""
        if seat.place not in self.cluster.placed():
            seat.since = time.monotonic()
        else:
            self.revive(seat, f"did not join within {self.join_limit:.0f} s")

    def close(self) -> None:
        """End all replicas, in order where they still answer, and the cluster where it is this process's own."""
        there = [seat for seat in self.seats if seat.actor is not None and seat.stage != "out"]
        ending = [seat.actor.close.remote() for seat in there]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=ENDING)
        for seat in there:
            self._ray.kill(seat.actor)
        self.cluster.close()
