# SPDX-License-Identifier: Apache-2.0
"""The loop of Evolution Strategies, the same for every space, engine and task.

Algorithm 1 of Qiu et al. (arXiv 2509.24372). Deviation: noise is a function of a counter, so no member is stored. The
phases of a generation are described in docs/concepts.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from evoalign import shaping, spaces
from evoalign.config import Config
from evoalign.report import watching
from evoalign.rewards.objective import means, reported, score
from evoalign.rollouts import Clock, Encoded, Run, ask, requests_of_members, rows_of
from evoalign.types import Generation, Plan, Summation, Update, population


def evolve(run: Run, first: int = 0) -> Iterator[Generation]:
    """Train from generation `first` to the last one, and yield each generation when it is sealed in the journal.

    The engine's mean, the journal and the states of objective and settings must be at generation `first`.
    """
    es = run.config.es
    members = population(es.population_size, antithetic=es.antithetic)
    prompts = Encoded(run.task, run.tokens, run.settings.under(run.examples))
    clock = Clock()
    for generation in range(first, es.num_generations):
        clock.start()
        sigma = sigma_at(run.config, generation, run.plateaus() if run.plateaus else 0)
        plan = Plan(generation, sigma, members)  # no tensors
        rows = rows_of(run.config, len(run.examples), generation)
        answered = ask(run, plan, requests_of_members(run, plan, rows, prompts), rows, clock)
        scores_MP = score(run.objective, answered.group)
        clock.mark("score")
        coefficients_M = shaping.shape(scores_MP, es.shaping)
        update = update_of(run.config, plan, coefficients_M, run.journal.summation)
        fitness_M = tuple(map(float, shaping.fitness(scores_MP)))
        columns = reported(run.objective, answered.group)
        run.journal.append(update, fitness_M, run.moved_by(update))  # before the weights move
        with watching.phase("updating"):
            run.engine.apply(update)
            weights_hash = run.engine.fingerprint()
        run.journal.seal(generation, weights_hash)
        clock.mark("update")
        evaluation = run.evaluate_mean() if run.evaluate_mean and is_due(run.config, generation) else None
        clock.mark("other")
        yield Generation(
            index=generation,
            total=es.num_generations,
            fitness_M=fitness_M,
            scores_MP=tuple(tuple(map(float, row)) for row in scores_MP),
            update=update,
            weights_hash=weights_hash,
            tokens=answered.tokens,
            empty_share=answered.empty_share,
            truncated_share=answered.truncated_share,
            seconds=clock.seconds,
            evaluation=evaluation,
            rows=tuple(rows),
            rollouts=tuple(answered.rollouts),
            prompts=tuple(prompts[i] for i in answered.places),
            rewards=means(columns, fewest=1),
            objective=run.state,
            mean=tuple(answered.mean),
            columns=columns,
            settings=answered.settings,
        )


def update_of(config: Config, plan: Plan, coefficients_M: Iterable[float], summation: Summation = "ordered") -> Update:
    """Return the move of the mean for a generation's members and their coefficients."""
    return Update(
        index=plan.generation,
        generation=plan.generation,
        members=plan.members,
        coefficients=tuple(map(float, coefficients_M)),
        sigma=plan.sigma,
        step=step_at(config, plan.generation),
        decay=config.es.decay,
        summation=summation,
    )


def sigma_at(config: Config, generation: int, plateaus: int = 0) -> float:
    """Return the factor of each tensor's noise scale in a generation, given the number of plateaus before it."""
    es = config.es
    factor = shaping.schedule(es.sigma_schedule, generation, es.num_generations, plateaus)
    return es.width * spaces.create(config).width_factor(generation) * factor


def step_at(config: Config, generation: int) -> float:
    """Return the step size of a generation: eta times the noise width at generation 0, times the schedule's factor.

    A sigma schedule changes the noise and not the step.
    """
    es = config.es
    factor = shaping.schedule(es.learning_rate_schedule, generation, es.num_generations)
    return es.eta * es.width * spaces.create(config).width_factor(generation) * factor


def is_due(config: Config, generation: int) -> bool:
    """Return whether the mean is evaluated after this generation. The caller evaluates it after the last one."""
    every = config.evaluation.every
    return every > 0 and (generation + 1) % every == 0 and generation + 1 < config.es.num_generations
