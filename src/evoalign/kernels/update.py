# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Kernels are compiled from their source and cannot be typed, nor their launches.
"""The Triton kernels that move and hash the mean, in one pass over the weights.

The bits are those of plain torch operations in the same order. For each element of a move: total = sum over members in
order of fl32(weight_m * noise_m), then fl32(total / N), fl32(step * it); then the decay, the move, and rounding to the
served dtype. The noise stays in registers. Memory traffic: the master is read and written, the served weights are
written; 10 bytes per weight for bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoalign.kernels import factors, interpreted, on
from evoalign.kernels.lines import NORMALS_PER_BLOCK, lines
from evoalign.kernels.noise import (
    Tuning,
    address,
    addresses,
    eight,
    launch_options,
    places,
    pointer,
    rounded,
    signed32,
    words,
)

TUNING = Tuning(block=256, warps=4)
"""Two Philox calls per thread: the loop over members hides the latency of the table."""
_ROWS, _WIDE, _LANES, _UNROLL = 8, 4, 128, 2
"""A program of `_product` moves `_ROWS` rows of `_LANES * _WIDE` columns; a thread moves `_WIDE` of its columns."""
_LINE = 32
"""Float32 numbers per cache line, where factors start."""
_HASH_BLOCK, _HASH_PROGRAMS = 4096, 512
"""Numbers that a program of the hash reads at once, and most programs per part."""


def dense(
    master: Tensor,
    served: Tensor | None,
    start: Tensor | None,
    key: tuple[int, int],
    table: Tensor,
    shape: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    generation: int,
    weights: dict[int, float],
    count: int,
    step: float,
    decay: float,
    tuning: Tuning = TUNING,
) -> None:
    """Move a part of the mean (`master`, float32) by dense noise. `served` receives the result, rounded to its dtype.

    `weights` is the summed signed coefficient of each stream, in order; `count` is the number of members. `start` is
    required if `decay` is not 0.
    """
    device = master.device
    stream, weight = words(tuple(weights), device), factors(tuple(weights.values()), device)
    numbers = factors((1 / count, step, decay), device)
    for part in lines(shape, bounds, [t for t in (master, served, start) if t is not None]):
        views = iter(part.views)
        mean = next(views)
        out = next(views) if served is not None else mean
        anchor = next(views) if start is not None else mean
        runs, length, _ = part.launch
        chunks = triton.cdiv(length + (0 if part.aligned else NORMALS_PER_BLOCK - 1), tuning.block * NORMALS_PER_BLOCK)
        counter = (signed32(key[0]), signed32(key[1]), signed32(generation))
        where = (part.base, part.pitch, chunks, len(weights), length, part.columns)
        strides = (*mean.stride(), *out.stride(), *anchor.stride())
        options = {"SERVED": served is not None, "DECAY": start is not None and decay != 0}
        options |= launch_options(part, tuning)
        with on(master.device):
            tensors = (mean, out, anchor, stream, weight, numbers, table)
            _dense[(runs * chunks,)](*tensors, *counter, *where, *strides, **options)


def room(terms: int, shapes: Sequence[tuple[int, int]]) -> int:
    """Return the float32 count for `terms` factors of matrices of these shapes, with room for reads beyond the end."""
    return sum(_lines(terms * n) for shape in shapes for n in shape) + _LANES * _WIDE


def split(memory: Tensor, terms: int, shapes: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Split memory of size `room` into the factors of each matrix: [terms, rows] and [terms, columns]."""
    sizes = [n for shape in shapes for n in shape]
    pieces = memory.split([*(_lines(terms * n) for n in sizes), _LANES * _WIDE])
    views = [p[: terms * n].view(terms, n) for p, n in zip(pieces, sizes, strict=False)]
    return list(zip(views[::2], views[1::2], strict=True))


