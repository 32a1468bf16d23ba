# SPDX-License-Identifier: Apache-2.0
"""trackio, in `<run>/logs/trackio`: `TRACKIO_DIR=<run>/logs/trackio trackio show` opens its dashboard.

Nothing is sent unless you set TRACKIO_SPACE_ID or TRACKIO_SERVER_URL. If you are logged in to the Hugging Face hub,
trackio requests your user name from it.
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
    DISTRIBUTION,
    Answer,
    Tracker,
    environment,
    final_values,
    last_step,
    run_name,
    step_and_values,
)


class Trackio(Tracker):
    """Writes to one trackio run, also after a resume. trackio's own output is suppressed."""

    def __init__(self, config: Config, run: Path, resumed_at: int | None) -> None:
        folder = (run / "logs" / "trackio").absolute()
        with environment("TRACKIO_DIR", str(folder)):
            import trackio
            from trackio import context_vars, utils
            from trackio.sqlite_storage import SQLiteStorage

        self._last_step = partial(last_step, config, run)
        self._current = context_vars.current_run
        self._before = utils.TRACKIO_DIR
        _set_folder(folder)
        if resumed_at is not None:
            _delete_from(SQLiteStorage.get_project_db_path(config.tracking.project), resumed_at)
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
        """Record a row; a thread of trackio writes it within a second."""
        step, scalars = step_and_values(row)
        self._run.log(scalars, step=step)

    def distribute(self, step: int, columns: Mapping[str, Sequence[float]]) -> None:
        """Record a histogram of each reward."""
        import trackio

        found = {f"{DISTRIBUTION}/{name}": trackio.Histogram(values) for name, values in columns.items()}
        self._run.log(found, step=step)

    def show(self, step: int, answers: Sequence[Answer], figures: Mapping[str, Path]) -> None:
        """Record a table, with plain text cells, and images; they are on the page Media."""
        import trackio

        rows = [[visible(a.prompt), visible(a.completion), a.reward] for a in answers]
        images = {f"figures/{name}": trackio.Image(file) for name, file in figures.items()}
        self._run.log({COMPLETIONS: trackio.Table([*Answer._fields], rows), **images}, step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the measures at the step after the last generation."""
        self._run.log(final_values(summary), step=self._last_step())

    def close(self) -> None:
        """Flush and end the thread."""
        with redirect_stdout(io.StringIO()):
            self._run.finish()
        if self._current.get() is self._run:  # else trackio would finish it again at exit
            self._current.set(None)
        _set_folder(self._before)


def _set_folder(folder: Path) -> None:
    """Set the folder of trackio in all its modules, which copied TRACKIO_DIR or the folder of images on import."""
    for name, module in list(sys.modules.items()):
        for copy, place in (("TRACKIO_DIR", folder), ("MEDIA_DIR", folder / "media")):
            if name.partition(".")[0] == "trackio" and hasattr(module, copy):
                setattr(module, copy, place)


def _delete_from(database: Path, generation: int) -> None:
    """Delete the generations that a resumed run repeats from its own database."""
    if database.is_file():
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("DELETE FROM metrics WHERE step >= ?", (generation,))
