# SPDX-License-Identifier: Apache-2.0
"""Judgments with planted strengths, for tests of ratings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from evoalign.analysis.judge.judgments import Judgment

RUBRIC = "helpfulness"
SCORES = {"won": (8.0, 3.0), "lost": (3.0, 8.0), "tied": (5.0, 5.5), "none": None}


def one(a: str, b: str, came: str, question: str = "q", *, order_ab: bool = True, dimension: str = RUBRIC) -> Judgment:
    """What came of a's answer beside b's."""
    return Judgment(a, b, dimension, question, SCORES[came], order_ab)


def planted(
    theta: Sequence[float], nu: float, questions: int, random: np.random.Generator, *, bias: float = 0.0
) -> list[Judgment]:
    """Both orders of all pairs of m0, m1, ..: drawn with Davidson's chances; `bias` lifts what is shown first."""
    found: list[Judgment] = []
    for q in range(questions):
        for i, j in combinations(range(len(theta)), 2):
            for order in (True, False):
                gap = theta[i] - theta[j] + (bias if order else -bias)
                odds = np.array([np.exp(gap / 2), np.exp(-gap / 2), nu])
                came = ("won", "lost", "tied")[random.choice(3, p=odds / odds.sum())]
                found.append(one(f"m{i}", f"m{j}", came, f"q{q}", order_ab=order))
    return found


def row(judgment: Judgment) -> dict[str, Any]:
    """As a line of a file has it."""
    return asdict(judgment)


def written(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return path
