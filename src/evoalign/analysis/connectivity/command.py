# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze connectivity`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """`points` from one end of a line to the other, both counted, and as close to each other beyond: to `low`, `high`.

    `sigma` above 0: also the reward in the mean over so wide a noise on all weights, of `trials` draws. `plane` above
    0: also that many by that many points of the plane through the first three targets. `examples` of the test split are
    answered `samples` times (with a temperature); `tokens` and `temperature` None: those of the config's evaluation.
    `kl`: whether the divergence from the base model is measured, which takes another answer to each example. `seed` is
    that of the noise on weights.
    """

    points: int = 21
    low: float = -0.5
    high: float = 1.5
    sigma: float = 0.0
    trials: int = 8
    plane: int = 0
    examples: int = 100
    samples: int = 1
    tokens: int | None = None
    temperature: float | None = None
    kl: bool = True
    seed: int = 0


class Command(Analysis[Settings]):
    """Reward, KL and hacked share along the straight lines between the weights of every two targets, and beyond.

    Adapters are merged before weights are interpolated; `base` is the model that the targets started from.
    """

    name = "connectivity"
    help = "Reward along straight lines between models, and whether there is a barrier; a plane through three."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads one model, which takes the weights of every point; raises EvoalignError for targets that do not fit."""
        from evoalign.analysis.connectivity.compute import connectivity

        return connectivity(targets, settings, config)
