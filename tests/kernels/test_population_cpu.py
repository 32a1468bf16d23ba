# SPDX-License-Identifier: Apache-2.0
"""The population's functions in C, against float64 and against plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from population_checks import (
    SMALL,
    Shape,
    check_add,
    check_gate,
    check_norm,
    check_rotate,
    everything,
    inputs_of,
    poisoned,
)
from population_math import Draw, same, worst

from evoalign.kernels import compiled, population, population_cpu, reference
from evoalign.kernels.population import Terms

__all__ = ["poisoned"]  # a fixture

needs_library = pytest.mark.skipif(not compiled.here(), reason="no C compiler made the library")
ORDERS: dict[str, list[int]] = {
    "even": [0, 0, 1, 1, 2, 2, 3, 3],
    "from the second": [1, 1, 1, 1, 2, 2, 2, 2],
    "one member": [2] * 8,
    "one each": [0, 1, 2, 3],
    "rows have left": [0, 0, 0, 1, 2, 3, 3, 3],
    "a member has left": [0, 0, 0, 0, 2, 2, 3, 3],
    "in no order": [3, 0, 2, 2, 1, 0, 3, 1],
    "backwards": [3, 2, 1, 0],
    "no member": [-1] * 4,
    "some without member": [0, -1, 1, 1],
}
orders = pytest.mark.parametrize("order", ORDERS)
ranks = pytest.mark.parametrize(("rank", "padded"), [(1, 1), (1, 8), (3, 8), (4, 4)])


@dataclass
class Ordered(Draw):
    """Inputs whose rows have the slots of `order`."""

    order: list[int] = field(default_factory=list)

    def members(self, rows: int) -> torch.Tensor:
        assert rows == len(self.order)
        return torch.tensor(self.order, dtype=torch.int32)


def drawn(order: str, rank: int, padded: int) -> Ordered:
    return Ordered(rank, padded, torch.float32, order=ORDERS[order])


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "no member"])  # whose dots have no size
@ranks
@pytest.mark.usefixtures("poisoned")
def test_every_c_function_equals_float64(order: str, rank: int, padded: int) -> None:
    """Slots without rows and ranks beyond the one in use are NaN: they must not be read."""
    rows = len(ORDERS[order])
    check_add(population_cpu, drawn(order, rank, padded), rows, 60, (96, 40, 40))
    for kind in ("none", "dot", "partial"):
        for carried in (True, False):
            check_norm(population_cpu, drawn(order, rank, padded), rows, kind, carried=carried, layers=3)
    check_norm(population_cpu, drawn(order, rank, padded), rows, "dot", layers=0)
    for qk_norm in (False, True):
        check_rotate(population_cpu, drawn(order, rank, padded), rows, 7, 1, 16, 8, qk_norm=qk_norm)
    check_gate(population_cpu, drawn(order, rank, padded), rows, 50)


@orders
@ranks
def test_c_equals_torch_up_to_rounding(order: str, rank: int, padded: int) -> None:
    draw = drawn(order, rank, padded)
    members = draw.members(len(ORDERS[order]))
    inputs = inputs_of(draw, SMALL, len(members))
    found, wanted = (
        everything(form, draw, SMALL, inputs, slice(None), members, fixed=True) for form in (population_cpu, reference)
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert not other.numel() or worst(one, other) < 2e-5


@needs_library
@ranks
@orders
def test_a_row_alone_is_the_row_among_others(order: str, rank: int, padded: int) -> None:
    shape = Shape(60, 90, 3, 1, 14)
    draw = drawn(order, rank, padded)
    members = draw.members(len(ORDERS[order]))
    inputs = inputs_of(draw, shape, len(members))
    together = everything(population_cpu, draw, shape, inputs, slice(None), members, fixed=True)
    for row in range(len(members)):
        one = slice(row, row + 1)
        alone = everything(population_cpu, draw, shape, inputs, one, members[one], fixed=True)
        assert all(same(a[0], t[row]) for a, t in zip(alone, together, strict=True))


def test_add_reads_members_changed_in_place() -> None:
    draw, members = Draw(1, 1, torch.float32), torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    x, a, b = draw.normal(4, 60), draw.a(60), draw.b(50)
    found = []
    for order in ([0, 0, 1, 1], [1, 1, 0, 0], [2, 0, 1, 1]):
        members[:] = torch.tensor(order)
        y, wanted = torch.zeros(4, 50), torch.zeros(4, 50)
        population_cpu.add(y, x, [a], [b], Terms(members, 1))
        reference.add(wanted, x, [a], [b], Terms(members, 1))
        assert worst(y, wanted) < 2e-6
        found.append(y)
    assert not torch.equal(found[0], found[1])


def test_gate_has_the_same_bits_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With enough rows for several threads."""
    monkeypatch.setattr(compiled, "_SHARED", 0)
    draw, members = Draw(2, 2, torch.float32), torch.arange(300, dtype=torch.int32) % 4 - 1
    gate_up, dots, b, down = draw.normal(300, 2 * 1000), draw.dots(300, 2), draw.b(1000), draw.a(1000)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(population_cpu.gate(gate_up, dots, [b, b], down, Terms(members, 2)))
    finally:
        torch.set_num_threads(before)
    assert all(same(one, other) for one, other in zip(*found, strict=True))
    wanted = reference.gate(gate_up, dots, [b, b], down, Terms(members, 2))
    assert all(worst(one, other) < 2e-5 for one, other in zip(found[0], wanted, strict=True))