def _lines(numbers: int) -> int:
    return -(-numbers // _LINE) * _LINE


@dataclass(frozen=True)
class Matrix:
    """A matrix of the mean [rows, columns], or a part of one, and the factors of its move.

    `master` and `start` are float32. `served` receives the master rounded to its dtype. `left` [K, rows] and `right`
    [K, columns] come from `split`.
    """

    master: Tensor
    served: Tensor | None
    start: Tensor | None
    left: Tensor
    right: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The kernel's tensors. The master replaces those that are None, which the kernel does not use."""
        others = (self.master if t is None else t for t in (self.served, self.start))
        return self.master, *others, self.left, self.right

    @property
    def layout(self) -> tuple[object, ...]:
        """A key: matrices of equal layout share a launch."""
        views = tuple((t.dtype, t.stride(), t.data_ptr() % 16 == 0) for t in self.tensors)
        return self.master.shape, self.served is None, self.start is None, views


class Products:
    """Moves many matrices by sums of products, with one launch per memory layout.

    The tensors' addresses are copied to the device once, so the tensors must not move.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices, self._device = tuple(matrices), matrices[0].master.device
        groups: dict[tuple[object, ...], list[tuple[Matrix, list[int]]]] = {}
        for row, matrix in enumerate(self._matrices):
            where = [*(t.data_ptr() for t in matrix.tensors), row]
            groups.setdefault(matrix.layout, []).append((matrix, where))
        self._groups = [(found[0][0], addresses([w for _, w in found], self._device)) for found in groups.values()]

    def move(self, terms: int, count: int, steps: Sequence[float], decay: float) -> None:
        """Move each matrix by its step / count times sum_k left[k] right[k] over the first `terms` factors, and decay.

        Products are added in order and without fused operations, so a shard gets the same bits as the whole matrix. A
        BLAS product guarantees neither. Up to about 30 terms, memory traffic bounds the time.
        """
        numbers = torch.tensor([(1 / count, step, decay) for step in steps], dtype=torch.float64)
        numbers = numbers.to(torch.float32).to(self._device)
        for first, where in self._groups:
            (rows, columns), (master, served, start, factors, _) = first.master.shape, first.tensors
            down, across = triton.cdiv(rows, _ROWS), triton.cdiv(columns, _LANES * _WIDE)
            tensors, shape = (master, served, start, factors, where, numbers), (terms, rows, columns, down, across)
            strides = (*master.stride(), *served.stride(), *start.stride())
            options = {"SERVED": first.served is not None, "DECAY": first.start is not None and decay != 0}
            options |= {"EVEN": all(t.data_ptr() % 16 == 0 for t in first.tensors), "SOFT": interpreted()}
            options |= {"ROWS": _ROWS, "WIDE": _WIDE, "LANES": _LANES, "UNROLL": _UNROLL}
            options |= {"num_warps": _LANES // 32, "enable_fp_fusion": False}
            with on(self._device):
                _product[(len(where) * down * across,)](*tensors, *shape, *strides, **options)


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
    while m < members:  # with NumPy 2.4 Triton's interpreter cannot end a range at an argument
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
    # Concurrent programs share their columns and find those of `right` in the L1 cache.
    r = (program % down) * ROWS + tl.arange(0, ROWS)
    c = (program // down) * (LANES * WIDE) + tl.arange(0, LANES)[None, :] * WIDE + tl.arange(0, WIDE)[:, None]
    # Lanes are the last axis, so that Triton gives each thread the first two axes: ROWS + WIDE numbers for ROWS * WIDE
    # products.
    total = tl.zeros((ROWS, WIDE, LANES), tl.float32)
    k = 0
    while k + UNROLL <= terms:  # reads beyond the matrix (see `room`) are never stored
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
    """Apply the decay and the move, and store the served weights. `numbers` are 1/N, the step and the decay."""
    move = total * tl.load(numbers) * tl.load(numbers + 1)
    mean = tl.load(master, mask=inside, cache_modifier=".cg")
    if DECAY:
        mean = mean - (mean - tl.load(anchor, mask=inside, cache_modifier=".cg")) * tl.load(numbers + 2)
    mean = mean + move
    tl.store(master, mean, mask=inside)
    if SERVED:
        tl.store(served, rounded(mean, served.dtype.element_ty, SOFT), mask=inside)


class Sums:
    """Hashes parts of many tensors, each a (tensor, whole shape, bounds), with one launch per dtype and one copy.

    The tensors' addresses are copied to the device once, so the tensors must not move.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Sequence[int], Sequence[tuple[int, int]]]]) -> None:
        self._parts, self._device = tuple(parts), parts[0][0].device
        groups: dict[torch.dtype, list[list[int]]] = {}
        for row, (tensor, shape, bounds) in enumerate(self._parts):
            for part in lines(shape, bounds, [tensor]):
                view = part.views[0]
                runs, length = (1, part.rows * part.columns) if part.flat else (part.rows, part.columns)
                where = [view.data_ptr(), part.base, part.pitch, runs, length, *view.stride(), row]
                groups.setdefault(tensor.dtype, []).append(where)
        self._groups = [(dtype, rows, addresses(rows, self._device)) for dtype, rows in groups.items()]

    def __call__(self) -> list[int]:
        """Return each part's sum over its elements modulo 2^64, as a signed number; the order of addition is free."""
        sums = torch.zeros(len(self._parts), dtype=torch.int64, device=self._device)
        for dtype, rows, where in self._groups:
            programs = min(
                _HASH_PROGRAMS, max(runs * triton.cdiv(length, _HASH_BLOCK) for _, _, _, runs, length, *_ in rows)
            )
            like = torch.empty(0, dtype=dtype, device=self._device)
            with on(self._device):
                _sums[(len(rows) * programs,)](like, where, sums, programs, BLOCK=_HASH_BLOCK)
        return sums.tolist()


@triton.jit(do_not_specialize=["programs"])
def _sums(like, parts, sums, programs, BLOCK: tl.constexpr):
    """Add the hashes of every `programs`-th block of a part."""
    program = tl.program_id(0)
    parts += program // programs * 8
    tensor = pointer(parts, like, False)
    base, pitch, runs, length = tl.load(parts + 1), tl.load(parts + 2), tl.load(parts + 3), tl.load(parts + 4)
    row_stride, column_stride = tl.load(parts + 5), tl.load(parts + 6)
    chunks = (length + BLOCK - 1) // BLOCK
    block, total = (program % programs).to(tl.int64), tl.zeros((), tl.int64)
    while block < runs * chunks:
        run, element = block // chunks, block % chunks * BLOCK + tl.arange(0, BLOCK)
        inside = element < length
        number = tl.load(tensor + run * row_stride + element * column_stride, mask=inside, other=0.0)
        bits, index = number.to(tl.float32).to(tl.uint32, bitcast=True), run * pitch + base + 1 + element
        x = bits.to(tl.uint64) + index.to(tl.uint64) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = x ^ (x >> 31)
        total += tl.sum(tl.where(inside, x, 0).to(tl.int64, bitcast=True), axis=0)
        block += programs
    tl.atomic_add(sums + tl.load(parts + 7), total)
