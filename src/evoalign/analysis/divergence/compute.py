# SPDX-License-Identifier: Apache-2.0
"""The divergence of saved weights from their base model, drawn and measured as training does it (`checks.kl_every`), or
from any other model."""

from __future__ import annotations

from contextlib import closing

import torch

from evoalign import engines, tokens
from evoalign.analysis.lab import Asked, Lab
from evoalign.analysis.targets import Target
from evoalign.checks.divergence import Divergence, Reference, Sample, draw, standard_errors, summarise
from evoalign.config import Config
from evoalign.engines.transformers.engine import load_model
from evoalign.report import watching
from evoalign.setup import assemble, task_and_data
from evoalign.training.resolve import checked_adapter, resolve_target

Drawn = tuple[list[Sample], torch.Tensor]
"""A model's own answers, and sums over their tokens of k1, k2, k3 and the exact KL, float64 [N, 4]."""
Errors = dict[str, float | None]


def divergence_of(target: Target, prompts: int, tokens: int) -> tuple[Divergence, Errors]:
    """KL(target || base) along its own answers to the first `prompts` test examples, at temperature 1, top_p 1.

    With the standard errors of the four estimates, over prompts.
    """
    target.check_task()
    checks = target.config.checks.model_copy(update={"kl_prompts": prompts, "kl_tokens": tokens})
    config = target.config.model_copy(update={"checks": checks})
    return _summed(*(_of_adapter if target.is_adapter else _of_model)(target, config))


def between(
    names: list[str], reference: str, config: Config | None, prompts: int, tokens: int
) -> list[tuple[Divergence, Errors]]:
    """KL(target || reference) of each, likewise, with adapters merged. Raises EvoalignError for other shapes."""
    asked = Asked(examples=prompts, kl_tokens=tokens)
    with Lab(list(dict.fromkeys([*names, reference])), config, asked) as lab:
        watching.count(len(names))
        return [_summed(*lab.drawn({reference: 1.0}, {name: 1.0})) for name in watching.each(names)]


def _summed(samples: list[Sample], sums_N4: torch.Tensor) -> tuple[Divergence, Errors]:
    return summarise(samples, sums_N4), standard_errors(samples, sums_N4)


def _of_adapter(target: Target, config: Config) -> Drawn:
    config, adapter = resolve_target(target.weights, config)
    assert adapter is not None
    with closing(assemble(config)) as parts, closing(Reference.of(parts)) as reference:
        parts.engine.load(checked_adapter(adapter, parts.layout))
        samples = draw(parts.engine, parts.tokens, parts.task, parts.data.test, parts.config)
        return samples, reference.sums(parts, samples)


def _of_model(target: Target, config: Config) -> Drawn:
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
        return samples, reference.sums(policy, samples)
