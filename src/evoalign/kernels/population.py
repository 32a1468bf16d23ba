# SPDX-License-Identifier: Apache-2.0
"""What members of a population add to a transformer's layer, folded into the kernels that run there anyway.

Every row of a batch has its member's low-rank term, y += scaling * (x A^T) B^T, on each linear layer. The products are
thin: what costs is launches and passes over the activations. So a block of Llama's or Qwen's kind needs neither: the
RMSNorm takes the dots of the row that it writes with the next projection's A, the rotation and the SwiGLU add what the
projection before them owes (dots times B), and the next norm does so for `o_proj` and `down_proj`:

    norm -> [qkv GEMM] -> rotate -> [attention, o GEMM] -> norm -> [gate_up GEMM] -> gate -> [down GEMM] -> norm ...

`add` is the form for any linear layer, one launch each. Shapes: T rows, S slots (one a member), RS the padded rank of
the slots, R <= RS the rank in use, 1 to 16. `members` is int32 [T], the slot of each row, -1 for the base model: such
rows get the plain function. `a` is [S, 1, RS, K], `b` [S, 1, N, RS], contiguous, as vLLM stacks them. Terms are summed
in float32 and rounded with what they are added to. `fixed` takes the same tiles for every T, so that a row's bits do
not depend on the rows beside it. Nothing here waits for the device, or allocates more than its results: a CUDA graph
can hold it, and factors and members may change between its replays.

Triton's kernels run where `kernels.available` says so, and compiled C on a CPU (`population_cpu`), which leaves to
plain torch (`reference`) what it is not made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch

from evoalign import kernels
from evoalign.kernels import population_cpu, reference
from evoalign.kernels.reference import MAX_RANK, Dot, Partial

__all__ = ["MAX_RANK", "Dot", "Partial", "add", "gate", "norm", "rotate", "warm_up"]


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
    """y [T, sum N_i] += scaling * (x A_i^T) B_i^T, in place, for the one to three layers that read x [T, K] as one."""
    _form(y).add(y, x, a, b, members, rank=rank, scaling=scaling, fixed=fixed)


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
    """RMSNorm of hidden [T, H] plus what its projection (`source`) owes plus the residual: (out, dots).

    The sum goes to `residual`, in place; where that is None, `hidden` is the residual itself. `dots` is float32
    [T, len(into_a), R]: of the normed row with each A of the projection that reads it.
    """
    return _form(hidden).norm(
        hidden, residual, weight, eps, members,
        rank=rank, scaling=scaling, fixed=fixed, into_a=into_a, source=source,
    )  # fmt: skip


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
    """Add the terms of q, k and v (dots [T, 3, R]), norm q's and k's heads where weights are given, rotate; in place.

    qkv is [T, (heads + 2 * kv_heads) * head_dim]. The rotation is NeoX's: halves, by cos_sin [positions, rotary_dim],
    cosines first; dimensions beyond rotary_dim stay. q_norm and k_norm [head_dim] are Qwen3's.
    """
    _form(qkv).rotate(
        qkv, positions, cos_sin, dots, b, members, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        rank=rank, scaling=scaling, q_norm=q_norm, k_norm=k_norm, eps=eps,
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
    """SwiGLU of gate_up [T, 2 I] with the terms of both (dots [T, 2, R]): (out [T, I], partial dots).

    The partial dots, float32 [T, NP, R], are of the result with `down_a`, one a tile: `Partial` hands them to the next
    norm. Without `down_a` NP is 0.
    """
    return _form(gate_up).gate(gate_up, dots, b, down_a, members, rank=rank, scaling=scaling, fixed=fixed)


def warm_up(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rank: int,
    padded_rank: int,
    rotary_dim: int | None = None,
    cos_sin_dtype: torch.dtype | None = None,
    qk_norm: bool = False,
    fixed: bool = False,
) -> None:
    """Compile every kernel that a model of this shape calls, so that no rollout waits for a compiler."""
    if not kernels.available(torch.device(device)):
        return
    rotary_dim = rotary_dim or head_dim
    width = (heads + 2 * kv_heads) * head_dim
    q, kv = heads * head_dim, kv_heads * head_dim

    def zeros(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=like, device=device)

    def a(inner: int) -> torch.Tensor:
        return zeros(1, 1, padded_rank, inner)

    def b(outer: int) -> torch.Tensor:
        return zeros(1, 1, outer, padded_rank)

    head_norm = zeros(head_dim) if qk_norm else None
    a_qkv, b_qkv, a_gate, b_gate = (a(hidden),) * 3, (b(q), b(kv), b(kv)), (a(hidden),) * 2, (b(intermediate),) * 2
    a_o, a_down, b_hidden, weight = a(q), a(intermediate), b(hidden), zeros(hidden)
    for rows in row_sizes(device):
        members = torch.full((rows,), -1, dtype=torch.int32, device=device)
        x, residual, into, wide = zeros(rows, hidden), zeros(rows, hidden), zeros(rows, q), zeros(rows, intermediate)
        qkv, gate_up = zeros(rows, width), zeros(rows, 2 * intermediate)
        _, dots = norm(x, None, weight, 1e-6, members, into_a=a_qkv, rank=rank, fixed=fixed)
        rotate(
            qkv, zeros(rows, like=torch.int64), zeros(1, rotary_dim, like=cos_sin_dtype or dtype), dots, b_qkv, members,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, rank=rank, q_norm=head_norm, k_norm=head_norm,
        )  # fmt: skip
        _, dots = norm(
            x, residual, weight, 1e-6, members, into_a=a_gate, source=Dot(into, a_o, b_hidden), rank=rank, fixed=fixed
        )
        _, partial = gate(gate_up, dots, b_gate, a_down, members, rank=rank, fixed=fixed)
        source = Partial(partial, b_hidden)
        norm(x, residual, weight, 1e-6, members, into_a=a_qkv, source=source, rank=rank, fixed=fixed)
        norm(x, residual, weight, 1e-6, members, source=source, rank=rank, fixed=fixed)
        add(qkv, x, a_qkv, b_qkv, members, rank=rank, fixed=fixed)
        add(x, into, (a_o,), (b_hidden,), members, rank=rank, fixed=fixed)
        add(gate_up, x, a_gate, b_gate, members, rank=rank, fixed=fixed)
        add(x, wide, (a_down,), (b_hidden,), members, rank=rank, fixed=fixed)


def row_sizes(device: torch.device | str) -> tuple[int, ...]:
    """One number of rows for each choice of tiles: a kernel that has run for these is compiled for all."""
    return _triton().row_sizes() if kernels.available(torch.device(device)) else (1,)


@cache
def _triton() -> ModuleType:
    """The kernels; imported late, because evoalign runs without Triton too."""
    from evoalign.kernels import population_triton

    return population_triton


def _form(tensor: torch.Tensor) -> ModuleType:
    if kernels.available(tensor.device):
        return _triton()
    return population_cpu if tensor.device.type == "cpu" else reference
