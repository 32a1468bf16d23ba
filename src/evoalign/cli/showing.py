# SPDX-License-Identifier: Apache-2.0
"""Output of `--dry-run`: the settings that a command uses, and what it would do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from evoalign.config import Config
    from evoalign.rundir.method import Method

REFUSED = "would be refused"
LAST = ("warning", REFUSED, "note")
"""How lines begin that a user should act on."""


def show_plan(config: Config, method: Method, lines: Sequence[str], *, everything: bool) -> None:
    """Print the config as YAML and the lines, warnings last. Exit with code 2 if the run would be refused.

    Without `everything` only settings that differ from their defaults, of sections that the method reads, are shown:
    config and lines should fit one screen.
    """
    from evoalign.config import to_yaml

    left_out = [] if everything else config.unused(grpo=method == "grpo")
    typer.echo(to_yaml(config, without=left_out, changed=not everything), nl=False)
    if not everything:
        typer.echo(f"# --all shows the defaults, and the sections that are not used ({', '.join(left_out)})")
    typer.echo("\n" + "\n".join(sorted(lines, key=lambda line: line.startswith(LAST))))
    if any(line.startswith(REFUSED) for line in lines):
        raise typer.Exit(2)
