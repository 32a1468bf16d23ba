# SPDX-License-Identifier: Apache-2.0
"""What several commands share: options, and how they speak."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

More = Annotated[list[Path] | None, typer.Option("--config", "-c", help="A further config; later ones win.")]
Sets = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="a.b=c", help="Override one setting.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def integers(text: str | None, option: str = "--seeds") -> list[int] | None:
    """Numbers between commas. Raises ConfigError."""
    from evoalign.errors import ConfigError

    if text is None:
        return None
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: expected integers such as 0,1,2,3") from None


def numbers(text: str | None, option: str = "--sigmas") -> list[float] | None:
    """Numbers between commas. Raises ConfigError."""
    from evoalign.errors import ConfigError

    if text is None:
        return None
    try:
        return [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: expected numbers such as 1e-4,1e-3") from None


def say(message: object) -> None:
    """On stderr, with control characters written out: a message may quote a file that came from anywhere."""
    text = str(message)
    if not text.replace("\n", "").isprintable():
        from evoalign.report.tables import visible

        text = "\n".join(visible(line) for line in text.split("\n"))
    typer.echo(text, err=True)


def console() -> Console:
    """Where there is no terminal, wide enough that no table is wrapped."""
    from rich.console import Console

    found = Console()
    if not found.is_terminal:
        found.width = max(found.width, 200)
    return found


def quiet() -> None:
    """No chatter from the model library; before torch is imported, no threads that spin while they wait."""
    import os

    # Spinning OpenMP threads make everything many times slower as soon as another process wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
