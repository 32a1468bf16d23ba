# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
# ruff: noqa: RUF005, C901, SIM108
# Kernels are compiled from their source and cannot be typed; their tuples do not unpack; their ifs are compile-time.
"""The Triton kernels of `population`, and their launches. Each program handles one row, so tiles never mix members.

Rank 1 is optimised: the dots are scalars and the factors vectors. Loads that do not depend on the row's member come
first, then its factors, then arithmetic: with few rows the time is the latency of these two waits. A higher rank is
one more axis of the tile: A [R, K] for the dots, B [N, R] for the sums, with R padded to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoalign.kernels.population_tiles import Tiles, add_tiles, gate_tiles, norm_tiles, power, rotate_tiles, row_sizes
from evoalign.kernels.reference import Dot, Heads, Partial, Terms, pitch

__all__ = ["Tiles", "add", "add_tiles", "gate", "norm", "rotate", "row_sizes"]


@triton.jit
def _load_member(members, row):
    """Return whether the row has a member, and its slot (0 without a member)."""
    member = tl.load(members + row, eviction_policy="evict_last")
    return member >= 0, tl.maximum(member, 0).to(tl.int64)


@triton.jit
def _load_a(a, slot, mask, k, K: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, RP: tl.constexpr):
    """Load columns k of a member's A: [BK] for rank 1, else [RP, BK]."""
    base = a + slot * (RS * K)
    if R == 1:
        return tl.load(base + k, mask=mask, other=0.0)
    else:
        j = tl.arange(0, RP)[:, None]
        return tl.load(base + j * K + k[None, :], mask=mask[None, :] & (j < R), other=0.0)


@triton.jit
def _dot(x, a, R: tl.constexpr):
    """Return the dots of x (float32) with each row of A: a scalar for rank 1, else [RP]."""
    if R == 1:
        return tl.sum(x * a.to(tl.float32), axis=0)
    else:
        return tl.sum(x[None, :] * a.to(tl.float32), axis=1)


@triton.jit
def _load_each(a, slot, mask, k, K: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, RP: tl.constexpr):
    """Load columns k of several A, as a tuple."""
    factors = ()
    for i in tl.static_range(len(a)):
        factors = factors + (_load_a(a[i], slot, mask, k, K, R, RS, RP),)
    return factors


@triton.jit
def _load_b(b, slot, mask, n, N: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, RP: tl.constexpr):
    """Load rows n of a member's B: the shape of n for rank 1, else with one more axis of RP."""
    base = b + slot * (N * RS)
    if R == 1:
        return tl.load(base + n * RS, mask=mask, other=0.0)
    else:
        j = tl.arange(0, RP)
        if len(n.shape) == 1:
            return tl.load(base + n[:, None] * RS + j[None, :], mask=mask[:, None] & (j < R)[None, :], other=0.0)
        else:
            j = j[None, None, :]
            return tl.load(base + n[:, :, None] * RS + j, mask=mask[:, :, None] & (j < R), other=0.0)


@triton.jit
def _expand(dots, b, R: tl.constexpr):
    """Return dots B^T, float32, in the shape of the rows of b. With rank 0 nothing is loaded for it."""
    if R == 0:
        return 0.0
    elif R == 1:
        return dots * b.to(tl.float32)
    elif len(b.shape) == 2:
        return tl.sum(dots[None, :] * b.to(tl.float32), axis=1)
    else:
        return tl.sum(dots[None, None, :] * b.to(tl.float32), axis=2)


@triton.jit
def _load_dots(dots, R: tl.constexpr, RP: tl.constexpr):
    if R == 1:
        return tl.load(dots)
    else:
        j = tl.arange(0, RP)
        return tl.load(dots + j, mask=j < R, other=0.0)


@triton.jit
def _store_dots(at, dots, R: tl.constexpr, RP: tl.constexpr):
    if R == 1:
        tl.store(at, dots)
    else:
        j = tl.arange(0, RP)
        tl.store(at + j, dots, mask=j < R)


@triton.jit
def _load_partials(dots, NP: tl.constexpr, NPB: tl.constexpr, R: tl.constexpr, RP: tl.constexpr):
    """Load partial dots [NP, R]: [NPB] for rank 1, else [NPB, RP]."""
    p = tl.arange(0, NPB)
    if R == 1:
        return tl.load(dots + p, mask=p < NP, other=0.0)
    else:
        j = tl.arange(0, RP)[None, :]
        return tl.load(dots + p[:, None] * R + j, mask=(p < NP)[:, None] & (j < R), other=0.0)


