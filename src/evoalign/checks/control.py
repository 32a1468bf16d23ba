# SPDX-License-Identifier: Apache-2.0
"""The A/A control: the unperturbed model scored twice on the same prompts, the noise floor of a generation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evoalign import evolve
from evoalign.config import Config
from evoalign.engines import Engine
from evoalign.rewards.objective import Objective, judge
from evoalign.rollouts import collect, derive_seed, group_of
from evoalign.tasks import Task
from evoalign.tokens import Tokens
from evoalign.types import MEAN_PLAN, Example, Request, Rollout


class Control(NamedTuple):
    """The unperturbed model's fitness, twice on the same prompts. `floor` is the standard deviation of one of them.

    `of_reward` is that of one completion's score where both texts are the same, which a reward that is a function of
    the text has none of; None where no text came twice.
    """

    first: float
    second: float
    floor: float
    of_reward: float | None = None


def is_due(config: Config, index: int) -> bool:
    """Whether there is a control of this generation, counted from 0."""
    every = config.checks.control_every
    return every > 0 and index % every == 0 and index < config.es.num_generations


def control(
    config: Config,
    engine: Engine,
    task: Task,
    tokens: Tokens,
    examples: Sequence[Example],
    generation: int,
    *,
    objective: Objective | None = None,
) -> Control:
    """Score the unperturbed model twice on a generation's examples, in the order of its requests.

    The first time with the draws that the members had. Where sampling is on, the second time has other draws; greedy,
    it is the same requests again, and other texts show an engine that does not repeat, other scores of the same text a
    reward that does not. `objective` has the state that the generation begins with; None is a new one of the task's.
    """
    objective = objective or task.objective()
    prompts = [tokens.encode(task.prompt(example)) for example in examples]
    requests = evolve.requests_of(config, range(len(prompts)), prompts, generation)
    said = [collect(engine, MEAN_PLAN, asked) for asked in (requests, redrawn(config, requests, generation))]
    first, second = (rewarded(objective, task, rollouts, examples) for rollouts in said)
    same = [one.text == other.text for one, other in zip(*said, strict=True)]
    return control_of(first, second, [all(same)] if objective.per_member else same)


def rewarded(objective: Objective, task: Task, rollouts: Sequence[Rollout], examples: Sequence[Example]) -> list[float]:
    """What each answer scores alone, or with `per_member` all together."""
    return judge(objective, group_of(task, examples, rollouts, 1))[0].tolist()


def redrawn(config: Config, requests: Sequence[Request], generation: int) -> list[Request]:
    """The same requests with other draws."""
    return [dataclasses.replace(r, seed=derive_seed(config.seed, "control", generation, r.index)) for r in requests]


def control_of(first_P: Sequence[float], second_P: Sequence[float], same_P: Sequence[bool] = ()) -> Control:
    """From rewards by prompt: the variance of one score of a prompt is half the mean square of its differences.

    `same_P`: where the second text is the first one again.
    """
    difference_P = np.asarray(first_P, dtype=np.float64) - np.asarray(second_P, dtype=np.float64)
    floor = math.sqrt(float((difference_P**2).mean()) / 2 / len(difference_P))
    of_same = difference_P[np.asarray(same_P, dtype=bool)] if any(same_P) else None
    of_reward = None if of_same is None else math.sqrt(float((of_same**2).mean()) / 2)
    return Control(float(np.mean(first_P)), float(np.mean(second_P)), floor, of_reward)
