# SPDX-License-Identifier: Apache-2.0
"""Whether a folder holds a run, what made it, and the command that resumes it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal, TypeAlias

from evoalign.config import Config, code_of, load
from evoalign.config.grpo import asked
from evoalign.config.reading import read_object
from evoalign.errors import ConfigError, DataError, ResumeError

Method: TypeAlias = Literal["es", "grpo"]
COMMANDS: dict[Method, str] = {"es": "train", "grpo": "grpo"}
"""The command, and the function of `evoalign`, that makes a run of each method and resumes it."""
NAMES: dict[Method, str] = {"es": "ES", "grpo": "GRPO"}
JOURNAL, MANIFEST = "journal.jsonl", "manifest.json"


def is_run(path: Path) -> bool:
    """Whether a folder holds a run, also one whose manifest is damaged: such a run is to be named, not passed over."""
    return any((path / name).exists() for name in (JOURNAL, MANIFEST))


def method_of(path: Path) -> Method | None:
    """By what a run directory was made; None where it holds no run, or does not say. Only a run of ES has a journal."""
    if (path / JOURNAL).is_file():
        return "es"
    try:
        return "grpo" if read_object(path / MANIFEST)["method"] == "grpo" else "es"
    except (DataError, KeyError):
        return None


def resume_command(path: Path, method: Method | None = None) -> str:
    """The command that resumes the run in a directory, whatever made it."""
    return f"evoalign {COMMANDS[method or method_of(path) or 'es']} {shlex.quote(str(_named_by(path)))} --resume"


def placebo_command(path: Path, config: Config, given: str | None = None) -> str:
    """The command, or of a run that was `given` a Python object the call, that measures a run's placebos.

    A run by itself does not say what is imported; its config does where it is named.
    """
    if given is not None:
        return f"evoalign.placebo({str(path)!r}, {given}=...)"
    own = f" --config {shlex.quote(str(path / 'config.yaml'))}" if code_of(config) else ""
    return f"evoalign placebo {shlex.quote(str(path))}{own}"


def _named_by(path: Path) -> Path:
    """A run directory, or the config in it where that names code or reaches out, which is not done of a directory."""
    own = path / "config.yaml"
    try:
        config = load(own, needs_es=False)
    except ConfigError:  # missing or damaged, which the command itself says best
        return path
    return own if code_of(config) or asked(config.grpo) else path


def refuse_other(path: Path, method: Method) -> None:
    """Raise ResumeError where a directory holds a run of the other method: neither can resume the other's."""
    found = method_of(path)
    if found not in (None, method):
        raise ResumeError(f"{path} holds a run of {NAMES[found]}; resume with: {resume_command(path)}")
