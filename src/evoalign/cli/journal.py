# SPDX-License-Identifier: Apache-2.0
"""`evoalign journal`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug, console


def show_journal(
    run: Annotated[Path, typer.Argument(help="A run directory, or a journal.jsonl by itself.")],
    debug: Debug = False,
) -> None:
    """Print a run's journal as a table, and report damage."""
    from evoalign.errors import JournalError
    from evoalign.report.tables import journal_table
    from evoalign.training.replay import log_of

    log = log_of(run)
    journal_table(log, console())
    if log.damage is not None:
        raise JournalError(log.damage.message)
