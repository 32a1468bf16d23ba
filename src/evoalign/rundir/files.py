# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from evoalign.config.reading import check_regular
from evoalign.errors import DataError, RunExistsError, RunGoneError
from evoalign.rundir.links import is_link, refuse_links_above

MOST_BYTES = 2**44


def write_text(path: Path, text: str) -> None:
    """Write, flush to disk, then rename into place."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """As `write_text`, a row a line as JSON; no file where there are none. Raises ValueError for what is no number."""
    if rows:
        write_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file that is written under another name, flushed to disk and renamed; gone where that fails.

    Raises RunExistsError where a link inside a run directory leads to it.
    """
    refuse_links_above(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a process that died, or a link that leads elsewhere
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def digest_of(path: Path) -> str:
    """SHA-256 of a file. Raises DataError for what is no plain file, or cannot be read."""
    check_regular(path, MOST_BYTES)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None


def sync_folder(folder: Path) -> None:
    """Make a new or renamed entry of a folder last."""
    handle = opened(folder)
    if handle is None:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def filled(folder: Path, *, replace: bool = True) -> Generator[Path]:
    """A folder that is filled under another name and renamed when it is complete.

    Raises RunExistsError where another process is filling it, OSError for a full disk however a library says that.
    """
    folder = folder.absolute()
    with scratch(folder.with_name(f".{folder.name}.tmp")) as temporary:
        with as_os_errors(folder):
            yield temporary
        _flush(temporary)
        _put(temporary, folder, replace=replace)


@contextmanager
def scratch(folder: Path) -> Generator[Path]:
    """An empty folder for the time being. Whoever takes the name next takes away what a process that died left there.

    Raises RunExistsError where another process is in it, or a link inside a run directory leads to it.
    """
    refuse_links_above(folder)
    if is_link(folder):  # what it points to is not ours to empty
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    handle = opened(folder)
    try:
        if handle is not None and not (locked(handle) and is_at(handle, folder)):
            raise RunExistsError(f"{folder}: another process is writing there; wait for it, or choose another folder")
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


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless they exist. Raises RunExistsError for links inside a run directory."""
    refuse_links_above(folder / "file")
    folder.mkdir(parents=True, exist_ok=True)


def opened(folder: Path) -> int | None:
    """A folder, held open so that no other can pass for it; None where a system knows no such thing."""
    return os.open(folder, os.O_RDONLY) if os.name == "posix" else None


def locked(file: IO[bytes] | int) -> bool:
    """Lock an open file or folder; False where another process has it."""
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


def is_at(file: IO[bytes] | int, path: Path) -> bool:
    """Whether an open file or folder still is the one at its path: it may have been removed, moved or replaced."""
    try:
        return os.path.samestat(os.fstat(file if isinstance(file, int) else file.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_at(file: IO[bytes] | int, path: Path) -> None:
    """Raise RunGoneError where an open file or folder of a run is not the one at its path any more."""
    if not is_at(file, path):
        raise RunGoneError(
            f"{path} was removed, moved or replaced while the run was writing there, so it has stopped; if the folder "
            "was moved, resume where it is now, or put it back"
        )


def remove(path: Path) -> None:
    """A file, a link (and not what it points to), or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_whole(path: Path) -> None:
    """`remove` a folder so that no part of it is ever seen under its name.

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
    """What libraries raise where a disk is full, or a file may not be written, as the OSError that it is."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if code := re.search(r"\(os error (\d+)\)", str(error)):  # as safetensors and tokenizers say it
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        if re.search("inline_container|PytorchStreamWriter", str(error)):  # torch.save does not say why
            raise OSError(f"a file could not be written to its end; is the disk full? {path}") from error
        raise


def _flush(folder: Path) -> None:
    """To the disk, and readable as the user's other files are."""
    mode = 0o666 & ~_umask()
    for path in _below(folder):
        path.chmod(mode)  # safetensors gives 0600, and a server under another user reads them too
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _put(temporary: Path, folder: Path, *, replace: bool) -> None:
    if folder.exists():
        if replace:
            remove_whole(folder)
        else:
            folder.rmdir()  # fails where something has come into it
    temporary.replace(folder)
    sync_folder(folder.parent)


def _umask() -> int:
    """What the user keeps from others. It can only be read by setting it; for that moment, to the strictest."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
