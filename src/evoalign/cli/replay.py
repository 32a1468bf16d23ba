# SPDX-License-Identifier: Apache-2.0
"""`evoalign journal` and `evoalign replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug, More, console, integers, quiet, say


def show_journal(
    run: Annotated[Path, typer.Argument(help="A run directory, or a journal.jsonl by itself.")],
    debug: Debug = False,
) -> None:
    """Print a run's journal as a table, and report damage."""
    from evoalign.errors import JournalError
    from evoalign.report.tables import journal_table
    from evoalign.training.replay import log_of

    log = log_of(run)
    journal_table(log, console())
    if log.damage is not None:
        raise JournalError(log.damage.message)


def replay(
    run: Annotated[Path, typer.Argument(help="A run directory, or a journal.jsonl by itself.")],
    generation: Annotated[
        int | None, typer.Option("--generation", "-g", min=0, help="Number of generations; default: all.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Save the mean in this new folder.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the base model is now.")] = None,
    counterfactual: Annotated[
        str | None, typer.Option(help='Other coefficients: shuffle, flip, half, "member K" or "shaping NAME".')
    ] = None,
    seeds: Annotated[str, typer.Option(help="Of shuffle: comma-separated, such as 0,1,2.")] = "0",
    config: More = None,
    debug: Debug = False,
) -> None:
    """Rebuild the mean from the base model and the journal alone, and check its hash.

    With --counterfactual, evaluate the same noise with other coefficients on the test split, next to the run itself.
    The first step is exact; later ones are conditional on the recorded path, since scores were measured around the
    run's own means. --config names the run's own config if that names code.
    """
    quiet()
    if counterfactual is None:
        _own(run, generation, to, model)
        return
    from evoalign.config import load
    from evoalign.placebos.counterfactual import CONDITIONAL
    from evoalign.placebos.run import counterfactuals

    own, numbers = load(config) if config else None, integers(seeds) or []
    found = counterfactuals(run, counterfactual, numbers, to=to, config=own, model=model, generation=generation)
    for what, reached in found:
        items = len(reached.evaluation.measures_E["reward"])
        typer.echo(
            f"{what}: reward {reached.evaluation.measures['reward']:.4f} on {items} test examples, distance "
            f"from the start {reached.distance:.4g}, weights_hash {reached.weights_hash}"
        )
    typer.echo(f"{counterfactual}: {CONDITIONAL}" + (f"; saved in {to}" if to else ""))


def _own(run: Path, generation: int | None, to: Path | None, model: str | None) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from evoalign.training.replay import log_of
    from evoalign.training.replay import replay as rebuild

    log, shown = log_of(run), Console(stderr=True)
    count = log.sealed if generation is None else generation
    if log.damage is not None and generation is None and log.damage.cut:
        say(f"warning: {log.damage.message}")
    if generation is None and len(log.generations) > log.sealed:
        say(f"warning: the update of generation {log.sealed + 1} was never sealed and is left out")
    with Progress(transient=True, console=shown, disable=not shown.is_terminal) as bar:
        work = bar.add_task("replaying", total=None)
        found = rebuild(
            run,
            generation=generation,
            to=to,
            model=model,
            progress=lambda done, total: bar.update(work, completed=done, total=total),
        )
    saved = f"; saved in {to}" if to else ""
    typer.echo(f"generation {count}: weights_hash {found}, equal to the journal's{saved}")
