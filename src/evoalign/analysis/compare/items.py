# SPDX-License-Identifier: Apache-2.0
"""What runs did on each test question, and intervals for new runs and new questions at once.

Runs keep their completions of the end alone: of a model on the way only means over questions are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from evoalign.analysis.compare.runs import Point, Run
from evoalign.analysis.compare.statistics import shared
from evoalign.statistics import Estimate, crossed, crossed_difference

OF_RIGHT = ("accuracy", "exact")
"""Measures that may be the share of right answers, question by question: taken where the mean agrees."""
At = tuple[Run, Point]


def over_questions(taken: Sequence[At], measure: str) -> Estimate | None:
    """The mean over runs and questions; None where a run did not keep its answers, or questions differ."""
    rows = _rows(taken, measure)
    return None if rows is None else crossed(list(rows.values()))


def difference_over_questions(a: Sequence[At], b: Sequence[At], measure: str) -> Estimate | None:
    """That of a less b, by seeds where these are compared as pairs; None as above."""
    both = _rows([*a, *b], measure)
    if both is None:
        return None
    of_a = {run.seed: both[i] for i, (run, _) in enumerate(a)}
    of_b = {run.seed: both[len(a) + i] for i, (run, _) in enumerate(b)}
    seeds = shared(of_a, of_b)
    x, y = ([of[seed] for seed in seeds or sorted(of)] for of in (of_a, of_b))
    return crossed_difference(x, y, paired=bool(seeds))


def _rows(taken: Sequence[At], measure: str) -> Mapping[int, tuple[float, ...]] | None:
    """[I] values of each run, by its place; None where not all are known, or are of other questions."""
    found = [items_of(run, point, measure) for run, point in taken]
    asked = {run.questions for run, _ in taken}
    if len(asked) != 1 or None in asked or len({len(row) for row in found if row is not None}) != 1:
        return None
    known = {i: row for i, row in enumerate(found) if row is not None}
    return known if len(known) == len(taken) else None


def items_of(run: Run, point: Point, measure: str) -> tuple[float, ...] | None:
    """A measure of each question, in their order; None where it is not known, or not what the mean is of."""
    row = run.items.get("right" if measure in OF_RIGHT else measure)
    if row is None or not run.finished or point.step != run.steps:
        return None
    return row if np.isclose(np.mean(row), point.measures[measure], rtol=1e-9, atol=1e-12) else None
