# SPDX-License-Identifier: Apache-2.0
"""A key-value cache with room made ahead: a decode step writes one column instead of copying all of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class RoomLayer(CacheLayerMixin):
    """Keys and values [rows, heads, room, head_dim], of which the first `length` columns are filled."""

    is_sliding = False

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (s.new_empty(*s.shape[:2], self.room, s.shape[3]) for s in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

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

    def select(self, rows: torch.Tensor) -> None:
        """Keep, drop or repeat rows in every layer."""
        for layer in self.layers:
            assert isinstance(layer, RoomLayer)
            layer.select(rows)
