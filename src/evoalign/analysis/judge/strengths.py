# SPDX-License-Identifier: Apache-2.0
"""Ratings by maximum likelihood on the Elo scale, 400 log10 pi, with intervals from a bootstrap over questions.

A question's judgments, of all pairs and both orders, are drawn together. Ends are percentiles at the levels that
Student's t and n - 1 in place of n ask for (the expanded percentile interval: Hesterberg 2015, The American
Statistician 69, section 4), since plain percentiles are too narrow for few questions. They are of differences to the
model that the scale is fixed at, whose own rating is what it is by choice. A draw without a finite estimate counts as
what it is, without end, so that an end may be missing: then `why` says so.

Array suffixes as in `davidson`, and Q questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from evoalign.analysis.judge.davidson import LEAST, Floats, fit, limits
from evoalign.analysis.judge.judgments import Judgment
from evoalign.errors import ConfigError
from evoalign.statistics import FEWEST, t_of

SCALE, BASE = 400.0, 1000.0
"""Points of a tenfold pi, and the rating of the model that the scale is fixed at."""
ABOVE, BELOW, OPEN = "without end above", "without end below", "not to be told"
"""Why a rating is not finite: it rises or falls without end, or the judgments do not say how it lies."""


@dataclass(frozen=True, slots=True)
class Rated:
    """A number on the Elo scale and its 95 % interval; None where it, or an end, is not finite, and `why`."""

    rating: float | None
    low: float | None = None
    high: float | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Strengths:
    """What judgments in one dimension say of the models.

    `reference` is the model that the scale is fixed at, `ratings` are by model, `differences` by pair of models (the
    first above the second). `nu` is Davidson's, of ties.
    """

    reference: str
    ratings: dict[str, Rated]
    differences: dict[tuple[str, str], Rated]
    nu: float


def counts_of(judgments: Sequence[Judgment], models: Sequence[str], *, unparsed_ties: bool = False) -> Floats:
    """How often each pair came out how, [Q, P, 3]; judgments without scores are left out, or ties if that is asked."""
    place = {pair: p for p, pair in enumerate(combinations(models, 2))}
    questions = {name: q for q, name in enumerate(dict.fromkeys(one.question for one in judgments))}
    counts_QP3 = np.zeros((len(questions), len(place), 3))
    for one in judgments:
        outcome = 0.5 if one.outcome is None and unparsed_ties else one.outcome
        if outcome is None:
            continue
        pair = (one.model_a, one.model_b)
        if pair not in place:
            pair, outcome = (one.model_b, one.model_a), 1.0 - outcome
        counts_QP3[questions[one.question], place[pair], {1.0: 0, 0.0: 1, 0.5: 2}[outcome]] += 1
    return counts_QP3[counts_QP3.any((1, 2))]


def strengths(
    counts_QP3: Floats, models: Sequence[str], *, anchor: str | None, prior: float, draws: int, seed: int
) -> Strengths:
    """Ratings of the models from counts [Q, P, 3]. Raises ConfigError for an anchor that is none of the models.

    `prior` is how many judgments more each two models are given, half of them won by either: with any, all estimates
    are finite. Without an `anchor` the weakest model is the reference, of those that most others can be held against.
    """
    more_3 = np.array([prior / 2, prior / 2, 0.0])
    whole_P3 = counts_QP3.sum(0) + more_3
    limits_MM = limits(whole_P3 > 0, len(models))
    theta_M, nu = _fitted(whole_P3[None], limits_MM[None])
    reference = _reference(theta_M[0], limits_MM, models, anchor)
    totals_BP3 = _drawn(counts_QP3, draws, seed) + more_3
    seen_BP3, which_B = np.unique(totals_BP3 > 0, axis=0, return_inverse=True)
    limits_BMM = np.stack([limits(seen_P3, len(models)) for seen_P3 in seen_BP3])[which_B.reshape(-1)]
    theta_BM, _ = _fitted(totals_BP3, limits_BMM)
    questions = len(counts_QP3)

    def between(i: int, j: int, start: float) -> Rated:
        drawn = [start + theta_BM[:, i] - theta_BM[:, j], limits_BMM[:, i, j]]
        return _rated(float(start + theta_M[0, i] - theta_M[0, j]), float(limits_MM[i, j]), drawn, questions)

    ratings = {name: between(i, reference, BASE) for i, name in enumerate(models)}
    ratings[models[reference]] = Rated(BASE, why="the scale is fixed here")
    pairs = {(models[i], models[j]): between(i, j, 0.0) for i, j in combinations(range(len(models)), 2)}
    return Strengths(models[reference], ratings, pairs, float(nu[0]))


def _fitted(counts_BP3: Floats, limits_BMM: Floats) -> tuple[Floats, Floats]:
    """In points. Where some estimate is not finite, those that are get the limits that they tend to."""
    odd_B = (limits_BMM != 0).any((1, 2))
    theta_BM, nu_B = fit(counts_BP3 + LEAST * odd_B[:, None, None] * np.array([0.5, 0.5, 0.0]), limits_BMM.shape[1])
    return theta_BM * SCALE / np.log(10), nu_B


def _reference(theta_M: Floats, limits_MM: Floats, models: Sequence[str], anchor: str | None) -> int:
    if anchor is not None:
        if anchor not in models:
            raise ConfigError(f"--anchor {anchor}: no judgment names it; use one of {', '.join(models)}")
        return models.index(anchor)
    beside_M = (limits_MM == 0).sum(1)
    return min(np.flatnonzero(beside_M == beside_M.max()).tolist(), key=lambda i: theta_M[i])


def _drawn(counts_QP3: Floats, draws: int, seed: int) -> Floats:
    """Sums over as many questions as there are, drawn with replacement, [B, P, 3]."""
    random, questions = np.random.default_rng(seed), len(counts_QP3)
    flat_QK = counts_QP3.reshape(questions, -1)
    often = (np.bincount(random.integers(questions, size=questions), minlength=questions) for _ in range(draws))
    return np.stack([times_Q @ flat_QK for times_Q in often]).reshape(draws, *counts_QP3.shape[1:])


def _rated(rating: float, limit: float, drawn: Sequence[Floats], questions: int) -> Rated:
    if limit != 0:
        return Rated(None, why=OPEN if np.isnan(limit) else ABOVE if limit > 0 else BELOW)
    if questions < FEWEST:
        return Rated(rating, why=f"{questions} question{'s' if questions > 1 else ''}: no interval")
    values_B, limits_B = drawn
    level = _level(questions)
    endless_B = np.isnan(limits_B)
    low = _rank(np.where(endless_B, -np.inf, values_B + limits_B), level)
    high = _rank(np.where(endless_B, np.inf, values_B + limits_B), 1 - level)
    odd = float((limits_B != 0).mean())
    why = f"in {odd:.1%} of the draws there is no finite one" if None in (low, high) else None
    return Rated(rating, low, high, why)


def _level(questions: int) -> float:
    """Of the lower end: 2.5 % and less, by how much wider t with n / (n - 1) is."""
    from scipy.special import ndtr

    return float(ndtr(-t_of(questions - 1) * (questions / (questions - 1)) ** 0.5))


def _rank(values_B: NDArray[np.float64], level: float) -> float | None:
    """An order statistic, for between a number and infinity nothing can be read off; None where it is infinite."""
    found = float(np.quantile(values_B, level, method="closest_observation"))
    return found if np.isfinite(found) else None
