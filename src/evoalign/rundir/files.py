# SPDX-License-Identifier: Apache-2.0
"""Write files and folders that appear whole or not at all, and refuse links inside a run directory.

A link could make a run write or delete outside of its directory. The run directory itself may be a link. A link in
place of a file, or of a saved mean (`SAVED`), is replaced by what is written there, and its target stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from evoalign.config.reading import check_regular
from evoalign.errors import DataError, RunExistsError, RunGoneError
from evoalign.rundir.method import JOURNAL, is_run

MOST_BYTES = 2**44
ANALYSES = "analysis"
"""The folder of a run that `evoalign analyze ... --to` fills for the report."""
MADE = ("results", "results/completions", "figures", "logs")
"""The folders that each run has from its beginning."""
FOLDERS = (*MADE, "loras", "checkpoints", "trainer", ANALYSES)
"""All folders that evoalign makes in a run directory, except saved means and what libraries put into `LIBRARIES`."""
LIBRARIES = ("logs", "trainer")
"""The folders that trackers, servers and TRL write to: no link in them may lead out of them."""
SAVED = ("loras/generation_*", "checkpoints/generation_*")
"""Saved means. Each is replaced, renamed or deleted as a whole."""


# --- files and folders -----------------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name, flush it to disk and rename it."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write an object as JSON as `write_text` does. Raises ValueError for a number that is not finite."""
    write_text(path, json.dumps(tree, indent=2, allow_nan=False) + "\n")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write JSON lines as `write_text` does; no file for no rows. Raises ValueError for a number that is not finite."""
    if rows:
        write_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Yield a temporary file, flush it to disk and rename it to `path`; delete it where the body raises.

    Raises RunExistsError where a link inside a run directory leads to it.
    """
    refuse_links_above(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process, or a link that leads elsewhere
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def filled(folder: Path, *, replace: bool = True) -> Generator[Path]:
    """Yield a temporary folder, flush its files to disk and rename it to `folder`.

    With `replace`, an existing folder is replaced; otherwise it has to be empty. Raises RunExistsError where another
    process is filling it, and OSError for a full disk, however a library reports that.
    """
    folder = folder.absolute()
    with scratch(folder.with_name(f".{folder.name}.tmp")) as temporary:
        with as_os_errors(folder):
            yield temporary
        _flush(temporary)
        _put(temporary, folder, replace=replace)


@contextmanager
def scratch(folder: Path) -> Generator[Path]:
    """Yield an empty, locked folder and delete it afterwards; what a killed process left there is deleted first.

    Raises RunExistsError where another process is in it, or a link inside a run directory leads to it.
    """
    refuse_links_above(folder)
    if is_link(folder):  # its target must not be emptied
        folder.unlink(missing_ok=True)
    busy = RunExistsError(f"{folder}: another process is writing there; wait for it, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if error.filename == str(folder) and _is_folder_or_gone(folder):  # another process has just deleted it
            raise busy from None
        raise
    try:
        handle = opened(folder)
    except FileNotFoundError:  # likewise
        raise busy from None
    try:
        if handle is not None and not (locked(handle) and is_at(handle, folder)):
            raise busy
        for left in folder.iterdir():
            remove(left)
        try:
            yield folder
        finally:
            if handle is None or is_at(handle, folder):  # not renamed
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        if handle is not None:
            os.close(handle)


def _is_folder_or_gone(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def _flush(folder: Path) -> None:
    """Flush a folder's files to disk, with the permissions of the user's other files."""
    mode = 0o666 & folder.stat().st_mode  # the umask could be read only by setting it, for all threads
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)  # safetensors writes 0600, and a server under another user reads them too
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _put(temporary: Path, folder: Path, *, replace: bool) -> None:
    if folder.exists() and replace:
        remove_whole(folder)
    elif folder.exists():
        folder.rmdir()  # raises where it is not empty
    temporary.replace(folder)
    sync_folder(folder.parent)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises DataError where it is not a regular file, or cannot be read."""
    check_regular(path, MOST_BYTES)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None


def make_folder(folder: Path) -> None:
    """Make a folder and its parents. Raises RunExistsError for links inside a run directory."""
    refuse_links_above(folder / "file")
    folder.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Delete a file, a link (not its target), or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_whole(path: Path) -> None:
    """Rename a folder, then delete it, so that it is never seen with some of its files missing.

    Raises RunExistsError where a link inside a run directory leads to it.
    """
    refuse_links_above(path)
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f".{path.name}.gone.tmp")
    with suppress(OSError):
        remove(gone)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def as_os_errors(path: Path) -> Generator[None]:
    """Turn what libraries raise for a full disk, or a file that may not be written, into OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if code := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors, tokenizers
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        if re.search("inline_container|PytorchStreamWriter", str(error)):  # torch.save gives no reason
            raise OSError(f"a file could not be written to its end; is the disk full? {path}") from error
        raise


# --- open files, locks -----------------------------------------------------------------------------------------------


def opened(folder: Path) -> int | None:
    """Return a descriptor of a folder, by which `is_at` recognizes it; None except on POSIX."""
    return os.open(folder, os.O_RDONLY) if os.name == "posix" else None


def sync_folder(folder: Path) -> None:
    """Flush new and renamed entries of a folder to disk."""
    handle = opened(folder)
    if handle is None:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def locked(file: IO[bytes] | int) -> bool:
    """Lock an open file or folder; return False where another process holds the lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def is_at(file: IO[bytes] | int, path: Path) -> bool:
    """Return whether an open file or folder is still the one at a path: not removed, moved or replaced."""
    try:
        return os.path.samestat(os.fstat(file if isinstance(file, int) else file.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_at(file: IO[bytes] | int, path: Path) -> None:
    """Raise RunGoneError where an open file or folder of a run is no longer the one at its path."""
    if not is_at(file, path):
        raise RunGoneError(
            f"{path} was removed, moved or replaced while the run was writing there, so it has stopped; if the folder "
            "was moved, resume where it is now, or put it back"
        )


# --- links -----------------------------------------------------------------------------------------------------------


def links_in(run: Path, names: Sequence[str] = FOLDERS, *, whole: bool = False) -> Iterator[Path]:
    """Yield the links in place of these folders of a run directory.

    With `whole`, yield also a link in place of the journal, to which lines are appended, and the links in `LIBRARIES`
    that lead out of them, except those to files in `logs` (see `unlink_files`).
    """
    yield from (run / name for name in names if is_link(run / name))
    if whole:
        yield from (file for file in [run / JOURNAL] if is_link(file))
        for name in LIBRARIES:
            yield from (link for link in _leading_out(run / name) if name != "logs" or link.is_dir())


def refuse_links(run: Path, names: Sequence[str] = FOLDERS, *, whole: bool = False) -> None:
    """Raise RunExistsError naming the first of `links_in` a run directory."""
    for link in links_in(run, names, whole=whole):
        _refuse(link)


def unlink_files(run: Path) -> None:
    """Remove links to files outside of `logs`, such as the one of wandb to its own log; their targets stay."""
    for link in _leading_out(run / "logs"):
        if not link.is_dir():
            link.unlink()


def refuse_links_above(path: Path) -> None:
    """Raise RunExistsError where `path` is in a run directory, and a folder between the two is a link."""
    links: list[Path] = []
    for folder in path.absolute().parents:
        if links and is_run(folder) and (folder / "config.yaml").exists():  # other programs have a manifest.json, too
            _refuse(links[-1])
        if is_link(folder):
            links.append(folder)


def is_link(path: Path) -> bool:
    """Return whether a symbolic link, or a junction of Windows, is at a path."""
    is_junction = getattr(os.path, "isjunction", None)  # from Python 3.12 on
    return path.is_symlink() or bool(is_junction and is_junction(path))


def _refuse(link: Path) -> None:
    kind = "folder" if link.is_dir() else "file"
    raise RunExistsError(
        f"{link} is a link, and a {kind} inside a run or sweep may not be one: put the {kind} itself there. To keep a "
        "run on another disk, move the whole run there and put a link in its place"
    )


def _leading_out(folder: Path) -> Iterator[Path]:
    inside = Path(os.path.realpath(folder))
    for place, folders, files in os.walk(folder):
        for entry in (Path(place, name) for name in (*folders, *files)):
            if is_link(entry) and not Path(os.path.realpath(entry)).is_relative_to(inside):
                yield entry
