# SPDX-License-Identifier: Apache-2.0
"""Rows of one file, one after another: JSON, JSON lines, CSV and TSV, each also gzipped, and parquet.

A file is read by what it holds, not by its extension; only CSV and TSV, which could be anything, are known by their
names. JSON is read strictly, with errors by line. Of CSV and TSV all values are text: nothing is guessed.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, cast

from evoalign.config.reading import DEPTH, MissingError, open_plain
from evoalign.errors import DataError, plain
from evoalign.rewards.functions import shown

Row: TypeAlias = tuple[str, dict[str, Any]]
"""Where a row stands, for error messages (`data.jsonl, line 7`), and its columns."""
Source: TypeAlias = BufferedReader | gzip.GzipFile

MAX_TEXT = 1 << 24
"""Characters of one text, some million tokens: a longer one fits into no model, and takes all memory before."""
LINE_BYTES = 1 << 28
LIST_BYTES = 1 << 32
"""Of a gzipped JSON list, unpacked: a list is read whole, and a few kilobytes of gzip can be any number."""
BATCH = 1000
"""Rows of a table that are Python objects at once."""
FORMS = "JSON, JSONL, CSV, TSV or parquet"
PARQUET, GZIP = b"PAR1", b"\x1f\x8b"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
_SPACES = re.compile(r"[ \t\n\r]*")


def read_file(path: Path) -> Iterator[Row]:
    """The rows of a file. Raises DataError."""
    try:
        file = open_plain(path, sys.maxsize, f"give a {FORMS} file")
    except MissingError:
        raise DataError(
            f"no data file {path} (looked from {Path.cwd()}); set task.train_data, test_data or validation_data"
        ) from None
    try:
        with file:
            packed = file.read(2) == GZIP
            file.seek(0)
            yield from _rows(path, gzip.GzipFile(fileobj=file) if packed else file)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path} is a damaged gzip file: {_line(error)}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give a {FORMS} file") from None


def ending(path: Path) -> str:
    """`.csv` of `rows.csv` and of `rows.csv.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _rows(path: Path, source: Source) -> Iterator[Row]:
    head = source.read(4)
    source.seek(0)
    if head == PARQUET:
        if isinstance(source, gzip.GzipFile):
            raise DataError(f"{path} is a gzipped parquet file, which is packed already; unpack it with gunzip")
        return _parquet(path, source)
    if delimiter := DELIMITERS.get(ending(path)):
        return _csv(path, source, delimiter)
    return _json(path, source) if _first(source) == b"[" else _jsonl(path, source)


def _first(source: Source) -> bytes:
    """The first character that counts."""
    found = b""
    while not found and (part := source.read(1 << 16)):
        found = part.lstrip(b"\xef\xbb\xbf \t\r\n\v\f")
    source.seek(0)
    return found[:1]


def _text(path: Path, part: bytes, offset: int = 0) -> str:
    """A part of the file that begins at a byte."""
    try:
        return part.decode("utf-8" if offset else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is neither parquet nor UTF-8 text (byte {offset + error.start})") from None


def _lines(path: Path, source: Source) -> Iterator[str]:
    # Not splitlines: a JSON string may hold U+2028 and its like as they are.
    offset = 0
    for number in count(1):
        line = source.readline(LINE_BYTES + 1)
        if not line:
            return
        if len(line) > LINE_BYTES:
            raise DataError(f"{path}, line {number} has more than {LINE_BYTES >> 20} MiB; write one row a line")
        yield _text(path, line, offset)
        offset += len(line)


def _jsonl(path: Path, source: Source) -> Iterator[Row]:
    for number, line in enumerate(_lines(path, source), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, columns_of(_parse(line.removesuffix("\n"), where), where)


def _json(path: Path, source: Source) -> Iterator[Row]:
    packed = isinstance(source, gzip.GzipFile)
    content = source.read(LIST_BYTES + 1 if packed else -1)
    if packed and len(content) > LIST_BYTES:
        raise DataError(f"{path} unpacks to a list of more than {LIST_BYTES >> 30} GiB; write one row a line (JSONL)")
    text = _text(path, content).strip()
    del content
    for number, row in enumerate(_elements(text, str(path)), 1):
        where = f"{path}, row {number}"
        yield where, columns_of(row, where)


def _elements(text: str, where: str) -> Iterator[object]:
    """What is in a JSON list, one at a time: all at once takes several times the memory of the text."""
    scan, at = json.JSONDecoder(object_pairs_hook=_once).raw_decode, _after_spaces(text, 1)
    more = text[at : at + 1] != "]"
    while more:
        try:
            value, at = scan(text, at)
        except (ValueError, RecursionError):
            at = 0
            break
        yield value
        at = _after_spaces(text, at)
        more = text[at : at + 1] == ","
        at = _after_spaces(text, at + 1) if more else at
    if text[at:] != "]":
        _parse(text, where)  # raises, and says where


def _after_spaces(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    return found.end() if found else at


def _parse(text: str, where: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise DataError(f"{where}: not JSON at {place}: {error.msg}") from None
    except RecursionError:
        raise DataError(f"{where}: not readable as JSON: it is nested deeper than {DEPTH} levels") from None
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"{where}: not readable as JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a name that stands twice the last value would win, and nobody would know."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{shown(_twice(name for name, _ in pairs))} stands twice in one object")
    return found


def _twice(names: Iterable[str]) -> str | None:
    seen = set[str]()
    return next((name for name in names if name in seen or seen.add(name)), None)


def _csv(path: Path, source: Source, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_TEXT))  # of the whole process; the library's is 128 KiB
    reader = csv.reader(_lines(path, source), delimiter=delimiter, strict=True)
    try:
        names = [name or f"Unnamed: {i}" for i, name in enumerate(next(reader, ()))]  # as pandas calls its index
        if (twice := _twice(names)) is not None:
            raise DataError(f"{path}: the column {shown(twice)} stands twice in the first line; rename one")
        for fields in reader:
            where = f"{path}, line {reader.line_num}"
            if len(fields) == len(names):
                yield where, columns_of(dict(zip(names, fields, strict=True)), where)
            elif fields:
                raise DataError(f"{where}: {len(fields)} fields, but the first line names {len(names)}; quote the text")
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not {ending(path)[1:].upper()}: {error}") from None


def _parquet(path: Path, source: BufferedReader) -> Iterator[Row]:
    import pyarrow as pa  # slow to import, and most runs read JSON
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(source)
        yield from rows_of_table(str(path), file.schema_arrow.names, file.iter_batches(batch_size=BATCH))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is a damaged parquet file: {_line(error)}") from None


def rows_of_table(name: str, columns: list[str], batches: Iterable[Any]) -> Iterator[Row]:
    """The rows of Arrow tables or batches with these columns. Raises DataError."""
    import pyarrow as pa

    if (twice := _twice(columns)) is not None:
        raise DataError(f"{name}: the column {shown(twice)} is there twice; rename one")
    number = 0
    for batch in batches:
        try:
            rows = cast("list[dict[str, Any]]", batch.to_pylist())
        except pa.ArrowException:
            raise
        except (ValueError, OverflowError, ImportError) as error:  # a time that Python has no date for, no text
            raise DataError(f"{name} holds a value that Python cannot: {_line(error)}; write it as text") from None
        for row in rows:
            number += 1
            where = f"{name}, row {number}"
            yield where, columns_of(row, where)


def columns_of(row: object, where: str) -> dict[str, Any]:
    """A row that is an object of sound texts. Raises DataError."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object such as {{...}}, found {shown(row)}")
    row = cast("dict[str, Any]", row)
    _check_sound(row, where)
    return row


def _check_sound(row: dict[str, Any], where: str) -> None:
    """That tokenizers, rewards in another process and files can take what a row holds. Raises DataError."""
    for name, column in row.items():
        below: list[tuple[Any, int]] = [(name, 0), (column, 0)]
        while below:
            value, depth = below.pop()
            if isinstance(value, str):
                _check_text(value, name, where)
            elif isinstance(value, dict | list | tuple):
                if depth == DEPTH:
                    raise DataError(f"{where}: {shown(name)} is nested deeper than {DEPTH} levels; make it flatter")
                inner = cast("Any", [*value.keys(), *value.values()] if isinstance(value, dict) else value)
                below += [(item, depth + 1) for item in inner]


def _check_text(text: str, name: str, where: str) -> None:
    if len(text) > MAX_TEXT:
        raise DataError(f"{where}: a text of {shown(name)} has {len(text):,} characters; at most {MAX_TEXT:,} are read")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {shown(name)} holds half a surrogate pair, \\u{ord(text[error.start]):x}, which is no text; "
            "write the whole character"
        ) from None


def _line(error: Exception) -> str:
    """In one line, without what would write on a terminal: it may quote the file."""
    return plain(" ".join(str(error).split()))[:200]
