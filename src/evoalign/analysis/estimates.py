# SPDX-License-Identifier: Apache-2.0
"""Estimates as an analysis writes them down and says them."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.statistics import Estimate


def tree(found: Estimate) -> dict[str, Any]:
    """As plain data, which JSON has: a mean that is no number is None."""
    return {**asdict(found), "mean": found.mean if math.isfinite(found.mean) else None}


def told(found: Estimate, form: str = ".3g") -> str:
    """The mean with its interval, or without and why."""
    if found.low is None or found.high is None:
        return f"{found.mean:{form}} ({found.why})"
    return f"{found.mean:{form}} (95 %: {found.low:{form}} to {found.high:{form}})"


def bounded(found: Estimate, low: float = 0.0, high: float = 1.0) -> Estimate:
    """Its interval within what can be: of a share 0 to 1, of a divergence 0 to infinity."""
    if found.low is None or found.high is None:
        return found
    return replace(found, low=max(low, found.low), high=min(high, found.high))


def share(marked_E: NDArray[np.float64]) -> Estimate:
    """The mean of shares of each example, [E]; it has an interval where no example, or every one, is marked too."""
    return bounded(statistics.paired(np.zeros(len(marked_E)), marked_E, shares=True))


def between(values: NDArray[np.float64], low: float, high: float) -> Estimate:
    """The mean of [N] values that can be from low to high: Student's t of these and of one more at either end.

    As one success and one failure are added to a share (Agresti and Coull 1998): where all values are at one end, or
    nearly, their own spread says nothing of how far away the next may be.
    """
    if len(values) < statistics.FEWEST:
        return statistics.mean(values)
    found = statistics.mean(np.append(values, [low, high]))
    return bounded(replace(found, mean=float(values.mean()), n=len(values)), low, high)
