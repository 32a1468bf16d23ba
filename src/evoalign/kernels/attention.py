# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token per row over a cache of keys and values; the token's own are added to the cache.

Shapes: B rows, C rows of the cache, HQ query heads in groups of HQ / HK that share keys and values, D numbers per head.
A batch row finds its cache row by `slots`, so a row leaves the batch without a copy of its past. Rows whose pasts begin
alike read the beginning from one of them: it has the same bits, and comes from the processor's cache. Softmax and sums
are float32. Tiles do not depend on B, so a row's bits do not depend on the other rows.

Runs in Triton if `kernels.available`, else on a CPU in compiled C for contiguous float32 tensors, else in plain torch,
where products of a library may give a row other last bits in another batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evoalign import kernels
from evoalign.kernels import compiled

WIDEST = 512
"""Widest head that the C form supports (`HEAD` in compiled.c)."""


def decode(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    begins: tuple[Tensor, Tensor] | None = None,
    *,
    heads: int,
    scale: float,
) -> Tensor:
    """Return [B, HQ * D]: the attention of each new token over the columns before it and its own.

    `qkv` is [B, (HQ + 2 HK) * D]; `keys` and `values` are [C, HK, room, D], contiguous. `slots` int64 [B] is the cache
    row of each batch row, and `positions` int64 [B] its number of columns, behind which the new column is written.
    `begins` are a cache row and a number of columns before the new one, both int64 [B]: these columns are equal there,
    and are read there.
    """
    if kernels.available(qkv.device):
        from evoalign.kernels.attention_triton import decode as form

        return form(qkv, keys, values, slots, positions, begins, heads=heads, scale=scale)
    rows, (_, shared, room, width) = len(qkv), keys.shape
    plain = all(t.dtype == torch.float32 and t.is_contiguous() for t in (qkv, keys, values))
    if qkv.device.type == "cpu" and plain and width <= WIDEST and compiled.here():
        out = qkv.new_empty(rows, heads * width)
        numbers = (slots, positions, *(begins or (slots, torch.zeros_like(slots))))
        tensors = (qkv, keys, values, *(t.contiguous() for t in numbers))
        compiled.rows("decode", rows, heads * width * room, *tensors, heads, shared, room, width, scale, out)
        return out
    q, k, v = qkv.view(rows, -1, width).split((heads, shared, shared), dim=1)
    keys[slots, :, positions], values[slots, :, positions] = k, v
    seen = int(positions.max()) + 1
    past_keys, past_values = keys[slots, :, :seen].float(), values[slots, :, :seen].float()
    scores = torch.einsum("bhgd,bhnd->bhgn", q.reshape(rows, shared, -1, width).float(), past_keys) * scale
    beyond = torch.arange(seen, device=qkv.device) > positions[:, None]
    past_values.masked_fill_(beyond[:, None, :, None], 0)  # unwritten memory may be NaN, and 0 * NaN is NaN
    weights = scores.masked_fill_(beyond[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bhgn,bhnd->bhgd", weights, past_values).reshape(rows, -1).to(qkv.dtype)
