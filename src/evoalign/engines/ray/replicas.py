# SPDX-License-Identifier: Apache-2.0
"""The replicas of engine `ray`: the pool that starts, calls and replaces their actors.

The functions `checked_*` at the end check what replicas return. A replica that returns something invalid, dies or hangs
is replaced.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from evoalign.config import Config
from evoalign.engines.ray.actor import Packed, ReplicaActor
from evoalign.engines.ray.cluster import Cluster
from evoalign.engines.ray.settings import RayConfig
from evoalign.errors import ConfigError, DataError, EvoalignError, ModelError, NotFiniteError, plain
from evoalign.types import Facts, Layout, Member, Request, Rollout, Update

LOG = logging.getLogger("evoalign.engine.ray")
TICK = 0.5
"""Most seconds between two checks for replicas that hang, are slow, or have found room."""
ENDING = 15.0
"""Seconds that replicas have to close their engines; a server in one has ten of them."""
MARGIN = 4
"""A joining replica may take this many times as long as the first replicas took for the same work."""
REFUSALS = (ConfigError, DataError, ModelError, NotFiniteError)
"""Errors of an engine about the request itself, which every replica would raise; all others are the replica's fault."""

Stage = Literal["waiting", "loading", "catching up", "ready", "excluded"]
"""`waiting`: no room yet. `loading`: receives no updates yet. `catching up`: receives updates but no rollouts.
`excluded`: cannot be part of this run."""


FAILED = object()
"""Result of a replica that failed and was restarted."""
Check = Callable[[Any], Any]
"""Returns a replica's result, or part of it. Raises ReplicaError where it is invalid."""


class ReplicaError(Exception):
    """A replica died, did not respond in time, or returned something invalid."""


def unchecked(returned: Any) -> Any:
    """Return any result."""
    return returned


