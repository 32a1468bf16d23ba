# SPDX-License-Identifier: Apache-2.0
"""`evoalign data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from evoalign.cli.options import Debug


def countdown(
    output: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 2200,
    numbers: Annotated[str, typer.Option(help="Numbers per problem: 3, 4 or mixed.")] = "mixed",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    debug: Debug = False,
) -> None:
    """Write solver-verified Countdown problems in the published form, none of which the tiny model was trained on."""
    from evoalign.errors import ConfigError
    from evoalign.tasks.countdown import write_countdown

    sizes: dict[str, Any] = {"3": 3, "4": 4, "mixed": "mixed"}
    if numbers not in sizes:
        raise ConfigError(f"--numbers {numbers}: use 3, 4 or mixed")
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists; choose another file, or replace it with --overwrite")
    write_countdown(output, count, sizes[numbers], seed)
    typer.echo(f"wrote {count} problems to {output}")
