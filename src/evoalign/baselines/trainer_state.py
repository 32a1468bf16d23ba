# SPDX-License-Identifier: Apache-2.0
"""Find, mark and verify the states that GRPO's trainer resumes from: checkpoint folders of transformers with a marker.

The trainer would also resume without its random state, optimizer or schedule, and reach other weights. So the marker,
which is written last, has the SHA-256 of each file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from evoalign.config.reading import MissingError, read_json
from evoalign.errors import DataError, ResumeError
from evoalign.rundir.checkpoint import Finite, Hash
from evoalign.rundir.directory import RunDir
from evoalign.rundir.files import digest_of, write_text

STATE = "whole.json"
"""Marker in the folder of a trainer state that was written completely."""
OBJECTIVE = "objective.json"
"""File with the objective's state after the step, if it has one: finite numbers by name."""
MEND = "restore it from a copy, or start over with --overwrite, which moves the run aside"

_NUMBERS = TypeAdapter(dict[str, Finite], config=ConfigDict(strict=True))


class _Marker(BaseModel):
    """Content of whole.json; `files` is None in that of an earlier release."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    step: Annotated[int, Field(ge=0)]
    files: dict[str, Hash] | None = None


def states(run: RunDir) -> Path:
    """Return the folder of the trainer's states."""
    return run.path / "trainer"


def keep_objective(run: RunDir, done: int, state: Mapping[str, float]) -> None:
    """Write the objective's state after `done` steps into the trainer's state, unless it has none."""
    if state:
        write_text(states(run) / f"checkpoint-{done}" / OBJECTIVE, json.dumps(dict(state), indent=2) + "\n")


def objective_of(folder: Path) -> dict[str, float]:
    """Read the objective's state from a trainer state, bit for bit; empty without one. Raises ResumeError."""
    file = folder / OBJECTIVE
    try:
        return _NUMBERS.validate_python(read_json(file))
    except MissingError:
        return {}
    except (DataError, ValidationError):
        raise ResumeError(f"{file} is damaged: {MEND}") from None


def mark(run: RunDir, done: int) -> None:
    """Mark the trainer's state after `done` steps as complete, and only then remove the older ones."""
    whole = states(run) / f"checkpoint-{done}"
    files = {name: digest_of(file) for name, file in _files(whole).items()}
    write_text(whole / STATE, json.dumps({"step": done, "files": files}, indent=2) + "\n")
    for folder in states(run).glob("checkpoint-*"):
        if folder != whole:
            shutil.rmtree(folder, ignore_errors=True)


def last_state(run: RunDir) -> tuple[Path, int] | None:
    """Return the latest complete state and its step, without verifying its files."""
    found = _marked(run)
    return found[0] if found else None


def sound_state(run: RunDir, tell: Callable[[str], None]) -> tuple[Path, int] | None:
    """Return the latest state whose files are all unchanged, and its step; None without a state.

    Raises ResumeError naming a damaged file if every state is damaged.
    """
    first: DataError | None = None
    for folder, step in _marked(run):
        try:
            checked = _check(folder, step)
        except DataError as error:
            first = first or error
            tell(f"warning: {error}; an older state is used if one is intact")
            continue
        if not checked:
            tell(f"{folder} was not verified: an earlier release saved it without file digests")
        return folder, step
    if first is not None:
        raise ResumeError(f"{first}; no older state is intact: {MEND}") from first
    return None


def _marked(run: RunDir) -> list[tuple[Path, int]]:
    """Return the states with a marker, latest first."""
    found: list[tuple[int, Path]] = []
    for file in states(run).glob(f"checkpoint-*/{STATE}"):
        number = file.parent.name.removeprefix("checkpoint-")
        if number.isascii() and number.isdecimal() and len(number) < 19:
            found.append((int(number), file.parent))
    return [(folder, step) for step, folder in sorted(found, reverse=True)]


def _check(folder: Path, step: int) -> bool:
    """Verify a state; return False if its marker has no digests. Raises DataError naming the first changed file."""
    try:
        marker = _Marker.model_validate(read_json(folder / STATE))
    except ValidationError:
        raise DataError(f"{folder / STATE} is damaged") from None
    if marker.step != step:
        raise DataError(f"{folder / STATE} is of step {marker.step}")
    if marker.files is None:
        return False
    here = _files(folder)
    for name, digest in marker.files.items():
        if name not in here:
            raise DataError(f"{folder / name} is missing")
        if digest_of(here[name]) != digest:
            raise DataError(f"{folder / name} was altered")
    for name in here.keys() - marker.files.keys():
        raise DataError(f"{folder / name} does not belong there")
    return True


def _files(folder: Path) -> dict[str, Path]:
    """Return the files of a state by relative path, without its marker."""
    entries = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    found = {path.relative_to(folder).as_posix(): path for path in sorted(entries)}
    return {name: path for name, path in found.items() if name not in (STATE, f".{STATE}.tmp")}
