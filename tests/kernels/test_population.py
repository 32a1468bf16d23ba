# SPDX-License-Identifier: Apache-2.0
"""The population kernels in Triton's interpreter, and their twins in torch, against float64."""

import pytest
import torch

import population_math as exact
from evoalign.kernels import population, reference
from evoalign.kernels.population import Dot, Partial
from population_math import BOUNDS, Draw, worst

RANKS = [(1, 1), (1, 8), (2, 8), (3, 8), (8, 8), (3, 16), (16, 16)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
S = 0.75
"""The scaling; a power of two would hide one that is missing or applied twice less well than this."""

ranks = pytest.mark.parametrize(("rank", "padded"), RANKS)
forms = pytest.mark.parametrize("form", [population, reference], ids=["triton", "torch"])
some_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same bits, NaN and the sign of zero included."""
    width = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return torch.equal(left.contiguous().view(width), right.contiguous().view(width))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN."""
    empty = torch.empty

    def full_of_nan(*args, **options):
        fresh = empty(*args, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", full_of_nan)


LAYERS = [(60, (96, 40, 40)), (4100, (72,)), (72, (8200, 90)), (33, (50, 50))]
"""Inputs, outputs: fused layers, an input wider than one step, an output of many tiles, widths that are odd."""


@forms
@ranks
@pytest.mark.parametrize(("inner", "outer"), LAYERS)
def test_add(form, rank, padded, inner, outer):
    draw = Draw(rank, padded, torch.float32)
    members, y, x = draw.members(5), draw.normal(5, sum(outer)), draw.normal(5, inner)
    a, b = [draw.a(inner) for _ in outer], [draw.b(n) for n in outer]
    want = y.double() + exact.terms(x, a, b, members, rank, S)
    form.add(y, x, a, b, members, rank=rank, scaling=S)
    assert worst(y, want) < BOUNDS[torch.float32]


@forms
@some_dtypes
@pytest.mark.parametrize("rows", [1, 5, 67])
def test_add_in_every_dtype_and_number_of_rows(form, dtype, rows):
    draw = Draw(2, 8, dtype)
    members, y, x = draw.members(rows), draw.normal(rows, 136), draw.normal(rows, 60)
    a, b = [draw.a(60), draw.a(60)], [draw.b(96), draw.b(40)]
    want = y.double() + exact.terms(x, a, b, members, 2, S)
    form.add(y, x, a, b, members, rank=2, scaling=S)
    assert worst(y, want) < BOUNDS[dtype]


@forms
def test_add_leaves_rows_without_member_alone(form):
    draw = Draw(1, 1, torch.bfloat16)
    y, x = draw.normal(4, 50), draw.normal(4, 60)
    y[1, :3] = torch.tensor([-0.0, torch.nan, torch.inf])
    x[1] = torch.nan
    before = y.clone()
    form.add(y, x, [draw.a(60)], [draw.b(50)], torch.tensor([0, -1, 2, -1], dtype=torch.int32), rank=1)
    assert same(y[[1, 3]], before[[1, 3]])
    assert not torch.equal(y[[0, 2]], before[[0, 2]])


def test_add_takes_rows_of_a_wider_tensor(rank=3):
    draw = Draw(rank, 8, torch.float32)
    members, wide, x = draw.members(5), draw.normal(5, 100), draw.normal(5, 90)[:, 10:70]
    y, a, b = wide[:, 20:70], [draw.a(60)], [draw.b(50)]
    before, want = wide.clone(), y.double() + exact.terms(x, a, b, members, rank, 1.0)
    population.add(y, x, a, b, members, rank=rank)
    assert worst(y, want) < BOUNDS[torch.float32]
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 70:], before[:, 70:])


def source_of(kind: str, draw: Draw, rows: int, width: int, members: torch.Tensor):
    """A source of `norm`, and its term in float64."""
    b = draw.b(width)
    if kind == "dot":
        x, a = draw.normal(rows, 44), draw.a(44)
        return Dot(x, a, b), exact.terms(x, [a], [b], members, draw.rank, S)
    if kind == "partial":
        parts = draw.dots(rows, 5)
        return Partial(parts, b), exact.expanded(parts.double().sum(1), b, members, S)
    return None, 0.0


