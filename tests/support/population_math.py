# SPDX-License-Identifier: Apache-2.0
"""The computations of the population kernels in float64, and random inputs.

Nothing here imports the package. A row's own matrices are used one after another; nothing is shared or folded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Bounds on the relative error of the worst row: a few roundings. Triton's interpreter truncates to bfloat16."""
DEVICE_BOUNDS = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@dataclass
class Draw:
    """Random inputs. Memory that must not be read is NaN: ranks beyond the one in use, and the last slot."""

    rank: int
    padded: int
    dtype: torch.dtype
    device: str = "cpu"
    slots: int = 5
    seed: int = 0

    @property
    def bound(self) -> float:
        return (BOUNDS if self.device == "cpu" else DEVICE_BOUNDS)[self.dtype]

    def __post_init__(self):
        self._generator = torch.Generator(device=self.device).manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self._generator, device=self.device)
        return (drawn * scale).to(dtype or self.dtype)

    def a(self, inner: int) -> torch.Tensor:
        drawn = self.normal(self.slots, 1, self.padded, inner, scale=inner**-0.5)
        drawn[:, :, self.rank :] = torch.nan
        drawn[-1] = torch.nan
        return drawn

    def b(self, outer: int) -> torch.Tensor:
        drawn = self.normal(self.slots, 1, outer, self.padded, scale=self.rank**-0.5)
        drawn[..., self.rank :] = torch.nan
        drawn[-1] = torch.nan
        return drawn

    def members(self, rows: int) -> torch.Tensor:
        """Return slots in random order, with about a fifth of the rows without one; the first row has one."""
        drawn = torch.randint(-1, self.slots - 1, (rows,), generator=self._generator, device=self.device)
        drawn[0] = drawn[0].abs()
        return drawn.to(torch.int32)

    def dots(self, rows: int, layers: int) -> torch.Tensor:
        return self.normal(rows, layers, self.rank, dtype=torch.float32)


def matrix(a: torch.Tensor, b: torch.Tensor, slot: int, rank: int, scaling: float) -> torch.Tensor:
    """Return scaling * B A of one slot, float64 [N, K]."""
    return scaling * b[slot, 0, :, :rank].double() @ a[slot, 0, :rank].double()


def dotted(x: torch.Tensor, a: torch.Tensor, members: torch.Tensor, rank: int) -> torch.Tensor:
    """Return x A^T of each row, float64 [T, R]; 0 without a member."""
    out = torch.zeros(len(x), rank, dtype=torch.float64, device=x.device)
    for row, slot in enumerate(members.tolist()):
        if slot >= 0:
            out[row] = a[slot, 0, :rank].double() @ x[row].double()
    return out


def expanded(taken: torch.Tensor, b: torch.Tensor, members: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return scaling * dots B^T of each row, float64 [T, N]; 0 without a member."""
    rank = taken.shape[1]
    out = torch.zeros(len(taken), b.shape[2], dtype=torch.float64, device=b.device)
    for row, slot in enumerate(members.tolist()):
        if slot >= 0:
            out[row] = scaling * (b[slot, 0, :, :rank].double() @ taken[row].double())
    return out


def terms(
    x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], members: torch.Tensor, rank: int, s: float
) -> torch.Tensor:
    """Return the terms of `add`, float64 [T, sum N]."""
    return torch.cat([expanded(dotted(x, i, members, rank), j, members, s) for i, j in zip(a, b, strict=True)], dim=1)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm over the last dimension."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D]: dimension i with i + half, by angles [T, 2 * half] (cosines, then sines)."""
    half = angles.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        cosine, sine = angles[:, None, i].double(), angles[:, None, half + i].double()
        out[..., i] = x[..., i] * cosine - x[..., half + i] * sine
        out[..., half + i] = x[..., half + i] * cosine + x[..., i] * sine
    return out


def rotated(
    qkv: torch.Tensor, angles: torch.Tensor, heads: int, kv_heads: int, q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None, eps: float,
) -> torch.Tensor:  # fmt: skip
    """Normalise and rotate the heads of q and k in qkv (float64, terms added)."""
    parts = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    q, k, v = parts.split([heads, kv_heads, kv_heads], dim=1)
    q, k = (rms(z, w, eps) if w is not None else z for z, w in ((q, q_norm), (k, k_norm)))
    return torch.cat([turned(q, angles), turned(k, angles), v], dim=1).reshape(qkv.shape)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU."""
    left, right = gate_up.chunk(2, dim=-1)
    return left / (1 + (-left).exp()) * right


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative error of the worst row; infinite if anything is NaN."""
    got, want = got.double().reshape(len(got), -1), want.double().reshape(len(want), -1)
    if not got.isfinite().all():
        return float("inf")
    return float(((got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-12)).max())


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest error relative to the root mean square, because sums may be near zero."""
    if not got.isfinite().all():
        return float("inf")
    return float((got.double() - want).abs().max() / want.square().mean().sqrt())


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether the bits are the same, including NaN and the sign of zero."""
    width = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return torch.equal(left.contiguous().view(width), right.contiguous().view(width))
