# SPDX-License-Identifier: Apache-2.0
"""The files a run leaves: made once everything is known to work, so that bad input leaves nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from evoalign.config import Config, to_yaml
from evoalign.errors import RunExistsError
from evoalign.rundir import journal
from evoalign.rundir.files import write_text
from evoalign.rundir.method import JOURNAL, MANIFEST, is_run, resume_command

FAILED_COMPLETION = "failed_completion.json"
LOCK = ".lock"
OURS = frozenset({"config.yaml", MANIFEST, JOURNAL, "metrics.jsonl", "results", "figures", "logs",
                  "trainer", FAILED_COMPLETION, LOCK})  # fmt: skip
"""What `create` and the first generation leave in a run directory."""


class RunDir:
    """The paths of a run and the writing of its plain files."""

    def __init__(self, path: Path) -> None:
        path = path.expanduser().absolute()  # a hook or a reward may change the working directory
        self.path = path
        self.config = path / "config.yaml"
        self.manifest = path / MANIFEST
        self.journal = path / JOURNAL
        self.metrics = path / "metrics.jsonl"
        self.results = path / "results"
        self.budget = self.results / "budget.json"
        self.figures = path / "figures"
        self.rows: list[dict[str, Any]] = []
        self.aside: Path | None = None
        """Where `create` moved the run that was here."""
        self._lock: IO[bytes] | None = None
        self._made: list[Path] = []
        self._created = False

    def saved(self, generation: int, *, adapter: bool) -> Path:
        """Where the mean after so many generations is saved."""
        return self.path / ("loras" if adapter else "checkpoints") / f"generation_{generation:04d}"

    def completions(self, name: str) -> Path:
        """A parquet file of completions."""
        return self.results / "completions" / f"{name}.parquet"

    def lock(self) -> None:
        """Keep other processes out until `release`; the lock goes with the process, however that ends.

        Makes the folder. Raises RunExistsError where another process is in it.
        """
        self._check_place()
        self._made += [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / LOCK).open("ab")
        if not _locked(file) or not _is_at(file, self.path / LOCK):
            file.close()
            raise RunExistsError(
                f"output_dir {self.path}: another process is training there; stop it first, or choose another"
            )
        self._lock = file
        _HELD.add(file)

    def release(self) -> None:
        """Let others in. Folders that were made for the lock and hold nothing go too."""
        if self._lock is not None:
            (self.path / LOCK).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
        for folder in self._made:
            with suppress(OSError):  # not empty: it is a run by now
                folder.rmdir()

    def create(self, config: Config, manifest: Mapping[str, Any], *, overwrite: bool, resume: bool = False) -> None:
        """Make the folders and write config and manifest; nothing is left of them where that fails.

        Raises RunExistsError. A run that was here is moved to `aside`.
        """
        if self.exists():
            self.refuse(overwrite=overwrite, resume=resume)
            if not (resume and self.is_unstarted()):
                self._move_aside()
        self._created = True
        try:
            self.journal.unlink(missing_ok=True)  # without a first line
            self._make_folders()
            write_text(self.config, to_yaml(config))
            write_text(self.manifest, json.dumps(manifest, indent=2) + "\n")
        except BaseException:
            self.undo()
            raise

    def resume(self, config: Config, manifest: Mapping[str, Any]) -> None:
        """Make what is missing of the folders, write the config of now, and add to the manifest who resumes the run."""
        self._make_folders()
        write_text(self.config, to_yaml(config))
        try:
            whole = json.loads(self.manifest.read_text(encoding="utf-8"))
            whole.setdefault("resumed", []).append(dict(manifest))
        except (OSError, ValueError, AttributeError):  # lost or damaged: it is not needed to resume
            whole = dict(manifest)
        write_text(self.manifest, json.dumps(whole, indent=2) + "\n")

    def sweep(self) -> None:
        """Take away what a process that died left half written."""
        for file in [*self.path.glob(".*.tmp"), *self.path.glob("*/.*.tmp"), *self.path.glob("results/*/.*.tmp")]:
            _remove(file)

    def undo(self) -> None:
        """Take back what `create` did: for input that turns out to be bad before the first generation is done."""
        if not self._created:
            return
        self._created = False
        for name in OURS - {LOCK}:
            _remove(self.path / name)
        if self.aside is not None:
            self.release()
            with suppress(FileNotFoundError):
                self.path.rmdir()
            self.aside.rename(self.path)
            self.aside = None

    def _make_folders(self) -> None:
        for folder in (self.results / "completions", self.figures, self.path / "logs"):
            folder.mkdir(parents=True, exist_ok=True)

    def exists(self) -> bool:
        """Whether there is anything in the directory; a lock, and what a failed reward left, do not count."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(entry.name not in (FAILED_COMPLETION, LOCK) for entry in self.path.iterdir())

    def refuse(self, *, overwrite: bool, resume: bool = False) -> None:
        """Raise RunExistsError where the directory is taken and may not be moved aside.

        `resume` takes a run that recorded nothing yet.
        """
        self._check_place()
        if not self.exists() or (resume and self.is_unstarted()):
            return
        if not is_run(self.path):
            raise RunExistsError(f"output_dir {self.path} holds something else than a run; choose another")
        if not overwrite:
            raise RunExistsError(
                f"output_dir {self.path} holds a run; resume it ({resume_command(self.path)}), move it aside "
                "(--overwrite), or choose another"
            )

    def _check_place(self) -> None:
        there = next(place for place in (self.path, *self.path.parents) if place.exists())
        if not there.is_dir():
            raise RunExistsError(f"output_dir {self.path}: {there} is a file; choose another")
        if not os.access(there, os.W_OK):
            raise RunExistsError(f"output_dir {self.path}: no permission to write into {there}; choose another")

    def is_unstarted(self) -> bool:
        """Whether a run was begun here that has not come as far as the first line of its journal."""
        return (
            self.manifest.is_file()
            and journal.is_blank(self.journal)
            and not self.has_progress()
            and all(entry.name in OURS for entry in self.path.iterdir())
        )

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
        self.release()  # the lock's name; whoever comes in between is refused by the folder that is not empty
        self.aside = self.path.rename(aside)
        self.lock()


_HELD: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _locked(file: IO[bytes]) -> bool:
    """Lock a file; False where another process has it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that knows no locks
        return True
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file still is the one at its path: who releases a lock takes the file away."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _forget_locks() -> None:
    """A fork, such as a worker that scores, shares the lock of its parent; it must not keep it beyond that."""
    for file in list(_HELD):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _remove(path: Path) -> None:
    """A file, a link (and not what it points to), or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def generation_of(folder: Path) -> int:
    """The number in the name of a saved mean."""
    return int(folder.name.removeprefix("generation_"))


def saved_folders(path: Path) -> list[Path]:
    """The saved means of a run, the latest last."""
    found = [*path.glob("loras/generation_*"), *path.glob("checkpoints/generation_*")]
    return sorted((f for f in found if f.name.removeprefix("generation_").isdecimal()), key=generation_of)


def remove_saved(folder: Path) -> None:
    """Delete a saved mean; of one that is a link, the link."""
    _remove(folder)
