# SPDX-License-Identifier: Apache-2.0
"""A training goes on, or can be resumed, whatever becomes of its server: one moment of each fault."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from evoalign.engines.server import adapters

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "server_faults.py"


@pytest.mark.parametrize(
    ("place", "faults"),
    [
        ("launched", ["kill"]),
        pytest.param("attached", ["hang", "garbage"], marks=pytest.mark.long),
        pytest.param("attached", ["kill", "refuse"], marks=pytest.mark.long),
        pytest.param("launched", ["hang", "refuse", "garbage"], marks=pytest.mark.long),
    ],
)
def test_a_fault_of_the_server(place: str, faults: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "IN_MEMORY", tmp_path)
    monkeypatch.setenv("EVOALIGN_FAULTS_KEY", "")
    seen = list(runpy.run_path(str(SCRIPT))["trials"](1, faults, [place]))
    assert [trial.fault for trial in seen] == faults
    for trial in seen:
        assert trial.happened and trial.same and not trial.left and trial.ended in ("by itself", "resumed"), trial
