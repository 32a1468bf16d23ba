# SPDX-License-Identifier: Apache-2.0
"""`weights_hash` against splitmix64 in plain Python, and what it can and cannot tell apart."""

import hashlib
import json
import struct

import numpy_reference as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evoalign.engines import hash as hashes
from evoalign.engines.hash import weights_hash

GOLDEN = 0x9E3779B97F4A7C15


def own_sum(tensor):
    values = tensor.reshape(-1).tolist()
    bits = [struct.unpack("<I", struct.pack("<f", v))[0] for v in values]
    return sum(reference.splitmix64(b + GOLDEN * (i + 1)) for i, b in enumerate(bits)) % (1 << 64)


def own_hash(tensors):
    rows = sorted([n, list(t.shape), "float32", f"{own_sum(t):016x}"] for n, t in tensors.items())
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {"b.weight": torch.randn(7, 5), "a.weight": torch.randn(3, 4, 2), "bias": torch.randn(11)}


def test_splitmix64_has_its_published_first_outputs():
    """Seed 1234567, as in the reference implementation's own test."""
    assert [reference.splitmix64(1234567 + GOLDEN * (i + 1)) for i in range(3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


def test_it_equals_plain_python(tensors):
    assert weights_hash(tensors.items()) == own_hash(tensors)
    assert weights_hash([]) == own_hash({})
    special = torch.tensor([0.0, -0.0, 1e-45, float("inf"), -float("inf"), 3.4e38])
    assert weights_hash([("x", special)]) == own_hash({"x": special})
    assert weights_hash([("x", torch.zeros(()))]) == own_hash({"x": torch.zeros(())})


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40))
def test_the_sum_equals_plain_python(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    assert hashes.tensor_sum(tensor) % (1 << 64) == own_sum(tensor)


@pytest.mark.parametrize("tile", [1, 7, 1 << 16])
def test_tiles_do_not_matter(tensors, tile, monkeypatch):
    monkeypatch.setattr(hashes, "_TILE", tile)
    assert weights_hash(tensors.items()) == own_hash(tensors)


def test_order_and_layout_in_memory_do_not_matter(tensors):
    assert weights_hash(reversed(tensors.items())) == weights_hash(tensors.items())
    strided = {n: t.clone().transpose(0, -1).contiguous().transpose(0, -1) for n, t in tensors.items()}
    assert not strided["b.weight"].is_contiguous()
    assert weights_hash(strided.items()) == weights_hash(tensors.items())


def test_the_parts_of_a_tensor_can_be_summed_apart():
    """A part's sum takes the global index: two halves with an index of their own do not make the whole."""
    tensor = torch.arange(10, dtype=torch.float32)
    whole = hashes.tensor_sum(tensor)
    assert (hashes.tensor_sum(tensor[:5]) + hashes.tensor_sum(tensor[5:]) - whole) % (1 << 64) != 0


def test_it_sees_every_bit(tensors):
    before = weights_hash(tensors.items())
    seen = {before}
    for bit in range(32):
        changed = {n: t.clone() for n, t in tensors.items()}
        bits = changed["b.weight"].view(-1).view(torch.int32)
        bits[17] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        seen.add(weights_hash(changed.items()))
    assert len(seen) == 33


def test_it_sees_swaps_names_and_shapes(tensors):
    def changed(**by):
        return weights_hash((tensors | by).items())

    weight = tensors["b.weight"]
    swapped = weight.clone()
    swapped[0, 0], swapped[6, 4] = weight[6, 4], weight[0, 0]
    renamed = {("c.weight" if n == "b.weight" else n): t for n, t in tensors.items()}
    crossed = {"x": torch.ones(2), "y": torch.zeros(2)}
    hashes = [
        changed(),
        changed(**{"b.weight": swapped}),
        changed(**{"b.weight": weight.flip(0)}),
        changed(**{"b.weight": weight.reshape(5, 7)}),
        changed(**{"b.weight": -weight}),
        weights_hash(renamed.items()),
        weights_hash([(n, t) for n, t in tensors.items() if n != "bias"]),
        weights_hash(crossed.items()),
        weights_hash([("x", crossed["y"]), ("y", crossed["x"])]),
        weights_hash([("z", torch.tensor([0.0]))]),
        weights_hash([("z", torch.tensor([-0.0]))]),
    ]
    assert len(set(hashes)) == len(hashes)


def test_half_precision_is_hashed_as_the_float32_it_stands_for(tensors):
    half = {n: t.bfloat16() for n, t in tensors.items()}
    assert weights_hash(half.items()) == own_hash({n: t.float() for n, t in half.items()})
