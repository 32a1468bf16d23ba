# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# Kernels are compiled from their source and cannot be typed, nor their launches.
"""The Triton kernels that draw the next token of each row and record it: one pass over the logits, and one over rows.

The first finds the highest logit of each block of columns and, as far as the draw or its log-probability needs them,
sums of exp((logit - highest) * scale). The second chooses the block and then the column within it, whose logits alone
are read again, and updates the row. The inverse transform is that of `decode.draw` with the uniforms of `noise`: sums
are float64, so the token differs from that of torch only where the uniform is within float32 rounding of a boundary.
Of equal highest logits the first is taken. Rows that are done are skipped.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoalign.kernels import on
from evoalign.kernels.noise import philox, signed32

BLOCK = 1024
"""Columns per block, at least the root of most vocabularies."""
BLOCKS, WARPS = 8, (8, 4)
"""Blocks per program of the first kernel, and warps per program of both."""


def draw(
    logits: Tensor, state: Any, first: int, stop: Tensor, key: tuple[int, int], temperature: float, logprobs: bool
) -> None:
    """Draw a token for each row of contiguous logits [B, V]: rows `first` to `first + B` of a `static_memory.State`.

    `stop` int64 are the tokens that end a completion, and `key` is the Philox key of the draws; temperature 0 takes the
    highest logit. The log-probability is that at temperature 1.
    """
    (count, width), scales = logits.shape, () if temperature == 0 else (math.log2(math.e) / temperature,)
    if logprobs and temperature != 1:
        scales = (*scales, math.log2(math.e))
    blocks = triton.cdiv(width, BLOCK)
    parts = triton.cdiv(blocks, BLOCKS)
    highs = torch.empty((count, blocks), dtype=torch.float32, device=logits.device)
    sums = torch.empty((len(scales), count, blocks), dtype=torch.float64, device=logits.device)
    given, shape = (logits, highs, sums, scales, first, count), {"V": width, "N": blocks, "BLOCK": BLOCK}
    of_rows = (state.token, state.position, state.place, state.stream, state.step, state.done)
    of_places = (state.ids, state.logprobs, state.length, state.most)
    sizes = {"STOPS": len(stop), "SP": triton.next_power_of_2(max(1, len(stop))), "NP": triton.next_power_of_2(blocks)}
    sizes |= {"DRAWN": temperature != 0, "SCORED": logprobs}
    with on(logits.device):
        _reduce[(count * parts,)](*given, state.done, **shape, PARTS=parts, BLOCKS=BLOCKS, num_warps=WARPS[0])
        numbers = (state.ids.shape[1], *map(signed32, key))
        _record[(count,)](*given, *of_rows, *of_places, stop, *numbers, **shape, **sizes, num_warps=WARPS[1])


@triton.jit
def _load(logits, column, V: tl.constexpr):
    """Load columns of a row as float32, with NaN as infinity, which is the highest then."""
    value = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32)
    return tl.where(value == value, value, float("inf"))


@triton.jit(do_not_specialize=["first", "rows"])
def _reduce(
    logits, highs, sums, scales, first, rows, done,
    V: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the highest logit of BLOCKS blocks of one row, and the sum of the exponentials below it for each scale."""
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    if tl.load(done + first + row) == 0:
        block = (program % PARTS) * BLOCKS + tl.arange(0, BLOCKS)
        value = _load(logits + row * V, block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], V)
        high = tl.max(value, axis=1)
        tl.store(highs + row * N + block, high, mask=block < N)
        below = value - tl.where(high == float("-inf"), 0.0, high)[:, None]
        for i in tl.static_range(len(scales)):
            # A GPU converts to float64 as slowly as it computes exponentials, so four are added first.
            four = tl.sum(tl.reshape(tl.exp2(below * scales[i]), (BLOCKS, BLOCK // 4, 4)), axis=2)
            tl.store(sums + (i * rows + row) * N + block, tl.sum(four.to(tl.float64), axis=1), mask=block < N)


@triton.jit
def _masses(sums, high, top, scale, block, N: tl.constexpr):
    """Load the sums of a row's blocks, relative to its highest logit."""
    return tl.load(sums + block, mask=block < N, other=0.0) * tl.exp2((high - top).to(tl.float64) * scale)


@triton.jit
def _choose(cumulative, mass, goal, i, SIZE: tl.constexpr):
    """Return the first of SIZE places that reaches `goal` and has mass, or the last with mass; 0 if all are NaN."""
    reached = tl.min(tl.where((cumulative >= goal) & (mass > 0), i, SIZE), axis=0)
    return tl.minimum(reached, tl.max(tl.where(mass > 0, i, 0), axis=0))


@triton.jit
def _pick(values, i, place):
    """Return the value at one place; 0 if there is none."""
    return tl.sum(tl.where(i == place, values, 0.0), axis=0)


@triton.jit(do_not_specialize=["first", "rows", "columns", "key0", "key1"])
def _record(
    logits, highs, sums, scales, first, rows, tokens, positions, places, streams, steps, done,
    ids, logprobs, lengths, most, stop, columns, key0, key1,
    V: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, STOPS: tl.constexpr, SP: tl.constexpr,
    NP: tl.constexpr, DRAWN: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Choose one row's token, store it, advance the row, and end it at a stop token, at `most`, or if not finite."""
    row = tl.program_id(0).to(tl.int64)
    at = first + row
    if tl.load(done + at) == 0:
        step, place = tl.load(steps + at), tl.load(places + at)
        block, lane = tl.arange(0, NP), tl.arange(0, BLOCK)
        high = tl.load(highs + row * N + block, mask=block < N, other=float("-inf"))
        top = tl.max(high, axis=0)
        if DRAWN:
            stream, zero = tl.load(streams + at), tl.full((), 0, tl.int32)
            counter = (step & 0xFFFFFFFF) | (stream << 32)
            word, _, _, _ = philox(counter, (stream >> 32).to(tl.int32), zero, key0, key1)
            mass = _masses(sums + row * N, high, top, scales[0], block, N)
            cumulative = tl.cumsum(mass, axis=0)
            goal = (word.to(tl.float64) + 0.5) * (2.0**-32) * tl.max(cumulative, axis=0)
            chosen = _choose(cumulative, mass, goal, block, NP)
            goal -= _pick(cumulative, block, chosen - 1)
            own = _pick(high, block, chosen)
            value = _load(logits + row * V, chosen * BLOCK + lane, V)
            weight = tl.exp2((value - own) * scales[0]).to(tl.float64)
            cumulative = tl.cumsum(weight, axis=0)
            goal /= tl.exp2((own - top).to(tl.float64) * scales[0])
            column = _choose(cumulative, weight, goal, lane, BLOCK)
        else:
            chosen = tl.min(tl.where(high == top, block, NP), axis=0)
            value = _load(logits + row * V, chosen * BLOCK + lane, V)
            column = tl.min(tl.where(value == top, lane, BLOCK), axis=0)
        token = (chosen * BLOCK + column).to(tl.int64)
        tl.store(ids + place * columns + step, token)
        tl.store(tokens + at, token)
        if SCORED:
            i: tl.constexpr = len(scales) - 1
            total = tl.sum(_masses(sums + (i * rows + row) * N, high, top, scales[i], block, N), axis=0)
            logprob = (_pick(value, lane, column) - top).to(tl.float64) - tl.log(total)
            tl.store(logprobs + place * columns + step, logprob.to(tl.float32))
        step += 1
        tl.store(steps + at, step)
        tl.store(positions + at, tl.load(positions + at) + 1)
        lane = tl.arange(0, SP)
        stops = tl.max((tl.load(stop + lane, mask=lane < STOPS, other=-1) == token).to(tl.int32), axis=0) > 0
        odd = tl.abs(top) == float("inf")
        ends = stops | (step >= tl.load(most)) | odd
        tl.store(lengths + place, tl.where(odd, -1, step), mask=ends)
        tl.store(done + at, ends, mask=ends)
