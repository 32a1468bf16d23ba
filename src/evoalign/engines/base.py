# SPDX-License-Identifier: Apache-2.0
"""Where the weights live and text comes from: the protocol of all engines, and the hash of the mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from evoalign.errors import EvoalignError, ModelError
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.types import Facts, Layout, Member, Plan, Request, Rollout, TensorSpec, Update

ABSENT = Member(index=-2, noise=1 << 32, sign=1)
"""A member that does not exist: its noise lies outside the 32-bit word that counts members. An engine treats it like
any other, but never makes weights or an adapter for it, so whoever answers in its name is not who was asked."""


class Answering(Protocol):
    """What checks need: an engine, or one of those that another is made up of."""

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """One completion of each request for each member, or for the one that it names, in any order.

        Each carries its request's own `index`, however the engine splits the requests into batches.
        A member whose adapter or weights are not there, such as `ABSENT`, is refused with ModelError and never
        answered by the base model. An engine over a server asks the server under the name that such a member would
        have, so that it is the server that is seen to refuse.
        """
        ...

    def fingerprint(self) -> str:
        """`weights_hash` of the mean."""
        ...

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Put back what `state` and `optimizer_state` gave. Raises ModelError where names or shapes differ."""
        ...


class Engine(Answering, Protocol):
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

    def apply(self, update: Update) -> None:
        """Move the mean; the noise is regenerated here."""
        ...

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The mean: float32 tensors by name, on the CPU."""
        ...

    def probe_weights(self, count: int) -> torch.Tensor:
        """float32 [<= count] on the CPU: the mean at `sampled_places`, to follow where it goes at no cost in memory."""
        ...

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizer's slots: float32 tensors by name, on the CPU. None for SGD."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


def metrics_of(engine: Engine) -> Mapping[str, float]:
    """What an engine says of how busy it is, by `metrics`, where it has such a method: for a generation's row."""
    measure: Callable[[], Mapping[str, float]] | None = getattr(engine, "metrics", None)
    return {} if measure is None else measure()


def parts_of(engine: Engine) -> Sequence[Answering]:
    """The engines of which one is made up, by `parts`, where it has such a method; else itself."""
    parts: Callable[[], Sequence[Answering]] | None = getattr(engine, "parts", None)
    return [engine] if parts is None else parts()


def pairs_of(members: Sequence[Member], requests: Sequence[Request]) -> list[tuple[Member, Request]]:
    """Who answers what, member by member: the pairs of a rollout."""
    of: dict[Member, list[Request]] = {m: [] for m in members}
    for request in requests:
        for asked in of.values() if request.member is None else (of.get(request.member, []),):
            asked.append(request)
    return [(m, r) for m, asked in of.items() for r in asked]


def check_members(plan: Plan, requests: Sequence[Request]) -> None:
    """Raise ModelError for a member that cannot exist, rather than answer with some other member's noise.

    Raises EvoalignError for a request of a member that the plan does not have.
    """
    for member in plan.members:
        if not 0 <= member.noise < 1 << 32:
            raise ModelError(f"member {member.index} is not there: no noise has the number {member.noise}")
    for request in requests:
        if request.member is not None and request.member not in plan.members:
            raise EvoalignError(f"request {request.index} is of member {request.member.index}, whom the plan lacks")


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
