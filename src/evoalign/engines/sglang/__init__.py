# SPDX-License-Identifier: Apache-2.0
"""The engine on an SGLang server: started here, or attached by its address."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`SglangEngine`, imported when it is asked for, so that its settings need no torch."""
    if name != "SglangEngine":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    from evoalign.engines.sglang.engine import SglangEngine

    return SglangEngine
