# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Kernels are compiled from their source and cannot be typed, nor their launches.
"""The noise of `evoalign.noise` on a GPU, with the same bits: one launch for all members of a part of a tensor.

A program computes `BLOCK` Philox calls, that is `8 * BLOCK` consecutive elements; nothing is drawn twice. The normals
come from a table, and random look-ups in it bound the rate, so the table must stay in the L1 cache. It is
antisymmetric, so half of it (128 KiB) and a sign suffice. Streamed data (the mean, the output) bypasses the cache where
Triton allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoalign.kernels import factors, interpreted, on
from evoalign.kernels.lines import NORMALS_PER_BLOCK, Lines, lines

_INT32 = 1 << 31
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Tuning:
    """Launch settings of a kernel. The bits do not depend on them.

    `block` is the number of Philox calls per program. `half` looks up half the table and applies the sign. `keep` asks
    the cache to keep the table's lines.
    """

    block: int = 128
    warps: int = 4
    half: bool = True
    keep: bool = False


TUNING = Tuning()


@lru_cache(maxsize=256)
def words(members: tuple[int, ...], device: torch.device) -> Tensor:
    """Return cached counter words as int32 bits on a device. All tensors of a generation use the same words."""
    return torch.tensor([signed32(m) for m in members], dtype=torch.int32).to(device)


def signed32(word: int) -> int:
    """Return a 32-bit word as the signed number with the same bits, so that kernels always get the same type."""
    return (word + _INT32) % (2 * _INT32) - _INT32


def scaled(
    key: tuple[int, int],
    table: Tensor,
    shape: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    generation: int,
    members: Sequence[int],
    widths: Sequence[float],
    mean: Tensor | None,
    out: Tensor,
    tuning: Tuning = TUNING,
) -> None:
    """Write out[m] = round(fl32(width_m * normal) + mean) for a part of a tensor; see `evoalign.noise.scaled`.

    `table` is `evoalign.noise.table` on the device, which begins with the quantiles above the median.
    """
    stream, width = words(tuple(members), out.device), factors(tuple(widths), out.device)
    for part in lines(shape, bounds, (out,) if mean is None else (out, mean)):
        _launch(part, None, key, table, generation, stream, width, None, None, tuning)


@dataclass(frozen=True)
class Job:
    """A part of one tensor's noise: member m's is written to `out[m]`, added to `mean` if given."""

    key: tuple[int, int]
    shape: Sequence[int]
    bounds: Sequence[tuple[int, int]]
    out: Tensor
    mean: Tensor | None = None


class Jobs:
    """Draws parts of many tensors with one launch per memory layout instead of one per part.

    The tensors' addresses are copied to the device once, so the tensors must not move.
    """

    def __init__(self, jobs: Sequence[Job], tuning: Tuning = TUNING) -> None:
        self._jobs, self._tuning, self._device = tuple(jobs), tuning, jobs[0].out.device
        groups: dict[tuple[object, ...], list[tuple[Lines, list[int]]]] = {}
        for row, job in enumerate(self._jobs):
            for part in lines(job.shape, job.bounds, (job.out,) if job.mean is None else (job.out, job.mean)):
                where = [part.views[0].data_ptr(), part.views[-1].data_ptr(), *map(signed32, job.key), part.base, row]
                groups.setdefault(part.layout, []).append((part, where))
        self._groups = [(parts[0][0], addresses([w for _, w in parts], self._device)) for parts in groups.values()]

    def draw(
        self,
        table: Tensor,
        generation: int,
        members: Sequence[int],
        widths: Tensor,
        weights: Tensor | None = None,
        through: torch.dtype | None = None,
    ) -> None:
        """Run `scaled` for every job, with `widths` [jobs, M], float64.

        With `weights` [jobs, M], out[m] is weight_m times that number rounded to the dtype `through`.
        """
        stream = words(tuple(members), self._device)
        width, weight = (None if t is None else t.to(torch.float32).to(self._device) for t in (widths, weights))
        for part, where in self._groups:
            _launch(part, where, (0, 0), table, generation, stream, width, weight, through, self._tuning)


def addresses(rows: list[list[int]], device: torch.device) -> Tensor:
    """Return a table of addresses and other integers for a kernel, int64."""
    return torch.tensor(rows, dtype=torch.int64).to(device)


def _launch(
    part: Lines,
    jobs: Tensor | None,
    key: tuple[int, int],
    table: Tensor,
    generation: int,
    stream: Tensor,
    width: Tensor,
    weight: Tensor | None,
    through: torch.dtype | None,
    tuning: Tuning,
) -> None:
    """Draw a part for all members, or all parts in a table of jobs with the same layout."""
    target, centre = part.views[0], part.views[-1]
    runs, length, _ = part.launch
    chunks = triton.cdiv(length + (0 if part.aligned else NORMALS_PER_BLOCK - 1), tuning.block * NORMALS_PER_BLOCK)
    programs = len(stream) * runs * chunks * (1 if jobs is None else len(jobs))
    if not programs:
        return
    many = jobs is not None
    tensors = (target, centre, stream, width, width if weight is None else weight, table, jobs if many else stream)
    counter = (signed32(key[0]), signed32(key[1]), signed32(generation))
    shape = (part.base, part.pitch, runs, chunks, len(stream), length, part.columns)
    strides = (target.stride(0), target.stride(-2), target.stride(-1), centre.stride(-2), centre.stride(-1))
    options = {"MEAN": len(part.views) > 1, "THROUGH": None if weight is None else _TYPES[through], "MANY": many}
    options |= {"EVEN": many and all(v.data_ptr() % 16 == 0 for v in part.views)}
    options |= launch_options(part, tuning)
    with on(target.device):
        _scaled[(programs,)](*tensors, *counter, *shape, *strides, **options)


def launch_options(part: Lines, tuning: Tuning) -> dict[str, Any]:
    """Return the compile-time options that all kernels of noise share."""
    _, length, split = part.launch
    options = {"SPLIT": split, "ALIGNED": part.aligned, "LONG": length >= _INT32 - 8 * tuning.block}
    options |= {"BLOCK": tuning.block, "HALF": tuning.half, "KEEP": "evict_last" if tuning.keep else ""}
    return options | {"SOFT": interpreted(), "num_warps": tuning.warps, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["key0", "key1", "generation", "base", "pitch", "runs", "chunks", "count"])
def _scaled(
    out, mean, members, widths, weights, table, jobs, key0, key1, generation, base, pitch, runs, chunks, count,
    length, columns, out_member, out_row, out_column, mean_row, mean_column,
    MEAN: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr,
    MANY: tl.constexpr, EVEN: tl.constexpr, THROUGH: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, KEEP: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    chunk, line = program % chunks, program // chunks
    run, m = line % runs, line // runs
    row = 0
    if MANY:
        jobs += (m // count) * 6
        m = m % count
        out, mean = pointer(jobs, out, EVEN), pointer(jobs + 1, mean, EVEN)
        key0, key1 = tl.load(jobs + 2).to(tl.int32), tl.load(jobs + 3).to(tl.int32)
        base, row = tl.load(jobs + 4), tl.load(jobs + 5).to(tl.int32) * count
    start = run.to(tl.int64) * pitch + base
    block, first, lane, inside = places(start, chunk, length, ALIGNED, LONG, BLOCK)
    value = eight(block, tl.load(members + m), generation, key0, key1, table, BLOCK, HALF, KEEP)
    value = value * tl.load(widths + row + m)
    if MEAN:
        at = address(run, first, lane, columns, mean_row, mean_column, SPLIT)
        value = value + tl.load(mean + at, mask=inside, cache_modifier=".cg").to(tl.float32)
    if THROUGH is not None:
        value = rounded(value, THROUGH, SOFT).to(tl.float32) * tl.load(weights + row + m)
    at = address(run, first, lane, columns, out_row, out_column, SPLIT)
    tl.store(out + m.to(tl.int64) * out_member + at, rounded(value, out.dtype.element_ty, SOFT), mask=inside)


@triton.jit
def pointer(where, like, EVEN: tl.constexpr):
    """Load a pointer of the type of `like` from a table of addresses. EVEN: addresses are multiples of 16."""
    found = tl.load(where).to(like.dtype)
    return tl.multiple_of(found, 16) if EVEN else found


@triton.jit
def places(start, chunk, length, ALIGNED: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's Philox blocks, the place of its first element in the run, its lanes, and which are in the run.

    `start` is the index of the run's first element.
    """
    if LONG:
        chunk = chunk.to(tl.int64)
    lane = tl.arange(0, 8 * BLOCK)
    block = (start >> 3) + chunk * BLOCK + tl.arange(0, BLOCK)
    first = chunk * (8 * BLOCK)
    if ALIGNED:
        inside = lane < length - first
    else:
        first = first - (start & 7).to(tl.int32)
        inside = (lane < length - first) & (lane >= -first)
    return block, first, lane, inside


