# SPDX-License-Identifier: Apache-2.0
"""`evoalign doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evoalign.cli.options import Debug, More, Sets, quiet
from evoalign.cli.resolving import given

if TYPE_CHECKING:
    from evoalign.preflight.plan import Finding


def doctor(
    config: Annotated[Path | None, typer.Argument(help="A YAML config; without one, this machine alone.")] = None,
    more: More = None,
    set_: Sets = None,
    debug: Debug = False,
) -> None:
    """Check this machine, and whether a config will train on it. The exit code is 1 if a check failed."""
    from evoalign.errors import ConfigError

    if config is None and (more or set_):
        raise ConfigError("--config and --set change a config: give one first, as in `evoalign doctor config.yaml`")
    quiet()
    from evoalign.preflight import doctor as checks
    from evoalign.preflight.plan import Finding

    try:
        found = checks.findings(given(config, more or [], set_ or []) if config is not None else None)
    except ConfigError as error:
        found = [*checks.environment(), Finding("config", "failed", str(error))]
    line, code = checks.verdict(_show_findings(found))
    typer.echo(line)
    raise typer.Exit(code)


def _show_findings(found: Iterable[Finding]) -> list[Finding]:
    """Show findings one by one: as rows of a table on a terminal, else as plain lines."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    shown: list[Finding] = []
    console, table = Console(), Table("check", "", "finding")
    colours = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
    with Live(table, console=console, vertical_overflow="visible") if console.is_terminal else nullcontext():
        for finding in found:
            shown.append(finding)
            text = f"{finding.detail}; {finding.fix}" if finding.fix else finding.detail
            table.add_row(finding.name, Text(finding.status, colours[finding.status]), Text(text))
            if not console.is_terminal:
                typer.echo(f"{finding.status:<8} {finding.name}: {text}")
    return shown
