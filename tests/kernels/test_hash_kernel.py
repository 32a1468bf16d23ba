# SPDX-License-Identifier: Apache-2.0
"""The kernel of `tensor_sum` against plain torch."""

import pytest
import torch

from evoalign.engines import hash as hashes

PARTS = [
    ((), None),
    ((5,), None),
    ((5000,), (slice(7, 4990),)),
    ((13, 7), (slice(3, 9), slice(2, 5))),
    ((3, 5, 9), (slice(0, 3), slice(1, 4), slice(2, 7))),
    ((1 << 20, 1 << 20), (slice((1 << 20) - 3, 1 << 20), slice(5, 30))),
]


@pytest.fixture
def in_torch(monkeypatch):
    def run(*args):
        with monkeypatch.context() as patch:
            patch.delenv("TRITON_INTERPRET")
            return hashes.tensor_sum(*args)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "slices"), PARTS)
def test_tensor_sum_kernel_equals_torch(in_torch, shape, slices, dtype):
    size = [min(s.stop - s.start, n) for s, n in zip(slices, shape, strict=True)] if slices else shape
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = hashes.tensor_sum(tensor, shape, slices)
    assert (got - in_torch(tensor, shape, slices)) % (1 << 64) == 0
    assert (got - hashes.tensor_sum(-tensor, shape, slices)) % (1 << 64) != 0


def test_special_numbers(in_torch):
    tensor = torch.tensor([0.0, -0.0, 1e-45, float("inf"), -float("inf"), float("nan"), 3.4e38])
    assert (hashes.tensor_sum(tensor) - in_torch(tensor)) % (1 << 64) == 0


def test_tensor_sum_does_not_depend_on_strides(in_torch):
    tensor = torch.randn(40, 30)
    turned = tensor.T.contiguous().T
    assert (hashes.tensor_sum(turned) - in_torch(tensor)) % (1 << 64) == 0


def test_parts_add_up():
    tensor = torch.randn(9, 31)
    parts = [(slice(0, 4), slice(0, 31)), (slice(4, 9), slice(0, 10)), (slice(4, 9), slice(10, 31))]
    total = sum(hashes.tensor_sum(tensor[p], tensor.shape, p) for p in parts)
    assert (total - hashes.tensor_sum(tensor)) % (1 << 64) == 0
    own = hashes.weights_hash_of_sums([("w", tensor.shape, total)])
    assert own == hashes.weights_hash([("w", tensor)])
