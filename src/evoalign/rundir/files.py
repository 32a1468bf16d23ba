# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_text(path: Path, text: str) -> None:
    """Write, flush to disk, then rename into place."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file that is written under another name, flushed to disk and renamed; gone where that fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a new or renamed entry of a folder last."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class filled:  # noqa: N801  # reads as a verb at the `with`
    """A folder that is filled under another name and renamed when it is complete."""

    def __init__(self, folder: Path, *, replace: bool = True) -> None:
        self._folder = folder.absolute()
        self._replace = replace
        self._temporary = self._folder.with_name(f".{self._folder.name}.tmp")

    def __enter__(self) -> Path:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            return
        try:
            self._put()
        except BaseException:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise

    def _put(self) -> None:
        mode = 0o666 & ~_umask()
        for path in _below(self._temporary):
            path.chmod(mode)  # safetensors gives 0600, and a server under another user reads them too
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(self._temporary)
        if self._replace:
            shutil.rmtree(self._folder, ignore_errors=True)
        elif self._folder.exists():
            self._folder.rmdir()  # fails where something has come into it
        self._temporary.replace(self._folder)
        sync_folder(self._folder.parent)


def _umask() -> int:
    """What the user keeps from others. It can only be read by setting it; for that moment, to the strictest."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
