# SPDX-License-Identifier: Apache-2.0
"""How far judgments are to be trusted: what could not be read, whether the order decides, what the pairs came to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evoalign import statistics
from evoalign.analysis.judge.judgments import Judgment
from evoalign.statistics import FEWEST, Estimate, between, bounded


@dataclass(frozen=True, slots=True)
class Pair:
    """What became of two models: how often the first won, lost and was even, and how many judgments have no scores."""

    models: tuple[str, str]
    won: int
    lost: int
    tied: int
    unparsed: int


@dataclass(frozen=True, slots=True)
class Trust:
    """Of all judgments of a dimension.

    `both` counts the pairs of answers that were read in both orders. Over them alone go `agreement`, the share that
    came out alike, and `first_wins`, the share of wins that went to the answer shown first (0.5: the order decides
    nothing), both with intervals for new questions.
    """

    judgments: int
    questions: int
    unparsed: int
    ties: int
    both: int
    agreement: Estimate
    first_wins: Estimate
    pairs: tuple[Pair, ...]

    @property
    def parsed(self) -> int:
        """Judgments with scores."""
        return self.judgments - self.unparsed


def trust(judgments: Sequence[Judgment], models: Sequence[str]) -> Trust:
    """Of the judgments of one dimension; a pair's first model is the one that comes first in `models`."""
    outcomes: defaultdict[tuple[str, str], list[float | None]] = defaultdict(list)
    for one in judgments:
        pair, outcome = _in_order(one, models)
        outcomes[pair].append(outcome)
    ordered = sorted(outcomes, key=lambda pair: [models.index(name) for name in pair])
    pairs = tuple(Pair(p, *(outcomes[p].count(v) for v in (1.0, 0.0, 0.5, None))) for p in ordered)
    twice = _in_both_orders(judgments, models)
    return Trust(
        len(judgments),
        len({one.question for one in judgments}),
        sum(pair.unparsed for pair in pairs),
        sum(pair.tied for pair in pairs),
        sum(map(len, twice.values())),
        _agreement(twice),
        _first_wins(twice),
        pairs,
    )


ONE_ORDER = "no pair of answers was read in both orders"
_Twice = dict[str, list[tuple[float, float]]]
"""By question the outcomes of a pair's first model where it was shown first, and where it was shown second."""


def _in_order(one: Judgment, models: Sequence[str]) -> tuple[tuple[str, str], float | None]:
    if models.index(one.model_a) < models.index(one.model_b):
        return (one.model_a, one.model_b), one.outcome
    return (one.model_b, one.model_a), None if one.outcome is None else 1.0 - one.outcome


def _in_both_orders(judgments: Sequence[Judgment], models: Sequence[str]) -> _Twice:
    sides: defaultdict[tuple[str, tuple[str, str]], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for one in judgments:
        pair, outcome = _in_order(one, models)
        shown_first = one.model_a if one.order_ab else one.model_b
        if outcome is not None:
            sides[one.question, pair][shown_first != pair[0]].append(outcome)
    found: _Twice = {}
    for (question, _), (first, second) in sides.items():
        if both := list(zip(first, second, strict=False)):  # what was asked more often in one order has no other half
            found.setdefault(question, []).extend(both)
    return found


def _agreement(twice: _Twice) -> Estimate:
    if not twice:
        return _none(ONE_ORDER)
    alike_Q = np.array([sum(a == b for a, b in both) / len(both) for both in twice.values()])
    return between(alike_Q, 0.0, 1.0)


def _first_wins(twice: _Twice) -> Estimate:
    """Sum over sum, and Fieller's interval over questions of these and of one more each way, as `between` has it."""
    won_Q = [sum((a == 1) + (b == 0) for a, b in both) for both in twice.values()]
    decided_Q = [sum((a != 0.5) + (b != 0.5) for a, b in both) for both in twice.values()]
    if not sum(decided_Q):
        return _none(
            "no answer won in both orders of a pair" if twice else "no pair of answers was read in both orders"
        )
    share = sum(won_Q) / sum(decided_Q)
    if len(twice) < FEWEST:
        return Estimate(share, len(twice), why=f"{len(twice)} question{'s' if len(twice) > 1 else ''}: no interval")
    found = bounded(statistics.ratio([*won_Q, 1.0, 0.0], [*decided_Q, 1.0, 1.0]))
    return Estimate(share, len(twice), found.low, found.high, found.why)


def _none(why: str) -> Estimate:
    return Estimate(float("nan"), 0, why=why)
