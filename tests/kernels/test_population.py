# SPDX-License-Identifier: Apache-2.0
"""The population kernels in Triton's interpreter and their equivalents in torch, against float64."""

import population_math as exact
import pytest
import torch
from population_checks import (
    SMALL,
    Block,
    check_add,
    check_gate,
    check_norm,
    check_rotate,
    everything,
    inputs_of,
    poisoned,
)
from population_math import BOUNDS, Draw, same, worst

from evoalign.kernels import population, reference
from evoalign.kernels.population import Heads, Terms

__all__ = ["poisoned"]  # a fixture

RANKS = [(1, 1), (1, 8), (2, 8), (3, 8), (8, 8), (3, 16), (16, 16)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ranks = pytest.mark.parametrize(("rank", "padded"), RANKS)
forms = pytest.mark.parametrize("form", [population, reference], ids=["triton", "torch"])
some_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


LAYERS = [(60, (96, 40, 40)), (4100, (72,)), (72, (8200, 90)), (33, (50, 50))]
"""Inputs and outputs: fused layers, an input wider than one step, an output of many tiles, odd widths."""


@pytest.mark.first("torch", "-3-8", others="long")
@forms
@ranks
@pytest.mark.parametrize(("inner", "outer"), LAYERS)
def test_add(form, rank, padded, inner, outer):
    check_add(form, Draw(rank, padded, torch.float32), 5, inner, outer)


@pytest.mark.first("1-", "5-", others="long")
@forms
@some_dtypes
@pytest.mark.parametrize("rows", [1, 5, 67])
def test_add_in_every_dtype_and_number_of_rows(form, dtype, rows):
    check_add(form, Draw(2, 8, dtype), rows, 60, (96, 40))


@forms
def test_add_leaves_rows_without_member_alone(form):
    draw = Draw(1, 1, torch.bfloat16)
    y, x = draw.normal(4, 50), draw.normal(4, 60)
    y[1, :3] = torch.tensor([-0.0, torch.nan, torch.inf])
    x[1] = torch.nan
    before = y.clone()
    form.add(y, x, [draw.a(60)], [draw.b(50)], Terms(torch.tensor([0, -1, 2, -1], dtype=torch.int32), 1))
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


@pytest.mark.first("torch", "-3-8", "-8-8", others="long")
@forms
@ranks
@pytest.mark.parametrize("kind", ["none", "dot", "partial"])
@pytest.mark.parametrize("carried", [True, False], ids=["residual", "first"])
@pytest.mark.usefixtures("poisoned")
def test_norm(form, rank, padded, kind, carried):
    check_norm(form, Draw(rank, padded, torch.float32), 4, kind, carried=carried, layers=3 if carried else 2)


@pytest.mark.first("1-", "5-", others="long")
@forms
@some_dtypes
@pytest.mark.parametrize("rows", [1, 5, 67])
@pytest.mark.usefixtures("poisoned")
def test_norm_in_every_dtype_and_number_of_rows(form, dtype, rows):
    check_norm(form, Draw(1, 1, dtype), rows, "partial", width=96)


@forms
def test_norm_without_a_next_projection_returns_no_dots(form):
    check_norm(form, Draw(2, 8, torch.float32), 3, "partial", layers=0)


HEADS = [(7, 1, 16, 16), (3, 3, 12, 12), (2, 1, 16, 8), (5, 2, 12, 4)]
"""Heads, key-value heads, head width, rotary width: counts and widths that are no powers of two."""


@pytest.mark.first("torch", "2-1-16-8-2-8", others="long")
@forms
@ranks
@pytest.mark.parametrize(("heads", "kv_heads", "width", "turning"), HEADS)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "normed"])
def test_rotate(form, rank, padded, heads, kv_heads, width, turning, qk_norm):
    check_rotate(form, Draw(rank, padded, torch.float32), 3, heads, kv_heads, width, turning, qk_norm=qk_norm)


@pytest.mark.first("1-", "5-", others="long")
@forms
@some_dtypes
@pytest.mark.parametrize("rows", [1, 5, 67])
def test_rotate_in_every_dtype_and_number_of_rows(form, dtype, rows):
    check_rotate(form, Draw(1, 1, dtype), rows, 7, 1, 16, 16, qk_norm=True)


@pytest.mark.first("torch", "-3-8", others="long")
@forms
@ranks
@pytest.mark.parametrize("width", [50, 4300], ids=["one tile", "three tiles"])
@pytest.mark.usefixtures("poisoned")
def test_gate(form, rank, padded, width):
    check_gate(form, Draw(rank, padded, torch.float32), 4, width)


@pytest.mark.first("1-", "5-", others="long")
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
    whole, _ = form.gate(gate_up, dots, b, draw.a(50), Terms(members, 2))
    out, parts = form.gate(gate_up, dots, b, None, Terms(members, 2))
    assert torch.equal(out, whole)
    assert parts.shape == (3, 0, 2)


