# SPDX-License-Identifier: Apache-2.0
"""The config that a training command was given: a file, or with --resume the directory of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evoalign.cli.options import quiet
from evoalign.errors import ConfigError

if TYPE_CHECKING:
    from evoalign.config import Config
    from evoalign.rundir.method import Method


def resolved(
    method: Method,
    config: Path,
    more: Sequence[Path],
    sets: Sequence[str],
    every: int | None,
    *,
    resume: bool,
    overwrite: bool,
) -> Config:
    """The checked config, its output_dir where the run is now. `every` sets evaluation.every. Raises ConfigError."""
    from evoalign.config import load
    from evoalign.rundir.method import COMMANDS

    sets = [*sets, *([f"evaluation.every={every}"] if every is not None else [])]
    if resume and overwrite:
        raise ConfigError("--resume resumes a run and --overwrite moves it aside: give one of them")
    moved = _run_of(config) if resume else None
    if moved is not None or config.is_dir():
        quiet()
        from evoalign.rundir.method import refuse_other, resume_command

        if moved is not None:
            refuse_other(moved, method)
        elif not resume and _run_of(config):
            raise ConfigError(f"{config} is a run directory; resume with: {resume_command(config)}")
    if config.is_dir():
        if resume and not (config / "config.yaml").is_file():
            raise ConfigError(f"{config} has no config.yaml; give the config that the run was made with")
        if moved is not None:
            _refuse_unasked(
                config, f"give its config itself: evoalign {COMMANDS[method]} {config / 'config.yaml'} --resume"
            )
        config = config / "config.yaml" if resume else config
    found = load([config, *more], sets)
    if moved is not None and not any(text.startswith("output_dir=") for text in sets):
        found = found.model_copy(update={"output_dir": str(moved)})
    return found


def _refuse_unasked(run: Path, fix: str) -> None:
    """Raise ConfigError where the config of a run that may come from anywhere names code, or TRL is to reach out."""
    from evoalign.config.grpo import asked
    from evoalign.training.resolve import of_run

    names = asked(of_run(run, fix).grpo)
    if names:
        raise ConfigError(f"{run} sets {', '.join(names)}, which is not done unasked; if you trust it, {fix}")


def _run_of(config: Path) -> Path | None:
    """The run directory that a path names, or whose config.yaml it is, wherever it has been moved to."""
    from evoalign.rundir.method import is_run

    folder = config if config.is_dir() else config.parent
    inside = config.is_dir() or config.name == "config.yaml"
    return folder if inside and is_run(folder) else None
