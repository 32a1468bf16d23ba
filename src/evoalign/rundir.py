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

from evoalign import journal
from evoalign.checkpoint import write_text
from evoalign.config import Config, to_yaml
from evoalign.errors import RunExistsError
from evoalign.version import __version__

FAILED_COMPLETION = "failed_completion.json"
RESOURCES = ("engine.device ", "engine.memory_gib ", "engine.max_rows ", "engine.threads ")
"""Settings that a run may have to change to fit where it goes on. They decide the shapes of batches."""
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

    def completions(self, name: str) -> Path:
        """A parquet file of completions."""
        return self.results / "completions" / f"{name}.parquet"

    def create(self, config: Config, manifest: Mapping[str, Any], *, overwrite: bool, resume: bool = False) -> None:
        """Make the folders and write config and manifest. Raises RunExistsError."""
        if self.exists():
            self.refuse(overwrite=overwrite, resume=resume)
            if self.is_unstarted():
                shutil.rmtree(self.path)
            else:
                self._move_aside()
        for folder in (self.results / "completions", self.figures, self.path / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(self.config, to_yaml(config))
        write_text(self.manifest, json.dumps(manifest, indent=2) + "\n")

    def go_on(self, config: Config, manifest: Mapping[str, Any]) -> None:
        """Make what is missing of the folders, write the config of now, and add to the manifest who goes on."""
        for folder in (self.results / "completions", self.figures, self.path / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(self.config, to_yaml(config))
        try:
            whole = json.loads(self.manifest.read_text(encoding="utf-8"))
            whole.setdefault("resumed", []).append(dict(manifest))
        except (OSError, ValueError, AttributeError):  # lost or damaged: it is not needed to go on
            whole = dict(manifest)
        write_text(self.manifest, json.dumps(whole, indent=2) + "\n")

    def undo(self) -> None:
        """Take back what `create` did: for input that turns out to be bad before the first generation is done."""
        shutil.rmtree(self.path)
        if self._aside is not None:
            self._aside.rename(self.path)

    def exists(self) -> bool:
        """Whether there is anything in the directory; what is left of a reward that failed does not count."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(entry.name != FAILED_COMPLETION for entry in self.path.iterdir())

    def refuse(self, *, overwrite: bool, resume: bool = False) -> None:
        """Raise RunExistsError where the directory is taken and may not be moved aside.

        `resume` takes a run that recorded nothing yet.
        """
        there = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not there.is_dir():
            raise RunExistsError(f"output_dir {self.path}: {there} is a file; choose another")
        if not os.access(there, os.W_OK):
            raise RunExistsError(f"output_dir {self.path}: no permission to write into {there}; choose another")
        if not self.exists() or (resume and self.is_unstarted()):
            return
        if (overwrite or resume) and not (self.config.is_file() or self.journal.is_file()):
            raise RunExistsError(f"output_dir {self.path} holds something else than a run; choose another")
        if not overwrite:
            raise RunExistsError(
                f"output_dir {self.path} is not empty; go on with its run with --resume, move it aside with "
                "--overwrite, or choose another"
            )

    def is_unstarted(self) -> bool:
        """Whether a run was begun here that has not come as far as the first line of its journal."""
        return self.config.is_file() and journal.is_blank(self.journal) and not self.has_progress()

    def has_progress(self) -> bool:
        """Whether generations have left anything beside the journal."""
        return self.metrics.is_file() or bool(saved_folders(self.path))

    def keep_failure(self, failed: Mapping[str, Any]) -> Path:
        """Write down the completion that a reward failed on; a run need not have begun."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / FAILED_COMPLETION
        write_text(file, json.dumps(dict(failed), indent=2) + "\n")
        return file

    def append_metrics(self, row: dict[str, Any]) -> None:
        """One line of metrics.jsonl; also kept for the figures."""
        self.rows.append(row)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def replace_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """All of metrics.jsonl anew."""
        self.rows = list(rows)
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def read_metrics(self) -> dict[int, dict[str, Any]]:
        """Rows by generation; lines that are cut or damaged are left out."""
        rows: dict[int, dict[str, Any]] = {}
        text = self.metrics.read_bytes() if self.metrics.is_file() else b""
        for line in text.splitlines():
            try:
                row = json.loads(line)
                rows[int(row["generation"])] = row
            except (ValueError, KeyError, TypeError):
                continue
        return rows

    def _move_aside(self) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.path.stat().st_mtime))
        aside = self.path.with_name(f"{self.path.name}.{stamp}")
        count = 1
        while aside.exists():
            count += 1
            aside = self.path.with_name(f"{self.path.name}.{stamp}.{count}")
        self._aside = self.path.rename(aside)


def saved_folders(path: Path) -> list[Path]:
    """The saved means of a run, the latest last."""
    found = [*path.glob("loras/generation_*"), *path.glob("checkpoints/generation_*")]
    return sorted((f for f in found if f.name[11:].isdecimal()), key=lambda folder: int(folder.name[11:]))


def identity(config: Config) -> dict[str, Any]:
    """The settings that make a run what it is: those that only say what is kept, shown or told are left out.

    The number of generations is one of these too, unless a schedule depends on it: a longer run of the same settings
    begins as the shorter one.
    """
    tree = config.model_dump(mode="json", exclude={"output_dir", "grader", "checkpoint", "tracking", "checks"})
    del tree["evaluation"]["every"]
    if config.es.sigma_schedule.name == config.es.learning_rate_schedule.name == "constant":
        del tree["es"]["num_generations"]
    return tree


def config_hash(config: Config) -> str:
    """SHA-256 of what makes a run what it is."""
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()


def differences(ours: Config, theirs: Config) -> tuple[list[str], list[str]]:
    """In words, what makes two configs different runs, and what may only move the last bits of a score."""
    odd = _differ(identity(ours), identity(theirs), "")
    resources = [line for line in odd if line.startswith(RESOURCES)]
    return [line for line in odd if line not in resources], resources


def _differ(ours: Any, theirs: Any, name: str) -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted({*ours, *theirs}, key=str)
        return [line for k in keys for line in _differ(ours.get(k), theirs.get(k), f"{name}.{k}" if name else str(k))]
    return [] if ours == theirs else [f"{name} is {theirs!r} in the run and {ours!r} now"]


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
