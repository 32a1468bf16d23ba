# SPDX-License-Identifier: Apache-2.0
"""A/A control: score the unperturbed model twice on the same prompts, to measure the noise floor of a generation.

With greedy decoding and a repeatable reward the floor is 0 whatever the members do. `reliability` says whether their
ranks hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evoalign import rollouts
from evoalign.config import Config
from evoalign.rewards.objective import Objective, judge
from evoalign.rollouts import Encoded, derive_seed, group_of
from evoalign.shaping import Scores
from evoalign.tasks import Task
from evoalign.tokens import Tokens
from evoalign.types import Example, Request, Rollout


class Control(NamedTuple):
    """Fitness of the unperturbed model, twice on the same prompts, and the standard deviation `floor` of one of them.

    `of_reward` is the standard deviation of one completion's score between equal texts, 0 for a deterministic reward;
    None if no two texts are equal.
    """

    first: float
    second: float
    floor: float
    of_reward: float | None = None


def is_due(config: Config, index: int) -> bool:
    """Whether generation `index` (from 0) has a control."""
    every = config.checks.control_every
    return every > 0 and index % every == 0 and index < config.es.num_generations


def requests_of(
    config: Config, task: Task, tokens: Tokens, examples: Sequence[Example], generation: int
) -> list[Request]:
    """Return the requests of both passes over a generation's examples, each in the order of the generation's requests.

    The first pass uses the members' seeds, the second other seeds. With greedy decoding both passes are equal requests:
    other texts show an engine whose completions depend on the place in a batch, other scores of the same text a reward
    that is not deterministic.
    """
    first = rollouts.requests_of(config, range(len(examples)), Encoded(task, tokens, examples), generation)
    second = redrawn(config, first, generation)
    return [*first, *(dataclasses.replace(r, index=len(first) + r.index) for r in second)]


def control(objective: Objective, task: Task, rollouts: Sequence[Rollout], examples: Sequence[Example]) -> Control:
    """Return the control from the completions of `requests_of`. `objective` is in the generation's state."""
    passes = rollouts[: len(examples)], rollouts[len(examples) :]
    first, second = (rewarded(objective, task, some, examples) for some in passes)
    same = [one.text == other.text for one, other in zip(*passes, strict=True)]
    return control_of(first, second, [all(same)] if objective.per_member else same)


def reliability(scores_MP: Scores) -> float | None:
    """Return how well the members' fitness on some of the prompts predicts that on others.

    The mean of all split-half correlations, corrected for the full number of prompts by Spearman and Brown (Cronbach's
    alpha), without the bias of few members: under chance (1 - alpha) is F distributed with mean (M - 1) / (M - 3). 1 if
    all prompts rank the members alike, 0 on average if their ranks are chance. None with one prompt, with fewer than
    four members, or if all members have the same fitness.
    """
    members, prompts = scores_MP.shape
    total = float(scores_MP.sum(axis=1).var())
    alone = float(scores_MP.var(axis=0).sum())
    if prompts < 2 or members < 4 or total <= 1e-12 * alone or alone == 0:
        return None
    alpha = prompts / (prompts - 1) * (1 - alone / total)
    return 1 - (1 - alpha) * (members - 3) / (members - 1)


def rewarded(objective: Objective, task: Task, rollouts: Sequence[Rollout], examples: Sequence[Example]) -> list[float]:
    """Return the score of each completion, or with `per_member` one score of all."""
    return judge(objective, group_of(task, examples, rollouts, 1))[0].tolist()


def redrawn(config: Config, requests: Sequence[Request], generation: int) -> list[Request]:
    """Return the requests with other seeds."""
    return [dataclasses.replace(r, seed=derive_seed(config.seed, "control", generation, r.index)) for r in requests]


def control_of(first_P: Sequence[float], second_P: Sequence[float], same_P: Sequence[bool] = ()) -> Control:
    """Return the control from two scores of each prompt; `same_P` says which prompts have equal texts.

    The variance of one score is half the mean square of the differences.
    """
    difference_P = np.asarray(first_P, dtype=np.float64) - np.asarray(second_P, dtype=np.float64)
    floor = math.sqrt(float((difference_P**2).mean()) / 2 / len(difference_P))
    of_same = difference_P[np.asarray(same_P, dtype=bool)] if any(same_P) else None
    of_reward = None if of_same is None else math.sqrt(float((of_same**2).mean()) / 2)
    return Control(float(np.mean(first_P)), float(np.mean(second_P)), floor, of_reward)
