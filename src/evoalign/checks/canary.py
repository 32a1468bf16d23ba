# SPDX-License-Identifier: Apache-2.0
"""Proof, while a run goes on, that members answer with their own weights: an adapter is never silently ignored.

Servers that do not know an adapter, or cannot place it on a module, often answer with the base model and say nothing;
the run then goes on and learns nothing. So at the start and every `checks.canary_every` generations:

    the mean      asked before and after answers alike, and its hash stays
    no noise      members of width 0 show how far answers of equal weights lie apart in this batch: the floor
    much noise    a member differs from the mean, from another member and from the one of opposite sign
    what is not   a tensor that no model has and the member `ABSENT` are refused with ModelError

Answers are compared by their log-probabilities, which tell weights apart where the greedy tokens are the same; a few
tokens of one prompt are enough. What is much noise depends on where the mean is by now, so the width grows tenfold
until the answers differ, and only if `ENORMOUS` noise changes nothing is it an error.
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
"""The width to start from where no config says how wide its members' noise is."""
ENORMOUS = 1e3
"""Standard deviation of noise that leaves nothing of a model: weights are below 1."""
FLOOR = {torch.float32: 2**-10, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Log-probabilities closer than this may differ by rounding alone. By the served dtype."""
LOOSE = 8
"""The mean of an engine that is not exact may answer this many floors away from what it said before."""
MEMBERS = (Member(0, 0, 1), Member(1, 0, -1), Member(2, 1, 1))
NOWHERE = "evoalign.checks.canary.no_such_tensor"
_LAST_GENERATION = (1 << 32) - 1

Pair = tuple[int, int]
Answers = Mapping[int, Rollout]


def is_due(config: Config, done: int) -> bool:
    """Whether the canary is asked after so many generations."""
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
    """Raise CanaryError where members do not answer with their own weights. Changes nothing.

    `width` is the sigma of a plan of this generation. `exact` (`Facts.deterministic`) wants the mean to answer to the
    last bit as it did before. Cost: at best 8 completions of `TOKENS` tokens and two fingerprints.
    """
    sampling = Sampling(min(TOKENS, space.config.sampling.max_tokens))
    request = Request(0, tuple(prompt_ids), sampling, logprobs=True)
    fingerprint = engine.fingerprint()
    mean = _ask(engine, MEAN_PLAN, request)[MEAN.index]
    floor = _check_members(engine, space, layout, request, mean, generation, width)
    _check_refusals(engine, request, generation, width)
    if engine.fingerprint() != fingerprint:
        raise CanaryError(
            "canary: the mean was changed by members that only answered; the engine does not restore its weights "
            "exactly, so no update of this run can be trusted: fix the engine"
        )
    again = _ask(engine, MEAN_PLAN, request)[MEAN.index]
    allowed = 0.0 if exact else max(4 * floor, LOOSE * FLOOR[layout.torch_dtype])
    if not distance(mean, again) <= allowed:
        raise CanaryError(
            f"canary: the unperturbed model answered {mean.text!r} {_shown(mean)} before the members and "
            f"{again.text!r} {_shown(again)} after them; the engine serves what a member left behind: fix the engine"
        )


def address(generation: int) -> int:
    """The generation whose noise a canary takes: counted down from the counter's last, which no run reaches."""
    return _LAST_GENERATION - generation


def distance(one: Rollout, other: Rollout) -> float:
    """Largest difference of log-probabilities as far as two answers agree, and at the first token where they do not.

    Infinite where they disagree on a token that either is sure of: rounding only swaps tokens of equal probability,
    so neither has more than about one half. Infinite, too, where a log-probability is no number.
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
    """Ten times the width of a generation, and tenfold more each, until the noise is enormous."""
    if not max(t.scale for t in layout.tensors) * width > 0:
        raise CanaryError("canary: the noise has width 0, for mean |W| of all layers is 0; set es.sigma")
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
    """Raise CanaryError where two of `MEMBERS` and the mean answer alike; returns how far equal weights lie apart."""
    pairs = _pairs(layout)
    control = _ask(engine, Plan(address(generation), 0.0, MEMBERS), request)
    floor = max(distance(a, b) for a, b in _of(pairs, mean, control))
    if math.isinf(floor):
        raise CanaryError(
            f"canary: members without noise answer {_texts(control)}, and the unperturbed model {mean.text!r}; "
            "the engine adds weights of others to them: fix the engine"
        )
    threshold, wide = max(4 * floor, FLOOR[layout.torch_dtype]), width
    for wide in widths(layout, width):
        try:
            answers = _ask(engine, Plan(address(generation), wide, MEMBERS), request)
        except NotFiniteError:  # noise that leaves no numbers, whatever a CPU's sums make of it, tells nobody apart
            break
        differ = [distance(a, b) > threshold for a, b in _of(pairs, mean, answers)]
        pairs = [pair for pair, apart in zip(pairs, differ, strict=True) if not apart]
        if not pairs:
            return floor
    if _is_enormous(layout, 10 * width):
        setting = "es.noise_multiplier" if by_layer(space.config) else "es.sigma"
        raise CanaryError(
            f"canary: members answer alike with noise of {setting} {width:g}, which leaves nothing of a model; "
            f"lower {setting}"
        )
    raise CanaryError(f"canary: {_alike(pairs[0], space)} (seen up to {wide / width:g} times this run's noise)")


def _check_refusals(engine: Answering, request: Request, generation: int, width: float) -> None:
    """Raise CanaryError where the engine takes what does not exist."""
    try:
        engine.load({NOWHERE: torch.zeros(1)})
    except ModelError:
        pass
    else:
        raise CanaryError(
            f"canary: the engine loads {NOWHERE} without an error though the model has no such tensor, so an adapter "
            "of wrong names would be dropped: fix the engine's load"
        )
    try:
        said = repr(collect(engine, Plan(address(generation), width, (ABSENT,)), [request])[0].text)
    except ModelError:
        return
    except LostError:
        said = "nothing"
    raise CanaryError(
        f"canary: a member that does not exist answers {said} instead of being refused; the engine takes the base "
        "model for an adapter that it does not know: fix the engine, or use another version of the server"
    )


def _pairs(layout: Layout) -> list[Pair]:
    """Who has to differ. Two evolved factors, (-B)(-A) = B A, make the signs of a pair the same model at the start."""
    factors = len(layout.tensors) > len({t.module for t in layout.tensors})
    signs = [] if factors else [(0, 1)]
    return [(MEAN.index, 0), (MEAN.index, 2), (0, 2), *signs]


def _of(pairs: Sequence[Pair], mean: Rollout, answers: Answers) -> list[tuple[Rollout, Rollout]]:
    by_index = {**answers, MEAN.index: mean}
    return [(by_index[a], by_index[b]) for a, b in pairs]


def _ask(engine: Answering, plan: Plan, request: Request) -> dict[int, Rollout]:
    """Answers by member. Raises CanaryError where the engine leaves a member out."""
    try:
        return {r.member.index: r for r in collect(engine, plan, [request])}
    except LostError as error:
        who = f"member {error.member.index} (-1: the mean)"
        raise CanaryError(f"canary: the engine gives no answer of {who}: fix the engine") from error


def _logprobs(rollout: Rollout) -> Sequence[float]:
    """Zeros where an engine has none, so that its tokens alone tell."""
    return rollout.logprobs if rollout.logprobs is not None else [0.0] * len(rollout.token_ids)


def _alike(pair: Pair, space: Space) -> str:
    carried = "adapters" if space.carrier == "adapter" else "perturbed weights"
    if MEAN.index in pair:
        return (
            f"member {pair[1]} answers as the unperturbed model does: the engine ignores the members' {carried}, or "
            f"what space {space.name} evolves takes no part; choose other target modules, or another engine version"
        )
    if pair == (0, 1):
        return f"members of opposite sign answer alike: the engine ignores the sign of the members' {carried}; fix it"
    return f"members {pair[0]} and {pair[1]} answer alike: the engine gives all members the same {carried}; fix it"


def _texts(answers: Answers) -> str:
    return ", ".join(repr(answers[i].text) for i in sorted(answers))


def _shown(rollout: Rollout) -> str:
    return "(log-probabilities " + ", ".join(f"{p:.6g}" for p in _logprobs(rollout)) + ")"
