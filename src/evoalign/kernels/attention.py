# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a row over a cache of keys and values, which gets the token's own on the way.

Shapes: B rows, C rows of the cache, HQ heads of queries in groups of HQ / HK that share keys and values, D numbers a
head. A row of a batch finds its row of the cache by `slots`, so that rows leave a batch without a copy of their past.
Softmax and sums are float32; tiles do not depend on B, so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import torch

from evoalign import kernels
from evoalign.kernels import compiled

WIDEST = 512
"""Numbers of a head that C has room for."""


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
    """[B, HQ * D]: what the new tokens attend to in the columns before theirs, and in their own.

    `qkv` [B, (HQ + 2 HK) * D], `keys` and `values` [C, HK, room, D] contiguous, `slots` int64 [B] and `positions` int64
    [B]: where each row's past lies, and how many columns it has. The new ones are written behind them.
    """
    if kernels.available(qkv.device):
        from evoalign.kernels.attention_triton import decode as form
    else:
        form = in_c if qkv.device.type == "cpu" else in_torch
    return form(qkv, keys, values, slots, positions, heads=heads, scale=scale)


def in_c(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    heads: int,
    scale: float,
) -> torch.Tensor:
    """`decode` on a CPU: float32 in compiled C, the cache read where it lies; plain torch for what C cannot read."""
    rows, (_, shared, room, width) = len(qkv), keys.shape
    plain = all(t.dtype == torch.float32 and t.is_contiguous() for t in (qkv, keys, values))
    if not (plain and width <= WIDEST and compiled.here()):
        return in_torch(qkv, keys, values, slots, positions, heads=heads, scale=scale)
    out = qkv.new_empty(rows, heads * width)
    compiled.rows(
        "decode", rows, heads * width * room, qkv, keys, values, slots.contiguous(), positions.contiguous(), heads,
        shared, room, width, scale, out,
    )  # fmt: skip
    return out


def in_torch(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    heads: int,
    scale: float,
) -> torch.Tensor:
    """`decode` in plain torch."""
    rows, shared, width = len(qkv), keys.shape[1], keys.shape[3]
    q, k, v = qkv.view(rows, -1, width).split((heads, shared, shared), dim=1)
    keys[slots, :, positions], values[slots, :, positions] = k, v
    seen = int(positions.max()) + 1
    past, told = keys[slots, :, :seen].float(), values[slots, :, :seen].float()
    scores = torch.einsum("bhgd,bhnd->bhgn", q.reshape(rows, shared, -1, width).float(), past) * scale
    beyond = torch.arange(seen, device=qkv.device) > positions[:, None]
    told.masked_fill_(beyond[:, None, :, None], 0)  # what lies there may be no number, which a weight of 0 would keep
    weights = scores.masked_fill_(beyond[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bhgn,bhnd->bhgd", weights, told).reshape(rows, -1).to(qkv.dtype)
