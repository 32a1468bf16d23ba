# SPDX-License-Identifier: Apache-2.0
"""Whether a folder holds a run, what made it, and the commands that resume or measure it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from evoalign.config import Config, load, outside
from evoalign.config.reading import object_of, read_object
from evoalign.errors import ConfigError, DataError, ResumeError

Method: TypeAlias = Literal["es", "grpo"]
COMMANDS: dict[Method, str] = {"es": "train", "grpo": "grpo"}
"""The command, and the function of `evoalign`, that makes a run of each method and resumes it."""
NAMES: dict[Method, str] = {"es": "ES", "grpo": "GRPO"}
JOURNAL, MANIFEST = "journal.jsonl", "manifest.json"


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run, also one whose manifest is damaged: a command then names the damage."""
    return any(os.path.lexists(path / name) for name in (JOURNAL, MANIFEST))


def is_foreign(path: Path) -> bool:
    """Return whether the manifest.json in a folder without a journal is that of another program."""
    tree = object_of(path / MANIFEST)
    return tree is not None and {"format_version", "method"}.isdisjoint(tree) and not os.path.lexists(path / JOURNAL)


def method_of(path: Path) -> Method | None:
    """Return the method of a run; None for a folder without a run, or with a damaged manifest and no journal."""
    if (path / JOURNAL).is_file():  # only ES has one
        return "es"
    try:
        return "grpo" if read_object(path / MANIFEST)["method"] == "grpo" else "es"
    except (DataError, KeyError):
        return None


def resume_command(path: Path, method: Method | None = None) -> str:
    """Return the command that resumes the run in a directory."""
    words = f"evoalign {COMMANDS[method or method_of(path) or 'es']} {shlex.quote(str(path))} --resume"
    try:
        return words + own_option(path, load(path / "config.yaml"))
    except ConfigError:  # missing or damaged; the command itself reports that
        return words


def placebo_command(path: Path, config: Config, given: str | None = None) -> str:
    """Return the command that measures a run's placebos, or the call for a run that was `given` a Python object."""
    if given is not None:
        return f"evoalign.placebo({str(path)!r}, {given}=...)"
    own = own_option(path, config, outside.EVALUATION_SKIPS)
    return f"evoalign placebo {shlex.quote(str(path))}{own}"


def random_command(path: Path, config: Config) -> str:
    """Return the command that repeats a run of GRPO with random rewards: its counterpart to placebos."""
    run, to = shlex.quote(str(path / "config.yaml")), shlex.quote(f"{path}_random")
    return f"evoalign grpo {run} -s grpo.reward=random -s output_dir={to}{own_option(path, config)}"


def own_option(path: Path, config: Config, skip: Sequence[str] = ()) -> str:
    """Return the --config option that a command needs where the run's config leads out of it, see `own.load_own`."""
    return f" --config {shlex.quote(str(path / 'config.yaml'))}" if outside.followed(config, skip) else ""


def refuse_other(path: Path, method: Method) -> None:
    """Raise ResumeError where a directory holds a run of the other method, which this one cannot resume."""
    found = method_of(path)
    if found not in (None, method):
        raise ResumeError(f"{path} holds a run of {NAMES[found]}; resume with: {resume_command(path)}")
