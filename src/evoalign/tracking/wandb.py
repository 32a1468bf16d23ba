# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, under `<run>/logs/wandb`.

Where it sends anything is the user's own doing: `wandb login`, WANDB_MODE=offline and the other variables of wandb
hold. Neither code, git state nor the console is handed over. wandb cannot take a step back: of a generation that is
done again after a resume it keeps the values it was given first.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evoalign.config import Config
from evoalign.rundir.files import write_text
from evoalign.tracking.base import Ready, Tracker, environment, run_name, step_and_values, values

CACHE = "WANDB_CACHE_DIR"


class WeightsAndBiases(Tracker):
    """One W&B run, the same one after a resume: its id is kept in `<run>/logs/wandb_id`."""

    def __init__(self, config: Config, run: Path, resumed_at: int | None) -> None:
        import wandb

        logs = run / "logs"
        self._wandb = wandb
        # A run that the user has open shares wandb's process with ours, and goes on after it.
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
        """One row, sent on at once."""
        step, scalars = step_and_values(row)
        self._run.log(scalars, step=step, commit=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The measures, in the run's summary."""
        self._run.summary.update(values(summary))
        self._exit_code = 0

    def close(self) -> None:
        """Finish the run, as failed where it was cut short, and end wandb's process where nobody else uses it."""
        try:
            self._run.finish(exit_code=self._exit_code)
        finally:
            if self._alone and self._wandb.run is None:
                self._wandb.teardown()

    @classmethod
    def ready(cls) -> Ready:
        """Whether W&B would start without asking; nothing is sent, so that a key may still be refused."""
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
                    return Ready("ok", "wandb has a key, which was not tried")
        finally:
            if wandb.run is None:
                wandb.teardown()
        fix = "log in with `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        return Ready("failed", "wandb is online and has no key", fix)


def _run_id(file: Path, resumed_at: int | None) -> str:
    """The id that was written down, or a new one."""
    if resumed_at is not None and file.is_file():
        return file.read_text(encoding="utf-8").strip()
    own = uuid.uuid4().hex
    write_text(file, own + "\n")
    return own
