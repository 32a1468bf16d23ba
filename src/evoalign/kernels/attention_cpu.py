# SPDX-License-Identifier: Apache-2.0
"""`attention.decode` for a CPU and float32: the cache is read where it lies.

Rows that are the first of the cache, in its order, are a view of it; others are gathered. What is known by the numbers
of rows and columns alone is found out once a step, and serves all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class _Places:
    """Where rows lie and how far they see: `columns` up to the last of any row, all but `certain` of them not by all.

    `beyond` [B, 1, 1, columns - certain] are those that a row has not; `new` [B * HK] are the numbers of the new
    columns among all of the cache.
    """

    rows: slice | torch.Tensor
    columns: int
    certain: int
    beyond: torch.Tensor | None
    new: torch.Tensor

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """The past of the rows: [B, HK, columns, D]."""
        seen = cache[:, :, : self.columns]
        return seen[self.rows] if isinstance(self.rows, slice) else seen.index_select(0, self.rows)


@lru_cache(maxsize=4)
def _places(slots: bytes, positions: bytes, shared: int, room: int) -> _Places:
    rows, at = (torch.frombuffer(bytearray(given), dtype=torch.int64) for given in (slots, positions))
    columns, certain = int(at.max()) + 1, int(at.min()) + 1
    beyond = None
    if certain < columns:
        beyond = (torch.arange(certain, columns) > at[:, None])[:, None, None]
    new = (rows[:, None] * shared + torch.arange(shared)) * room + at[:, None]
    in_order = bool((rows.diff() == 1).all())
    return _Places(
        slice(int(rows[0]), int(rows[0]) + len(rows)) if in_order else rows, columns, certain, beyond, new.flatten()
    )


def decode(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    heads: int,
    scale: float,
) -> torch.Tensor:
    """See `attention.decode`."""
    rows, (_, shared, room, width) = len(qkv), keys.shape
    places = _places(slots.numpy().tobytes(), positions.numpy().tobytes(), shared, room)
    q, k, v = qkv.view(rows, -1, width).split((heads, shared, shared), dim=1)
    for cache, own in ((keys, k), (values, v)):
        cache.view(-1, width).index_copy_(0, places.new, own.reshape(-1, width))
    past, told = places.of(keys), places.of(values)
    scores = (q.reshape(rows, shared, -1, width) * scale) @ past.transpose(2, 3)
    if places.beyond is None:
        return (scores.softmax(-1) @ told).view(rows, -1)
    certain = places.certain
    scores[..., certain:].masked_fill_(places.beyond, -torch.inf)
    weights = scores.softmax(-1)
    # What lies in columns that nobody has written may be no number, which a weight of 0 would keep.
    rest = told[:, :, certain:].masked_fill(places.beyond.transpose(2, 3), 0)
    found = weights[..., :certain] @ told[:, :, :certain]
    return found.add_(weights[..., certain:] @ rest).view(rows, -1)
