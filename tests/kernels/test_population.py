# SPDX-License-Identifier: Apache-2.0
"""The population kernels in each form against float64: plain torch, C, Triton's interpreter, and Triton on a GPU.

In float64 a row's own matrices are used one after another; nothing is shared or folded. NVIDIA's compute-sanitizer
finds out-of-bounds accesses and races if tensors are allocated one by one:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m pytest tests/kernels -k sanitizer
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python -m pytest tests/kernels -k sanitizer
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from number_checks import same

from evoalign.kernels import available, compiled, population, reference
from evoalign.kernels.population import Dot, Heads, Partial, Terms

CPU_BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Bounds on the relative error of the worst row: a few roundings. Triton's interpreter truncates to bfloat16."""
CUDA_BOUNDS = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
S = 0.75
"""The scaling of all checks."""
has_cuda = torch.cuda.is_available() and available("cuda")
needs_cuda = pytest.mark.skipif(not has_cuda, reason="no CUDA device, or no Triton")
needs_library = pytest.mark.skipif(not compiled.here(), reason="no C compiler made the library")


def on_gpu(test):
    return pytest.mark.gpu(needs_cuda(test))


class Shape(NamedTuple):
    """Widths of a transformer's layer."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int


SMALL = Shape(72, 100, 3, 1, 16)
QWEN_7B = Shape(3584, 18944, 28, 4, 128)
QWEN_HALF_B = Shape(896, 4864, 14, 2, 64)


@pytest.fixture(params=["triton", "c", "torch"])
def form(request, monkeypatch):
    """Choose the form on the CPU; in C only float32 is computed, and torch computes the rest."""
    choose(request.param, monkeypatch)
    return request.param


def choose(form, monkeypatch):
    if form in ("c", "torch"):
        monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("EVOALIGN_COMPILED", "0" if form == "torch" else "1")


@pytest.fixture
def poisoned(monkeypatch):
    empty = torch.empty

    def full_of_nan(*args, **options):
        fresh = empty(*args, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", full_of_nan)


class Draw:
    """Random inputs. Memory that must not be read is NaN: ranks beyond the one in use, and the last slot."""

    def __init__(self, rank, padded, dtype=torch.float32, device="cpu", slots=5):
        self.rank, self.padded, self.dtype, self.device, self.slots = rank, padded, dtype, device, slots
        self.bound = (CPU_BOUNDS if device == "cpu" else CUDA_BOUNDS)[dtype]
        self._generator = torch.Generator(device=device).manual_seed(0)

    def normal(self, *shape, dtype=None, scale=1.0):
        drawn = torch.randn(*shape, generator=self._generator, device=self.device)
        return (drawn * scale).to(dtype or self.dtype)

    def a(self, inner):
        drawn = self.normal(self.slots, 1, self.padded, inner, scale=inner**-0.5)
        drawn[:, :, self.rank :] = drawn[-1] = torch.nan
        return drawn

    def b(self, outer):
        drawn = self.normal(self.slots, 1, outer, self.padded, scale=max(1, self.rank) ** -0.5)
        drawn[..., self.rank :] = drawn[-1] = torch.nan
        return drawn

    def members(self, rows):
        """Return slots in random order, with about a fifth of the rows without one; the first row has one."""
        drawn = torch.randint(-1, self.slots - 1, (rows,), generator=self._generator, device=self.device)
        drawn[0] = drawn[0].abs()
        return drawn.to(torch.int32)

    def own(self, width):
        """Return a vector for rows without a member, and one for each slot."""
        drawn = self.normal(self.slots + 1, width)
        drawn[-1] = torch.nan
        return drawn

    def dots(self, rows, layers):
        return self.normal(rows, layers, self.rank, dtype=torch.float32)


def dotted(x, a, members, rank):
    """Return x A^T of each row, [T, R]; 0 without a member."""
    out = torch.zeros(len(x), rank, dtype=torch.float64, device=x.device)
    for row, slot in enumerate(members.tolist()):
        if slot >= 0:
            out[row] = a[slot, 0, :rank].double() @ x[row].double()
    return out


def expanded(taken, b, members):
    """Return S * dots B^T of each row, [T, N]; 0 without a member."""
    rank, taken = taken.shape[1], taken.double()
    out = torch.zeros(len(taken), b.shape[2], dtype=torch.float64, device=b.device)
    for row, slot in enumerate(members.tolist()):
        if slot >= 0:
            out[row] = S * (b[slot, 0, :, :rank].double() @ taken[row])
    return out


def added(x, a, b, members, rank):
    """Return the terms of `add`, [T, sum N]."""
    return torch.cat([expanded(dotted(x, i, members, rank), j, members) for i, j in zip(a, b, strict=True)], dim=1)


def rms(x, weight, eps):
    """Return the RMSNorm over the last dimension."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def turned(x, angles):
    """Rotate x [T, heads, D]: dimension i with i + half, by angles [T, 2 * half] (cosines, then sines)."""
    half = angles.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        cosine, sine = angles[:, None, i].double(), angles[:, None, half + i].double()
        out[..., i] = x[..., i] * cosine - x[..., half + i] * sine
        out[..., half + i] = x[..., half + i] * cosine + x[..., i] * sine
    return out


