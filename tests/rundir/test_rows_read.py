# SPDX-License-Identifier: Apache-2.0
"""Rows that are read back have values of their types; a row that has not counts as lost."""

import json
from typing import Any

import pytest

from evoalign.checks.axes import MOST
from evoalign.rundir.directory import RunDir

ROW: dict[str, Any] = {
    "generation": 0, "mean": -1.5, "zero_variance": False, "tokens": 2, "seconds": {"rollout": 0.5}, "rms_c": None,
    "evaluation": {"reward": 1}, "budget": None, "more": ["of a later release"],
    "diagnosis": {"spread": 0.5, "control": [-11.0, -11.0, 0.0], "cosine": None, "axes": None},
}  # fmt: skip
AXES: dict[str, Any] = {
    "columns": ["tokens", "truncated"], "correctness": None, "means": {"tokens": 9.0, "truncated": 0.5},
    "covariance": [[1.0, 0.5, 0.5]] * 3, "lasting_covariance": None, "shares": None, "lasting_share": None,
    "lasting": None,
}  # fmt: skip
ODD_AXES: dict[str, dict[str, Any]] = {
    "axes that are a list": {"axes": [1]}, "another shape": {"axes": {**AXES, "covariance": [[1.0, 0.5]] * 3}},
    "a lasting covariance of one": {"axes": {**AXES, "lasting_covariance": [[1.0]]}},
    "another mean": {"axes": {**AXES, "means": {"tokens": 1.0}}},
    "another correctness": {"axes": {**AXES, "correctness": "right"}},
    "a share in words": {"axes": {**AXES, "shares": {"tokens": "all"}}},
    "many columns": {"axes": {**AXES, "columns": ["tokens"] * 100}},
}  # fmt: skip
ODD: dict[str, dict[str, Any]] = {
    **{name: {"diagnosis": found} for name, found in ODD_AXES.items()},
    "a list of seconds": {"seconds": {"rollout": []}}, "a control of one": {"diagnosis": {"control": [1.0]}},
    "no seconds": {"seconds": None}, "a mean in words": {"mean": "1"},
    "a mean that is true": {"mean": True}, "a generation that is none": {"generation": -1},
    "a generation in words": {"generation": "0"}, "a share that is a list": {"diagnosis": {"template_share": [1]}},
    "a distance that is an object": {"diagnosis": {"distance_sigmas": {}}}, "no diagnosis": {"diagnosis": [1]},
    "an evaluation of lists": {"evaluation": {"reward": [1]}}, "a divergence in words": {"divergence": "1"},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_row_with_a_value_of_another_type_counts_as_lost(name, tmp_path):
    lines = [ROW, {**ROW, "generation": 1, **ODD[name]}, {**ROW, "generation": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert RunDir(tmp_path).read_metrics() == {0: ROW, 2: {**ROW, "generation": 2}}


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b"[" * 600 + b"]" * 600 + b"\n" + json.dumps(ROW).encode() + b"\n{\n\xff\n"
    )
    assert RunDir(tmp_path).read_metrics() == {0: ROW}


def test_axes_of_a_row_are_read(tmp_path):
    row = {**ROW, "diagnosis": {"axes": AXES}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert RunDir(tmp_path).read_metrics() == {0: row}


def test_axes_with_the_most_columns_are_read(tmp_path):
    names = [*(f"column {i}" for i in range(MOST)), "tokens", "truncated"]
    square = [[0.0] * len(names)] * len(names)
    wide = {**AXES, "columns": names, "means": dict.fromkeys(names, 0.0), "lasting_covariance": square, "members": 8}
    row = {**ROW, "diagnosis": {"axes": {**wide, "covariance": [[0.0] * (len(names) + 1)] * (len(names) + 1)}}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert RunDir(tmp_path).read_metrics() == {0: row}
