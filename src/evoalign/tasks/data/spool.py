# SPDX-License-Identifier: Apache-2.0
"""Many rows: as JSON in an unnamed temporary file, read back when they are asked for, so that memory holds few."""

from __future__ import annotations

import os
import tempfile
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import cast, overload

import numpy as np
import numpy.typing as npt

from evoalign.errors import DataError
from evoalign.tasks.exact import decode, encode, is_exact
from evoalign.types import Example

IN_MEMORY = 10_000
"""Rows of one source that are a list. More are spooled: a row in memory takes several times its bytes on disk."""

Order = npt.NDArray[np.int64]


class Spooled(Sequence[Example]):
    """Rows of a store in an order: each access gives the same row, as a new dict. Slices share the store."""

    def __init__(self, store: _Store, order: Order) -> None:
        self._store, self._order = store, order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> Spooled: ...
    def __getitem__(self, place: int | slice) -> Example | Spooled:
        if isinstance(place, slice):
            return Spooled(self._store, self._order[place])
        return self._store.row(int(self._order[place]))

    def __repr__(self) -> str:
        return f"<{len(self):,} rows in a temporary file>"

    def taken(self, places: Order) -> Spooled:
        """The rows at these places, in their order."""
        return Spooled(self._store, self._order[places])

    def held(self) -> Iterator[tuple[int, Example]]:
        """The rows that stayed in memory, with their places."""
        kept = np.isin(self._order, np.fromiter(self._store.kept, np.int64))
        return ((int(i), self._store.kept[int(self._order[i])]) for i in np.flatnonzero(kept))


class _Store:
    """The rows of one source, each once. A row that JSON would change, such as one with a date, stays in memory."""

    def __init__(self, rows: Iterable[Example]) -> None:
        self.kept: dict[int, Example] = {}
        self._ends = array("q", [0])
        self._lock = threading.Lock()
        try:
            self._file = tempfile.TemporaryFile(prefix="evoalign-rows-")  # noqa: SIM115 (gone with this object)
            for row in rows:
                self._add(row)
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"rows cannot be written to {tempfile.gettempdir()}, where many rows are kept: {error.strerror}; "
                "free space there, or set TMPDIR to a folder that has it"
            ) from error

    def __len__(self) -> int:
        return len(self._ends) - 1

    def row(self, index: int) -> Example:
        """A row as it was given."""
        if index in self.kept:
            return self.kept[index]
        start, end = self._ends[index], self._ends[index + 1]
        return decode(self._read(start, end - start))

    def _add(self, row: Example) -> None:
        end = self._ends[-1]
        if is_exact(row):
            end += self._file.write(encode(row))
        else:
            self.kept[len(self)] = row
        self._ends.append(end)

    def _read(self, start: int, size: int) -> bytes:
        if hasattr(os, "pread"):  # a fork shares the file and its position, which this leaves alone
            return os.pread(self._file.fileno(), size, start)
        with self._lock:
            self._file.seek(start)
            return self._file.read(size)


def gathered(rows: Iterable[Example]) -> Sequence[Example]:
    """The rows as a list, or as many as they are in a temporary file. Raises DataError where that has no room."""
    rows = iter(rows)
    first = list(islice(rows, IN_MEMORY))
    more = list(islice(rows, 1))
    if not more:
        return first
    store = _Store(chain(first, more, rows))
    return Spooled(store, np.arange(len(store), dtype=np.int64))


def taken(rows: Sequence[Example], places: Order) -> Sequence[Example]:
    """The rows at these places, in their order."""
    return rows.taken(places) if isinstance(rows, Spooled) else [rows[i] for i in cast("list[int]", places.tolist())]


def held(rows: Sequence[Example]) -> Iterable[tuple[int, Example]]:
    """The rows that are the same object at each access, with their places: of a list all."""
    return rows.held() if isinstance(rows, Spooled) else enumerate(rows)
