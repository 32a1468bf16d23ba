# SPDX-License-Identifier: Apache-2.0
"""A training goes on, or can be resumed, whatever becomes of its server: one moment of each fault."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from served import KEY

from evoalign.engines.server import adapters

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "server_faults.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(adapters, "IN_MEMORY", tmp_path)
    monkeypatch.setenv("EVOALIGN_FAULTS_KEY", "")
    return runpy.run_path(str(SCRIPT))


def check(trial: Any) -> None:
    assert trial.happened and trial.same and not trial.left and trial.ended in ("by itself", "resumed"), trial


def test_a_server_that_is_killed_is_started_again(url: str, script: dict[str, Any]) -> None:
    """In the middle of a run that has started it."""
    wanted, requests = script["undisturbed"]({"url": url, "key_variable": KEY})
    trial = script["trial"]("kill", "launched", 1 + requests // 2, requests, wanted, None)
    check(trial)
    assert trial.ended == "by itself", trial


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "faults"),
    [("attached", ["hang", "garbage"]), ("attached", ["kill", "refuse"]), ("launched", ["hang", "refuse", "garbage"])],
)
def test_a_fault_of_the_server(place: str, faults: list[str], script: dict[str, Any]) -> None:
    seen = list(script["trials"](1, faults, [place]))
    assert [trial.fault for trial in seen] == faults
    for trial in seen:
        check(trial)
