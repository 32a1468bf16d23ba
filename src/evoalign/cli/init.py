# SPDX-License-Identifier: Apache-2.0
"""`evoalign init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug


def init(directory: Annotated[Path, typer.Argument(help="A new or empty folder.")], debug: Debug = False) -> None:
    """Write a starting config, reward.py and prompts.jsonl for a task of your own."""
    from evoalign.cli.scaffold import init as write

    write(directory)
    typer.echo(f"wrote {directory}; next: cd {directory} && evoalign train config.yaml")
