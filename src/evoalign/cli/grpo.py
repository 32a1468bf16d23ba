# SPDX-License-Identifier: Apache-2.0
"""`evoalign grpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug, More, Sets, quiet
from evoalign.cli.resolving import resolved


def grpo(
    config: Annotated[Path, typer.Argument(help="A YAML config; with --resume, also a run directory.")],
    more: More = None,
    set_: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run there, or begin it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Rename the existing run and start afresh.")] = False,
    evaluate_every: Annotated[
        int | None, typer.Option(min=0, help="Evaluate the policy each so many steps; 0: never.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")] = False,
    debug: Debug = False,
) -> None:
    """Train the GRPO baseline on the same task, and compare the test split before and after."""
    from evoalign.config import to_yaml

    sets = [*(set_ or []), *([f"evaluation.every={evaluate_every}"] if evaluate_every is not None else [])]
    found = resolved("grpo", config, more or [], sets, resume=resume, overwrite=overwrite)
    quiet()
    if dry_run:
        from evoalign.baselines import planning

        lines = planning.dry_run(found, overwrite=overwrite, resume=resume)
        typer.echo(to_yaml(found) + "\n" + "\n".join(lines))
        return
    from evoalign.baselines import train as baseline

    baseline.grpo(found, resume=resume, overwrite=overwrite)
