# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import numpy as np
import pytest

from evoalign.report.rows import metrics_row
from evoalign.types import Generation, Update, population


def generation(fitness: tuple[float, ...], coefficients: tuple[float, ...], **changes: object) -> Generation:
    update = Update(3, 3, population(len(fitness)), coefficients, 0.01, 0.005)
    values: dict[str, object] = {
        "index": 3, "total": 10, "fitness_M": fitness, "scores_MP": tuple((f, f) for f in fitness), "update": update,
        "weights_hash": "00", "tokens": 1234, "empty_share": 0.25, "truncated_share": 0.5,
        "seconds": {"rollout": 1.5, "score": 0.1, "update": 0.2, "other": 0.0},
    }  # fmt: skip
    return Generation(**(values | changes))  # type: ignore[arg-type]


def test_statistics_of_the_population() -> None:
    row = metrics_row(generation((-4.0, -1.0, -3.0, -2.0, 0.0), (-1.0, 0.5, -0.5, 0.0, 1.0)))
    assert (row["generation"], row["mean"], row["best"], row["worst"]) == (3, -2.0, 0.0, -4.0)
    assert row["p20"] == pytest.approx(-3.2)
    assert row["p80"] == pytest.approx(-0.8)
    assert row["std"] == pytest.approx(2**0.5)  # ddof 0
    assert row["rms_c"] == pytest.approx(0.5**0.5)
    assert row["zero_variance"] is False
    assert (row["tokens"], row["empty_share"], row["truncated_share"]) == (1234, 0.25, 0.5)
    assert row["evaluation"] is None


def test_members_alike_have_no_variance_and_large_scores_keep_their_digits() -> None:
    row = metrics_row(generation((-1.0,) * 4, (0.0,) * 4))
    assert (row["zero_variance"], row["rms_c"], row["std"]) == (True, 0.0, 0.0)
    row = metrics_row(generation((1e9 + 1, 1e9 - 1), (1.0, -1.0)))
    assert (row["mean"], row["std"]) == (1e9, 1.0)


def test_a_row_is_plain_json_even_where_numpy_numbers_come_in() -> None:
    scores = tuple(np.float32([-1.5, -2.5]))
    row = metrics_row(generation(scores, (1.0, -1.0), evaluation={"reward": -3.0}, seconds={"rollout": np.float64(2)}))
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["evaluation"] == {"reward": -3.0}
