# SPDX-License-Identifier: Apache-2.0
"""Which member each row of a batch belongs to, at an address that never changes: CUDA graphs read it in place.

A member is known to vLLM by its LoRA id, slot + 1; id 0 is the base model. The map goes to the device only when it
changed, through a fixed ring of pinned buffers, and the host never waits for the device while the ring has a free
buffer: with asynchronous scheduling vLLM is at most two batches ahead.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from evoalign.errors import ModelError

_RING = 4


class Rows:
    """int32 slot of each row of the batch, -1 for rows of the base model and for padding."""

    def __init__(self, capacity: int, slots: int, device: torch.device) -> None:
        self.any = False
        """Whether any row belongs to a member."""
        self._slots = slots
        self._members = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self._ids = np.zeros(0, dtype=np.int64)
        self._ring = [_Buffer(capacity, device) for _ in range(_RING)]
        self._turn = 0

    def of(self, count: int) -> torch.Tensor:
        """Slots of a batch of `count` rows, padding included: int32 [count] on the device, a view."""
        if count > len(self._members):
            raise ModelError(
                f"a batch of {count} rows, and the population path was made for {len(self._members)}: "
                "raise max_num_batched_tokens"
            )
        return self._members[:count]

    def put(self, ids: NDArray[np.integer]) -> None:
        """Take the LoRA id of each row of the next batch. Raises ModelError for an id that has no slot."""
        if np.array_equal(ids, self._ids):
            return
        count, before = len(ids), len(self._ids)
        if count and int(ids.max()) > self._slots:
            raise ModelError(f"LoRA id {int(ids.max())} is of no member: there are {self._slots} slots")
        self.of(count)
        buffer = self._ring[self._turn]
        self._turn = (self._turn + 1) % _RING
        host = buffer.wait()
        np.subtract(ids, 1, out=host[:count], casting="unsafe")
        host[count:before] = -1
        buffer.send(self._members, max(count, before))
        self._ids = ids.copy()
        self.any = bool(ids.any())


class _Buffer:
    """A pinned host buffer, which must not be written before its last copy has left."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=cuda)
        self._array = self._host.numpy()
        self._sent = torch.cuda.Event() if cuda else None

    def wait(self) -> NDArray[np.int32]:
        """The buffer, free to write: int32 [size]."""
        if self._sent is not None and not self._sent.query():
            self._sent.synchronize()
        return self._array

    def send(self, target: torch.Tensor, count: int) -> None:
        target[:count].copy_(self._host[:count], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
