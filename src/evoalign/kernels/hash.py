# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Kernels are compiled from their source and cannot be typed, nor their launches.
"""The sum of mix64 over a tensor's bits (`evoalign.engines.base.tensor_sum`) in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from evoalign.kernels import on
from evoalign.kernels.lines import lines

_BLOCK = 4096


def tensor_sum(tensor: torch.Tensor, shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    """int64 [] on the device: the sum over a part of a tensor of `shape`, modulo 2^64. Any order gives these bits."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in lines(shape, bounds, [tensor]):
        view = part.views[0]
        runs, length = (1, part.rows * part.columns) if part.flat else (part.rows, part.columns)
        chunks = triton.cdiv(length, _BLOCK)
        sums = torch.empty(runs * chunks, dtype=torch.int64, device=tensor.device)
        with on(tensor.device):
            _partial_sums[(runs * chunks,)](
                view, sums, part.base, part.pitch, chunks, length, view.stride(0), view.stride(1), BLOCK=_BLOCK
            )
        total += sums.sum()
    return total


@triton.jit(do_not_specialize=["base", "pitch", "chunks"])
def _partial_sums(tensor, sums, base, pitch, chunks, length, row_stride, column_stride, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    chunk, run = program % chunks, program // chunks
    lane = tl.arange(0, BLOCK)
    first = chunk.to(tl.int64) * BLOCK
    inside = lane < length - first
    at = run.to(tl.int64) * row_stride + first * column_stride + lane * column_stride
    bits = tl.load(tensor + at, mask=inside, other=0.0).to(tl.float32).to(tl.uint32, bitcast=True)
    index = run.to(tl.int64) * pitch + base + first + 1 + lane
    x = bits.to(tl.uint64) + index.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    tl.store(sums + program, tl.sum(tl.where(inside, x, 0).to(tl.int64, bitcast=True), axis=0))
