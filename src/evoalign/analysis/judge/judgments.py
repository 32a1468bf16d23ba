# SPDX-License-Identifier: Apache-2.0
"""Judgments as JSON lines, one for each time a judge scored two answers, and how consistent they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from evoalign.config.reading import parse, read_bytes
from evoalign.errors import DataError, plain, shown
from evoalign.statistics import FEWEST, Estimate, between, bounded, ratio

TIE = 0.5
"""Scores that differ by at most this are a tie."""
ROUNDING = 1e-9
"""Tolerance for differences such as 1.1 - 0.6."""
REQUIRED = ("model_a", "model_b", "dimension", "question", "scores", "order_ab")
"""Fields of a line. `raw`, the judge's output, is optional; other fields are ignored."""
ONE_ORDER = "no pair of answers was judged in both orders"
_Score = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_SCORES: TypeAdapter[tuple[float, float]] = TypeAdapter(tuple[_Score, _Score])


@dataclass(frozen=True, slots=True)
class Judgment:
    """Two answers to one question, scored in one dimension.

    `scores` are those of model_a and model_b in either order; None if the judge gave no valid scores. `order_ab`: the
    answer of model_a was shown first.
    """

    model_a: str
    model_b: str
    dimension: str
    question: str
    scores: tuple[float, float] | None
    order_ab: bool
    raw: str = ""

    @property
    def outcome(self) -> float | None:
        """Result of model_a: 1 for a win, 0 for a loss, 0.5 for a tie; None without scores."""
        if self.scores is None:
            return None
        gap = self.scores[0] - self.scores[1]
        return 0.5 if abs(gap) <= TIE + ROUNDING else float(gap > 0)


def read(path: Path) -> list[Judgment]:
    """Read all lines of a file in order, skipping empty ones. Raises DataError with the line and what to fix."""
    found: list[Judgment] = []
    for number, line in enumerate(read_bytes(path, mend="give a file of judgments").splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number},"
            found.append(judgment_of(parse(line, where, "write one JSON object, or delete the line"), where))
    if not found:
        raise DataError(f"{path} has no judgments; `evoalign judge ask A B --to FOLDER` writes FOLDER/judgments.jsonl")
    return found


def judgment_of(row: Any, where: str) -> Judgment:
    """Return the judgment in the JSON value of a line. Raises DataError that starts with `where`."""
    if not isinstance(row, dict):
        raise DataError(f"{where} is {shown(row)}, not a JSON object; write one with {', '.join(REQUIRED)}")
    fields = cast("dict[str, Any]", row)
    missing = [name for name in REQUIRED if name not in fields]
    if missing:
        known = plain(", ".join(map(str, fields)))
        raise DataError(f"{where} has no {' and no '.join(missing)}; add it (fields found: {known or 'none'})")
    names = {name: fields[name] for name in ("model_a", "model_b", "dimension")}
    for name, value in names.items():
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{where} {name} is {shown(value)}; give a name")
    if names["model_a"] == names["model_b"]:
        raise DataError(
            f"{where} compares {shown(names['model_a'])} with itself; give two different names, or delete the line"
        )
    question, order, raw = fields["question"], fields["order_ab"], fields.get("raw")
    if not isinstance(question, str | int) or isinstance(question, bool):
        raise DataError(f"{where} question is {shown(question)}; give a string or an integer")
    if isinstance(order, list) and sorted(map(str, order)) == sorted([names["model_a"], names["model_b"]]):
        order = order[0] == names["model_a"]  # published files have the two names in the order shown
    if not isinstance(order, bool):
        mend = "give true if model_a was shown first, else false, or the list of both names in the order shown"
        raise DataError(f"{where} order_ab is {shown(order)}; {mend}")
    if not isinstance(raw, str | None):
        raise DataError(f"{where} raw is {shown(raw)}; give the judge's output as a string, or leave it out")
    value, scores = fields["scores"], None
    if value is not None:
        try:
            scores = _SCORES.validate_python(value)
        except ValidationError:
            mend = "give two finite numbers, [model_a, model_b], or null for no scores"
            raise DataError(f"{where} scores are {shown(value)}; {mend}") from None
    return Judgment(**names, question=str(question), scores=scores, order_ab=order, raw=raw or "")