def rotated(qkv, angles, heads, kv_heads, q_norm, k_norm, eps):
    """Normalise and rotate the heads of q and k in qkv, whose terms are added."""
    parts = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    q, k, v = parts.split([heads, kv_heads, kv_heads], dim=1)
    q, k = (rms(z, w, eps) if w is not None else z for z, w in ((q, q_norm), (k, k_norm)))
    return torch.cat([turned(q, angles), turned(k, angles), v], dim=1).reshape(qkv.shape)


def gated(gate_up):
    left, right = gate_up.chunk(2, dim=-1)
    return left / (1 + (-left).exp()) * right


def worst(got, want):
    """Return the relative error of the worst row; infinite if anything is NaN."""
    got, want = got.double().reshape(len(got), -1), want.double().reshape(len(want), -1)
    if not got.isfinite().all():
        return float("inf")
    return float(((got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-12)).max())


def apart(got, want):
    """Return the largest error relative to the root mean square, because sums may be near zero."""
    if not got.isfinite().all():
        return float("inf")
    return float((got.double() - want).abs().max() / want.square().mean().sqrt())


def check_add(draw, rows, inner, outer):
    members, y, x = draw.members(rows), draw.normal(rows, sum(outer)), draw.normal(rows, inner)
    a, b = [draw.a(inner) for _ in outer], [draw.b(n) for n in outer]
    want, before = y.double() + added(x, a, b, members, draw.rank), y.clone()
    population.add(y, x, a, b, Terms(members, draw.rank, S))
    assert worst(y, want) < draw.bound
    assert same(y[members < 0], before[members < 0])


def check_norm(draw, rows, kind, carried=True, layers=2, width=72, inner=44, own=False):
    members, hidden, weight = draw.members(rows), draw.normal(rows, width), (draw.own if own else draw.normal)(width)
    gain = weight[members.long() + 1] if own else weight
    residual = draw.normal(rows, width) if carried else None
    into_a = [draw.a(width) for _ in range(layers)]
    source, term = None, 0.0
    if kind != "none":
        b = draw.b(width)
        if kind == "dot":
            x, a = draw.normal(rows, inner), draw.a(inner)
            source, term = Dot(x, a, b), added(x, [a], [b], members, draw.rank)
        else:
            parts = draw.dots(rows, 5)
            source, term = Partial(parts, b), expanded(parts.double().sum(1), b, members)
    total = hidden.double() + term + (residual.double() if carried else 0.0)
    kept = hidden.clone()
    out, dots = population.norm(hidden, residual, weight, 1e-5, Terms(members, draw.rank, S), into_a, source)
    assert worst(out, rms(total, gain, 1e-5)) < draw.bound
    assert worst(residual if carried else hidden, total) < draw.bound
    assert not carried or same(hidden, kept)
    assert dots.shape == (rows, layers, draw.rank) and dots.dtype == torch.float32
    for i, a in enumerate(into_a):
        assert apart(dots[:, i], dotted(out, a, members, draw.rank)) < 2e-5  # of the row as it was rounded


def check_rotate(draw, rows, heads, kv_heads, width, turning, qk_norm, own=""):
    """Members have their own vectors of the kinds that `own` names: q, k, bias."""
    members, dots = draw.members(rows), draw.dots(rows, 3)
    counts = (heads, kv_heads, kv_heads)
    qkv, b = draw.normal(rows, sum(counts) * width), [draw.b(n * width) for n in counts]
    table = draw.normal(40, turning)
    positions = torch.arange(rows, device=qkv.device).mul(7).remainder(40)
    vectors = (draw.own if kind in own.split() else draw.normal for kind in "qk")
    norms = [vector(width) for vector in vectors] if qk_norm else [None, None]
    bias = draw.own(qkv.shape[1]) if "bias" in own else None
    gains = [w if w is None or w.dim() == 1 else w[members.long() + 1][:, None] for w in norms]
    term = torch.cat([expanded(dots[:, i], b[i], members) for i in range(3)], dim=1)
    term = term if bias is None else term + bias[members.long() + 1].double()
    want = rotated(qkv.double() + term, table[positions], heads, kv_heads, *gains, 1e-5)
    before, shape = qkv.clone(), Heads(heads, kv_heads, width, *norms, 1e-5, bias)
    population.rotate(qkv, positions, table, dots, b, Terms(members, draw.rank, S), shape)
    assert worst(qkv, want) < draw.bound
    v = slice((heads + kv_heads) * width, None)
    assert bias is not None or same(qkv[members < 0][:, v], before[members < 0][:, v])


