# SPDX-License-Identifier: Apache-2.0
"""Triton kernels on the CPU, in Triton's interpreter; left out where there is no Triton, or a GPU to run them on."""

import pytest

from interpreted import WHY_NOT


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run, in the interpreter."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
