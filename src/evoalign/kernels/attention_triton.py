# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
# Kernels are compiled from their source and cannot be typed.
"""The Triton kernel of `attention`: each program has one row and one key head, with all query heads that share it.

The running softmax starts with the new column, from registers, so that no program reads memory it has just written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoalign.kernels import interpreted

_FEW = 2 * 16 * 128
"""Most bytes of the queries of a program for one warp: above, its registers would not be enough."""


@triton.jit
def _attend(
    q, keys, values, past, origin, begun, start, position, top, total, result, scale,
    D: tl.constexpr, DP: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Update the running softmax with COLUMNS more columns: the highest score, the sum and the result so far."""
    c, d = start + tl.arange(0, COLUMNS), tl.arange(0, DP)
    inside = c < position
    at = tl.where(c < begun, origin, past) + c * D
    key = tl.load(keys + at[None, :] + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
    value = tl.load(values + at[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    if SOFT:  # Triton's interpreter reads the bits of a bfloat16 as an integer
        products = tl.dot(q.to(tl.float32), key.to(tl.float32), input_precision="ieee")
    else:
        products = tl.dot(q, key, input_precision="ieee")
    scores = tl.where(inside[None, :], products * scale, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp(scores - highest[:, None])
    shrunk = tl.exp(top - highest)
    if SOFT:
        weighted = tl.dot(weights.to(value.dtype).to(tl.float32), value.to(tl.float32), input_precision="ieee")
    else:
        weighted = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    result = result * shrunk[:, None] + weighted
    return highest, total * shrunk + tl.sum(weights, axis=1), result


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "origins", "begun"])
def _decode(
    qkv, keys, values, slots, positions, origins, begun, out, scale,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr,
    ROOM: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row).to(tl.int32)
    origin, columns = tl.load(origins + row).to(tl.int64), tl.load(begun + row).to(tl.int32)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    own = qkv + row * ((HQ + 2 * HK) * D)
    inside = (g < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(own + (head * GROUP + g)[:, None] * D + d[None, :], mask=inside, other=0.0)
    key = tl.load(own + (HQ + head) * D + d, mask=d < D, other=0.0)
    value = tl.load(own + (HQ + HK + head) * D + d, mask=d < D, other=0.0)
    past, origin = (slot * HK + head) * (ROOM * D), (origin * HK + head) * (ROOM * D)
    tl.store(keys + past + position * D + d, key, mask=d < D)
    tl.store(values + past + position * D + d, value, mask=d < D)

    top = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * scale
    total = tl.full((GP,), 1.0, tl.float32)
    result = tl.zeros((GP, DP), tl.float32) + value.to(tl.float32)[None, :]
    if SOFT:  # with NumPy 2.4 Triton's interpreter cannot end a range at an argument
        start = 0
        while start < position:
            top, total, result = _attend(
                q, keys, values, past, origin, columns, start, position, top, total, result, scale, D, DP, COLUMNS, SOFT
            )
            start += COLUMNS
    else:
        for start in tl.range(0, position, COLUMNS):
            top, total, result = _attend(
                q, keys, values, past, origin, columns, start, position, top, total, result, scale, D, DP, COLUMNS, SOFT
            )
    result = (result / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row * HQ + head * GROUP + g)[:, None] * D + d[None, :], result, mask=inside)


def decode(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    begins: tuple[Tensor, Tensor] | None,
    *,
    heads: int,
    scale: float,
) -> Tensor:
    """See `attention.decode`."""
    rows, (_, shared, room, width) = len(qkv), keys.shape
    group = heads // shared
    out = torch.empty((rows, heads * width), dtype=qkv.dtype, device=qkv.device)
    padded = {"DP": max(16, triton.next_power_of_2(width)), "GP": max(16, triton.next_power_of_2(group))}
    # One warp per program and few columns per iteration let more programs run at once. Stages are as measured.
    few = padded["DP"] * padded["GP"] * qkv.element_size() <= _FEW
    columns, warps, stages = (16, 1, 4 if width <= 64 else 3) if few else (64, 4, 2)
    shape = {"HQ": heads, "HK": shared, "D": width, "GROUP": group, "ROOM": room, "COLUMNS": columns, **padded}
    tensors = (qkv, keys, values, slots, positions, *(begins or (slots, torch.zeros_like(slots))), out)
    _decode[(rows, shared)](*tensors, float(scale), **shape, SOFT=interpreted(), num_warps=warps, num_stages=stages)
    return out
