# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze trajectory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """`points`: steps of equal length into which the generations of a run are cut, at most; 0: each generation is one.

    `placebos`: how often a run of ES is followed with shuffled coefficients, seeds 0, 1, ...; that of seed 0 stands on
    the map, too. `members` of each of `drawn` generations stand on it as well, those of the lowest numbers.
    """

    points: int = 40
    placebos: int = 20
    members: int = 4
    drawn: int = 3


class Command(Analysis[Settings]):
    """The means of runs of ES, rebuilt from the journal, what GRPO saved, and single models, in one space of weights.

    A map of all by principal components; of each run of ES its distance from the start, how its steps are aligned, and
    how much of its movement is more than that of its placebos.
    """

    name = "trajectory"
    help = "The path through the weights: a map, distance and direction of steps, beside random walks."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads the base model once, and of paths a block of one tensor at a time. Raises EvoalignError."""
        from evoalign.analysis.trajectory.compute import trajectory

        return trajectory(targets, settings, config)