def check_gate(draw, rows, width):
    members, dots = draw.members(rows), draw.dots(rows, 2)
    gate_up, b, down = draw.normal(rows, 2 * width), [draw.b(width), draw.b(width)], draw.a(width)
    term = torch.cat([expanded(dots[:, i], b[i], members) for i in range(2)], dim=1)
    out, parts = population.gate(gate_up, dots, b, down, Terms(members, draw.rank, S))
    assert worst(out, gated(gate_up.double() + term)) < draw.bound
    assert parts.dtype == torch.float32
    assert apart(parts.double().sum(1), dotted(out, down, members, draw.rank)) < 2e-5


RANKS = [(1, 1), (1, 8), (2, 8), (3, 8), (8, 8), (3, 16), (16, 16)]
CHECKS = {
    # Fused layers, an input wider than one step, an output of many tiles, odd widths.
    **{f"add to {o}": partial(check_add, rows=5, inner=i, outer=o)
       for i, o in [(60, (96, 40, 40)), (4100, (72,)), (72, (8200, 90)), (33, (50, 50))]},
    **{f"norm {k}, {'residual' if c else 'first'}": partial(check_norm, rows=4, kind=k, carried=c, layers=3 if c else 2)
       for k in ("none", "dot", "partial") for c in (True, False)},
    # Heads, key-value heads, head width, rotary width: counts and widths that are no powers of two.
    **{f"rotate {h}{', normed' * n}": lambda draw, h=h, n=n: check_rotate(draw, 3, *h, qk_norm=n)
       for h in [(7, 1, 16, 16), (3, 3, 12, 12), (2, 1, 16, 8), (5, 2, 12, 4)] for n in (False, True)},
    "norm of its own": partial(check_norm, rows=5, kind="partial", own=True),
    **{f"rotate with own {o}": lambda draw, o=o: check_rotate(draw, 5, 5, 2, 12, 4, qk_norm=o != "bias", own=o)
       for o in ("q", "k", "bias", "q k bias")},
    **{f"gate {w}": partial(check_gate, rows=4, width=w) for w in (50, 4300)},
}  # fmt: skip


@pytest.mark.first("-3-8", "[c-")
@pytest.mark.usefixtures("form", "poisoned")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("rank", "padded"), RANKS)
def test_each_kernel_equals_float64(rank, padded, check):
    CHECKS[check](Draw(rank, padded))


@pytest.mark.first("1-", "5-", "[c-")
@pytest.mark.usefixtures("form", "poisoned")
@pytest.mark.parametrize("dtype", CPU_BOUNDS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 67])
def test_every_dtype_and_number_of_rows(rows, dtype):
    check_add(Draw(2, 8, dtype), rows, 60, (96, 40))
    check_norm(Draw(1, 1, dtype), rows, "partial", width=96)
    check_rotate(Draw(1, 1, dtype), rows, 7, 1, 16, 16, qk_norm=True)
    check_gate(Draw(1, 1, dtype), rows, 90)


@on_gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("shape", "dtype", "rank", "padded"),
    [(QWEN_7B, torch.bfloat16, 1, 1), (QWEN_7B, torch.bfloat16, 8, 8), (QWEN_7B, torch.bfloat16, 16, 16),
     (QWEN_7B, torch.float16, 1, 1), (QWEN_HALF_B, torch.bfloat16, 1, 8), (QWEN_HALF_B, torch.bfloat16, 2, 8),
     (QWEN_HALF_B, torch.float16, 8, 8), (QWEN_HALF_B, torch.float32, 3, 16)],
)  # fmt: skip
def test_each_kernel_equals_float64_at_the_widths_of_real_models(shape, dtype, rank, padded):
    """Few cases, because each is compiled."""
    draw = Draw(rank, padded, dtype, "cuda")
    hidden, inner, heads, kv_heads, head = shape
    q, kv = heads * head, kv_heads * head
    check_add(draw, 67, hidden, (q, kv, kv))
    check_add(draw, 5, hidden, (inner, inner))
    check_add(draw, 67, inner, (hidden,))
    check_norm(draw, 67, "none", carried=False, layers=3, width=hidden)
    check_norm(draw, 67, "dot", layers=2, width=hidden, inner=q)
    check_norm(draw, 1, "partial", layers=3, width=hidden)
    check_norm(draw, 67, "partial", layers=3, width=hidden, own=True)
    check_rotate(draw, 67, heads, kv_heads, head, head, qk_norm=False)
    check_rotate(draw, 67, heads, kv_heads, head, head, qk_norm=True, own="q k bias")
    check_gate(draw, 67, inner)


