# SPDX-License-Identifier: Apache-2.0
"""Reward and cost models that score pairs of prompt and response, in this process or as a service.

`create` makes the scorer that a config names. Both kinds give one finite number a pair and column, or raise: what goes
wrong on the way is never a score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from evoalign.config.scorer import ScorerConfig


class Scorer(Protocol):
    """Scores pairs. `close` it."""

    columns: tuple[str, ...]
    """("reward",) or ("reward", "cost")."""

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Mapping[str, list[float]]:
        """One finite number of each column for each pair, in their order. Raises RewardError."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


def create(config: ScorerConfig) -> Scorer:
    """The scorer of a section `scorer`, ready to be asked. Raises ModelError, RewardError, ConfigError."""
    if config.name == "local":
        from evoalign.rewards.scorer.local import Local

        return Local(config)
    from evoalign.rewards.scorer.client import Service

    return Service(config)


def check(config: ScorerConfig) -> None:
    """Raise ModelError, ConfigError where `create` would refuse a model, as far as that is known without its weights.

    Nobody is asked: a service may start later.
    """
    if config.name == "local":
        from evoalign.rewards.scorer import models

        for column in config.columns:
            models.check(column, config)
