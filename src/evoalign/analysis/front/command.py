# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze front`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """`examples` of the test split are answered, `samples` times where there is a `temperature` (None: as the config's
    evaluation says), and each again at temperature 1 until there are `tokens` tokens for the KL. `last` leaves out what
    a run saved on its way."""

    examples: int = 64
    samples: int = 1
    temperature: float | None = None
    tokens: int = 2000
    last: bool = False


class Command(Analysis[Settings]):
    """Reward and KL(target || base) of every mean that runs saved, and of other targets; who earns more at less KL.

    Gao, Schulman and Hilton (arXiv 2210.10760) draw rewards over the distance from the start so. Each point is loaded
    by itself, beside its base model.
    """

    name = "front"
    help = "Reward against KL from the base model, over the saved means of runs, and which of them no other beats."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Raises EvoalignError where a target does not load, or is of another task than the first."""
        from evoalign.analysis.front.compute import front

        return front(targets, settings, config)
