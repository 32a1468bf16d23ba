# SPDX-License-Identifier: Apache-2.0
"""Checks of the population kernels, on CPUs and GPUs, against the same computations in float64.

In float64 a row's own matrices are used one after another; nothing is shared or folded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from evoalign.kernels import population
from evoalign.kernels.population import Dot, Heads, Partial, Terms

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


S = 0.75
"""The scaling of all checks."""


class Shape(NamedTuple):
    """Widths of a transformer's layer."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int


SMALL = Shape(72, 100, 3, 1, 16)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill fresh memory with NaN."""
    empty = torch.empty

    def full_of_nan(*args, **options):
        fresh = empty(*args, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", full_of_nan)


def check_add(draw: Draw, rows: int, inner: int, outer: Sequence[int]) -> None:
    members, y, x = draw.members(rows), draw.normal(rows, sum(outer)), draw.normal(rows, inner)
    a, b = [draw.a(inner) for _ in outer], [draw.b(n) for n in outer]
    want, before = y.double() + terms(x, a, b, members, draw.rank, S), y.clone()
    population.add(y, x, a, b, Terms(members, draw.rank, S))
    assert worst(y, want) < draw.bound
    assert same(y[members < 0], before[members < 0])


def source_of(kind: str, draw: Draw, members: torch.Tensor, width: int, inner: int):
    """Return a source of `norm`, and its term in float64."""
    b = draw.b(width)
    if kind == "dot":
        x, a = draw.normal(len(members), inner), draw.a(inner)
        return Dot(x, a, b), terms(x, [a], [b], members, draw.rank, S)
    if kind == "partial":
        parts = draw.dots(len(members), 5)
        return Partial(parts, b), expanded(parts.double().sum(1), b, members, S)
    return None, 0.0


def check_norm(
    draw: Draw, rows: int, kind: str, *, carried: bool = True, layers: int = 2, width: int = 72, inner: int = 44
) -> None:
    members, hidden, weight = draw.members(rows), draw.normal(rows, width), draw.normal(width)
    residual = draw.normal(rows, width) if carried else None
    into_a = [draw.a(width) for _ in range(layers)]
    source, term = source_of(kind, draw, members, width, inner)
    total = hidden.double() + term + (residual.double() if residual is not None else 0.0)
    kept = hidden.clone()
    out, dots = population.norm(hidden, residual, weight, 1e-5, Terms(members, draw.rank, S), into_a, source)
    assert worst(out, rms(total, weight, 1e-5)) < draw.bound
    assert worst(hidden if residual is None else residual, total) < draw.bound
    assert residual is None or same(hidden, kept)
    assert dots.shape == (rows, layers, draw.rank)
    assert dots.dtype == torch.float32
    for i, a in enumerate(into_a):
        assert apart(dots[:, i], dotted(out, a, members, draw.rank)) < 2e-5  # of the row as it was rounded


def check_rotate(draw: Draw, rows: int, heads: int, kv_heads: int, width: int, turning: int, *, qk_norm: bool) -> None:
    members, dots = draw.members(rows), draw.dots(rows, 3)
    counts = (heads, kv_heads, kv_heads)
    qkv, b = draw.normal(rows, sum(counts) * width), [draw.b(n * width) for n in counts]
    table = draw.normal(40, turning)
    positions = torch.arange(rows, device=qkv.device).mul(7).remainder(40)
    q_norm, k_norm = (draw.normal(width), draw.normal(width)) if qk_norm else (None, None)
    term = torch.cat([expanded(dots[:, i].double(), b[i], members, S) for i in range(3)], dim=1)
    want = rotated(qkv.double() + term, table[positions], heads, kv_heads, q_norm, k_norm, 1e-5)
    before = qkv.clone()
    shape = Heads(heads, kv_heads, width, q_norm, k_norm, 1e-5)
    population.rotate(qkv, positions, table, dots, b, Terms(members, draw.rank, S), shape)
    assert worst(qkv, want) < draw.bound
    v = slice((heads + kv_heads) * width, None)
    assert same(qkv[members < 0][:, v], before[members < 0][:, v])


def check_gate(draw: Draw, rows: int, width: int) -> None:
    members, dots = draw.members(rows), draw.dots(rows, 2)
    gate_up, b, down = draw.normal(rows, 2 * width), [draw.b(width), draw.b(width)], draw.a(width)
    term = torch.cat([expanded(dots[:, i].double(), b[i], members, S) for i in range(2)], dim=1)
    out, parts = population.gate(gate_up, dots, b, down, Terms(members, draw.rank, S))
    assert worst(out, gated(gate_up.double() + term)) < draw.bound
    assert parts.dtype == torch.float32
    assert apart(parts.double().sum(1), dotted(out, down, members, draw.rank)) < 2e-5


def everything(
    draw: Draw, shape: Shape, inputs: dict, rows: slice, members: torch.Tensor, *, fixed: bool
) -> list[torch.Tensor]:
    """Return the results of every function for some rows of `inputs`, with common factors, weights and tables."""
    x, residual, qkv, gate_up, wide, positions, dots = (
        inputs[k][rows].clone() for k in ("x", "residual", "qkv", "gate_up", "wide", "positions", "dots")
    )
    terms, heads = Terms(members, draw.rank, S, fixed), (shape.heads, shape.kv_heads, shape.head)
    a, b, weight, table = inputs["a"], inputs["b"], inputs["weight"], inputs["table"]
    norms = weight[: shape.head], weight[-shape.head :]
    first = population.norm(x, None, weight, 1e-5, terms, [a["x"]] * 3)
    population.rotate(qkv, positions, table, dots, [b["q"], b["kv"], b["kv"]], terms, Heads(*heads, *norms))
    gate = population.gate(gate_up, dots[:, :2].contiguous(), [b["i"], b["i"]], a["i"], terms)
    second = population.norm(x, residual, weight, 1e-5, terms, source=Partial(gate[1], b["x"]))
    carried = residual.clone()
    third = population.norm(x, residual, weight, 1e-5, terms, source=Dot(wide, a["wide"], b["x"]))
    population.add(gate_up, x, [a["x"]] * 2, [b["i"], b["i"]], terms)
    population.add(x, wide, [a["wide"]], [b["x"]], terms)
    return [*first, qkv, *gate, *second, carried, *third, residual, gate_up, x]


def check_row_alone(draw: Draw, shape: Shape, rows: int, chosen: Sequence[int]) -> None:
    """Some rows of a batch have the same bits when each is alone."""
    members, inputs = draw.members(rows), inputs_of(draw, shape, rows)
    members[chosen[1]] = -1
    together = everything(draw, shape, inputs, slice(None), members, fixed=True)
    for row in chosen:
        alone = everything(draw, shape, inputs, slice(row, row + 1), members[row : row + 1], fixed=True)
        assert all(same(one[0], all_[row]) for one, all_ in zip(alone, together, strict=True))


def check_plain_rows(draw: Draw, shape: Shape, members: torch.Tensor, inputs: dict) -> None:
    """Rows without member have the bits of a batch without members, whose factors are NaN."""
    mixed = everything(draw, shape, inputs, slice(None), members, fixed=False)
    for factors in (inputs["a"], inputs["b"]):
        for factor in factors.values():
            factor.fill_(torch.nan)
    plain = everything(draw, shape, inputs, slice(None), torch.full_like(members, -1), fixed=False)
    without = members < 0
    assert without.any()
    for left, right in zip(mixed, plain, strict=True):
        assert left[without].isfinite().all()
        assert same(left[without], right[without])


def inputs_of(draw: Draw, shape: Shape, rows: int) -> dict:
    """Return inputs for `everything`."""
    width, q, kv = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head
    return {
        "x": draw.normal(rows, width), "residual": draw.normal(rows, width), "wide": draw.normal(rows, q),
        "qkv": draw.normal(rows, q + 2 * kv), "gate_up": draw.normal(rows, 2 * shape.inner),
        "dots": draw.dots(rows, 3), "positions": torch.arange(rows, device=draw.device) % 40,
        "weight": draw.normal(width), "table": draw.normal(40, shape.head),
        "a": {"x": draw.a(width), "i": draw.a(shape.inner), "wide": draw.a(q)},
        "b": {"x": draw.b(width), "q": draw.b(q), "kv": draw.b(kv), "i": draw.b(shape.inner)},
    }  # fmt: skip


class Block:
    """Layers like Qwen's, with a simple function of q, k and v of a row in place of attention."""

    def __init__(self, draw: Draw, shape: Shape, layers: int, *, qk_norm: bool = False) -> None:
        self.draw, self.shape, self.qk_norm = draw, shape, qk_norm
        self.counts = tuple(n * shape.head for n in (shape.heads, shape.kv_heads, shape.kv_heads))
        self.table, self.final = draw.normal(40, shape.head), draw.normal(shape.hidden)
        self.layers = [self._layer() for _ in range(layers)]

    def _layer(self) -> dict:
        hidden, inner, head = self.shape.hidden, self.shape.inner, self.shape.head
        linear = {
            "qkv": self._linear(hidden, self.counts), "o": self._linear(self.counts[0], (hidden,)),
            "up": self._linear(hidden, (inner, inner)), "down": self._linear(inner, (hidden,)),
        }  # fmt: skip
        norms = {"before": self.draw.normal(hidden), "after": self.draw.normal(hidden)}
        names = ("q_norm", "k_norm")
        return {**linear, **norms, "heads": {n: self.draw.normal(head) if self.qk_norm else None for n in names}}

    def _linear(self, inner: int, outer: tuple[int, ...]) -> tuple:
        draw = self.draw
        weight = draw.normal(sum(outer), inner, scale=inner**-0.5)
        return weight, tuple(draw.a(inner) for _ in outer), tuple(draw.b(n) for n in outer)

    def attention(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.split(self.counts, dim=-1)
        k, v = (z.repeat(1, self.shape.heads // self.shape.kv_heads) for z in (k, v))
        return torch.tanh(q * k) + v

    def by_kernels(self, hidden: torch.Tensor, positions: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
        """Run the layers as an engine does."""
        terms, shape = Terms(members, self.draw.rank, S), (self.shape.heads, self.shape.kv_heads, self.shape.head)

        def gemm(x, weight):
            return (x.float() @ weight.float().T).to(x.dtype)

        residual, source = None, None
        for layer in self.layers:
            (qkv_w, qkv_a, qkv_b), (o_w, o_a, o_b) = layer["qkv"], layer["o"]
            (up_w, up_a, up_b), (down_w, down_a, down_b) = layer["up"], layer["down"]
            x, dots = population.norm(hidden, residual, layer["before"], 1e-5, terms, qkv_a, source)
            residual = hidden if residual is None else residual
            qkv = gemm(x, qkv_w)
            population.rotate(qkv, positions, self.table, dots, qkv_b, terms, Heads(*shape, **layer["heads"], eps=1e-5))
            attended = self.attention(qkv.float()).to(qkv.dtype)
            source = Dot(attended, o_a[0], o_b[0])
            x, dots = population.norm(gemm(attended, o_w), residual, layer["after"], 1e-5, terms, up_a, source)
            x, parts = population.gate(gemm(x, up_w), dots, up_b, down_a[0], terms)
            hidden, source = gemm(x, down_w), Partial(parts, down_b[0])
        return population.norm(hidden, residual, self.final, 1e-5, terms, source=source)[0]

    def exactly(self, hidden: torch.Tensor, positions: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
        """Run the same model row by row in float64, each row with its member's dense weights."""

        def linear(x, layer, slot):
            weight, a, b = layer
            if slot >= 0:
                low = [matrix(i, j, slot, self.draw.rank, S) for i, j in zip(a, b, strict=True)]
                return x @ (weight.double() + torch.cat(low)).T
            return x @ weight.double().T

        rows = []
        for row, slot in enumerate(members.tolist()):
            total = hidden[row : row + 1].double()
            angles = self.table[positions[row : row + 1]]
            for layer in self.layers:
                qkv = linear(rms(total, layer["before"], 1e-5), layer["qkv"], slot)
                qkv = rotated(qkv, angles, self.shape.heads, self.shape.kv_heads, *layer["heads"].values(), 1e-5)
                total = total + linear(self.attention(qkv), layer["o"], slot)
                inner = gated(linear(rms(total, layer["after"], 1e-5), layer["up"], slot))
                total = total + linear(inner, layer["down"], slot)
            rows.append(rms(total, self.final, 1e-5))
        return torch.cat(rows)
