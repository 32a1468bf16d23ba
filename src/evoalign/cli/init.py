# SPDX-License-Identifier: Apache-2.0
"""`evoalign init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug

NEXT = """\
wrote {0}; next, from that folder (cd {0}):
  evoalign doctor config.yaml                                       will it train here?
  evoalign probe config.yaml                                        which sigma, for this model and this reward
  evoalign train config.yaml                                        a minute or less on one CPU core, as it stands
  evoalign placebo runs/my_task --config runs/my_task/config.yaml   how much of the gain is drift"""


def init(directory: Annotated[Path, typer.Argument(help="A new or empty folder.")], debug: Debug = False) -> None:
    """Write a starting config, reward.py and prompts for a task of your own."""
    from evoalign.cli.scaffold import init as write

    write(directory)
    typer.echo(NEXT.format(directory))
