# SPDX-License-Identifier: Apache-2.0
"""`evoalign compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug, console, quiet


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, of ES and GRPO; a folder stands for all below.")],
    match: Annotated[
        str | None, typer.Option(help="The budget to match: wall, completions, tokens or flops. Without it, each.")
    ] = None,
    measure: Annotated[str, typer.Option(help="The measure of the test split to compare by.")] = "reward",
    name: Annotated[
        list[str] | None, typer.Option(metavar="LABEL=GLOB", help="Call the group whose runs' paths fit GLOB so.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Also write comparison.md, comparison.json and figures into this folder.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Put runs side by side at equal budgets, with what their seeds allow to say."""
    from evoalign.errors import ConfigError

    names = dict(_label(text) for text in name or [])
    if to is not None and to.exists() and not to.is_dir():
        raise ConfigError(f"--to {to} is a file; give a folder")
    quiet()
    from evoalign.analysis.compare import comparison
    from evoalign.analysis.compare import pages as report

    if match is not None and match not in comparison.MATCHINGS:
        raise ConfigError(f"--match {match}: use {', '.join(comparison.MATCHINGS)}")
    found = comparison.compare(runs, match, measure=measure, names=names)
    report.show(found, console())
    if to is not None:
        written = report.write(found, to)
        typer.echo(f"wrote {', '.join(path.name for path in written)} into {to}")


def _label(text: str) -> tuple[str, str]:
    """`LABEL=GLOB`. Raises ConfigError."""
    from evoalign.errors import ConfigError

    label, equals, pattern = text.partition("=")
    if not (label.strip() and equals and pattern):
        raise ConfigError(f"--name {text!r}: expected LABEL=GLOB, such as GRPO='*/grpo_*'")
    return label.strip(), pattern
