# SPDX-License-Identifier: Apache-2.0
"""The benchmark of dense updates runs at a small size in plain torch and writes its measurements."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dense.py"


@pytest.mark.slow
def test_dense_benchmark_measures_and_writes_its_results(tmp_path):
    found = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--layers", "1", "--width", "32", "--members", "3",
               "--cycles", "4", "--repeats", "1", "--copy-mib", "1", "--json", str(found)]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(found.read_text())
    assert result["hash_equal"] and result["cycles"] == 4
    names = [row["name"] for row in result["rows"]]
    assert [n.split(",")[0] for n in names] == [
        "plain copy", "perturb (one member)", "restore", "update full", "fingerprint", "lowrank factors",
        "update lowrank", "fingerprint of these weights",
    ]  # fmt: skip
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in result["rows"])
    for row in result["rows"]:
        assert row["name"] in done.stdout
