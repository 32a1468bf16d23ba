# SPDX-License-Identifier: Apache-2.0
"""What `--dry-run` prints: the settings that a command uses, and what it would do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from evoalign.config import Config
    from evoalign.rundir.method import Method


LAST = ("warning", "refused", "note")


def show_plan(config: Config, method: Method, lines: Sequence[str], *, everything: bool) -> None:
    """The config as YAML, and the lines, those last that ask for something; exit code 2 where it would be refused.

    Without `everything` only what is not a default, of the sections that the method reads: lines and config are to
    fit one screen.
    """
    from evoalign.config import to_yaml

    left_out = [] if everything else config.unused(grpo=method == "grpo")
    typer.echo(to_yaml(config, without=left_out, changed=not everything), nl=False)
    if not everything:
        typer.echo(f"# with --all: the defaults, and what is not used here ({', '.join(left_out)})")
    typer.echo("\n" + "\n".join(sorted(lines, key=lambda line: line.startswith(LAST))))
    if any(line.startswith("refused") for line in lines):
        raise typer.Exit(2)
