# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: event files in `<run>/logs/tensorboard`. `tensorboard --logdir runs` shows runs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from evoalign.config import Config, to_yaml
from evoalign.tracking.base import Tracker, last_step, step_and_values, values


class TensorBoard(Tracker):
    """A scalar for each number of a row, and the config as text."""

    def __init__(self, config: Config, run: Path, resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._last_step = partial(last_step, config, run)
        # The purge hides what an earlier part of the run logged of the generations that are done again.
        self._writer = SummaryWriter(str(run / "logs" / "tensorboard"), purge_step=resumed_at)
        if resumed_at is None:
            self._writer.add_text("config", f"```\n{to_yaml(config)}```", 0)
            self._writer.flush()

    def log(self, row: Mapping[str, Any]) -> None:
        """One row; on disk when this returns, so that a curve is never behind the run."""
        self._add(*step_and_values(row))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The measures, at the step after the last generation."""
        self._add(self._last_step(), values(summary))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _add(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
