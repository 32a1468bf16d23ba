# SPDX-License-Identifier: Apache-2.0
"""A run's directory: its paths, its lock, and the writing of its plain files.

The directory is made only after everything else has been checked, so that bad input leaves nothing half-written.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import ValidationError

from evoalign.config import Config, to_yaml
from evoalign.config.reading import MissingError, check_regular, object_of, parse, read_bytes, read_object
from evoalign.errors import ConfigError, DataError, EvoalignError, ModelError, RunExistsError
from evoalign.rundir import files, journal
from evoalign.rundir.files import FOLDERS, MADE, is_at, refuse_links, remove, write_text
from evoalign.rundir.method import JOURNAL, MANIFEST, is_run, resume_command
from evoalign.rundir.metrics import MetricsRow

FAILED_COMPLETION = "failed_completion.json"
REPORT = "report.html"
LOCK = ".lock"
LINGERS = 1.0
"""Seconds that a lock is waited for: where a process was killed, one that it was just starting may hold the lock until
it has started."""
CHECKSUMS = "SHA256SUMS"
OURS = (
    JOURNAL,
    "metrics.jsonl",
    "results",
    "figures",
    "logs",
    "trainer",
    FAILED_COMPLETION,
    REPORT,
    CHECKSUMS,
    "config.yaml",
    MANIFEST,
)
"""The files and folders of a run. The manifest is made first and deleted last: it shows that the others are a run's."""
MEASURING = "measuring"
"""Key of results/evaluation.json, true while placebos and perplexity are being measured."""
BEFORE_VALIDATION, AFTER_VALIDATION = "before_validation", "after_validation"
"""Names of the completions of the validation split; those of the test split are `before` and `after`."""
EARLY = (
    MANIFEST,
    JOURNAL,
    "results/budget.json",
    "results/completions/before.parquet",
    f"results/completions/{BEFORE_VALIDATION}.parquet",
)
"""The files besides config.yaml that a run may have written before its first generation."""
PRUNED_TRIES = 5
_T = TypeVar("_T")


