# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze similarity`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config

Threshold = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Settings:
    """`base`: the base model of targets that are of no run, in place of a config.

    `placebos` of each run of ES are made from its journal and compared, too. `spectrum`: whether singular values and
    directions are taken. Entries are counted whose change is at most `absolute`, and `relative` to the root mean square
    of the base's tensor. `ranks`: to which the change of each matrix is cut, and the model asked how much of the gain
    that keeps.
    """

    base: str | None = None
    placebos: Annotated[int, Field(ge=0, le=1000)] = 0
    spectrum: bool = True
    absolute: tuple[Threshold, ...] = (0.0, 1e-5, 1e-4, 1e-3)
    relative: tuple[Threshold, ...] = (1e-3, 1e-2, 1e-1)
    ranks: tuple[Annotated[int, Field(ge=1)], ...] = ()


class Command(Analysis[Settings]):
    """Of all pairs of changes cosine and common subspaces; of each its size, rank and sparsity, by part."""

    name = "similarity"
    help = "Whether trainings changed the same weights in the same direction; norm, rank and sparsity of the changes."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Reads files alone, but for `placebos` and `ranks`, which load the model.

        Raises EvoalignError, and of that ModelError naming the tensor where one is missing or of another shape.
        """
        from evoalign.analysis.similarity.finding import similarity

        return similarity(targets, settings, config)
