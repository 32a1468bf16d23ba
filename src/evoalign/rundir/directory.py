# SPDX-License-Identifier: Apache-2.0
"""The files a run leaves: made once everything is known to work, so that bad input leaves nothing half-written."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from evoalign.config import Config, to_yaml
from evoalign.config.reading import MissingError, check_regular, parse, read_bytes, read_object
from evoalign.errors import ConfigError, DataError, EvoalignError, ModelError, RunExistsError
from evoalign.rundir import journal
from evoalign.rundir.files import check_at, is_at, locked, opened, remove, write_text
from evoalign.rundir.links import FOLDERS, MADE, links_in, refuse_links, refuse_links_above, unlink_files
from evoalign.rundir.method import JOURNAL, MANIFEST, is_run, resume_command
from evoalign.rundir.rows import is_row

FAILED_COMPLETION = "failed_completion.json"
REPORT = "report.html"
LOCK = ".lock"
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
"""What `create` and the first generation leave in a run directory. The manifest is made first and goes last: with it,
all the others are known to be of a run."""
MEASURING = "measuring"
"""Stands, true, in results/evaluation.json while placebos and nats a token are being measured."""
BEFORE_VALIDATION, AFTER_VALIDATION = "before_validation", "after_validation"
"""Completions of the validation split, beside `before` and `after` of the test split."""
EARLY = (
    MANIFEST, JOURNAL, "results/budget.json", "results/completions/before.parquet",
    f"results/completions/{BEFORE_VALIDATION}.parquet",
)  # fmt: skip
"""The files that a run may have left before its first generation, beside config.yaml; without our manifest none."""


PRUNED_TRIES = 5
_T = TypeVar("_T")


class RunDir:
    """The paths of a run and the writing of its plain files."""

    def __init__(self, path: Path) -> None:
        try:
            path = path.expanduser().absolute()  # a hook or a reward may change the working directory
        except RuntimeError:
            raise ConfigError(f"output_dir {path} names the home of nobody here") from None
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
        self._folder: int | None = None
        """The locked folder, open: no other can pass for it."""
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

        Makes the folder. Raises RunExistsError where another process is in it, and for links inside it.
        """
        self._check_place()
        refuse_links_above(self.path / LOCK)
        refuse_links(self.path, whole=True)
        self._made += [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            check_regular(self.path / LOCK, mend="delete it")  # to open a pipe would be to wait for it
        except MissingError:
            pass
        except DataError as error:
            raise RunExistsError(f"output_dir {self.path}: {error}") from error
        file = (self.path / LOCK).open("ab")
        if not locked(file) or not is_at(file, self.path / LOCK):
            file.close()
            raise RunExistsError(
                f"output_dir {self.path}: another process is training there; stop it first, or choose another"
            )
        self._lock = file
        self._folder = opened(self.path)
        _HELD.add(file)
        unlink_files(self.path)

    def release(self) -> None:
        """Let others in. Folders that were made for the lock and hold nothing go too."""
        if self._lock is not None:
            if is_at(self._lock, self.path / LOCK):  # and not that of another process
                (self.path / LOCK).unlink()
            self._lock.close()
            self._lock = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
        for folder in self._made:
            with suppress(OSError):  # not empty: it is a run by now
                folder.rmdir()

    @property
    def is_here(self) -> bool:
        """Whether the folder at the path still is the one that was locked."""
        return self._folder is None or is_at(self._folder, self.path)

    def check(self) -> None:
        """Raise RunGoneError where the folder was removed, moved or replaced since it was locked.

        Raise RunExistsError where one of the folders in it is a link by now.
        """
        if self._folder is not None:
            check_at(self._folder, self.path)
        refuse_links(self.path)

    def create(self, config: Config, manifest: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folders and write config and manifest; nothing is left of them where that fails.

        Raises RunExistsError. A run that was here is moved to `aside`; one that never began goes.
        """
        self.check()
        if self.exists():
            self.refuse(overwrite=overwrite)
            if not self.is_unstarted():
                self._move_aside()
        self._created = True
        try:
            self._clear()
            write_text(self.manifest, json.dumps(manifest, indent=2) + "\n")
            self._make_folders()
            write_text(self.config, to_yaml(config))
        except BaseException:
            self.undo()
            raise

    def resume(self, config: Config, manifest: Mapping[str, Any]) -> None:
        """Make what is missing of the folders, write the config of now, and add to the manifest who resumes the run."""
        self._make_folders()
        write_text(self.config, to_yaml(config))
        try:
            whole = read_object(self.manifest)
            whole.setdefault("resumed", []).append(dict(manifest))
        except (DataError, AttributeError):  # lost or damaged: it is not needed to resume
            whole = dict(manifest)
        write_text(self.manifest, json.dumps(whole, indent=2) + "\n")

    def sweep(self) -> None:
        """Take away what a process that died left half written."""
        names = () if any(links_in(self.path)) else FOLDERS
        for place in (self.path, *(self.path / name for name in names)):
            for file in place.glob(".*.tmp"):
                remove(file)

    def undo(self) -> None:
        """Take back what `create` did: for input that turns out to be bad before the first generation is done."""
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

    def _make_folders(self) -> None:
        for name in MADE:
            (self.path / name).mkdir(exist_ok=True)

    def _clear(self) -> None:
        """Take away what is left of a run that never began, the manifest last."""
        self.sweep()
        for name in OURS:
            if name != FAILED_COMPLETION:
                remove(self.path / name)

    def exists(self) -> bool:
        """Whether there is anything in the directory; a lock, and what a failed reward left, do not count."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(entry.name not in (FAILED_COMPLETION, LOCK) for entry in self.path.iterdir())

    def refuse(self, *, overwrite: bool) -> None:
        """Raise RunExistsError where the directory is taken and may not be moved aside.

        A run that recorded nothing yet takes no place.
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
        """Whether a run was begun here, and nothing else is, that has not come as far as the first line of its journal.

        It may have died at any instant of its beginning. What it left is made again; a file of the user's is not ours.
        """
        if not journal.is_blank(self.journal) or self.has_progress():
            return False
        has_manifest = self._has_manifest()
        return all(self._is_early(path, has_manifest) for path in self.path.rglob("*"))

    def _is_early(self, path: Path, has_manifest: bool) -> bool:
        """Whether something below is of a run that never began. Before the manifest, its folders are empty."""
        name = path.relative_to(self.path)
        if has_manifest and name.parts[0] in ("logs", "trainer"):  # of trackers, and of GRPO's trainer
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

    def _has_manifest(self) -> bool:
        """Whether there is one, and it is ours."""
        try:
            return "format_version" in read_object(self.manifest)
        except DataError:
            return False

    def has_progress(self) -> bool:
        """Whether generations have left anything beside the journal."""
        return self.metrics.is_file() or bool(saved_folders(self.path)) or any(self.path.glob("trainer/checkpoint-*"))

    def keep_failure(self, failed: Mapping[str, Any]) -> Path:
        """Write down the completion that a reward failed on; a run need not have begun."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / FAILED_COMPLETION
        write_text(file, json.dumps(dict(failed), indent=2) + "\n")
        return file

    def append_metrics(self, row: dict[str, Any]) -> None:
        """One line of metrics.jsonl; also kept for the figures. Raises RunGoneError."""
        self.check()
        self.rows.append(row)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def replace_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """All of metrics.jsonl anew."""
        self.rows = list(rows)
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def read_metrics(self) -> dict[int, dict[str, Any]]:
        """Rows by generation; lines that are cut or damaged are left out. Raises DataError for what is no file."""
        rows: dict[int, dict[str, Any]] = {}
        try:
            text = read_bytes(self.metrics)
        except MissingError:
            return rows
        for line in text.splitlines():
            with suppress(DataError):
                row = parse(line, str(self.metrics), finite=False)
                if is_row(row):
                    rows[row["generation"]] = row
        return rows

    def _move_aside(self) -> None:
        try:
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.path.stat().st_mtime))
        except (OverflowError, ValueError, OSError):  # a date that no calendar has
            stamp = "undated"
        aside = self.path.with_name(f"{self.path.name}.{stamp}")
        count = 1
        while aside.exists():
            count += 1
            aside = self.path.with_name(f"{self.path.name}.{stamp}.{count}")
        held, folder = self._lock, self._folder
        if os.name != "posix":  # an open file keeps its folder where it is
            self.release()
        self.aside = self.path.rename(aside)  # with the lock, so that nobody takes the old run for a moment
        self._lock = self._folder = None
        try:
            self.lock()
        finally:
            (aside / LOCK).unlink(missing_ok=True)
            if held is not None and os.name == "posix":
                held.close()
            if folder is not None and os.name == "posix":
                os.close(folder)


