# SPDX-License-Identifier: Apache-2.0
"""Judgments as a file has them: a line of JSON for each time that a judge scored two answers beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from evoalign.config.reading import parse, read_bytes
from evoalign.errors import DataError, plain, shown

TIE = 0.5
"""Scores that differ by at most so much are a tie."""
ROUNDING = 1e-9
"""Of a difference such as 1.1 - 0.6."""
NEEDED = ("model_a", "model_b", "dimension", "question", "scores", "order_ab")
"""Fields of a line; `raw`, what the judge said, may be missing, and others are passed over."""


@dataclass(frozen=True, slots=True)
class Judgment:
    """Two answers to one question, scored in one dimension.

    `scores` are of model_a and model_b, whichever was shown first; None where the judge said nothing that is a score.
    `order_ab`: the answer of model_a was shown first.
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
        """Of model_a: 1 it won, 0 it lost, 0.5 a tie; None where the judgment has no scores."""
        if self.scores is None:
            return None
        gap = self.scores[0] - self.scores[1]
        return 0.5 if abs(gap) <= TIE + ROUNDING else float(gap > 0)


def read(path: Path) -> list[Judgment]:
    """All lines of a file, in order; empty ones are passed over. Raises DataError with the line and what to do."""
    found: list[Judgment] = []
    for number, line in enumerate(read_bytes(path, mend="name a file of judgments").splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number},"
            found.append(judgment_of(parse(line, where, "write it as one JSON object, or delete it"), where))
    if not found:
        raise DataError(f"{path} has no judgments; `evoalign judge A B --to FOLDER` writes FOLDER/judgments.jsonl")
    return found


def judgment_of(row: Any, where: str) -> Judgment:
    """From the JSON value of a line. Raises DataError, which begins with `where`."""
    if not isinstance(row, dict):
        raise DataError(f"{where} is {shown(row)} and no JSON object; write one with {', '.join(NEEDED)}")
    fields = cast("dict[str, Any]", row)
    missing = [name for name in NEEDED if name not in fields]
    if missing:
        known = plain(", ".join(map(str, fields)))
        raise DataError(f"{where} has no {' and no '.join(missing)}; add it (the line has: {known or 'nothing'})")
    texts = {name: _text(fields, name, where) for name in ("model_a", "model_b", "dimension")}
    if texts["model_a"] == texts["model_b"]:
        raise DataError(
            f"{where} compares {shown(texts['model_a'])} with itself; name the two models apart, or delete the line"
        )
    question, order, raw = fields["question"], fields["order_ab"], fields.get("raw")
    if not isinstance(question, str | int) or isinstance(question, bool):
        raise DataError(f"{where} question is {shown(question)}; name the question by a text or a whole number")
    if not isinstance(order, bool):
        raise DataError(f"{where} order_ab is {shown(order)}; write true where model_a was shown first, else false")
    if not isinstance(raw, str | None):
        raise DataError(f"{where} raw is {shown(raw)}; write what the judge said as a text, or leave it out")
    scores = _scores(fields["scores"], where)
    return Judgment(**texts, question=str(question), scores=scores, order_ab=order, raw=raw or "")


def models_of(judgments: Sequence[Judgment]) -> list[str]:
    """All models, in the order in which they come."""
    return list(dict.fromkeys(name for one in judgments for name in (one.model_a, one.model_b)))


def _text(fields: dict[str, Any], name: str, where: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where} {name} is {shown(value)}; write a name")
    return value


def _scores(value: Any, where: str) -> tuple[float, float] | None:
    if value is None:
        return None
    both = cast("list[Any]", value) if isinstance(value, list) else []
    numbers = [float(v) for v in both if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
    if len(numbers) != 2 or len(both) != 2:
        raise DataError(
            f"{where} scores are {shown(value)}; write two finite numbers, [of model_a, of model_b], or null where the "
            "judge gave none"
        )
    return numbers[0], numbers[1]
