# SPDX-License-Identifier: Apache-2.0
"""`evoalign placebo`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evoalign.cli.options import Debug, More, console, quiet, say

if TYPE_CHECKING:
    from rich.table import Table

    from evoalign.placebos.estimates import Ends, Placebos


def placebo(
    run: Annotated[Path, typer.Argument(help="A run directory, or a journal.jsonl.")],
    shuffles: Annotated[int, typer.Option(min=1, help="Placebos: the same noise, shuffled coefficients.")] = 20,
    off_task: Annotated[
        Path | None, typer.Option(help="A config; also split the change of its task's test split.")
    ] = None,
    generation: Annotated[
        int | None, typer.Option("--generation", "-g", min=1, help="Generations to replay; default: all.")
    ] = None,
    config: More = None,
    model: Annotated[str | None, typer.Option(help="Name or folder of the base model, if it has moved.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all results as JSON.")] = None,
    debug: Debug = False,
) -> None:
    """Measure how much of a run's gain is signal, and how much would have come without signal (drift).

    Replays the journal with its coefficients shuffled over the noises (and with all signs flipped), and evaluates each
    mean on the test split. --config gives the run's own config if that names user code. Results of a finished run are
    saved in its results/placebo.json, for `evoalign export`, `compare` and `report`. Ctrl-C reports and saves the
    placebos evaluated so far.
    """
    quiet()
    from rich.console import Console

    from evoalign.config import load
    from evoalign.placebos.run import PlacebosStoppedError
    from evoalign.placebos.run import placebo as measure
    from evoalign.report.progress import Bar
    from evoalign.rundir.files import refuse_links, refuse_links_above

    if generation is None:
        refuse_links(run)
    if json_file is not None:
        refuse_links_above(json_file)
    try:
        with Bar("placebos", Console(stderr=True)):
            found = measure(
                run,
                shuffles=shuffles,
                config=load(config) if config else None,
                off_task=load([off_task]) if off_task else None,
                model=model,
                generation=generation,
            )
    except PlacebosStoppedError as stopped:
        _report(run, stopped.result, json_file, whole=generation is None)
        raise
    _report(run, found, json_file, whole=generation is None)


def _report(run: Path, found: Placebos, json_file: Path | None, *, whole: bool) -> None:
    """Print the placebos; write them to `json_file`, and with `whole` to the run."""

    from evoalign.placebos.run import keep
    from evoalign.rundir.files import make_folder, write_json

    shown = console()
    for title, columns in (("test split", found.columns), ("off-task test split", found.off_columns)):
        if columns:
            shown.print(_table(title, columns))
    for line in found.lines():
        typer.echo(line)
    if json_file is not None:
        make_folder(json_file.parent)
        write_json(json_file, found.as_dict())
        say(f"written to {json_file}")
    try:
        say(keep(run, found) if whole else "not saved: --generation replays only part of the run")
    except OSError as error:
        say(f"not saved: {run} cannot be written to ({error.strerror})")


def _table(title: str, columns: Mapping[str, Ends]) -> Table:
    """Return each measure before training, of the run and of its placebos, and how many placebos reach the run."""
    from rich.table import Table
    from rich.text import Text

    from evoalign.report.tables import NAMES, value

    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("", overflow="fold")
    for heading in ("before", "run", "mean placebo", "lowest to highest", "at or above the run"):
        table.add_column(heading, justify="right", overflow="fold")
    for name, ends in columns.items():
        found = (ends.before, ends.real, ends.mean, min(ends.placebos), max(ends.placebos))
        *values, low, high = (value(name, one) for one in found)
        shown = NAMES.get(name, name.removesuffix("_share").replace("_", " "))
        table.add_row(Text(shown), *values, f"{low} to {high}", f"{ends.reached} of {len(ends.placebos)}")
    return table
