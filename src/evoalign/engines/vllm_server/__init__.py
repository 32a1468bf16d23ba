# SPDX-License-Identifier: Apache-2.0
"""The engine on vLLM's OpenAI-compatible server: started here, or attached by its address."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`VllmServerEngine`, imported when it is asked for, so that its settings need no torch."""
    if name != "VllmServerEngine":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    from evoalign.engines.vllm_server.engine import VllmServerEngine

    return VllmServerEngine
