# SPDX-License-Identifier: Apache-2.0
"""Check during a run that members are sampled with their own weights, so that no adapter is silently ignored.

Servers that do not know an adapter, or cannot apply it to a module, often answer with the base model without an error,
and the run learns nothing. At the start and every `checks.canary_every` generations the canary checks that:

- the mean gives the same completion before and after the members, and its hash is unchanged
- members of noise width 0 agree; their largest difference is the floor
- with wide noise a member differs from the mean, from another member and from the member of opposite sign
- a tensor that the model does not have, and the member `ABSENT`, are refused with ModelError

Completions are compared by log-probabilities, which differ even if the greedy tokens are equal. A few tokens of one
prompt are enough. The noise width grows tenfold until the completions differ; it is an error only if noise of width
`ENORMOUS` changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from evoalign.config import Config
from evoalign.engines import ABSENT, Answering
from evoalign.errors import CanaryError, ModelError, NotFiniteError
from evoalign.rollouts import LostError, collect
from evoalign.spaces import Space
from evoalign.spaces.targets import by_layer
from evoalign.types import MEAN, MEAN_PLAN, Layout, Member, Plan, Request, Rollout, Sampling

TOKENS = 4
SMALL = 1e-3
"""First width to try without a config."""
ENORMOUS = 1e3
"""Standard deviation of noise that destroys any model: weights are below 1."""
FLOOR = {torch.float32: 2**-10, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Difference of log-probabilities that rounding can make, by served dtype."""
LOOSE = 8
"""Floors by which the mean of an engine that is not exact may differ before and after the members."""
MEMBERS = (Member(0, 0, 1), Member(1, 0, -1), Member(2, 1, 1))
NOWHERE = "evoalign.checks.canary.no_such_tensor"
_LAST_GENERATION = (1 << 32) - 1

Pair = tuple[int, int]


def is_due(config: Config, done: int) -> bool:
    """Whether the canary runs after `done` generations."""
    every = config.checks.canary_every
    return every > 0 and done % every == 0


def check(
    engine: Answering,
    space: Space,
    layout: Layout,
    prompt_ids: Sequence[int],
    *,
    generation: int,
    width: float,
    exact: bool = False,
) -> None:
    """Raise CanaryError if members are not sampled with their own weights. Leaves the engine unchanged.

    `width` is the sigma of this generation. `exact` (`Facts.deterministic`) requires bit-identical completions of the
    mean. Cost: 8 or more completions of `TOKENS` tokens and two fingerprints.
    """
    sampling = Sampling(min(TOKENS, space.config.sampling.max_tokens))
    request = Request(0, tuple(prompt_ids), sampling, logprobs=True)
    fingerprint = engine.fingerprint()
    mean = _ask(engine, MEAN_PLAN, request)[MEAN.index]
    floor = _check_members(engine, space, layout, request, mean, generation, width)
    _check_refusals(engine, request, generation, width)
    if engine.fingerprint() != fingerprint:
        raise CanaryError(
            "canary: sampling members changed the mean; the engine does not restore its weights exactly, so no update "
            "of this run can be trusted: fix the engine"
        )
    again = _ask(engine, MEAN_PLAN, request)[MEAN.index]
    allowed = 0.0 if exact else max(4 * floor, LOOSE * FLOOR[layout.torch_dtype])
    if not distance(mean, again) <= allowed:
        raise CanaryError(
            f"canary: the unperturbed model gave {mean.text!r} {_logprobs_text(mean)} before the members and "
            f"{again.text!r} {_logprobs_text(again)} after them; the engine serves weights of a member: fix the engine"
        )


def address(generation: int) -> int:
    """Return the generation whose noise a canary uses, counted down from the last, which no run reaches."""
    return _LAST_GENERATION - generation


def distance(one: Rollout, other: Rollout) -> float:
    """Return the largest difference of log-probabilities up to and including the first token that differs.

    Infinite if a token differs that either side is sure of (rounding only swaps tokens of equal probability, at most
    about one half), or if a log-probability is not a number.
    """
    largest = 0.0
    lines = zip(one.token_ids, _logprobs(one), other.token_ids, _logprobs(other), strict=False)
    for token, p, other_token, other_p in lines:
        if math.isnan(p - other_p) or (token != other_token and max(p, other_p) > -0.5):
            return math.inf
        largest = max(largest, abs(p - other_p))
        if token != other_token:
            return largest
    return largest if len(one.token_ids) == len(other.token_ids) else math.inf


def widths(layout: Layout, width: float) -> Iterator[float]:
    """Yield ten times the width of a generation, then tenfold more each, until the noise is enormous."""
    if not max(t.scale for t in layout.tensors) * width > 0:
        raise CanaryError("canary: the noise has width 0, since mean |W| of all layers is 0; set es.sigma")
    while True:
        width *= 10
        yield width
        if _is_enormous(layout, width):
            return


