# SPDX-License-Identifier: Apache-2.0
"""The population kernels in Triton's interpreter, in C and in plain torch, against float64."""

from __future__ import annotations

import population_checks as exact
import pytest
import torch
from population_checks import BOUNDS, SMALL, Block, Draw, everything, inputs_of, poisoned, same, worst

from evoalign.kernels import compiled, population, reference
from evoalign.kernels.population import Heads, Terms

__all__ = ["poisoned"]  # a fixture

RANKS = [(1, 1), (1, 8), (2, 8), (3, 8), (8, 8), (3, 16), (16, 16)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ranks = pytest.mark.parametrize(("rank", "padded"), RANKS)
some_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
fast = pytest.mark.first("-3-8", "[c-", others="long")
fast_rows = pytest.mark.first("1-", "5-", "[c-", others="long")
needs_library = pytest.mark.skipif(not compiled.here(), reason="no C compiler made the library")

LAYERS = [(60, (96, 40, 40)), (4100, (72,)), (72, (8200, 90)), (33, (50, 50))]
"""Inputs and outputs: fused layers, an input wider than one step, an output of many tiles, odd widths."""
HEADS = [(7, 1, 16, 16), (3, 3, 12, 12), (2, 1, 16, 8), (5, 2, 12, 4)]
"""Heads, key-value heads, head width, rotary width: counts and widths that are no powers of two."""


@pytest.fixture(params=["triton", "c", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose the form; in C only float32 is computed, and torch computes the rest."""
    if request.param != "triton":
        monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("EVOALIGN_COMPILED", "0" if request.param == "torch" else "1")
    return request.param


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")


@fast
@pytest.mark.usefixtures("form")
@ranks
@pytest.mark.parametrize(("inner", "outer"), LAYERS)
def test_add(rank, padded, inner, outer):
    exact.check_add(Draw(rank, padded, torch.float32), 5, inner, outer)


@fast
@pytest.mark.usefixtures("form", "poisoned")
@ranks
@pytest.mark.parametrize("kind", ["none", "dot", "partial"])
@pytest.mark.parametrize("carried", [True, False], ids=["residual", "first"])
def test_norm(rank, padded, kind, carried):
    exact.check_norm(Draw(rank, padded, torch.float32), 4, kind, carried=carried, layers=3 if carried else 2)


@fast
@pytest.mark.usefixtures("form")
@ranks
@pytest.mark.parametrize(("heads", "kv_heads", "width", "turning"), HEADS)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "normed"])
def test_rotate(rank, padded, heads, kv_heads, width, turning, qk_norm):
    exact.check_rotate(Draw(rank, padded, torch.float32), 3, heads, kv_heads, width, turning, qk_norm=qk_norm)


@fast
@pytest.mark.usefixtures("form", "poisoned")
@ranks
@pytest.mark.parametrize("width", [50, 4300], ids=["one tile", "three tiles"])
def test_gate(rank, padded, width):
    exact.check_gate(Draw(rank, padded, torch.float32), 4, width)


@fast_rows
@pytest.mark.usefixtures("form", "poisoned")
@some_dtypes
@pytest.mark.parametrize("rows", [1, 5, 67])
def test_every_dtype_and_number_of_rows(dtype, rows):
    exact.check_add(Draw(2, 8, dtype), rows, 60, (96, 40))
    exact.check_norm(Draw(1, 1, dtype), rows, "partial", width=96)
    exact.check_rotate(Draw(1, 1, dtype), rows, 7, 1, 16, 16, qk_norm=True)
    exact.check_gate(Draw(1, 1, dtype), rows, 90)


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
    draw = Draw(rank, 8, torch.float32)
    members, wide, x = draw.members(5), draw.normal(5, 100), draw.normal(5, 90)[:, 10:70]
    y, a, b = wide[:, 20:70], [draw.a(60)], [draw.b(50)]
    before, want = wide.clone(), y.double() + exact.terms(x, a, b, members, rank, 1.0)
    population.add(y, x, a, b, Terms(members, rank))
    assert worst(y, want) < BOUNDS[torch.float32]
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 70:], before[:, 70:])


@pytest.mark.usefixtures("form")
def test_norm_and_gate_without_a_next_projection_return_no_dots():
    exact.check_norm(Draw(2, 8, torch.float32), 3, "partial", layers=0)
    exact.check_norm(Draw(2, 8, torch.float32), 3, "dot", layers=0)
    draw = Draw(2, 8, torch.float32)
    members, dots, gate_up, b = draw.members(3), draw.dots(3, 2), draw.normal(3, 100), [draw.b(50), draw.b(50)]
    whole, _ = population.gate(gate_up, dots, b, draw.a(50), Terms(members, 2))
    out, parts = population.gate(gate_up, dots, b, None, Terms(members, 2))
    assert torch.equal(out, whole)
    assert parts.shape == (3, 0, 2)


@pytest.mark.first("torch", "c-", others="long")
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (3, 8)])
def test_a_row_alone_is_the_row_among_others(form, rank, padded):
    dtype = torch.float32 if form == "c" else torch.bfloat16
    exact.check_row_alone(Draw(rank, padded, dtype), SMALL, 71, (0, 29, 70))


def test_add_tiles_do_not_depend_on_rows_when_fixed():
    from evoalign.kernels import population_triton as kernels

    many = (1, 60, 129, 100_000)
    for rank in (1, 8, 16):
        assert len({kernels.add_tiles(3584, 18944, rows, rank, True) for rows in many}) == 1


@pytest.mark.first("torch", "c-", others="long")
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (3, 8)])
def test_rows_without_member_get_the_plain_function(form, rank, padded):
    """Even if inputs are infinite and dots are NaN."""
    draw = Draw(rank, padded, torch.float32 if form == "c" else torch.bfloat16)
    members, inputs = draw.members(6), inputs_of(draw, SMALL, 6)
    members[:] = torch.tensor([0, -1, 3, -1, 1, -1])
    inputs["dots"][1] = torch.nan
    inputs["wide"][3] = torch.inf
    exact.check_plain_rows(draw, SMALL, members, inputs)


@pytest.mark.usefixtures("form")
def test_norm_and_gate_return_zero_dots_for_rows_without_member():
    """Even for a NaN row, so that no later sum includes it."""
    draw = Draw(2, 8, torch.float32)
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
    draw, members = Draw(1, 1, torch.float32), torch.tensor([0, 0, 1, 1], dtype=torch.int32)
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
    draw = Draw(1, 1, torch.float32)
    members = torch.zeros(0, dtype=torch.int32)
    found = everything(draw, SMALL, inputs_of(draw, SMALL, 1), slice(0), members, fixed=False)
    assert all(len(r) == 0 for r in found)


def test_strided_tensors_are_refused():
    draw = Draw(1, 8, torch.float32)
    members, y, x, b = draw.members(2), draw.normal(2, 8), draw.normal(2, 16), draw.b(8)
    with pytest.raises(ValueError, match="contiguous factors"):
        population.add(y, x, [draw.a(32)[..., ::2]], [b], Terms(members, 1))
    with pytest.raises(ValueError, match="consecutive columns"):
        population.add(y, draw.normal(2, 32)[:, ::2], [draw.a(16)], [b], Terms(members, 1))
    with pytest.raises(ValueError, match="dots"):
        population.gate(y, draw.dots(2, 3)[:, :2], [draw.b(4)] * 2, None, Terms(members, 1))


@needs_library
@pytest.mark.usefixtures("in_c")
def test_torch_runs_without_the_library_and_for_unsupported_tensors(monkeypatch):
    draw, members = Draw(1, 1, torch.float32), torch.tensor([0, -1, 1], dtype=torch.int32)
    x, wide, many = draw.normal(3, 60), draw.normal(3, 120)[:, ::2], Draw(17, 17, torch.float32)

    def is_torch(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
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


@pytest.mark.usefixtures("in_c")
def test_gate_has_the_same_bits_for_any_number_of_threads(monkeypatch):
    """With enough rows for several threads."""
    monkeypatch.setattr(compiled, "_SHARED", 0)
    draw, members = Draw(2, 2, torch.float32), torch.arange(300, dtype=torch.int32) % 4 - 1
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


@some_dtypes
@pytest.mark.first("1-1-plain-torch.float32", others="long")
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
    apart = float(((plain - want).norm(dim=1) / want.norm(dim=1))[members >= 0].min())
    assert apart > 0.2  # or the bound would prove nothing
    assert worst(got, want) < 6 * BOUNDS[dtype]