@triton.jit(do_not_specialize_on_alignment=["members"])
def _add(
    y, x, a, b, members, scaling,
    Y_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, K: tl.constexpr, NS: tl.constexpr,
    R: tl.constexpr, RS: tl.constexpr, RP: tl.constexpr,
    BK: tl.constexpr, BNS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Compute the dots of one row, then every GROUPS-th tile of its outputs. Each group recomputes the dots."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    has, slot = _load_member(members, row)
    if has:
        products = ()
        for _ in tl.static_range(len(NS)):
            products = products + (tl.zeros([BK] if R == 1 else [RP, BK], tl.float32),)
        for start in tl.range(0, K, BK):
            k = start + tl.arange(0, BK)
            inside = k < K
            value = tl.load(x + row * X_STRIDE + k, mask=inside, other=0.0).to(tl.float32)
            summed = ()
            for i in tl.static_range(len(NS)):
                factor = _load_a(a[i], slot, inside, k, K, R, RS, RP).to(tl.float32)
                if R == 1:
                    summed = summed + (products[i] + value * factor,)
                else:
                    summed = summed + (products[i] + value[None, :] * factor,)
            products = summed
        dots = ()
        for i in tl.static_range(len(NS)):
            dots = dots + (tl.sum(products[i], axis=0 if R == 1 else 1) * scaling,)
        to = y + row * Y_STRIDE
        for i in tl.static_range(len(NS)):
            for tile in tl.static_range((NS[i] + GROUPS * BNS[i] - 1) // (GROUPS * BNS[i])):
                n = (tile * GROUPS + group) * BNS[i] + tl.arange(0, BNS[i])
                inside = n < NS[i]
                term = _expand(dots[i], _load_b(b[i], slot, inside, n, NS[i], R, RS, RP), R)
                old = tl.load(to + n, mask=inside, other=0.0)
                tl.store(to + n, (old.to(tl.float32) + term).to(old.dtype), mask=inside)
            to += NS[i]


@triton.jit(do_not_specialize_on_alignment=["members"])
def _norm(
    hidden, residual, weight, out, dots, members, x, x_a, partials, b, into_a, eps, scaling,
    H_STRIDE: tl.constexpr, R_STRIDE: tl.constexpr, W_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, RP: tl.constexpr,
    BH: tl.constexpr, BK: tl.constexpr, NPB: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """For one row: add the pending term (x with x_a, or partials; times b) and the residual, normalise, take dots.

    EARLY loads all the member's factors before the first sum. At a high rank they would not fit in registers.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BH)
    inside = c < H
    k = tl.arange(0, BK)
    has, slot = _load_member(members, row)
    total = tl.load(hidden + row * H_STRIDE + c, mask=inside, other=0.0)
    if residual is not None:
        carried = tl.load(residual + row * R_STRIDE + c, mask=inside, other=0.0)
    if x is not None:
        entered = tl.load(x + row * X_STRIDE + k, mask=k < K, other=0.0)
    if partials is not None:
        parts = _load_partials(partials + row * (NP * R), NP, NPB, R, RP)
    scale = tl.load(weight + tl.where(has, slot + 1, 0) * W_STRIDE + c, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        if b is not None:
            up = _load_b(b, slot, inside & has, c, H, R, RS, RP)
        if x is not None:
            down = _load_a(x_a, slot, (k < K) & has, k, K, R, RS, RP)
        factors = _load_each(into_a, slot, inside & has, c, H, R, RS, RP)

    total = total.to(tl.float32)
    if b is not None:
        if x is None:
            owed = tl.sum(parts, axis=0)
        elif EARLY:
            owed = _dot(entered.to(tl.float32), down, R)
        else:
            owed = _dot(entered.to(tl.float32), _load_a(x_a, slot, (k < K) & has, k, K, R, RS, RP), R)
        if not EARLY:
            up = _load_b(b, slot, inside & has, c, H, R, RS, RP)
        total += _expand(tl.where(has, owed * scaling, 0.0), up, R)
    if residual is not None:
        rounded = (total + carried.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(residual + row * R_STRIDE + c, rounded, mask=inside)
        total = rounded.to(tl.float32)
    elif b is not None:
        rounded = total.to(out.dtype.element_ty)
        tl.store(hidden + row * H_STRIDE + c, rounded, mask=inside)
        total = rounded.to(tl.float32)

    width = tl.rsqrt(tl.sum(total * total, axis=0) / H + eps)
    normed = ((total * width).to(out.dtype.element_ty).to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + row * H + c, normed, mask=inside)
    value = normed.to(tl.float32)
    for i in tl.static_range(len(into_a)):
        if not EARLY:
            factor = _load_a(into_a[i], slot, inside & has, c, H, R, RS, RP)
        else:
            factor = factors[i]
        _store_dots(dots + (row * len(into_a) + i) * R, tl.where(has, _dot(value, factor, R), 0.0), R, RP)


@triton.jit
def _load_heads(
    base, bias, b, slot, has, AT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr,
    COUNT: tl.constexpr, HB: tl.constexpr, CB: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Load COUNT dimensions from FIRST of each head: columns, mask, values with the bias [HB, CB], rows of B."""
    h = tl.arange(0, HB)[:, None]
    j = tl.arange(0, CB)[None, :]
    n = h * D + FIRST + j
    inside = (h < HEADS) & (j < COUNT)
    value = _load_sum(base, bias, n, inside, AT)
    return n, inside, value, _load_b(b, slot, inside & has, n, HEADS * D, R, RS, RP)


@triton.jit
def _load_sum(base, bias, n, inside, AT: tl.constexpr):
    value = tl.load(base + n, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + AT + n, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _load_weight(weight, FIRST: tl.constexpr, COUNT: tl.constexpr, CB: tl.constexpr):
    j = tl.arange(0, CB)
    return tl.load(weight + FIRST + j, mask=j < COUNT, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _turn(
    base, one, two, rest, dots, cosine, sine, weight, own, eps,
    W_STRIDE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, CB: tl.constexpr, RB: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Add the members' low-rank term to some heads, normalise each head if there is a weight, apply RoPE, and store."""
    first = one[2] + _expand(dots, one[3], R)
    second = two[2] + _expand(dots, two[3], R)
    if RB > 0:
        third = rest[2] + _expand(dots, rest[3], R)
    if weight is not None:
        weight += own * W_STRIDE
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if RB > 0:
            squares += tl.sum(third * third, axis=1)
        width = tl.rsqrt(squares / D + eps)[:, None]
        first *= width * _load_weight(weight, 0, HALF, CB)
        second *= width * _load_weight(weight, HALF, HALF, CB)
        if RB > 0:
            third *= width * _load_weight(weight, 2 * HALF, D - 2 * HALF, RB)
    tl.store(base + one[0], (first * cosine - second * sine).to(base.dtype.element_ty), mask=one[1])
    tl.store(base + two[0], (second * cosine + first * sine).to(base.dtype.element_ty), mask=two[1])
    if RB > 0:
        tl.store(base + rest[0], third.to(base.dtype.element_ty), mask=rest[1])


@triton.jit(do_not_specialize_on_alignment=["members", "positions"])
def _rotate(
    qkv, positions, cos_sin, dots, b, members, q_norm, k_norm, bias, eps, scaling,
    STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, RP: tl.constexpr,
    QB: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, CB: tl.constexpr, RB: tl.constexpr,
):  # fmt: skip
    """For one row: the terms of q, k and v, the norms, the rotation. RB > 0: part of each head is not rotated."""
    row = tl.program_id(0).to(tl.int64)
    has, slot = _load_member(members, row)
    position = tl.load(positions + row).to(tl.int64)
    own = tl.where(has, slot + 1, 0)
    if bias is not None:
        bias += own * ((HQ + 2 * HK) * D)
    q = qkv + row * STRIDE
    k = q + HQ * D
    v = k + HK * D
    n = tl.arange(0, VB)
    inside = n < HK * D
    value = _load_sum(v, bias, n, inside, (HQ + HK) * D)
    to_q = tl.where(has, _load_dots(dots + row * (3 * R), R, RP) * scaling, 0.0)
    to_k = tl.where(has, _load_dots(dots + row * (3 * R) + R, R, RP) * scaling, 0.0)
    to_v = tl.where(has, _load_dots(dots + row * (3 * R) + 2 * R, R, RP) * scaling, 0.0)
    one_q = _load_heads(q, bias, b[0], slot, has, 0, HQ, D, 0, HALF, QB, CB, R, RS, RP)
    two_q = _load_heads(q, bias, b[0], slot, has, 0, HQ, D, HALF, HALF, QB, CB, R, RS, RP)
    one_k = _load_heads(k, bias, b[1], slot, has, HQ * D, HK, D, 0, HALF, KB, CB, R, RS, RP)
    two_k = _load_heads(k, bias, b[1], slot, has, HQ * D, HK, D, HALF, HALF, KB, CB, R, RS, RP)
    if RB > 0:
        rest_q = _load_heads(q, bias, b[0], slot, has, 0, HQ, D, 2 * HALF, D - 2 * HALF, QB, RB, R, RS, RP)
        rest_k = _load_heads(k, bias, b[1], slot, has, HQ * D, HK, D, 2 * HALF, D - 2 * HALF, KB, RB, R, RS, RP)
    else:
        rest_q = None
        rest_k = None
    up = _load_b(b[2], slot, inside & has, n, HK * D, R, RS, RP)
    cosine = _load_weight(cos_sin + position * (2 * HALF), 0, HALF, CB)
    sine = _load_weight(cos_sin + position * (2 * HALF), HALF, HALF, CB)
    _turn(q, one_q, two_q, rest_q, to_q, cosine, sine, q_norm, own, eps, Q_STRIDE, D, HALF, CB, RB, R)
    _turn(k, one_k, two_k, rest_k, to_k, cosine, sine, k_norm, own, eps, K_STRIDE, D, HALF, CB, RB, R)
    changed = inside & has & (R > 0) if bias is None else inside
    tl.store(v + n, (value + _expand(to_v, up, R)).to(qkv.dtype.element_ty), mask=changed)


@triton.jit(do_not_specialize_on_alignment=["members"])
def _gate(
    gate_up, out, dots, b, down_a, partials, members, scaling,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, NP: tl.constexpr,
    R: tl.constexpr, RS: tl.constexpr, RP: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """For one tile of one row: SwiGLU with both terms, and the tile's part of the dots of down_proj."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    c = tile * BI + tl.arange(0, BI)
    inside = c < WIDTH
    has, slot = _load_member(members, row)
    at = gate_up + row * STRIDE + c
    left = tl.load(at, mask=inside, other=0.0)
    right = tl.load(at + WIDTH, mask=inside, other=0.0)
    to_left = tl.where(has, _load_dots(dots + row * (2 * R), R, RP) * scaling, 0.0)
    to_right = tl.where(has, _load_dots(dots + row * (2 * R) + R, R, RP) * scaling, 0.0)
    b_left = _load_b(b[0], slot, inside & has, c, WIDTH, R, RS, RP)
    b_right = _load_b(b[1], slot, inside & has, c, WIDTH, R, RS, RP)
    if down_a is not None:
        down = _load_a(down_a, slot, inside & has, c, WIDTH, R, RS, RP)
    gated = left.to(tl.float32) + _expand(to_left, b_left, R)
    value = right.to(tl.float32) + _expand(to_right, b_right, R)
    value = (gated / (1.0 + tl.exp(-gated)) * value).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + c, value, mask=inside)
    if down_a is not None:
        taken = tl.where(has, _dot(value.to(tl.float32), down, R), 0.0)
        _store_dots(partials + (row * NP + tile) * R, taken, R, RP)


def _options(tiles: Tiles, rank: int, padded: int) -> dict[str, Any]:
    """Return the ranks and the compiler options of a launch. Above rank 1 there are no fused multiply-adds.

    A sum over ranks goes from lane to lane. A fused operation would round the two sides of an exchange differently, so
    that threads with the same number would differ in its last bit.
    """
    ranks = {"R": rank, "RS": padded, "RP": power(rank)}
    return {**ranks, "num_warps": tiles.warps, "enable_fp_fusion": rank <= 1}


def add(
    y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], terms: Terms, *, tiles: Tiles | None = None
) -> None:
    """See `population.add`."""
    _check((y, x), (*a, *b))
    rows, inner = x.shape
    outer, rank = tuple(one.shape[2] for one in b), terms.rank
    tiles = tiles or add_tiles(inner, max(outer), rows, rank, terms.fixed)
    shape = {"Y_STRIDE": y.stride(0), "X_STRIDE": x.stride(0), "K": inner, "NS": outer}
    shape |= {"BK": tiles.depth, "BNS": tuple(min(tiles.columns, power(n)) for n in outer), "GROUPS": tiles.groups}
    options = _options(tiles, rank, b[0].shape[3])
    _add[(rows, tiles.groups)](y, x, tuple(a), tuple(b), terms.members, float(terms.scaling), **shape, **options)


def norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    terms: Terms,
    into_a: Sequence[Tensor] = (),
    source: Dot | Partial | None = None,
    *,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """See `population.norm`."""
    (rows, width), rank = hidden.shape, terms.rank
    out = torch.empty((rows, width), dtype=hidden.dtype, device=hidden.device)
    dots = torch.empty((rows, len(into_a), rank), dtype=torch.float32, device=hidden.device)
    source, into_a = (source, into_a) if rank else (None, ())
    dot = source if isinstance(source, Dot) else None
    partial = source if isinstance(source, Partial) else None
    _check((hidden, residual, dot and dot.x), (*into_a, source and source.b, dot and dot.a, partial and partial.dots))
    inner = dot.x.shape[1] if dot else 1
    parts = partial.dots.shape[1] if partial else 1
    padded = source.b.shape[3] if source else into_a[0].shape[2] if into_a else rank
    tiles = tiles or norm_tiles(max(width, inner), rank, hidden.element_size())
    rows_of = (hidden, residual, weight, out, dots if into_a else None, terms.members)
    owed = (dot and dot.x, dot and dot.a, partial and partial.dots, source and source.b, tuple(into_a))
    strides = {"H_STRIDE": hidden.stride(0), "R_STRIDE": 0 if residual is None else residual.stride(0)}
    strides |= {"W_STRIDE": pitch(weight), "X_STRIDE": dot.x.stride(0) if dot else 0}
    shape = {"H": width, "K": inner, "NP": parts, "EARLY": rank <= 4}
    shape |= {"BH": power(width), "BK": power(inner), "NPB": power(parts)}
    options = _options(tiles, rank, padded)
    _norm[(rows,)](*rows_of, *owed, float(eps), float(terms.scaling), **strides, **shape, **options)
    return out, dots


def rotate(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, dots: Tensor, b: Sequence[Tensor], terms: Terms, heads: Heads,
    *, tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """See `population.rotate`."""
    _check((qkv,), (cos_sin, dots, *b, heads.q_norm, heads.k_norm, heads.bias))
    half, rank, width = cos_sin.shape[-1] // 2, terms.rank, heads.head_dim
    tiles = tiles or rotate_tiles(heads.heads, half, rank)
    tensors = (qkv, positions, cos_sin, dots, tuple(b), terms.members, heads.q_norm, heads.k_norm, heads.bias)
    shape = {"STRIDE": qkv.stride(0), "Q_STRIDE": pitch(heads.q_norm), "K_STRIDE": pitch(heads.k_norm)}
    shape |= {"HQ": heads.heads, "HK": heads.kv_heads, "D": width, "HALF": half}
    shape |= {"QB": power(heads.heads), "KB": power(heads.kv_heads), "VB": power(heads.kv_heads * width)}
    shape |= {"CB": power(half), "RB": power(width - 2 * half) if width > 2 * half else 0}
    options = _options(tiles, rank, b[0].shape[3])
    _rotate[(qkv.shape[0],)](*tensors, float(heads.eps), float(terms.scaling), **shape, **options)


def gate(
    gate_up: Tensor, dots: Tensor, b: Sequence[Tensor], down_a: Tensor | None, terms: Terms,
    *, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `population.gate`."""
    _check((gate_up,), (dots, *b, down_a))
    rows, width, rank = gate_up.shape[0], gate_up.shape[1] // 2, terms.rank
    tiles, down_a = tiles or gate_tiles(width, rank), down_a if rank else None
    count = -(-width // tiles.columns)
    parts = count if down_a is not None else 0
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    partials = torch.empty((rows, parts, rank), dtype=torch.float32, device=gate_up.device)
    tensors = (gate_up, out, dots, tuple(b), down_a, partials if parts else None, terms.members)
    shape = {"STRIDE": gate_up.stride(0), "WIDTH": width, "NP": parts, "BI": tiles.columns}
    options = _options(tiles, rank, b[0].shape[3])
    _gate[(rows, count)](*tensors, float(terms.scaling), **shape, **options)
    return out, partials


def _check(rows: Sequence[Tensor | None], whole: Sequence[Tensor | None]) -> None:
    """Raise ValueError for `rows` without consecutive columns, and for `whole` tensors that are not contiguous."""
    if any(t is not None and t.stride(-1) != 1 for t in rows):
        raise ValueError("population kernels need activations with consecutive columns")
    if any(t is not None and not t.is_contiguous() for t in whole):
        raise ValueError("population kernels need contiguous factors, dots and tables")
