# SPDX-License-Identifier: Apache-2.0
"""The engine on vLLM: all members of a population in one batch of a real serving engine."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`VllmEngine`, imported when it is asked for, so that its settings need no torch."""
    if name != "VllmEngine":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    from evoalign.engines.vllm.engine import VllmEngine

    return VllmEngine
