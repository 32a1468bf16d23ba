# SPDX-License-Identifier: Apache-2.0
"""Rows of whatever `task.train_data` may name: a file, a folder of files, a data set saved to disk or of the hub.

No code that comes with a data set is run: files are read as data, and the library `datasets` refuses scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from evoalign.config.load import locate
from evoalign.errors import ConfigError, DataError, plain
from evoalign.tasks.data.files import BATCH, FORMS, Row, ending, read_file, rows_of_table

HUB = "hub:"
HUB_FORMS = "hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT"
SHARDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_NO_SHARDS = frozenset(("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"))


def rows_of(source: str) -> Iterator[Row]:
    """All rows of a source, read as they are asked for; at least one. Raises DataError, ConfigError."""
    if re.match(r"[a-z0-9]+://", source):
        raise DataError(f"{source}: addresses are not read; download the file, or give hub:NAME")
    rows = _hub(source) if source.startswith(HUB) else _local(source)
    first = list(islice(rows, 1))
    if not first:
        raise DataError(f"{source} holds no rows")
    return chain(first, rows)


def read(source: str) -> list[Row]:
    """All rows of a small source, at least one. Raises DataError, ConfigError."""
    return list(rows_of(source))


def _local(source: str) -> Iterator[Row]:
    path, part = locate(source), ""
    if not path.exists():
        folder, _, split = source.rpartition(":")
        if folder and split and Path(folder).is_dir():
            path, part = Path(folder), split
    return _folder(path, part) if path.is_dir() else read_file(path)


def _folder(folder: Path, part: str) -> Iterator[Row]:
    """The rows of a split, by default `train`."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _saved(folder, part)
    files = _shards(folder, part or "train")
    return (row for file in files for row in read_file(file))


def _saved(folder: Path, part: str) -> Iterator[Row]:
    import datasets  # seconds to import

    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever Arrow or the library makes of damaged files
        raise DataError(f"{folder} is no data set that save_to_disk wrote: {_one_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if (part or "train") not in found:
            raise DataError(_no_split(folder, part or "train", found))
        found = found[part or "train"]
    elif part and part != str(found.split):
        raise DataError(f"{folder} is one data set without splits; leave :{part} out")
    return _table(f"{folder}:{part}" if part else str(folder), found)


def _shards(folder: Path, part: str) -> list[Path]:
    """The files of a split, by the names that the library knows splits by, such as `train-00000-of-00002.parquet`."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns  # seconds to import

    base = str(folder.resolve())
    try:
        splits = {
            str(split): _rows_in(map(Path, files))
            for split, files in DataFilesDict.from_patterns(get_data_patterns(base), base_path=base).items()
        }
    except (EmptyDatasetError, FileNotFoundError):
        splits = {}
    splits = {split: files for split, files in splits.items() if files}
    if not splits:
        raise DataError(f"{folder} holds no {FORMS} files; give a file, or the folder of a data set")
    if part not in splits:
        raise DataError(_no_split(folder, part, splits))
    files = splits[part]
    kinds, places = sorted({ending(f) for f in files}), sorted({str(f.parent) for f in files})
    if len(places) > 1:
        raise DataError(
            f"{folder} holds files in several folders ({', '.join(Path(p).name for p in places)}); name one of them"
        )
    if len(kinds) > 1:
        raise DataError(f"{folder} holds files of several kinds ({', '.join(kinds)}); give one of them, or one kind")
    return files


def _rows_in(files: Iterator[Path]) -> list[Path]:
    return sorted(file for file in files if ending(file) in SHARDS and file.name not in _NO_SHARDS)


def _no_split(folder: Path, part: str, splits: Any) -> str:
    names = sorted(map(str, splits))
    return f"{folder} has no split {part}; there are {', '.join(names)}: write {folder}:{names[0]}"


def hub_parts(source: str) -> tuple[str, str | None, str]:
    """The name of a data set of the hub, its config, where one is named, and its split. Raises ConfigError."""
    # A split may be train[:100].
    name, *rest = re.split(r":(?![^\[]*\])", source.removeprefix(HUB))
    if not name or len(rest) > 2 or not all(rest):
        raise ConfigError(f"{source!r} names no data set; write {HUB_FORMS}")
    return name, rest[0] if len(rest) == 2 else None, rest[-1] if rest else "train"


def _hub(source: str) -> Iterator[Row]:
    import datasets

    name, chosen, part = hub_parts(source)
    try:
        found = datasets.load_dataset(name, *([] if chosen is None else [chosen]), split=part)
    except Exception as error:  # the library raises a score of kinds, from its own to HTTP errors
        hint = "; write hub:NAME:CONFIG:SPLIT" if "Config name is missing" in str(error) else ""
        raise DataError(f"cannot load {source}: {type(error).__name__}: {_one_line(error)}{hint}") from error
    return _table(source, found)


def _table(name: str, table: Any) -> Iterator[Row]:
    """The rows of a data set of the library, as Arrow has them: a picture is its bytes, and not looked at."""
    import pyarrow as pa

    try:
        yield from rows_of_table(name, table.column_names, table.with_format("arrow").iter(batch_size=BATCH))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name} holds damaged files: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return plain(" ".join(str(error).split()))[:300]
