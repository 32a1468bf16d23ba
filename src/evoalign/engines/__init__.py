# SPDX-License-Identifier: Apache-2.0
"""Engines: they hold the weights and generate text. Importing this package imports no torch."""

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
    """Return the config with the settings of a user-defined engine checked by its `settings` class. Raises ConfigError.

    Imports the code that the config names, so it is only for a config that the user wrote.
    """
    name = config.engine.name
    if not isinstance(config.engine, UnreadEngine):
        return config
    section: Any = getattr(load_object(name, "engine.name"), "settings", None)
    if not (isinstance(section, type) and issubclass(section, EngineSettings)):
        raise ConfigError(f"engine.name: {name} has no class `settings` derived from evoalign.config.EngineSettings")
    return with_engine(config, section)


def create(config: Config, tokens: Tokens) -> Engine:
    """Return the configured engine. Raises ModelError if the model does not load or the engine is not installed."""
    config = read(config)
    # The name comes before the path: settings of a user-defined engine may derive from those of a shipped one.
    name = config.engine.name
    engine = load_object(name if ":" in name else config.engine.path, "engine.name")(config, tokens)
    missing = [method for method in ("metrics", "parts") if method not in dir(engine)]
    if missing:
        raise ConfigError(f"engine.name {name}: no method {', '.join(missing)}; derive it from evoalign.engines.Engine")
    return engine
