# SPDX-License-Identifier: Apache-2.0
"""Updates in one pass against the same operations one by one in torch: the same bits."""

import numpy as np
import pytest
import torch

from evoalign import spaces
from evoalign.config import from_dict
from evoalign.types import TensorSpec, Update, population

NAMES = {"full": "layers.0.w.weight", "lora": "layers.0.w.lora_B.weight", "lowrank": "layers.0.w.weight"}
SHAPE = (21, 37)
PARTS = [None, (slice(3, 20), slice(0, 37)), (slice(2, 19), slice(5, 30)), (slice(20, 21), slice(36, 37))]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def make(space, dtype, **es):
    tree = {"seed": 7, "space": space, "es": {"sigma": 0.01} | es, "lora": {"rank": 3}, "lowrank": {"rank": 2}}
    if space == "lora":
        tree["lora"]["evolve"] = "ab"
    made = spaces.create(from_dict(tree))
    return made, made.layout([TensorSpec(NAMES["full"], SHAPE, "linear", 0, 0.1)], dtype)


def update(size, *, antithetic=False, sigma=0.01, decay=0.0):
    coefficients = tuple(map(float, np.random.default_rng(size).normal(size=size)))
    return Update(0, 2**32 - 1, population(size, antithetic=antithetic), coefficients, sigma, 0.005, decay)


def random(shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32))


def same(got, want):
    return torch.equal(got.contiguous().view(BITS[got.dtype]), want.contiguous().view(BITS[want.dtype]))


def accumulated(space, layout, name, up, part, dtype=None):
    shape = layout[name].shape
    part = tuple(slice(0, n) for n in shape) if part is None else part
    master, start = random(shape), random(shape, 1)[part]
    served = None if dtype is None else torch.zeros(shape, dtype=dtype)
    space.accumulate(layout, master[part], name, part, up, start, None, None if served is None else served[part])
    return master, served


@pytest.fixture
def in_torch(monkeypatch):
    def run(*args):
        with monkeypatch.context() as patch:
            patch.delenv("TRITON_INTERPRET")
            return accumulated(*args)

    return run


@pytest.mark.first("part1-", others="long")
@pytest.mark.parametrize("decay", [0.0, 0.125])
@pytest.mark.parametrize(("size", "antithetic"), [(1, False), (9, False), (8, True)])
@pytest.mark.parametrize("part", PARTS)
def test_dense_moves_have_the_same_bits(in_torch, part, size, antithetic, decay):
    space, layout = make("full", torch.bfloat16)
    up = update(size, antithetic=antithetic, decay=decay)
    got, served = accumulated(space, layout, NAMES["full"], up, part, torch.bfloat16)
    want, served_in_torch = in_torch(space, layout, NAMES["full"], up, part, torch.bfloat16)
    assert same(got, want) and same(served, served_in_torch)
    assert not torch.equal(got, random(SHAPE))
    part = part or tuple(slice(0, n) for n in SHAPE)
    assert same(served[part], got[part].bfloat16())


@pytest.mark.parametrize("dtype", [None, *BITS])
def test_dense_serves_any_dtype(in_torch, dtype):
    space, layout = make("full", torch.float32)
    args = (space, layout, NAMES["full"], update(3), PARTS[1], dtype)
    for got, want in zip(accumulated(*args), in_torch(*args), strict=True):
        assert got is want is None or same(got, want)


@pytest.mark.parametrize("factor", ["A", "B"])
def test_lora_factors_move_with_the_same_bits(in_torch, factor):
    space, layout = make("lora", torch.float32)
    args = (space, layout, NAMES["lora"].replace("_B", f"_{factor}"), update(6, antithetic=True), None)
    assert same(accumulated(*args)[0], in_torch(*args)[0])


def test_dense_moves_nothing_when_weights_cancel(in_torch):
    space, layout = make("full", torch.float32)
    up = Update(0, 0, population(2, antithetic=True), (0.5, 0.5), 0.01, 0.005)
    assert same(accumulated(space, layout, NAMES["full"], up, None)[0], random(SHAPE))


@pytest.mark.first("part1-0.0", others="long")
@pytest.mark.parametrize("decay", [0.0, 0.125])
@pytest.mark.parametrize("part", PARTS)
def test_lowrank_moves_are_the_ordered_sum(part, decay):
    """Each product is rounded and added in order, so that shards get the bits of the whole."""
    space, layout = make("lowrank", torch.bfloat16)
    name, up = NAMES["lowrank"], update(7, decay=decay)
    got, served = accumulated(space, layout, name, up, part, torch.bfloat16)
    whole = tuple(slice(0, n) for n in SHAPE)
    part = part or whole
    total = torch.zeros(SHAPE)
    weights = space._weights(layout, name, up)
    factors = space._served(layout, name, up, list(weights), [1] * len(weights), whole, torch.device("cpu"))
    for weight, b, a in zip(weights.values(), factors.b.float(), factors.a.float(), strict=True):
        for k in range(layout.rank):
            total += (b[:, k, None] * torch.tensor(weight, dtype=torch.float32)) * a[None, k]
    want = random(SHAPE)
    if decay:
        want -= (want - random(SHAPE, 1)) * decay
    want += total * (1 / 7) * 0.005
    assert same(got[part], want[part])
    assert same(served[part], want[part].bfloat16())
    untouched = torch.ones(SHAPE, dtype=torch.bool)
    untouched[part] = False
    assert same(got[untouched], random(SHAPE)[untouched])


def test_lowrank_moves_are_those_of_the_product(in_torch):
    space, layout = make("lowrank", torch.bfloat16)
    args = (space, layout, NAMES["lowrank"], update(7), None)
    moves = [run(*args)[0].double() - random(SHAPE).double() for run in (accumulated, in_torch)]
    assert float((moves[0] - moves[1]).norm() / moves[1].norm()) < 1e-5


def test_lowrank_update_without_width_only_decays():
    space, layout = make("lowrank", torch.bfloat16)
    for decay in (0.0, 0.25):
        got, _ = accumulated(space, layout, NAMES["lowrank"], update(4, sigma=0.0, decay=decay), None)
        assert same(got, random(SHAPE) - (random(SHAPE) - random(SHAPE, 1)) * decay)
