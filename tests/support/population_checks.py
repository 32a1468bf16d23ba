# SPDX-License-Identifier: Apache-2.0
"""Checks of the population kernels against float64, on CPUs and GPUs. `form` is the module with the functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from population_math import Draw, apart, dotted, expanded, gated, matrix, rms, rotated, same, terms, worst

from evoalign.kernels.population import Heads, Terms

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


def check_add(form, draw: Draw, rows: int, inner: int, outer: Sequence[int]) -> None:
    members, y, x = draw.members(rows), draw.normal(rows, sum(outer)), draw.normal(rows, inner)
    a, b = [draw.a(inner) for _ in outer], [draw.b(n) for n in outer]
    want, before = y.double() + terms(x, a, b, members, draw.rank, S), y.clone()
    form.add(y, x, a, b, Terms(members, draw.rank, S))
    assert worst(y, want) < draw.bound
    assert same(y[members < 0], before[members < 0])


def source_of(form, kind: str, draw: Draw, members: torch.Tensor, width: int, inner: int):
    """Return a source of `norm`, and its term in float64."""
    b = draw.b(width)
    if kind == "dot":
        x, a = draw.normal(len(members), inner), draw.a(inner)
        return form.Dot(x, a, b), terms(x, [a], [b], members, draw.rank, S)
    if kind == "partial":
        parts = draw.dots(len(members), 5)
        return form.Partial(parts, b), expanded(parts.double().sum(1), b, members, S)
    return None, 0.0


def check_norm(
    form, draw: Draw, rows: int, kind: str, *, carried: bool = True, layers: int = 2, width: int = 72, inner: int = 44
) -> None:
    members, hidden, weight = draw.members(rows), draw.normal(rows, width), draw.normal(width)
    residual = draw.normal(rows, width) if carried else None
    into_a = [draw.a(width) for _ in range(layers)]
    source, term = source_of(form, kind, draw, members, width, inner)
    total = hidden.double() + term + (residual.double() if residual is not None else 0.0)
    kept = hidden.clone()
    out, dots = form.norm(hidden, residual, weight, 1e-5, Terms(members, draw.rank, S), into_a, source)
    assert worst(out, rms(total, weight, 1e-5)) < draw.bound
    assert worst(hidden if residual is None else residual, total) < draw.bound
    assert residual is None or same(hidden, kept)
    assert dots.shape == (rows, layers, draw.rank)
    assert dots.dtype == torch.float32
    for i, a in enumerate(into_a):
        assert apart(dots[:, i], dotted(out, a, members, draw.rank)) < 2e-5  # of the row as it was rounded


def check_rotate(
    form, draw: Draw, rows: int, heads: int, kv_heads: int, width: int, turning: int, *, qk_norm: bool
) -> None:
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
    form.rotate(qkv, positions, table, dots, b, Terms(members, draw.rank, S), shape)
    assert worst(qkv, want) < draw.bound
    v = slice((heads + kv_heads) * width, None)
    assert same(qkv[members < 0][:, v], before[members < 0][:, v])


def check_gate(form, draw: Draw, rows: int, width: int) -> None:
    members, dots = draw.members(rows), draw.dots(rows, 2)
    gate_up, b, down = draw.normal(rows, 2 * width), [draw.b(width), draw.b(width)], draw.a(width)
    term = torch.cat([expanded(dots[:, i].double(), b[i], members, S) for i in range(2)], dim=1)
    out, parts = form.gate(gate_up, dots, b, down, Terms(members, draw.rank, S))
    assert worst(out, gated(gate_up.double() + term)) < draw.bound
    assert parts.dtype == torch.float32
    assert apart(parts.double().sum(1), dotted(out, down, members, draw.rank)) < 2e-5


def everything(
    form, draw: Draw, shape: Shape, inputs: dict, rows: slice, members: torch.Tensor, *, fixed: bool
) -> list[torch.Tensor]:
    """Return the results of every function for some rows of `inputs`, with common factors, weights and tables."""
    x, residual, qkv, gate_up, wide, positions, dots = (
        inputs[k][rows].clone() for k in ("x", "residual", "qkv", "gate_up", "wide", "positions", "dots")
    )
    terms, heads = Terms(members, draw.rank, S, fixed), (shape.heads, shape.kv_heads, shape.head)
    a, b, weight, table = inputs["a"], inputs["b"], inputs["weight"], inputs["table"]
    norms = weight[: shape.head], weight[-shape.head :]
    first = form.norm(x, None, weight, 1e-5, terms, [a["x"]] * 3)
    form.rotate(qkv, positions, table, dots, [b["q"], b["kv"], b["kv"]], terms, Heads(*heads, *norms))
    gate = form.gate(gate_up, dots[:, :2].contiguous(), [b["i"], b["i"]], a["i"], terms)
    second = form.norm(x, residual, weight, 1e-5, terms, source=form.Partial(gate[1], b["x"]))
    carried = residual.clone()
    third = form.norm(x, residual, weight, 1e-5, terms, source=form.Dot(wide, a["wide"], b["x"]))
    form.add(gate_up, x, [a["x"]] * 2, [b["i"], b["i"]], terms)
    form.add(x, wide, [a["wide"]], [b["x"]], terms)
    return [*first, qkv, *gate, *second, carried, *third, residual, gate_up, x]


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

    def by_kernels(self, form, hidden: torch.Tensor, positions: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
        """Run the layers as an engine does."""
        terms, shape = Terms(members, self.draw.rank, S), (self.shape.heads, self.shape.kv_heads, self.shape.head)

        def gemm(x, weight):
            return (x.float() @ weight.float().T).to(x.dtype)

        residual, source = None, None
        for layer in self.layers:
            (qkv_w, qkv_a, qkv_b), (o_w, o_a, o_b) = layer["qkv"], layer["o"]
            (up_w, up_a, up_b), (down_w, down_a, down_b) = layer["up"], layer["down"]
            x, dots = form.norm(hidden, residual, layer["before"], 1e-5, terms, qkv_a, source)
            residual = hidden if residual is None else residual
            qkv = gemm(x, qkv_w)
            form.rotate(qkv, positions, self.table, dots, qkv_b, terms, Heads(*shape, **layer["heads"], eps=1e-5))
            attended = self.attention(qkv.float()).to(qkv.dtype)
            source = form.Dot(attended, o_a[0], o_b[0])
            x, dots = form.norm(gemm(attended, o_w), residual, layer["after"], 1e-5, terms, up_a, source)
            x, parts = form.gate(gemm(x, up_w), dots, up_b, down_a[0], terms)
            hidden, source = gemm(x, down_w), form.Partial(parts, down_b[0])
        return form.norm(hidden, residual, self.final, 1e-5, terms, source=source)[0]

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
