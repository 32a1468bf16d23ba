# SPDX-License-Identifier: Apache-2.0
"""`evoalign init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug

NEXT = """\
wrote {0}; next, from that folder (cd {0}):
  evoalign doctor config.yaml                                       check that it can train here
  evoalign probe config.yaml                                        measure which sigma fits the model and the reward
  evoalign train config.yaml                                        train; a minute or less on one CPU core
  evoalign placebo runs/my_task --config runs/my_task/config.yaml   measure how much of the gain is drift"""


def init(directory: Annotated[Path, typer.Argument(help="A new or empty folder.")], debug: Debug = False) -> None:
    """Write a starting config, reward.py and prompts for a custom task."""
    from evoalign.cli.scaffold import init as write

    write(directory)
    typer.echo(NEXT.format(directory))
