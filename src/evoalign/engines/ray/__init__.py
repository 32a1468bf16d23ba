# SPDX-License-Identifier: Apache-2.0
"""The engine on Ray: replicas of another engine, each in an actor, share the members of a population."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`RayEngine`, imported when it is asked for, so that its settings need no torch."""
    if name != "RayEngine":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    from evoalign.engines.ray.engine import RayEngine

    return RayEngine
