# SPDX-License-Identifier: Apache-2.0
"""The noise kernel against the noise in plain torch, bit for bit."""

import numpy as np
import pytest
import torch

from evoalign import kernels, noise

KEY = noise.key(3, "noise", "w")
LAST = 2**32 - 1
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
WHOLE = 1 << 20
"""Rows and columns of a matrix with 2^37 Philox blocks."""
PARTS = [
    ((), None),
    ((1,), None),
    ((33,), None),
    ((33,), (slice(13, 30),)),
    ((13, 7), None),
    ((13, 8), (slice(2, 9),)),
    ((13, 7), (slice(3, 9), slice(2, 5))),
    ((5, 300), (slice(1, 4), slice(3, 299))),
    ((5, 304), (slice(1, 4), slice(8, 296))),
    ((3, 5, 9), (slice(1, 3), slice(0, 5), slice(2, 7))),
    ((3, 5, 9), (slice(0, 3), slice(1, 4), slice(2, 7))),
    ((WHOLE, WHOLE), (slice(WHOLE - 2, WHOLE), slice(WHOLE - 30, WHOLE - 3))),
    ((40_000_000_000,), (slice(2**35 - 20, 2**35 + 20),)),
]


def same(got, want):
    return torch.equal(got.contiguous().view(BITS[got.dtype]), want.contiguous().view(BITS[want.dtype]))


def in_torch(shape, generation, members, widths=None, mean=None, slices=None):
    drawn = noise._normals(KEY, shape, generation, members, slices, "cpu")
    if widths is not None:
        drawn = drawn * torch.tensor(widths, dtype=torch.float64).float().view(-1, *(1 for _ in drawn.shape[1:]))
    return drawn if mean is None else drawn + mean


@pytest.fixture
def tuned(monkeypatch):
    """Use small programs, so that a few elements need several."""
    from evoalign.kernels import noise as kernel

    launch = kernel.scaled

    def choose(**settings):
        tuning = kernel.Tuning(**{"block": 16, **settings})
        monkeypatch.setattr(kernel, "scaled", lambda *args: launch(*args, tuning))

    choose()
    return choose


def test_noise_uses_the_kernels():
    assert kernels.available("cpu")
    assert kernels.interpreted()


@pytest.mark.first("[0-", others="long")
@pytest.mark.parametrize(("shape", "slices"), PARTS)
@pytest.mark.parametrize("generation", [0, LAST])
def test_normals_have_the_same_bits(tuned, shape, slices, generation):
    members = [0, 5, LAST]
    got = noise.normals(KEY, shape, generation, members, slices)
    assert same(got, in_torch(shape, generation, members, slices=slices))


@pytest.mark.first("shape1-", "shape5-", others="long")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("shape", "slices"), PARTS[1:11])
def test_scaled_has_the_same_bits(tuned, shape, slices, half, dtype):
    tuned(half=half)
    members, widths = [7, 2**31], (0.0123456789, -3e-4)
    part = in_torch(shape, 2, members, slices=slices).shape[1:]
    mean = torch.from_numpy(np.random.default_rng(0).normal(size=part).astype(np.float32))
    want = in_torch(shape, 2, members, widths, mean, slices).to(dtype)
    got = noise.scaled(KEY, shape, 2, members, widths, mean=mean, slices=slices, dtype=dtype)
    assert got.dtype == dtype and got.shape == want.shape
    assert same(got, want)
    assert same(noise.scaled(KEY, shape, 2, members, widths, slices=slices, dtype=dtype),
                in_torch(shape, 2, members, widths, None, slices).to(dtype))  # fmt: skip


def test_zero_width_keeps_the_signs_of_zeros(tuned):
    got = noise.scaled(KEY, (64,), 0, [3], [0.0])
    assert same(got, in_torch((64,), 0, [3], [0.0]))
    assert bool((got.view(torch.int32) != 0).any())
    zeros = torch.tensor([0.0, -0.0]).repeat(32)
    assert same(noise.scaled(KEY, (64,), 0, [3], [0.0], mean=zeros), in_torch((64,), 0, [3], [0.0], zeros))


@pytest.mark.first("shape0", "shape1", others="long")
@pytest.mark.parametrize("shape", [(20, 1), (20, 3), (3, 20), (6, 300)])
def test_scaled_writes_padded_and_transposed_outputs(tuned, shape):
    """Write to memory like an engine's slots; nothing else is changed."""
    rows, columns = shape
    want = in_torch(shape, 1, [4, 9], (0.5, 0.25)).bfloat16()
    for out in (torch.full((2, rows + 2, columns + 8), 7.0, dtype=torch.bfloat16),
                torch.full((2, columns + 8, rows + 2), 7.0, dtype=torch.bfloat16).mT):  # fmt: skip
        place = out[:, 1 : rows + 1, :columns]
        assert noise.scaled(KEY, shape, 1, [4, 9], (0.5, 0.25), out=place).data_ptr() == place.data_ptr()
        assert same(place, want)
        place.fill_(7.0)
        assert bool((out == 7.0).all())


def test_a_mean_with_strides(tuned):
    whole = torch.from_numpy(np.random.default_rng(1).normal(size=(9, 40)).astype(np.float32))
    slices = (slice(2, 8), slice(5, 30))
    for mean in (whole[slices], whole.T.contiguous().T[slices]):
        got = noise.scaled(KEY, (9, 40), 1, [4], [0.5], mean=mean, slices=slices)
        assert same(got, in_torch((9, 40), 1, [4], [0.5], mean, slices))


def test_an_empty_part(tuned):
    assert noise.normals(KEY, (4, 3), 0, [1], (slice(2, 2),)).shape == (1, 0, 3)
    assert noise.normals(KEY, (4, 3), 0, []).shape == (0, 4, 3)
