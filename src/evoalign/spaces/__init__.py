# SPDX-License-Identifier: Apache-2.0
"""The spaces by name. One of one's own is named `package.module:Class` in `space.name`."""

from __future__ import annotations

from typing import Any

from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.plugins import load_object
from evoalign.spaces.base import Adapter, Factors, MeanPart, Slots, Space
from evoalign.spaces.full import Full
from evoalign.spaces.lora import Lora
from evoalign.spaces.lowrank import LowRank

SPACES: dict[str, type[Space]] = {cls.name: cls for cls in (Lora, LowRank, Full)}

__all__ = ["SPACES", "Adapter", "Factors", "MeanPart", "Slots", "Space", "create"]


def create(config: Config) -> Space:
    """The space a config names. Raises ConfigError."""
    name = config.space.name
    cls: Any = SPACES[name] if name in SPACES else load_object(name, "space.name")
    if not (isinstance(cls, type) and issubclass(cls, Space)):
        raise ConfigError(f"space.name: {name} is not a class derived from evoalign.spaces.Space")
    return cls(config)