@forms
@pytest.mark.first("torch", others="long")
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (3, 8)])
def test_a_row_alone_is_the_row_among_others(form, rank, padded):
    draw = Draw(rank, padded, torch.bfloat16)
    members, inputs = draw.members(71), inputs_of(draw, SMALL, 71)
    members[29] = -1
    together = everything(form, draw, SMALL, inputs, slice(None), members, fixed=True)
    for row in (0, 29, 70):
        alone = everything(form, draw, SMALL, inputs, slice(row, row + 1), members[row : row + 1], fixed=True)
        assert all(same(one[0], all_[row]) for one, all_ in zip(alone, together, strict=True))


def test_add_tiles_do_not_depend_on_rows_when_fixed():
    from evoalign.kernels import population_triton as kernels

    many = (1, 60, 129, 100_000)
    for rank in (1, 8, 16):
        assert len({kernels.add_tiles(3584, 18944, rows, rank, True) for rows in many}) == 1


@forms
@pytest.mark.first("torch", others="long")
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (3, 8)])
def test_rows_without_member_get_the_plain_function(form, rank, padded):
    """The bits are those of a batch without members, even if inputs are infinite and dots are NaN."""
    draw = Draw(rank, padded, torch.bfloat16)
    members, inputs = draw.members(6), inputs_of(draw, SMALL, 6)
    members[:] = torch.tensor([0, -1, 3, -1, 1, -1])
    inputs["dots"][1] = torch.nan
    inputs["wide"][3] = torch.inf
    mixed = everything(form, draw, SMALL, inputs, slice(None), members, fixed=False)
    for factors in (inputs["a"], inputs["b"]):
        for factor in factors.values():
            factor.fill_(torch.nan)
    plain = everything(form, draw, SMALL, inputs, slice(None), torch.full_like(members, -1), fixed=False)
    for left, right in zip(mixed, plain, strict=True):
        assert left[1::2].isfinite().all()
        assert same(left[1::2], right[1::2])


@forms
def test_norm_and_gate_return_zero_dots_for_rows_without_member(form):
    """Even for a NaN row, so that no later sum includes it."""
    draw = Draw(2, 8, torch.float32)
    x, members = draw.normal(2, 72), torch.tensor([1, -1], dtype=torch.int32)
    x[1] = torch.nan
    _, dots = form.norm(x, None, draw.normal(72), 1e-5, Terms(members, 2), [draw.a(72)] * 2)
    gate_up, b = draw.normal(2, 100), [draw.b(50)] * 2
    gate_up[1] = torch.nan
    _, parts = form.gate(gate_up, dots, b, draw.a(50), Terms(members, 2))
    assert dots[0].all() and parts[0].all()
    assert not dots[1].any() and not parts[1].any()


def test_all_functions_accept_zero_rows():
    draw = Draw(1, 1, torch.float32)
    inputs = inputs_of(draw, SMALL, 1)
    members = torch.zeros(0, dtype=torch.int32)
    assert all(len(r) == 0 for r in everything(population, draw, SMALL, inputs, slice(0), members, fixed=False))


def test_strided_tensors_are_refused():
    draw = Draw(1, 8, torch.float32)
    members, y, x, b = draw.members(2), draw.normal(2, 8), draw.normal(2, 16), draw.b(8)
    with pytest.raises(ValueError, match="contiguous factors"):
        population.add(y, x, [draw.a(32)[..., ::2]], [b], Terms(members, 1))
    with pytest.raises(ValueError, match="consecutive columns"):
        population.add(y, draw.normal(2, 32)[:, ::2], [draw.a(16)], [b], Terms(members, 1))
    with pytest.raises(ValueError, match="dots"):
        population.gate(y, draw.dots(2, 3)[:, :2], [draw.b(4)] * 2, None, Terms(members, 1))


def test_population_uses_torch_on_a_cpu_without_interpreter(monkeypatch):
    draw = Draw(1, 8, torch.bfloat16)
    inputs, members = inputs_of(draw, SMALL, 3), draw.members(3)
    twin = everything(reference, draw, SMALL, inputs, slice(None), members, fixed=False)
    monkeypatch.delenv("TRITON_INTERPRET")
    got = everything(population, draw, SMALL, inputs, slice(None), members, fixed=False)
    assert all(same(left, right) for left, right in zip(got, twin, strict=True))


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
    got = model.by_kernels(population, hidden.clone(), positions, members)
    apart = float(((plain - want).norm(dim=1) / want.norm(dim=1))[members >= 0].min())
    assert apart > 0.2  # or the bound would prove nothing
    assert worst(got, want) < 6 * BOUNDS[dtype]
