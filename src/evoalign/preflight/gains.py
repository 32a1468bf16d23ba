# SPDX-License-Identifier: Apache-2.0
"""Estimates what a width of the noise is worth to the mean, and tests whether directions help on several prompts.

An advantage is half the difference of a pair, or the difference to the population's mean without pairs. The worth of a
width is the mean product of a pair's advantage and its advantage at the next smaller width: without an effect the two
are independent. With two prompts or more, the two advantages are taken from *different* prompts. On the same prompt
even a hash of the text earns the same twice if the text is the same; what counts is that a direction that helps on some
prompts helps on others. With one prompt the worth is that on this prompt.

One test is made for neighbouring widths together (`direction`): their advantages have the same noise, and are added. If
what a pair earns on one prompt says nothing about others, each advantage could as well have the other sign. The sum of
all products of different prompts is compared with that under random signs, independent for each pair and prompt. A t
test is not valid: for a reward that is exactly linear in the noise the products are chi-squared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evoalign.shaping import Scores

LEVEL = 0.01
"""p-value up to which a width is recommended."""
OFFERED = 0.025
"""p-value up to which a trial is offered. Chance alone leads to one of the two in 2.5 of 100 probes."""
FEW_PROMPTS = 6
"""With fewer prompts a warning says that gains may not generalise."""
DRAWS = 9_999


@dataclass(frozen=True, slots=True)
class Worth:
    """The mean product of a width's advantages and those of the next smaller width, in squared rewards.

    `error` is its standard error over pairs and, from three prompts on, over prompts as well.
    """

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Direction:
    """Test for a direction that helps on several prompts: the standardised sum and its p-value."""

    z: float
    chance: float


def advantages(scores_MP: Scores, *, paired: bool) -> Scores:
    """Return the advantage of each pair, or of each member without pairs, on each prompt."""
    return (scores_MP[0::2] - scores_MP[1::2]) / 2 if paired else scores_MP - scores_MP.mean(axis=0)


def worths(advantages_WKP: Sequence[Scores]) -> list[Worth]:
    """Return the worth of each width but the first. Widths ascend, and their pairs share their noise."""
    found: list[Worth] = []
    for near_KP, far_KP in pairwise(advantages_WKP):
        pairs, prompts = far_KP.shape
        products_K = _crossed(far_KP, near_KP) if prompts > 1 else (far_KP * near_KP)[:, 0]
        variance = float(products_K.var(ddof=1)) / pairs + (_jackknife(far_KP, near_KP) if prompts > 2 else 0.0)
        found.append(Worth(float(products_K.mean()), math.sqrt(variance)))
    return found


def direction(advantages_WKP: Sequence[Scores]) -> Direction:
    """Test neighbouring widths, whose pairs share their noise, for an effect that prompts have in common.

    With one prompt, the widths take the place of prompts.
    """
    # over their root mean square, so that widths count alike
    units = [one_KP / (math.sqrt(float((one_KP**2).mean())) or 1.0) for one_KP in advantages_WKP]
    if not units:
        return Direction(0.0, 1.0)
    table_KP = sum(units[1:], units[0]) if units[0].shape[1] > 1 else np.concatenate(units, axis=1)
    table_KP = _weighted(table_KP)
    sum_of_squares = float((table_KP**2).sum())
    total = float((table_KP.sum(axis=1) ** 2).sum()) - sum_of_squares
    squares_K = (table_KP**2).sum(axis=1)
    size = math.sqrt(max(0.0, 2 * float((squares_K**2).sum() - (table_KP**4).sum())))
    if size <= 1e-12 * sum_of_squares or table_KP.shape[1] < 2:
        return Direction(0.0, 1.0)
    rng, drawn_D = np.random.Generator(np.random.Philox(key=[0, 0])), np.full(DRAWS, -sum_of_squares)
    for row_P in table_KP:  # one pair after the other: all signs at once would take a gigabyte
        drawn_D += ((rng.integers(0, 2, size=(DRAWS, len(row_P))) * 2.0 - 1) @ row_P) ** 2
    # The identity counts as one draw. Its sum adds the same terms in another order, and may differ by rounding.
    chance = (1 + int((drawn_D >= total - 1e-9 * size).sum())) / (DRAWS + 1)
    return Direction(total / size, chance if total > 0 else 1.0)


def quantile(level: float, widths: int, pairs: int) -> float:
    """Return the half-width, in standard errors, of intervals that hold `widths` values at once (Bonferroni).

    Uses the t distribution of a mean of `pairs`.
    """
    from scipy.stats import t

    return float(t.ppf(1 - (1 - level) / 2 / max(1, widths), max(1, pairs - 1)))


def rise(scores_MP: Scores, start_P: Scores, *, paired: bool) -> tuple[float, float]:
    """Return how far the population's mean is above the unperturbed model's, and its standard error over pairs.

    Linear effects cancel within a pair; curvature and broken members remain.
    """
    above_M = (scores_MP - start_P).mean(axis=1)
    above_K = (above_M[0::2] + above_M[1::2]) / 2 if paired else above_M
    return float(above_K.mean()), float(above_K.std(ddof=1)) / math.sqrt(len(above_K))


def both_rise(scores_MP: Scores, start_P: Scores) -> float:
    """Return how many standard errors the lower member of a pair is above the unperturbed model, at least 0.

    If that model earns the lowest reward, members cannot fall: a linear effect then lifts one member of each pair, and
    what lifts both wins in any direction. Infinite without spread.
    """
    above_M = (scores_MP - start_P).mean(axis=1)
    lower_K = np.minimum(above_M[0::2], above_M[1::2])
    mean, error = float(lower_K.mean()), float(lower_K.std(ddof=1)) / math.sqrt(len(lower_K))
    return 0.0 if mean <= 0 else math.inf if error == 0 else mean / error


def _weighted(table_KP: Scores) -> Scores:
    """Return advantages with noisier prompts counting less; half the mean variance is added to each prompt's.

    Signs do not change the weights, so the test stays valid.
    """
    variance_P = (table_KP**2).mean(axis=0)
    most = float(variance_P.mean())
    return table_KP / np.sqrt(variance_P / most + 0.5) if most > 0 else table_KP


def _crossed(far_KP: Scores, near_KP: Scores) -> Scores:
    """Return the mean product over ordered pairs of different prompts."""
    prompts = far_KP.shape[1]
    same_K = (far_KP * near_KP).sum(axis=1)
    return (far_KP.sum(axis=1) * near_KP.sum(axis=1) - same_K) / (prompts * (prompts - 1))


def _jackknife(far_KP: Scores, near_KP: Scores) -> float:
    """Return the jackknife variance of a crossed worth over prompts."""
    prompts = far_KP.shape[1]
    far_K, near_K = far_KP.sum(axis=1), near_KP.sum(axis=1)
    same_KP = far_KP * near_KP
    without_KP = (far_K[:, None] - far_KP) * (near_K[:, None] - near_KP) - (same_KP.sum(axis=1)[:, None] - same_KP)
    without_P = without_KP.mean(axis=0) / ((prompts - 1) * (prompts - 2))
    return float(((without_P - without_P.mean()) ** 2).sum()) * (prompts - 1) / prompts
