# SPDX-License-Identifier: Apache-2.0
"""The noise against Philox in plain Python, its statistics, and its independence of order, chunks and slices."""

import hashlib
import math

import numpy as np
import numpy_reference as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtri

from evoalign import noise
from evoalign.errors import EvoalignError

RANDOM123 = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Counter, key and output of philox4x32-10 in the kat_vectors file of Random123."""


@pytest.mark.parametrize("vector", RANDOM123)
def test_the_published_vectors(vector):
    counter, key, output = (tuple(int(word, 16) for word in words.split()) for words in vector)
    assert reference.philox(counter, key) == output
    assert tuple(map(int, noise.philox(tuple(map(torch.tensor, counter)), key))) == output


def test_philox_equals_plain_python_for_random_words():
    draw = np.random.default_rng(0)
    counters = draw.integers(0, 2**32, (500, 4))
    key = (int(draw.integers(2**32)), int(draw.integers(2**32)))
    got = torch.stack(noise.philox(tuple(torch.from_numpy(c) for c in counters.T.copy()), key), dim=1)
    want = [reference.philox([int(c) for c in row], key) for row in counters]
    assert got.tolist() == [list(row) for row in want]


def test_the_key_is_the_documented_hash():
    for parts in [(0, "noise", "w", ""), (2**62, "init", "model.layers.0.mlp.up_proj.weight", "A"), (1, "", "", "B")]:
        assert noise.key(*parts) == reference.key(*parts)
    parts = [(s, p, n, f) for s in (0, 1) for p in ("noise", "init") for n in ("a", "ab") for f in ("", "A", "B")]
    assert len({noise.key(*p) for p in parts}) == len(parts)
    assert noise.key(1, "noise", "a", "b") != noise.key(1, "noise", "ab", "")


def test_the_table_is_the_one_that_was_measured():
    raw = reference.TABLE.read_bytes()
    assert hashlib.sha256(raw).hexdigest() == "6621a18f629e82396c088501c1095eae46f6d8033b42db7b4158e0f4cf34a0ce"
    assert hashlib.sha256(raw).hexdigest() == noise.TABLE_SHA256
    assert len(raw) == 32768 * 4


def test_the_table_holds_the_normal_quantiles():
    exact = ndtri((np.arange(65536) + 0.5) / 65536)
    shipped = noise.table().roll(-(1 << 15)).numpy()
    np.testing.assert_array_max_ulp(shipped, exact.astype(np.float32), maxulp=1)
    assert (np.diff(shipped) > 0).all()
    assert (shipped == -shipped[::-1]).all()
    values = shipped.astype(np.float64)
    assert values.mean() == 0.0
    assert values.var() == pytest.approx(0.99998, abs=1e-5)
    assert (values**4).mean() / values.var() ** 2 - 3 == pytest.approx(-7.5e-4, abs=1e-5)
    assert 4.32 < values.max() < 4.33


@pytest.mark.parametrize("shape", [(257, 33), (1 << 20, 1 << 20), (40_000_000_000,), (3, 1 << 18, 1 << 18)])
def test_elements_equal_plain_python_at_random_places(shape):
    """Also where the block index has more than 32 bits: 2^40 elements are 2^37 blocks."""
    draw = np.random.default_rng(len(shape))
    key = noise.key(5, "noise", "w")
    corners = [tuple(0 for _ in shape), tuple(n - 1 for n in shape)]
    places = corners + [tuple(int(draw.integers(n)) for n in shape) for _ in range(30)]
    seen = 0
    for place in places:
        index = int(np.ravel_multi_index(place, shape))
        generation, member = int(draw.integers(2**31)), int(draw.integers(2**32))
        got = noise.normals(key, shape, generation, [member], tuple(slice(i, i + 1) for i in place))
        assert got.shape == (1, *(1 for _ in shape))
        assert got.item() == reference.element(key, index, generation, member), place
        seen = max(seen, index // 8)
    assert seen > 2**32 or math.prod(shape) < 2**35


def test_a_whole_tensor_equals_numpy():
    for shape in [(1,), (7,), (8,), (13, 11), (5, 3, 9), ()]:
        got = noise.normals(noise.key(3, "noise", "w"), shape, 12, [0, 7, 2**31])
        want = reference.normals(reference.key(3, "noise", "w"), shape, 12, [0, 7, 2**31])
        assert got.dtype == torch.float32 and got.shape == want.shape
        assert (got.numpy() == want).all()


def test_torchs_default_dtype_does_not_matter():
    key = noise.key(0, "noise", "w")
    expected = noise.normals(key, (5, 5), 0, [0, 1])
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            got = noise.normals(key, (5, 5), 0, [0, 1])
            assert got.dtype == torch.float32
            assert torch.equal(got, expected)
    finally:
        torch.set_default_dtype(before)


def test_the_moments_and_the_distribution():
    drawn = noise.normals(noise.key(11, "noise", "w"), (1 << 20,), 3, [0, 1]).double().reshape(-1).numpy()
    n = drawn.size
    assert abs(drawn.mean()) < 4 / math.sqrt(n)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((drawn**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((drawn**4).mean() - 3) < 4 * math.sqrt(96 / n)
    assert stats.kstest(drawn[: 1 << 18], "norm").pvalue > 1e-3
    for place in range(8):  # each of the eight normals of a block by itself
        assert stats.kstest(drawn[place::8][: 1 << 16], "norm").pvalue > 1e-3


def test_streams_are_uncorrelated():
    """Across tensors, factors, seeds, purposes, generations, members and neighbouring elements."""
    n = 1 << 16
    keys = [(0, "noise", "a"), (0, "noise", "b"), (0, "noise", "a", "A"), (0, "noise", "a", "B"), (1, "noise", "a"),
            (0, "init", "a")]  # fmt: skip
    rows = [noise.normals(noise.key(*k), (n,), g, [0, 1, 2]) for k in keys for g in (0, 1)]
    streams = torch.cat(rows).double().numpy()
    rho = np.corrcoef(streams)
    off = rho[~np.eye(len(rho), dtype=bool)]
    assert len(off) == 36 * 35
    assert abs(off).max() < 4 / math.sqrt(n)
    assert abs(np.corrcoef(streams**2)[~np.eye(len(rho), dtype=bool)]).max() < 4.5 / math.sqrt(n)
    for lag in range(1, 17):
        assert abs(np.corrcoef(streams[0][:-lag], streams[0][lag:])[0, 1]) < 4 / math.sqrt(n)


@st.composite
def parts(draw):
    """A shape of one to three dimensions and a non-empty rectangle of it."""
    shape = tuple(draw(st.lists(st.integers(1, 23), min_size=1, max_size=3)))
    bounds = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
    return shape, tuple(slice(a, max(b, a + 1)) for a, b in bounds)


@given(parts(), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_a_slice_has_the_bits_of_the_whole(part, members, generation):
    shape, slices = part
    key = noise.key(1, "noise", "w")
    whole = reference.normals(key, shape, generation, members)
    got = noise.normals(key, shape, generation, members, slices)
    assert (got.numpy() == whole[(slice(None), *slices)]).all()
    rows_only = noise.normals(key, shape, generation, members, slices[:1])
    assert (rows_only.numpy() == whole[:, slices[0]]).all()


@given(st.permutations(range(6)), st.integers(1, 5))
def test_order_and_grouping_of_members_do_not_matter(order, group):
    key, shape = noise.key(1, "noise", "w"), (9, 5)
    whole = noise.normals(key, shape, 4, range(6))
    for batch in (order[i : i + group] for i in range(0, len(order), group)):
        assert torch.equal(noise.normals(key, shape, 4, batch), whole[list(batch)])
    assert torch.equal(noise.normals(key, shape, 4, [2, 2])[0], noise.normals(key, shape, 4, [2, 2])[1])


@pytest.mark.parametrize("tile", [1, 3, 64, 1 << 20])
def test_chunking_does_not_matter(tile, monkeypatch):
    key, shape = noise.key(2, "noise", "w"), (33, 21)
    expected = reference.normals(key, shape, 0, range(5))
    monkeypatch.setattr(noise, "_TILE", tile)
    assert (noise.normals(key, shape, 0, range(5)).numpy() == expected).all()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_fused_projections_address_slices_of_the_separate_tensors(shards):
    """An engine that fuses q, k and v and shards the rows draws what the separate tensors have."""
    rows, width = {"q_proj": 16, "k_proj": 8, "v_proj": 8}, 10
    whole = {n: reference.normals(reference.key(0, "noise", n), (r, width), 1, [3]) for n, r in rows.items()}
    for shard in range(shards):
        fused = [
            noise.normals(noise.key(0, "noise", name), (r, width), 1, [3],
                          (slice(shard * r // shards, (shard + 1) * r // shards), slice(0, width)))
            for name, r in rows.items()
        ]  # fmt: skip
        want = [whole[n][:, shard * r // shards : (shard + 1) * r // shards] for n, r in rows.items()]
        assert (torch.cat(fused, dim=1).numpy() == np.concatenate(want, axis=1)).all()


@given(st.lists(st.integers(1, 40), max_size=3), st.integers(1, 500))
def test_row_blocks_cover_a_tensor_exactly_once(shape, elements):
    counts = torch.zeros(shape)
    for part in noise.row_blocks(shape, elements):
        assert math.prod(counts[part].shape) <= max(elements, math.prod(shape[1:]))
        counts[part] += 1
    assert bool((counts == 1).all())


def test_uniforms():
    key = noise.key(0, "sampling", "")
    positions, streams = torch.arange(300)[:, None], torch.tensor([0, 1, 2**32, 2**62 + 12345])
    got = noise.uniforms(key, positions, streams)
    assert got.dtype == torch.float64
    assert got.shape == (300, 4)
    for i, j in [(0, 0), (7, 1), (299, 3), (100, 2)]:
        stream = int(streams[j])
        word = reference.philox((i, stream & 0xFFFFFFFF, stream >> 32, 0), key)[0]
        assert got[i, j].item() == (word + 0.5) / 2**32
    assert len(got.unique()) == got.numel()


def test_uniforms_never_reach_0_or_1(monkeypatch):
    for word, value in [(0, 2.0**-33), (2**32 - 1, 1 - 2.0**-33)]:
        monkeypatch.setattr(noise, "philox", lambda *_, word=word: (torch.tensor([word]),))
        got = noise.uniforms((0, 0), torch.tensor([0]), torch.tensor([0]))
        assert got.item() == value
        assert 0 < got.item() < 1


def test_uniforms_are_uniform():
    got = noise.uniforms(noise.key(0, "sampling", ""), torch.arange(1 << 17), torch.tensor(5)).numpy()
    assert stats.kstest(got, "uniform").pvalue > 1e-3


def test_a_damaged_table_is_refused(monkeypatch):
    monkeypatch.setattr(noise, "TABLE_SHA256", "0" * 64)
    noise.table.cache_clear()
    try:
        with pytest.raises(EvoalignError, match="noise table is damaged; reinstall"):
            noise.table()
    finally:
        noise.table.cache_clear()
