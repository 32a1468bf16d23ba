# SPDX-License-Identifier: Apache-2.0
"""Count the bytes of tensors that are alive at once, as torch allocates and frees them: the same on every machine."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """`peak` is the most bytes alive at once inside the context. Memory inside a kernel is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._drop(key)), storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._alive.pop(key)[1]
