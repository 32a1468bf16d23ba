# SPDX-License-Identifier: Apache-2.0
"""Elo's ratings: one pass over the judgments, each of which moves two models by what it was unexpected.

Expected score 1 / (1 + 10^((b - a) / 400)), K 32, start 1000 (Elo 1978, The Rating of Chessplayers). What comes out
depends on the order of the judgments, so that one order says little: the mean and the spread over many are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evoalign.analysis.judge.strengths import BASE, SCALE
from evoalign.statistics import LEVEL

K = 32.0


@dataclass(frozen=True, slots=True)
class Elo:
    """Of one model: after the file's own order, and over random orders the mean, the standard deviation and the ends
    that 95 % of them lie between. No interval for other questions."""

    rating: float
    mean: float
    sd: float
    low: float
    high: float


def elo(played: Sequence[tuple[int, int, float]], models: int, *, shuffles: int, seed: int) -> list[Elo]:
    """Of each model, from (a, b, score of a), before the scale is moved to an anchor. `shuffles` at least 1."""
    random = np.random.default_rng(seed)
    orders_SN = np.stack([random.permutation(len(played)) for _ in range(shuffles)])
    own_M = after(played, np.arange(len(played))[None], models)[0]
    found_SM = after(played, orders_SN, models)
    low_M, high_M = np.quantile(found_SM, [LEVEL / 2, 1 - LEVEL / 2], axis=0)
    sd_M = found_SM.std(0, ddof=1) if shuffles > 1 else np.zeros(models)
    columns = zip(own_M, found_SM.mean(0), sd_M, low_M, high_M, strict=True)
    return [Elo(*(float(value) for value in row)) for row in columns]


def after(played: Sequence[tuple[int, int, float]], orders_SN: NDArray[np.intp], models: int) -> NDArray[np.float64]:
    """The ratings [S, M] after all judgments in each of S orders [S, N]."""
    a_N, b_N = np.array([(a, b) for a, b, _ in played], dtype=np.intp).T
    score_N = np.array([score for _, _, score in played])
    found_SM = np.full((len(orders_SN), models), BASE)
    rows_S = np.arange(len(orders_SN))
    for n_S in orders_SN.T:
        a_S, b_S = a_N[n_S], b_N[n_S]
        expected_S = 1 / (1 + 10 ** ((found_SM[rows_S, b_S] - found_SM[rows_S, a_S]) / SCALE))
        gain_S = K * (score_N[n_S] - expected_S)
        found_SM[rows_S, a_S] += gain_S
        found_SM[rows_S, b_S] -= gain_S
    return found_SM
