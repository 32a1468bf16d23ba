# SPDX-License-Identifier: Apache-2.0
"""One generation as one row of metrics.jsonl: what the figures read and the terminal shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from evoalign.types import Generation

Row = dict[str, Any]


def metrics_row(generation: Generation) -> Row:
    """Statistics of the raw fitness over the population, in float64, with rms(c), tokens and seconds by phase."""
    fitness_M = np.asarray(generation.fitness_M, dtype=np.float64)
    coefficients_M = np.asarray(generation.update.coefficients, dtype=np.float64)
    p20, p80 = np.percentile(fitness_M, [20, 80])
    return {
        "generation": generation.index,
        "mean": float(fitness_M.mean()),
        "best": float(fitness_M.max()),
        "worst": float(fitness_M.min()),
        "p20": float(p20),
        "p80": float(p80),
        "std": float(fitness_M.std()),
        "zero_variance": generation.zero_variance,
        "rms_c": float(np.sqrt(np.mean(coefficients_M**2))),
        "tokens": generation.tokens,
        "seconds": {phase: float(seconds) for phase, seconds in generation.seconds.items()},
        "empty_share": float(generation.empty_share),
        "truncated_share": float(generation.truncated_share),
        "evaluation": None if generation.evaluation is None else dict(generation.evaluation),
    }
