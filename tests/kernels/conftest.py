# SPDX-License-Identifier: Apache-2.0
"""Run Triton kernels on the CPU in Triton's interpreter; skip without Triton, or if there is a GPU."""

import pytest
from interpreted import WHY_NOT


@pytest.fixture(autouse=True)
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels in the interpreter, except in tests that are marked `gpu`."""
    if request.node.get_closest_marker("gpu"):
        return
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
