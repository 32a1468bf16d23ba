# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: event files in `<run>/logs/tensorboard`. `tensorboard --logdir runs` shows runs side by side."""

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
from evoalign.tracking.base import COMPLETIONS, Answer, Tracker, final_values, last_step, step_and_values


class TensorBoard(Tracker):
    """A scalar for each number of a row, the config and completions as text, the figures as images."""

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

    def show(self, step: int, answers: Sequence[Answer], figures: Mapping[str, Path]) -> None:
        """A table of Markdown, and images."""
        rows = ((_as_it_is(a.prompt), _as_it_is(a.completion), f"{a.reward:.4g}") for a in answers)
        self._writer.add_text(COMPLETIONS, "\n".join(table(Answer._fields, rows, words=2)), step)
        for name, file in figures.items():
            self._writer.add_image(f"figures/{name}", _pixels(file), step, dataformats="HWC")
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The measures, at the step after the last generation."""
        self._add(self._last_step(), final_values(summary))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _add(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def _as_it_is(text: str) -> str:
    """A cell of a table that TensorBoard's Markdown and its HTML leave as it is, on one line.

    All punctuation is a character reference: its Markdown knows a backslash before some characters only.
    """
    return re.sub(r"[^\w\s]", lambda found: f"&#{ord(found[0])};", visible(text))


def _pixels(file: Path) -> Any:
    """uint8 [height, width, channels]."""
    from PIL import Image  # which TensorBoard's writer needs for images in any case

    with Image.open(file) as image:
        return np.asarray(image)
