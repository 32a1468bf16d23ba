# SPDX-License-Identifier: Apache-2.0
"""The population's functions in plain torch: what the Triton kernels are tested against, and the path without a GPU.

Shapes: T rows, S slots (one a member), RS the padded rank of the slots, R the rank in use. `members` is int32 [T], the
slot of each row, -1 for the base model. `a` is [S, 1, RS, K] and `b` [S, 1, N, RS], as vLLM stacks them; a row's term
is scaling * (x A^T) B^T. All is float32 inside, and rounded where the kernels round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

MAX_RANK = 16
"""The highest that the kernels take, and C (`TERMS`); these functions take any."""


@dataclass(frozen=True, slots=True)
class Dot:
    """The projection that made `hidden`, with its input: x [T, K], a [S, 1, RS, K], b [S, 1, H, RS]."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """The projection that made `hidden`, its dots taken in parts: dots float32 [T, NP, R], b [S, 1, H, RS]."""

    dots: torch.Tensor
    b: torch.Tensor


def add(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    members: torch.Tensor,
    *,
    rank: int,
    scaling: float = 1.0,
    fixed: bool = False,
) -> None:
    """See `population.add`."""
    start = 0
    for one_a, one_b in zip(a, b, strict=True):
        part = y[:, start : start + one_b.shape[2]]
        summed = part.float() + _expand(_dots(x, one_a, members, rank), one_b, members, scaling)
        part.copy_(torch.where((members >= 0)[:, None], summed.to(y.dtype), part))
        start += one_b.shape[2]


def norm(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    members: torch.Tensor,
    *,
    rank: int,
    scaling: float = 1.0,
    fixed: bool = False,
    into_a: Sequence[torch.Tensor] = (),
    source: Dot | Partial | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `population.norm`."""
    total = hidden.float()
    if source is not None:
        taken = _dots(source.x, source.a, members, rank) if isinstance(source, Dot) else source.dots.sum(1)
        total = total + _expand(taken, source.b, members, scaling)
    if residual is not None:
        total = total + residual.float()
    summed = total.to(hidden.dtype)
    if residual is not None:
        residual.copy_(summed)
    elif source is not None:
        hidden.copy_(summed)
    total = summed.float()
    total = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    out = (total.to(hidden.dtype).float() * weight.float()).to(hidden.dtype)
    dots = [_dots(out, one, members, rank) for one in into_a]
    empty = torch.empty(len(out), 0, rank, dtype=torch.float32, device=out.device)
    return out, torch.stack(dots, dim=1) if dots else empty


def rotate(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    dots: torch.Tensor,
    b: Sequence[torch.Tensor],
    members: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rank: int,
    scaling: float = 1.0,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """See `population.rotate`."""
    cosine, sine = cos_sin[positions].float()[:, None].chunk(2, dim=-1)
    half = cosine.shape[-1]
    start = 0
    for index, (count, weight) in enumerate(((heads, q_norm), (kv_heads, k_norm), (kv_heads, None))):
        part = qkv[:, start : start + count * head_dim]
        total = part.float() + _expand(dots[:, index], b[index], members, scaling)
        total = total.view(-1, count, head_dim)
        if weight is not None:
            total = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float()
        if index < 2:
            first, second, rest = total.split([half, half, head_dim - 2 * half], dim=-1)
            total = torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)
        part.copy_(total.reshape(part.shape))
        start += count * head_dim


def gate(
    gate_up: torch.Tensor,
    dots: torch.Tensor,
    b: Sequence[torch.Tensor],
    down_a: torch.Tensor | None,
    members: torch.Tensor,
    *,
    rank: int,
    scaling: float = 1.0,
    fixed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `population.gate`; the dots come in one part."""
    halves = gate_up.float().chunk(2, dim=-1)
    left, right = (h + _expand(dots[:, i], b[i], members, scaling) for i, h in enumerate(halves))
    out = (functional.silu(left) * right).to(gate_up.dtype)
    if down_a is None:
        return out, torch.empty(len(out), 0, rank, dtype=torch.float32, device=out.device)
    return out, _dots(out, down_a, members, rank)[:, None]


def _dots(x: torch.Tensor, a: torch.Tensor, members: torch.Tensor, rank: int) -> torch.Tensor:
    """x A^T by member, float32 [T, R]; 0 where a row has none."""
    slots, rows = members.clamp(min=0).long(), x.float()
    # One product and sum a rank: a row's bits then do not depend on the rows beside it, as a GEMM's would.
    dots = [(rows * a[slots, 0, j].float()).sum(-1) for j in range(rank)]
    return torch.stack(dots, dim=-1).masked_fill((members < 0)[:, None], 0.0)


def _expand(dots: torch.Tensor, b: torch.Tensor, members: torch.Tensor, scaling: float) -> torch.Tensor:
    """scaling * dots B^T by member, float32 [T, N]; 0 where a row has none."""
    slots = members.clamp(min=0).long()
    scaled = dots * scaling
    total = scaled[:, :1] * b[slots, 0, :, 0].float()
    for j in range(1, dots.shape[1]):
        total += scaled[:, j, None] * b[slots, 0, :, j].float()
    return total.masked_fill_((members < 0)[:, None], 0.0)
