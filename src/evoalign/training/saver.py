# SPDX-License-Identifier: Apache-2.0
"""Save means in a background thread, while the next generations run."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from evoalign.cost.budget import free_on_host
from evoalign.engines.master import KeepsMean
from evoalign.errors import EvoalignError, is_out_of_memory
from evoalign.rundir import checkpoint
from evoalign.rundir.checkpoint import Mark
from evoalign.setup import Served
from evoalign.training import saving

SHARE = 0.5
"""Largest share of the free host memory that a copy of the mean may take."""


class Saver:
    """Saves the means of one run, one after the other.

    `save` copies the mean to host memory and returns; a thread writes the copy. If the engine keeps the mean in this
    process, that memory is kept for the next copy, until `free`. A mean that takes more than `SHARE` of the free memory
    is written at once instead, tensor by tensor. Errors of the thread are raised by the next call. The base model, from
    which a whole checkpoint takes the tensors that do not evolve, is loaded once.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._whole = saving.whole_of(served)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._last: tuple[Path, Mark] | None = None
        self._keeps = isinstance(served.engine, KeepsMean)
        self._mean, self._slots = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

    def prepare(self) -> None:
        """Load the base model and allocate the copy, so that the first checkpoint does not wait for them.

        Not in the thread: transformers sets torch's default dtype for all threads while it loads.
        """
        if self._whole is not None:
            self._whole.load()
        if self._keeps and not self._mean and self._fits():
            self._served.engine.copy_state(self._mean, self._slots)

    def save(self, folder: Path, mark: Mark, then: Callable[[], None]) -> None:
        """Save the engine's mean in `folder`, unless it is there, and call `then` once it is written."""
        if self._last == (folder, mark):
            return
        self.wait()
        if checkpoint.holds(folder, mark):
            then()
            return
        self.prepare()
        engine = self._served.engine
        if not self._mean and not self._fits():
            self._write(folder, mark, engine.state, list(engine.optimizer_state()), then)
            return
        mean, slots = (self._mean, self._slots) if self._keeps else ({}, {})
        engine.copy_state(mean, slots)
        self._last = folder, mark
        self._writing = self._pool.submit(self._write, folder, mark, mean.items, slots.items(), then)

    def _fits(self) -> bool:
        layout, free = self._served.layout, free_on_host()
        size = 4 * sum(math.prod(t.shape) for t in (*layout.tensors, *layout.frozen))
        return free is None or size <= SHARE * free

    def check(self) -> None:
        """Raise what the thread raised, if it has ended."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until everything is written. Raises what the thread raised."""
        writing, self._writing, self._last = self._writing, None, None
        if writing is not None:
            writing.result()

    def free(self) -> None:
        """Wait, and free the copy and the base model."""
        self.wait()
        self._mean, self._slots = {}, {}
        self._whole = saving.whole_of(self._served)

    def close(self) -> None:
        """Wait for the thread, whatever it raises, and end it.

        A signal does not shorten the wait, since the lock of the run is released next; it is raised afterwards.
        """
        raised: BaseException | None = None
        while True:
            try:
                self._pool.submit(int).result()  # a signal in Thread.join would mark the thread as ended (Python 3.11)
                break
            except (KeyboardInterrupt, SystemExit) as error:
                raised = error
        self._pool.shutdown()
        if raised is not None:
            raise raised

    def _write(
        self,
        folder: Path,
        mark: Mark,
        state: Callable[[], checkpoint.State],
        optimizer: checkpoint.State,
        then: Callable[[], None],
    ) -> None:
        try:
            saving.write(self._served, folder, mark, state, optimizer, self._whole)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise EvoalignError(
                f"no host memory to save {folder}; end other programs that use it, or set checkpoint.every 0"
            ) from error
        then()
