# SPDX-License-Identifier: Apache-2.0
"""`evoalign demo`, `evoalign init` and `evoalign schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug, quiet

NEXT = """\
wrote {0}; next, from that folder (cd {0}):
  evoalign doctor config.yaml                                       check that it can train here
  evoalign probe config.yaml                                        measure which sigma fits the model and the reward
  evoalign train config.yaml                                        train; a minute or less on one CPU core
  evoalign placebo runs/my_task --config runs/my_task/config.yaml   measure how much of the gain noise alone brings"""


def demo(
    to: Annotated[Path, typer.Option("--to", help="The run's folder; an existing run is renamed.")] = Path(
        "runs/quickstart"
    ),
    debug: Debug = False,
) -> None:
    """Train the small model that comes with evoalign to answer briefly: under a minute, one CPU core, no network."""
    from evoalign.config import load

    config = load(["configs/quickstart.yaml"], [f"output_dir={to}"])
    quiet()
    from evoalign.analysis.runs import train

    train(config, overwrite=True)
    typer.echo("\nyour own task:  evoalign init my_task")


def init(directory: Annotated[Path, typer.Argument(help="A new or empty folder.")], debug: Debug = False) -> None:
    """Write a starting config, reward.py and prompts for a custom task."""
    from evoalign.cli.scaffold import init as write

    write(directory)
    typer.echo(NEXT.format(directory))


def schema(
    to: Annotated[Path | None, typer.Option("--to", help="Write it into this file instead of printing it.")] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON schema of a config, with which an editor completes, checks and describes the settings."""
    from evoalign.cli.scaffold import schema_text
    from evoalign.errors import ConfigError

    if to is None:
        typer.echo(schema_text(), nl=False)
        return
    try:
        to.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {to}: {error.strerror}; give another file") from None
    typer.echo(f"wrote {to}; name it in the first line of a config:\n# yaml-language-server: $schema={to}")
