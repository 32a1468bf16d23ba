# SPDX-License-Identifier: Apache-2.0
"""Rows of `task.train_data` and its like: a file, a folder of files, a data set saved to disk or on the hub.

Files are JSON, JSON lines, CSV and TSV, each also gzipped, and parquet. The content decides the format, except for CSV
and TSV, which need their file extension. JSON is parsed strictly, with line numbers in errors. All CSV and TSV values
are text. No code of a data set is executed: files are read as data, and the library `datasets` rejects scripts.
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
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeAlias, cast

from evoalign.config.load import locate
from evoalign.config.outside import look_for_hub
from evoalign.config.reading import DEPTH, MissingError, open_plain
from evoalign.errors import ConfigError, DataError, plain
from evoalign.rewards.functions import shown

Row: TypeAlias = tuple[str, dict[str, Any]]
"""Place of a row for error messages (`data.jsonl, line 7`), and its columns."""
Source: TypeAlias = BufferedReader | gzip.GzipFile

MAX_TEXT = 1 << 24
"""Maximum characters of one text, several million tokens: more than any model's context."""
LINE_BYTES = 1 << 28
LIST_BYTES = 1 << 32
"""Maximum unpacked size of a gzipped JSON list, which is read into memory: guards against gzip bombs."""
BATCH = 1000
"""Rows of a table to convert to Python objects at once."""
FORMS = "JSON, JSONL, CSV, TSV or parquet"
HUB = "hub:"
HUB_FORMS = "hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT"
SHARDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_NO_SHARDS = frozenset(("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"))
PARQUET, GZIP = b"PAR1", b"\x1f\x8b"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
_SPACES = re.compile(r"[ \t\n\r]*")


def rows_of(source: str) -> Iterator[Row]:
    """Return an iterator over the rows of a source, at least one. Raises DataError, ConfigError."""
    if re.match(r"[a-z0-9]+://", source):
        raise DataError(f"{source}: URLs are not supported; download the file, or use hub:NAME")
    rows = _hub(source) if source.startswith(HUB) else _local(source)
    first = list(islice(rows, 1))
    if not first:
        raise DataError(f"{source} has no rows")
    return chain(first, rows)


def read(source: str) -> list[Row]:
    """Return all rows of a small source, at least one. Raises DataError, ConfigError."""
    return list(rows_of(source))


def _local(source: str) -> Iterator[Row]:
    path, part = locate(source), ""
    if not path.exists():
        folder, _, split = source.rpartition(":")
        if folder and split and Path(folder).is_dir():
            path, part = Path(folder), split
    if not path.is_dir():
        return _file(path)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path, part)
    return (row for file in _shards(path, part or "train") for row in _file(file))


