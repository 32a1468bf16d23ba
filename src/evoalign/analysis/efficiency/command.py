# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze efficiency`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """`measure` of the test split; None: what all runs were trained for. `names`: label of a group to a pattern.

    `threshold` is what it has to reach, from whichever side the start is; None: half-way from the mean start to the
    best mean end of a group, which is known after the runs alone.
    """

    measure: str | None = None
    threshold: float | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])


class Command(Analysis[Settings]):
    """Completions, tokens, seconds and FLOPs of training until the mean model reaches a threshold on the test split.

    By group of seeds, as `evoalign compare` makes them; runs that never reach it count as that, not as left out. And
    the variance of the ends between seeds, and its ratio between groups. Reads files and runs nothing.
    """

    name = "efficiency"
    help = "What training takes to reach a threshold, by group of seeds; the variance between seeds and its ratio."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Every run has its own config. Raises ConfigError where runs cannot be compared."""
        from evoalign.analysis.efficiency.compute import efficiency

        return efficiency(targets, settings)
