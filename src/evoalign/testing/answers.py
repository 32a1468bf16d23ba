# SPDX-License-Identifier: Apache-2.0
"""Compare an engine's completions with plain transformers, and with each other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from evoalign.config import Config
from evoalign.engines import Engine
from evoalign.models.files import loading
from evoalign.models.origin import model_path
from evoalign.models.tensors import tensors_of
from evoalign.spaces import Space
from evoalign.tokens import Tokens
from evoalign.types import Facts, Layout, Member, Plan, Request, Rollout

TIE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Tolerance for logits by served dtype: the order of a sum may decide between tokens this close."""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A started engine with its config, tokens, space and layout, and the requests to send it."""

    config: Config
    tokens: Tokens
    engine: Engine
    space: Space
    layout: Layout
    facts: Facts
    requests: tuple[Request, ...]


def same_up_to_ties(bench: StartedEngine, one: Rollout, other: Rollout) -> None:
    """Require the same tokens, up to the first tie that batches of other shapes decide differently."""
    assert one.logprobs is not None and other.logprobs is not None
    for ours, p, theirs, q in zip(one.token_ids, one.logprobs, other.token_ids, other.logprobs, strict=False):
        apart, tie = abs(p - q), TIE[bench.engine.dtype]
        where = f"member {one.member.index} has another completion in a batch of another shape"
        assert apart <= tie, f"{where}: {one.text!r}, then {other.text!r} (log-probabilities differ by {apart:.3g})"
        if ours != theirs:
            return
    assert len(one.token_ids) == len(other.token_ids), (
        f"member {one.member.index}: one completion is longer: {one.text!r}, {other.text!r}"
    )


def check_fields(bench: StartedEngine, request: Request, rollout: Rollout) -> None:
    """Require that the fields of a rollout are consistent with each other and with the request."""
    ids, where = rollout.token_ids, f"member {rollout.member.index}, request {rollout.request}"
    stops = [i for i, token in enumerate(ids) if token in bench.tokens.stop_ids]
    assert 1 <= len(ids) <= request.sampling.max_tokens, (
        f"{where}: {len(ids)} tokens, not 1 to {request.sampling.max_tokens}"
    )
    if rollout.finish_reason == "stop":
        assert stops == [len(ids) - 1], f"{where}: finish_reason is stop, but only the last of {ids} may stop it"
    else:
        assert len(ids) == request.sampling.max_tokens, f"{where}: finish_reason is length after {len(ids)} tokens"
        assert not stops, f"{where}: does not end at its stop token"
    text = bench.tokens.decode(ids)
    assert rollout.text == text, f"{where}: the text is {rollout.text!r}, its tokens decode to {text!r}"
    if not request.logprobs:
        assert rollout.logprobs is None, f"{where}: has log-probabilities without a request for them"
        return
    assert rollout.logprobs is not None, f"{where}: no log-probabilities"
    assert len(rollout.logprobs) == len(ids), f"{where}: {len(rollout.logprobs)} log-probabilities, {len(ids)} tokens"
    assert all(math.isfinite(p) and p <= 1e-6 for p in rollout.logprobs), (
        f"{where}: log-probabilities are not finite or above 0: {rollout.logprobs}"
    )


def check_greedy(bench: StartedEngine, model: Any, rollouts: Iterable[Rollout]) -> None:
    """Require that each token is the likeliest one and has the log-probability of the plain model."""
    tie = TIE[bench.engine.dtype]
    for rollout in rollouts:
        prompt, ids = bench.requests[rollout.request].prompt_ids, rollout.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        for place, gap in enumerate((logits.max(-1).values - chosen).tolist()):
            assert gap <= tie, (
                f"member {rollout.member.index} (-1 is the mean) completes request {rollout.request} with "
                f"{rollout.text!r}; token {place} is {ids[place]}, but plain transformers with those weights predicts "
                f"{int(logits[place].argmax())}, whose logit is higher by {gap:.3g}"
            )
        assert rollout.logprobs is not None
        want = chosen - logits.logsumexp(-1)
        apart = float((torch.tensor(rollout.logprobs) - want).abs().max())
        assert apart <= 4 * tie, (
            f"member {rollout.member.index}: log-probabilities differ from plain transformers by {apart:.3g}"
        )


def plain_model(bench: StartedEngine) -> Any:
    """Load the plain Hugging Face model on the CPU in the served dtype."""
    from transformers import AutoModelForCausalLM

    path = model_path(bench.config.model)
    with loading(path):
        model: Any = AutoModelForCausalLM.from_pretrained(
            path,
            revision=bench.config.model.revision,
            dtype=bench.engine.dtype,
            trust_remote_code=False,
        )
    return model.eval().requires_grad_(False)


def written(bench: StartedEngine, plan: Plan, member: Member) -> Any:
    """Return the plain model with the weights of one member, made from the engine's mean."""
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
    for module in bench.layout.modules:
        adapter = bench.space.adapter(bench.layout, module, state.__getitem__, plan, (member,))
        if adapter is not None:
            added = adapter.scaling * (adapter.b[0].float() @ adapter.a[0].float())
            weights[module].copy_(weights[module].float() + added)
            if adapter.bias is not None:
                layer = model.get_submodule(module.removesuffix(".weight"))
                layer.bias = torch.nn.Parameter(adapter.scaling * adapter.bias[0], requires_grad=False)
    return model
