# SPDX-License-Identifier: Apache-2.0
"""The command line in the tests' own process, started in an empty folder."""

from pathlib import Path

import interpreted  # noqa: F401  before anything that imports Triton
import pytest
from command_line import Run, caller


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 400)
