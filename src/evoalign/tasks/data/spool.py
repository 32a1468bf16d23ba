# SPDX-License-Identifier: Apache-2.0
"""Row storage: JSON in an unnamed temporary file for large data sets, and the exact JSON that worker processes use."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from evoalign.errors import DataError
from evoalign.types import Example

IN_MEMORY = 10_000
"""Maximum rows of a source to keep as a list; a row in memory takes several times its bytes on disk."""

Order = npt.NDArray[np.int64]


class Spooled(Sequence[Example]):
    """Ordered rows of a store. Each access returns a new dict; slices share the store."""

    def __init__(self, store: _Store, order: Order) -> None:
        self.store, self.order = store, order

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> Spooled: ...
    def __getitem__(self, place: int | slice) -> Example | Spooled:
        if isinstance(place, slice):
            return Spooled(self.store, self.order[place])
        return self.store.row(int(self.order[place]))

    def __repr__(self) -> str:
        return f"<{len(self):,} rows in a temporary file>"


class _Store:
    """Rows of one source. Rows that JSON would change, such as those with dates, stay in memory."""

    def __init__(self, rows: Iterable[Example]) -> None:
        self.kept: dict[int, Example] = {}
        self._ends = array("q", [0])
        self._lock = threading.Lock()
        try:
            self._file = tempfile.TemporaryFile(prefix="evoalign-rows-")  # noqa: SIM115 (deleted with this object)
            for row in rows:
                end = self._ends[-1]
                if is_exact(row):
                    end += self._file.write(encode(row))
                else:
                    self.kept[len(self)] = row
                self._ends.append(end)
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"cannot store rows in {tempfile.gettempdir()}: {error.strerror}; free space there, or set TMPDIR to "
                "another folder"
            ) from error

    def __len__(self) -> int:
        return len(self._ends) - 1

    def row(self, index: int) -> Example:
        """Return a row."""
        if index in self.kept:
            return self.kept[index]
        start, size = self._ends[index], self._ends[index + 1] - self._ends[index]
        if hasattr(os, "pread"):  # does not move the file position, which forks share
            return decode(os.pread(self._file.fileno(), size, start))
        with self._lock:
            self._file.seek(start)
            return decode(self._file.read(size))


def gathered(rows: Iterable[Example]) -> Sequence[Example]:
    """Return the rows as a list, or in a temporary file if there are many. Raises DataError if the disk is full."""
    rows = iter(rows)
    first = list(islice(rows, IN_MEMORY))
    more = list(islice(rows, 1))
    if not more:
        return first
    store = _Store(chain(first, more, rows))
    return Spooled(store, np.arange(len(store), dtype=np.int64))


def taken(rows: Sequence[Example], places: Order | Sequence[int]) -> Sequence[Example]:
    """Return the rows at these places, in this order."""
    if isinstance(rows, Spooled):
        return Spooled(rows.store, rows.order[np.asarray(places, dtype=np.int64)])
    return [rows[int(i)] for i in places]


def held(rows: Sequence[Example]) -> Iterable[tuple[int, Example]]:
    """Return the rows that are the same object at each access, with their places: for a list, all."""
    if not isinstance(rows, Spooled):
        return enumerate(rows)
    kept, order = rows.store.kept, rows.order
    return ((int(i), kept[int(order[i])]) for i in np.flatnonzero(np.isin(order, np.fromiter(kept, np.int64))))


def encode(message: object) -> bytes:
    """Encode as a line of JSON that preserves every code point. Raises ValueError, TypeError."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def decode(line: bytes) -> Any:
    """Decode a line of `encode`."""
    return json.loads(line.decode("utf-8", "surrogatepass"))


def is_exact(value: object) -> bool:
    """Return whether JSON preserves the value: no tuples, numpy numbers, bytes, dates or non-string keys."""
    if isinstance(value, dict):
        return type(value) is dict and all(type(k) is str and is_exact(v) for k, v in value.items())
    if isinstance(value, list):
        return type(value) is list and all(map(is_exact, value))
    if isinstance(value, int):  # Python rejects integers of more than 4300 digits
        return type(value) in (int, bool) and value.bit_length() < 10_000
    return value is None or type(value) in (str, float)