@on_gpu
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (8, 8)])
@pytest.mark.parametrize("heads", [(28, 4, 128, 64), (10, 10, 80, 80), (64, 8, 64, 64)])
def test_rotate_handles_the_heads_of_other_models(heads, rank, padded):
    """Partial rotation, heads that are no power of two, many heads; with norms of q and k."""
    check_rotate(Draw(rank, padded, torch.bfloat16, "cuda"), 9, *heads, qk_norm=True)


@on_gpu
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (1, 8), (3, 8), (16, 16)])
def test_small_widths_under_a_sanitizer(rank, padded):
    draw = Draw(rank, padded, torch.bfloat16, "cuda")
    check_add(draw, 3, 200, (90, 30, 30))
    check_add(draw, 2, 72, (8200,))
    check_norm(draw, 3, "none", carried=False, layers=3, width=200)
    check_norm(draw, 3, "dot", layers=2, width=200, inner=90)
    check_norm(draw, 3, "partial", layers=0, width=200)
    check_rotate(draw, 3, 5, 1, 24, 24, qk_norm=False)
    check_rotate(draw, 3, 5, 2, 24, 16, qk_norm=True, own="q k bias")
    check_gate(draw, 3, 2100)
    torch.cuda.synchronize()


def inputs_of(draw, shape, rows):
    width, q, kv = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head
    return {
        "x": draw.normal(rows, width), "residual": draw.normal(rows, width), "wide": draw.normal(rows, q),
        "qkv": draw.normal(rows, q + 2 * kv), "gate_up": draw.normal(rows, 2 * shape.inner),
        "dots": draw.dots(rows, 3), "positions": torch.arange(rows, device=draw.device) % 40,
        "weight": draw.normal(width), "table": draw.normal(40, shape.head),
        "a": {"x": draw.a(width), "i": draw.a(shape.inner), "wide": draw.a(q)},
        "b": {"x": draw.b(width), "q": draw.b(q), "kv": draw.b(kv), "i": draw.b(shape.inner)},
    }  # fmt: skip


def everything(draw, shape, inputs, rows, members, fixed=False):
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


def chosen_draw(monkeypatch, form, rank, padded):
    """Choose a form, and return inputs in its dtype and on its device: in C only float32 is computed."""
    choose(form, monkeypatch)
    dtype = torch.float32 if form == "c" else torch.bfloat16
    return Draw(rank, padded, dtype, "cuda" if form == "cuda" else "cpu")


def forms(*ranks, cuda):
    """Parametrise over forms and ranks; those of `cuda` need a GPU."""
    cases = [(form, *rank) for form in ("triton", "c", "torch") for rank in ranks]
    marks = [pytest.mark.gpu, needs_cuda]
    table = pytest.mark.parametrize(
        ("form", "rank", "padded"), cases + [pytest.param("cuda", *r, marks=marks) for r in cuda]
    )
    return lambda test: pytest.mark.first("torch", "c-", "cuda")(table(test))


@forms((1, 1), (3, 8), cuda=[(1, 1), (8, 8)])
def test_a_row_alone_is_the_row_among_others(monkeypatch, form, rank, padded):
    draw = chosen_draw(monkeypatch, form, rank, padded)
    shape, count, chosen = (QWEN_HALF_B, 300, (0, 100, 299)) if form == "cuda" else (SMALL, 71, (0, 29, 70))
    members, inputs = draw.members(count), inputs_of(draw, shape, count)
    members[chosen[1]] = -1
    together = everything(draw, shape, inputs, slice(None), members, fixed=True)
    for row in chosen:
        alone = everything(draw, shape, inputs, slice(row, row + 1), members[row : row + 1], fixed=True)
        assert all(same(one[0], all_[row]) for one, all_ in zip(alone, together, strict=True))


@forms((1, 1), (3, 8), cuda=[(1, 1)])
def test_rows_without_member_get_the_plain_function(monkeypatch, form, rank, padded):
    """They have the bits of a batch without members, whose factors are NaN; inputs are infinite and dots NaN."""
    draw = chosen_draw(monkeypatch, form, rank, padded)
    shape, count = (QWEN_HALF_B, 64) if form == "cuda" else (SMALL, 6)
    members, inputs = draw.members(count), inputs_of(draw, shape, count)
    if form != "cuda":
        members[:] = torch.tensor([0, -1, 3, -1, 1, -1])
        inputs["dots"][1] = torch.nan
        inputs["wide"][3] = torch.inf
    mixed = everything(draw, shape, inputs, slice(None), members)
    for factors in (inputs["a"], inputs["b"]):
        for factor in factors.values():
            factor.fill_(torch.nan)
    plain = everything(draw, shape, inputs, slice(None), torch.full_like(members, -1))
    without = members < 0
    assert without.any()
    for left, right in zip(mixed, plain, strict=True):
        assert left[without].isfinite().all()
        assert same(left[without], right[without])


