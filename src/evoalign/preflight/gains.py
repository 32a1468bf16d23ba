# SPDX-License-Identifier: Apache-2.0
"""What a width of the noise is worth to the mean, how sure that is, and how much of it chance alone would show.

An advantage is half the difference of a pair (against the population's mean where there are no pairs). The worth of a
width is the mean product of a pair's advantage there and its advantage at the next smaller width: chance gives two
widths nothing in common. Asked on six prompts or more, a product takes the two from *different* prompts, since any
reward, a hash of the text too, earns the same twice where the same prompt is answered with the same text: what counts
is that a direction that pays on some prompts pays on others. On fewer prompts nothing can be said of others, and the
worth is that on these.

Two tests by signs ask whether chance explains it, and a width has to pass both:

- over pairs: had the reward nothing to do with the noise, each product could as well have the other sign;
- over prompts: had what a direction earns on one prompt nothing to do with another, all that one prompt earned could as
  well have the other sign.

Each is of all widths at once: the largest of their standardised sums under random signs is what one of them has to
beat (the single-step max-T of Westfall and Young, Resampling-Based Multiple Testing, 1993). A t test would not do: of
a reward that is exactly linear in the noise the products are chi-squared, and 16 pairs of them have a t of 2.8.
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
"""Of each of two tests, over pairs and over prompts, both of which a width has to pass: how often a ladder of widths
that are all worth nothing has one that passes the one. That one passes both is rarer: 2 of 100 ladders of a hash of the
text did (benchmarks/probe_chance.py), and at 0.05 one, where two of 20 that could be learned were missed."""
ONE_TEST_LEVEL = 0.05
"""Of the test over pairs where there are too few prompts for the other one."""
FEW_PROMPTS = 6
"""Signs over fewer have hardly a value as rare as `LEVEL`: of five prompts, one of 16 is the rarest."""
DRAWS = 9_999


@dataclass(frozen=True, slots=True)
class Worth:
    """The mean product of a width's advantages and those of the next smaller width, in rewards squared.

    `error` is its standard error over pairs and, from `FEW_PROMPTS` on, over prompts as well. `chance` is the p-value
    against chance, corrected for the number of widths; `least` the smallest worth that would have passed (`level_of`).
    """

    value: float
    error: float
    chance: float
    least: float


def level_of(prompts: int) -> float:
    """The p-value up to which a width of a probe on so many prompts passes."""
    return LEVEL if prompts >= FEW_PROMPTS else ONE_TEST_LEVEL


def advantages(scores_MP: Scores, *, paired: bool) -> Scores:
    """Of each pair (each member where there are none) on each prompt."""
    return (scores_MP[0::2] - scores_MP[1::2]) / 2 if paired else scores_MP - scores_MP.mean(axis=0)


def worths(advantages_WKP: Sequence[Scores]) -> list[Worth]:
    """Of each width but the first, which has none below it; widths ascend, and their pairs share their noise."""
    both = [(far, near) for near, far in pairwise(advantages_WKP)]
    if not both:
        return []
    prompts = advantages_WKP[0].shape[1]
    crossed, level = prompts >= FEW_PROMPTS, level_of(prompts)
    products_WK = [_crossed(far, near) if crossed else _plain(far, near) for far, near in both]
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
    """How many standard errors to both sides hold `widths` figures at once, with probability `level` or more.

    Bonferroni's inequality, with the t distribution of a mean of `pairs`.
    """
    from scipy.stats import t

    return float(t.ppf(1 - (1 - level) / 2 / max(1, widths), max(1, pairs - 1)))


def rise(scores_MP: Scores, start_P: Scores, *, paired: bool) -> tuple[float, float]:
    """How far the population's mean lies above the unperturbed model's, and its standard error over pairs.

    What is linear in the noise cancels within a pair: what is left is curvature, or members that break.
    """
    above_M = (scores_MP - start_P).mean(axis=1)
    above_K = (above_M[0::2] + above_M[1::2]) / 2 if paired else above_M
    return float(above_K.mean()), float(above_K.std(ddof=1)) / math.sqrt(len(above_K))


def both_rise(scores_MP: Scores, start_P: Scores) -> float:
    """By how many standard errors over pairs the lower one of a pair lies above the unperturbed model.

    Where that model earns the lowest there is, members cannot fall: what is linear in the noise then lifts one of each
    pair, and what lifts both wins whichever way it goes. 0 where no lower one is above it; infinite without spread.
    """
    above_M = (scores_MP - start_P).mean(axis=1)
    lower_K = np.minimum(above_M[0::2], above_M[1::2])
    mean, error = float(lower_K.mean()), float(lower_K.std(ddof=1)) / math.sqrt(len(lower_K))
    return 0.0 if mean <= 0 else math.inf if error == 0 else mean / error


@dataclass(frozen=True, slots=True)
class _Test:
    """Standardised sums of all widths, the share of draws whose largest is as large, and what `level` of them reach."""

    z_W: Scores
    chance_W: Scores
    critical: float


def _plain(far_KP: Scores, near_KP: Scores) -> Scores:
    return far_KP.mean(axis=1) * near_KP.mean(axis=1)


def _crossed(far_KP: Scores, near_KP: Scores) -> Scores:
    """The mean product over ordered pairs of different prompts."""
    prompts = far_KP.shape[1]
    same_K = (far_KP * near_KP).sum(axis=1)
    return (far_KP.sum(axis=1) * near_KP.sum(axis=1) - same_K) / (prompts * (prompts - 1))


def _jackknife(far_KP: Scores, near_KP: Scores) -> float:
    """The variance of a crossed worth over prompts: each is left out in turn."""
    prompts = far_KP.shape[1]
    far_K, near_K = far_KP.sum(axis=1), near_KP.sum(axis=1)
    same_KP = far_KP * near_KP
    without_KP = (far_K[:, None] - far_KP) * (near_K[:, None] - near_KP) - (same_KP.sum(axis=1)[:, None] - same_KP)
    without_P = without_KP.mean(axis=0) / ((prompts - 1) * (prompts - 2))
    return float(((without_P - without_P.mean()) ** 2).sum()) * (prompts - 1) / prompts


def _over_pairs(products_WK: Sequence[Scores], level: float) -> _Test:
    """Each product of each width with a sign of its own."""
    rng = _draws(0)
    sizes_W = np.array([math.sqrt(float((x**2).sum())) for x in products_WK])
    sums_W = np.array([float(x.sum()) for x in products_WK])
    drawn_WD = np.array([_signs(rng, len(x)) @ x for x in products_WK])
    return _standardised(sums_W, drawn_WD, sizes_W, level)


def _over_prompts(both: Sequence[tuple[Scores, Scores]], level: float) -> _Test:
    """One sign for all that a prompt earned, the same at all widths: sum over p < q of s_p s_q (M_pq + M_qp)."""
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
    """`sizes_W` are the standard deviations of the sums under random signs, which signs do not change."""
    some_W = np.where(sizes_W > 0, sizes_W, 1.0)
    z_W = sums_W / some_W
    largest_D = (drawn_WD / some_W[:, None]).max(axis=0)
    # The draw in which nothing changes its sign is one of those that chance has. Its own sum is of the same terms in
    # another order, and may be a rounding away.
    chance_W = (1 + (largest_D[None, :] >= z_W[:, None] - 1e-9).sum(axis=1)) / (DRAWS + 1)
    return _Test(z_W, np.where(sums_W > 0, chance_W, 1.0), float(np.quantile(largest_D, 1 - level)))


def _draws(stream: int) -> np.random.Generator:
    """The same draws in each probe: an answer is a function of the scores alone."""
    return np.random.Generator(np.random.Philox(key=[0, stream]))


def _signs(rng: np.random.Generator, count: int) -> Scores:
    return rng.integers(0, 2, size=(DRAWS, count)).astype(np.float64) * 2 - 1
