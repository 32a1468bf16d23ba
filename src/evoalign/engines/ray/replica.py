# SPDX-License-Identifier: Apache-2.0
"""One engine in an actor of its own. It makes the noise itself: plans and updates come in, texts and hashes go out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from evoalign import engines, optimizer, spaces, tokens
from evoalign.config import Config
from evoalign.engines.base import metrics_of
from evoalign.engines.ray import wire
from evoalign.types import Facts, Layout, TensorSpec


class Replica:
    """The life of an engine, in the order of the driver's calls: an actor answers one after the other."""

    def __init__(self, config: Config, folder: str) -> None:
        if Path(folder).is_dir():  # names in a config are seen from where the run was started
            os.chdir(folder)
        self._config = config
        self._kept: dict[str, dict[str, torch.Tensor]] = {}
        self._sending: Iterator[tuple[str, torch.Tensor]] = iter(())

    def about(self) -> tuple[str, list[TensorSpec]]:
        """Load the model, once; the dtype that is served and the model's tensors. Apart from the actor's creation, of
        whose failure Ray keeps no more than a text."""
        if not hasattr(self, "_engine"):
            self._engine = engines.create(self._config, tokens.load(self._config.model))
        return str(self._engine.dtype).removeprefix("torch."), list(self._engine.specs())

    def start(self, layout: Layout, keep_start: bool, moves: bool) -> Facts:
        """See `Engine.start`."""
        moved_by = optimizer.create(self._config.es.optimizer) if moves else None
        return self._engine.start(spaces.create(self._config), layout, moved_by, keep_start)

    def rollout(self, plan: bytes, requests: bytes) -> bytes:
        """One chunk; see `Engine.rollout`."""
        return wire.rollouts_bytes(self._engine.rollout(wire.plan_of(plan), wire.requests_of(requests)))

    def apply(self, updates: Sequence[bytes]) -> None:
        """Move the mean, once for each."""
        for update in updates:
            self._engine.apply(wire.update_of(update))

    def fingerprint(self) -> str:
        """`weights_hash` of the mean."""
        return self._engine.fingerprint()

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

    def metrics(self) -> Mapping[str, float]:
        """What the engine says of how busy it is."""
        return metrics_of(self._engine)

    def close(self) -> None:
        """End the engine in order: one over a server has processes and files of its own."""
        if hasattr(self, "_engine"):
            self._engine.close()
