# SPDX-License-Identifier: Apache-2.0
"""Files from anywhere, read as data: a regular file of bounded size, and JSON of bounded depth and plain numbers.

All else, whatever is wrong with it, is one DataError that names the file and says what to do. A pipe, a device or a
circle of links is refused before it is opened, so that nothing waits for it.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from evoalign.errors import DataError

FILE_BYTES = 2**30
"""Of a file that grows with a run; a longer one is no run's."""
JSON_BYTES = 2**24
"""Of a file that is one JSON value, which takes many times the memory that it takes on disk."""
DEPTH = 64
"""Levels of lists and objects. Python's own reader follows a thousand, and its writer then fails."""
WORD = 2**64
MEND = "put it back from a copy"
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")


class MissingError(DataError):
    """There is no file of that name."""


def check_regular(path: Path, limit: int = FILE_BYTES, mend: str = MEND) -> None:
    """Raise DataError where something else than a plain file of at most `limit` bytes is there, MissingError for none.

    A link to a plain file is one.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise DataError(f"{path} is a link to nothing; {mend}") from None
        raise MissingError(f"{path} is missing; {mend}") from None
    except (OSError, ValueError) as error:  # a circle of links, no permission; a NUL in the name
        raise DataError(f"{path} cannot be read ({_said(error)}); {mend}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is not a file; {mend}")
    if found.st_size > limit:
        raise DataError(f"{path} is larger than {limit // 2**10} KiB, which no run leaves; {mend}")


def open_plain(path: Path, limit: int = FILE_BYTES, mend: str = MEND) -> BufferedReader:
    """A plain file, to be read. Raises DataError, MissingError for one that is not there."""
    check_regular(path, limit, mend)
    try:
        # Not to wait where a pipe has come in its place since.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        return os.fdopen(handle, "rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({_said(error)}); {mend}") from None


def read_bytes(path: Path, limit: int = FILE_BYTES, mend: str = MEND) -> bytes:
    """All of a plain file. Raises DataError, MissingError for one that is not there."""
    with open_plain(path, limit, mend) as file:
        try:
            return file.read(min(limit, os.fstat(file.fileno()).st_size))
        except OSError as error:
            raise DataError(f"{path} cannot be read ({_said(error)}); {mend}") from None


def read_json(path: Path, limit: int = JSON_BYTES, mend: str = MEND) -> Any:
    """A JSON file as `parse` has it. Raises DataError, MissingError for one that is not there."""
    return parse(read_bytes(path, limit, mend), str(path), mend)


def read_object(path: Path, limit: int = JSON_BYTES, mend: str = MEND) -> dict[str, Any]:
    """A JSON file that holds an object. Raises DataError, MissingError for one that is not there."""
    found = read_json(path, limit, mend)
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged (it holds no JSON object); {mend}")
    return found  # pyright: ignore[reportUnknownVariableType]


def parse(raw: bytes, where: str, mend: str = MEND, *, finite: bool = True) -> Any:
    """JSON in UTF-8. Raises DataError, which says `where`.

    Refused: more than DEPTH levels, whole numbers beyond 64 bits, and, with `finite`, numbers that are not finite.
    Half a pair of surrogates, which no file or terminal can take, becomes the sign for what cannot be read.
    """
    number = as_finite if finite else float
    try:
        found = json.loads(raw.decode("utf-8"), parse_int=_integer, parse_float=number, parse_constant=number)
        if raw.count(b"[") + raw.count(b"{") > DEPTH and _is_deep(found):
            raise RecursionError
        return _whole_text(found) if _ESCAPED.search(raw) else found
    except RecursionError:
        why = f"it is nested deeper than {DEPTH} levels"
    except UnicodeDecodeError:
        why = "it is not UTF-8"
    except ValueError as error:
        why = str(error)[:120]
    raise DataError(f"{where} is damaged ({why}); {mend}")


def _integer(text: str) -> int:
    value = int(text) if len(text) < 30 else WORD
    if not -WORD < value < WORD:
        raise ValueError("a whole number has more than 64 bits")
    return value


def as_finite(text: str) -> float:
    """Parse a number of JSON. Raises ValueError for NaN and infinities."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is not finite")
    return value


def _is_deep(found: Any) -> bool:
    level: list[Any] = [found]
    for _ in range(DEPTH + 1):
        inner = [list(v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if not inner:
            return False
        level = [v for values in inner for v in values]  # pyright: ignore[reportUnknownVariableType]
    return True


def _whole_text(found: Any) -> Any:
    text = json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return json.loads(text)


def _said(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
