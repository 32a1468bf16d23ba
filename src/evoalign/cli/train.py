# SPDX-License-Identifier: Apache-2.0
"""`evoalign train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug, More, Sets, quiet
from evoalign.cli.resolving import resolved


def train(
    config: Annotated[Path, typer.Argument(help="A YAML config; with --resume, also a run directory.")],
    more: More = None,
    set_: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run there, or begin it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Rename the existing run and start afresh.")] = False,
    evaluate_every: Annotated[
        int | None, typer.Option(min=0, help="Evaluate the mean each so many generations; 0: never.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")] = False,
    debug: Debug = False,
) -> None:
    """Train, and compare the test split before and after."""
    from evoalign.config import to_yaml

    sets = [*(set_ or []), *([f"evaluation.every={evaluate_every}"] if evaluate_every is not None else [])]
    found = resolved("train", config, more or [], sets, resume=resume, overwrite=overwrite)
    quiet()
    from evoalign.training import train as training

    if dry_run:
        lines = training.dry_run(found, overwrite=overwrite, resume=resume)
        typer.echo(to_yaml(found) + "\n" + "\n".join(lines))
        return
    training.train(found, overwrite=overwrite, resume=resume)
