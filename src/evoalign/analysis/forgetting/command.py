# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze forgetting`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """`tasks`: a config file for each task that is asked. `examples` of its test split; `measure` None: accuracy where
    the task has it, else the reward.

    `text`: a file of held-out text in UTF-8, cut into pieces of `window` tokens, `pieces` of them; None: the prompts of
    the first so many test examples of what a target was trained on. `placebos`: how often the journal of a run of ES is
    followed to its end with shuffled coefficients, and asked the same.
    """

    tasks: tuple[Path, ...] = ()
    text: Path | None = None
    examples: int = 100
    measure: str | None = None
    pieces: int = 64
    window: int = 128
    placebos: int = 5


class Command(Analysis[Settings]):
    """Perplexity of held-out text and accuracy on tasks not trained on, over the saved checkpoints and the base model.

    Beside the placebos of runs of ES, which say what noise alone forgets.
    """

    name = "forgetting"
    help = "Perplexity of held-out text and accuracy on other tasks, over checkpoints, beside placebos."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads the base model and the weights of one point at a time. Raises EvoalignError."""
        from evoalign.analysis.forgetting.compute import forgetting

        return forgetting(targets, settings, config)
