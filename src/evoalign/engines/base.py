# SPDX-License-Identifier: Apache-2.0
"""Where the weights live and text comes from: the protocol of all engines, and the hash of the mean."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from evoalign import kernels
from evoalign.noise import bounds_of, runs
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.types import Facts, Layout, Member, Plan, Request, Rollout, Slices, TensorSpec, Update

ABSENT = Member(index=-2, noise=1 << 32, sign=1)
"""A member that does not exist: its noise lies outside the 32-bit word that counts members. An engine treats it like
any other, but never makes weights or an adapter for it, so whoever answers in its name is not who was asked."""


class Engine(Protocol):
    """Answers prompts for every member of a plan and holds the mean.

    The order of calls is `specs`, `start`, then any of the others, then `close`.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the weights are served in."""
        ...

    def specs(self) -> Sequence[TensorSpec]:
        """The model's tensors under their Hugging Face names, tied ones once."""
        ...

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        """Make ready to carry this space. `keep_start` keeps the starting weights, for decay."""
        ...

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """One completion of each request for each member, in any order.

        A member whose adapter or weights are not there, such as `ABSENT`, is refused with ModelError and never
        answered by the base model. An engine over a server asks the server under the name that such a member would
        have, so that it is the server that is seen to refuse.
        """
        ...

    def apply(self, update: Update) -> None:
        """Move the mean; the noise is regenerated here."""
        ...

    def fingerprint(self) -> str:
        """`weights_hash` of the mean."""
        ...

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The mean: float32 tensors by name, on the CPU."""
        ...

    def sample(self, count: int) -> torch.Tensor:
        """float32 [<= count] on the CPU: the mean at `sampled_places`, to follow where it goes at no cost in memory."""
        ...

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizer's slots: float32 tensors by name, on the CPU. None for SGD."""
        ...

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Put back what `state` and `optimizer_state` gave. Raises ModelError where names or shapes differ."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


def sampled_places(layout: Layout, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Row-major places (int64, on the CPU) of `count` numbers among all that evolve, by tensor, in the layout's order.

    One place in each of `count` equal strata, so that every tensor has its share; where in its stratum follows the
    golden ratio, so that no row length is in step with it. All places where there are no more than `count`.
    """
    total = layout.parameters
    index = torch.arange(min(count, total), dtype=torch.float64)
    shift = (index * _GOLDEN_RATIO).frac() if total > count else 0.0
    places = ((index + shift) * max(1.0, total / count)).to(torch.int64).clamp_(max=total - 1)
    first = 0
    for tensor in layout.tensors:
        end = first + math.prod(tensor.shape)
        low, high = torch.searchsorted(places, torch.tensor([first, end])).tolist()
        if high > low:
            yield tensor.name, places[low:high] - first
        first = end


_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_TILE = 1 << 16


def weights_hash(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over (name, shape, dtype, sum of mix64(bits, index) mod 2^64) of float32 tensors, sorted by name.

    The sums do not depend on order or sharding, so they can be computed where the weights are. Cost: about ten
    integer operations a number. A changed bit, two swapped numbers or a renamed tensor change the hash.
    """
    sums = [(name, tuple(t.shape), _sum(t, tuple(t.shape), None)) for name, t in tensors]
    return weights_hash_of_sums((name, shape, int(total)) for name, shape, total in sums)


def weights_hash_of_sums(rows: Iterable[tuple[str, Sequence[int], int]]) -> str:
    """`weights_hash` from name, whole shape and `tensor_sum` of each tensor; the sums of shards add up first."""
    listed = [[name, list(shape), "float32", f"{total % (1 << 64):016x}"] for name, shape, total in rows]
    return hashlib.sha256(json.dumps(sorted(listed), separators=(",", ":")).encode()).hexdigest()


def tensor_sum(tensor: torch.Tensor, shape: Sequence[int] | None = None, slices: Slices | None = None) -> int:
    """Sum over elements of splitmix64(bits + golden * (index + 1)), modulo 2^64, as a signed number.

    `tensor` is the part that `slices` cuts out of a tensor of `shape`, and the index is that in the whole: the sums of
    parts that cover a tensor once add up to the whole's.
    """
    return int(_sum(tensor, tuple(tensor.shape if shape is None else shape), slices))


def _sum(tensor: torch.Tensor, shape: tuple[int, ...], slices: Slices | None) -> torch.Tensor | int:
    """On a GPU without waiting for it."""
    if kernels.available(tensor.device):
        from evoalign.kernels import hash as kernel

        return kernel.tensor_sum(tensor.detach(), shape, bounds_of(shape, slices))
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


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014) on int64 bits, in place; multiplication wraps."""
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX1)
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX2)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))