@forms((1, 1), (3, 8), cuda=[(1, 1)])
def test_own_gains_have_the_bits_of_shared_gains(monkeypatch, form, rank, padded):
    """Each row's results are those of a batch in which its member's gains are all rows' gains."""
    draw = chosen_draw(monkeypatch, form, rank, padded)
    x, members, counts, rows = draw.normal(9, 72), draw.members(9), (3, 1, 16), draw.normal(9, 5 * 16)
    gains, q_norms, k_norms = draw.own(72), draw.own(16), draw.own(16)
    b, dots, table = [draw.b(48), draw.b(16), draw.b(16)], draw.dots(9, 3), draw.normal(9, 16)
    terms, positions = Terms(members, rank, S), torch.arange(9, device=x.device)

    def results(gain, *norms):
        qkv = rows.clone()
        population.rotate(qkv, positions, table, dots, b, terms, Heads(*counts, *norms))
        return *population.norm(x, None, gain, 1e-5, terms), qkv

    together = results(gains, q_norms, k_norms)
    for slot in set(members.tolist()):
        alone, own = results(*(v[slot + 1].clone() for v in (gains, q_norms, k_norms))), members == slot
        assert all(same(one[own], all_[own]) for one, all_ in zip(alone, together, strict=True))


@forms((0, 0), (0, 1), cuda=[(0, 0), (0, 1)])
def test_rank_0_gives_the_numbers_of_zero_factors(monkeypatch, form, rank, padded):
    """They equal those of rank 1 with factors that are zero, with own gains and biases, and no factor is read."""
    draw = chosen_draw(monkeypatch, form, rank, padded)
    shape = QWEN_HALF_B if form == "cuda" else SMALL
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    x, members, positions = draw.normal(9, shape.hidden), draw.members(9), torch.arange(9, device=draw.device)
    attended, qkv, gate_up = draw.normal(9, q), draw.normal(9, q + 2 * kv), draw.normal(9, 2 * shape.inner)
    table, gains, bias = draw.normal(9, shape.head), draw.own(shape.hidden), draw.own(q + 2 * kv)
    norms, counts = (draw.own(shape.head), draw.own(shape.head)), (shape.heads, shape.kv_heads, shape.head)

    def results(rank, a, b):
        terms, rows, residual = Terms(members, rank, S), [qkv.clone(), qkv.clone(), gate_up.clone()], x.clone()
        first, dots = population.norm(x.clone(), None, gains, 1e-5, terms, (a(shape.hidden),) * 3)
        factors = (b(q), b(kv), b(kv))
        population.rotate(rows[0], positions, table, dots, factors, terms, Heads(*counts, *norms, 1e-5, bias))
        population.rotate(rows[1], positions, table, dots, factors, terms, Heads(*counts, eps=1e-5))
        source = Dot(attended, a(q), b(shape.hidden))
        second, dots = population.norm(x.clone(), residual, gains, 1e-5, terms, (a(shape.hidden),) * 2, source)
        gated, parts = population.gate(rows[2], dots, (b(shape.inner),) * 2, a(shape.inner), terms)
        assert parts.shape[2] == dots.shape[2] == rank
        hidden = x.clone()
        third, _ = population.norm(hidden, None, gains, 1e-5, terms, (), Partial(parts, b(shape.hidden)))
        return first, *rows[:2], second, residual, gated, hidden, third

    nothing = results(0, draw.a, draw.b)
    slots = (draw.slots, 1)
    zeros = results(1, lambda k: x.new_zeros(*slots, 1, k), lambda n: x.new_zeros(*slots, n, 1))
    for left, right in zip(nothing, zeros, strict=True):
        assert left.isfinite().all() and torch.equal(left, right)