def check_norm(form, draw: Draw, rows: int, kind: str, carried: bool, layers: int, width: int = 72) -> None:
    members, hidden, weight = draw.members(rows), draw.normal(rows, width), draw.normal(width)
    residual = draw.normal(rows, width) if carried else None
    into_a = [draw.a(width) for _ in range(layers)]
    source, term = source_of(kind, draw, rows, width, members)
    total = hidden.double() + term + (residual.double() if residual is not None else 0.0)
    kept = hidden.clone()
    out, dots = form.norm(
        hidden, residual, weight, 1e-5, members, rank=draw.rank, scaling=S, into_a=into_a, source=source
    )
    bound = BOUNDS[draw.dtype]
    assert worst(out, exact.rms(total, weight, 1e-5)) < bound
    assert worst(hidden if residual is None else residual, total) < bound
    assert residual is None or same(hidden, kept)
    assert dots.shape == (rows, layers, draw.rank)
    assert dots.dtype == torch.float32
    for i, a in enumerate(into_a):
        assert worst(dots[:, i], exact.dots(out, a, members, draw.rank)) < 2e-5  # of the row as it was rounded


@forms
@ranks
@pytest.mark.parametrize("kind", ["none", "dot", "partial"])
@pytest.mark.parametrize("carried", [True, False], ids=["residual", "first"])
@pytest.mark.usefixtures("poisoned")
def test_norm(form, rank, padded, kind, carried):
    check_norm(form, Draw(rank, padded, torch.float32), 4, kind, carried, layers=3 if carried else 2)


@forms
@some_dtypes
@pytest.mark.parametrize("rows", [1, 5, 67])
@pytest.mark.usefixtures("poisoned")
def test_norm_in_every_dtype_and_number_of_rows(form, dtype, rows):
    check_norm(form, Draw(1, 1, dtype), rows, "partial", True, layers=2, width=96)


@forms
def test_the_last_norm_takes_no_dots(form):
    check_norm(form, Draw(2, 8, torch.float32), 3, "partial", True, layers=0)


HEADS = [(7, 1, 16, 16), (3, 3, 12, 12), (2, 1, 16, 8), (5, 2, 12, 4)]
"""Heads, key-value heads, their width, and how much of it turns: counts and widths that are no powers of two."""


def check_rotate(form, draw: Draw, rows: int, heads: int, kv_heads: int, width: int, turning: int, qk_norm: bool):
    members, dots = draw.members(rows), draw.dots(rows, 3)
    counts = (heads, kv_heads, kv_heads)
    qkv, b = draw.normal(rows, sum(counts) * width), [draw.b(n * width) for n in counts]
    table = draw.normal(40, turning)
    positions = torch.arange(rows, device=qkv.device).mul(7).remainder(40)
    q_norm, k_norm = (draw.normal(width), draw.normal(width)) if qk_norm else (None, None)
    term = torch.cat([exact.expanded(dots[:, i].double(), b[i], members, S) for i in range(3)], dim=1)
    want = exact.rotated(qkv.double() + term, table[positions], heads, kv_heads, q_norm, k_norm, 1e-5)
    before = qkv.clone()
    form.rotate(
        qkv, positions, table, dots, b, members, heads=heads, kv_heads=kv_heads, head_dim=width, rank=draw.rank,
        scaling=S, q_norm=q_norm, k_norm=k_norm, eps=1e-5,
    )  # fmt: skip
    assert worst(qkv, want) < BOUNDS[draw.dtype]
    v = slice((heads + kv_heads) * width, None)
    assert same(qkv[members < 0][:, v], before[members < 0][:, v])


@forms
@ranks
@pytest.mark.parametrize(("heads", "kv_heads", "width", "turning"), HEADS)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "normed"])
def test_rotate(form, rank, padded, heads, kv_heads, width, turning, qk_norm):
    check_rotate(form, Draw(rank, padded, torch.float32), 3, heads, kv_heads, width, turning, qk_norm)


@forms
@some_dtypes
@pytest.mark.parametrize("rows", [1, 5, 67])
def test_rotate_in_every_dtype_and_number_of_rows(form, dtype, rows):
    check_rotate(form, Draw(1, 1, dtype), rows, 7, 1, 16, 16, qk_norm=True)


