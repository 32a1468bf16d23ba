# SPDX-License-Identifier: Apache-2.0
"""Commands killed in each phase and repeated: the bits and the files of those that never died."""

import random
import signal

import pytest
import random_kills


@pytest.mark.slow
def test_killed_in_each_phase_and_repeated_nothing_differs_and_nothing_is_left(tmp_path):
    draw, bench = random.Random(1), random_kills.Bench(tmp_path, ["train", "export"], ["lora"])
    rows = [bench.trial(*bench.draw(phase, draw)) for phase in (*random_kills.MAIN, "export")]
    assert [row["exit"] for row in rows] == [-signal.SIGKILL] * len(rows)
    assert [row["outcome"] for row in rows] == ["same"] * len(rows)
