# SPDX-License-Identifier: Apache-2.0
"""The population's functions in plain torch: the reference for the tests, and the fallback without Triton or C.

Shapes: T rows, S slots (one per member), RS the padded rank of the slots, R the rank in use. `a` is [S, 1, RS, K] and
`b` [S, 1, N, RS], as vLLM stacks them. A row's term is scaling * (x A^T) B^T. Arithmetic is float32, rounded where the
kernels round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

MAX_RANK = 16
"""Highest rank of the Triton and C kernels (`TERMS` in compiled.c). The functions here take any rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The members of a batch: the slot of each row, and how their low-rank terms are computed.

    `members` is int32 [T], the slot of each row, -1 for the base model. `rank` is the rank in use, 0 if members have no
    factors. `fixed` selects the same tiles for every T, so that a row's bits do not depend on the number of rows.
    """

    members: Tensor
    rank: int
    scaling: float = 1.0
    fixed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The attention heads: numbers of query and key-value heads, their width, and Qwen3's norms of q and k [width].

    A norm may be [S + 1, width], and `bias` [S + 1, N] is added to q, k and v: row 0 for rows without a member, row
    i + 1 for slot i.
    """

    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Dot:
    """The projection that computed `hidden`, with its input: x [T, K], a [S, 1, RS, K], b [S, 1, H, RS]."""

    x: Tensor
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """The projection that computed `hidden`, with partial dots: dots float32 [T, NP, R], b [S, 1, H, RS]."""

    dots: Tensor
    b: Tensor


def pitch(vectors: Tensor | None) -> int:
    """Return the distance between the vectors of two members; 0 if all rows share one vector, or None is given."""
    return vectors.stride(0) if vectors is not None and vectors.dim() == 2 else 0


def add(y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], terms: Terms) -> None:
    """See `population.add`."""
    start = 0
    for one_a, one_b in zip(a, b, strict=True):
        part = y[:, start : start + one_b.shape[2]]
        summed = part.float() + _expand(_dots(x, one_a, terms), one_b, terms)
        part.copy_(torch.where((terms.members >= 0)[:, None], summed.to(y.dtype), part))
        start += one_b.shape[2]


def norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    terms: Terms,
    into_a: Sequence[Tensor] = (),
    source: Dot | Partial | None = None,
) -> tuple[Tensor, Tensor]:
    """See `population.norm`."""
    total = hidden.float()
    if source is not None:
        taken = _dots(source.x, source.a, terms) if isinstance(source, Dot) else source.dots.sum(1)
        total = total + _expand(taken, source.b, terms)
    if residual is not None:
        total = total + residual.float()
    summed = total.to(hidden.dtype)
    if residual is not None:
        residual.copy_(summed)
    elif source is not None:
        hidden.copy_(summed)
    total = summed.float()
    total = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    out = (total.to(hidden.dtype).float() * _own(weight, terms).float()).to(hidden.dtype)
    dots = [_dots(out, one, terms) for one in into_a]
    empty = torch.empty(len(out), 0, terms.rank, dtype=torch.float32, device=out.device)
    return out, torch.stack(dots, dim=1) if dots else empty


def rotate(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, dots: Tensor, b: Sequence[Tensor], terms: Terms, heads: Heads
) -> None:
    """See `population.rotate`."""
    cosine, sine = cos_sin[positions].float()[:, None].chunk(2, dim=-1)
    half, width = cosine.shape[-1], heads.head_dim
    start = 0
    parts = ((heads.heads, heads.q_norm), (heads.kv_heads, heads.k_norm), (heads.kv_heads, None))
    for index, (count, weight) in enumerate(parts):
        columns = slice(start, start + count * width)
        part = qkv[:, columns]
        total = part.float() if heads.bias is None else part.float() + _own(heads.bias, terms)[:, columns].float()
        total = total + _expand(dots[:, index], b[index], terms)
        total = total.view(-1, count, width)
        if weight is not None:
            gain = _own(weight, terms).float().view(-1, 1, width)
            total = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + heads.eps) * gain
        if index < 2:
            first, second, rest = total.split([half, half, width - 2 * half], dim=-1)
            total = torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)
        part.copy_(total.reshape(part.shape))
        start += count * width


def gate(
    gate_up: Tensor, dots: Tensor, b: Sequence[Tensor], down_a: Tensor | None, terms: Terms
) -> tuple[Tensor, Tensor]:
    """See `population.gate`. The partial dots are one part."""
    halves = gate_up.float().chunk(2, dim=-1)
    left, right = (h + _expand(dots[:, i], b[i], terms) for i, h in enumerate(halves))
    out = (functional.silu(left) * right).to(gate_up.dtype)
    if down_a is None:
        return out, torch.empty(len(out), 0, terms.rank, dtype=torch.float32, device=out.device)
    return out, _dots(out, down_a, terms)[:, None]


def _own(vectors: Tensor, terms: Terms) -> Tensor:
    """Return the vector of each row's member, [T, N], or the one vector [N] of all rows."""
    return vectors if vectors.dim() == 1 else vectors[terms.members.long() + 1]


def _dots(x: Tensor, a: Tensor, terms: Terms) -> Tensor:
    """Return x A^T of each row's member, float32 [T, R]; 0 for rows without a member."""
    slots, rows = terms.members.clamp(min=0).long(), x.float()
    # One product and sum per rank. With a GEMM, a row's bits would depend on the other rows.
    dots = [(rows * a[slots, 0, j].float()).sum(-1) for j in range(terms.rank)]
    if not dots:
        return rows.new_empty(len(rows), 0)
    return torch.stack(dots, dim=-1).masked_fill((terms.members < 0)[:, None], 0.0)


def _expand(dots: Tensor, b: Tensor, terms: Terms) -> Tensor:
    """Return scaling * dots B^T of each row's member, float32 [T, N]; 0 for rows without a member."""
    if not terms.rank:
        return dots.new_zeros(len(dots), b.shape[2])
    slots = terms.members.clamp(min=0).long()
    scaled = dots * terms.scaling
    total = scaled[:, :1] * b[slots, 0, :, 0].float()
    for j in range(1, dots.shape[1]):
        total += scaled[:, j, None] * b[slots, 0, :, j].float()
    return total.masked_fill_((terms.members < 0)[:, None], 0.0)