@triton.jit
def address(run, first, lane, columns, row_stride, column_stride, SPLIT: tl.constexpr):
    """Return the offsets in a tensor of a contiguous run of its elements."""
    if SPLIT:
        element = first.to(tl.int64) + lane
        return (element // columns) * row_stride + (element % columns) * column_stride
    else:
        return run.to(tl.int64) * row_stride + first.to(tl.int64) * column_stride + lane * column_stride


@triton.jit
def eight(
    block, member, generation, key0, key1, table, BLOCK: tl.constexpr, HALF: tl.constexpr, KEEP: tl.constexpr
):  # fmt: skip
    """Return normals [8 * BLOCK] of BLOCK consecutive Philox blocks (int64)."""
    w0, w1, w2, w3 = philox(block, generation, member, key0, key1)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (4 * BLOCK,)).to(tl.int32, bitcast=True)
    # Each half-word as a signed 32-bit number, whose top bit selects the half of the table.
    half = tl.reshape(tl.join((word << 16) >> 16, word >> 16), (8 * BLOCK,))
    if HALF:
        low = ~(half >> 31)  # all ones below the median, where element k is minus element 65,535 - k
        value = tl.load(table + ((half ^ low) & 0x7FFF), eviction_policy=KEEP).to(tl.int32, bitcast=True)
        return (value ^ (low & -0x80000000)).to(tl.float32, bitcast=True)
    else:
        return tl.load(table + ((half & 0xFFFF) ^ 0x8000), eviction_policy=KEEP)


@triton.jit
def philox(block, generation, member, key0, key1):
    """Return Philox 4x32-10 of counters (block low, block high, generation, member)."""
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + generation.to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c0) + member.to(tl.uint32, bitcast=True)
    k0, k1 = key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def rounded(value, dtype: tl.constexpr, SOFT: tl.constexpr):
    """Round to the output's dtype, to nearest, ties to even. Triton's interpreter rounds bfloat16 wrongly."""
    if SOFT and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)