def check_gate(form, draw: Draw, rows: int, width: int) -> None:
    members, dots = draw.members(rows), draw.dots(rows, 2)
    gate_up, b, down = draw.normal(rows, 2 * width), [draw.b(width), draw.b(width)], draw.a(width)
    term = torch.cat([exact.expanded(dots[:, i].double(), b[i], members, S) for i in range(2)], dim=1)
    out, parts = form.gate(gate_up, dots, b, down, members, rank=draw.rank, scaling=S)
    assert worst(out, exact.gated(gate_up.double() + term)) < BOUNDS[draw.dtype]
    assert parts.dtype == torch.float32
    assert parts.isfinite().all()
    assert worst(parts.double().sum(1), exact.dots(out, down, members, draw.rank)) < 1e-4


@forms
@ranks
@pytest.mark.parametrize("width", [50, 4300], ids=["one tile", "three tiles"])
@pytest.mark.usefixtures("poisoned")
def test_gate(form, rank, padded, width):
    check_gate(form, Draw(rank, padded, torch.float32), 4, width)


@forms
@some_dtypes
@pytest.mark.parametrize("rows", [1, 5, 67])
@pytest.mark.usefixtures("poisoned")
def test_gate_in_every_dtype_and_number_of_rows(form, dtype, rows):
    check_gate(form, Draw(1, 1, dtype), rows, 90)


@forms
def test_gate_without_a_layer_after_it(form):
    draw = Draw(2, 8, torch.float32)
    members, dots, gate_up, b = draw.members(3), draw.dots(3, 2), draw.normal(3, 100), [draw.b(50), draw.b(50)]
    whole, _ = form.gate(gate_up, dots, b, draw.a(50), members, rank=2)
    out, parts = form.gate(gate_up, dots, b, None, members, rank=2)
    assert torch.equal(out, whole)
    assert parts.shape == (3, 0, 2)


def everything(form, draw: Draw, inputs: dict, rows: slice, members: torch.Tensor, fixed: bool) -> list[torch.Tensor]:
    """Results of every function for some rows of `inputs`; factors, weights and tables are the same for all."""
    x, residual, qkv, gate_up, wide, positions, dots = (
        inputs[k][rows].clone() for k in ("x", "residual", "qkv", "gate_up", "wide", "positions", "dots")
    )
    common = {"rank": draw.rank, "scaling": S, "fixed": fixed}
    a, b, weight, table = inputs["a"], inputs["b"], inputs["weight"], inputs["table"]
    first = form.norm(x, None, weight, 1e-5, members, into_a=[a["x"]] * 3, **common)
    form.rotate(
        qkv, positions, table, dots, [b["q"], b["kv"], b["kv"]], members, heads=3, kv_heads=1, head_dim=16,
        rank=draw.rank, scaling=S, q_norm=weight[:16], k_norm=weight[16:32],
    )  # fmt: skip
    gate = form.gate(gate_up, dots[:, :2].contiguous(), [b["i"], b["i"]], a["i"], members, **common)
    second = form.norm(x, residual, weight, 1e-5, members, source=Partial(gate[1], b["x"]), **common)
    carried = residual.clone()
    third = form.norm(x, residual, weight, 1e-5, members, source=Dot(wide, a["wide"], b["x"]), **common)
    form.add(gate_up, x, [a["x"]] * 2, [b["i"], b["i"]], members, **common)
    form.add(x, wide, [a["wide"]], [b["x"]], members, **common)
    return [*first, qkv, *gate, *second, carried, *third, residual, gate_up, x]


def inputs_of(draw: Draw, rows: int, inner: int = 2100) -> dict:
    """72 wide, 3 + 1 heads of 16, `inner` between."""
    return {
        "x": draw.normal(rows, 72), "residual": draw.normal(rows, 72), "qkv": draw.normal(rows, 80),
        "gate_up": draw.normal(rows, 2 * inner), "wide": draw.normal(rows, 48), "dots": draw.dots(rows, 3),
        "positions": torch.arange(rows) % 40, "weight": draw.normal(72), "table": draw.normal(40, 16),
        "a": {"x": draw.a(72), "i": draw.a(inner), "wide": draw.a(48)},
        "b": {"x": draw.b(72), "q": draw.b(48), "kv": draw.b(16), "i": draw.b(inner)},
    }  # fmt: skip


@forms
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (3, 8)])
def test_a_row_alone_is_the_row_among_others(form, rank, padded):
    draw = Draw(rank, padded, torch.bfloat16)
    members, inputs = draw.members(71), inputs_of(draw, 71, inner=300)
    members[29] = -1
    together = everything(form, draw, inputs, slice(None), members, fixed=True)
    for row in (0, 29, 70):
        alone = everything(form, draw, inputs, slice(row, row + 1), members[row : row + 1], fixed=True)
        assert all(same(one[0], all_[row]) for one, all_ in zip(alone, together, strict=True))


