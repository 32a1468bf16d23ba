# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze coverage`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """Each of `examples` of the test split is tried `samples` times in each way, in at most `tokens` tokens.

    A way is one of `temperature`, or one of `sigma`: another draw of Gaussian noise of that width on all weights at
    each try, which then decodes at `noisy_temperature` (0 is greedy). pass@k is told for each of `k` up to `samples`.
    `solved`: the reward from which a completion counts as solved; None: where it is right by gold, and of a task
    without gold from the largest reward on. `tokens` None: those of the config's evaluation. `seed` is that of both
    kinds of draws.
    """

    temperature: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
    sigma: tuple[float, ...] = (0.0005, 0.001, 0.003, 0.005, 0.01)
    noisy_temperature: float = 0.0
    samples: int = 32
    k: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    examples: int = 16
    tokens: int | None = None
    solved: float | None = None
    seed: int = 0


class Command(Analysis[Settings]):
    """pass@k by temperature and by noise on the weights, at equal numbers of samples; what targets solve in common.

    `base`, the model that the targets started from, is always asked: what they no longer solve and what they solve
    anew is told against it, beside what other samples of the base itself would show.
    """

    name = "coverage"
    help = "pass@k by temperature and by weight noise, which problems who solves, and how varied the answers are."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads one model, which takes the weights of every target; raises EvoalignError for one that does not fit."""
        from evoalign.analysis.coverage.compute import coverage

        return coverage(targets, settings, config)
