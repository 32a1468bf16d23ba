# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze divergence`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """`prompts`: of the test split, how many are answered, each again until there are so many `tokens`."""

    prompts: int = 32
    tokens: int = 2000


class Command(Analysis[Settings]):
    """Of each target, KL(target || base model), on the test split at temperature 1, with intervals over prompts."""

    name = "divergence"
    help = "How much the text differs from the base model's: KL in nats a token and a completion, on the test split."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads each model and its base; raises EvoalignError where one does not load or nothing is generated."""
        from evoalign.analysis.divergence.compute import divergence_of
        from evoalign.analysis.targets import locate

        found = [locate(name, config) for name in targets]
        measured = [(t, divergence_of(t, settings.prompts, settings.tokens)) for t in found]
        return Finding(
            {**asdict(settings), "targets": [{**t.described(), **asdict(d)} for t, d in measured]},
            [f"{t.weights}: KL from {t.config.model.name} is {d}, {d.tokens:,} tokens (summed over the vocabulary; by "
             f"draws k1 {d.k1:.4g}, k3 {d.k3:.4g} a token)." for t, d in measured],
        )  # fmt: skip
