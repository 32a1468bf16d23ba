# SPDX-License-Identifier: Apache-2.0
"""Engines by name: where the weights live and text comes from."""

from __future__ import annotations

from evoalign.config import Config
from evoalign.engines.base import ABSENT, Engine, weights_hash
from evoalign.tokens import Tokens

__all__ = ["ABSENT", "Engine", "create", "weights_hash"]


def create(config: Config, tokens: Tokens) -> Engine:
    """The engine a config names. Raises ModelError where the model does not load."""
    from evoalign.engines.transformers import TransformersEngine

    return TransformersEngine(config, tokens)
