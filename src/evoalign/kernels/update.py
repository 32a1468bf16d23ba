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
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from evoalign.kernels import factors, interpreted, on
from evoalign.kernels.lines import NORMALS_PER_BLOCK, lines
from evoalign.kernels.noise import (
    _INT32,
    Tuning,
    address,
    addresses,
    eight,
    places,
    pointer,
    rounded,
    signed32,
    words,
)

TUNING = Tuning(block=256, warps=4)
"""Two Philox calls a thread: the loop over members hides the latency of the table."""
_ROWS, _WIDE, _LANES, _UNROLL = 8, 4, 128, 2
"""A program of `_product` moves `_ROWS` rows of `_LANES * _WIDE` columns; a thread all rows of `_WIDE` columns."""
_LINE = 32
"""Numbers in a line of the cache, where factors begin."""


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


def room(terms: int, shapes: Sequence[tuple[int, int]]) -> int:
    """Numbers that `terms` factors of matrices of these shapes take, and what a program may read beyond them."""
    return sum(_lines(terms * n) for shape in shapes for n in shape) + _LANES * _WIDE


def split(
    memory: torch.Tensor, terms: int, shapes: Sequence[tuple[int, int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Places for the factors of each matrix in float32 memory of that room: [terms, rows] and [terms, columns]."""
    sizes = [n for shape in shapes for n in shape]
    pieces = memory.split([*(_lines(terms * n) for n in sizes), _LANES * _WIDE])
    views = [p[: terms * n].view(terms, n) for p, n in zip(pieces, sizes, strict=False)]
    return list(zip(views[::2], views[1::2], strict=True))


def _lines(numbers: int) -> int:
    return -(-numbers // _LINE) * _LINE


@dataclass(frozen=True)
class Matrix:
    """A matrix of the mean [rows, columns], or a part of one, and the factors of its move.

    `master` and `start` are float32; `served` gets the master rounded to its dtype. `left` [K, rows] and `right`
    [K, columns] come from `split`.
    """

    master: torch.Tensor
    served: torch.Tensor | None
    start: torch.Tensor | None
    left: torch.Tensor
    right: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the kernel reads and writes; the master stands for what there is not."""
        others = (self.master if t is None else t for t in (self.served, self.start))
        return self.master, *others, self.left, self.right

    @property
    def layout(self) -> tuple[object, ...]:
        """Matrices of the same layout share a launch."""
        views = tuple((t.dtype, t.stride(), t.data_ptr() % 16 == 0) for t in self.tensors)
        return self.master.shape, self.served is None, self.start is None, views


class Products:
    """Moves of many matrices by sums of products, with a launch for each layout in memory.

    The tensors' addresses are written to the device once, so they have to stay where they are.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices, self._device = tuple(matrices), matrices[0].master.device
        groups: dict[tuple[object, ...], list[tuple[Matrix, list[int]]]] = {}
        for row, matrix in enumerate(self._matrices):
            where = [*(t.data_ptr() for t in matrix.tensors), row]
            groups.setdefault(matrix.layout, []).append((matrix, where))
        self._groups = [(found[0][0], addresses([w for _, w in found], self._device)) for found in groups.values()]

    def move(self, terms: int, count: int, steps: Sequence[float], decay: float) -> None:
        """Each matrix by its step / count times sum_k left[k] right[k] over the first `terms` factors, and decay.

        The products of one column and one row are added in order and without fused operations, so a shard of the
        matrix gets the bits of the whole; a library's product promises neither. The arithmetic (two operations a
        product) takes no longer than the memory traffic up to about 30 terms.
        """
        numbers = torch.tensor([(1 / count, step, decay) for step in steps], dtype=torch.float64)
        numbers = numbers.to(torch.float32).to(self._device)
        for first, where in self._groups:
            (rows, columns), (master, served, start, factors, _) = first.master.shape, first.tensors
            down, across = triton.cdiv(rows, _ROWS), triton.cdiv(columns, _LANES * _WIDE)
            with on(self._device):
                _product[(len(where) * down * across,)](
                    master, served, start, factors, where, numbers, terms, rows, columns, down, across,
                    master.stride(0), master.stride(1), served.stride(0), served.stride(1),
                    start.stride(0), start.stride(1),
                    SERVED=first.served is not None, DECAY=first.start is not None and decay != 0,
                    EVEN=all(t.data_ptr() % 16 == 0 for t in first.tensors),
                    ROWS=_ROWS, WIDE=_WIDE, LANES=_LANES, UNROLL=_UNROLL, SOFT=interpreted(),
                    num_warps=_LANES // 32, enable_fp_fusion=False,
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


@triton.jit(do_not_specialize=["terms", "down", "across"])
def _product(
    master, served, anchor, factors, matrices, numbers, terms, rows, columns, down, across,
    master_row, master_column, served_row, served_column, anchor_row, anchor_column,
    SERVED: tl.constexpr, DECAY: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    matrices += program // (down * across) * 6
    program = program % (down * across)
    master, served = pointer(matrices, master, EVEN), pointer(matrices + 1, served, EVEN)
    anchor = pointer(matrices + 2, anchor, EVEN)
    left, right = pointer(matrices + 3, factors, EVEN), pointer(matrices + 4, factors, EVEN)
    # Programs that run at a time share their columns, and find those of `right` in the L1 cache.
    r = (program % down) * ROWS + tl.arange(0, ROWS)
    c = (program // down) * (LANES * WIDE) + tl.arange(0, LANES)[None, :] * WIDE + tl.arange(0, WIDE)[:, None]
    # Lanes come last: Triton then leaves the first two dimensions of this to each thread, which so needs
    # ROWS + WIDE numbers for ROWS * WIDE products.
    total = tl.zeros((ROWS, WIDE, LANES), tl.float32)
    k = 0
    while k + UNROLL <= terms:  # what lies beyond the matrix is read (see `room`), and never stored
        for _ in tl.static_range(UNROLL):
            total = total + tl.load(left + r)[:, None, None] * tl.load(right + c)[None, :, :]
            left += rows
            right += columns
        k += UNROLL
    while k < terms:
        total = total + tl.load(left + r)[:, None, None] * tl.load(right + c)[None, :, :]
        left += rows
        right += columns
        k += 1
    inside = (r < rows)[:, None, None] & (c < columns)[None, :, :]
    r, c = r.to(tl.int64)[:, None, None], c[None, :, :]
    at, of_served = r * master_row + c * master_column, r * served_row + c * served_column
    of_anchor = r * anchor_row + c * anchor_column
    numbers += tl.load(matrices + 5) * 3
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
