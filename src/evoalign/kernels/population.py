# SPDX-License-Identifier: Apache-2.0
"""Members' low-rank terms, fused into the kernels of a transformer layer.

Each row of a batch has its member's low-rank term, y += scaling * (x A^T) B^T, on each linear layer. The products are
thin, so the cost is in launches and in passes over the activations. For a layer as in Llama or Qwen the terms need
neither. The RMSNorm also computes the dots of its output row with the A of the next projection. The rotation and the
SwiGLU add the pending term of the projection before them (dots times B). The next norm does so for `o_proj` and
`down_proj`:

    norm -> [qkv GEMM] -> rotate -> [attention, o GEMM] -> norm -> [gate_up GEMM] -> gate -> [down GEMM] -> norm ...

`add` is for any linear layer, with one launch each. Shapes: T rows, S slots (one per member), RS the padded rank of the
slots, R <= RS the rank in use, 1 to 16. `a` is [S, 1, RS, K] and `b` [S, 1, N, RS], contiguous, as vLLM stacks them.
With rank 0 members have no factors, and no term is computed (`add` is not for it). Rows without a member get the plain
function. Terms are summed in float32 and rounded together with their sum. The functions do not synchronise and allocate
only their results, so a CUDA graph can hold them; factors and members may change between its replays.

Members may also have their own gains of the norms and biases of q, k and v: tensors [S + 1, N], whose row 0 is for rows
without a member and row i + 1 for slot i.

Each function runs in Triton if `kernels.available`, else on a CPU in compiled C if it supports the tensors (float32 and
contiguous), else in plain torch (`reference`). C makes one pass over each row, in cache. Its sums run over one row in
one order, so a row's bits depend neither on the other rows nor on the vector width, but they are not those of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from evoalign import kernels
from evoalign.kernels import compiled, reference
from evoalign.kernels.reference import MAX_RANK, Dot, Heads, Partial, Terms, pitch

__all__ = ["MAX_RANK", "Dot", "Heads", "Partial", "Terms", "add", "gate", "norm", "rotate", "warm_up"]


def add(y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], terms: Terms) -> None:
    """Add scaling * (x A_i^T) B_i^T to y [T, sum N_i], in place, for one to three layers with the input x [T, K]."""
    if kernels.available(y.device):
        _triton().add(y, x, a, b, terms)
        return
    if not _in_c(y, terms, a, b, (x,)):
        reference.add(y, x, a, b, terms)
        return
    start = 0
    for one_a, one_b in zip(a, b, strict=True):
        inner, outer, padded = x.shape[1], one_b.shape[2], one_b.shape[3]
        into, where = (y[:, start:], y.shape[1]), (terms.members, terms.rank, padded, terms.scaling)
        compiled.rows("add", len(y), outer + inner, *into, x, one_a, one_b, *where, inner, outer)
        start += outer


def norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    terms: Terms,
    into_a: Sequence[Tensor] = (),
    source: Dot | Partial | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, dots): RMSNorm of hidden [T, H] plus the pending term of `source` plus the residual.

    The sum is written to `residual`, in place; if that is None, `hidden` is the residual itself. `weight` is [H], or
    [S + 1, H] if each member has its own. `dots` is float32 [T, len(into_a), R]: the output row with each A of the next
    projection.
    """
    if kernels.available(hidden.device):
        return _triton().norm(hidden, residual, weight, eps, terms, into_a, source)
    x = a = given = b = None
    if isinstance(source, Dot):
        x, a, b = source.x, source.a, source.b
    elif source is not None and source.dots.shape[1]:
        given, b = source.dots, source.b
    if not _in_c(hidden, terms, into_a, (residual, weight, x, a, given, b)):
        return reference.norm(hidden, residual, weight, eps, terms, into_a, source)
    count, width = hidden.shape
    padded = into_a[0].shape[2] if into_a else 0 if b is None else b.shape[3]
    out, dots = torch.empty_like(hidden), hidden.new_empty(count, len(into_a), terms.rank)
    projection = (x, a, 0 if x is None else x.shape[1], given, 0 if given is None else given.shape[1], b)
    into = (*into_a, *[None] * (3 - len(into_a)), len(into_a))
    where = (terms.members, terms.rank, padded, terms.scaling)
    given = (hidden, residual, weight, pitch(weight), eps, *where, width, *projection, *into, out, dots)
    compiled.rows("norm", count, 4 * width, *given)
    return out, dots


