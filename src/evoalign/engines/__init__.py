# SPDX-License-Identifier: Apache-2.0
"""Engines: where the weights live and text comes from. Imports no torch: an engine's settings lie in its folder."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from evoalign.config import ENGINES, Config, EngineSettings, with_engine
from evoalign.config.engines import UnreadEngine
from evoalign.errors import ConfigError
from evoalign.plugins import load_object

if TYPE_CHECKING:
    from evoalign.engines.base import ABSENT, Answering, Engine
    from evoalign.engines.hash import weights_hash
    from evoalign.tokens import Tokens

__all__ = ["ABSENT", "ENGINES", "Answering", "Engine", "create", "read", "weights_hash"]

_HOMES = {"ABSENT": "base", "Answering": "base", "Engine": "base", "weights_hash": "hash"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def read(config: Config) -> Config:
    """The config, its settings of an engine of one's own checked by that engine. Imports the code that it names, so
    only for a config that the user wrote. Raises ConfigError."""
    name = config.engine.name
    if not isinstance(config.engine, UnreadEngine):
        return config
    section: Any = getattr(load_object(name, "engine.name"), "settings", None)
    if not (isinstance(section, type) and issubclass(section, EngineSettings)):
        raise ConfigError(f"engine.name: {name} has no class `settings` derived from evoalign.config.EngineSettings")
    return with_engine(config, section)


def create(config: Config, tokens: Tokens) -> Engine:
    """The engine a config names. Raises ModelError where the model does not load or the engine is not installed."""
    config = read(config)
    own = config.engine.name  # first: the section of an engine of one's own may derive from one that is shipped
    return load_object(own if ":" in own else config.engine.path, "engine.name")(config, tokens)
