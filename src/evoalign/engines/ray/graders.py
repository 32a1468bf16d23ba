# SPDX-License-Identifier: Apache-2.0
"""Graders: actors that each make the task again from the config, and score pieces of what members said.

Texts and the places of rows go there, numbers come back. A reward function that hangs is the grader's own affair, which
kills it as a run without graders does; a grader that dies, or whose process gives no sign of life, is started again,
and its piece is scored by another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Event
from typing import Any, cast

from evoalign import tasks
from evoalign.config import Config
from evoalign.engines.ray import wire
from evoalign.engines.ray.calls import FaultError, answer
from evoalign.engines.ray.cluster import Cluster
from evoalign.engines.ray.settings import RayConfig
from evoalign.engines.ray.team import LOG
from evoalign.errors import DataError, EvoalignError
from evoalign.rewards.objective import Columns
from evoalign.tasks.base import Data, Split
from evoalign.tasks.grading import scored, with_validation
from evoalign.types import Example

TICK = 0.1
"""Seconds between two looks at a grader that has a piece."""
MARGIN = 30.0
"""Seconds beyond `grader.timeout` without a sign of life after which a grader is held to hang."""
START_LIMIT = 600.0
"""Seconds for a grader to start, which loads the data."""
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Grader:
    """One task in an actor of its own. Ray calls `pulse` beside another method."""

    def __init__(self, config: Config, folder: str) -> None:
        if Path(folder).is_dir():  # names in a config are seen from where the run was started
            os.chdir(folder)
        self._config = config

    def start(self) -> bytes:
        """Make the task and load its data; no columns, or what was raised. See `wire.columns_of`."""
        try:
            settings = self._config.task
            self._task = tasks.isolate(tasks.create(settings), self._config.grader)
            self._data = with_validation(self._task, self._task.load_data(self._config.seed), settings)
        except EvoalignError as error:
            return wire.error_bytes(error)
        return wire.columns_bytes({})

    def columns(self, piece: bytes) -> bytes:
        """Those of one piece, or what was raised; see `wire.columns_of`."""
        split, rows, texts, digest = wire.piece_of(piece)
        held = self._data.of(cast(Split, split))
        examples = [held[row] for row in rows if row < len(held)]
        try:
            if wire.digest_of(examples) != digest:
                raise DataError(
                    f"rows of the {split} split read otherwise where a grader loads them; give all hosts the same "
                    "files, and let load_data(seed) give the same rows each time"
                )
            return wire.columns_bytes(scored(self._task, texts, examples))
        except EvoalignError as error:
            return wire.error_bytes(error)

    def pulse(self) -> None:
        """Nothing: that this comes back is the sign of life."""


@dataclass(eq=False)
class _Seat:
    place: int
    actor: Any = None
    ready: Any = None
    restarts: int = 0


class Pool:
    """All graders; see `evoalign.tasks.grading.Graders`. One piece at a time has each."""

    def __init__(self, config: Config, data: Data, cluster: Cluster) -> None:
        assert isinstance(config.engine, RayConfig)
        self.settings, self.count = config.engine, config.engine.graders
        self._config, self._data, self._cluster, self._ray = config, data, cluster, cluster.ray
        self.limit = config.grader.timeout + MARGIN
        self._group = cluster.room("graders", self.count, {"CPU": 1.0})
        self.seats = [_Seat(place) for place in range(self.count)]
        for seat in self.seats:
            self._begin(seat)
        self._free, self._change = list(self.seats), Condition()
        try:
            for seat in self.seats:
                wire.columns_of(answer(self._ray, seat.ready, START_LIMIT), 0)
        except FaultError as fault:
            raise EvoalignError(f"a grader did not start: it {fault}") from fault

    @property
    def restarts(self) -> int:
        """How often one was started again."""
        return sum(seat.restarts for seat in self.seats)

    def takes(self, examples: Sequence[Example]) -> bool:
        """Whether this is a split of the run's data."""
        return any(examples is self._data.of(split) for split in SPLITS)

    def columns(
        self, texts: Sequence[str], examples: Sequence[Example], rows: Sequence[int], stopping: Event
    ) -> Columns:
        """One piece, scored by whoever is free. Raises the EvoalignError of the task, or one that says that a grader
        was started again too often."""
        split = next(split for split in SPLITS if examples is self._data.of(split))
        piece = wire.piece_bytes(split, rows, texts, [examples[row] for row in rows])
        while True:
            seat = self._taken(stopping)
            try:
                return wire.columns_of(self._answer(seat, piece, stopping), len(texts))
            except (FaultError, wire.GarbageError) as fault:
                self._revive(seat, str(fault))
            except CancelledError:  # it may be at that piece for long
                self._restart(seat)
                raise
            finally:
                with self._change:
                    self._free.append(seat)
                    self._change.notify()

    def close(self) -> None:
        """End them all."""
        for seat in self.seats:
            self._ray.kill(seat.actor)

    def _begin(self, seat: _Seat) -> None:
        options = {"num_cpus": 1, "max_concurrency": 2}  # the second one for `pulse`
        folder = str(Path.cwd())
        seat.actor = self._cluster.actor_in(self._group, seat.place, Grader, self._config, folder, **options)
        seat.ready = seat.actor.start.remote()

    def _taken(self, stopping: Event) -> _Seat:
        """One that has no piece: of these, one that has started, where there is such a one."""
        with self._change:
            while not self._free:
                self._change.wait(TICK)
                if stopping.is_set():
                    raise CancelledError
            started, _ = self._ray.wait([seat.ready for seat in self._free], timeout=0)
            seat = next((seat for seat in self._free if seat.ready in started), self._free[0])
            self._free.remove(seat)
            return seat

    def _answer(self, seat: _Seat, piece: bytes, stopping: Event) -> Any:
        """What it answers. Raises FaultError where it dies, or gives no sign of life, and CancelledError."""
        since = time.monotonic()
        while not self._ray.wait([seat.ready], timeout=TICK)[0]:
            if stopping.is_set():
                raise CancelledError
            if time.monotonic() - since > START_LIMIT:
                raise FaultError(f"did not start within {START_LIMIT:g} s")
        wire.columns_of(answer(self._ray, seat.ready, TICK), 0)
        ref, heard = seat.actor.columns.remote(piece), time.monotonic()
        pulse = seat.actor.pulse.remote()
        while not self._ray.wait([ref], timeout=TICK)[0]:
            if stopping.is_set():
                raise CancelledError
            if self._ray.wait([pulse], timeout=0)[0]:
                heard, pulse = time.monotonic(), seat.actor.pulse.remote()
            if time.monotonic() - heard > self.limit:
                raise FaultError(f"gave no sign of life for {self.limit:g} s")
        return answer(self._ray, ref, self.limit)

    def _revive(self, seat: _Seat, why: str) -> None:
        """Start one again. Raises EvoalignError where that was done too often."""
        if seat.restarts >= self.settings.restarts:
            raise EvoalignError(
                f"grader {seat.place} {why}; it was started again {self.settings.restarts} times (engine.restarts)"
            )
        LOG.warning("grader %d %s; it is started again and its piece is scored by another", seat.place, why)
        seat.restarts += 1
        self._restart(seat)

    def _restart(self, seat: _Seat) -> None:
        self._ray.kill(seat.actor)
        self._begin(seat)
