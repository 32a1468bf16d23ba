# SPDX-License-Identifier: Apache-2.0
"""A journal as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
from rich.console import Console
from rich.table import Table

from evoalign.report.tables import visible
from evoalign.report.terminal import print_line
from evoalign.rundir.journal import Header, Log, Recorded


def journal_table(log: Log, console: Console) -> None:
    """Prints what the run is, one row for each generation, and how far the journal is whole."""
    ascii_only = not console.encoding.startswith("utf")
    for line in _head(log.header):
        print_line(console, visible(line, ascii_only=ascii_only))
    table = Table("generation", "mean", "best", "worst", "std", "rms c", "sigma", "step", "weights_hash")
    for column in table.columns[:-1]:
        column.justify = "right"
    for recorded in log.generations:
        table.add_row(*_cells(recorded))
    console.print(table)
    per = (log.size / len(log.generations)) if log.generations else 0.0
    state = "whole" if log.damage is None else "damaged beyond this"
    console.print(f"{log.sealed} generations, {log.size:,} bytes, {per:,.0f} a generation; {state}", highlight=False)
    if log.ending is not None:
        unit = {"plateau": "evaluations without a better reward", "time": "seconds"}[log.ending.reason]
        console.print(f"the run ended there by its own settings: {log.ending.limit:g} {unit}", highlight=False)
    if len(log.generations) > log.sealed:
        console.print(f"the update of generation {len(log.generations)} was written down and never sealed: --resume "
                      "applies it", highlight=False)  # fmt: skip


def _head(header: Header) -> Iterator[str]:
    model: object = header.config.get("model")
    named = cast(dict[str, object], model) if isinstance(model, dict) else {}
    yield f"model {named.get('name')}, revision {named.get('revision')}, {header.dtype}, hash {header.model_hash[:16]}"
    yield f"space {header.space}, {header.evolved_parameters:,} numbers evolve, seed {header.config.get('seed')}"
    yield f"made on {header.device} with {', '.join(f'{k} {v}' for k, v in header.versions.items())}"


def _cells(recorded: Recorded) -> Iterator[str]:
    fitness_M = np.asarray(recorded.fitness_M)
    update = recorded.update
    with np.errstate(over="ignore", invalid="ignore"):
        rms_c = np.sqrt(np.mean(np.square(update.coefficients)))
        spread = (fitness_M.mean(), fitness_M.max(), fitness_M.min(), fitness_M.std())
    yield str(update.generation + 1)
    for value in (*spread, rms_c, update.sigma, update.step):
        yield f"{value:.4g}"
    yield recorded.weights_hash[:16] if recorded.weights_hash else "not sealed"