def test_fixed_takes_the_same_tiles_for_all_numbers_of_rows():
    from evoalign.kernels import population_triton as kernels

    many = (1, 60, 129, 100_000)
    for rank in (1, 8, 16):
        assert len({kernels.add_tiles(3584, 18944, rows, rank, True) for rows in many}) == 1
        assert len({kernels.gate_tiles(18944, rows, rank, True) for rows in many}) == 1


@forms
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (3, 8)])
def test_rows_without_member_get_the_plain_function(form, rank, padded):
    """The same bits as in a batch without members, even where inputs are infinite and dots are not numbers."""
    draw = Draw(rank, padded, torch.bfloat16)
    members, inputs = draw.members(6), inputs_of(draw, 6)
    members[:] = torch.tensor([0, -1, 3, -1, 1, -1])
    inputs["dots"][1] = torch.nan
    inputs["wide"][3] = torch.inf
    mixed = everything(form, draw, inputs, slice(None), members, fixed=False)
    for factors in (inputs["a"], inputs["b"]):
        for factor in factors.values():
            factor.fill_(torch.nan)
    plain = everything(form, draw, inputs, slice(None), torch.full_like(members, -1), fixed=False)
    for left, right in zip(mixed, plain, strict=True):
        assert left[1::2].isfinite().all()
        assert same(left[1::2], right[1::2])


def test_no_rows_are_no_launch():
    draw = Draw(1, 1, torch.float32)
    inputs = inputs_of(draw, 1)
    members = torch.zeros(0, dtype=torch.int32)
    assert all(len(r) == 0 for r in everything(population, draw, inputs, slice(0), members, fixed=False))


def test_tensors_that_lie_otherwise_are_refused():
    draw = Draw(1, 8, torch.float32)
    members, y, x, b = draw.members(2), draw.normal(2, 8), draw.normal(2, 16), draw.b(8)
    with pytest.raises(ValueError, match="contiguous factors"):
        population.add(y, x, [draw.a(32)[..., ::2]], [b], members, rank=1)
    with pytest.raises(ValueError, match="consecutive columns"):
        population.add(y, draw.normal(2, 32)[:, ::2], [draw.a(16)], [b], members, rank=1)
    with pytest.raises(ValueError, match="dots"):
        population.gate(y, draw.dots(2, 3)[:, :2], [draw.b(4)] * 2, None, members, rank=1)


def test_without_an_interpreter_the_cpu_takes_torch(monkeypatch):
    draw = Draw(1, 8, torch.bfloat16)
    inputs, members = inputs_of(draw, 3), draw.members(3)
    twin = everything(reference, draw, inputs, slice(None), members, fixed=False)
    monkeypatch.delenv("TRITON_INTERPRET")
    got = everything(population, draw, inputs, slice(None), members, fixed=False)
    assert all(same(left, right) for left, right in zip(got, twin, strict=True))


def test_warm_up_calls_every_kernel(monkeypatch):
    from evoalign.kernels import population_triton as kernels

    called = []
    for name in ("add", "norm", "rotate", "gate"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _f=real, _n=name, **k: called.append(_n) or _f(*a, **k))
    monkeypatch.setattr(kernels, "row_sizes", lambda: (1, 2))
    population.warm_up(
        "cpu", torch.float32, hidden=32, intermediate=48, heads=2, kv_heads=1, head_dim=16, rank=2, padded_rank=8,
        qk_norm=True,
    )  # fmt: skip
    assert sorted(called) == sorted(["norm"] * 8 + ["rotate"] * 2 + ["gate"] * 2 + ["add"] * 8)


