# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze hacking`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """Of targets that are asked, which are all but whole runs, and with a config those too: how many `examples`
    of the test split (None: all).

    `samples`, `tokens` and `temperature` None: those of the config's evaluation.
    """

    examples: int | None = None
    samples: int | None = None
    tokens: int | None = None
    temperature: float | None = None


class Command(Analysis[Settings]):
    """Shares of completions that show each sign of `evoalign.checks.hacking`, before training and after it.

    Of a run the stored completions of the test split are read. A saved mean, a model's folder or an adapter is asked,
    and so is the base model that it started from; with a config a run is, too, as that config says.
    """

    name = "hacking"
    help = "Shares of empty, broken, repeated, cut-off and template completions, and of rewards earned with gold wrong."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads a model only where one is asked; raises EvoalignError for a run without its completions."""
        from evoalign.analysis.hacking.compute import hacking

        return hacking(targets, settings, config)
