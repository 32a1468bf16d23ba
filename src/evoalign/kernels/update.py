# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Kernels are compiled from their source and cannot be typed, nor their launches.
"""The move of the mean in one pass over the weights, bit for bit that of plain torch operations in the same order.

For each element: total = sum over members in order of fl32(weight_m * noise_m), then fl32(total / N), fl32(step * it);
the decay, the move, and the rounding to what is served. The noise stays in registers. Traffic: the master is read and
written, the served weights are written; 10 bytes a weight for bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from evoalign.kernels import factors, interpreted, on
from evoalign.kernels.noise import (
    _INT32,
    NORMALS_PER_BLOCK,
    Tuning,
    address,
    eight,
    lines,
    places,
    rounded,
    signed32,
    words,
)

TUNING = Tuning(block=256, warps=4)
"""Two Philox calls a thread: the loop over members hides the latency of the table."""
_TILE = (32, 128)


def dense(
    master: torch.Tensor,
    served: torch.Tensor | None,
    start: torch.Tensor | None,
    key: tuple[int, int],
    table: torch.Tensor,
    shape: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    generation: int,
    weights: dict[int, float],
    count: int,
    step: float,
    decay: float,
    tuning: Tuning = TUNING,
) -> None:
    """Move a part of the mean (`master`, float32) by dense noise; `served` gets it rounded to its dtype.

    `weights` is the summed signed coefficient of each stream, in order; `count` the number of members. `start` is
    needed where `decay` is not 0.
    """
    device = master.device
    stream, weight = words(tuple(weights), device), factors(tuple(weights.values()), device)
    numbers = factors((1 / count, step, decay), device)
    for part in lines(shape, bounds, [t for t in (master, served, start) if t is not None]):
        views = iter(part.views)
        mean = next(views)
        out = next(views) if served is not None else mean
        anchor = next(views) if start is not None else mean
        runs, length, split = part.launch
        chunks = triton.cdiv(length + (0 if part.aligned else NORMALS_PER_BLOCK - 1), tuning.block * NORMALS_PER_BLOCK)
        with on(master.device):
            _dense[(runs * chunks,)](
                mean, out, anchor, stream, weight, numbers, table,
                signed32(key[0]), signed32(key[1]), signed32(generation), part.base, part.pitch, chunks, len(weights),
                length, part.columns, mean.stride(0), mean.stride(1), out.stride(0), out.stride(1),
                anchor.stride(0), anchor.stride(1),
                SERVED=served is not None, DECAY=start is not None and decay != 0, SPLIT=split, ALIGNED=part.aligned,
                LONG=length >= _INT32 - 8 * tuning.block, BLOCK=tuning.block, HALF=tuning.half,
                KEEP="evict_last" if tuning.keep else "", SOFT=interpreted(),
                num_warps=tuning.warps, enable_fp_fusion=False,
            )  # fmt: skip


def product(
    master: torch.Tensor,
    served: torch.Tensor | None,
    start: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: tuple[float, ...],
    count: int,
    step: float,
    decay: float,
) -> None:
    """Move a matrix of the mean by sum_m weight_m b_m a_m, with contiguous factors `a` [M, R, in] and `b` [M, out, R].

    The products of one column and one row are added in order and without fused operations, so a shard of the matrix
    gets the bits of the whole; a library's product promises neither. The arithmetic (two operations a product) takes
    no longer than the memory traffic up to about M * R = 30.
    """
    rows, columns = master.shape
    numbers, weight = factors((1 / count, step, decay), master.device), factors(weights, master.device)
    out = master if served is None else served
    anchor = master if start is None else start
    across = triton.cdiv(columns, _TILE[1])
    with on(master.device):
        _product[(triton.cdiv(rows, _TILE[0]) * across,)](
            master, out, anchor, a, b, weight, numbers, len(weights), rows, columns, across,
            master.stride(0), master.stride(1), out.stride(0), out.stride(1), anchor.stride(0), anchor.stride(1),
            RANK=a.shape[1], SERVED=served is not None, DECAY=start is not None and decay != 0,
            ROWS=_TILE[0], COLUMNS=_TILE[1], SOFT=interpreted(), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["key0", "key1", "generation", "base", "pitch", "chunks", "members"])
def _dense(
    master, served, anchor, streams, weights, numbers, table, key0, key1, generation, base, pitch, chunks, members,
    length, columns, master_row, master_column, served_row, served_column, anchor_row, anchor_column,
    SERVED: tl.constexpr, DECAY: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, KEEP: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    chunk, run = program % chunks, program // chunks
    start = run.to(tl.int64) * pitch + base
    block, first, lane, inside = places(start, chunk, length, ALIGNED, LONG, BLOCK)
    total = tl.zeros((8 * BLOCK,), tl.float32)
    m = 0
    while m < members:  # Triton's interpreter cannot take the end of a range from an argument with NumPy 2.4
        noise = eight(block, tl.load(streams + m), generation, key0, key1, table, BLOCK, HALF, KEEP)
        total = total + noise * tl.load(weights + m)
        m += 1
    at = address(run, first, lane, columns, master_row, master_column, SPLIT)
    of_served = address(run, first, lane, columns, served_row, served_column, SPLIT)
    of_anchor = address(run, first, lane, columns, anchor_row, anchor_column, SPLIT)
    _move(master + at, served + of_served, anchor + of_anchor, total, numbers, inside, SERVED, DECAY, SOFT)


@triton.jit(do_not_specialize=["members", "across"])
def _product(
    master, served, anchor, a, b, weights, numbers, members, rows, columns, across,
    master_row, master_column, served_row, served_column, anchor_row, anchor_column,
    RANK: tl.constexpr, SERVED: tl.constexpr, DECAY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    r = (program // across) * ROWS + tl.arange(0, ROWS)
    c = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    m = 0
    while m < members:
        weight = tl.load(weights + m)
        for k in tl.static_range(RANK):
            left = tl.load(b + r * RANK + k, mask=r < rows, other=0.0).to(tl.float32) * weight
            right = tl.load(a + k * columns + c, mask=c < columns, other=0.0).to(tl.float32)
            total = total + left[:, None] * right[None, :]
        a += RANK * columns
        b += RANK * rows
        m += 1
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    r = r.to(tl.int64)
    at = r[:, None] * master_row + c[None, :] * master_column
    of_served = r[:, None] * served_row + c[None, :] * served_column
    of_anchor = r[:, None] * anchor_row + c[None, :] * anchor_column
    _move(master + at, served + of_served, anchor + of_anchor, total, numbers, inside, SERVED, DECAY, SOFT)


@triton.jit
def _move(
    master, served, anchor, total, numbers, inside, SERVED: tl.constexpr, DECAY: tl.constexpr, SOFT: tl.constexpr
):  # fmt: skip
    """The end of an update, on pointers: decay, move, serve. `numbers` are 1/N, the step and the decay."""
    move = total * tl.load(numbers) * tl.load(numbers + 1)
    mean = tl.load(master, mask=inside, cache_modifier=".cg")
    if DECAY:
        mean = mean - (mean - tl.load(anchor, mask=inside, cache_modifier=".cg")) * tl.load(numbers + 2)
    mean = mean + move
    tl.store(master, mean, mask=inside)
    if SERVED:
        tl.store(served, rounded(mean, served.dtype.element_ty, SOFT), mask=inside)
