# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: event files in `<run>/logs/tensorboard`. Show all runs with `tensorboard --logdir runs`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evoalign.config import Config, to_yaml
from evoalign.report.tables import markdown_table as table
from evoalign.report.tables import visible
from evoalign.tracking.base import COMPLETIONS, DISTRIBUTION, Answer, Tracker, final_values, last_step, step_and_values


class TensorBoard(Tracker):
    """Writes numbers as scalars, the config and completions as text, and figures as images."""

    def __init__(self, config: Config, run: Path, resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._last_step = partial(last_step, config, run)
        # The purge hides earlier values of generations that a resumed run repeats.
        self._writer = SummaryWriter(str(run / "logs" / "tensorboard"), purge_step=resumed_at)
        if resumed_at is None:
            self._writer.add_text("config", f"```\n{to_yaml(config)}```", 0)
            self._writer.flush()

    def log(self, row: Mapping[str, Any]) -> None:
        """Write a row and flush it, so that curves are never behind the run."""
        self._add(*step_and_values(row))

    def distribute(self, step: int, columns: Mapping[str, Sequence[float]]) -> None:
        """Write a histogram of each reward."""
        for name, values in columns.items():
            self._writer.add_histogram(f"{DISTRIBUTION}/{name}", np.asarray(values), step)

    def show(self, step: int, answers: Sequence[Answer], figures: Mapping[str, Path]) -> None:
        """Write completions as a Markdown table, and images."""
        from PIL import Image  # required by TensorBoard's writer for images

        rows = ((_escape(a.prompt), _escape(a.completion), f"{a.reward:.4g}") for a in answers)
        self._writer.add_text(COMPLETIONS, "\n".join(table(Answer._fields, rows, words=2)), step)
        for name, file in figures.items():
            with Image.open(file) as image:
                self._writer.add_image(f"figures/{name}", np.asarray(image), step, dataformats="HWC")
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the measures at the step after the last generation."""
        self._add(self._last_step(), final_values(summary))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _add(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def _escape(text: str) -> str:
    """Return a text on one line that TensorBoard's Markdown and HTML show literally.

    All punctuation becomes character references: its Markdown supports a backslash before some characters only.
    """
    return re.sub(r"[^\w\s]", lambda found: f"&#{ord(found[0])};", visible(text))
