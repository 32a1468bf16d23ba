# SPDX-License-Identifier: Apache-2.0
"""`evoalign select`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from evoalign.cli.options import Debug, More, console, integers, quiet, say

if TYPE_CHECKING:
    from evoalign.analysis.base import Finding


def select(
    run: Annotated[Path, typer.Argument(help="A run directory, or a journal.jsonl.")],
    top: Annotated[str, typer.Option(help="Best members by fitness; of several, such as 10,50, validation decides.")],
    vote: Annotated[bool, typer.Option("--vote", help="Vote of the members, next to self-consistency.")] = False,
    merge: Annotated[Literal["mean", "corp"] | None, typer.Option(help="Merge the members into one model.")] = None,
    generation: Annotated[int, typer.Option("--generation", "-g", min=0, help="Generation of the members.")] = 0,
    temperature: Annotated[float, typer.Option(help="Temperature of the samples for self-consistency.")] = 0.7,
    to: Annotated[Path | None, typer.Option(help="Save the merged model in this new folder.")] = None,
    config: More = None,
    model: Annotated[str | None, typer.Option(help="Name or folder of the base model, if it has moved.")] = None,
    debug: Debug = False,
) -> None:
    """Apply other rules to one generation: a vote of its best members (RandOpt), their average, or CoRP.

    All are evaluated on the test split, greedily, next to the mean before the generation. --merge corp needs a
    validation split and commits nothing without a reliable gain there. Results of a run directory are saved in its
    results/select_RULE.json. --config gives the run's own config if that names user code.
    """
    quiet()
    from rich.console import Console

    from evoalign.analysis.selection.command import select as apply
    from evoalign.config import load
    from evoalign.report.progress import Bar
    from evoalign.rundir import checksums
    from evoalign.rundir.files import make_folder, refuse_links

    refuse_links(run)
    with Bar("select", Console(stderr=True)):
        found = apply(
            run, top=integers(top, "--top") or [], vote=vote, merge=merge, generation=generation,
            temperature=temperature, to=to, config=load(config) if config else None, model=model,
        )  # fmt: skip
    _show(found)
    name = "_".join(["select", *(["vote"] if vote else []), *([merge] if merge else [])])
    if not run.is_dir():
        say(f"not saved: {run} is a journal, not a run directory")
        return
    make_folder(run / "results")
    with checksums.recorded(run, f"results/{name}.json"):
        found.write(run / "results", name)
    say(f"saved in {run / 'results' / name}.json")


def _show(found: Finding) -> None:
    from rich.table import Table

    from evoalign.statistics import Estimate

    table = Table("", str(found.numbers["measure"]), "minus the base, paired", "test completions")
    for row in found.numbers["rows"]:
        gap = row["minus_base"]
        table.add_row(
            row["name"],
            f"{Estimate(**row['value']):.4f}",
            f"{Estimate(**gap):+.4f}" if gap else "",
            f"{row['test_completions']:,}",
        )
    shown = console()
    shown.print(table)
    found.show(shown)
