# SPDX-License-Identifier: Apache-2.0
"""Engines by name: where the weights live and text comes from."""

from __future__ import annotations

import importlib

from evoalign.config import Config
from evoalign.engines.base import ABSENT, Engine
from evoalign.engines.hash import weights_hash
from evoalign.tokens import Tokens

__all__ = ["ABSENT", "ENGINES", "Engine", "create", "weights_hash"]

ENGINES = {
    "transformers": "evoalign.engines.transformers:TransformersEngine",
    "vllm": "evoalign.engines.vllm:VllmEngine",
}
"""Where each engine is; imported when it is asked for."""


def create(config: Config, tokens: Tokens) -> Engine:
    """The engine a config names. Raises ModelError where the model does not load or the engine is not installed."""
    module, _, name = ENGINES[config.engine.name].partition(":")
    return getattr(importlib.import_module(module), name)(config, tokens)
