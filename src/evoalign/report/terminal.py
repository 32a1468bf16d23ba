# SPDX-License-Identifier: Apache-2.0
"""How a command speaks: its console, and that libraries are quiet. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def console() -> Console:
    """Where there is no terminal, wide enough that no table is wrapped."""
    from rich.console import Console

    found = Console()
    if not found.is_terminal:
        found.width = max(found.width, 200)
    return found


def print_line(console: Console, line: str) -> None:
    """A line as it is, whatever it quotes. It is not wrapped, but in a notebook, which would cut it off."""
    console.print(line, markup=False, highlight=False, soft_wrap=not console.is_jupyter)


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
