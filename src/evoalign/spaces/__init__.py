# SPDX-License-Identifier: Apache-2.0
"""Spaces by name. Set `space.name` to `package.module:Class` for a user-defined space."""

from __future__ import annotations

from typing import Any

from evoalign import config as settings
from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.optimizer.cma import adapted
from evoalign.plugins import load_object
from evoalign.spaces.base import Adapter, Factors, MeanPart, Slots, Space
from evoalign.spaces.full import Full
from evoalign.spaces.lora import Lora
from evoalign.spaces.lowrank import LowRank

SPACES: dict[str, type[Space]] = {name: load_object(path, "space.name") for name, path in settings.SPACES.items()}

__all__ = ["SPACES", "Adapter", "Factors", "Full", "Lora", "LowRank", "MeanPart", "Slots", "Space", "adapted", "create"]


def create(config: Config) -> Space:
    """Return the configured space. Raises ConfigError, also if the space does not support the settings of `es`."""
    name = config.space.name
    cls: Any = SPACES[name] if name in SPACES else load_object(name, "space.name")
    if not (isinstance(cls, type) and issubclass(cls, Space)):
        raise ConfigError(f"space.name: {name} is not a class derived from evoalign.spaces.Space")
    space = cls(config)
    if space.has_bias and not config.engine.carries_bias:
        raise ConfigError(
            f"space {name} adds a bias per member, which engine {config.engine.name} does not serve; set engine.name "
            "transformers"
        )
    refusal = space.refusal(config.es) if config.es_ is not None else None
    if refusal is not None:
        raise ConfigError(refusal)
    return space