@dataclass(eq=False)
class Replica:
    """The state of one replica."""

    place: int
    actor: Any = None
    stage: Stage = "waiting"
    pending: list[Any] = field(default_factory=list[Any])
    """Calls whose results were not fetched yet, in order."""
    joining: Any = None
    """The call that ends the current stage of joining."""
    since: float = 0.0
    """When that stage began."""
    restarts: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Duration of each stage of joining."""


class ReplicaPool:
    """All replicas, with what a new one needs to catch up: how to start, loaded weights, and updates since then."""

    def __init__(self, config: Config) -> None:
        assert isinstance(config.engine, RayConfig)
        self.settings = config.engine
        self._config = config.model_copy(update={"engine": self.settings.replica})
        self.cluster = Cluster(config)
        self._ray = self.cluster.ray
        self.start_arguments: tuple[Layout, bool, bool] | None = None
        self.loaded: list[tuple[str, str, Any]] = []
        self.with_slots = False
        self.updates: list[Update] = []
        self.hashes: dict[int, str] = {}
        """The mean's hash by the number of updates."""
        self.facts: Facts | None = None
        """Facts of the first replica."""
        self.load_seconds = self.update_seconds = 0.0
        self._applied_at: float | None = None
        self.replicas = [Replica(place) for place in range(self.settings.replicas)]
        for place in self.cluster.placed():
            self._launch(self.replicas[place])

    @property
    def ready(self) -> list[Replica]:
        """Replicas that have the current mean."""
        return [replica for replica in self.replicas if replica.stage == "ready"]

    def join_limit(self, stage: Stage) -> float:
        """Return the most seconds that a stage of joining may take: loading a model or replaying takes long."""
        replay = len(self.updates) * self.update_seconds if stage == "catching up" else 0.0
        return max(self.settings.patience, MARGIN * (self.load_seconds + replay))

    def any_ready(self) -> Replica:
        """Return a ready replica; if there is none, wait until one joins. Raises EvoalignError if none does."""
        began, was_joining = time.monotonic(), False
        while not self.ready:
            joining = [replica for replica in self.replicas if replica.joining is not None]
            if bool(joining) != was_joining:
                began, was_joining = time.monotonic(), bool(joining)
            limit = 2 * max((self.join_limit(replica.stage) for replica in joining), default=0.0)
            if any(replica.stage == "waiting" for replica in self.replicas):
                limit = max(limit, self.settings.patience)
            if time.monotonic() - began > limit:
                raise EvoalignError(f"no replica is left or joined within {limit:.0f} s: add replicas and resume")
            if joining:
                self.poll(())
            elif not self.admit():
                time.sleep(TICK)
        return self.ready[0]

    # --- calls

    def ask(self, method: str, *args: Any, check: Check = unchecked) -> Any:
        """Return the checked result of one replica; if it fails, of another."""
        while True:
            found = self.ask_one(self.any_ready(), method, *args, check=check)
            if found is not FAILED:
                return found

    def ask_one(self, replica: Replica, method: str, *args: Any, check: Check = unchecked) -> Any:
        """Return the checked result of a ready replica, or `FAILED` after restarting it."""
        try:
            return check(self.get(replica, getattr(replica.actor, method).remote(*args)))
        except ReplicaError as error:
            self.restart(replica, str(error))
            return FAILED

    def ask_all(self, method: str, *args: Any, check: Check = unchecked) -> dict[Replica, Any]:
        """Return the checked result of each ready replica, and restart those that fail.

        Raises EvoalignError if one refuses, after fetching all results: Ray prints errors that were not fetched.
        """
        calls = {replica: getattr(replica.actor, method).remote(*args) for replica in self.ready}
        found: dict[Replica, Any] = {}
        refused: EvoalignError | None = None
        for replica, call in calls.items():
            try:
                found[replica] = check(self.get(replica, call))
            except ReplicaError as error:
                self.restart(replica, str(error))
            except EvoalignError as error:
                refused = refused or error
        if refused:
            raise refused
        return found

    def get(self, replica: Replica, call: Any) -> Any:
        """Return the result of a call, after those that are pending.

        Raises ReplicaError; EvoalignError if the engine of a ready replica refused the request.
        """
        pending, replica.pending = replica.pending, []
        errors, result = self._ray.exceptions, None
        try:
            for each in (*pending, call):
                result = self._ray.get(each, timeout=self.settings.patience)
        except errors.RayTaskError as error:
            if not isinstance(error.cause, REFUSALS):
                raise ReplicaError(f"failed: {summary(error.cause)}") from error
            if replica.stage == "ready":
                raise error.cause from None
            raise ReplicaError(f"cannot join: {error.cause}") from error
        except errors.GetTimeoutError as error:
            raise ReplicaError(f"did not respond within {self.settings.patience:g} s") from error
        except errors.RayError as error:
            raise ReplicaError(f"died: {summary(error)}") from error
        return result

    def apply(self, update: Update) -> None:
        """Send an update to all replicas that receive updates, without waiting: actors run their calls in order."""
        self.updates.append(update)
        self._applied_at = time.monotonic()
        for replica in self.replicas:
            if replica.stage in ("catching up", "ready"):
                replica.pending.append(replica.actor.apply.remote([update]))

    def current_hash(self, returned: object) -> str:
        """Return the hash of a `fingerprint` after all updates. Raises ReplicaError for anything else."""
        return checked_fingerprint(returned, len(self.updates), len(self.updates))[1]

    def fingerprint(self) -> str:
        """Return the hash of one replica's mean."""
        found = self.ask("fingerprint", check=self.current_hash)
        if self._applied_at is not None:
            self.update_seconds, self._applied_at = time.monotonic() - self._applied_at, None
        return found

    def fingerprints(self) -> dict[Replica, str]:
        """Return the hash of each ready replica's mean."""
        return self.ask_all("fingerprint", check=self.current_hash)

    # --- joining

    def poll(self, calls: Iterable[Any]) -> list[Any]:
        """Wait at most `TICK` seconds for one of the calls; return those that ended. Advances joining replicas."""
        joining = {replica.joining: replica for replica in self.replicas if replica.joining is not None}
        self.admit()
        waited = [*calls, *joining]
        if not waited:
            return []
        ended, _ = self._ray.wait(waited, num_returns=1, timeout=TICK)
        for call in [call for call in ended if call in joining]:
            self._advance(joining[call])
        for replica in joining.values():
            limit = self.join_limit(replica.stage)
            if replica.joining is None or time.monotonic() - replica.since <= limit:
                continue
            if replica.place not in self.cluster.placed():
                replica.since = time.monotonic()  # its host is away
            elif not self._ray.wait([replica.joining], timeout=0)[0]:  # it did not end since the wait above
                self.restart(replica, f"did not join within {limit:.0f} s")
        return [call for call in ended if call not in joining]

    def admit(self) -> bool:
        """Launch replicas that were waiting and have room now; return whether there were any."""
        waiting = {replica.place: replica for replica in self.replicas if replica.stage == "waiting"}
        placed = [waiting[place] for place in self.cluster.placed() if place in waiting] if waiting else []
        for replica in placed:
            LOG.info("replica %d has found room and joins", replica.place)
            self._launch(replica)
        return bool(placed)

    def restart(self, replica: Replica, why: str) -> None:
        """Replace a replica's actor. Raises EvoalignError after too many restarts, or if the cluster is gone."""
        self.cluster.check()
        replica.restarts += 1
        most = self.settings.restarts
        if replica.restarts > most:
            raise EvoalignError(f"replica {replica.place} {why}; it was restarted {most} times (engine.restarts)")
        text = "replica %d %s; it is restarted (%d of %d times), and others take over its work"
        LOG.warning(text, replica.place, why, replica.restarts, most)
        self._ray.kill(replica.actor)
        if replica.place in self.cluster.placed():
            self._launch(replica)
        else:  # its host is gone as well
            replica.actor, replica.stage, replica.joining, replica.pending = None, "waiting", None, []

    def _launch(self, replica: Replica) -> None:
        replica.actor = self.cluster.actor(ReplicaActor, replica.place, self._config, str(Path.cwd()))
        replica.since = time.monotonic()
        replica.pending = [replica.actor.load_model.remote()]
        if self.start_arguments is None:
            replica.stage, replica.joining = "ready", None
        else:
            replica.stage, replica.joining = "loading", replica.actor.start.remote(*self.start_arguments)

    def _advance(self, replica: Replica) -> None:
        """Move a joining replica, whose call has ended, to its next stage."""
        call, replica.joining = replica.joining, None
        updates = len(self.updates)
        try:
            returned = self.get(replica, call)
            replica.seconds[replica.stage] = time.monotonic() - replica.since
            if replica.stage == "loading":
                if mismatch := self.mismatch(returned):
                    LOG.warning("replica %d %s; it is excluded", replica.place, mismatch)
                    replica.stage, replica.pending = "excluded", []
                    self._ray.kill(replica.actor)
                    self.cluster.vacate(replica.place)
                else:
                    self._catch_up(replica)
                return
            made, weights_hash = checked_fingerprint(returned, 0, updates)
            if self.hashes.get(made, weights_hash) != weights_hash:
                raise ReplicaError(f"has another mean than the others after {made} of {updates} updates")
        except ReplicaError as error:
            self.restart(replica, str(error))
            return
        replica.stage = "ready"
        took = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in replica.seconds.items())
        LOG.info("replica %d joins after %d updates (%s)", replica.place, made, took)

    def _catch_up(self, replica: Replica) -> None:
        """Send the loaded weights and all updates; later updates are sent to it as well."""
        replica.stage, replica.since = "catching up", time.monotonic()
        if self.loaded:
            replica.pending += [replica.actor.keep.remote(*item) for item in self.loaded]
            replica.pending.append(replica.actor.load.remote(self.with_slots))
        if self.updates:
            replica.pending.append(replica.actor.apply.remote(self.updates))
        replica.joining = replica.actor.fingerprint.remote()

    def mismatch(self, returned: object) -> str:
        """Return why a replica that started cannot be part of this run, or "". Raises ReplicaError."""
        if not isinstance(returned, Facts):
            raise ReplicaError("returned something other than the facts of an engine")
        first = self.facts = self.facts or returned
        if (returned.model_hash, returned.dtype) != (first.model_hash, first.dtype):
            return "loaded other weights than the first replica: give all hosts the same model"
        if first.deterministic and not returned.deterministic:
            return "is not deterministic, as the first replica is"
        return ""

    def close(self) -> None:
        """Close all engines, end the actors, and the cluster if this process started it."""
        actors = [r.actor for r in self.replicas if r.actor is not None and r.stage != "excluded"]
        ending = [actor.close.remote() for actor in actors]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=ENDING)
        for actor in actors:
            self._ray.kill(actor)
        self.cluster.close()


