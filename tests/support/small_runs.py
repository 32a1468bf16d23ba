# SPDX-License-Identifier: Apache-2.0
"""What runs of tests leave out that are not about it, and how they are made and read."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

import evoalign

UNCHECKED: dict[str, Any] = {"control_every": 0, "canary_every": 0, "perplexity": False, "placebo": 0}
"""`checks`: all that they ask of the model, a fifth of the time of a small run."""


def told_by(config: Any, **options: Any) -> str:
    """Train, and return what the run printed."""
    out = io.StringIO()
    evoalign.train(config, console=Console(file=out, width=400), **options)
    return out.getvalue()


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def hashes_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by name: a difference of two names the files that differ."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
