# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze similarity`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config

Threshold = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Settings:
    """`base`: the base model of targets without a run, in place of a config.

    `placebos`: number of placebos that are made of each run of ES from its journal, and measured too. `spectrum`:
    whether to compute singular values and directions. `absolute` and `relative`: thresholds at or below which a change
    is counted, the latter relative to the root mean square of the base's tensor. `ranks`: to which the change of each
    matrix is cut, to evaluate how much of the gain that keeps.
    """

    base: str | None = None
    placebos: Annotated[int, Field(ge=0, le=1000)] = 0
    spectrum: bool = True
    absolute: tuple[Threshold, ...] = (0.0, 1e-5, 1e-4, 1e-3)
    relative: tuple[Threshold, ...] = (1e-3, 1e-2, 1e-1)
    ranks: tuple[Annotated[int, Field(ge=1)], ...] = ()


class Similarity(Analysis[Settings]):
    """Cosine and common subspaces of all pairs of changes; size, rank and sparsity of each change, by part."""

    name = "similarity"
    help = "Whether trainings changed the same weights in the same direction; norm, rank and sparsity of the changes."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Reads files only, except for `placebos` and `ranks`, which load the model.

        Raises EvoalignError; ModelError names a tensor that is missing or has another shape.
        """
        from evoalign.analysis.similarity.chance import gains_kept, placebos_of
        from evoalign.analysis.similarity.measures import measure
        from evoalign.analysis.similarity.results import finding
        from evoalign.analysis.targets import locate
        from evoalign.analysis.weights import read
        from evoalign.report import watching

        located = [locate(name, config, settings.base) for name in targets]
        with TemporaryDirectory(prefix="evoalign-placebos-") as folder:
            columns: dict[int, list[int]] = {}
            every = list(located)
            for k, target in enumerate(located):
                seeds = range(k * settings.placebos, (k + 1) * settings.placebos)  # other shuffles for each target
                watching.stage(f"{target.name}, placebos")
                if made := placebos_of(target, seeds, Path(folder) / str(k)):
                    columns[k] = list(range(len(every), len(every) + len(made)))
                    every += made
            weights = read(every)
            found = measure(weights, settings.absolute, settings.relative, spectra=settings.spectrum)
            own = [[weights[i] for i in (k, *columns.get(k, ()))] for k in range(len(located))]
            kept = [gains_kept(one, settings.ranks) for one in own] if settings.ranks else []
        limits = {"absolute": settings.absolute, "relative": settings.relative}
        return finding(weights[: len(located)], found, columns, kept, limits)
