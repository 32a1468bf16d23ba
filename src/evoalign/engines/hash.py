# SPDX-License-Identifier: Apache-2.0
"""`weights_hash`: a hash of the mean that does not depend on the order or sharding of its tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence

import torch

from evoalign import kernels
from evoalign.kernels import compiled
from evoalign.noise import bounds_of, runs
from evoalign.types import Slices

_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_TILE = 1 << 16


def weights_hash(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return SHA-256 over (name, shape, dtype, sum of mix64(bits, index) mod 2^64) of float32 tensors, sorted by name.

    The sums do not depend on order or sharding, so they can be computed where the weights are, with about ten integer
    operations per number. A changed bit, two swapped numbers or a renamed tensor change the hash.
    """
    return weights_hash_of_sums((name, tuple(t.shape), tensor_sum(t)) for name, t in tensors)


def weights_hash_of_sums(rows: Iterable[tuple[str, Sequence[int], int]]) -> str:
    """Return `weights_hash` from the name, whole shape and `tensor_sum` of each tensor. Add up shards first."""
    listed = [[name, list(shape), "float32", f"{total % (1 << 64):016x}"] for name, shape, total in rows]
    return hashlib.sha256(json.dumps(sorted(listed), separators=(",", ":")).encode()).hexdigest()


def tensor_sum(tensor: torch.Tensor, shape: Sequence[int] | None = None, slices: Slices | None = None) -> int:
    """Return the sum over elements of splitmix64(bits + golden * (index + 1)), modulo 2^64, as a signed number.

    `tensor` is the part `slices` of a tensor of `shape`. Indices count in the whole tensor, so the sums of parts that
    cover a tensor once add up to the sum of the whole.
    """
    shape = tuple(tensor.shape if shape is None else shape)
    if kernels.available(tensor.device):
        return summer([(tensor, shape, slices)])()[0]
    if compiled.available(tensor.device):
        return compiled.tensor_sum(tensor.detach().to(torch.float32), shape, bounds_of(shape, slices))
    flat = tensor.detach().to(torch.float32).contiguous().view(-1).view(torch.int32)
    starts, width, _ = runs(shape, slices)
    first = torch.tensor(starts, device=flat.device)
    total = 0
    tile = _TILE if flat.device.type == "cpu" else 1 << 24
    for start in range(0, flat.numel(), tile):
        bits = flat[start : start + tile].to(torch.int64)
        index = torch.arange(start, start + bits.numel(), device=flat.device)
        index = index.add_(starts[0]) if len(starts) == 1 else first[index // width].add_(index % width)
        total += int(_mix64(bits.bitwise_and_(0xFFFFFFFF).add_(index.add_(1).mul_(_GOLDEN))).sum())
    return total


def summer(parts: Sequence[tuple[torch.Tensor, tuple[int, ...], Slices | None]]) -> Callable[[], list[int]]:
    """Return a function that returns `tensor_sum` of each (tensor, shape, slices); on a GPU all with one launch.

    It may keep addresses, so the tensors must not move.
    """
    if parts and all(kernels.available(tensor.device) for tensor, _, _ in parts):
        from evoalign.kernels.update import Sums

        return Sums([(tensor.detach(), shape, bounds_of(shape, slices)) for tensor, shape, slices in parts])
    return lambda: [tensor_sum(*part) for part in parts]


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of splitmix64 (Steele et al. 2014) to int64 bits, in place. Multiplication wraps."""
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX1)
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX2)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))
