# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze distance`: how far a model's weights are from those of its base model.

Training measures it too, with `evoalign.checks.distance`; the names of that module are importable from here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evoalign.analysis.base import Analysis, Finding, row
from evoalign.report import watching

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """`base`: the base model of targets without a run, in place of a config."""

    base: str | None = None


class DistanceAnalysis(Analysis[Settings]):
    """The L2 norm of the change of each target's effective weights, and its ratio to the base model's norm."""

    name = "distance"
    help = "How far the weights are from those of the base model."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Reads files only; raises ModelError for an adapter that is no plain LoRA, or for other tensors."""
        from evoalign.analysis.targets import locate, placebo_hint
        from evoalign.checks.distance import distance_of

        located = {name: locate(name, config, settings.base) for name in targets}
        watching.count(len(located))
        rows: list[dict[str, Any]] = []
        lines: list[str] = []
        for target, _ in zip(located.values(), watching.each(located), strict=True):
            found = distance_of(target.weights, target.config)
            rows.append({**target.described(), **asdict(found)})
            cells = {"L2 distance": f"{found.l2:.4g}", "of the base's norm": f"{found.relative:.3%}"}
            lines.append(row(str(target.weights), {**cells, "base": target.config.model.name}))
        return Finding({"targets": rows}, [*lines, *placebo_hint(located)])


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("evoalign.checks.distance"), name)
