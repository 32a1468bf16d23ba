# SPDX-License-Identifier: Apache-2.0
"""Completions for GRPO from evoalign's own engine: drawn from the policy, or greedy ones of members around it.

Is ES different for how it explores, or for how it updates? With members' completions GRPO explores as ES does and
updates by backpropagation. Such completions are not the policy's own. A greedy member is a point mass, against which
no ratio of probabilities exists, so the member's own distribution before the argmax takes its place: `old` in PPO's
clipped ratio (Schulman et al., arXiv 1707.06347, eq. 7) is what the member gave each token. A token of positive
advantage stops pulling where the policy rates it more than 1 + epsilon times as likely as the member did, one of
negative advantage where it is less than 1 - epsilon times; beyond the other bound each pulls on. That bounds a step
that would go further; it does not make the gradient unbiased.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from evoalign import evolve
from evoalign.config import Config
from evoalign.engines import Engine
from evoalign.errors import ConfigError
from evoalign.rollouts import collect, derive_seed
from evoalign.setup import layout_of
from evoalign.spaces import Space
from evoalign.tokens import Tokens
from evoalign.types import MEAN_PLAN, Layout, Plan, Request, Rollout, Sampling, population


@contextmanager
def answering(model: Any, *, mixed: bool) -> Generator[None]:
    """A model in training answers prompts, with a cache, and goes on training.

    `mixed`: in bfloat16 on its float32 weights, as it trains; else in the arithmetic of its weights, unless its
    `forward` says otherwise.
    """
    training = model.training
    model.eval()
    try:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=mixed):
            yield
    finally:
        model.train(training)


class EngineRollouts:
    """Groups drawn from the policy at `grpo.temperature`: another seed for each completion of each step.

    A step may take several rounds, each asked for by itself; runs stop and go on between steps.
    """

    def __init__(self, config: Config, engine: Engine, tokens: Tokens, model: Any, longest: int, mixed: bool) -> None:
        self.config, self.engine, self.tokens, self.model, self.mixed = config, engine, tokens, model, mixed
        self.sampling = Sampling(longest, config.grpo.temperature, config.grpo.top_p)
        self._step, self._asked = -1, 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """What TRL's `rollout_func` returns for prompts that stand there once for each completion."""
        step, process = int(trainer.state.global_step), int(trainer.accelerator.process_index)
        first = self._asked if step == self._step else 0
        self._step, self._asked = step, first + len(prompts)
        encoded = [self.tokens.encode(prompt) for prompt in prompts]
        seeds = [derive_seed(self.config.seed, "grpo", step, process, first + i) for i in range(len(prompts))]
        requests = [Request(i, ids, self.sampling, seeds[i]) for i, ids in enumerate(encoded)]
        with answering(self.model, mixed=self.mixed):
            found = collect(self.engine, MEAN_PLAN, requests)
        return _output(encoded, found)


class MemberRollouts:
    """Groups of one greedy completion of each member; all prompts of a step are asked of the same members."""

    def __init__(
        self, config: Config, engine: Engine, tokens: Tokens, model: Any, longest: int, mixed: bool, space: Space
    ) -> None:
        if space.carrier != "adapter":
            raise ConfigError(
                f"grpo.rollouts es takes space lora or lowrank, whose members answer together, not {space.name}"
            )
        self.config, self.engine, self.tokens, self.model, self.mixed = config, engine, tokens, model, mixed
        self.members = population(config.grpo.num_generations, antithetic=config.es.antithetic)
        self.sampling = Sampling(longest)
        with torch.no_grad():
            self.layout: Layout = layout_of(space, engine.specs(), engine.dtype)
            engine.start(space, self.layout, None, False)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """What TRL's `rollout_func` returns, with each token's log-probability under its member."""
        group, step = self.config.grpo.num_generations, int(trainer.state.global_step)
        encoded = [self.tokens.encode(prompt) for prompt in prompts]
        requests = [Request(i, ids, self.sampling, logprobs=True) for i, ids in enumerate(encoded[::group])]
        plan = Plan(step, self.sigma(step), self.members)
        with answering(self.model, mixed=self.mixed):
            found = sorted(collect(self.engine, plan, requests), key=lambda r: (r.request, r.member.index))
        return _output(encoded, found)

    def sigma(self, step: int) -> float:
        """The width of a step's noise: the schedule runs over `es.num_generations`."""
        return evolve.sigma_at(self.config, min(step, self.config.es.num_generations - 1))


def _output(encoded: Sequence[tuple[int, ...]], found: Sequence[Rollout]) -> dict[str, Any]:
    logprobs = None if any(r.logprobs is None for r in found) else [list(r.logprobs or ()) for r in found]
    return {
        "prompt_ids": [list(ids) for ids in encoded],
        "completion_ids": [list(r.token_ids) for r in found],
        "logprobs": logprobs,
    }


Source = Callable[[Sequence[Any], Any], dict[str, Any]]
