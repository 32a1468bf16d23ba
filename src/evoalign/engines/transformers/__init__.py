# SPDX-License-Identifier: Apache-2.0
"""The in-process engine on Hugging Face transformers."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `TransformersEngine` on first use, so that the settings need no torch."""
    if name != "TransformersEngine":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    from evoalign.engines.transformers.engine import TransformersEngine

    return TransformersEngine