_HELD: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _forget_locks() -> None:
    """A fork, such as a worker that scores, shares the lock of its parent; it must not keep it beyond that."""
    for file in list(_HELD):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def older_report(run: Path) -> str:
    """Words for who added to a run that has a report: that one is not written over unasked."""
    file = run / REPORT
    return f"; {file} is from before, `evoalign report {run}` writes it anew" if file.is_file() else ""


def generation_of(folder: Path) -> int:
    """The number in the name of a saved mean."""
    return int(folder.name.removeprefix("generation_"))


def saving_places(path: Path) -> tuple[Path, Path]:
    """The folders in which a run keeps its saved means: adapters, and whole checkpoints."""
    return path / "loras", path / "checkpoints"


def saved_folders(path: Path) -> list[Path]:
    """The saved means of a run, the latest last."""
    found = [folder for place in saving_places(path) for folder in place.glob("generation_*")]
    return sorted((f for f in found if f.name.removeprefix("generation_").isdecimal()), key=generation_of)


def again_if_pruned(path: Path, read: Callable[[], _T], known: Sequence[Path] | None = None) -> _T:
    """`read` the latest saved mean of a run; once more where the run, which goes on, has deleted it meanwhile.

    `known`: the saved means that were there when the first one to read was chosen, where that was before. Raises
    ModelError where it is deleted again and again.
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
                    f"{gone[-1]} was deleted while it was read: the run goes on and keeps the latest alone; raise "
                    "checkpoint.keep_last, or wait until it is done"
                ) from error
            known = None
    raise AssertionError