def summary(error: BaseException) -> str:
    """Return the error's type and last line, with the process and host if Ray names them."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    where = ", ".join(f"{name} {found[1]}" for name in ("pid", "ip") if (found := re.search(rf"\b{name}: (\S+)", text)))
    last = lines[-1].partition(" There are some potential root causes")[0]  # Ray's list of what can kill any process
    return f"{type(error).__name__}{f' ({where})' if where else ''}: {plain(last)[:300]}"


def checked_fingerprint(returned: object, fewest: int, most: int) -> tuple[int, str]:
    """Return the number of updates, from `fewest` to `most`, and the hash. Raises ReplicaError for anything else."""
    made, weights_hash = returned if type(returned) is tuple and len(cast(Any, returned)) == 2 else (None, None)
    if type(made) is not int or type(weights_hash) is not str or not re.fullmatch("[0-9a-f]{64}", weights_hash):
        raise ReplicaError("returned something other than the hash of its mean")
    if not fewest <= made <= most:
        raise ReplicaError(f"has made {made} updates instead of {most}")
    return made, weights_hash


def checked_rollouts(returned: object, pairs: Sequence[tuple[Member, Request]]) -> list[Rollout]:
    """Unpack one rollout of each member and request, in that order. Raises ReplicaError for anything else."""
    wanted = {(member.index, request.index): (member, request) for member, request in pairs}
    found: dict[tuple[int, int], Rollout] = {}
    try:
        rows, packed_ids, packed_logprobs = cast(Packed, returned)
        if (packed_ids.typecode, packed_logprobs.typecode) != ("I", "d"):
            raise ReplicaError("returned tokens or log-probabilities of another type")
        if len(rows) != len(wanted):
            raise ReplicaError(f"returned {len(rows)} rollouts instead of {len(wanted)}")
        ids, logprobs = packed_ids.tolist(), packed_logprobs.tolist()
        if np.asarray(packed_ids).max(initial=0) >= 2**31 or not np.isfinite(np.asarray(packed_logprobs)).all():
            raise ReplicaError("returned rollouts with invalid tokens or log-probabilities")
        first = first_logprob = 0
        for member, index, count, text, reason, has_logprobs, later in rows:
            of, request = wanted[member.index, index]
            end, end_logprob = first + count, first_logprob + count * has_logprobs
            is_valid = member == of and 0 <= count <= request.sampling.max_tokens and has_logprobs == request.logprobs
            if not is_valid or type(text) is not str or reason not in ("stop", "length"):
                raise ReplicaError(f"returned an invalid rollout of member {of.index}, request {index}")
            own = tuple(logprobs[first_logprob:end_logprob]) if has_logprobs else None
            found[of.index, request.index] = Rollout(of, request.index, tuple(ids[first:end]), text, reason, own, later)
            first, first_logprob = end, end_logprob
        if (first, first_logprob) != (len(ids), len(logprobs)):
            raise ReplicaError(f"returned {len(ids)} tokens of rollouts with {first}")
        if len(found) != len(wanted):
            raise ReplicaError("returned a rollout twice")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ReplicaError(f"returned something other than the requested rollouts ({type(error).__name__})") from error
    return [found[key] for key in wanted]