def _is_enormous(layout: Layout, width: float) -> bool:
    return width * max(t.scale for t in layout.tensors) >= ENORMOUS


def _check_members(
    engine: Answering, space: Space, layout: Layout, request: Request, mean: Rollout, generation: int, width: float
) -> float:
    """Raise CanaryError if two of `MEMBERS` and the mean are alike; return the largest difference of equal weights."""
    factors = len(layout.tensors) > len(layout.modules)
    # With two evolved factors, (-B)(-A) = B A: the members of a pair are the same model at the start.
    pairs: list[Pair] = [(MEAN.index, 0), (MEAN.index, 2), (0, 2), *([] if factors else [(0, 1)])]
    compared, floor, wide = list(pairs), 0.0, width
    for step, wide in enumerate(widths(layout, width)):
        noise = address(generation + step)  # new for each width: unsure models can be alike by chance
        control = _ask(engine, Plan(noise, 0.0, MEMBERS), request)
        floor = max(floor, *(distance(a, b) for a, b in _rollouts(compared, mean, control)))
        if math.isinf(floor):
            texts = ", ".join(repr(control[i].text) for i in sorted(control))
            raise CanaryError(
                f"canary: members without noise gave {texts}, and the unperturbed model {mean.text!r}; the engine adds "
                "weights of other members: fix the engine"
            )
        threshold = max(4 * floor, FLOOR[layout.torch_dtype])
        try:
            answers = _ask(engine, Plan(noise, wide, MEMBERS), request)
        except NotFiniteError:  # noise this wide gives no finite logits
            break
        differ = [distance(a, b) > threshold for a, b in _rollouts(pairs, mean, answers)]
        pairs = [pair for pair, apart in zip(pairs, differ, strict=True) if not apart]
        if not pairs:
            return floor
    if _is_enormous(layout, 10 * width):
        setting = "es.noise_multiplier" if by_layer(space.config) else "es.sigma"
        raise CanaryError(
            f"canary: members give the same completion with noise of {setting} {width:g}, which destroys any model; "
            f"lower {setting}"
        )
    raise CanaryError(f"canary: {_alike(pairs[0], space)} (up to {wide / width:g} times this run's noise)")


def _check_refusals(engine: Answering, request: Request, generation: int, width: float) -> None:
    """Raise CanaryError if the engine accepts a tensor or a member that does not exist."""
    try:
        engine.load({NOWHERE: torch.zeros(1)})
    except ModelError:
        pass
    else:
        raise CanaryError(
            f"canary: the engine loads {NOWHERE} without an error though the model has no such tensor, so it would "
            "drop an adapter with wrong names: fix the engine's load"
        )
    try:
        output = repr(collect(engine, Plan(address(generation), width, (ABSENT,)), [request])[0].text)
    except ModelError:
        return
    except LostError:
        output = "nothing"
    raise CanaryError(
        f"canary: a member that does not exist gives {output} instead of an error; the engine uses the base model for "
        "an unknown adapter: fix the engine, or use another version of the server"
    )


def _rollouts(pairs: Sequence[Pair], mean: Rollout, rollouts: Mapping[int, Rollout]) -> list[tuple[Rollout, Rollout]]:
    by_index = {**rollouts, MEAN.index: mean}
    return [(by_index[a], by_index[b]) for a, b in pairs]


def _ask(engine: Answering, plan: Plan, request: Request) -> dict[int, Rollout]:
    """Return completions by member. Raises CanaryError if the engine leaves out a member."""
    try:
        return {r.member.index: r for r in collect(engine, plan, [request])}
    except LostError as error:
        who = f"member {error.member.index} (-1: the mean)"
        raise CanaryError(f"canary: the engine returns no completion of {who}: fix the engine") from error


def _logprobs(rollout: Rollout) -> Sequence[float]:
    """Return the log-probabilities; zeros if the engine has none, so that tokens are compared."""
    return rollout.logprobs if rollout.logprobs is not None else [0.0] * len(rollout.token_ids)


def _alike(pair: Pair, space: Space) -> str:
    carried = "adapters" if space.carrier == "adapter" else "perturbed weights"
    if MEAN.index in pair:
        return (
            f"member {pair[1]} gives the completion of the unperturbed model: the engine ignores the members' "
            f"{carried}, or the modules of space {space.name} are not used; choose other target modules, or another "
            "engine version"
        )
    if pair == (0, 1):
        return f"members of opposite sign are alike: the engine ignores the sign of the members' {carried}; fix it"
    return f"members {pair[0]} and {pair[1]} are alike: the engine gives all members the same {carried}; fix it"


def _logprobs_text(rollout: Rollout) -> str:
    return "(log-probabilities " + ", ".join(f"{p:.6g}" for p in _logprobs(rollout)) + ")"