class Block:
    """Layers of Qwen's kind, 72 wide, 3 + 1 heads of 16, 100 between; any function of q, k and v for the attention."""

    counts = (3, 1, 1)

    def __init__(self, draw: Draw, layers: int, qk_norm: bool) -> None:
        self.draw, self.table, self.final = draw, draw.normal(40, 16), draw.normal(72)
        self.layers = [self._layer(qk_norm) for _ in range(layers)]

    def _layer(self, qk_norm: bool) -> dict:
        draw = self.draw
        shapes = {"qkv": (72, (48, 16, 16)), "o": (48, (72,)), "up": (72, (100, 100)), "down": (100, (72,))}
        layer = {name: self._linear(*shape) for name, shape in shapes.items()}
        norms = {"before": draw.normal(72), "after": draw.normal(72)}
        heads = {"q_norm": draw.normal(16) if qk_norm else None, "k_norm": draw.normal(16) if qk_norm else None}
        return {**layer, **norms, "heads": heads}

    def _linear(self, inner: int, outer: tuple[int, ...]) -> tuple:
        draw = self.draw
        weight = draw.normal(sum(outer), inner, scale=inner**-0.5)
        return weight, tuple(draw.a(inner) for _ in outer), tuple(draw.b(n) for n in outer)

    def attention(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.split([16 * n for n in self.counts], dim=-1)
        return torch.tanh(q * k.repeat(1, 3)) + v.repeat(1, 3)

    def by_kernels(self, hidden: torch.Tensor, positions: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
        """As an engine would call them."""
        common = {"rank": self.draw.rank, "scaling": S}

        def gemm(x, weight):
            return (x.float() @ weight.float().T).to(x.dtype)

        residual, source = None, None
        for layer in self.layers:
            (qkv_w, qkv_a, qkv_b), (o_w, o_a, o_b) = layer["qkv"], layer["o"]
            (up_w, up_a, up_b), (down_w, down_a, down_b) = layer["up"], layer["down"]
            x, dots = population.norm(
                hidden, residual, layer["before"], 1e-5, members, into_a=qkv_a, source=source, **common
            )
            residual = hidden if residual is None else residual
            qkv = gemm(x, qkv_w)
            population.rotate(
                qkv, positions, self.table, dots, qkv_b, members, heads=3, kv_heads=1, head_dim=16, eps=1e-5,
                **layer["heads"], **common,
            )  # fmt: skip
            attended = self.attention(qkv.float()).to(qkv.dtype)
            x, dots = population.norm(
                gemm(attended, o_w), residual, layer["after"], 1e-5, members, into_a=up_a,
                source=Dot(attended, o_a[0], o_b[0]), **common,
            )  # fmt: skip
            x, parts = population.gate(gemm(x, up_w), dots, up_b, down_a[0], members, **common)
            hidden, source = gemm(x, down_w), Partial(parts, down_b[0])
        return population.norm(hidden, residual, self.final, 1e-5, members, source=source, **common)[0]

    def exactly(self, hidden: torch.Tensor, positions: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
        """The same model row by row in float64, each row with its member's own dense weights."""

        def linear(x, layer, slot):
            weight, a, b = layer
            if slot >= 0:
                low = [exact.matrix(i, j, slot, self.draw.rank, S) for i, j in zip(a, b, strict=True)]
                return x @ (weight.double() + torch.cat(low)).T
            return x @ weight.double().T

        rows = []
        for row, slot in enumerate(members.tolist()):
            total = hidden[row : row + 1].double()
            angles = self.table[positions[row : row + 1]]
            for layer in self.layers:
                qkv = linear(exact.rms(total, layer["before"], 1e-5), layer["qkv"], slot)
                turned = exact.rotated(qkv, angles, 3, 1, layer["heads"]["q_norm"], layer["heads"]["k_norm"], 1e-5)
                total = total + linear(self.attention(turned), layer["o"], slot)
                inner = exact.gated(linear(exact.rms(total, layer["after"], 1e-5), layer["up"], slot))
                total = total + linear(inner, layer["down"], slot)
            rows.append(exact.rms(total, self.final, 1e-5))
        return torch.cat(rows)


@some_dtypes
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (3, 8)])
def test_three_layers_are_the_model_with_each_members_weights(rank, padded, dtype, qk_norm):
    draw = Draw(rank, padded, dtype)
    model = Block(draw, 3, qk_norm)
    members = torch.tensor([2, -1, 0, 3, 3, 1, -1], dtype=torch.int32)
    hidden, positions = draw.normal(7, 72), torch.tensor([0, 5, 39, 1, 2, 2, 17])
    want = model.exactly(hidden, positions, members)
    plain = model.exactly(hidden, positions, torch.full_like(members, -1))
    got = model.by_kernels(hidden.clone(), positions, members)
    apart = float(((plain - want).norm(dim=1) / want.norm(dim=1))[members >= 0].min())
    assert apart > 0.2  # or the bound would prove nothing
    assert worst(got, want) < 6 * BOUNDS[dtype]
