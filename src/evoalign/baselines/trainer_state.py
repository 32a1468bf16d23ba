# SPDX-License-Identifier: Apache-2.0
"""What GRPO's trainer needs to resume: folders of the model library, each with a marker of what is in it.

Nothing in such a state says whether it is right: without its random state, optimizer or schedule the trainer goes on,
to other weights. So the marker, written last, has the SHA-256 of each file.
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
"""In a folder of the trainer's state: it was written to its end."""
OBJECTIVE = "objective.json"
"""Beside it, where the objective has a state: finite numbers by name, as they are after the step."""
MEND = "put it back from a copy, or begin anew with --overwrite, which moves the run aside"

_NUMBERS = TypeAdapter(dict[str, Finite], config=ConfigDict(strict=True))


class _Marker(BaseModel):
    """What whole.json may hold. `files` is None in one of an earlier release."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    step: Annotated[int, Field(ge=0)]
    files: dict[str, Hash] | None = None


def states(run: RunDir) -> Path:
    """Where the trainer keeps what it needs to resume."""
    return run.path / "trainer"


def keep_objective(run: RunDir, done: int, state: Mapping[str, float]) -> None:
    """What the objective goes on from after so many steps, beside what the trainer does. Without a state, nothing."""
    if state:
        write_text(states(run) / f"checkpoint-{done}" / OBJECTIVE, json.dumps(dict(state), indent=2) + "\n")


def objective_of(folder: Path) -> dict[str, float]:
    """The objective's state in a trainer's, bit for bit; empty where there is none. Raises ResumeError."""
    file = folder / OBJECTIVE
    try:
        return _NUMBERS.validate_python(read_json(file))
    except MissingError:
        return {}
    except (DataError, ValidationError):
        raise ResumeError(f"{file} is damaged: {MEND}") from None


def mark(run: RunDir, done: int) -> None:
    """The trainer's state after so many steps is whole on disk. Only now may the others go."""
    whole = states(run) / f"checkpoint-{done}"
    files = {name: digest_of(file) for name, file in _files(whole).items()}
    write_text(whole / STATE, json.dumps({"step": done, "files": files}, indent=2) + "\n")
    for folder in states(run).glob("checkpoint-*"):
        if folder != whole:
            shutil.rmtree(folder, ignore_errors=True)


def last_state(run: RunDir) -> tuple[Path, int] | None:
    """The latest state that was written to its end, and after how many steps; not looked into."""
    found = _marked(run)
    return found[0] if found else None


def sound_state(run: RunDir, tell: Callable[[str], None]) -> tuple[Path, int] | None:
    """The latest state whose files are all as they were written; None where there is no state.

    Raises ResumeError, which names the file, where each is damaged.
    """
    first: DataError | None = None
    for folder, step in _marked(run):
        try:
            checked = _check(folder, step)
        except DataError as error:
            first = first or error
            tell(f"warning: {error}: an older state is looked for")
            continue
        if not checked:
            tell(f"{folder} was not checked: an earlier release saved it, without a digest of each file")
        return folder, step
    if first is not None:
        raise ResumeError(f"{first}; no older state is whole: {MEND}") from first
    return None


def _marked(run: RunDir) -> list[tuple[Path, int]]:
    """The states with a marker, the latest first."""
    found: list[tuple[int, Path]] = []
    for file in states(run).glob(f"checkpoint-*/{STATE}"):
        number = file.parent.name.removeprefix("checkpoint-")
        if number.isascii() and number.isdecimal() and len(number) < 19:
            found.append((int(number), file.parent))
    return [(folder, step) for step, folder in sorted(found, reverse=True)]


def _check(folder: Path, step: int) -> bool:
    """Whether there was something to check by. Raises DataError naming the first file that is not as it was written."""
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
    """All that is in a state but its marker, by name from there."""
    entries = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    found = {path.relative_to(folder).as_posix(): path for path in sorted(entries)}
    return {name: path for name, path in found.items() if name not in (STATE, f".{STATE}.tmp")}
