# SPDX-License-Identifier: Apache-2.0
"""Many parts of tensors that are hashed with one launch get the sums of each part by itself."""

import pytest
import torch
from number_checks import CUDA, count_launches, in_torch, random

from evoalign import spaces
from evoalign.config import from_dict
from evoalign.engines import hash as hashes
from evoalign.engines.master import Master, Shard, hash_of, whole
from evoalign.types import TensorSpec

__all__ = ["in_torch"]  # a fixture

DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


def parts_of(device):
    """Return parts of several layouts, each longer than one block: whole, rows, columns, turned, 3-D, a number."""
    wide, deep = random((37, 41), 1), random((3, 5, 19), 2)
    parts = [
        (random((700,), 3), (700,), None),
        (wide, (37, 41), None),
        (wide[4:30], (37, 41), (slice(4, 30), slice(0, 41))),
        (wide[:, 7:25], (37, 41), (slice(0, 37), slice(7, 25))),
        (random((41, 37), 4).T, (37, 41), None),
        (deep[1:, 2:4, 3:], (3, 5, 19), (slice(1, 3), slice(2, 4), slice(3, 19))),
        (random((), 5), (), None),
        (torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45]), (1 << 40,), (slice(1 << 35, (1 << 35) + 5),)),
        (random((0, 4), 6), (0, 4), None),
        (wide.bfloat16(), (37, 41), None),
    ]
    return [(tensor.to(device), *where) for tensor, *where in parts]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("block", "programs"), [(64, 3), (64, 512), (2048, 512)])
def test_summer_gives_the_sums_of_each_part(monkeypatch, in_torch, device, block, programs):
    """There is one launch per dtype, and a later call reads the numbers anew."""
    from evoalign.kernels import update as kernel

    monkeypatch.setattr(kernel, "_HASH_BLOCK", block)
    monkeypatch.setattr(kernel, "_HASH_PROGRAMS", programs)
    parts = parts_of(device)
    launches = count_launches(monkeypatch, kernel, "_sums")
    read = hashes.summer(parts)
    for change in (0.0, 1.0):
        del launches[:]
        for tensor, *_ in parts:
            tensor.add_(change)
        found = read()
        assert len(launches) == 2
        for got, (tensor, shape, slices) in zip(found, parts, strict=True):
            want = in_torch(hashes.tensor_sum, tensor.cpu(), shape, slices)
            assert (got - want) % (1 << 64) == 0
            assert -(1 << 63) <= got < 1 << 63


@pytest.mark.parametrize("device", DEVICES)
def test_fingerprint_of_a_mean_takes_one_launch(monkeypatch, in_torch, device):
    """Shards of two workers have the fingerprint of the whole; a part that does not count is left out.

    So have shards in host memory, which are copied to the device block by block.
    """
    from evoalign.kernels import update as kernel

    shapes = {"a.weight": (37, 41), "b.weight": (19,)}
    space = spaces.create(from_dict({"space": "full", "es": {"sigma": 0.1}}))
    layout = space.layout([TensorSpec(name, s, "linear", 0, 0.1) for name, s in shapes.items()], torch.bfloat16)
    served = {name: random(s).bfloat16().to(device) for name, s in shapes.items()}
    mean = Master(space, layout, None, False, whole(served), torch.device(device))
    launches = count_launches(monkeypatch, kernel, "_sums")
    found = hash_of([mean.sums()])
    assert len(launches) == 1
    assert found == in_torch(hashes.weights_hash, [(name, mean[name].cpu()) for name in shapes])
    cuts = [
        ("a.weight", (slice(0, 10), slice(0, 41))),
        ("a.weight", (slice(10, 37), slice(0, 20))),
        ("a.weight", (slice(10, 37), slice(20, 41))),
        ("b.weight", (slice(0, 7),)),
        ("b.weight", (slice(7, 19),)),
    ]
    shards = [Shard(n, shapes[n], cut, served[n][cut].clone(), counts) for n, cut in cuts for counts in (True, False)]
    workers = [Master(space, layout, None, False, some, torch.device(device)) for some in (shards[:3], shards[3:])]
    assert hash_of([worker.sums() for worker in workers]) == found
    for worker in workers:
        worker._summed = None
    assert hash_of([worker.sums() for worker in workers]) == found
