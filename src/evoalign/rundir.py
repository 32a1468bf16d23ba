# SPDX-License-Identifier: Apache-2.0
"""The files a run leaves: made once everything is known to work, so that bad input leaves nothing half-written."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evoalign.checkpoint import write_text
from evoalign.config import Config, to_yaml
from evoalign.errors import RunExistsError
from evoalign.version import __version__

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "numpy", "scipy")


class RunDir:
    """The paths of a run and the writing of its plain files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.manifest = path / "manifest.json"
        self.journal = path / "journal.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.results = path / "results"
        self.figures = path / "figures"
        self.rows: list[dict[str, Any]] = []
        self._aside: Path | None = None

    def saved(self, generation: int, *, adapter: bool) -> Path:
        """Where the mean after so many generations is saved."""
        return self.path / ("loras" if adapter else "checkpoints") / f"generation_{generation:04d}"

    def create(self, config: Config, manifest: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folders and write config and manifest. Raises RunExistsError."""
        if self.exists():
            self.refuse(overwrite=overwrite)
            self._move_aside()
        for folder in (self.results / "completions", self.figures, self.path / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(self.config, to_yaml(config))
        write_text(self.manifest, json.dumps(manifest, indent=2) + "\n")

    def undo(self) -> None:
        """Take back what `create` did: for input that turns out to be bad before the first generation is done."""
        shutil.rmtree(self.path)
        if self._aside is not None:
            self._aside.rename(self.path)

    def exists(self) -> bool:
        """Whether there is anything in the directory."""
        return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))

    def refuse(self, *, overwrite: bool) -> None:
        """Raise RunExistsError where the directory is taken and may not be moved aside."""
        there = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not there.is_dir():
            raise RunExistsError(f"output_dir {self.path}: {there} is a file; choose another")
        if not os.access(there, os.W_OK):
            raise RunExistsError(f"output_dir {self.path}: no permission to write into {there}; choose another")
        if self.exists() and overwrite and not (self.config.is_file() or self.journal.is_file()):
            raise RunExistsError(f"output_dir {self.path} holds something else than a run; choose another")
        if self.exists() and not overwrite:
            raise RunExistsError(
                f"output_dir {self.path} is not empty; choose another, or move it aside with --overwrite"
            )

    def append_metrics(self, row: dict[str, Any]) -> None:
        """One line of metrics.jsonl; also kept for the figures."""
        self.rows.append(row)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _move_aside(self) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.path.stat().st_mtime))
        aside = self.path.with_name(f"{self.path.name}.{stamp}")
        count = 1
        while aside.exists():
            count += 1
            aside = self.path.with_name(f"{self.path.name}.{stamp}.{count}")
        self._aside = self.path.rename(aside)


def config_hash(config: Config) -> str:
    """SHA-256 of the resolved config, the output directory left out: it does not change a run."""
    tree = config.model_dump(mode="json", exclude={"output_dir"})
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), "evoalign": __version__, **libraries}


def make_manifest(config: Config, facts: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """Where, when and with what a run was made. Nothing here is needed to replay it."""
    return {
        "format_version": config.format_version,
        "command": list(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config_hash": config_hash(config),
        "versions": versions(),
        "hardware": _hardware(),
        "git": _git(),
        **facts,
    }


def _hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"system": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}


def _git() -> dict[str, Any] | None:
    """Commit and state of the working directory's repository, if it is one."""
    try:
        commit = _run_git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_run_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _run_git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def command_line() -> list[str]:
    """The command as it was typed."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
