# SPDX-License-Identifier: Apache-2.0
"""Engine `ray`: replicas of another engine share the members of a generation.

Seeds, coefficients and texts travel; weights do not. Each replica makes the noise and moves its own mean by the same
updates. Members share batches as the plan alone decides, so that scores and weights depend neither on the number of
replicas nor on the ones that fail.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from evoalign.config import Config
from evoalign.engines.base import EngineDefaults, check_members, pairs_of
from evoalign.engines.ray.replicas import FAILED, LOG, Check, Replica, ReplicaPool, checked_rollouts
from evoalign.engines.ray.schedule import Dispatcher
from evoalign.engines.ray.settings import RayConfig
from evoalign.errors import EvoalignError
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.tokens import Tokens
from evoalign.types import Facts, Layout, Plan, Request, Rollout, TensorSpec, Update


class RayEngine(EngineDefaults):
    """See `evoalign.engines.base.Engine` for the methods."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        assert isinstance(config.engine, RayConfig)
        self._settings = config.engine
        self._chunk, self._compare_every = self._settings.chunk, self._settings.compare_every
        self.pool = ReplicaPool(config)
        self._dispatcher = Dispatcher(self.pool)
        began = time.monotonic()
        try:
            self._dtype, self._specs = self.pool.ask("load_model")
            self._context: int | None = self.pool.ask("context")
            self.pool.load_seconds = time.monotonic() - began
        except BaseException:
            self.pool.close()
            raise

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self._dtype)

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        """Start all replicas; each makes its own space and optimizer from the config."""
        if space.carrier != "adapter":
            self._chunk = 1
        if space.summation == "own":  # its last bits may differ between kinds of hosts
            self._compare_every = 1
        self.pool.start_arguments = (layout, keep_start, optimizer is not None)
        while not (returned := self.pool.ask_all("start", *self.pool.start_arguments)):
            self.pool.any_ready()  # all failed, and one was restarted
        for replica, facts in returned.items():
            if mismatch := self.pool.mismatch(facts):
                raise EvoalignError(f"replica {replica.place} {mismatch}")
        first: Facts = next(iter(returned.values()))
        deterministic = all(facts.deterministic for facts in returned.values())
        return replace(first, engine=f"ray, {self._settings.replicas} x {first.engine}", deterministic=deterministic)

    def context(self) -> int | None:
        return self._context

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Yield rollouts as replicas finish their chunks."""
        check_members(plan, requests)
        yield from self._dispatcher.run(plan, requests, self._chunk)

    def apply(self, update: Update) -> None:
        """Send the update to all replicas, without waiting."""
        self.pool.apply(update)
        self.pool.admit()

    def fingerprint(self) -> str:
        """Return one replica's hash. Every `engine.compare_every` updates, compare all and restart the odd ones.

        Where a space sums updates itself, as with CMA-ES, after each update.
        """
        updates = len(self.pool.updates)
        found = self.pool.fingerprint() if updates % self._compare_every else self._compare()
        self.pool.hashes[updates] = found
        return found

    def _compare(self) -> str:
        while not (found := self.pool.fingerprints()):
            self.pool.any_ready()
        (usual, count), *others = Counter(found.values()).most_common()
        if others and 2 * count <= len(found):
            LOG.warning("no majority of replicas has the same mean: all are restarted and replay the updates")
            usual = ""
        for replica, weights_hash in found.items():
            if weights_hash != usual:
                self.pool.restart(replica, f"has another mean than the others after {len(self.pool.updates)} updates")
        return usual or self.pool.fingerprint()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors("state")

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors("optimizer_state")

    def _tensors(self, what: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of one replica; if it fails, continue with those of another."""
        actor, yielded, index = None, 0, 0
        while True:
            replica = self.pool.any_ready()
            actor, index = replica.actor, index if replica.actor is actor else 0
            found = self.pool.ask_one(replica, "send", what, index)
            if found is None:
                return
            if found is not FAILED:
                index += 1
                if index > yielded:
                    yielded = index
                    yield found[0], torch.from_numpy(np.array(found[1]))

    def probe_weights(self, count: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.pool.ask("probe_weights", count)))

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Load weights into all replicas. Ray's object store keeps them for replicas that join later."""
        pool, with_slots = self.pool, optimizer is not None
        given = {"state": state, "optimizer_state": optimizer or {}}
        tensors = [(what, name, tensor) for what, of in given.items() for name, tensor in of.items()]
        stored = [(what, name, pool.cluster.ray.put(tensor.numpy())) for what, name, tensor in tensors]
        for replica in pool.ready:
            replica.pending += [replica.actor.keep.remote(*item) for item in stored]
        loaded = pool.ask_all("load", with_slots)  # if it is refused, earlier weights remain
        pool.loaded, pool.with_slots, pool.updates, pool.hashes = stored, with_slots, [], {}
        for replica in pool.replicas:
            if replica.stage == "catching up" and replica not in loaded:  # with the earlier weights
                replica.pending += [replica.actor.keep.remote(*item) for item in stored]
                replica.pending.append(replica.actor.load.remote(with_slots))

    def metrics(self) -> Mapping[str, float]:
        """Return the number of ready replicas, and so far: restarts, and chunks given to a second replica."""
        restarts = sum(replica.restarts for replica in self.pool.replicas)
        found = {"replicas": len(self.pool.ready), "restarts": restarts, "copies": self._dispatcher.copies}
        return {name: float(value) for name, value in found.items()}

    def parts(self) -> Sequence[SingleReplica]:
        """Return each ready replica as an engine."""
        return [SingleReplica(self, replica) for replica in self.pool.ready]

    def close(self) -> None:
        self.pool.close()


class SingleReplica:
    """One replica, for checks of each; see `evoalign.engines.base.Answering`. If it fails, any replica answers."""

    def __init__(self, engine: RayEngine, replica: Replica) -> None:
        self._engine, self._pool, self._replica = engine, engine.pool, replica

    def _ask(self, method: str, *args: Any, check: Check) -> Any:
        """Return the result of the replica, or `FAILED`."""
        is_ready = self._replica.stage == "ready"
        return self._pool.ask_one(self._replica, method, *args, check=check) if is_ready else FAILED

    def context(self) -> int | None:
        return self._engine.context()

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        check_members(plan, requests)
        pairs = pairs_of(plan.members, requests)
        rollouts = self._ask("rollout", plan, requests, check=lambda returned: checked_rollouts(returned, pairs))
        yield from self._engine.rollout(plan, requests) if rollouts is FAILED else rollouts

    def fingerprint(self) -> str:
        found = self._ask("fingerprint", check=self._pool.current_hash)
        return self._engine.fingerprint() if found is FAILED else found

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Load weights into all replicas."""
        self._engine.load(state, optimizer)
