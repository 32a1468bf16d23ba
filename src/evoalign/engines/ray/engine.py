# SPDX-License-Identifier: Apache-2.0
"""Replicas of another engine share the members of a generation; seeds, coefficients and texts travel, weights do not.

Every replica makes the noise itself and moves its own mean by the same update. What shares a batch follows from the
plan alone, so that scores and weights do not depend on how many replicas there are, nor on which of them died.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from evoalign.config import Config
from evoalign.engines.base import EngineDefaults, check_members, pairs_of
from evoalign.engines.ray import wire
from evoalign.engines.ray.calls import FaultError
from evoalign.engines.ray.graders import Pool
from evoalign.engines.ray.schedule import Schedule
from evoalign.engines.ray.settings import RayConfig
from evoalign.engines.ray.team import LOG, Seat, Team
from evoalign.errors import ConfigError, EvoalignError
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.tasks.base import Data, Task
from evoalign.tasks.grading import Graders
from evoalign.tokens import Tokens
from evoalign.types import Facts, Layout, Plan, Request, Rollout, TensorSpec, Update


class RayEngine(EngineDefaults):
    """See `evoalign.engines.base.Engine` for what each method promises."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        assert isinstance(config.engine, RayConfig)
        self._config, self._settings = config, config.engine
        if self._settings.audit and config.deterministic is False:
            raise ConfigError("engine.audit compares answers bit by bit: set deterministic: true, or engine.audit: 0")
        self.pool: Pool | None = None
        self.team = Team(config)
        self._schedule = Schedule(self.team)
        self._chunk = self._settings.chunk
        began = time.monotonic()
        try:
            self._dtype, self._specs = self.team.ask("about")
            self.team.load_seconds = time.monotonic() - began
        except BaseException:
            self.team.close()
            raise

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self._dtype)

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        """Every replica makes a space of its own, from the config."""
        if space.carrier != "adapter":
            self._chunk = 1
        self.team.begin = (layout, keep_start, optimizer is not None)
        self.team.mean_bytes = 4 * layout.parameters * (1 if optimizer is None else 3)  # slots: at most two
        while not (said := self.team.ask_all("start", *self.team.begin)):
            self.team.settled()  # all of them failed, and one comes back
        for seat, of_seat in said.items():
            if odd := self.team.seen(seat, of_seat):
                raise EvoalignError(f"replica {seat.place} {odd}")
        found = [facts for facts, _ in said.values()]
        facts = found[0]
        kinds = Counter(seat.kind for seat in said)
        if self._settings.audit and min(kinds.values()) < 3:
            few = min(kinds, key=lambda kind: kinds[kind])
            raise ConfigError(
                f"engine.audit takes three replicas of a kind, and there are {kinds[few]} of {few}; answers of another "
                "kind differ in their bits. Leave those out, or set engine.audit: 0"
            )
        if self._settings.audit and not all(f.deterministic for f in found):
            raise ConfigError(
                f"engine.audit compares answers bit by bit, and {facts.engine} on {facts.device} repeats none so: set "
                "deterministic: true, or engine.audit: 0"
            )
        return Facts(
            engine=f"ray, {self._settings.replicas} x {facts.engine}",
            device=facts.device,
            dtype=facts.dtype,
            deterministic=all(f.deterministic for f in found),
            model_hash=facts.model_hash,
            master_bytes=facts.master_bytes,
            note=facts.note,
            library=facts.library,
        )

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Chunks of members, or of the mean's requests, answered by whoever is free."""
        check_members(plan, requests)
        yield from self._schedule.run(plan, requests, self._chunk)

    def apply(self, update: Update) -> None:
        """All replicas are told; whoever still answers moves afterwards."""
        data = wire.update_bytes(update)
        self.team.updates.append(data)
        self.team.tell("apply", [data])
        self._schedule.counts["sent_bytes"] += len(data) * len(self.team.ready)
        self.team.welcome()

    def fingerprint(self) -> str:
        """That of one replica; now and then of all, and always where answers are checked: those that differ from most
        others are started again."""
        updates = len(self.team.updates)
        if self.team.audit is None and updates % self._settings.compare_every:
            found = self.team.stand()
        else:
            found = self._agreed()
        self.team.known[updates] = found
        return found

    def _agreed(self) -> str:
        """The hash that most replicas have."""
        began, fewest = time.monotonic(), 2 if self.team.audit else 1
        while len(found := self.team.stands()) < fewest:  # of one alone nobody says that it is right
            self.team.await_more("no two replicas are left to agree on the mean", began)
        (usual, many), *others = Counter(found.values()).most_common()
        if others and 2 * many <= len(found):
            LOG.warning("no two replicas agree on the mean: all are made anew from what was written down")
            usual = ""
        for seat, weights_hash in found.items():
            if weights_hash != usual:
                self.team.revive(seat, f"has another mean than the others after {len(self.team.updates)} updates")
        return usual or self.team.stand()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._sent("state")

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._sent("optimizer_state")

    def _sent(self, what: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensor by tensor from one replica, from another from where that fails."""
        done, seat, first = 0, self.team.settled(), True
        actor = seat.actor
        while True:
            if seat.actor is not actor:  # it was started again meanwhile, for whatever reason
                seat, first = self.team.settled(), True
                actor = seat.actor
            try:
                if first:  # of another replica: what was had is passed over
                    found = self.team.get(seat, seat.actor.send.remote(what, True))
                    for _ in range(done):
                        found = self.team.get(seat, seat.actor.send.remote(what, False))
                else:
                    found = self.team.get(seat, seat.actor.send.remote(what, False))
            except FaultError as fault:
                self.team.revive(seat, str(fault))
                continue
            if found is None:
                return
            first, done = False, done + 1
            yield found[0], torch.from_numpy(np.array(found[1]))

    def probe_weights(self, count: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.team.ask("probe_weights", count)))

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        """The one time that weights travel: Ray's store keeps them for a replica that joins later."""
        put = self.team.cluster.ray.put
        kept = [("state", name, put(t.numpy())) for name, t in state.items()]
        kept += [("optimizer_state", name, put(t.numpy())) for name, t in (optimizer or {}).items()]
        for seat in self.team.ready:
            self._put(seat, kept)
        found = self.team.ask_all("load", optimizer is not None)  # where it is refused, what was loaded before stays
        team = self.team
        team.loaded, team.with_slots, team.updates, team.known = kept, optimizer is not None, [], {}
        for seat in team.seats:
            if seat.stage == "catching up" and seat not in found:  # to the mean that was before
                self._put(seat, kept)
                seat.told.append(seat.actor.load.remote(optimizer is not None))

    @staticmethod
    def _put(seat: Seat, kept: Sequence[tuple[str, str, Any]]) -> None:
        seat.told += [seat.actor.keep.remote(*one) for one in kept]

    def graders(self, task: Task, data: Data) -> Graders | None:
        """As many as the settings say; they end with the engine. Raises EvoalignError."""
        if not self._settings.graders:
            return None
        self.pool = Pool(self._config, data, self.team.cluster)
        return self.pool

    def metrics(self) -> Mapping[str, float]:
        """Replicas at work, how often one was started again and thrown out, and so far: chunks that were handed to a
        second replica or scored again to check them, and bytes of what is sent and received, without what Ray adds."""
        team = self.team
        found = {"replicas": len(team.ready), "restarts": sum(seat.restarts for seat in team.seats)}
        found |= {"expelled": len(team.expelled)} if team.audit else {}
        found |= {} if self.pool is None else {"grader_restarts": self.pool.restarts}
        return {name: float(value) for name, value in (found | self._schedule.counts).items()}

    def scored_by(self) -> Mapping[str, Any]:
        """Who scored what of the last rollout, where answers are checked."""
        return self._schedule.record

    def parts(self) -> Sequence[OneReplica]:
        """Each replica that is at work, as an engine by itself."""
        return [OneReplica(self, seat) for seat in self.team.ready]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.team.close()


class OneReplica:
    """One of the replicas, for checks of each of them; see `evoalign.engines.base.Answering`."""

    def __init__(self, whole: RayEngine, seat: Seat) -> None:
        self._team, self._whole, self._seat = whole.team, whole, seat

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """All of it by this replica; where it fails, by any."""
        if self._seat.stage != "ready":
            yield from self._whole.rollout(plan, requests)
            return
        check_members(plan, requests)
        members, asked = wire.members_bytes(plan.members), wire.asked_bytes(plan, requests)
        try:
            found = self._team.get(self._seat, self._seat.actor.rollout.remote(members, asked))
            yield from wire.rollouts_of(found, pairs_of(plan.members, requests))
        except (FaultError, wire.GarbageError) as fault:
            self._team.revive(self._seat, str(fault))
            yield from self._whole.rollout(plan, requests)

    def fingerprint(self) -> str:
        if self._seat.stage != "ready":
            return self._whole.fingerprint()
        try:
            return wire.stand_of(self._team.get(self._seat, self._seat.actor.fingerprint.remote())).weights_hash
        except (FaultError, wire.GarbageError) as fault:
            self._team.revive(self._seat, str(fault))
            return self._whole.fingerprint()

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        """By all of them: a mean is loaded by all or by none."""
        self._whole.load(state, optimizer)
