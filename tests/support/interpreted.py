# SPDX-License-Identifier: Apache-2.0
"""The kernels, imported for Triton's interpreter before anything else of a test process imports Triton.

Triton reads TRITON_INTERPRET when it is first imported and when a kernel is decorated. Here it is set for these two
moments, and by tests/kernels for each of its tests, so that other tests of the same process see no interpreter.
"""

import importlib
import os
import sys
from importlib.util import find_spec

MODULES = ("noise", "update", "population_triton", "sampling")


def _interpret() -> str | None:
    """Import the kernels as interpreted ones; why not, where that cannot be."""
    if find_spec("triton") is None:
        return "needs Triton"
    if find_spec("vllm") is not None:
        return "vLLM has a Triton of its own, whose interpreter may differ"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    import torch

    if torch.cuda.is_available():
        return "there is a GPU: set TRITON_INTERPRET=1 to run the interpreter all the same"
    if "triton" in sys.modules:
        raise RuntimeError("something imported Triton before tests/support/interpreted.py: import that later")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in MODULES:
            importlib.import_module(f"evoalign.kernels.{name}")
    finally:
        del os.environ["TRITON_INTERPRET"]
    return None


WHY_NOT = _interpret()
