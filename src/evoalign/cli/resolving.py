# SPDX-License-Identifier: Apache-2.0
"""Config of a training command: a file, or with --resume a run directory. Output of its `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from evoalign.cli.options import quiet
from evoalign.errors import ConfigError

if TYPE_CHECKING:
    from evoalign.config import Config
    from evoalign.rundir.method import Method

REFUSED = "would be refused"
LAST = ("warning", "note")
"""How lines begin that a user should act on."""


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
    """Return the validated config; `every` sets evaluation.every. Raises ConfigError."""
    sets = [*sets, *([f"evaluation.every={every}"] if every is not None else [])]
    if resume and overwrite:
        raise ConfigError("--resume resumes a run and --overwrite moves it aside: give one of them")
    moved = run_of(config) if resume else None
    if moved is not None or config.is_dir():
        quiet()
        from evoalign.rundir.method import refuse_other, resume_command

        if moved is not None:
            refuse_other(moved, method)
        elif not resume and run_of(config):
            raise ConfigError(f"{config} is a run directory; resume with: {resume_command(config)}")
    if resume and config.is_dir() and not (config / "config.yaml").is_file():
        raise ConfigError(f"{config} has no config.yaml; give the config that the run was made with")
    return given(config, more, sets)


def given(config: Path, more: Sequence[Path], sets: Sequence[str]) -> Config:
    """Load a config overridden by others. A run's own config may not name files or code outside it: `load_own`."""
    from evoalign.config import load
    from evoalign.rundir.own import load_own

    run = run_of(config)
    return load([config, *more], sets) if run is None else load_own(run, more, sets)


def run_of(config: Path) -> Path | None:
    """Return the run directory that a path names, or whose config.yaml it is; None for another path."""
    from evoalign.rundir.method import is_foreign, is_run

    folder = config if config.is_dir() else config.parent
    inside = config.is_dir() or config.name == "config.yaml"
    return folder if inside and is_run(folder) and not is_foreign(folder) else None


def show_plan(config: Config, method: Method, lines: Sequence[str], *, everything: bool) -> None:
    """Print a refusal, the config as YAML, and the lines, warnings last. Exit with code 2 if the run would be refused.

    Without `everything` only settings that differ from their defaults, of sections that the method reads, are shown:
    config and lines should fit one screen.
    """
    from evoalign.config import to_yaml

    refused = list(dict.fromkeys(line for line in lines if line.startswith(REFUSED)))
    if refused:
        typer.echo("\n".join(refused) + "\n")
    lines = [line for line in lines if line not in refused]
    left_out = [] if everything else config.unused(grpo=method == "grpo")
    typer.echo(to_yaml(config, without=left_out, changed=not everything), nl=False)
    if not everything:
        typer.echo(f"# --all shows the defaults, and the sections that are not used ({', '.join(left_out)})")
    typer.echo("\n" + "\n".join(sorted(lines, key=lambda line: line.startswith(LAST))))
    if refused:
        raise typer.Exit(2)
