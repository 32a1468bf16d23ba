# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze robustness`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """The defaults are those that were published: three widths, 8 draws of noise, 20 answers of at most 128 tokens.

    `sigma`: standard deviations of the noise, of the weights as they are. `trials`: draws of it. `examples` of the test
    split are answered `samples` times (with a temperature) in at most `tokens` tokens; `temperature` None: that of the
    config's evaluation. `parts`: all, unembedding, embeddings, attention, mlp, "layer 3", or layers for each of them.
    `kl`: whether the divergence is measured, which takes another answer to each example. `seed` is that of the noise.
    """

    sigma: tuple[float, ...] = (0.005, 0.01, 0.05)
    trials: int = 8
    examples: int = 20
    samples: int = 1
    tokens: int = 128
    temperature: float | None = None
    parts: tuple[str, ...] = ("all", "unembedding", "embeddings", "attention", "mlp")
    kl: bool = True
    seed: int = 0


class Command(Analysis[Settings]):
    """Reward, hacked share and KL to the unperturbed self under Gaussian noise on the weights, all or a part of them.

    The same noise is put on every target, so that their differences are paired; `base` is the model they started from.
    """

    name = "robustness"
    help = "Reward under random noise on the weights: of the whole model, and of one part at a time."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads one model, which takes the weights of every target; raises EvoalignError for one that does not fit."""
        from evoalign.analysis.robustness.compute import robustness

        return robustness(targets, settings, config)
