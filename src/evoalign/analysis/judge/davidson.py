# SPDX-License-Identifier: Apache-2.0
"""The model of Bradley and Terry with ties as Davidson (1970) has them, and where its estimate is finite.

    P(i beats j) = pi_i / (pi_i + pi_j + nu sqrt(pi_i pi_j)),   P(tie) = nu sqrt(pi_i pi_j) / (the same)

Davidson, J. American Statistical Association 65, equation 2.4. In theta = ln pi and ln nu it is an exponential family:
the likelihood is concave, and at its maximum the expected wins plus half the ties of each model, and the expected
number of ties, are those that were seen. Without ties nu is 0, which is the model of Bradley and Terry (1952).

Array suffixes: B draws (1 without a bootstrap), P pairs of models, M models, 3 the outcomes of a pair (i, j) in the
order i won, j won, tie.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
STEPS, NEAR = 500, 1e-10
"""Newton's steps at most, and the largest change of a parameter at which it has arrived."""
STRIDE = 0.5
"""The largest change of a parameter in a step: within it the likelihood cannot fall, see `fit`."""
LEAST = 1e-4
"""Judgments more between each two models that make every estimate finite, and move those that are by nothing to see."""


def pairs_of(models: int) -> NDArray[np.intp]:
    """All pairs (i, j) of so many models with i < j, [P, 2]."""
    return np.array(list(combinations(range(models), 2)), dtype=np.intp).reshape(-1, 2)


def fit(counts_BP3: Floats, models: int) -> tuple[Floats, Floats]:
    """Maximum likelihood: theta [B, M], of mean 0, and nu [B]. Every draw must have a finite estimate, see `limits`.

    Newton's method with steps of at most `STRIDE`, within which no two logits of a pair come apart by more than 1: the
    second-order loss is then below e - 2 = 0.72 of the first-order gain (Bach 2010, Electronic J. Statistics 4,
    proposition 1), and the likelihood rises with every step.
    """
    pairs_P2 = pairs_of(models)
    contrast_PM = np.zeros((len(pairs_P2), models))
    rows = np.arange(len(pairs_P2))
    contrast_PM[rows, pairs_P2[:, 0]], contrast_PM[rows, pairs_P2[:, 1]] = 1.0, -1.0
    square_PMM = contrast_PM[:, :, None] * contrast_PM[:, None, :]
    number_BP, ties_B = counts_BP3.sum(2), counts_BP3[:, :, 2].sum(1)
    tied_B = ties_B > 0
    theta_BM = np.zeros((len(counts_BP3), models))
    log_nu_B = np.where(tied_B, 0.0, -np.inf)
    for _ in range(STEPS):
        chance_BP3 = _chances(theta_BM @ contrast_PM.T, log_nu_B)
        gap_BP, tie_BP = chance_BP3[..., 0] - chance_BP3[..., 1], chance_BP3[..., 2]
        seen_BP = (counts_BP3[..., 0] - counts_BP3[..., 1]) / 2
        slope_BK = np.concatenate(
            [(seen_BP - number_BP * gap_BP / 2) @ contrast_PM, (ties_B - (number_BP * tie_BP).sum(1))[:, None]], axis=1
        )
        curve_BKK = np.zeros((len(counts_BP3), models + 1, models + 1))
        own_BP = number_BP * (1 - tie_BP - gap_BP**2) / 4
        curve_BKK[:, :-1, :-1] = np.tensordot(own_BP, square_PMM, 1) + number_BP.sum(1)[:, None, None] / models**2
        curve_BKK[:, :-1, -1] = curve_BKK[:, -1, :-1] = -(number_BP * gap_BP * tie_BP / 2) @ contrast_PM
        curve_BKK[:, -1, -1] = np.where(tied_B, (number_BP * tie_BP * (1 - tie_BP)).sum(1), 1.0)
        step_BK = np.linalg.solve(curve_BKK, slope_BK[..., None])[..., 0].astype(np.float64)
        largest_B = np.abs(step_BK).max(1)
        step_BK *= np.minimum(1.0, STRIDE / np.maximum(largest_B, NEAR))[:, None]
        theta_BM += step_BK[:, :-1]
        log_nu_B = log_nu_B + step_BK[:, -1]
        if largest_B.max() < NEAR:
            break
    return theta_BM - theta_BM.mean(1, keepdims=True), np.exp(log_nu_B)


def _chances(gap_BP: Floats, log_nu_B: Floats) -> Floats:
    """[B, P, 3] from theta_i - theta_j."""
    logits_BP3 = np.stack([gap_BP / 2, -gap_BP / 2, np.broadcast_to(log_nu_B[:, None], gap_BP.shape)], axis=-1)
    odds_BP3 = np.exp(logits_BP3 - logits_BP3.max(2, keepdims=True))
    return odds_BP3 / odds_BP3.sum(2, keepdims=True)


def limits(seen_P3: Flags, models: int) -> Floats:
    """Of which size the maximum likelihood has theta_i - theta_j, [M, M], by which outcomes were seen at all.

    0: finite. inf, -inf: it grows without end. nan: the judgments do not say, such as of models that nothing connects.

    The likelihood rises without end along u (of theta) and t (of ln nu) exactly where each win of i over j has
    u_i - u_j >= 2 t, each tie |u_i - u_j| <= 2 t, and not all are equal. What t is at its least, 0, is a question of
    who reaches whom by wins and ties (Ford, American Mathematical Monthly 64, 1957); for t > 0, of shortest paths.
    """
    over_MM, most_MM = np.eye(models, dtype=bool), np.full((models, models), np.inf)
    np.fill_diagonal(most_MM, 0.0)
    for (i, j), (won, lost, tied) in zip(pairs_of(models), seen_P3, strict=True):
        over_MM[i, j] |= won | tied
        over_MM[j, i] |= lost | tied
        for winner, loser, is_won in ((i, j, won), (j, i, lost)):
            apart, back = 1.0 if tied else np.inf, -1.0 if is_won else np.inf  # of u_winner - u_loser, where t is 1/2
            most_MM[winner, loser] = min(most_MM[winner, loser], apart)
            most_MM[loser, winner] = min(most_MM[loser, winner], apart, back)
    for k in range(models):
        over_MM |= over_MM[:, k, None] & over_MM[None, k, :]
        most_MM = np.minimum(most_MM, most_MM[:, k, None] + most_MM[None, k, :])
    rises_MM = ~over_MM.T
    if (np.diag(most_MM) >= 0).all():  # else no t > 0 is possible
        rises_MM |= most_MM > 0
    falls_MM = rises_MM.T
    found: Any = np.select([rises_MM & falls_MM, rises_MM, falls_MM], [np.nan, np.inf, -np.inf], 0.0)
    return found
