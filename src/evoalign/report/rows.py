# SPDX-License-Identifier: Apache-2.0
"""One generation as one row of metrics.jsonl: what the figures read and the terminal shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign.rundir.journal import Recorded
from evoalign.types import Generation, Update

Row = dict[str, Any]
WEIGHTS = "reward_weights"
"""The field of the weights of several rewards, in a row and in results/evaluation.json."""
LATER = ("budget", "divergence")
"""What rows of the first release do not have; such a row is whole without."""


def metrics_row(generation: Generation, weights: Mapping[str, float] | None = None) -> Row:
    """Statistics of the raw fitness over the population, in float64, with rms(c), tokens and seconds by phase.

    `weights` are those of several rewards.
    """
    return {
        **_fitness(generation.update, generation.fitness_M),
        "tokens": generation.tokens,
        "seconds": {phase: float(seconds) for phase, seconds in generation.seconds.items()},
        "empty_share": float(generation.empty_share),
        "truncated_share": float(generation.truncated_share),
        "evaluation": None if generation.evaluation is None else dict(generation.evaluation),
        **_where_any(rewards=generation.rewards, **{WEIGHTS: weights or {}}, objective=generation.objective),
    }


def rebuilt_row(recorded: Recorded) -> Row:
    """A row made from the journal alone: what texts and clocks would say is null. Means of rewards are not in it."""
    unknown = dict.fromkeys(("tokens", "empty_share", "truncated_share", "evaluation", "diagnosis", *LATER))
    known = {**_fitness(recorded.update, recorded.fitness_M), **_where_any(objective=recorded.objective)}
    return {**known, **unknown, "seconds": {}}


def is_whole(row: Row, again: Row) -> bool:
    """Whether a row is the one of the journal's generation, all of it: `again` is what the journal makes of it."""
    return row.keys() >= again.keys() - set(LATER) and row["mean"] == again["mean"]


def spread(values: Sequence[float] | NDArray[np.float64]) -> Row:
    """Mean, ends, the 20th and 80th percentile and the standard deviation, in float64."""
    found = np.asarray(values, dtype=np.float64)
    p20, p80 = np.percentile(found, [20, 80])
    return {
        "mean": float(found.mean()),
        "best": float(found.max()),
        "worst": float(found.min()),
        "p20": float(p20),
        "p80": float(p80),
        "std": float(found.std()),
    }


def _where_any(**found: Mapping[str, float | None]) -> Row:
    """A field for each mapping that holds anything: rows of one reward and no state are as they always were."""
    return {name: dict(values) for name, values in found.items() if values}


def _fitness(update: Update, fitness: Sequence[float]) -> Row:
    coefficients_M = np.asarray(update.coefficients, dtype=np.float64)
    return {
        "generation": update.generation,
        **spread(fitness),
        "zero_variance": not any(update.coefficients),
        "rms_c": float(np.sqrt(np.mean(coefficients_M**2))),
    }
