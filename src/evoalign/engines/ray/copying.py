# SPDX-License-Identifier: Apache-2.0
"""A mean from one replica to another, by NCCL between GPUs and by gloo between CPUs.

The giver listens on its own host's address, for one taker and one copy; names, shapes and places go as JSON, numbers as
raw float32. Neither side can tell who the other is: that the right mean has come is seen by its hash.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch

Backend = Literal["gloo", "nccl"]
PATIENCE = timedelta(seconds=120)
"""For the other side to come, and for each piece."""
PIECE = 1 << 24
"""Numbers that go at once: of a GPU's memory there may be little left."""


class Giver:
    """The side that has the mean."""

    def __init__(self, backend: Backend, host: str) -> None:
        self._backend: Backend = backend
        self._host = host
        # The store would listen everywhere.
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port, number = self._socket.getsockname()[1], self._socket.fileno()
        self._store = _distributed().TCPStore(
            host, port, 2, is_master=True, wait_for_workers=False, timeout=PATIENCE, master_listen_fd=number
        )

    @property
    def where(self) -> tuple[str, int]:
        """For `taken`."""
        return self._host, int(self._store.port)

    def give(
        self, updates: int, state: Iterable[tuple[str, torch.Tensor]], slots: Iterable[tuple[str, torch.Tensor]]
    ) -> bool:
        """Send all of it. False where nobody came, or not to the end."""
        try:
            pipe = _Pipe(self._backend, self._host, self._store, 0)
            place = 0
            for what, tensors in (("state", state), ("slots", slots)):
                for name, tensor in tensors:
                    self._store.set(f"head/{place}", json.dumps([what, name, list(tensor.shape)]))
                    pipe.send(tensor.to(torch.float32).contiguous().view(-1))
                    place += 1
            self._store.set(f"head/{place}", json.dumps(["end", updates]))
            self._store.wait(["taken"], PATIENCE)
        except (RuntimeError, OSError):
            return False
        return True


def taken(
    where: tuple[str, int], backend: Backend, host: str
) -> tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """What a giver sends: updates that it has made, its mean, the optimizer's slots, and bytes of both. `host` is this
    side's own address.

    Raises RuntimeError where it does not come whole.
    """
    store = _distributed().TCPStore(*where, 2, is_master=False, timeout=PATIENCE)
    pipe = _Pipe(backend, host, store, 1)
    found: dict[str, dict[str, torch.Tensor]] = {"state": {}, "slots": {}}
    size = 0
    for head in _heads(store):
        if head[0] == "end":
            store.set("taken", "1")
            return int(head[1]), found["state"], found["slots"], size
        what, name, shape = head
        tensor = torch.empty(math.prod(shape), dtype=torch.float32)
        pipe.receive(tensor)
        found[what][name] = tensor.view(shape)
        size += 4 * tensor.numel()
    raise AssertionError


def _heads(store: Any) -> Iterator[list[Any]]:
    place = 0
    while True:
        yield json.loads(store.get(f"head/{place}"))
        store.delete_key(f"head/{place}")
        place += 1


class _Pipe:
    """Two processes; the first one sends."""

    def __init__(self, backend: Backend, host: str, store: Any, rank: int) -> None:
        group = _distributed()
        self._cuda = backend == "nccl"
        if self._cuda:
            if host == "127.0.0.1":
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            options = group.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            self._group = group.ProcessGroupNCCL(store, rank, 2, options)
        else:
            options = group.ProcessGroupGloo._Options()
            options._timeout = PATIENCE
            options._devices = [group.ProcessGroupGloo.create_device(hostname=host)]
            self._group = group.ProcessGroupGloo(store, rank, 2, options)

    def send(self, flat: torch.Tensor) -> None:
        for piece in flat.split(PIECE):
            self._group.broadcast([piece.cuda() if self._cuda else piece], _root()).wait()

    def receive(self, flat: torch.Tensor) -> None:
        for piece in flat.split(PIECE):
            here = torch.empty(piece.shape, dtype=piece.dtype, device="cuda") if self._cuda else piece
            self._group.broadcast([here], _root()).wait()
            if self._cuda:
                piece.copy_(here)


def _distributed() -> Any:
    """Its process groups as such: the group that a process has by default may be an engine's."""
    from torch import distributed

    return distributed


def _root() -> Any:
    options = _distributed().BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options