class Block:
    """Layers like Qwen's, with a simple function of q, k and v of a row in place of attention."""

    def __init__(self, draw, shape, layers, qk_norm=False):
        self.draw, self.shape, self.qk_norm = draw, shape, qk_norm
        self.counts = tuple(n * shape.head for n in (shape.heads, shape.kv_heads, shape.kv_heads))
        self.table, self.final = draw.normal(40, shape.head), draw.normal(shape.hidden)
        self.layers = [self._layer() for _ in range(layers)]

    def _layer(self):
        hidden, inner, head = self.shape.hidden, self.shape.inner, self.shape.head
        linear = {
            "qkv": self._linear(hidden, self.counts), "o": self._linear(self.counts[0], (hidden,)),
            "up": self._linear(hidden, (inner, inner)), "down": self._linear(inner, (hidden,)),
        }  # fmt: skip
        norms = {"before": self.draw.normal(hidden), "after": self.draw.normal(hidden)}
        names = ("q_norm", "k_norm")
        return {**linear, **norms, "heads": {n: self.draw.normal(head) if self.qk_norm else None for n in names}}

    def _linear(self, inner, outer):
        draw = self.draw
        weight = draw.normal(sum(outer), inner, scale=inner**-0.5)
        return weight, tuple(draw.a(inner) for _ in outer), tuple(draw.b(n) for n in outer)

    def attention(self, qkv):
        q, k, v = qkv.split(self.counts, dim=-1)
        k, v = (z.repeat(1, self.shape.heads // self.shape.kv_heads) for z in (k, v))
        return torch.tanh(q * k) + v

    def by_kernels(self, hidden, positions, members):
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

    def exactly(self, hidden, positions, members):
        """Run the same model row by row in float64, each row with its member's dense weights."""

        def linear(x, layer, slot):
            weight, rank = layer[0].double(), self.draw.rank
            if slot >= 0:
                weight = weight + torch.cat([S * j[slot, 0, :, :rank].double() @ i[slot, 0, :rank].double()
                                             for i, j in zip(*layer[1:], strict=True)])  # fmt: skip
            return x @ weight.T

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


@pytest.mark.parametrize("dtype", CPU_BOUNDS, ids=str)
@pytest.mark.first("1-1-plain-torch.float32")
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (3, 8)])
def test_three_layers_equal_a_model_with_each_members_weights(rank, padded, dtype, qk_norm):
    draw = Draw(rank, padded, dtype)
    model = Block(draw, SMALL, 3, qk_norm=qk_norm)
    members = torch.tensor([2, -1, 0, 3, 3, 1, -1], dtype=torch.int32)
    hidden, positions = draw.normal(7, 72), torch.tensor([0, 5, 39, 1, 2, 2, 17])
    want = model.exactly(hidden, positions, members)
    plain = model.exactly(hidden, positions, torch.full_like(members, -1))
    got = model.by_kernels(hidden.clone(), positions, members)
    assert float(((plain - want).norm(dim=1) / want.norm(dim=1))[members >= 0].min()) > 0.2  # else it proves nothing
    assert worst(got, want) < 6 * CPU_BOUNDS[dtype]


@on_gpu
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (8, 8)])
def test_a_graph_replays_with_new_members_and_factors(rank, padded):
    rows = 12
    draw = Draw(rank, padded, torch.bfloat16, "cuda")
    model = Block(draw, QWEN_HALF_B, 2, qk_norm=True)
    hidden, members = draw.normal(rows, QWEN_HALF_B.hidden), draw.members(rows)
    positions = torch.arange(rows, device="cuda")

    def forward():
        return model.by_kernels(hidden.clone(), positions, members)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    last = torch.zeros_like(out)
    for _ in range(3):
        members.copy_(draw.members(rows))
        hidden.copy_(draw.normal(rows, QWEN_HALF_B.hidden))
        for layer in model.layers:
            for name in ("qkv", "o", "up", "down"):
                for factor in layer[name][1]:
                    factor.copy_(draw.a(factor.shape[-1]))
                for factor in layer[name][2]:
                    factor.copy_(draw.b(factor.shape[2]))
        graph.replay()
        want = model.exactly(hidden, positions, members)
        assert worst(out, want) < 4e-2  # two layers of a dozen roundings each
        assert worst(out, model.exactly(hidden, positions, members.roll(1))) > 0.2
        assert not torch.equal(out, last)
        last = out.clone()


@pytest.mark.usefixtures("form")
def test_add_leaves_rows_without_member_alone():
    draw = Draw(1, 1, torch.bfloat16)
    y, x = draw.normal(4, 50), draw.normal(4, 60)
    y[1, :3] = torch.tensor([-0.0, torch.nan, torch.inf])
    x[1] = torch.nan
    before = y.clone()
    population.add(y, x, [draw.a(60)], [draw.b(50)], Terms(torch.tensor([0, -1, 2, -1], dtype=torch.int32), 1))
    assert same(y[[1, 3]], before[[1, 3]])
    assert not torch.equal(y[[0, 2]], before[[0, 2]])


def test_add_takes_rows_of_a_wider_tensor(rank=3):
    draw = Draw(rank, 8)
    members, wide, x = draw.members(5), draw.normal(5, 100), draw.normal(5, 90)[:, 10:70]
    y, a, b = wide[:, 20:70], [draw.a(60)], [draw.b(50)]
    before, want = wide.clone(), y.double() + added(x, a, b, members, rank)
    population.add(y, x, a, b, Terms(members, rank, S))
    assert worst(y, want) < draw.bound
    assert torch.equal(wide[:, :20], before[:, :20]) and torch.equal(wide[:, 70:], before[:, 70:])


