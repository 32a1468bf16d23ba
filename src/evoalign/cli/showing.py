# SPDX-License-Identifier: Apache-2.0
"""What `--dry-run` prints: the settings that a command uses, and what it would do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from evoalign.config import Config
    from evoalign.rundir.method import Method


def show_plan(config: Config, method: Method, lines: Sequence[str], *, everything: bool) -> None:
    """The config as YAML, without the sections that nothing reads unless `everything`, and the lines."""
    from evoalign.config import to_yaml

    left_out = [] if everything else config.unused(grpo=method == "grpo")
    typer.echo(to_yaml(config, without=left_out), nl=False)
    if left_out:
        typer.echo(f"# not used here, and shown with --all: {', '.join(left_out)}")
    typer.echo("\n" + "\n".join(lines))
