# SPDX-License-Identifier: Apache-2.0
"""Map scores to coefficients: pure functions of float64 [members, prompts] arrays, one coefficient per member.

Equal scores give exactly zero for all members (in float32, equal scores have given a z-score of 0.86), so a generation
whose members score the same moves nothing. A non-finite score raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from evoalign.config import ScheduleConfig
from evoalign.errors import ConfigError, RewardError
from evoalign.plugins import FAILURES, load_object, raised

Scores = NDArray[np.float64]
EPS = 1e-8
"""Added to a standard deviation, as in the published code."""
LARGEST_SCORE = 1e100
"""Limit on scores: squares of larger ones overflow float64."""


def fitness(scores_MP: Scores) -> Scores:
    """Return the mean over prompts, exactly rounded, so that the same scores in another order tie exactly."""
    return np.array([math.fsum(row) / len(row) for row in scores_MP])


def zscore(scores_MP: Scores) -> Scores:
    """Return (f - mean) / (std + 1e-8), ddof 0, of the fitness f, the mean over prompts (arXiv 2509.24372, alg. 1)."""
    fitness_M = fitness(scores_MP)
    return (fitness_M - fitness_M.mean()) / (fitness_M.std() + EPS)


def centered(scores_MP: Scores) -> Scores:
    """Subtract the other members' mean per prompt (leave-one-out), divide by one std, and average over prompts.

    EGGROLL's shaping (arXiv 2511.16652, section 6) with the leave-one-out baseline of arXiv 2609.10980. On pure noise
    it is smaller than a z-score by about 1 / sqrt(prompts), so steps shrink when scores do not separate the members.
    """
    members = len(scores_MP)
    advantage_MP = (scores_MP - scores_MP.mean(axis=0)) * (members / (members - 1))
    return (advantage_MP / (advantage_MP.std() + EPS)).mean(axis=1)


def ranks(scores_MP: Scores) -> Scores:
    """Return centred ranks of the fitness in [-1/2, 1/2], ties averaged (Salimans et al., arXiv 1703.03864)."""
    from scipy.stats import rankdata  # takes a second to import

    fitness_M = fitness(scores_MP)
    return (rankdata(fitness_M, method="average") - 1) / (len(fitness_M) - 1) - 0.5


def identity(scores_MP: Scores) -> Scores:
    """Return the fitness itself, not centred: for rewards that are already advantages."""
    return fitness(scores_MP)


TRUNCATION = 4
"""`truncation` selects one in this many members. The best share for the sphere model is 0.27 (Beyer 2001, The Theory of
Evolution Strategies)."""


def truncation(scores_MP: Scores) -> Scores:
    """Return N / mu for the best mu = N / 4 members by fitness, rounded down but at least 1, and 0 for the others.

    The selection of the (mu/mu, lambda)-ES with equal weights (Beyer and Schwefel 2002, Natural Computing 1): with eta
    1 the mean moves to the average of the selected members. As there, the coefficients are not centred. Members that
    tie at the last place share what is left, so that the order of members does not matter.
    """
    fitness_M = fitness(scores_MP)
    members, ascending_M = len(fitness_M), np.sort(fitness_M)
    selected = max(1, members // TRUNCATION)
    below_M, up_to_M = (np.searchsorted(ascending_M, fitness_M, side=side) for side in ("left", "right"))
    places_M = selected - (members - up_to_M)  # left for a member and those that tie with it
    return np.clip(places_M / (up_to_M - below_M), 0.0, 1.0) * (members / selected)


SHAPINGS: dict[str, Callable[[Scores], Scores]] = {
    f.__name__: f for f in (zscore, centered, ranks, truncation, identity)
}
BY_PROMPT = frozenset({"centered"})
"""Shapings that need the scores per prompt, which a journal does not have. The others depend on the fitness alone."""


def scale(name: str, members: int, *, paired: bool = False) -> float | None:
    """Return the root mean square of a shaping's coefficients of `members` different scores; in pairs, their standard
    deviation, as what both members have in common moves nothing.

    None if it depends on the scores: `centered` is smaller than 1, `identity` and custom ones are of any size.
    """
    if name == "ranks":
        return math.sqrt((members + 1) / (12 * (members - 1)))
    if name == "truncation":
        return math.sqrt(members / max(1, members // TRUNCATION) - paired)
    return 1.0 if name == "zscore" else None


def measured_scale(scores_MP: Scores, name: str, prompts: int, *, paired: bool) -> tuple[float, float]:
    """Return the root mean square and the standard deviation of the coefficients of `prompts` prompts at a time.

    In pairs, what both members have in common moves nothing, so that both are the standard deviation.
    """
    count = max(1, scores_MP.shape[1] // prompts)
    found_CM = np.array([shape(part_MP, name) for part_MP in np.array_split(scores_MP, count, axis=1)])
    spread = math.sqrt(float(found_CM.var(axis=1).mean()))
    return (spread if paired else math.sqrt(float((found_CM**2).mean()))), spread


def load(name: str) -> Callable[[Scores], Scores]:
    """Return a built-in shaping, or the function that an import path names. Raises ConfigError."""
    found: Any = SHAPINGS[name] if name in SHAPINGS else load_object(name, "es.shaping")
    if not callable(found):
        short = name.rpartition(":")[2]
        raise ConfigError(f"es.shaping: {name} is not a function; write def {short}(scores_MP) -> coefficients_M")
    return cast("Callable[[Scores], Scores]", found)


def shape(scores_MP: Scores, shaping: str) -> Scores:
    """Return coefficients [members] of scores [members, prompts].

    Raises RewardError on a non-finite or huge score, and if a custom shaping fails or returns no finite coefficients.
    """
    usable = np.abs(scores_MP) <= LARGEST_SCORE  # False for NaN
    if not usable.all():
        member, prompt = np.argwhere(~usable)[0]
        raise RewardError(f"score of member {member}, prompt {prompt} is {scores_MP[member, prompt]}; fix the reward")
    fitness_M = fitness(scores_MP)
    if fitness_M.max() == fitness_M.min():
        return np.zeros(len(scores_MP))
    function = load(shaping)
    if shaping in SHAPINGS:
        return function(scores_MP)
    try:
        coefficients_M = np.array(function(scores_MP.copy()), dtype=np.float64)
    except FAILURES as error:
        raise RewardError(f"es.shaping {shaping} failed: {raised(error)}; fix it") from error
    if coefficients_M.shape != (len(scores_MP),) or not np.isfinite(coefficients_M).all():
        raise RewardError(
            f"es.shaping {shaping} returned coefficients of shape {list(coefficients_M.shape)}, of which "
            f"{int((~np.isfinite(coefficients_M)).sum())} are not finite; return one finite number for each of "
            f"{len(scores_MP)} members"
        )
    return coefficients_M


def schedule(config: ScheduleConfig, generation: int, total: int, plateaus: int = 0) -> float:
    """Return the factor of a generation: 1 at the first, `floor` at the last (constant: always 1).

    The schedule `plateau` depends only on `plateaus`, the number of plateaus so far.
    """
    if config.name == "plateau":
        return max(config.floor, config.factor**plateaus)
    if config.name == "constant" or total < 2:
        return 1.0
    progress = generation / (total - 1)
    fall = progress if config.name == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1.0 + (config.floor - 1.0) * fall
