# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster to place actors on: the one at an address, or one of this process's own that ends with it."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from evoalign.config import Config
from evoalign.engines.ray.settings import RayConfig
from evoalign.errors import EvoalignError, ModelError

WAIT = 120.0
"""Seconds for room on a cluster."""
STORE = 256 * 2**20
"""Bytes of a local cluster's object store: prompts lie in it, and a mean that is loaded."""


class Cluster:
    """Room for so many replicas, each a placement group of its own, so that one may come, or move, when a host does.

    `close` gives it back. Raises ModelError where there is none for as many as are to begin.
    """

    def __init__(self, config: Config) -> None:
        assert isinstance(config.engine, RayConfig)
        self.settings = config.engine
        self.gpus = _gpus(self.settings)
        self.ray = _imported(self.settings)
        self._ours = not self.ray.is_initialized()
        if self._ours:
            with _handlers_kept():
                self._connect()
        self._bundle: dict[str, float] = {"CPU": self.settings.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        self._others: list[Any] = []
        self._groups = [self._group() for _ in range(self.settings.replicas)]
        until = time.monotonic() + WAIT
        while len(self.placed()) < self.settings.fewest:
            if time.monotonic() > until:
                self._refuse()
            time.sleep(0.05)

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"logging_level": "error", "log_to_driver": False, "include_dashboard": False}
        if self.settings.address is not None:
            quiet.pop("include_dashboard")
            try:
                self.ray.init(address=self.settings.address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ModelError(
                    f"engine.address: no Ray cluster answers at {self.settings.address} ({error}); start one, "
                    "or leave the setting out for one of this run's own"
                ) from error
            return
        count = self.settings.replicas
        self.ray.init(
            address="local",
            num_cpus=max(1, round(count * self.settings.cpus + 0.5)) + self.settings.graders,
            num_gpus=None if self.gpus else 0,
            object_store_memory=STORE,
            _node_ip_address="127.0.0.1",
            **quiet,
        )

    def _group(self) -> Any:
        from ray.util.placement_group import placement_group

        return placement_group([self._bundle], strategy="PACK")

    def placed(self) -> list[int]:
        """The replicas for which there is room by now."""
        there = [place for place, group in enumerate(self._groups) if group is not None]
        return [place for place in there if self._table(place)["state"] == "CREATED"]

    def node(self, place: int) -> str:
        """The host of a replica's room, as the cluster has it and not as the replica says."""
        return str(self._table(place)["bundles_to_node_id"].get(0, ""))

    def address(self, place: int) -> str:
        """Where that host's own processes listen for other hosts: loopback where it is the only one."""
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in self.ray.nodes()}
        return "127.0.0.1" if len(nodes) < 2 else str(nodes[self.node(place)])

    def _table(self, place: int) -> dict[str, Any]:
        from ray.util.placement_group import placement_group_table

        return {"state": "", "bundles_to_node_id": {}} | dict(placement_group_table(self._groups[place]))

    def _refuse(self) -> None:
        has = {name: self.ray.cluster_resources().get(name, 0) for name in self._bundle}
        self.close()
        raise ModelError(
            f"engine.replicas: {self.settings.fewest} replicas of {self._bundle} find no room on a cluster of {has}; "
            "lower engine.replicas, engine.at_least, engine.cpus or engine.gpus"
        )

    def room(self, who: str, count: int, bundle: dict[str, float]) -> Any:
        """Room for so many actors, each of which takes a `bundle`. Raises ModelError that names `engine.who`."""
        from ray.util.placement_group import placement_group

        group = placement_group([bundle] * count, strategy="PACK")
        self._others.append(group)
        if group.wait(WAIT):
            return group
        has = {name: self.ray.cluster_resources().get(name, 0) for name in bundle}
        raise ModelError(
            f"engine.{who}: {count} {who} of {bundle} find no room on a cluster of {has}; lower engine.{who}"
        )

    def actor(self, cls: type, place: int, *args: Any) -> Any:
        """A new actor in the room of replica `place`."""
        return self.actor_in(
            self._groups[place], 0, cls, *args, num_cpus=self.settings.cpus, num_gpus=self.gpus or None
        )

    def actor_in(self, group: Any, place: int, cls: type, *args: Any, **options: Any) -> Any:
        """A new actor in the room at a place of a group, with options of Ray's."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
        return self.ray.remote(cls).options(scheduling_strategy=strategy, max_restarts=0, **options).remote(*args)

    def check(self) -> None:
        """Raise EvoalignError where the node manager of this process is gone: Ray would wait for good."""
        own = self.ray.get_runtime_context().get_node_id()
        if any(node["NodeID"] == own and not node["Alive"] for node in self.ray.nodes()):
            raise EvoalignError(
                "the Ray node manager of the run's own host is gone, and with it the cluster; start it again, and "
                "resume the run"
            )

    def vacate(self, place: int) -> None:
        """Give back the room of one replica, for good."""
        from ray.util.placement_group import remove_placement_group

        group, self._groups[place] = self._groups[place], None
        if group is not None:
            remove_placement_group(group)

    def close(self) -> None:
        """End the cluster, where it is this process's own, or give the room back."""
        if self._ours:
            self.ray.shutdown()
            return
        from ray.util.placement_group import remove_placement_group

        for place in range(len(self._groups)):
            self.vacate(place)
        for group in self._others:
            remove_placement_group(group)


@contextmanager
def _handlers_kept() -> Generator[None]:
    """Ray takes SIGTERM for itself and ends the process at once, where a run stops in order."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _gpus(settings: RayConfig) -> float:
    if settings.gpus is not None:
        return settings.gpus
    import torch

    where = settings.where
    on_cpu = where == "cpu" or (where == "auto" and settings.address is None and not torch.cuda.is_available())
    return 0.0 if on_cpu else float(settings.replica.devices)


def _imported(settings: RayConfig) -> Any:
    """Ray, which reads these as it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if settings.address is None and "ray" not in sys.modules:
        # On Linux Ray takes the host's address for 127.0.0.1 and listens everywhere, unless it is told that this is no
        # system for clusters.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        if "RAY_AUTH_MODE" not in os.environ:
            # A token of this run's own: Ray would write one to a file.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ImportError as error:
        raise ModelError("engine ray is not installed; pip install 'evoalign[ray]'") from error
    return ray
