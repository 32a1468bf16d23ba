# SPDX-License-Identifier: Apache-2.0
"""The examples run, as a person would run them, with fewer generations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.last("quickstart")
@pytest.mark.parametrize(
    ("name", "said", "runs"),
    [
        ("quickstart", [r"^reward -\d+\.\d -> -\d+\.\d$", r"^the adapter is in .*generation_0002"], [""]),
        ("custom_task", [r"^words \d+\.\d -> \d+\.\d$", r"^reward -?\d\.\d\d -> -?\d\.\d\d$"], ["task", "reward"]),
    ],
)
def test_example(name: str, said: list[str], runs: list[str], tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), "--generations", "2", "--output", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for pattern in said:
        assert re.search(pattern, done.stdout, re.MULTILINE), done.stdout
    for run in runs:
        assert len((tmp_path / "run" / run / "journal.jsonl").read_text().splitlines()) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"quickstart", "custom_task"}
