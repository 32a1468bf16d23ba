# SPDX-License-Identifier: Apache-2.0
"""Triton kernels on the CPU, in Triton's interpreter; left out where there is no Triton, or a GPU to run them on.

Triton reads TRITON_INTERPRET when it is first imported and when a kernel is decorated. Here it is set for these two
moments and for each test of this folder, so that other tests of the same process see no interpreter.
"""

import importlib
import os
import sys
from importlib.util import find_spec

import pytest
import torch

MODULES = ("noise", "update", "hash", "population_triton")


def _interpret() -> str | None:
    """Import the kernels as interpreted ones; why not, where that cannot be."""
    if find_spec("triton") is None:
        return "needs Triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if torch.cuda.is_available():
        return "there is a GPU: set TRITON_INTERPRET=1 to run the interpreter all the same"
    if "triton" in sys.modules:
        return "something imported Triton before: run this folder alone"
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in MODULES:
            importlib.import_module(f"evoalign.kernels.{name}")
    finally:
        del os.environ["TRITON_INTERPRET"]
    return None


WHY_NOT = _interpret()


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run, in the interpreter."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
