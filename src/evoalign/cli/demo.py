# SPDX-License-Identifier: Apache-2.0
"""`evoalign demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug, quiet

CONFIG = "configs/quickstart.yaml"


def demo(
    to: Annotated[Path, typer.Option("--to", help="The run's folder; an existing run is renamed.")] = Path(
        "runs/quickstart"
    ),
    debug: Debug = False,
) -> None:
    """Train the small model that comes with evoalign to answer briefly: under a minute, one CPU core, no network."""
    from evoalign.config import load

    config = load([CONFIG], [f"output_dir={to}"])
    quiet()
    from evoalign.analysis.runs import train

    train(config, overwrite=True)
    typer.echo("\nyour own task:  evoalign init my_task")
