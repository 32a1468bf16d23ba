# SPDX-License-Identifier: Apache-2.0
"""The loop of Evolution Strategies, the same for every space, engine and task.

Algorithm 1 of Qiu et al. (arXiv 2509.24372) with the noise addressed by a counter: evaluate every member of the
population on the same prompts, turn scores into coefficients, write them down, move the mean, seal the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from evoalign import shaping, spaces
from evoalign.config import Config
from evoalign.engines import Engine
from evoalign.engines.base import with_defaults
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.rewards.objective import Objective, reported_means, score
from evoalign.rollouts import Encoded, collect, group_of, requests_of, rows_of, with_mean
from evoalign.rundir.journal import Journal
from evoalign.tasks.base import Task
from evoalign.tasks.grading import grading
from evoalign.tokens import Tokens
from evoalign.types import MEAN_PLAN, Example, Generation, Plan, Update, population


def evolve(
    config: Config,
    task: Task,
    examples: Sequence[Example],
    engine: Engine,
    tokens: Tokens,
    journal: Journal,
    evaluate_mean: Callable[[], Mapping[str, float]] | None = None,
    first: int = 0,
    objective: Objective | None = None,
    plateaus: Callable[[], int] | None = None,
) -> Iterator[Generation]:
    """Train from generation `first`, which the engine's mean and the journal have to be at; yields each generation.

    `evaluate_mean` is called every `evaluation.every` generations. `objective` has the state that generation `first`
    begins with; None is a new one of the task's. `plateaus` is asked as a generation begins, how many there were so
    far, for `es.sigma_schedule` plateau. Raises ConfigError for a plateau without `plateaus`.
    """
    if plateaus is None and config.es.sigma_schedule.name == "plateau":
        raise ConfigError("es.sigma_schedule plateau follows the validation split: use evoalign.train")
    engine = with_defaults(engine)
    objective = objective or task.objective()
    es = config.es
    prompts = Encoded(task, tokens, examples)
    members = population(es.population_size, antithetic=es.antithetic)
    clock = _Clock()
    for generation in range(first, es.num_generations):
        clock.start()
        rows = rows_of(config, len(examples), generation)
        sigma = sigma_at(config, generation, 0 if plateaus is None else plateaus())
        plan = Plan(generation, sigma, members)
        requests = requests_of(config, rows, prompts, generation)
        with grading(task, examples) as begun:
            said, of_mean = begun.of(rows * len(members)), begun.of(rows)
            rollouts = collect(engine, plan, requests, said.take)
            mean = collect(engine, MEAN_PLAN, requests, of_mean.take) if objective.asks_mean else []
            clock.mark("rollout")
            group = group_of(task, [examples[i] for i in rows], rollouts, len(members), generation, said)
            group = with_mean(task, group, mean, of_mean) if mean else group
        scores_MP = score(objective, group)
        clock.mark("score")
        update = replace(update_of(config, plan, shaping.shape(scores_MP, es.shaping)), summation=journal.summation)
        fitness_M = tuple(map(float, shaping.fitness(scores_MP)))
        journal.append(update, fitness_M, objective.state)
        with watching.phase("updating"):
            engine.apply(update)
            weights_hash = engine.fingerprint()
        journal.seal(generation, weights_hash)
        clock.mark("update")
        evaluation = evaluate_mean() if evaluate_mean is not None and is_due(config, generation) else None
        clock.mark("other")
        yield Generation(
            index=generation,
            total=es.num_generations,
            fitness_M=fitness_M,
            scores_MP=tuple(tuple(map(float, row)) for row in scores_MP),
            update=update,
            weights_hash=weights_hash,
            tokens=sum(len(r.token_ids) for r in (*rollouts, *mean)),
            empty_share=float(np.mean([not r.text.strip() for r in rollouts])),
            truncated_share=float(np.mean([r.finish_reason == "length" for r in rollouts])),
            seconds=clock.seconds,
            rows=tuple(rows),
            rollouts=tuple(rollouts),
            prompts=tuple(prompts[i] for i in rows),
            evaluation=evaluation,
            rewards=reported_means(objective, group),
            objective=objective.state,
            mean=tuple(mean),
        )


def update_of(config: Config, plan: Plan, coefficients_M: Iterable[float]) -> Update:
    """The move of the mean by a generation's members, with their coefficients."""
    return Update(
        index=plan.generation,
        generation=plan.generation,
        members=plan.members,
        coefficients=tuple(map(float, coefficients_M)),
        sigma=plan.sigma,
        step=step_at(config, plan.generation),
        decay=config.es.decay,
    )


def sigma_at(config: Config, generation: int, plateaus: int = 0) -> float:
    """What multiplies each tensor's scale: the width of a generation's noise, after so many plateaus."""
    es = config.es
    factor = shaping.schedule(es.sigma_schedule, generation, es.num_generations, plateaus)
    return es.width * spaces.create(config).width_factor(generation) * factor


def step_at(config: Config, generation: int) -> float:
    """eta times the width at generation 0; a sigma schedule changes the noise and not the step."""
    es = config.es
    factor = shaping.schedule(es.learning_rate_schedule, generation, es.num_generations)
    return es.eta * es.width * spaces.create(config).width_factor(generation) * factor


def is_due(config: Config, generation: int) -> bool:
    """Whether the mean is evaluated after this generation; the last one is evaluated by the caller."""
    every = config.evaluation.every
    return every > 0 and (generation + 1) % every == 0 and generation + 1 < config.es.num_generations


class _Clock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def start(self) -> None:
        """A new generation; what the caller did since the last one, such as drawing figures, is its `other`."""
        self.seconds = {}
        self.mark("other")

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
