# SPDX-License-Identifier: Apache-2.0
"""`evoalign replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug, quiet, say


def replay(
    run: Annotated[Path, typer.Argument(help="A run directory, or a journal.jsonl by itself.")],
    generation: Annotated[
        int | None, typer.Option("--generation", "-g", min=0, help="After so many generations; default: all.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Save the mean in this new folder.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the base model is now.")] = None,
    debug: Debug = False,
) -> None:
    """Rebuild the mean from the base model and the journal alone, and check its hash."""
    quiet()
    from rich.console import Console
    from rich.progress import Progress

    from evoalign.training.replay import log_of
    from evoalign.training.replay import replay as rebuild

    log, console = log_of(run), Console(stderr=True)
    count = log.sealed if generation is None else generation
    if log.damage is not None and generation is None and log.damage.cut:
        say(f"warning: {log.damage.message}")
    if generation is None and len(log.generations) > log.sealed:
        say(f"warning: the update of generation {log.sealed + 1} was never sealed and is left out")
    with Progress(transient=True, console=console, disable=not console.is_terminal) as bar:
        work = bar.add_task("replaying", total=None)
        found = rebuild(
            run,
            generation=generation,
            to=to,
            model=model,
            progress=lambda done, total: bar.update(work, completed=done, total=total),
        )
    saved = f"; saved in {to}" if to else ""
    typer.echo(f"generation {count}: weights_hash {found}, as the journal has it{saved}")
