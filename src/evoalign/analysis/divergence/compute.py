# SPDX-License-Identifier: Apache-2.0
"""The divergence of saved weights from their base model, drawn and measured as training does it (`checks.kl_every`)."""

from __future__ import annotations

from contextlib import closing

import torch

from evoalign import engines, tokens
from evoalign.analysis.targets import Target
from evoalign.checks.divergence import Divergence, Reference, draw, measure
from evoalign.config import Config
from evoalign.engines.transformers.engine import load_model
from evoalign.setup import assemble, task_and_data
from evoalign.training.resolve import checked_adapter, resolve_target


def divergence_of(target: Target, prompts: int, tokens: int) -> Divergence:
    """KL(target || base) along its own answers to the first `prompts` test examples, at temperature 1, top_p 1."""
    target.check_task()
    checks = target.config.checks.model_copy(update={"kl_prompts": prompts, "kl_tokens": tokens})
    config = target.config.model_copy(update={"checks": checks})
    return _of_adapter(target, config) if target.is_adapter else _of_model(target, config)


def _of_adapter(target: Target, config: Config) -> Divergence:
    config, adapter = resolve_target(target.weights, config)
    assert adapter is not None
    with closing(assemble(config)) as parts, closing(Reference.of(parts)) as reference:
        parts.engine.load(checked_adapter(adapter, parts.layout))
        return measure(parts, reference)


def _of_model(target: Target, config: Config) -> Divergence:
    """Of a whole model: what answers is closed before it is loaded again beside its base."""
    own, _ = resolve_target(target.weights, config)
    task, data = task_and_data(config, None, None)
    with closing(task):
        tokens_ = tokens.load(own.model)
        with closing(engines.create(own, tokens_)) as engine:
            samples = draw(engine, tokens_, task, data.test, own)
    with closing(Reference(config, "cuda" if torch.cuda.is_available() else "cpu")) as reference:
        policy = load_model(own.model, reference.dtype)
        policy = policy.float() if reference.device.type == "cpu" else policy.to(reference.device)
        return reference.divergence(policy, samples)
