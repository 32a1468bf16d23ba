# SPDX-License-Identifier: Apache-2.0
"""A key-value cache with room made ahead: a decode step writes one column instead of copying all of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class RoomLayer(CacheLayerMixin):
    """Keys and values [rows, heads, room, head_dim], of which the first `length` columns are filled.

    While it is `open`, what comes is of some of the rows.
    """

    is_sliding = False

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.length = 0
        self._rows, self._total = slice(None), 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        shapes = ((self._total or s.shape[0], s.shape[1], self.room, s.shape[3]) for s in (key_states, value_states))
        self.keys, self.values = (key_states.new_empty(shape) for shape in shapes)
        self.is_initialized = True

    def open(self, rows: slice, total: int, length: int) -> None:
        """The next columns, behind the first `length`, are of these rows of `total`."""
        self._rows, self._total, self.length = rows, total, length

    def close(self, length: int) -> None:
        """All rows have the first `length` columns."""
        self._rows, self._total, self.length = slice(None), 0, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        keys, values = self.keys[self._rows], self.values[self._rows]
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def select(self, rows: torch.Tensor) -> None:
        """Keep, drop or repeat rows; only the filled columns are copied."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = (self._take(t, rows) for t in (self.keys, self.values))

    def _take(self, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        taken = tensor.new_empty(len(rows), *tensor.shape[1:])
        torch.index_select(tensor[:, :, : self.length], 0, rows, out=taken[:, :, : self.length])
        return taken

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name that transformers before 5.20 had for `get_max_length`."""
        return -1


class RoomCache(Cache):
    """One RoomLayer a layer."""

    def __init__(self, layers: int, room: int) -> None:
        super().__init__(layers=[RoomLayer(room) for _ in range(layers)])

    @property
    def _rooms(self) -> list[RoomLayer]:
        return [layer for layer in self.layers if isinstance(layer, RoomLayer)]

    def open(self, rows: range, total: int, length: int) -> None:
        """What comes next is of these rows of `total`, behind the first `length` columns."""
        for layer in self._rooms:
            layer.open(slice(rows.start, rows.stop), total, length)

    def close(self, length: int) -> None:
        """All rows of all layers have the first `length` columns."""
        for layer in self._rooms:
            layer.close(length)

    def select(self, rows: torch.Tensor, layers: range | None = None) -> None:
        """Keep, drop or repeat rows, in every layer or some; those that have none yet stay so."""
        for index in range(len(self.layers)) if layers is None else layers:
            layer = self._rooms[index]
            if layer.is_initialized:
                layer.select(rows)
