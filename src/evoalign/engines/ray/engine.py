# SPDX-License-Identifier: Apache-2.0
"""Replicas of another engine share the members of a generation; seeds, coefficients and texts travel, weights do not.

Every replica makes the noise itself and moves its own mean by the same update. What shares a batch follows from the
plan alone, so that scores and weights do not depend on how many replicas there are, nor on which of them died.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from evoalign.config import Config
from evoalign.engines.base import check_members
from evoalign.engines.ray import wire
from evoalign.engines.ray.schedule import Schedule
from evoalign.engines.ray.settings import RayConfig
from evoalign.engines.ray.team import LOG, FaultError, Team
from evoalign.errors import EvoalignError
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.tokens import Tokens
from evoalign.types import Facts, Layout, Plan, Request, Rollout, TensorSpec, Update


class RayEngine:
    """See `evoalign.engines.base.Engine` for what each method promises."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        assert isinstance(config.engine, RayConfig)
        self._settings = config.engine
        self.team = Team(config)
        self._late: dict[Any, Any] = {}
        self._chunk = self._settings.chunk
        try:
            self._dtype, self._specs = self.team.ask("about")
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
        found = list(self.team.ask_all("start", *self.team.begin).values())
        if len({facts.model_hash for facts in found}) > 1:
            raise EvoalignError("the replicas loaded different weights; give all hosts the same model")
        facts, count = found[0], self._settings.replicas
        return Facts(
            engine=f"ray, {count} x {facts.engine}",
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
        yield from Schedule(self.team, self._late).run(plan, requests, self._chunk)

    def apply(self, update: Update) -> None:
        """All replicas are told; whoever still answers moves afterwards."""
        data = wire.update_bytes(update)
        self.team.updates.append(data)
        self.team.tell("apply", [data])

    def fingerprint(self) -> str:
        """That of one replica; now and then of all, and those that differ from most others are started again."""
        if len(self.team.updates) % self._settings.compare_every:
            return self.team.ask("fingerprint")
        found = self.team.ask_all("fingerprint")
        if not found:
            return self.team.ask("fingerprint")
        (usual, many), *others = Counter(found.values()).most_common()
        if others and 2 * many <= len(found):
            LOG.warning("no two replicas agree on the mean: all are made anew from what was written down")
            usual = ""
        for seat, weights_hash in found.items():
            if weights_hash != usual:
                self.team.revive(seat, f"has another mean than the others after {len(self.team.updates)} updates")
        return usual or self.team.ask("fingerprint")

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._sent("state")

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._sent("optimizer_state")

    def _sent(self, what: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensor by tensor from one replica, from another from where that fails."""
        done, seat, first = 0, self.team.settled(), True
        while True:
            try:
                if first:  # of another replica: what was had is passed over
                    found = self.team.get(seat, seat.actor.send.remote(what, True))
                    for _ in range(done):
                        found = self.team.get(seat, seat.actor.send.remote(what, False))
                else:
                    found = self.team.get(seat, seat.actor.send.remote(what, False))
            except FaultError as fault:
                self.team.revive(seat, str(fault))
                seat, first = self.team.settled(), True
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
        for one in kept:
            self.team.tell("keep", *one)
        found = self.team.ask_all("load", optimizer is not None)  # where it is refused, what was loaded before stays
        self.team.loaded, self.team.with_slots, self.team.updates = kept, optimizer is not None, []
        for seat in self.team.seats:
            if seat not in found:  # started again meanwhile, with the mean that was before
                seat.told += [seat.actor.keep.remote(*one) for one in kept]
                seat.told.append(seat.actor.load.remote(optimizer is not None))

    def metrics(self) -> Mapping[str, float]:
        """Replicas started again so far."""
        return {"restarts": float(sum(seat.restarts for seat in self.team.seats))}

    def close(self) -> None:
        self.team.close()
