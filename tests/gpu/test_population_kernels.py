# SPDX-License-Identifier: Apache-2.0
"""The population kernels on a GPU at the widths of real models, against float64 and in a CUDA graph."""

import pytest
import torch
from population_checks import (
    Block,
    S,
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

from evoalign.kernels import available, population
from evoalign.kernels.population import Heads, Terms

__all__ = ["poisoned"]  # a fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and available("cuda")), reason="no CUDA device, or no Triton"),
]

QWEN_7B = Shape(3584, 18944, 28, 4, 128)
QWEN_HALF_B = Shape(896, 4864, 14, 2, 64)
CASES = [
    (QWEN_7B, torch.bfloat16, 1, 1),
    (QWEN_7B, torch.bfloat16, 8, 8),
    (QWEN_7B, torch.bfloat16, 16, 16),
    (QWEN_7B, torch.float16, 1, 1),
    (QWEN_HALF_B, torch.bfloat16, 1, 8),
    (QWEN_HALF_B, torch.bfloat16, 2, 8),
    (QWEN_HALF_B, torch.float16, 8, 8),
    (QWEN_HALF_B, torch.float32, 3, 16),
]
"""Shape, dtype, rank, padded rank: few, because each is compiled."""
OTHER_HEADS = [(28, 4, 128, 64), (10, 10, 80, 80), (64, 8, 64, 64)]
"""Partial rotation, heads that are no power of two, many heads."""


@pytest.mark.parametrize(("shape", "dtype", "rank", "padded"), CASES)
@pytest.mark.usefixtures("poisoned")
def test_every_kernel(shape, dtype, rank, padded):
    draw = Draw(rank, padded, dtype, "cuda")
    hidden, inner, heads, kv_heads, head = shape
    q, kv = heads * head, kv_heads * head
    check_add(population, draw, 67, hidden, (q, kv, kv))
    check_add(population, draw, 5, hidden, (inner, inner))
    check_add(population, draw, 67, inner, (hidden,))
    check_norm(population, draw, 67, "none", carried=False, layers=3, width=hidden)
    check_norm(population, draw, 67, "dot", layers=2, width=hidden, inner=q)
    check_norm(population, draw, 1, "partial", layers=3, width=hidden)
    check_rotate(population, draw, 67, heads, kv_heads, head, head, qk_norm=False)
    check_gate(population, draw, 67, inner)


@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (8, 8)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "turning"), [(28, 4, 128, 64), (10, 10, 80, 80), (64, 8, 64, 64)]
)
def test_rotate_handles_the_heads_of_other_models(rank, padded, heads, kv_heads, width, turning):
    """Partial rotation, heads that are no power of two, many heads; with norms of q and k."""
    check_rotate(
        population, Draw(rank, padded, torch.bfloat16, "cuda"), 9, heads, kv_heads, width, turning, qk_norm=True
    )


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
    assert same(out[-3:], last)
    assert same(parts[-3:], last_parts)
    assert not out[:-3].any()
    population.add(gate_up, x, a, b, Terms(members, 1))
    population.add(few, x[-3:], a, b, Terms(members[-3:], 1))
    assert same(gate_up[-3:], few)
    assert not gate_up[:-3].any()


@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (8, 8)])
def test_a_row_alone_is_the_row_among_others(rank, padded):
    draw = Draw(rank, padded, torch.bfloat16, "cuda")
    members, inputs = draw.members(300), inputs_of(draw, QWEN_HALF_B, 300)
    together = everything(population, draw, QWEN_HALF_B, inputs, slice(None), members, fixed=True)
    for row in (0, 100, 299):
        one = slice(row, row + 1)
        alone = everything(population, draw, QWEN_HALF_B, inputs, one, members[one], fixed=True)
        assert all(same(left[0], right[row]) for left, right in zip(alone, together, strict=True))


def test_rows_without_member_get_the_plain_function():
    draw = Draw(1, 1, torch.bfloat16, "cuda")
    members, inputs = draw.members(64), inputs_of(draw, QWEN_HALF_B, 64)
    mixed = everything(population, draw, QWEN_HALF_B, inputs, slice(None), members, fixed=False)
    for factors in (inputs["a"], inputs["b"]):
        for factor in factors.values():
            factor.fill_(torch.nan)
    none = torch.full_like(members, -1)
    plain = everything(population, draw, QWEN_HALF_B, inputs, slice(None), none, fixed=False)
    without = members < 0
    assert without.any()
    assert all(same(left[without], right[without]) for left, right in zip(mixed, plain, strict=True))


@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (8, 8)])
def test_a_graph_replays_with_new_members_and_factors(rank, padded):
    rows = 12
    draw = Draw(rank, padded, torch.bfloat16, "cuda")
    model = Block(draw, QWEN_HALF_B, 2, qk_norm=True)
    hidden, members = draw.normal(rows, QWEN_HALF_B.hidden), draw.members(rows)
    positions = torch.arange(rows, device="cuda")

    def forward() -> torch.Tensor:
        return model.by_kernels(population, hidden.clone(), positions, members)

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


def test_another_number_of_rows_compiles_nothing():
    from evoalign.kernels import population_triton as kernels

    draw = Draw(1, 1, torch.bfloat16, "cuda")
    inputs = inputs_of(draw, QWEN_HALF_B, 128)
    jitted = (kernels._add, kernels._norm, kernels._rotate, kernels._gate)

    def compiled() -> int:
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in jitted)

    members = draw.members(128)
    everything(population, draw, QWEN_HALF_B, inputs, slice(0, 64), members[:64], fixed=False)
    before = compiled()
    for rows in (1, 2, 7, 16, 33, 128):
        everything(population, draw, QWEN_HALF_B, inputs, slice(0, rows), members[:rows], fixed=False)
    for start in (1, 2, 3):  # members that lie off the 16-byte grid
        here = slice(start, start + 5)
        everything(population, draw, QWEN_HALF_B, inputs, here, members[here], fixed=False)
    assert compiled() == before


def test_warm_up_leaves_nothing_to_compile():
    from evoalign.kernels import population_triton as kernels

    hidden, inner, heads, kv_heads, head = QWEN_HALF_B
    draw = Draw(2, 16, torch.float16, "cuda")
    shape = {"hidden": hidden, "intermediate": inner, "rank": 2, "padded_rank": 16}
    population.warm_up("cuda", torch.float16, Heads(heads, kv_heads, head), **shape)
    jitted = (kernels._add, kernels._norm, kernels._rotate, kernels._gate)
    before = [len(k.device_caches[torch.cuda.current_device()][0]) for k in jitted]
    model = Block(draw, QWEN_HALF_B, 2)
    members = draw.members(6)
    model.by_kernels(population, draw.normal(6, hidden), torch.arange(6, device="cuda"), members)
    y, x = draw.normal(6, hidden), draw.normal(6, inner)
    population.add(y, x, [draw.a(inner)], [draw.b(hidden)], Terms(members, 2, S))
    assert [len(k.device_caches[torch.cuda.current_device()][0]) for k in jitted] == before
