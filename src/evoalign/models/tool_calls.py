# SPDX-License-Identifier: Apache-2.0
"""Tool calls that a model writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool by its name."""

    name: str
    arguments: dict[str, Any]
