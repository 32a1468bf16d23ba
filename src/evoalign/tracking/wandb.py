# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, under `<run>/logs/wandb`.

`wandb login`, WANDB_MODE=offline and the other variables of wandb decide where data is sent. Code, git state and
console output are never sent. wandb cannot go back a step: for a generation that a resumed run repeats, it keeps the
first values.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from evoalign.config import Config
from evoalign.report.tables import visible
from evoalign.rundir.files import write_text
from evoalign.tracking.base import (
    COMPLETIONS,
    DISTRIBUTION,
    Answer,
    Ready,
    Tracker,
    environment,
    final_values,
    last_step,
    run_name,
    step_and_values,
)

CACHE, DATA = "WANDB_CACHE_DIR", "WANDB_DATA_DIR"


@contextmanager
def hidden() -> Generator[None]:
    """Keep other libraries from importing wandb: its import makes temporary folders, which a killed run leaves."""
    if "wandb" in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules["wandb"] = None  # "not installed", for imports and for importlib.util.find_spec
    try:
        yield
    finally:
        del modules["wandb"]


class WeightsAndBiases(Tracker):
    """Writes to one W&B run, also after a resume: its id is in `<run>/logs/wandb_id`."""

    def __init__(self, config: Config, run: Path, resumed_at: int | None) -> None:
        import wandb

        self._logs = logs = run / "logs"
        self._wandb, self._last_step = wandb, partial(last_step, config, run)
        # A run that the user has open shares wandb's process, and continues after this one.
        self._alone = wandb.run is None
        cache = os.environ.get(CACHE) or (str(logs.absolute() / "wandb" / "cache") if self._alone else None)
        with environment(CACHE, cache):
            self._run = wandb.init(
                project=config.tracking.project,
                name=run_name(config, run),
                id=_run_id(logs / "wandb_id", resumed_at),
                resume="allow",
                dir=str(logs),
                config=config.model_dump(mode="json"),
                reinit="create_new",
                settings=wandb.Settings(console="off", disable_code=True, disable_git=True),
            )
        self._exit_code = 1

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row at once."""
        step, scalars = step_and_values(row)
        self._run.log(scalars, step=step, commit=True)

    def distribute(self, step: int, columns: Mapping[str, Sequence[float]]) -> None:
        """Record a histogram of each reward; it is sent with the row of that step."""
        found = {f"{DISTRIBUTION}/{name}": self._wandb.Histogram(values) for name, values in columns.items()}
        self._run.log(found, step=step, commit=False)

    def show(self, step: int, answers: Sequence[Answer], figures: Mapping[str, Path]) -> None:
        """Record a table, with plain text cells, and images; they are sent with the row of that step."""
        rows = [[visible(a.prompt), visible(a.completion), a.reward] for a in answers]
        images = {f"figures/{name}": self._wandb.Image(str(file)) for name, file in figures.items()}
        shown: dict[str, Any] = {COMPLETIONS: self._wandb.Table(columns=[*Answer._fields], data=rows), **images}
        with environment(DATA, os.environ.get(DATA) or str((self._logs / "wandb" / "cache").absolute())):
            self._run.log(shown, step=step, commit=False)  # writes the table there before sending it

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the measures at the step after the last generation, which is the run's summary."""
        self._run.log(final_values(summary), step=self._last_step(), commit=True)
        self._exit_code = 0

    def close(self) -> None:
        """Finish the run, as failed if it was interrupted, and end wandb's process unless another run uses it."""
        try:
            self._run.finish(exit_code=self._exit_code)
        finally:
            if self._alone and self._wandb.run is None:
                self._wandb.teardown()

    @classmethod
    def ready(cls) -> Ready:
        """Return whether W&B can start without a prompt. Nothing is sent, so the key is not verified."""
        import wandb

        try:
            with environment("WANDB_SILENT", "true"):
                mode = wandb.setup().settings.mode
                if mode == "disabled":
                    fix = "unset WANDB_MODE, or take wandb out of tracking.backends"
                    return Ready("warning", "wandb is disabled and records nothing", fix)
                if mode in ("offline", "dryrun"):
                    return Ready("ok", "wandb is offline: `wandb sync` sends the run later")
                if wandb.login(prompt=False, verify=False):
                    return Ready("ok", "wandb has a key, which was not verified")
        finally:
            if wandb.run is None:
                wandb.teardown()
        fix = "log in with `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        return Ready("failed", "wandb is online and has no key", fix)


def _run_id(file: Path, resumed_at: int | None) -> str:
    """Return the stored id, or store a new one."""
    if resumed_at is not None and file.is_file():
        return file.read_text(encoding="utf-8").strip()
    own = uuid.uuid4().hex
    write_text(file, own + "\n")
    return own