def _saved(folder: Path, part: str) -> Iterator[Row]:
    import datasets  # seconds to import

    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # Arrow and the library raise many types for damaged files
        raise DataError(f"{folder} is not a data set of save_to_disk: {_one_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if (part or "train") not in found:
            raise DataError(_no_split(folder, part or "train", found))
        found = found[part or "train"]
    elif part and part != str(found.split):
        raise DataError(f"{folder} is a data set without splits; remove :{part}")
    return _table(f"{folder}:{part}" if part else str(folder), found)


def _shards(folder: Path, part: str) -> list[Path]:
    """Return the files of a split, by the name patterns of the library, such as `train-00000-of-00002.parquet`."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns  # seconds to import

    base = str(folder.resolve())
    try:
        splits = {
            str(split): sorted(
                file for file in map(Path, files) if ending(file) in SHARDS and file.name not in _NO_SHARDS
            )
            for split, files in DataFilesDict.from_patterns(get_data_patterns(base), base_path=base).items()
        }
    except (EmptyDatasetError, FileNotFoundError):
        splits = {}
    splits = {split: files for split, files in splits.items() if files}
    if not splits:
        raise DataError(f"{folder} has no {FORMS} files; give a file, or the folder of a data set")
    if part not in splits:
        raise DataError(_no_split(folder, part, splits))
    files = splits[part]
    kinds, places = sorted({ending(f) for f in files}), sorted({str(f.parent) for f in files})
    if len(places) > 1:
        raise DataError(
            f"{folder} has files in several folders ({', '.join(Path(p).name for p in places)}); name one of them"
        )
    if len(kinds) > 1:
        raise DataError(f"{folder} has files of several formats ({', '.join(kinds)}); name one file, or use one format")
    return files


def _no_split(folder: Path, part: str, splits: Any) -> str:
    names = sorted(map(str, splits))
    return f"{folder} has no split {part}; there are {', '.join(names)}: write {folder}:{names[0]}"


def hub_parts(source: str) -> tuple[str, str | None, str]:
    """Return name, config (or None) and split of a hub data set. Raises ConfigError."""
    # A split may be train[:100].
    name, *rest = re.split(r":(?![^\[]*\])", source.removeprefix(HUB))
    if not name or len(rest) > 2 or not all(rest):
        raise ConfigError(f"{source!r} is not the name of a data set; write {HUB_FORMS}")
    return name, rest[0] if len(rest) == 2 else None, rest[-1] if rest else "train"


def _hub(source: str) -> Iterator[Row]:
    import datasets

    name, chosen, part = hub_parts(source)
    look_for_hub()
    try:
        found = datasets.load_dataset(name, *([] if chosen is None else [chosen]), split=part)
    except Exception as error:  # the library raises many types, also HTTP errors
        hint = "; write hub:NAME:CONFIG:SPLIT" if "Config name is missing" in str(error) else ""
        raise DataError(f"cannot load {source}: {type(error).__name__}: {_one_line(error)}{hint}") from error
    return _table(source, found)


def _table(name: str, table: Any) -> Iterator[Row]:
    """Yield the rows of a `datasets` data set as Arrow stores them, without decoding images."""
    import pyarrow as pa

    try:
        yield from _batches(name, table.column_names, table.with_format("arrow").iter(batch_size=BATCH))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name} has damaged files: {_one_line(error)}") from error


def _file(path: Path) -> Iterator[Row]:
    """Yield the rows of a file. Raises DataError."""
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
        raise DataError(f"{path} is a damaged gzip file: {_one_line(error)}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give a {FORMS} file") from None


def ending(path: Path) -> str:
    """Return `.csv` for `rows.csv` and for `rows.csv.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _rows(path: Path, source: Source) -> Iterator[Row]:
    head = source.read(4)
    source.seek(0)
    if head == PARQUET:
        if isinstance(source, gzip.GzipFile):
            raise DataError(f"{path} is a gzipped parquet file; unpack it with gunzip")
        return _parquet(path, source)
    if delimiter := DELIMITERS.get(ending(path)):
        return _csv(path, source, delimiter)
    first = b""
    while not first and (part := source.read(1 << 16)):
        first = part.lstrip(b"\xef\xbb\xbf \t\r\n\v\f")
    source.seek(0)
    return _json(path, source, is_list=first[:1] == b"[")


def _text(path: Path, part: bytes, offset: int = 0) -> str:
    """Decode a part of the file that begins at this byte. Raises DataError."""
    try:
        return part.decode("utf-8" if offset else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is neither parquet nor UTF-8 text (byte {offset + error.start})") from None


def _lines(path: Path, source: Source) -> Iterator[str]:
    # Not splitlines: a JSON string may contain U+2028 unescaped.
    offset = 0
    for number in count(1):
        line = source.readline(LINE_BYTES + 1)
        if not line:
            return
        if len(line) > LINE_BYTES:
            raise DataError(f"{path}, line {number} has more than {LINE_BYTES >> 20} MiB; write one row per line")
        yield _text(path, line, offset)
        offset += len(line)


def _json(path: Path, source: Source, *, is_list: bool) -> Iterator[Row]:
    if not is_list:
        for number, line in enumerate(_lines(path, source), 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _columns(_parse(line.removesuffix("\n"), where), where)
        return
    packed = isinstance(source, gzip.GzipFile)
    content = source.read(LIST_BYTES + 1 if packed else -1)
    if packed and len(content) > LIST_BYTES:
        raise DataError(f"{path} unpacks to a list of more than {LIST_BYTES >> 30} GiB; write one row per line (JSONL)")
    text = _text(path, content).strip()
    del content
    for number, row in enumerate(_elements(text, str(path)), 1):
        where = f"{path}, row {number}"
        yield where, _columns(row, where)


def _elements(text: str, where: str) -> Iterator[object]:
    """Yield the elements of a JSON list one by one: all at once take several times the memory of the text."""
    scan, at = json.JSONDecoder(object_pairs_hook=_unique).raw_decode, _after_spaces(text, 1)
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
        _parse(text, where)  # raises with the position


def _after_spaces(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    return found.end() if found else at


def _parse(text: str, where: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise DataError(f"{where}: not JSON at {place}: {error.msg}") from None
    except RecursionError:
        raise DataError(f"{where}: not readable as JSON: it is nested deeper than {DEPTH} levels") from None
    except ValueError as error:  # an integer with thousands of digits
        raise DataError(f"{where}: not readable as JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys: JSON would silently keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"duplicate key {shown(_twice(name for name, _ in pairs))} in an object")
    return found


def _twice(names: Iterable[str]) -> str | None:
    """Return the first duplicate, or None."""
    seen = set[str]()
    return next((name for name in names if name in seen or seen.add(name)), None)


def _csv(path: Path, source: Source, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_TEXT))  # for the whole process; the default is 128 KiB
    reader = csv.reader(_lines(path, source), delimiter=delimiter, strict=True)
    try:
        names = [name or f"Unnamed: {i}" for i, name in enumerate(next(reader, ()))]  # the name in pandas
        if (twice := _twice(names)) is not None:
            raise DataError(f"{path}: duplicate column {shown(twice)} in the first line; rename one")
        for fields in reader:
            where = f"{path}, line {reader.line_num}"
            if len(fields) == len(names):
                yield where, _columns(dict(zip(names, fields, strict=True)), where)
            elif fields:
                raise DataError(f"{where}: {len(fields)} fields, but the first line names {len(names)}; quote the text")
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not {ending(path)[1:].upper()}: {error}") from None


def _parquet(path: Path, source: BufferedReader) -> Iterator[Row]:
    import pyarrow as pa  # slow to import, and most runs read JSON
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(source)
        yield from _batches(str(path), file.schema_arrow.names, file.iter_batches(batch_size=BATCH))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is a damaged parquet file: {_one_line(error)}") from None


def _batches(name: str, columns: list[str], batches: Iterable[Any]) -> Iterator[Row]:
    """Yield the rows of Arrow batches with these columns. Raises DataError."""
    import pyarrow as pa

    if (twice := _twice(columns)) is not None:
        raise DataError(f"{name}: duplicate column {shown(twice)}; rename one")
    number = 0
    for batch in batches:
        try:
            rows = cast("list[dict[str, Any]]", batch.to_pylist())
        except pa.ArrowException:
            raise
        except (ValueError, OverflowError, ImportError) as error:  # a time outside the range of Python, invalid text
            raise DataError(
                f"{name} has a value that Python cannot represent: {_one_line(error)}; write it as text"
            ) from None
        for row in rows:
            number += 1
            where = f"{name}, row {number}"
            yield where, _columns(row, where)


def _columns(row: object, where: str) -> dict[str, Any]:
    """Return a row if it is an object with values that tokenizers, worker processes and files can handle.

    Raises DataError.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object such as {{...}}, found {shown(row)}")
    row = cast("dict[str, Any]", row)
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
    return row


def _check_text(text: str, name: str, where: str) -> None:
    if len(text) > MAX_TEXT:
        raise DataError(f"{where}: a text of {shown(name)} has {len(text):,} characters; at most {MAX_TEXT:,} are read")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {shown(name)} has half a surrogate pair, \\u{ord(text[error.start]):x}; write the whole "
            "character"
        ) from None


def _one_line(error: Exception) -> str:
    """Return the message in one line without control characters: it may quote the file."""
    return plain(" ".join(str(error).split()))[:300]
