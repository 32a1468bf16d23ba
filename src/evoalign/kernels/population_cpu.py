# SPDX-License-Identifier: Apache-2.0
"""The population's functions for a CPU and float32, in compiled C: one pass over each row, in cache.

Sums run over one row in one order, so a row's bits depend neither on the other rows nor on the vector width. Other
dtypes, tensors that are not contiguous, and an installation without the library use `reference`, which is slower and
has other last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evoalign.kernels import compiled, reference
from evoalign.kernels.reference import MAX_RANK, Dot, Heads, Partial, Terms

__all__ = ["Dot", "Heads", "Partial", "Terms", "add", "gate", "norm", "rotate"]


def _can_run(terms: Terms, factors: Sequence[torch.Tensor], *others: torch.Tensor | None) -> bool:
    """Return whether C can read all of these tensors."""
    for tensor in (*factors, *others):  # `all` with a generator would take as long as the kernel
        if tensor is not None and not (tensor.dtype == torch.float32 and tensor.is_contiguous()):
            return False
    members = terms.members
    return members.dtype == torch.int32 and members.is_contiguous() and terms.rank <= MAX_RANK and compiled.here()


def add(y: torch.Tensor, x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], terms: Terms) -> None:
    """See `population.add`."""
    if not _can_run(terms, (*a, *b), y, x):
        reference.add(y, x, a, b, terms)
        return
    start = 0
    for one_a, one_b in zip(a, b, strict=True):
        inner, outer, padded = x.shape[1], one_b.shape[2], one_b.shape[3]
        into, where = (y[:, start:], y.shape[1]), (terms.members, terms.rank, padded, terms.scaling)
        compiled.rows("add", len(y), outer + inner, *into, x, one_a, one_b, *where, inner, outer)
        start += outer


def norm(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    terms: Terms,
    into_a: Sequence[torch.Tensor] = (),
    source: Dot | Partial | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `population.norm`."""
    x = a = given = b = None
    if isinstance(source, Dot):
        x, a, b = source.x, source.a, source.b
    elif source is not None and source.dots.shape[1]:
        given, b = source.dots, source.b
    if not _can_run(terms, into_a, hidden, residual, weight, x, a, given, b):
        return reference.norm(hidden, residual, weight, eps, terms, into_a, source)
    count, width = hidden.shape
    padded = into_a[0].shape[2] if into_a else 0 if b is None else b.shape[3]
    out, dots = torch.empty_like(hidden), hidden.new_empty(count, len(into_a), terms.rank)
    projection = (x, a, 0 if x is None else x.shape[1], given, 0 if given is None else given.shape[1], b)
    into = (*into_a, *[None] * (3 - len(into_a)), len(into_a))
    where = (terms.members, terms.rank, padded, terms.scaling)
    compiled.rows("norm", count, 4 * width, hidden, residual, weight, eps, *where, width, *projection, *into, out, dots)
    return out, dots


def rotate(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    dots: torch.Tensor,
    b: Sequence[torch.Tensor],
    terms: Terms,
    heads: Heads,
) -> None:
    """See `population.rotate`."""
    norms = (heads.q_norm, heads.k_norm)
    if not _can_run(terms, b, qkv, cos_sin, dots, *norms) or positions.dtype != torch.int64:
        reference.rotate(qkv, positions, cos_sin, dots, b, terms, heads)
        return
    table, where = (cos_sin, cos_sin.shape[1]), (terms.members, terms.rank, b[0].shape[3], terms.scaling)
    counts = (heads.heads, heads.kv_heads, heads.head_dim)
    cost = 2 * qkv.shape[1]
    compiled.rows(
        "rotate", len(qkv), cost, qkv, positions.contiguous(), *table, dots, *b, *where, *counts, *norms, heads.eps
    )


def gate(
    gate_up: torch.Tensor, dots: torch.Tensor, b: Sequence[torch.Tensor], down_a: torch.Tensor | None, terms: Terms
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `population.gate`. The partial dots are one part."""
    if not _can_run(terms, b, gate_up, dots, down_a):
        return reference.gate(gate_up, dots, b, down_a, terms)
    count, inner = len(gate_up), gate_up.shape[1] // 2
    out, parts = gate_up.new_empty(count, inner), gate_up.new_empty(count, 0 if down_a is None else 1, terms.rank)
    where = (terms.members, terms.rank, b[0].shape[3], terms.scaling)
    compiled.rows("gate", count, 8 * inner, gate_up, dots, *b, down_a, *where, inner, out, parts)
    return out, parts
