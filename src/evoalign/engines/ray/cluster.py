# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster with room for the replicas: an existing one, or one that this process starts and ends."""

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
"""Seconds to wait for room on a cluster."""
STORE = 256 * 2**20
"""Bytes of a local cluster's object store, which holds prompts and a mean that is loaded."""


class Cluster:
    """A placement group for each replica, so that replicas can join, or move to another host, one by one.

    Raises ModelError if there is no room for the replicas with which the run begins.
    """

    def __init__(self, config: Config) -> None:
        assert isinstance(config.engine, RayConfig)
        self.settings = config.engine
        self.gpus = _gpus(self.settings)
        self.ray = _import_ray(self.settings)
        from ray.util.placement_group import placement_group

        self._owned = not self.ray.is_initialized()
        if self._owned:
            with _signal_handlers_kept():
                self._connect()
        resources = {"CPU": self.settings.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        self._groups = [placement_group([resources], strategy="PACK") for _ in range(self.settings.replicas)]
        until = time.monotonic() + WAIT
        while len(self.placed()) < self.settings.fewest:
            if time.monotonic() > until:
                has = {name: self.ray.cluster_resources().get(name, 0) for name in resources}
                self.close()
                raise ModelError(
                    f"engine.replicas: {self.settings.fewest} replicas of {resources} find no room on a cluster of "
                    f"{has}; lower engine.replicas, engine.at_least, engine.cpus or engine.gpus"
                )
            time.sleep(0.05)

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if self.settings.address is not None:
            try:
                self.ray.init(address=self.settings.address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ModelError(
                    f"engine.address: no Ray cluster responds at {self.settings.address} ({error}); start one, or "
                    "remove the setting to have the run start its own"
                ) from error
            return
        self.ray.init(
            address="local",
            num_cpus=max(1, round(self.settings.replicas * self.settings.cpus + 0.5)),
            num_gpus=None if self.gpus else 0,
            object_store_memory=STORE,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            **quiet,
        )

    def placed(self) -> list[int]:
        """Return the places of the replicas that have room now."""
        from ray.util.placement_group import placement_group_table

        states = [dict(placement_group_table(group)).get("state") for group in self._groups]
        return [place for place, state in enumerate(states) if state == "CREATED"]

    def actor(self, cls: type, place: int, *args: Any) -> Any:
        """Start an actor in the room of the replica at `place`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._groups[place], placement_group_bundle_index=0)
        options = {"num_cpus": self.settings.cpus, "num_gpus": self.gpus or None, "max_restarts": 0}
        return self.ray.remote(cls).options(scheduling_strategy=strategy, **options).remote(*args)

    def vacate(self, place: int) -> None:
        """Give back the room of one replica."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._groups[place])

    def check(self) -> None:
        """Raise EvoalignError if this host's node manager is gone, since Ray would then wait forever."""
        own = self.ray.get_runtime_context().get_node_id()
        if any(node["NodeID"] == own and not node["Alive"] for node in self.ray.nodes()):
            raise EvoalignError(
                "the Ray node manager of the run's own host is gone, and with it the cluster: start it again and "
                "resume the run"
            )

    def close(self) -> None:
        """Shut down the cluster if this process started it, else give back the replicas' room."""
        if self._owned:
            self.ray.shutdown()
            return
        for place in range(len(self._groups)):
            self.vacate(place)


@contextmanager
def _signal_handlers_kept() -> Generator[None]:
    """Restore the signal handlers afterwards: Ray's own handler of SIGTERM would end a run at once."""
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


def _import_ray(settings: RayConfig) -> Any:
    """Import Ray, which reads these environment variables as it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if settings.address is None and "ray" not in sys.modules:
        # On Linux Ray replaces 127.0.0.1 by the host's address and listens on all interfaces, unless clusters are off.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        if "RAY_AUTH_MODE" not in os.environ:  # Ray would write a token of its own to a file
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ImportError as error:
        raise ModelError("engine ray is not installed; pip install 'evoalign[ray]'") from error
    return ray