def rotate(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, dots: Tensor, b: Sequence[Tensor], terms: Terms, heads: Heads
) -> None:
    """Add biases and terms of q, k and v (dots [T, 3, R]), apply the norms of q and k if given, and rotate; in place.

    A bias is added in float32, to a product that is already rounded: one rounding more than in a product with its bias.
    qkv is [T, (heads + 2 * kv_heads) * head_dim]. The rotation is in halves (NeoX), by cos_sin [positions, rotary_dim]
    with cosines first. Dimensions beyond rotary_dim are not rotated.
    """
    if kernels.available(qkv.device):
        _triton().rotate(qkv, positions, cos_sin, dots, b, terms, heads)
        return
    norms = (heads.q_norm, heads.k_norm)
    if not _in_c(qkv, terms, b, (cos_sin, dots, heads.bias, *norms)) or positions.dtype != torch.int64:
        reference.rotate(qkv, positions, cos_sin, dots, b, terms, heads)
        return
    into = (qkv, positions.contiguous(), cos_sin, cos_sin.shape[1], dots, *b)
    where = (terms.members, terms.rank, b[0].shape[3], terms.scaling)
    counts = (heads.heads, heads.kv_heads, heads.head_dim)
    own = (norms[0], pitch(norms[0]), norms[1], pitch(norms[1]), heads.bias, heads.eps)
    compiled.rows("rotate", len(qkv), 2 * qkv.shape[1], *into, *where, *counts, *own)


def gate(
    gate_up: Tensor, dots: Tensor, b: Sequence[Tensor], down_a: Tensor | None, terms: Terms
) -> tuple[Tensor, Tensor]:
    """Return (out [T, I], partial dots): SwiGLU of gate_up [T, 2 I] with the terms of both (dots [T, 2, R]).

    The partial dots, float32 [T, NP, R], are of the output with `down_a`, one per tile; pass them to the next norm as
    `Partial`. Without `down_a` NP is 0.
    """
    if kernels.available(gate_up.device):
        return _triton().gate(gate_up, dots, b, down_a, terms)
    if not _in_c(gate_up, terms, b, (dots, down_a)):
        return reference.gate(gate_up, dots, b, down_a, terms)
    count, inner = len(gate_up), gate_up.shape[1] // 2
    out, parts = gate_up.new_empty(count, inner), gate_up.new_empty(count, 0 if down_a is None else 1, terms.rank)
    where = (terms.members, terms.rank, b[0].shape[3], terms.scaling)
    compiled.rows("gate", count, 8 * inner, gate_up, dots, *b, down_a, *where, inner, out, parts)
    return out, parts


def warm_up(
    device: torch.device | str,
    dtype: torch.dtype,
    heads: Heads,
    *,
    hidden: int,
    intermediate: int,
    rank: int,
    padded_rank: int,
    rotary_dim: int | None = None,
    cos_sin_dtype: torch.dtype | None = None,
    fixed: bool = False,
) -> None:
    """Compile every kernel that a model of this shape uses, so that no rollout waits for the compiler."""
    if not kernels.available(torch.device(device)):
        return
    q, kv = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim

    def zeros(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=like, device=device)

    a = {inner: zeros(1, 1, padded_rank, inner) for inner in (hidden, q, intermediate)}
    b = {outer: zeros(1, 1, outer, padded_rank) for outer in (hidden, q, kv, intermediate)}
    a_qkv, b_qkv, a_gate, b_gate = (a[hidden],) * 3, (b[q], b[kv], b[kv]), (a[hidden],) * 2, (b[intermediate],) * 2
    weight, table = zeros(hidden), zeros(1, rotary_dim or heads.head_dim, like=cos_sin_dtype or dtype)
    for rows in row_sizes(device):
        terms = Terms(torch.full((rows,), -1, dtype=torch.int32, device=device), rank, fixed=fixed)
        x, residual, into, wide = zeros(rows, hidden), zeros(rows, hidden), zeros(rows, q), zeros(rows, intermediate)
        qkv, gate_up = zeros(rows, q + 2 * kv), zeros(rows, 2 * intermediate)
        _, dots = norm(x, None, weight, 1e-6, terms, a_qkv)
        rotate(qkv, zeros(rows, like=torch.int64), table, dots, b_qkv, terms, heads)
        _, dots = norm(x, residual, weight, 1e-6, terms, a_gate, Dot(into, a[q], b[hidden]))
        _, partial = gate(gate_up, dots, b_gate, a[intermediate], terms)
        for into_a in (a_qkv, ()):
            norm(x, residual, weight, 1e-6, terms, into_a, Partial(partial, b[hidden]))
        add(qkv, x, a_qkv, b_qkv, terms)
        add(x, into, (a[q],), (b[hidden],), terms)
        add(gate_up, x, a_gate, b_gate, terms)
        add(x, wide, (a[intermediate],), (b[hidden],), terms)


def row_sizes(device: torch.device | str) -> tuple[int, ...]:
    """Return one number of rows per choice of tiles: after a run with each, the kernel is compiled for all."""
    return _triton().row_sizes() if kernels.available(torch.device(device)) else (1,)


@cache
def _triton() -> ModuleType:
    from evoalign.kernels import population_triton  # imported late: evoalign also runs without Triton

    return population_triton


def _in_c(first: Tensor, terms: Terms, *tensors: Sequence[Tensor | None]) -> bool:
    """Return whether C can read all of these tensors."""
    if first.device.type != "cpu" or terms.rank > MAX_RANK or not compiled.here():
        return False
    for group in ((first,), *tensors):  # `all` with a generator would take as long as the kernel
        for tensor in group:
            if tensor is not None and not (tensor.dtype == torch.float32 and tensor.is_contiguous()):
                return False
    return terms.members.dtype == torch.int32 and terms.members.is_contiguous()
