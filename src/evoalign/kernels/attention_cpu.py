# SPDX-License-Identifier: Apache-2.0
"""`attention.decode` for a CPU and float32, in compiled C: the cache is read where it lies.

Without the library, and for what C cannot read, it is plain torch.
"""

from __future__ import annotations

import torch

from evoalign.kernels import attention, compiled

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
    """See `attention.decode`."""
    rows, (_, shared, room, width) = len(qkv), keys.shape
    plain = all(t.dtype == torch.float32 and t.is_contiguous() for t in (qkv, keys, values))
    if not (plain and width <= WIDEST and compiled.here()):
        return attention.in_torch(qkv, keys, values, slots, positions, heads=heads, scale=scale)
    out = qkv.new_empty(rows, heads * width)
    compiled.rows(
        "decode", rows, heads * width * room, qkv, keys, values, slots.contiguous(), positions.contiguous(), heads,
        shared, room, width, scale, out,
    )  # fmt: skip
    return out
