# SPDX-License-Identifier: Apache-2.0
"""`evoalign probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug, More, Sets, console, numbers, quiet


def probe(
    config: Annotated[Path, typer.Argument(help="A YAML config.")],
    more: More = None,
    set_: Sets = None,
    sigmas: Annotated[
        str | None, typer.Option(help="Comma-separated, such as 1e-4,1e-3; default: the config's, times 1/16 to 16.")
    ] = None,
    members: Annotated[int, typer.Option(help="Members at each sigma.")] = 32,
    examples: Annotated[int, typer.Option(help="Training examples that all of them answer.")] = 64,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write what was measured as JSON.")] = None,
    debug: Debug = False,
) -> None:
    """Measure before training how wide the noise should be, and recommend sigma and learning rate."""
    from evoalign.config import load

    resolved, widths = load([config, *(more or [])], set_ or []), numbers(sigmas)
    quiet()
    from evoalign.preflight import ladder as measure

    result = measure.probe(resolved, sigmas=widths, members=members, examples=examples, tell=typer.echo)
    console().print(measure.table(result))
    typer.echo("\n".join(measure.lines(result)))
    if json_ is not None:
        import json

        from evoalign.rundir.files import write_text

        json_.parent.mkdir(parents=True, exist_ok=True)
        write_text(json_, json.dumps(result.to_dict(), indent=2) + "\n")
