# SPDX-License-Identifier: Apache-2.0
"""Console of a command, and quiet libraries. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def console() -> Console:
    """Return a console; without a terminal it is wide enough for all tables."""
    from rich.console import Console

    found = Console()
    if not found.is_terminal:
        found.width = max(found.width, 200)
    return found


def print_line(console: Console, line: str) -> None:
    """Print a line without markup; it is wrapped in notebooks only."""
    console.print(line, markup=False, highlight=False, soft_wrap=not console.is_jupyter)


def quiet() -> None:
    """Silence the model libraries; before torch is imported, stop OpenMP threads from spinning while they wait."""
    import logging
    import os

    # Spinning OpenMP threads make everything many times slower as soon as another process wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # On some processors, imported by PEFT, it warns that it lacks a kernel for a faster product in 4 bits.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()
    disable_progress_bar()