def test_gate_handles_extreme_values_and_nan() -> None:
    """Where e^-x overflows float32, and for NaN."""
    left = torch.tensor([[-1e38, -1e4, -120.0, -88.5, -87.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 88.5, 1e4, torch.nan]])
    gate_up, nobody = torch.cat([left, torch.ones_like(left)], dim=1), torch.tensor([-1], dtype=torch.int32)
    b = torch.zeros(1, 1, left.shape[1], 1)
    found, _ = population_cpu.gate(gate_up, torch.zeros(1, 2, 1), [b, b], None, Terms(nobody, 1))
    wanted = torch.nn.functional.silu(left.double())
    assert bool(found[0, -1].isnan())
    assert torch.allclose(found[:, :-1].double(), wanted[:, :-1], rtol=1e-6, atol=1e-30)


@needs_library
def test_torch_runs_without_the_library_and_for_unsupported_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, members = Draw(1, 1, torch.float32), torch.tensor([0, -1, 1], dtype=torch.int32)
    x, a, b = draw.normal(3, 60), draw.a(60), draw.b(50)

    def added(form, x: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(3, 50)
        form.add(y, x, [a.to(x.dtype)], [b.to(x.dtype)], Terms(members, 1))
        return y

    wide = draw.normal(3, 120)[:, ::2]
    many, sums = Draw(17, 17, torch.float32), (torch.zeros(3, 50), torch.zeros(3, 50))
    wide_a, wide_b = many.a(60), many.b(50)
    for form, y in zip((population_cpu, reference), sums, strict=True):  # C has room for rank 16
        form.add(y, x, [wide_a], [wide_b], Terms(members, 17))
    assert same(*sums)
    for other in (x.bfloat16(), wide):
        assert same(added(population_cpu, other), added(reference, other))
    assert not same(added(population_cpu, x), added(reference, x)), "the library is not there: nothing is tested"
    monkeypatch.setenv("EVOALIGN_COMPILED", "0")
    assert same(added(population_cpu, x), added(reference, x))


def test_population_uses_c_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    draw = drawn("even", 1, 1)
    members = draw.members(8)
    inputs = inputs_of(draw, SMALL, 8)
    found, wanted = (
        everything(form, draw, SMALL, inputs, slice(None), members, fixed=True) for form in (population, population_cpu)
    )
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
