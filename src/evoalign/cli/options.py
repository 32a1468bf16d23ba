# SPDX-License-Identifier: Apache-2.0
"""Options and output shared by several commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from evoalign.report.terminal import Debug as Debug
from evoalign.report.terminal import console as console
from evoalign.report.terminal import quiet as quiet

T = TypeVar("T")
Given = Annotated[Path, typer.Argument(help="A YAML config; with --resume, also a run directory.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run there, or begin it.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Rename the existing run and start afresh.")]
All = Annotated[bool, typer.Option("--all", help="With --dry-run: all settings, defaults and unused ones too.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")]
More = Annotated[list[Path] | None, typer.Option("--config", "-c", help="A further config; later ones win.")]
Sets = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="a.b=c", help="Override one setting.")]


def integers(text: str | None, option: str = "--seeds") -> list[int] | None:
    """Numbers between commas. Raises ConfigError."""
    return _split(text, option, int, "integers such as 0,1,2,3")


def numbers(text: str | None, option: str = "--sigmas") -> list[float] | None:
    """Numbers between commas. Raises ConfigError."""
    return _split(text, option, float, "numbers such as 1e-4,1e-3")


def _split(text: str | None, option: str, kind: Callable[[str], T], expected: str) -> list[T] | None:
    from evoalign.errors import ConfigError

    try:
        return None if text is None else [kind(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: expected {expected}") from None


def check_folder(to: Path | None) -> None:
    """Raise ConfigError if `--to` is a file, and RunExistsError if it is reached by a link inside a run directory."""
    from evoalign.errors import ConfigError
    from evoalign.rundir.files import refuse_links_above

    if to is None:
        return
    if to.exists() and not to.is_dir():
        raise ConfigError(f"--to {to} is a file; give a folder")
    refuse_links_above(to / "file")


def say(message: object) -> None:
    """Print on stderr, with control characters shown as text and secrets redacted.

    A message may quote an untrusted file, or the command line.
    """
    from evoalign.config.secrets import redacted

    text = redacted(str(message))
    if not text.replace("\n", "").isprintable():
        from evoalign.report.tables import visible

        text = "\n".join(visible(line) for line in text.split("\n"))
    typer.echo(text, err=True)
