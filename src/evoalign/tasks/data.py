# SPDX-License-Identifier: Apache-2.0
"""Rows from a file or a hub data set, and how they become a training, a validation and a test split.

A file is read by what it holds, not by its extension: parquet, a JSON list of objects, or JSON objects one a line.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from evoalign.config import TaskConfig
from evoalign.config.reading import DEPTH, MissingError, read_bytes
from evoalign.config.shipped import locate
from evoalign.errors import ConfigError, DataError, plain
from evoalign.rewards.functions import shown
from evoalign.tasks.base import Data
from evoalign.types import Example

Row: TypeAlias = tuple[str, dict[str, Any]]
"""Where a row stands, for error messages (`data.jsonl, line 7`), and its columns."""
Check: TypeAlias = Callable[[str, dict[str, Any]], Example]
"""Turns a row into an example, or raises DataError with the place it was given."""
Parts: TypeAlias = tuple[Sequence[Example], Sequence[Example]]
"""Rows to train on, and rows to choose by."""

HUB = "hub:"
MAX_TEXT = 1 << 24
"""Characters of one text, some million tokens: a longer one fits into no model, and takes all memory before."""


def load(config: TaskConfig, seed: int, check: Check, default: tuple[str, str | None] | None = None) -> Data:
    """The splits of a task: two files, or one file split by `config.split`. Raises DataError, ConfigError.

    The validation split is a file of its own, or a part of the training side: see `TaskConfig`. `default` names the
    training and the test file where the config names none; the default test file goes with the default training file
    only. `seed` decides the `seeded` split and nothing else.
    """
    train_source, test_source = _sources(config, default)
    train = [check(where, row) for where, row in read(train_source)]
    if test_source is None:
        found = split(train, config, seed, train_source)
    else:
        test = [check(where, row) for where, row in read(test_source)]
        kept, validation = _parted(train, config, train_source)
        found = Data(kept, _first(test, config.test_size, "test_size", test_source), validation)
    own = config.validation_data
    if own is None:
        return found
    rows = [check(where, row) for where, row in read(own)]
    return replace(found, validation=_first(rows, config.validation_size, "validation_size", own))


def _sources(config: TaskConfig, default: tuple[str, str | None] | None) -> tuple[str, str | None]:
    if config.train_data is not None:
        return config.train_data, config.test_data
    if default is None:
        raise ConfigError(
            f"task.train_data is not set; task {config.name} needs a JSON, JSONL or parquet file or hub:NAME"
        )
    return default[0], config.test_data or default[1]


def split(examples: Sequence[Example], config: TaskConfig, seed: int, source: str) -> Data:
    """One file as two splits: a seeded 80/20, or its first `train_size` and last `test_size` rows.

    `seeded` takes the permutation of `random_state(seed)`. Its parts are cut to their first `train_size` and
    `test_size` rows where those are set. A validation split is taken from the training part.
    """
    if config.split == "first_last":
        return _first_last(examples, config, source)
    order = cast("list[int]", random_state(seed).permutation(len(examples)).tolist())
    cut = len(examples) * 4 // 5
    train, test = ([examples[i] for i in part] for part in (order[:cut], order[cut:]))
    if not train or not test:
        raise DataError(
            f"{source} has too few rows ({len(examples)}) for an 80/20 split; add rows or set task.test_data"
        )
    kept, validation = _parted(train, config, f"the 80 % of {source}")
    return Data(kept, _first(test, config.test_size, "test_size", f"the 20 % of {source}"), validation)


def random_state(seed: int) -> np.random.RandomState:
    """numpy's RandomState, whose stream is frozen for good; a seed of more than 32 bits enters as two words."""
    return np.random.RandomState(seed if seed < 2**32 else [seed % 2**32, seed // 2**32])


def _first_last(examples: Sequence[Example], config: TaskConfig, source: str) -> Data:
    if config.train_size is None or config.test_size is None:
        raise ConfigError("task.split first_last needs task.train_size and task.test_size")
    if config.train_size + config.test_size > len(examples):
        raise DataError(
            f"{source} has {len(examples)} rows, so its first {config.train_size} and last {config.test_size} overlap; "
            "lower task.train_size or task.test_size"
        )
    end = len(examples) - config.test_size
    train, validation = _parted(examples[:end], config, f"{source} before its test rows")
    return Data(train, examples[end:], validation)


def _parted(examples: Sequence[Example], config: TaskConfig, source: str) -> Parts:
    """The rows of the training side that are trained on, and those for validation. Raises DataError."""
    train = _first(examples, config.train_size, "train_size", source)
    if config.validation_size is None or config.validation_data is not None:
        return train, ()
    if config.train_size is None:
        return held_back(train, config.validation_size, source)
    end = config.train_size + config.validation_size
    if end > len(examples):
        raise DataError(
            f"task.train_size {config.train_size} and task.validation_size {config.validation_size} are {end} rows, "
            f"but {source} has {len(examples)}; lower one of them"
        )
    return train, examples[config.train_size : end]


def held_back(examples: Sequence[Example], size: int, source: str) -> Parts:
    """Training rows without their last `size`, and those. Raises DataError where none is left to train on."""
    if size >= len(examples):
        raise DataError(
            f"task.validation_size is {size}, but {source} has {len(examples)} rows, of which at least one has to be "
            "left to train on; lower it, or set task.validation_data"
        )
    cut = len(examples) - size
    return examples[:cut], examples[cut:]


def _first(examples: Sequence[Example], size: int | None, setting: str, source: str) -> Sequence[Example]:
    if size is not None and size > len(examples):
        raise DataError(f"task.{setting} is {size}, but {source} has {len(examples)} rows")
    return examples[:size]


def read(source: str) -> list[Row]:
    """All rows of a file or of `hub:NAME[:SPLIT]`, at least one. Raises DataError."""
    if re.match(r"[a-z0-9]+://", source):
        raise DataError(f"{source}: addresses are not read; download the file, or give hub:NAME")
    rows = _read_hub(source) if source.startswith(HUB) else _read_file(locate(source))
    if not rows:
        raise DataError(f"{source} holds no rows")
    return rows


def _read_file(path: Path) -> list[Row]:
    try:
        content = read_bytes(path, sys.maxsize, "give a JSON, JSONL or parquet file")
    except MissingError:
        raise DataError(
            f"no data file {path} (looked from {Path.cwd()}); set task.train_data, test_data or validation_data"
        ) from None
    if content[:4] == b"PAR1":
        return _read_parquet(path, content)
    try:
        text = content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is neither parquet nor UTF-8 text (byte {error.start})") from None
    return _read_json(path, text) if text.startswith("[") else _read_jsonl(path, text)


def _read_json(path: Path, text: str) -> list[Row]:
    rows = cast("list[object]", _parse(text, str(path)))
    return [(f"{path}, row {i}", _columns(row, f"{path}, row {i}")) for i, row in enumerate(rows, 1)]


def _read_jsonl(path: Path, text: str) -> list[Row]:
    # Not splitlines: a JSON string may hold U+2028 and its like as they are.
    lines = ((f"{path}, line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip())
    return [(where, _columns(_parse(line, where), where)) for where, line in lines]


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
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{shown(twice)} stands twice in one object")
    return found


def _columns(row: object, where: str) -> dict[str, Any]:
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


def _read_parquet(path: Path, content: bytes) -> list[Row]:
    import pyarrow as pa  # slow to import, and most runs read JSON
    from pyarrow import parquet

    try:
        rows = parquet.read_table(pa.BufferReader(content)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is a damaged parquet file: {_line(error)}") from None
    except (ValueError, OverflowError, ImportError) as error:  # a time that Python has no date for, text that is none
        raise DataError(f"{path} holds a value that Python cannot: {_line(error)}; write it as text") from None
    return [(where, _columns(row, where)) for i, row in enumerate(rows, 1) for where in (f"{path}, row {i}",)]


def _line(error: Exception) -> str:
    """In one line, without what would write on a terminal: it may quote the file."""
    return plain(" ".join(str(error).split()))[:200]


def _read_hub(source: str) -> list[Row]:
    import datasets  # seconds to import

    name, _, part = source.removeprefix(HUB).partition(":")
    if not name:
        raise ConfigError(f"{source!r} names no data set; write hub:NAME or hub:NAME:SPLIT")
    try:
        table = datasets.load_dataset(name, split=part or "train")
    except Exception as error:  # the library raises a score of kinds, from its own to HTTP errors
        raise DataError(f"cannot load {source}: {type(error).__name__}: {error}") from error
    return [(f"{source}, row {i}", dict(row)) for i, row in enumerate(cast("Sequence[dict[str, Any]]", table), 1)]
