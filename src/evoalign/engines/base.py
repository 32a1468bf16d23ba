# SPDX-License-Identifier: Apache-2.0
"""The interface of all engines. An engine holds the model's weights and generates completions for each member."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, cast

import torch

from evoalign.errors import DataError, EvoalignError, ModelError
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.tokens import Tokens, before_stop
from evoalign.types import MEAN, Facts, FinishReason, Layout, Member, Plan, Request, Rollout, TensorSpec, Update

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
ABSENT = Member(index=-2, noise=1 << 32, sign=1)
"""A member that does not exist: its noise number does not fit the 32-bit word that counts members. An engine handles it
like any other member but never makes weights or an adapter for it, so a completion for it came from other weights."""


class Answering(Protocol):
    """The part of an engine that checks need: an engine, or one replica of it."""

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Generate one completion of each request for each member, or for the member that it names, in any order.

        Each rollout carries its request's own `index`, however the engine splits the requests into batches. A member
        without an adapter or weights, such as `ABSENT`, raises ModelError and is never served by the base model. An
        engine over a server sends the name that such a member would have, which tests that the server refuses it.
        """
        ...

    def context(self) -> int | None:
        """Return the most tokens of a prompt and its completion; None: unbounded, or unknown."""
        ...

    def fingerprint(self) -> str:
        """Return the `weights_hash` of the mean."""
        ...

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Load the output of `state` and `optimizer_state`. Raises ModelError where names or shapes differ."""
        ...


class EngineDefaults(Protocol):
    """Optional methods of an engine, with their defaults."""

    def context(self) -> int | None:
        """Return None: an episode is limited by `task.episode` alone."""
        return None

    def metrics(self) -> Mapping[str, float]:
        """Return measures of the engine's load, for the generation's row in metrics.jsonl."""
        return {}

    def check_mean(self) -> None:
        """Raise ModelError if the model's own weights are not computed as by a plain forward of transformers.

        `start` does the same. By default, for engines without the weights in this process, nothing is checked.
        """

    def copy_state(self, mean: dict[str, torch.Tensor], slots: dict[str, torch.Tensor]) -> None:
        """Fill `mean` and `slots`, empty or of an earlier call, with copies of `state` and `optimizer_state`."""
        mean.update(cast(Engine, self).state())
        slots.update(cast(Engine, self).optimizer_state())

    def parts(self) -> Sequence[Answering]:
        """Return the engines that this one consists of, such as replicas; by default the engine itself."""
        return [cast(Answering, self)]


class Engine(Answering, EngineDefaults, Protocol):
    """Generates completions for every member of a plan and holds the mean.

    Call `specs` first, then `start`, then any of the others, then `close`.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the weights are served."""
        ...

    def specs(self) -> Sequence[TensorSpec]:
        """Return the model's tensors under their Hugging Face names, tied ones once."""
        ...

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        """Prepare to serve members of this space. `keep_start` keeps the starting weights, for decay."""
        ...

    def apply(self, update: Update) -> None:
        """Move the mean; the engine regenerates the noise."""
        ...

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the mean: float32 tensors by name, on the CPU."""
        ...

    def probe_weights(self, count: int) -> torch.Tensor:
        """Return float32 [<= count] on the CPU: the mean at `sampled_places`, a small sample of its weights."""
        ...

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the optimizer's slots: float32 tensors by name, on the CPU; nothing for SGD."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


def pairs_of(members: Sequence[Member], requests: Sequence[Request]) -> list[tuple[Member, Request]]:
    """Return the (member, request) pairs of a rollout, grouped by member."""
    by_member: dict[Member, list[Request]] = {m: [] for m in members}
    for request in requests:
        for wanted in by_member.values() if request.member is None else (by_member.get(request.member, []),):
            wanted.append(request)
    return [(m, r) for m, wanted in by_member.items() for r in wanted]


class Completion(NamedTuple):
    """A whole completion, before its tokens are decoded."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None


def rollouts_of(tokens: Tokens, ended: Sequence[tuple[Member, Request, Completion]]) -> Iterator[Rollout]:
    """Yield completions with their texts. Each distinct one is decoded once: many members generate the same tokens."""
    distinct = list(dict.fromkeys(completion.token_ids for _, _, completion in ended))
    texts = dict(zip(distinct, tokens.decode_all(distinct), strict=True))
    for member, request, completion in ended:
        ids, stop = completion.token_ids, request.sampling.stop
        text = before_stop(texts[ids], stop, request.sampling.keep_stop)
        logprobs = completion.logprobs if request.logprobs else None
        yield Rollout(member, request.index, ids, text, completion.finish_reason, logprobs)


def check_lengths(requests: Sequence[Request], limit: int | None, whose: str, raises: str = "") -> None:
    """Raise DataError for a prompt that exceeds the positions of an engine together with its completion.

    `raises` names the setting that gives an engine more positions, if there is one.
    """
    for request in requests:
        length, room = len(request.prompt_ids), request.sampling.max_tokens
        if limit is not None and length + room > limit:
            raise DataError(
                f"a prompt of {length} tokens and a completion of {room} exceed {whose.format(limit)}; shorten the "
                "prompt, or lower max_tokens (sampling, evaluation)" + (f", or raise {raises}" if raises else "")
            )


def check_started(has_space: bool, plan: Plan | None = None) -> None:
    """Raise EvoalignError for an engine without a space, which can only sample the mean."""
    if not has_space and (plan is None or plan.members != (MEAN,)):
        raise EvoalignError("the engine has no space yet: call `start` first, or request the mean alone")


def check_members(plan: Plan, requests: Sequence[Request]) -> None:
    """Raise ModelError for a member without noise, and EvoalignError for a request of a member outside the plan."""
    for member in plan.members:
        if not 0 <= member.noise < 1 << 32:
            raise ModelError(f"member {member.index} does not exist: its noise number {member.noise} is not 32-bit")
    for request in requests:
        if request.member is not None and request.member not in plan.members:
            raise EvoalignError(
                f"request {request.index} names member {request.member.index}, which is not in the plan"
            )


@lru_cache(maxsize=2)
def sampled_places(layout: Layout, count: int) -> Sequence[tuple[str, torch.Tensor]]:
    """Return a sample of `count` evolving weights as (tensor name, places), in the layout's order.

    Places are row-major indices (int64, on the CPU). The weights are divided into `count` equal strata with one place
    each, so every tensor has its share. The offset within a stratum follows the golden ratio, so that the places do not
    align with any row length. Returns all places if there are at most `count` weights.
    """
    total = layout.parameters
    index = torch.arange(min(count, total), dtype=torch.float64)
    shift = (index * _GOLDEN_RATIO).frac() if total > count else 0.0
    places = ((index + shift) * max(1.0, total / count)).to(torch.int64).clamp_(max=total - 1)
    first, found = 0, list[tuple[str, torch.Tensor]]()
    for tensor in layout.tensors:
        end = first + math.prod(tensor.shape)
        low, high = torch.searchsorted(places, torch.tensor([first, end])).tolist()
        if high > low:
            found.append((tensor.name, places[low:high] - first))
        first = end
    return found