@pytest.mark.usefixtures("form")
def test_norm_and_gate_without_a_next_projection_return_no_dots():
    check_norm(Draw(2, 8), 3, "partial", layers=0)
    check_norm(Draw(2, 8), 3, "dot", layers=0)
    draw = Draw(2, 8)
    members, dots, gate_up, b = draw.members(3), draw.dots(3, 2), draw.normal(3, 100), [draw.b(50), draw.b(50)]
    whole, _ = population.gate(gate_up, dots, b, draw.a(50), Terms(members, 2))
    out, parts = population.gate(gate_up, dots, b, None, Terms(members, 2))
    assert torch.equal(out, whole) and parts.shape == (3, 0, 2)


@pytest.mark.usefixtures("form")
def test_norm_and_gate_return_zero_dots_for_rows_without_member():
    """Even for a NaN row, so that no later sum includes it."""
    draw = Draw(2, 8)
    x, members = draw.normal(2, 72), torch.tensor([1, -1], dtype=torch.int32)
    x[1] = torch.nan
    _, dots = population.norm(x, None, draw.normal(72), 1e-5, Terms(members, 2), [draw.a(72)] * 2)
    gate_up, b = draw.normal(2, 100), [draw.b(50)] * 2
    gate_up[1] = torch.nan
    _, parts = population.gate(gate_up, dots, b, draw.a(50), Terms(members, 2))
    assert dots[0].all() and parts[0].all()
    assert not dots[1].any() and not parts[1].any()


@pytest.mark.usefixtures("form")
def test_add_reads_members_changed_in_place():
    draw, members = Draw(1, 1), torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    x, a, b = draw.normal(4, 60), [draw.a(60)], [draw.b(50)]
    for order in ([0, 0, 1, 1], [1, 1, 0, 0], [2, 0, 1, 1]):
        members[:] = torch.tensor(order)
        y, wanted = torch.zeros(4, 50), torch.zeros(4, 50)
        population.add(y, x, a, b, Terms(members, 1))
        reference.add(wanted, x, a, b, Terms(members, 1))
        assert worst(y, wanted) < 2e-6


@pytest.mark.usefixtures("form")
def test_gate_handles_extreme_values_and_nan():
    """Where e^-x overflows float32, and for NaN."""
    left = torch.tensor([[-1e38, -1e4, -120.0, -88.5, -87.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 88.5, 1e4, torch.nan]])
    gate_up, nobody = torch.cat([left, torch.ones_like(left)], dim=1), torch.tensor([-1], dtype=torch.int32)
    b = torch.zeros(1, 1, left.shape[1], 1)
    found, _ = population.gate(gate_up, torch.zeros(1, 2, 1), [b, b], None, Terms(nobody, 1))
    wanted = torch.nn.functional.silu(left.double())
    assert bool(found[0, -1].isnan())
    assert torch.allclose(found[:, :-1].double(), wanted[:, :-1], rtol=1e-6, atol=1e-30)


def test_all_functions_accept_zero_rows():
    draw = Draw(1, 1)
    found = everything(draw, SMALL, inputs_of(draw, SMALL, 1), slice(0), torch.zeros(0, dtype=torch.int32))
    assert all(len(r) == 0 for r in found)


def test_strided_tensors_are_refused():
    draw = Draw(1, 8)
    members, y, x, b = draw.members(2), draw.normal(2, 8), draw.normal(2, 16), draw.b(8)
    with pytest.raises(ValueError, match="contiguous factors"):
        population.add(y, x, [draw.a(32)[..., ::2]], [b], Terms(members, 1))
    with pytest.raises(ValueError, match="consecutive columns"):
        population.add(y, draw.normal(2, 32)[:, ::2], [draw.a(16)], [b], Terms(members, 1))
    with pytest.raises(ValueError, match="dots"):
        population.gate(y, draw.dots(2, 3)[:, :2], [draw.b(4)] * 2, None, Terms(members, 1))


