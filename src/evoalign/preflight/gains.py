# SPDX-License-Identifier: Apache-2.0
"""Estimates what a width of the noise is worth to the mean, and tests whether that is more than chance.

An advantage is half the difference of a pair, or the difference to the population's mean without pairs. The worth of a
width is the mean product of a pair's advantage and its advantage at the next smaller width: without an effect the two
are independent. With six prompts or more, the two advantages are taken from *different* prompts. On the same prompt
even a hash of the text earns the same twice if the text is the same; what counts is that a direction that helps on some
prompts helps on others. With fewer prompts the worth is that on these prompts.

Two sign tests are made, and a width has to pass both:

- over pairs: if the reward were independent of the noise, each product could as well have the other sign;
- over prompts: if a direction's reward on one prompt were independent of that on others, all rewards of one prompt
  could as well have the other sign.

Both tests cover all widths at once: a width has to exceed the largest standardised sum of all widths under random signs
(single-step max-T of Westfall and Young, Resampling-Based Multiple Testing, 1993). A t test is not valid: for a reward
that is exactly linear in the noise the products are chi-squared, and 16 pairs of them have a t of 2.8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evoalign.shaping import Scores

LEVEL = 0.1
"""Significance level of each of the two tests. Passing both by chance is rarer: of 100 ladders with a hash of the text
as reward, 2 did (studies/probe_chance.py). At 0.05 one did, and 2 of 20 learnable rewards were missed."""
ONE_TEST_LEVEL = 0.05
"""Level of the test over pairs with too few prompts for the other test."""
FEW_PROMPTS = 6
"""With fewer prompts the test over prompts cannot reach `LEVEL`: five prompts have 16 different signs."""
DRAWS = 9_999


@dataclass(frozen=True, slots=True)
class Worth:
    """The mean product of a width's advantages and those of the next smaller width, in squared rewards.

    `error` is its standard error over pairs and, from `FEW_PROMPTS` prompts on, over prompts as well. `chance` is the
    p-value, corrected for the number of widths; `least` the smallest worth that would have been significant.
    """

    value: float
    error: float
    chance: float
    least: float


def level_of(prompts: int) -> float:
    """Return the significance level for this number of prompts."""
    return LEVEL if prompts >= FEW_PROMPTS else ONE_TEST_LEVEL


def advantages(scores_MP: Scores, *, paired: bool) -> Scores:
    """Return the advantage of each pair, or of each member without pairs, on each prompt."""
    return (scores_MP[0::2] - scores_MP[1::2]) / 2 if paired else scores_MP - scores_MP.mean(axis=0)


def worths(advantages_WKP: Sequence[Scores]) -> list[Worth]:
    """Return the worth of each width but the first. Widths ascend, and their pairs share their noise."""
    both = [(far, near) for near, far in pairwise(advantages_WKP)]
    if not both:
        return []
    prompts = advantages_WKP[0].shape[1]
    crossed, level = prompts >= FEW_PROMPTS, level_of(prompts)
    products_WK = [_crossed(far, near) if crossed else far.mean(axis=1) * near.mean(axis=1) for far, near in both]
    tests = [_over_pairs(products_WK, level)]
    if crossed:
        tests.append(_over_prompts(both, level))
    found: list[Worth] = []
    for w, products_K in enumerate(products_WK):
        value = float(products_K.mean())
        variance = float(products_K.var(ddof=1)) / len(products_K)
        variance += _jackknife(*both[w]) if crossed else 0.0
        least = max(abs(value) * test.critical / abs(float(test.z_W[w])) if test.z_W[w] else 0.0 for test in tests)
        found.append(Worth(value, math.sqrt(variance), max(float(test.chance_W[w]) for test in tests), least))
    return found


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


@dataclass(frozen=True, slots=True)
class _Test:
    """Standardised sums of all widths, their p-values, and the critical value at `level`."""

    z_W: Scores
    chance_W: Scores
    critical: float


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


def _over_pairs(products_WK: Sequence[Scores], level: float) -> _Test:
    """Test with an independent sign for each product."""
    rng = _draws(0)
    sizes_W = np.array([math.sqrt(float((x**2).sum())) for x in products_WK])
    sums_W = np.array([float(x.sum()) for x in products_WK])
    drawn_WD = np.array([_signs(rng, len(x)) @ x for x in products_WK])
    return _standardised(sums_W, drawn_WD, sizes_W, level)


def _over_prompts(both: Sequence[tuple[Scores, Scores]], level: float) -> _Test:
    """Test with one sign per prompt, the same at all widths: sum over p < q of s_p s_q (M_pq + M_qp)."""
    signs_DP = _signs(_draws(1), both[0][0].shape[1])
    sums: list[float] = []
    sizes: list[float] = []
    drawn: list[NDArray[np.float64]] = []
    for far_KP, near_KP in both:
        products_PP = far_KP.T @ near_KP
        products_PP = (products_PP + products_PP.T) / 2
        np.fill_diagonal(products_PP, 0.0)
        sums.append(float(products_PP.sum()))
        sizes.append(math.sqrt(2 * float((products_PP**2).sum())))
        drawn.append(((signs_DP @ products_PP) * signs_DP).sum(axis=1))
    return _standardised(np.array(sums), np.array(drawn), np.array(sizes), level)


def _standardised(sums_W: Scores, drawn_WD: Scores, sizes_W: Scores, level: float) -> _Test:
    """Standardise by `sizes_W`, the standard deviations of the sums under random signs."""
    some_W = np.where(sizes_W > 0, sizes_W, 1.0)
    z_W = sums_W / some_W
    largest_D = (drawn_WD / some_W[:, None]).max(axis=0)
    # The identity counts as one draw. Its sum adds the same terms in another order, and may differ by rounding.
    chance_W = (1 + (largest_D[None, :] >= z_W[:, None] - 1e-9).sum(axis=1)) / (DRAWS + 1)
    return _Test(z_W, np.where(sums_W > 0, chance_W, 1.0), float(np.quantile(largest_D, 1 - level)))


def _draws(stream: int) -> np.random.Generator:
    """Return the same draws in each probe, so that results depend on the scores alone."""
    return np.random.Generator(np.random.Philox(key=[0, stream]))


def _signs(rng: np.random.Generator, count: int) -> Scores:
    return rng.integers(0, 2, size=(DRAWS, count)).astype(np.float64) * 2 - 1
