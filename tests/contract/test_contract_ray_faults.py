# SPDX-License-Identifier: Apache-2.0
"""Engine `ray` under real faults: a case of each kind of benchmarks/ray_faults.py, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ray_faults.py"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["kill", "stop", "garbage", "driver", "raylet"])
def test_a_run_ends_as_if_there_had_been_no_fault(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    file = tmp_path / "rows.json"
    words = [sys.executable, str(SCRIPT), "--kinds", kind, "--count", "1", "--seed", "3", "--json", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = json.loads(file.read_text())["rows"]
    assert row["kind"] == kind and row["happened"] and row["same"] and not row["left"]
    assert kind == "driver" or row["restarts"] >= 1
