# SPDX-License-Identifier: Apache-2.0
"""The population's functions for a CPU and float32, in compiled C: one pass over a row each, in cache.

Sums run over one row alone, in one order, so that a row's bits depend neither on the rows beside it nor on the
machine's vectors. Other dtypes, what is not contiguous, and an evoalign without its library go to `reference`, which
is slower and has other last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evoalign.kernels import compiled, reference
from evoalign.kernels.reference import MAX_RANK, Dot, Partial

__all__ = ["Dot", "Partial", "add", "gate", "norm", "rotate"]


def _takes(members: torch.Tensor, rank: int, factors: Sequence[torch.Tensor], *others: torch.Tensor | None) -> bool:
    """Whether C can read all of it."""
    for tensor in (*factors, *others):  # a generator would take as long as what is asked for
        if tensor is not None and not (tensor.dtype == torch.float32 and tensor.is_contiguous()):
            return False
    return members.dtype == torch.int32 and members.is_contiguous() and rank <= MAX_RANK and compiled.here()


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
    if not _takes(members, rank, (*a, *b), y, x):
        reference.add(y, x, a, b, members, rank=rank, scaling=scaling, fixed=fixed)
        return
    start = 0
    for one_a, one_b in zip(a, b, strict=True):
        compiled.rows(
            "add", len(y), one_b.shape[2] + x.shape[1], y[:, start:], y.shape[1], x, one_a, one_b, members, rank,
            one_b.shape[3], scaling, x.shape[1], one_b.shape[2],
        )  # fmt: skip
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
    x = a = given = b = None
    if isinstance(source, Dot):
        x, a, b = source.x, source.a, source.b
    elif source is not None and source.dots.shape[1]:
        given, b = source.dots, source.b
    if not _takes(members, rank, into_a, hidden, residual, weight, x, a, given, b):
        return reference.norm(
            hidden, residual, weight, eps, members,
            rank=rank, scaling=scaling, fixed=fixed, into_a=into_a, source=source,
        )  # fmt: skip
    count, width = hidden.shape
    padded = into_a[0].shape[2] if into_a else 0 if b is None else b.shape[3]
    out, dots = torch.empty_like(hidden), hidden.new_empty(count, len(into_a), rank)
    compiled.rows(
        "norm", count, 4 * width, hidden, residual, weight, eps, members, rank, padded, scaling, width, x, a,
        0 if x is None else x.shape[1], given, 0 if given is None else given.shape[1], b,
        *into_a, *[None] * (3 - len(into_a)), len(into_a), out, dots,
    )  # fmt: skip
    return out, dots


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
    if not _takes(members, rank, b, qkv, cos_sin, dots, q_norm, k_norm) or positions.dtype != torch.int64:
        reference.rotate(
            qkv, positions, cos_sin, dots, b, members, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            rank=rank, scaling=scaling, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        return
    compiled.rows(
        "rotate", len(qkv), 2 * qkv.shape[1], qkv, positions.contiguous(), cos_sin, cos_sin.shape[1], dots, *b,
        members, rank, b[0].shape[3], scaling, heads, kv_heads, head_dim, q_norm, k_norm, eps,
    )  # fmt: skip


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
    if not _takes(members, rank, b, gate_up, dots, down_a):
        return reference.gate(gate_up, dots, b, down_a, members, rank=rank, scaling=scaling, fixed=fixed)
    count, inner = len(gate_up), gate_up.shape[1] // 2
    out, parts = gate_up.new_empty(count, inner), gate_up.new_empty(count, 0 if down_a is None else 1, rank)
    compiled.rows(
        "gate", count, 8 * inner, gate_up, dots, *b, down_a, members, rank, b[0].shape[3], scaling, inner, out, parts
    )
    return out, parts
