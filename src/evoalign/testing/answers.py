# SPDX-License-Identifier: Apache-2.0
"""An engine's answers held against plain transformers, and against each other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from evoalign.models.origin import model_path
from evoalign.models.tensors import tensors_of
from evoalign.types import Member, Plan, Request, Rollout

if TYPE_CHECKING:
    from evoalign.testing.engines import Bench

TIE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Logits closer than this may fall either way: sums are added in another order. By the served dtype."""


def same_up_to_ties(bench: Bench, one: Rollout, other: Rollout) -> None:
    """The same tokens, as far as a batch of another shape does not decide a tie otherwise."""
    assert one.logprobs is not None and other.logprobs is not None
    for ours, p, theirs, q in zip(one.token_ids, one.logprobs, other.token_ids, other.logprobs, strict=False):
        apart, tie = abs(p - q), TIE[bench.engine.dtype]
        where = f"member {one.member.index} answers otherwise where it is asked alone"
        assert apart <= tie, f"{where}: {one.text!r}, then {other.text!r} ({apart:.3g} apart)"
        if ours != theirs:
            return
    assert len(one.token_ids) == len(other.token_ids), f"member {one.member.index}: {one.text!r}, {other.text!r}"


def check_fields(bench: Bench, request: Request, rollout: Rollout) -> None:
    """All fields of a rollout fit each other and the request."""
    ids, where = rollout.token_ids, f"member {rollout.member.index}, request {rollout.request}"
    stops = [i for i, token in enumerate(ids) if token in bench.tokens.stop_ids]
    assert 1 <= len(ids) <= request.sampling.max_tokens, f"{where}: {len(ids)} tokens"
    if rollout.finish_reason == "stop":
        assert stops == [len(ids) - 1], f"{where}: finished by a stop token, which has to be the last of {ids}"
    else:
        assert len(ids) == request.sampling.max_tokens, f"{where}: ended for its length after {len(ids)} tokens"
        assert not stops, f"{where}: goes on after a stop token"
    text = bench.tokens.decode(ids)
    assert rollout.text == text, f"{where}: the text is {rollout.text!r} and its tokens say {text!r}"
    if not request.logprobs:
        assert rollout.logprobs is None, f"{where}: log-probabilities that were not asked for"
        return
    assert rollout.logprobs is not None, f"{where}: no log-probabilities"
    assert len(rollout.logprobs) == len(ids), f"{where}: {len(rollout.logprobs)} log-probabilities, {len(ids)} tokens"
    assert all(math.isfinite(p) and p <= 1e-6 for p in rollout.logprobs), f"{where}: {rollout.logprobs}"


def check_greedy(bench: Bench, model: Any, rollouts: Iterable[Rollout]) -> None:
    """Each token is the likeliest one after those before it, and has its log-probability."""
    tie = TIE[bench.engine.dtype]
    for rollout in rollouts:
        prompt, ids = bench.requests[rollout.request].prompt_ids, rollout.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        for place, gap in enumerate((logits.max(-1).values - chosen).tolist()):
            assert gap <= tie, (
                f"member {rollout.member.index} (-1 is the mean) answers {rollout.text!r} to request "
                f"{rollout.request}; token {place} is {ids[place]}, and plain transformers with those weights says "
                f"{int(logits[place].argmax())}, whose logit is higher by {gap:.3g}"
            )
        assert rollout.logprobs is not None
        want = chosen - logits.logsumexp(-1)
        apart = float((torch.tensor(rollout.logprobs) - want).abs().max())
        assert apart <= 4 * tie, f"member {rollout.member.index}: log-probabilities are {apart:.3g} away"


def plain_model(bench: Bench) -> Any:
    """The plain Hugging Face model, on the CPU, in the served dtype."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        model_path(bench.config.model), revision=bench.config.model.revision, dtype=bench.engine.dtype,
        trust_remote_code=False,
    )  # fmt: skip
    return model.eval().requires_grad_(False)


def written(bench: Bench, plan: Plan, member: Member) -> Any:
    """The plain model with one member's weights written in, from the engine's own mean."""
    model, state = plain_model(bench), dict(bench.engine.state())
    weights = tensors_of(model)
    if bench.space.evolves_model:
        for tensor in bench.layout.tensors:
            weights[tensor.name].copy_(state[tensor.name])
    if bench.space.carrier == "dense":
        for tensor in bench.layout.tensors:
            dense = bench.space.perturbed(bench.layout, tensor.name, state[tensor.name], plan, member)
            weights[tensor.name].copy_(dense)
        return model
    for module in dict.fromkeys(t.module for t in bench.layout.tensors):
        adapter = bench.space.adapter(bench.layout, module, state.__getitem__, plan, (member,))
        if adapter is not None:
            added = adapter.scaling * (adapter.b[0].float() @ adapter.a[0].float())
            weights[module].copy_(weights[module].float() + added)
    return model