class RunDir:
    """A run's directory. `rows` are those of metrics.jsonl, `aside` is where `create` moved an earlier run."""

    def __init__(self, path: Path) -> None:
        try:
            path = path.expanduser().absolute()  # a hook or a reward may change the working directory
        except RuntimeError:
            raise ConfigError(f"output_dir {path}: there is no user of that name; give another folder") from None
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
        self._lock: IO[bytes] | None = None
        self._folder: int | None = None
        """Descriptor of the locked folder, by which it is recognized."""
        self._made: list[Path] = []
        self._created = False

    def saved(self, generation: int, *, adapter: bool) -> Path:
        """Return the folder of the mean saved after this many generations."""
        return self.path / ("loras" if adapter else "checkpoints") / f"generation_{generation:04d}"

    def completions(self, name: str) -> Path:
        """Return the path of a parquet file of completions."""
        return self.results / "completions" / f"{name}.parquet"

    def lock(self) -> None:
        """Make the folder and keep other processes out until `release`, or until this process ends.

        Raises RunExistsError where another process holds it, and for links inside it.
        """
        self._check_place()
        files.refuse_links_above(self.path / LOCK)
        refuse_links(self.path, whole=True)
        until = time.monotonic() + LINGERS
        while (file := self._locked()) is None:
            if time.monotonic() > until:
                raise RunExistsError(
                    f"output_dir {self.path}: another process is training there; stop it first, or choose another"
                )
            time.sleep(0.05)
        self._lock = file
        self._folder = files.opened(self.path)
        _LOCKS.add(file)
        files.unlink_files(self.path)

    def _locked(self) -> IO[bytes] | None:
        """Make the folder and return the locked file; None where another process holds it, or is removing it."""
        self._made += [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            check_regular(self.path / LOCK, mend="delete it")  # opening a pipe would wait for its other end
        except MissingError:
            pass
        except DataError as error:
            raise RunExistsError(f"output_dir {self.path}: {error}") from error
        try:
            file = (self.path / LOCK).open("ab")
        except FileNotFoundError:
            return None
        if files.locked(file) and is_at(file, self.path / LOCK):
            return file
        file.close()
        return None

    def release(self) -> None:
        """Remove the lock, and the folders that were made for it where they are empty."""
        if self._lock is not None:
            if is_at(self._lock, self.path / LOCK):  # not the lock of another process
                (self.path / LOCK).unlink()
            self._lock.close()
            self._lock = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
        for folder in self._made:
            with suppress(OSError):  # not empty: it holds a run
                folder.rmdir()

    @property
    def is_here(self) -> bool:
        """Whether the folder at the path is still the one that was locked."""
        return self._folder is None or is_at(self._folder, self.path)

    def check(self) -> None:
        """Raise RunGoneError where the folder was removed, moved or replaced since it was locked.

        Raise RunExistsError where a link has replaced one of the folders in it.
        """
        if self._folder is not None:
            files.check_at(self._folder, self.path)
        refuse_links(self.path)

    def create(self, config: Config, manifest: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folders and write config and manifest; undo that where it fails. Raises RunExistsError.

        With `overwrite`, a run that is there is moved to `aside`. A run that never began is deleted.
        """
        self.check()
        if self.exists():
            self.refuse(overwrite=overwrite)
            if not self.is_unstarted():
                self._move_aside()
        self._created = True
        try:
            self.sweep()
            for name in OURS:  # of a run that never began
                if name != FAILED_COMPLETION:
                    remove(self.path / name)
            write_text(self.manifest, json.dumps(manifest, indent=2) + "\n")
            self._make_folders()
            write_text(self.config, to_yaml(config))
        except BaseException:
            self.undo()
            raise

    def resume(self, config: Config, manifest: Mapping[str, Any]) -> None:
        """Make missing folders, write the present config, and append an entry to `resumed` in the manifest."""
        self._make_folders()
        try:
            whole = read_object(self.manifest)
            whole.setdefault("resumed", []).append(dict(manifest))
        except (DataError, AttributeError):  # missing or damaged; resuming does not need it
            whole = dict(manifest)
        write_text(self.manifest, json.dumps(whole, indent=2) + "\n")
        write_text(self.config, to_yaml(config))  # after the manifest, which has its hash

    def _make_folders(self) -> None:
        for name in MADE:
            (self.path / name).mkdir(exist_ok=True)

    def sweep(self) -> None:
        """Delete the temporary files of killed processes."""
        names = () if any(files.links_in(self.path)) else FOLDERS
        for place in (self.path, *(self.path / name for name in names)):
            for file in place.glob(".*.tmp"):
                remove(file)

    def undo(self) -> None:
        """Undo `create`, for input that turns out to be bad before the first generation is done."""
        if not self._created or not self.is_here:
            return
        self._created = False
        self.sweep()
        for name in OURS:
            remove(self.path / name)
        if self.aside is not None:
            self.release()
            with suppress(FileNotFoundError):
                self.path.rmdir()
            self.aside.rename(self.path)
            self.aside = None

    def exists(self) -> bool:
        """Return whether anything but a lock and a failed completion is in the directory."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(entry.name not in (FAILED_COMPLETION, LOCK) for entry in self.path.iterdir())

    def refuse(self, *, overwrite: bool) -> None:
        """Raise RunExistsError where something is in the directory that may not be moved aside.

        A run that has recorded nothing yet does not count.
        """
        self._check_place()
        if not self.exists() or self.is_unstarted():
            return
        if not is_run(self.path):
            raise RunExistsError(f"output_dir {self.path} holds something else than a run; choose another")
        refuse_links(self.path, whole=True)
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
        """Return whether the directory holds only files of a run that died before the first line of its journal."""
        if not journal.is_blank(self.journal) or self.has_progress():
            return False
        has_manifest = "format_version" in (object_of(self.manifest) or {})
        return all(self._is_early(path, has_manifest) for path in self.path.rglob("*"))

    def _is_early(self, path: Path, has_manifest: bool) -> bool:
        """Return whether a run that never began may have left this file. Without a manifest, its folders are empty."""
        name = path.relative_to(self.path)
        if has_manifest and name.parts[0] in ("logs", "trainer"):
            return True
        if path.is_dir():
            return not path.is_symlink() and name.as_posix() in (*MADE, "trainer")
        is_half = name.name.startswith(".") and name.name.endswith(".tmp")
        if is_half:
            name = name.with_name(name.name[1:-4])
        if name.as_posix() == self.config.name:  # a user's folder may have one; earlier releases wrote it first
            return has_manifest or all((self.path / folder).is_dir() for folder in MADE)
        if name.as_posix() in (LOCK, FAILED_COMPLETION):
            return True
        return name.as_posix() in EARLY and (has_manifest or is_half)  # a web page has a manifest.json, too

    def has_progress(self) -> bool:
        """Return whether generations have written anything besides the journal."""
        return self.metrics.is_file() or bool(saved_folders(self.path)) or any(self.path.glob("trainer/checkpoint-*"))

    def keep_failure(self, failed: Mapping[str, Any]) -> Path:
        """Write the completion that a reward failed on, also where no run has begun."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / FAILED_COMPLETION
        write_text(file, json.dumps(dict(failed), indent=2) + "\n")
        return file

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append a row to `rows` and to metrics.jsonl. Raises RunGoneError."""
        self.check()
        self.rows.append(row)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def replace_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write metrics.jsonl from these rows."""
        self.rows = list(rows)
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def read_metrics(self) -> dict[int, dict[str, Any]]:
        """Return the rows by generation, without damaged lines. Raises DataError where it is not a regular file."""
        rows: dict[int, dict[str, Any]] = {}
        try:
            text = read_bytes(self.metrics)
        except MissingError:
            return rows
        for line in text.splitlines():
            with suppress(DataError, ValidationError):
                row = parse(line, str(self.metrics), finite=False)
                MetricsRow.model_validate(row)
                rows[row["generation"]] = row
        return rows

    def _move_aside(self) -> None:
        try:
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.path.stat().st_mtime))
        except (OverflowError, ValueError, OSError):  # a time out of range
            stamp = "undated"
        name = f"{self.path.name}.{stamp}"
        places = (self.path.with_name(f"{name}.{n}" if n > 1 else name) for n in itertools.count(1))
        aside = next(place for place in places if not place.exists())
        if os.name != "posix":  # an open file keeps its folder from being renamed
            self.release()
        lock, folder = self._lock, self._folder
        self.aside = self.path.rename(aside)  # with the lock, so that no other process can resume it meanwhile
        self._lock = self._folder = None
        try:
            self.lock()
        finally:
            (aside / LOCK).unlink(missing_ok=True)
            if lock is not None:
                lock.close()
            if folder is not None:
                os.close(folder)


_LOCKS: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _close_locks() -> None:
    """Close the locks in a forked process, such as a grader, which would hold them after its parent's end."""
    for file in list(_LOCKS):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)


# --- saved means, report ---------------------------------------------------------------------------------------------


def older_report(run: Path) -> str:
    """Return a note that the run's report is outdated; empty where it has none."""
    file = run / REPORT
    return f"; {file} is outdated, `evoalign report {run}` writes it anew" if file.is_file() else ""


def generation_of(folder: Path) -> int:
    """Return the number in the name of a saved mean."""
    return int(folder.name.removeprefix("generation_"))


def saving_places(path: Path) -> tuple[Path, Path]:
    """Return the folders in which a run keeps its saved means: adapters, and whole checkpoints."""
    return path / "loras", path / "checkpoints"


def saved_folders(path: Path) -> list[Path]:
    """Return the saved means of a run, the latest last."""
    found = [folder for place in saving_places(path) for folder in place.glob("generation_*")]
    return sorted((f for f in found if f.name.removeprefix("generation_").isdecimal()), key=generation_of)


def again_if_pruned(path: Path, read: Callable[[], _T], known: Sequence[Path] | None = None) -> _T:
    """Call `read`, which reads the latest saved mean of a run; retry where the running run deleted it meanwhile.

    `known` are the saved means that were there when the mean to read was chosen; by default those there now. Raises
    ModelError where that happens `PRUNED_TRIES` times.
    """
    for left in reversed(range(PRUNED_TRIES)):
        known = saved_folders(path) if known is None else known
        try:
            return read()
        except (EvoalignError, OSError) as error:
            gone = [folder for folder in known if not folder.is_dir()]
            if not gone:
                raise
            if not left:
                raise ModelError(
                    f"{gone[-1]} was deleted while it was read: the run is still training and keeps only its latest "
                    "checkpoints; raise checkpoint.keep_last, or wait until it is done"
                ) from error
            known = None
    raise AssertionError
