# SPDX-License-Identifier: Apache-2.0
"""trackio, in `<run>/logs/trackio`: `TRACKIO_DIR=<run>/logs/trackio trackio show` opens its dashboard.

Nothing is sent anywhere unless the user's own TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says so; where somebody is
logged in to the Hugging Face hub, trackio asks it for their name.
"""

from __future__ import annotations

import io
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from evoalign.config import Config
from evoalign.report.tables import visible
from evoalign.tracking.base import (
    COMPLETIONS,
    Answer,
    Tracker,
    environment,
    final_values,
    last_step,
    run_name,
    step_and_values,
)


class Trackio(Tracker):
    """One trackio run, the same one after a resume. trackio's own words on standard output are swallowed."""

    def __init__(self, config: Config, run: Path, resumed_at: int | None) -> None:
        folder = (run / "logs" / "trackio").absolute()
        with environment("TRACKIO_DIR", str(folder)):
            import trackio
            from trackio import context_vars, utils
            from trackio.sqlite_storage import SQLiteStorage

        self._last_step = partial(last_step, config, run)
        self._current = context_vars.current_run
        self._before = utils.TRACKIO_DIR
        _point(folder)
        if resumed_at is not None:
            _forget(SQLiteStorage.get_project_db_path(config.tracking.project), resumed_at)
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=config.tracking.project,
                name=run_name(config, run),
                config=config.model_dump(mode="json"),
                resume="never" if resumed_at is None else "allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, row: Mapping[str, Any]) -> None:
        """One row; a thread of trackio writes it within a second."""
        step, scalars = step_and_values(row)
        self._run.log(scalars, step=step)

    def show(self, step: int, answers: Sequence[Answer], figures: Mapping[str, Path]) -> None:
        """A table and images, on its page Media; its cells are plain text."""
        import trackio

        rows = [[visible(a.prompt), visible(a.completion), a.reward] for a in answers]
        images = {f"figures/{name}": trackio.Image(file) for name, file in figures.items()}
        self._run.log({COMPLETIONS: trackio.Table([*Answer._fields], rows), **images}, step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The measures, at the step after the last generation."""
        self._run.log(final_values(summary), step=self._last_step())

    def close(self) -> None:
        """Write what is left and end the thread."""
        with redirect_stdout(io.StringIO()):
            self._run.finish()
        if self._current.get() is self._run:  # or trackio would finish it once more as Python ends
            self._current.set(None)
        _point(self._before)


def _point(folder: Path) -> None:
    """Let trackio write into a folder: it reads TRACKIO_DIR once, and each of its modules has a copy of it, or of the
    place of images in it."""
    for name, module in list(sys.modules.items()):
        for copy, place in (("TRACKIO_DIR", folder), ("MEDIA_DIR", folder / "media")):
            if name.partition(".")[0] == "trackio" and hasattr(module, copy):
                setattr(module, copy, place)


def _forget(database: Path, generation: int) -> None:
    """Take out the generations that are done again; the database is this run's own."""
    if database.is_file():
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("DELETE FROM metrics WHERE step >= ?", (generation,))
