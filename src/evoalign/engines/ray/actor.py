# SPDX-License-Identifier: Apache-2.0
"""The actor of a replica: one engine in its own process. Plans and updates come in, rollouts and hashes go out."""

from __future__ import annotations

import gc
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from evoalign import engines, optimizer, spaces, tokens
from evoalign.config import Config
from evoalign.types import Facts, Layout, Member, Plan, Request, Rollout, TensorSpec, Update

Row: TypeAlias = tuple[Member, int, int, str, str, bool, tuple[tuple[int, int], ...]]
"""A rollout's member, request, number of tokens, text, finish reason, whether it has log-probabilities, and `later`."""
Packed: TypeAlias = tuple[list[Row], "array[int]", "array[float]"]
"""Rollouts on their way to the run's process: a row of each, the token ids of all, the log-probabilities of all."""


def packed(rollouts: Sequence[Rollout]) -> Packed:
    """Return rollouts for `checked_rollouts`: many small tuples of integers take longer to pickle and to check.

    Raises TypeError or OverflowError for a token id that is not an integer from 0 to 2**32 - 1, or a log-probability
    that is not a number; ValueError for a rollout with another number of log-probabilities than of tokens.
    """
    rows: list[Row] = []
    ids, logprobs = array("I"), array("d")
    for r in rollouts:
        count, own = len(r.token_ids), r.logprobs
        if own is not None and len(own) != count:
            raise ValueError(f"member {r.member.index} has {len(own)} log-probabilities of {count} tokens")
        ids.extend(r.token_ids)
        logprobs.extend(own or ())
        rows.append((r.member, r.request, count, r.text, r.finish_reason, own is not None, r.later))
    return rows, ids, logprobs


class ReplicaActor:
    """An engine in its own process. Ray runs the calls of an actor in order, one at a time."""

    def __init__(self, config: Config, folder: str) -> None:
        if Path(folder).is_dir():  # relative paths in a config start at the folder of the run's process
            os.chdir(folder)
        self._config = config
        self._engine: Any = None
        self._facts: Facts | None = None
        self._kept: dict[str, dict[str, torch.Tensor]] = {}
        self._tensors: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._updates = 0

    def load_model(self) -> tuple[str, list[TensorSpec]]:
        """Load the model once; return its dtype and tensors.

        Not part of `__init__`: of an actor that fails there, Ray keeps only the text of the error.
        """
        if self._engine is None:
            self._engine = engines.create(self._config, tokens.load(self._config.model))
        return str(self._engine.dtype).removeprefix("torch."), list(self._engine.specs())

    def start(self, layout: Layout, keep_start: bool, moves: bool) -> Facts:
        """Start the engine once; see `Engine.start`."""
        if self._facts is None:
            mover = optimizer.create(self._config.es, layout) if moves else None
            space = spaces.adapted(spaces.create(self._config), mover)
            self._facts = self._engine.start(space, layout, mover, keep_start)
            gc.collect()
            gc.freeze()  # the objects of the libraries stay: to look through them takes 0.2 s at a time
        assert self._facts is not None
        return self._facts

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Packed:
        """Return the rollouts of one chunk; see `Engine.rollout`."""
        return packed(list(self._engine.rollout(plan, requests)))

    def context(self) -> int | None:
        """See `Answering.context`."""
        return self._engine.context()

    def apply(self, updates: Sequence[Update]) -> None:
        """Move the mean by each update."""
        for update in updates:
            self._engine.apply(update)
        self._updates += len(updates)

    def fingerprint(self) -> tuple[int, str]:
        """Return the number of updates since the last `load`, and the mean's `weights_hash`."""
        return self._updates, self._engine.fingerprint()

    def send(self, what: Literal["state", "optimizer_state"], index: int) -> tuple[str, np.ndarray[Any, Any]] | None:
        """Return a tensor of the mean or of the optimizer, in order from index 0; None after the last."""
        if index == 0:
            self._tensors = getattr(self._engine, what)()
        found = next(self._tensors, None)
        return None if found is None else (found[0], found[1].numpy())

    def probe_weights(self, count: int) -> np.ndarray[Any, Any]:
        """See `Engine.probe_weights`."""
        return self._engine.probe_weights(count).numpy()

    def keep(self, what: str, name: str, array: np.ndarray[Any, Any]) -> None:
        """Keep a tensor for `load`. It is copied, since memory of Ray's object store is read-only."""
        self._kept.setdefault(what, {})[name] = torch.from_numpy(np.array(array))

    def load(self, with_slots: bool) -> None:
        """Load the tensors that were kept; see `Engine.load`."""
        slots = self._kept.get("optimizer_state", {}) if with_slots else None
        try:
            self._engine.load(self._kept.get("state", {}), slots)
        finally:
            self._kept.clear()
        self._updates = 0

    def close(self) -> None:
        """Close the engine, and end the processes that it started."""
        if self._engine is not None:
            self._engine.close()
