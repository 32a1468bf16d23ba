# SPDX-License-Identifier: Apache-2.0
"""The replicas: each in its seat, started again where it dies, hangs or errs, and brought to where the others are."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evoalign.config import Config
from evoalign.engines.ray.cluster import Cluster
from evoalign.engines.ray.replica import Replica
from evoalign.engines.ray.settings import RayConfig
from evoalign.errors import EvoalignError

LOG = logging.getLogger("evoalign.engine.ray")
ENDING = 15.0
"""Seconds that replicas have to end in order; a server in one has ten of them."""


class FaultError(Exception):
    """A replica did not answer as one that works would."""


@dataclass(eq=False)
class Seat:
    """One replica: its actor, and what it was told to which no answer was awaited, in order.

    `joining` answers once it is where the others are; until then it is given nothing to answer.
    """

    place: int
    actor: Any
    told: list[Any] = field(default_factory=list[Any])
    joining: Any = None
    restarts: int = 0


class Team:
    """All seats. `begin`, `loaded` and `updates` are what a new replica is told to catch up."""

    def __init__(self, config: Config) -> None:
        assert isinstance(config.engine, RayConfig)
        self.settings = config.engine
        self._config = config.model_copy(update={"engine": self.settings.replica})
        self.cluster = Cluster(config)
        self._ray = self.cluster.ray
        self.begin: tuple[Any, ...] | None = None
        self.loaded: list[tuple[str, str, Any]] = []
        self.with_slots = False
        self.updates: list[bytes] = []
        self.seats = [Seat(place, self._actor(place)) for place in range(self.settings.replicas)]
        for seat in self.seats:
            seat.told.append(seat.actor.about.remote())

    def _actor(self, place: int) -> Any:
        return self.cluster.actor(Replica, place, self._config, str(Path.cwd()))

    def tell(self, method: str, *args: Any) -> None:
        """Every replica is told, and nobody waits: an actor does one thing after the other."""
        for seat in self.seats:
            seat.told.append(getattr(seat.actor, method).remote(*args))

    def settled(self) -> Seat:
        """The first replica that does not still join, or else the first."""
        return min(self.seats, key=lambda seat: (seat.joining is not None, seat.place))

    def ask(self, method: str, *args: Any) -> Any:
        """The answer of one replica, of another one where that fails."""
        while True:
            seat = self.settled()
            try:
                return self.get(seat, getattr(seat.actor, method).remote(*args))
            except FaultError as fault:
                self.revive(seat, str(fault))

    def ask_all(self, method: str, *args: Any) -> dict[Seat, Any]:
        """What every replica says; those that fail are started again and left out."""
        refs = {seat: getattr(seat.actor, method).remote(*args) for seat in self.seats}
        found: dict[Seat, Any] = {}
        for seat, ref in refs.items():
            try:
                found[seat] = self.get(seat, ref)
            except FaultError as fault:
                self.revive(seat, str(fault))
        return found

    def get(self, seat: Seat, ref: Any) -> Any:
        """What a call came to, after all that the seat was told before. Raises FaultError, and EvoalignError where the
        engine itself says that it was asked for what cannot be."""
        told, seat.told = seat.told, []
        found: Any = None
        for one in (*told, ref):
            found = self._got(one)
        return found

    def _got(self, ref: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref, timeout=self.settings.patience)
        except errors.RayTaskError as error:
            if isinstance(error.cause, EvoalignError):
                raise error.cause from None
            raise FaultError(f"failed: {_line(error.cause)}") from error
        except errors.GetTimeoutError as error:
            raise FaultError(f"gave no answer for {self.settings.patience:g} s") from error
        except errors.RayError as error:
            raise FaultError(f"died: {_line(error)}") from error

    def revive(self, seat: Seat, why: str) -> None:
        """Start a replica anew; it catches up by itself, by replaying all updates. Raises EvoalignError where that was
        done too often."""
        seat.restarts += 1
        if seat.restarts > self.settings.restarts:
            raise EvoalignError(
                f"replica {seat.place} {why}; it was started again {self.settings.restarts} times (engine.restarts)"
            )
        LOG.warning("replica %d %s; it is started again and its work is done by others", seat.place, why)
        self._ray.kill(seat.actor)
        seat.actor = self._actor(seat.place)
        seat.told = [seat.actor.about.remote()]
        if self.begin is not None:
            seat.told.append(seat.actor.start.remote(*self.begin))
        if self.loaded:
            seat.told += [seat.actor.keep.remote(*one) for one in self.loaded]
            seat.told.append(seat.actor.load.remote(self.with_slots))
        if self.updates:
            seat.told.append(seat.actor.apply.remote(self.updates))
        seat.joining = seat.actor.fingerprint.remote() if self.begin is not None else seat.told[-1]

    def close(self) -> None:
        """End all replicas, in order where they still answer, and the cluster where it is this process's own."""
        ending = [seat.actor.close.remote() for seat in self.seats]
        self._ray.wait(ending, num_returns=len(ending), timeout=ENDING)
        for seat in self.seats:
            self._ray.kill(seat.actor)
        self.cluster.close()


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
