# SPDX-License-Identifier: Apache-2.0
"""`evoalign train`."""

from __future__ import annotations

from typing import Annotated

import typer

from evoalign.cli.options import Debug, DryRun, Given, More, Overwrite, Resume, Sets, quiet
from evoalign.cli.resolving import resolved


def train(
    config: Given,
    more: More = None,
    set_: Sets = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    evaluate_every: Annotated[
        int | None, typer.Option(min=0, help="Evaluate the mean each so many generations; 0: never.")
    ] = None,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Train, and compare the test split before and after."""
    from evoalign.config import to_yaml

    found = resolved("es", config, more or [], set_ or [], evaluate_every, resume=resume, overwrite=overwrite)
    quiet()
    from evoalign.training import train as training

    if dry_run:
        lines = training.dry_run(found, overwrite=overwrite, resume=resume)
        typer.echo(to_yaml(found) + "\n" + "\n".join(lines))
        return
    training.train(found, overwrite=overwrite, resume=resume)
