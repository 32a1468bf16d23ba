# SPDX-License-Identifier: Apache-2.0
"""The population's functions for a CPU and float32: those of `reference`, with fewer passes and hardly a copy.

Rows of a batch lie by member. Where all members have as many rows, one after another, their factors are broadcast over
the rows and never copied; otherwise they are gathered, row by row. Sums run over one row alone, in one order, so that
a row's bits depend neither on the rows beside it nor on which of the two it was. Other dtypes, and batches in which
only some rows have a member, go to `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import rms_norm, silu

from evoalign.kernels import reference
from evoalign.kernels.reference import Dot, Partial

__all__ = ["Dot", "Partial", "add", "gate", "norm", "rotate"]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Whose the rows are: `groups` slots from `first` on with as many rows each, or each row's own of `slots`."""

    groups: int
    first: int
    slots: torch.Tensor | None

    def by_group(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, N] as [G, T / G, N]; each row is a group where they are not even."""
        return rows.view(self.groups, -1, rows.shape[1])

    def of_a(self, a: torch.Tensor, j: int) -> torch.Tensor:
        """Rank j of [S, 1, RS, K], as rows by group are multiplied with it: [G, 1, K]."""
        return self._factor(a, a.shape[3], j * a.shape[3], 1)

    def of_b(self, b: torch.Tensor, j: int) -> torch.Tensor:
        """Rank j of [S, 1, N, RS], likewise: [G, 1, N]."""
        return self._factor(b, b.shape[2], j, b.shape[3])

    def _factor(self, whole: torch.Tensor, width: int, start: int, step: int) -> torch.Tensor:
        # One view, where a chain of indexing would make five, which take longer than the product.
        size, start = whole.stride(0), int(whole.storage_offset()) + start
        if self.slots is None:
            return whole.as_strided((self.groups, 1, width), (size, width, step), start + self.first * size)
        return whole.as_strided((len(whole), 1, width), (size, width, step), start).index_select(0, self.slots)


NOBODY = _Rows(0, 0, None)


@lru_cache(maxsize=256)
def _arranged(members: bytes) -> _Rows | None:
    """By the numbers of the rows' slots. None where some rows have a member and some have none."""
    numbers = torch.frombuffer(bytearray(members), dtype=torch.int32)
    least, first = int(numbers.min()), int(numbers[0])
    if least < 0:
        return NOBODY if int(numbers.max()) < 0 else None
    groups = int(numbers[-1]) - first + 1
    if groups > 0 and len(numbers) % groups == 0:
        even = torch.arange(first, first + groups, dtype=torch.int32).repeat_interleave(len(numbers) // groups)
        if torch.equal(numbers, even):
            return _Rows(groups, first, None)
    return _Rows(len(numbers), 0, numbers.long())


def _rows(like: torch.Tensor, members: torch.Tensor) -> _Rows | None:
    """None: `reference` has to do it."""
    return _arranged(members.numpy().tobytes()) if like.dtype == torch.float32 and len(members) else None


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
    rows = _rows(y, members)
    if rows is None:
        reference.add(y, x, a, b, members, rank=rank, scaling=scaling, fixed=fixed)
        return
    start = 0
    for one_a, one_b in zip(a, b, strict=True):
        part = y[:, start : start + one_b.shape[2]]
        if rows.groups:
            _expand(part, _dots(x, (one_a,), rows, rank)[:, 0], one_b, rows, scaling, out=part)
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
    rows = _rows(hidden, members)
    if rows is None:
        return reference.norm(
            hidden, residual, weight, eps, members,
            rank=rank, scaling=scaling, fixed=fixed, into_a=into_a, source=source,
        )  # fmt: skip
    total = hidden if residual is None else residual.add_(hidden)
    if source is not None and rows.groups:
        if isinstance(source, Dot):
            taken = _dots(source.x, (source.a,), rows, rank)[:, 0]
        else:
            taken = source.dots[:, 0] if source.dots.shape[1] == 1 else source.dots.sum(1)
        _expand(total, taken, source.b, rows, scaling, out=total)
    out = rms_norm(total, (total.shape[-1],), weight, eps)
    return out, _dots(out, into_a, rows, rank)


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
    rows = _rows(qkv, members)
    if rows is None:
        reference.rotate(
            qkv, positions, cos_sin, dots, b, members, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            rank=rank, scaling=scaling, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        return
    if rows.groups:
        start = 0
        for index, one in enumerate(b):
            part = qkv[:, start : start + one.shape[2]]
            _expand(part, dots[:, index], one, rows, scaling, out=part)
            start += one.shape[2]
    parts = qkv.view(len(qkv), -1, head_dim)
    for first, last, weight in ((0, heads, q_norm), (heads, heads + kv_heads, k_norm)):
        if weight is not None:
            parts[:, first:last] = rms_norm(parts[:, first:last], (head_dim,), weight, eps)
    half = cos_sin.shape[-1] // 2
    cosine, sine = cos_sin.index_select(0, positions).float()[:, None].split(half, dim=-1)
    turned = parts[:, : heads + kv_heads]
    first, second = turned[..., :half], turned[..., half : 2 * half]
    crossed = first * sine
    first.mul_(cosine).addcmul_(second, sine, value=-1)
    second.mul_(cosine).add_(crossed)


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
    rows = _rows(gate_up, members)
    if rows is None:
        return reference.gate(gate_up, dots, b, down_a, members, rank=rank, scaling=scaling, fixed=fixed)
    left, right = gate_up.chunk(2, dim=-1)
    if rows.groups:
        left, right = (_expand(h, dots[:, i], b[i], rows, scaling) for i, h in enumerate((left, right)))
    out = silu(left).mul_(right)
    return out, _dots(out, () if down_a is None else (down_a,), rows, rank)


def _dots(x: torch.Tensor, a: Sequence[torch.Tensor], rows: _Rows, rank: int) -> torch.Tensor:
    """x A^T with each of `a`, by member: [T, len(a), R]; 0 without members."""
    if not rows.groups or not a:
        return x.new_zeros(len(x), len(a), rank)
    by_group = rows.by_group(x)
    found = [(by_group * rows.of_a(one, j)).sum(-1) for one in a for j in range(rank)]
    whole = found[0] if len(found) == 1 else torch.stack(found, dim=-1)
    return whole.view(len(x), len(a), rank)


def _expand(
    y: torch.Tensor, dots: torch.Tensor, b: torch.Tensor, rows: _Rows, scaling: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """y [T, N] + scaling * dots B^T by member, of dots [T, R]; to `out`, which may be y itself."""
    total = rows.by_group(y)
    into = None if out is None else rows.by_group(out)
    for j in range(dots.shape[1]):
        into = total = torch.addcmul(total, rows.by_group(dots[:, j : j + 1]), rows.of_b(b, j), value=scaling, out=into)
    return total.view(y.shape)