def models_of(judgments: Sequence[Judgment]) -> list[str]:
    """Return all models in order of first appearance."""
    return list(dict.fromkeys(name for one in judgments for name in (one.model_a, one.model_b)))


# --- consistency ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairCounts:
    """Wins, losses and ties of the first of two models, and judgments of the pair without scores."""

    models: tuple[str, str]
    won: int
    lost: int
    tied: int
    unparsed: int


@dataclass(frozen=True, slots=True)
class Consistency:
    """Consistency of the judgments of one dimension.

    `both` counts the pairs of answers judged in both orders. Over these, `agreement` is the share with the same outcome
    in both orders and `first_wins` the share of wins of the answer shown first (0.5: no position bias), both with
    intervals for new questions.
    """

    judgments: int
    questions: int
    unparsed: int
    ties: int
    both: int
    agreement: Estimate
    first_wins: Estimate
    pairs: tuple[PairCounts, ...]

    @property
    def parsed(self) -> int:
        """Number of judgments with scores."""
        return self.judgments - self.unparsed


def consistency(judgments: Sequence[Judgment], models: Sequence[str]) -> Consistency:
    """Return the consistency of one dimension's judgments; pairs are ordered as in `models`."""
    outcomes: defaultdict[tuple[str, str], list[float | None]] = defaultdict(list)
    orders: defaultdict[tuple[str, tuple[str, str]], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for one in judgments:
        pair, outcome = (one.model_a, one.model_b), one.outcome
        if models.index(one.model_a) > models.index(one.model_b):
            pair, outcome = (one.model_b, one.model_a), None if outcome is None else 1.0 - outcome
        outcomes[pair].append(outcome)
        shown_first = one.model_a if one.order_ab else one.model_b
        if outcome is not None:
            orders[one.question, pair][shown_first != pair[0]].append(outcome)
    ordered = sorted(outcomes, key=lambda pair: [models.index(name) for name in pair])
    pairs = tuple(PairCounts(p, *(outcomes[p].count(v) for v in (1.0, 0.0, 0.5, None))) for p in ordered)
    both: dict[str, list[tuple[float, float]]] = {}
    for (question, _), (first, second) in orders.items():
        if matched := list(zip(first, second, strict=False)):  # a repeated judgment may lack its other order
            both.setdefault(question, []).extend(matched)
    same_Q = np.array([sum(a == b for a, b in matched) / len(matched) for matched in both.values()])
    agreement = between(same_Q, 0.0, 1.0) if both else Estimate(float("nan"), 0, why=ONE_ORDER)
    return Consistency(
        judgments=len(judgments),
        questions=len({one.question for one in judgments}),
        unparsed=sum(pair.unparsed for pair in pairs),
        ties=sum(pair.tied for pair in pairs),
        both=sum(map(len, both.values())),
        agreement=agreement,
        first_wins=_first_wins(list(both.values())),
        pairs=pairs,
    )


def _first_wins(both_Q: Sequence[Sequence[tuple[float, float]]]) -> Estimate:
    """Return the share with Fieller's interval over questions, one added at either end as in `statistics.between`."""
    won_Q = [sum((a == 1) + (b == 0) for a, b in both) for both in both_Q]
    decided_Q = [sum((a != 0.5) + (b != 0.5) for a, b in both) for both in both_Q]
    n = len(both_Q)
    if not sum(decided_Q):
        return Estimate(float("nan"), 0, why="all pairs judged in both orders are ties" if n else ONE_ORDER)
    share = sum(won_Q) / sum(decided_Q)
    if n < FEWEST:
        return Estimate(share, n, why=f"{n} question{'s' if n > 1 else ''}: no interval")
    found = bounded(ratio([*won_Q, 1.0, 0.0], [*decided_Q, 1.0, 1.0]))
    return Estimate(share, n, found.low, found.high, found.why)
