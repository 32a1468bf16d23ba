# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze distance`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """`base`: the base model of targets that are of no run, in place of a config."""

    base: str | None = None


class Command(Analysis[Settings]):
    """Of each target, the L2 norm of the change of its effective weights, and its share of the base model's norm."""

    name = "distance"
    help = "How far the weights are from those of the base model."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Reads files alone; raises ModelError where a target is no plain LoRA, or has other tensors than its base."""
        from evoalign.analysis.lab import shown_placebos
        from evoalign.analysis.targets import locate
        from evoalign.checks.distance import distance_of
        from evoalign.report import watching

        located = [locate(name, config, settings.base) for name in targets]
        watching.count(len(located))
        names = watching.each(target.name for target in located)
        measured = [(t, distance_of(t.weights, t.config)) for t, _ in zip(located, names, strict=True)]
        return Finding(
            {"targets": [{**t.described(), **asdict(d)} for t, d in measured]},
            [*(f"{t.weights}: the weights are {d.l2:.4g} (L2) from those of {t.config.model.name}, {d.relative:.3%} of "
               "their norm." for t, d in measured), *shown_placebos({t.name: t for t in located})],
        )  # fmt: skip
