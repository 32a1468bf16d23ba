# SPDX-License-Identifier: Apache-2.0
"""Reward and cost models that score pairs of prompt and response, in this process or as a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from evoalign.config.scorer import ScorerConfig


class Scorer(Protocol):
    """Scores pairs of prompt and response. Close it after use."""

    columns: tuple[str, ...]
    """("reward",) or ("reward", "cost")."""

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Mapping[str, list[float]]:
        """Return one finite number per column and pair, in order. Raises RewardError."""
        ...

    def close(self) -> None:
        """Free models and connections."""
        ...


def create(config: ScorerConfig) -> Scorer:
    """Create the scorer of a section `scorer`. Raises ModelError, RewardError, ConfigError."""
    if config.name == "local":
        from evoalign.rewards.scorer.models import Local

        return Local(config)
    from evoalign.rewards.scorer.client import Service

    return Service(config)


def check(config: ScorerConfig) -> None:
    """Raise ModelError, ConfigError if `create` would reject a model, without reading weights.

    A service is not contacted: it may start later.
    """
    if config.name == "local":
        from evoalign.rewards.scorer import models

        for column in config.columns:
            models.check(column, config)
