# SPDX-License-Identifier: Apache-2.0
"""Attention of one token per row against float64: in plain torch, in C, and in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from evoalign.kernels import attention, compiled

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=["torch", "c", "triton"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose the form; in C only float32 is computed, and torch computes the rest."""
    if request.param != "triton":
        monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("EVOALIGN_COMPILED", "0" if request.param == "torch" else "1")
    return request.param


def exact(qkv, keys, values, slots, positions, heads, scale):
    """Return the attention row by row in float64, from a cache with the new columns."""
    width, shared = keys.shape[3], keys.shape[1]
    out = []
    for row, slot, position in zip(qkv.double(), slots.tolist(), positions.tolist(), strict=True):
        q = row[: heads * width].view(heads, width)
        group = torch.arange(heads) // (heads // shared)
        past, kept = (t[slot, :, : position + 1].double()[group] for t in (keys, values))
        weights = (torch.einsum("hd,hnd->hn", q, past) * scale).softmax(-1)
        out.append(torch.einsum("hn,hnd->hd", weights, kept).flatten())
    return torch.stack(out)


SLOTS = {"in no order": [6, 0, 3, 8, 1, 2, 7], "the first": [0, 1, 2, 3, 4, 5, 6], "the last": [2, 3, 4, 5, 6, 7, 8]}


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "shared", "width"), [(4, 2, 16), (7, 1, 24), (3, 3, 64), (34, 2, 8)])
@pytest.mark.parametrize("positions", [[0, 1, 63, 64, 65, 130, 5], [40] * 7], ids=["ragged", "even"])
@pytest.mark.parametrize("order", SLOTS)
@pytest.mark.first("[c-", "in no order-ragged-4-2-16", "the last-even-4-2-16")
@pytest.mark.last("triton-the first", "triton-the last-ragged")
def test_decode_attends_to_the_past_of_each_row_only(order, positions, heads, shared, width, dtype):
    draw = torch.Generator().manual_seed(heads)
    positions = torch.tensor(positions)
    slots, room = torch.tensor(SLOTS[order]), 131
    shape = (9, shared, room, width)
    keys, values = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
    for slot, position in zip(slots, positions, strict=True):  # unwritten memory may hold anything
        keys[slot, :, position:], values[slot, :, position:] = torch.nan, torch.nan
    qkv = torch.randn(7, (heads + 2 * shared) * width, generator=draw).to(dtype)
    before = keys.clone(), values.clone()
    found = attention.decode(qkv, keys, values, slots, positions, heads=heads, scale=width**-0.5)

    new_keys, new_values = qkv[:, heads * width :].view(7, 2 * shared, width).split(shared, dim=1)
    for i, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        before[0][slot, :, position], before[1][slot, :, position] = new_keys[i], new_values[i]
    for cache, wanted in zip((keys, values), before, strict=True):
        assert torch.equal(cache.nan_to_num(7), wanted.nan_to_num(7))
    wanted = exact(qkv, keys, values, slots, positions, heads, width**-0.5)
    assert (found.double() - wanted).abs().max() < BOUNDS[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "shared", "width"), [(4, 2, 16), (7, 1, 24)])
def test_decode_reads_beginnings_where_another_row_has_them(form, heads, shared, width, dtype):
    draw = torch.Generator().manual_seed(heads)
    slots, positions, origins = (torch.tensor(n) for n in ([3, 0, 5, 1], [70, 130, 9, 64], [2, 2, 4, 1]))
    begun = torch.tensor([70, 65, 7, 0])
    keys, values = (torch.randn(6, shared, 131, width, generator=draw).to(dtype) for _ in range(2))
    for kept in (keys, values):
        for slot, origin, columns in zip(slots, origins, begun, strict=True):
            kept[slot, :, :columns] = kept[origin, :, :columns]
    qkv = torch.randn(4, (heads + 2 * shared) * width, generator=draw).to(dtype)
    wanted = attention.decode(qkv, keys, values, slots, positions, heads=heads, scale=0.25)
    if form == "triton" or (form == "c" and dtype == torch.float32 and compiled.here()):
        for slot, columns in zip(slots, begun, strict=True):
            keys[slot, :, :columns], values[slot, :, :columns] = torch.nan, torch.nan
    found = attention.decode(qkv, keys, values, slots, positions, (origins, begun), heads=heads, scale=0.25)
    assert torch.equal(found, wanted)


def test_decode_gives_a_row_the_same_bits_in_any_batch(form):
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(4, 2, 70, 16, generator=draw) for _ in range(2))
    qkv, slots, positions = torch.randn(4, 8 * 16, generator=draw), torch.arange(4), torch.tensor([69, 3, 64, 20])
    whole = attention.decode(qkv, keys.clone(), values.clone(), slots, positions, heads=4, scale=0.25)
    for row in range(4):
        given = (t[row : row + 1] for t in (slots, positions))
        alone = attention.decode(qkv[row : row + 1], keys.clone(), values.clone(), *given, heads=4, scale=0.25)
        if form == "torch" or (form == "c" and not compiled.here()):
            # a library's product of another shape
            assert torch.allclose(alone[0], whole[row], atol=1e-6)
        else:
            assert torch.equal(alone[0], whole[row])


def test_decode_in_c_handles_long_pasts_and_extreme_scores(monkeypatch):
    """More columns than one block, with the highest score early or late; threads do not change the bits."""
    monkeypatch.delenv("TRITON_INTERPRET")
    for size in ("_SHARED", "_PIECE"):
        monkeypatch.setattr(compiled, size, 1)
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(5, 2, 900, 40, generator=draw) for _ in range(2))
    qkv, slots = torch.randn(5, 8 * 40, generator=draw), torch.arange(5)
    positions = torch.tensor([899, 255, 256, 511, 0])
    keys[0, 0, 3] *= 300
    keys[0, 1, 700] *= 300
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(attention.decode(qkv, keys, values, slots, positions, heads=4, scale=0.2))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    wanted = exact(qkv, keys, values, slots, positions, 4, 0.2)
    assert (found[0].double() - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("width", "dtype", "library", "is_in_c"),
    [
        (16, torch.float32, "1", compiled.here()),
        (16, torch.float32, "0", False),
        (16, torch.bfloat16, "1", False),
        (attention.WIDEST + 88, torch.float32, "1", False),
    ],
)
def test_decode_uses_c_on_a_cpu_for_float32_and_narrow_heads(monkeypatch, width, dtype, library, is_in_c):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("EVOALIGN_COMPILED", library)
    called = []
    rows = compiled.rows
    monkeypatch.setattr(compiled, "rows", lambda *given: called.append(given[0]) or rows(*given))
    given = torch.randn(2, 8 * width), torch.randn(3, 2, 30, width), torch.randn(3, 2, 30, width)
    slots, positions = torch.tensor([2, 0]), torch.tensor([7, 29])
    attention.decode(*(t.to(dtype) for t in given), slots, positions, heads=4, scale=0.25)
    assert called == ["decode"] * is_in_c
