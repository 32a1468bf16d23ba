# SPDX-License-Identifier: Apache-2.0
"""One engine in an actor of its own. It makes the noise itself: plans and updates come in, texts and hashes go out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from evoalign import engines, optimizer, spaces, tokens
from evoalign.config import Config
from evoalign.engines.ray import wire
from evoalign.engines.ray.copying import Backend, Giver, taken
from evoalign.types import Facts, Layout, TensorSpec


class Replica:
    """The life of an engine, in the order of the driver's calls: an actor answers one after the other."""

    def __init__(self, config: Config, folder: str) -> None:
        if Path(folder).is_dir():  # names in a config are seen from where the run was started
            os.chdir(folder)
        self._config = config
        self._engine: Any = None
        self._facts: Facts | None = None
        self._kept: dict[str, dict[str, torch.Tensor]] = {}
        self._sending: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._giver: Giver | None = None
        self._updates = self._unhashed = 0
        self._began = self._update_seconds = 0.0
        self._copied: tuple[int, float] = (0, 0.0)

    def about(self) -> tuple[str, list[TensorSpec]]:
        """Load the model; the dtype that is served and the model's tensors. Apart from the actor's creation, of whose
        failure Ray keeps no more than a text. Asked again, the same."""
        if self._engine is None:
            self._engine = engines.create(self._config, tokens.load(self._config.model))
        return str(self._engine.dtype).removeprefix("torch."), list(self._engine.specs())

    def start(self, layout: Layout, keep_start: bool, moves: bool) -> tuple[Facts, str]:
        """See `Engine.start`; and all that the bits of answers depend on here. Asked again, the same."""
        facts = self._facts
        if facts is None:
            moved_by = optimizer.create(self._config.es.optimizer) if moves else None
            facts = self._facts = self._engine.start(spaces.create(self._config), layout, moved_by, keep_start)
        return facts, f"{_device(facts)}, torch {torch.__version__} {facts.library}".strip()

    def rollout(self, members: bytes, asked: bytes) -> bytes:
        """One chunk; see `Engine.rollout`."""
        self._unhashed, self._began = 0, 0.0  # what comes next would be timed with it
        return wire.rollouts_bytes(self._engine.rollout(*wire.asked_of(asked, members)))

    def apply(self, updates: Sequence[bytes]) -> None:
        """Move the mean, once for each."""
        self._began = self._began or time.perf_counter()
        for update in updates:
            self._engine.apply(wire.update_of(update))
        self._updates += len(updates)
        self._unhashed += len(updates)

    def fingerprint(self) -> tuple[Any, ...]:
        """A `Stand`, with the `weights_hash` of the mean; that of several updates waits for a device once."""
        found = self._engine.fingerprint()
        if self._unhashed:
            self._update_seconds = (time.perf_counter() - self._began) / self._unhashed
            self._unhashed, self._began = 0, 0.0
        return tuple(wire.Stand(self._updates, found, self._update_seconds, *self._copied))

    def send(self, what: Literal["state", "optimizer_state"], first: bool) -> tuple[str, np.ndarray[Any, Any]] | None:
        """The next tensor of the mean, or of the optimizer's slots; None after the last."""
        if first:
            self._sending = getattr(self._engine, what)()
        name, tensor = next(self._sending, (None, None))
        return None if name is None or tensor is None else (name, tensor.numpy())

    def probe_weights(self, count: int) -> np.ndarray[Any, Any]:
        """See `Engine.probe_weights`."""
        return self._engine.probe_weights(count).numpy()

    def keep(self, what: str, name: str, array: np.ndarray[Any, Any]) -> None:
        """One tensor of what `load` is to put back. A copy: what lies in Ray's store must not be written to."""
        self._kept.setdefault(what, {})[name] = torch.from_numpy(np.array(array))

    def load(self, with_slots: bool) -> None:
        """Put back what was kept."""
        slots = self._kept.get("optimizer_state", {}) if with_slots else None
        try:
            self._engine.load(self._kept.get("state", {}), slots)
        finally:
            self._kept.clear()
        self._updates = 0

    def listen(self, backend: Backend, host: str) -> tuple[str, int]:
        """Where, on this host's address, another replica can get a copy of the mean, once, by `take`."""
        self._giver = Giver(backend, host)
        return self._giver.where

    def give(self) -> bool:
        """Hand the mean to who takes it; whether that went well: it is who takes that failed if not."""
        giver, self._giver = self._giver, None
        return giver is not None and giver.give(self._updates, self._engine.state(), self._engine.optimizer_state())

    def take(self, where: tuple[str, int], backend: Backend, host: str) -> None:
        """Get the mean of the replica that listens there."""
        began = time.perf_counter()
        self._updates, state, slots, size = taken(where, backend, host)
        self._engine.load(state, slots or None)
        self._copied = size, time.perf_counter() - began

    def metrics(self) -> Mapping[str, float]:
        """What the engine says of how busy it is."""
        return self._engine.metrics()

    def close(self) -> None:
        """End the engine in order: one over a server has processes and files of its own."""
        if self._engine is not None:
            self._engine.close()


def _device(facts: Facts) -> str:
    if facts.device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{facts.device} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
