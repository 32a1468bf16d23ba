# SPDX-License-Identifier: Apache-2.0
"""Rules of `evoalign select`: from fitness to members, from answers to a vote, from fitness to the weights of a merge.

Array suffixes: K chosen members, D noises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign.types import Member, Update

Floats: TypeAlias = NDArray[np.float64]
BETAS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Grids of CoRP's published code: the weight of the reward, and the length of the step in units of the weighted mean
perturbation."""


def best(fitness_M: Sequence[float], count: int) -> list[int]:
    """Return the indices of the `count` members with the highest fitness, best first; ties go to the lower index."""
    return sorted(range(len(fitness_M)), key=lambda i: (-fitness_M[i], i))[:count]


def elected(answers: Sequence[str | None]) -> int | None:
    """Return the place of the first completion with the most frequent answer; None if no completion has an answer.

    A tie goes to the answer that occurs first: that of the best member, or of the first sample. None does not vote.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return answers.index(max(votes, key=votes.__getitem__)) if votes else None


def merged(update: Update, chosen: Sequence[int], weights_K: Floats, scale: float = 1.0) -> Update:
    """Return the update that moves the mean by `scale` times the weighted sum of the chosen members' perturbations."""
    return replace(
        update,
        members=tuple(update.members[i] for i in chosen),
        coefficients=tuple(map(float, weights_K * len(chosen))),
        step=update.sigma * scale,
        decay=0.0,
    )


def corp_weights(fitness_M: Sequence[float], members: Sequence[Member], chosen: Sequence[int], beta: float) -> Floats:
    """Return CoRP's weights of the chosen members (the elite), which sum to 1 (arXiv 2605.31494).

    A first pass weighs them by softmax(beta r) of the reward r and gives a direction. The second pass weighs them by
    softmax(beta r + z(alignment) - z(dispersion)): alignment is the cosine of a member's perturbation with that
    direction, dispersion the squared norm of the rest of it, and z standardizes over the elite.

    The text of the paper was read as its abstract and a summary; the formulas are those of its published code, where
    independent draws of noise count as orthogonal and of equal norm, as they nearly are in many dimensions. With one
    sigma, members that share no noise are then weighed by their reward alone. Deviations: the elite is the top K
    instead of a quantile, and rewards are scaled to 0 to 1 over the generation, since they may have any range.
    """
    low, high = min(fitness_M), max(fitness_M)
    reward_K = np.array([(fitness_M[i] - low) / (high - low) for i in chosen])
    sign_K = np.array([members[i].sign for i in chosen], dtype=np.float64)
    _, axis_K = np.unique([members[i].noise for i in chosen], return_inverse=True)
    direction_D = np.bincount(axis_K, weights=_softmax(beta * reward_K) * sign_K)
    norm = float(np.linalg.norm(direction_D))
    alignment_K = sign_K * direction_D[axis_K] / norm if norm > 0 else np.zeros(len(chosen))
    return _softmax(beta * reward_K + _standardized(alignment_K) - _standardized(1 - alignment_K**2))


def _softmax(logits_K: Floats) -> Floats:
    weights_K = np.exp(logits_K - logits_K.max())
    return weights_K / weights_K.sum()


def _standardized(values_K: Floats) -> Floats:
    spread = float(values_K.std())
    return (values_K - values_K.mean()) / spread if spread > 1e-12 else np.zeros_like(values_K)