@needs_library
def test_torch_runs_without_the_library_and_for_unsupported_tensors(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    draw, members = Draw(1, 1), torch.tensor([0, -1, 1], dtype=torch.int32)
    x, wide, many = draw.normal(3, 60), draw.normal(3, 120)[:, ::2], Draw(17, 17)

    def is_torch(x, a, b):
        found, wanted = x.new_zeros(3, 50), x.new_zeros(3, 50)
        for add, y in ((population.add, found), (reference.add, wanted)):
            add(y, x, [a.to(x.dtype)], [b.to(x.dtype)], Terms(members, a.shape[2]))
        return same(found, wanted)

    a, b = draw.a(60), draw.b(50)
    assert is_torch(x, many.a(60), many.b(50))  # C has room for rank 16
    assert is_torch(x.bfloat16(), a, b) and is_torch(wide, a, b)
    assert not is_torch(x, a, b), "the library is not there: nothing is tested"
    monkeypatch.setenv("EVOALIGN_COMPILED", "0")
    assert is_torch(x, a, b)


def test_gate_has_the_same_bits_for_any_number_of_threads(monkeypatch):
    """With enough rows for several threads."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(compiled, "_SHARED", 0)
    draw, members = Draw(2, 2), torch.arange(300, dtype=torch.int32) % 4 - 1
    gate_up, dots, b, down = draw.normal(300, 2 * 1000), draw.dots(300, 2), draw.b(1000), draw.a(1000)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(population.gate(gate_up, dots, [b, b], down, Terms(members, 2)))
    finally:
        torch.set_num_threads(before)
    assert all(same(one, other) for one, other in zip(*found, strict=True))
    wanted = reference.gate(gate_up, dots, [b, b], down, Terms(members, 2))
    assert all(worst(one, other) < 2e-5 for one, other in zip(found[0], wanted, strict=True))


def test_warm_up_calls_every_kernel(monkeypatch):
    from evoalign.kernels import population_triton as kernels

    called = []
    for name in ("add", "norm", "rotate", "gate"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _f=real, _n=name, **k: called.append(_n) or _f(*a, **k))
    monkeypatch.setattr(kernels, "row_sizes", lambda: (1, 2))
    heads = Heads(2, 1, 16, torch.ones(16), torch.ones(16))
    population.warm_up("cpu", torch.float32, heads, hidden=32, intermediate=48, rank=2, padded_rank=8)
    assert sorted(called) == sorted(["norm"] * 8 + ["rotate"] * 2 + ["gate"] * 2 + ["add"] * 8)


def test_add_tiles_do_not_depend_on_rows_when_fixed():
    from evoalign.kernels import population_triton as kernels

    for rank in (1, 8, 16):
        assert len({kernels.add_tiles(3584, 18944, rows, rank, True) for rows in (1, 60, 129, 100_000)}) == 1


@on_gpu
def test_more_elements_than_32_bits_address():
    """gate_up of a large prefill has more than 2^31 elements; the last rows must be right."""
    width, rows = 18944, 57_000
    draw = Draw(1, 1, torch.bfloat16, "cuda")
    members = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    members[-3:] = torch.tensor([1, -1, 2], dtype=torch.int32)
    gate_up = torch.zeros(rows, 2 * width, dtype=torch.bfloat16, device="cuda")
    gate_up[-3:] = draw.normal(3, 2 * width)
    dots = torch.zeros(rows, 2, 1, device="cuda")
    dots[-3:] = draw.dots(3, 2)
    x, a, b, down = draw.normal(rows, 64), [draw.a(64)] * 2, [draw.b(width)] * 2, draw.a(width)
    out, parts = population.gate(gate_up, dots, b, down, Terms(members, 1))
    few = gate_up[-3:].clone()
    last, last_parts = population.gate(few, dots[-3:], b, down, Terms(members[-3:], 1))
    assert same(out[-3:], last) and same(parts[-3:], last_parts)
    assert not out[:-3].any()
    population.add(gate_up, x, a, b, Terms(members, 1))
    population.add(few, x[-3:], a, b, Terms(members[-3:], 1))
    assert same(gate_up[-3:], few)
    assert not gate_up[:-3].any()


def count_compiled():
    from evoalign.kernels import population_triton as kernels

    jitted = (kernels._add, kernels._norm, kernels._rotate, kernels._gate)
    return [len(k.device_caches[torch.cuda.current_device()][0]) for k in jitted]


@on_gpu
def test_another_number_of_rows_compiles_nothing():
    draw = Draw(1, 1, torch.bfloat16, "cuda")
    inputs, members = inputs_of(draw, QWEN_HALF_B, 128), draw.members(128)
    everything(draw, QWEN_HALF_B, inputs, slice(0, 64), members[:64])
    before = count_compiled()
    for rows in (1, 2, 7, 16, 33, 128):
        everything(draw, QWEN_HALF_B, inputs, slice(0, rows), members[:rows])
    for start in (1, 2, 3):  # members that lie off the 16-byte grid
        here = slice(start, start + 5)
        everything(draw, QWEN_HALF_B, inputs, here, members[here])
    assert count_compiled() == before


@on_gpu
def test_warm_up_leaves_nothing_to_compile():
    hidden, inner, heads, kv_heads, head = QWEN_HALF_B
    draw = Draw(2, 16, torch.float16, "cuda")
    shape = {"hidden": hidden, "intermediate": inner, "rank": 2, "padded_rank": 16}
    population.warm_up("cuda", torch.float16, Heads(heads, kv_heads, head), **shape)
    before = count_compiled()
    members = draw.members(6)
    Block(draw, QWEN_HALF_B, 2).by_kernels(draw.normal(6, hidden), torch.arange(6, device="cuda"), members)
    y, x = draw.normal(6, hidden), draw.normal(6, inner)
    population.add(y, x, [draw.a(inner)], [draw.b(hidden)], Terms(members, 2, S))
    assert count_compiled() == before
