# SPDX-License-Identifier: Apache-2.0
"""Rows of files, folders and hub data sets, their column names, and their training, validation and test splits."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from evoalign.config import TaskConfig
from evoalign.config.load import locate
from evoalign.errors import ConfigError, DataError, cut, plain
from evoalign.rewards.functions import shown
from evoalign.tasks.base import Data, Split
from evoalign.tasks.data.files import HUB, MAX_TEXT, Row, hub_parts, read, rows_of
from evoalign.tasks.data.spool import gathered, taken
from evoalign.types import Example

__all__ = ["HUB", "MAX_TEXT", "hub_parts", "read"]

Check: TypeAlias = Callable[[str, dict[str, Any]], Example]
"""Function of a row's place and columns that returns the example or raises DataError with the place."""
ALIKE: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "query", "problem", "input", "text", "message", "content", "utterance"),
    "messages": ("conversation", "chat", "dialog", "dialogue", "turns"),
    "target": ("answer", "completion", "response", "output", "solution", "label"),
    "answer": ("target", "completion", "response", "output", "solution", "label"),
    "solution": ("answer", "target", "completion", "response", "output"),
    "numbers": ("nums",),
    "context": ("prompt",),
}
"""Column names in public data sets by the names that tasks use, likeliest first."""


def load(
    config: TaskConfig, seed: int, check: Check, default: tuple[str, str | None] | None = None, rows: str = ""
) -> Data:
    """Load the splits of a task: two files, or one file split by `config.split`. Raises DataError, ConfigError.

    The validation split is a separate file or part of the training rows; see `TaskConfig`. `default` are the training
    and the test file for a config without training data, and `rows` the form of a row, for the error where they are on
    the hub and cannot be loaded. `seed` only affects the `seeded` split.
    """
    if config.train_data is not None or default is None or not default[0].startswith(HUB):
        return _loaded(config, seed, check, default)
    try:
        return _loaded(config, seed, check, default)
    except DataError as error:
        raise DataError(
            f"{error}; task.train_data is not set, so task {config.name} loads {' and '.join(filter(None, default))}: "
            f"without a network, set task.train_data and task.test_data to files with {rows or 'such rows'}"
        ) from error


def _loaded(config: TaskConfig, seed: int, check: Check, default: tuple[str, str | None] | None) -> Data:
    train_source, test_source = config.train_data, config.test_data
    if train_source is None:
        if default is None:
            raise ConfigError(
                f"task.train_data is not set; task {config.name} needs a JSON, JSONL, CSV or parquet file or hub:NAME"
            )
        train_source, test_source = default[0], test_source or default[1]
    if test_source is None:
        found = split(_rows(train_source, config, check), config, seed, train_source)
    else:
        size = config.train_size
        most = None if size is None else size + (0 if config.validation_data else config.validation_size or 0)
        train = _rows(train_source, config, check, most)
        test = _rows(test_source, config, check, config.test_size)
        kept, validation = _parted(train, config, train_source)
        found = Data(kept, _first(test, config.test_size, "test_size", test_source), validation)
    if config.validation_data is None:
        return found
    rows = _rows(config.validation_data, config, check, config.validation_size)
    validation = _first(rows, config.validation_size, "validation_size", config.validation_data)
    return Data(found.train, found.test, validation)


def parted_otherwise(made: TaskConfig, given: TaskConfig, split: Split) -> dict[str, tuple[Any, Any]]:
    """Return the settings, except the seed, that give a split other rows of the same training data: old and new value.

    Empty for other data, or if the split is a separate file that was not trained on. Paths are compared after
    resolving.
    """
    own = f"{split}_data"
    rows = None if split == "train" else getattr(given, own)
    if rows is not None and _place(rows) == _place(made.train_data) and _place(getattr(made, own)) != _place(rows):
        return {own: (getattr(made, own), rows)}
    if _place(made.train_data) != _place(given.train_data) or (made.train_data is None and made.name != given.name):
        return {}
    names = ["split", "train_size", "validation_size", "validation_data"]
    if split == "test":
        names = [] if given.test_data else names[:3] if given.split == "first_last" else names[:1]
    if names and (made.test_data is None) != (given.test_data is None):  # with a test file, all rows are training rows
        return {"test_data": (made.test_data, given.test_data)}
    pairs = {name: (getattr(made, name), getattr(given, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _place(source: str | None) -> str | None:
    """Return the resolved path, or the name of a hub data set."""
    return source if source is None or source.startswith(HUB) else os.path.realpath(locate(source))


def _rows(source: str, config: TaskConfig, check: Check, most: int | None = None) -> Sequence[Example]:
    """Return the first `most` rows of a source (None: all), without reading the others."""
    rows = islice(rows_of(source), most)
    named = renamed(rows, config.columns, source) if config.columns else rows
    return gathered(check(where, row) for where, row in named)


def split(examples: Sequence[Example], config: TaskConfig, seed: int, source: str) -> Data:
    """Split one file: 80/20 by a seeded permutation, or its first `train_size` and last `test_size` rows.

    The seeded parts are truncated to `train_size` and `test_size` if set. Validation rows come from the training part.
    """
    if config.split == "first_last":
        if config.train_size is None or config.test_size is None:
            raise ConfigError("task.split first_last needs task.train_size and task.test_size")
        if config.train_size + config.test_size > len(examples):
            raise DataError(
                f"{source} has {len(examples)} rows, so its first {config.train_size} and last {config.test_size} "
                "overlap; lower task.train_size or task.test_size"
            )
        end = len(examples) - config.test_size
        train, validation = _parted(examples[:end], config, f"{source} before its test rows")
        return Data(train, examples[end:], validation)
    order = random_state(seed).permutation(len(examples))
    end = len(examples) * 4 // 5
    train, test = taken(examples, order[:end]), taken(examples, order[end:])
    if not train or not test:
        raise DataError(
            f"{source} has too few rows ({len(examples)}) for an 80/20 split; add rows or set task.test_data"
        )
    kept, validation = _parted(train, config, f"the 80 % of {source}")
    return Data(kept, _first(test, config.test_size, "test_size", f"the 20 % of {source}"), validation)


def random_state(seed: int) -> np.random.RandomState:
    """Return numpy's RandomState, whose stream is frozen. A seed of more than 32 bits becomes two words."""
    return np.random.RandomState(seed if seed < 2**32 else [seed % 2**32, seed // 2**32])


def _parted(
    examples: Sequence[Example], config: TaskConfig, source: str
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Divide the training side into training and validation rows. Raises DataError."""
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


def held_back(examples: Sequence[Example], size: int, source: str) -> tuple[Sequence[Example], Sequence[Example]]:
    """Split off the last `size` rows for validation. Raises DataError if no training row is left."""
    if size >= len(examples):
        raise DataError(
            f"task.validation_size is {size}, but {source} has {len(examples)} rows, and at least one has to "
            "remain for training; lower it, or set task.validation_data"
        )
    end = len(examples) - size
    return examples[:end], examples[end:]


def _first(examples: Sequence[Example], size: int | None, setting: str, source: str) -> Sequence[Example]:
    if size is not None and size > len(examples):
        raise DataError(f"task.{setting} is {size}, but {source} has {len(examples)} rows; lower it or add rows")
    return examples[:size]


def renamed(rows: Iterable[Row], columns: Mapping[str, str], source: str) -> Iterator[Row]:
    """Yield the rows with columns renamed by `task.columns`. Raises DataError.

    A row may lack a column that others have, unless it has another column of the task's name. A column that no row has
    is an error.
    """
    names = {there: name for name, there in columns.items()}
    found: dict[str, None] = {}
    for where, row in rows:
        for name, there in columns.items():
            if name not in row or name in names:
                continue
            if there not in row:
                raise DataError(f"{where}: {_unknown(name, there, row)}")
            raise DataError(
                f"{where}: task.columns renames {shown(there)} to {name}, but there is a column {name}; rename that "
                f"one too, as in {as_option({**columns, f'own_{name}': name})}"
            )
        found.update(dict.fromkeys(row))
        yield where, {names.get(name, name): value for name, value in row.items()}
    for name, there in columns.items():
        if there not in found:
            raise DataError(f"{source}: {_unknown(name, there, found)}")


def lacking(where: str, row: Mapping[str, Any], config: TaskConfig, what: str, *wanted: str) -> DataError:
    """Return the error for a row without some `wanted` columns, with the existing columns and the setting to use."""
    names = [config.columns.get(name, name) for name in row]
    for name in wanted:
        if name not in row and name in config.columns:
            return DataError(f"{where}: {_unknown(name, config.columns[name], names)}")
    set_ = dict(config.columns)
    listing = [there for there, value in zip(names, row.values(), strict=True) if isinstance(value, list)]
    for name in wanted:
        if name not in row:
            free = [n for n in names if n not in (*set_.values(), *wanted, *(listing if name == "prompt" else ()))]
            set_[name] = likely(name, free) or "COLUMN"
    if set_.get("prompt") == "COLUMN" and (chat := likely("messages", listing)):
        set_ = {name: there for name, there in set_.items() if name != "prompt"} | {"messages": chat}
    hint = f"; set task.columns: {as_option(set_)}" if names else ""
    if "COLUMN" in set_.values():
        hint += ", with its name in place of COLUMN" if names else ""
    return DataError(f"{where}: {what}; found {listed(names)}{hint}")


def likely(name: str, names: Iterable[str]) -> str | None:
    """Return the column that a name most likely means, or None."""
    folded = {there.lower(): there for there in reversed(list(names)) if there.isprintable() and len(there) < 80}
    alike = [folded[known] for known in (name, *ALIKE.get(name, ())) if known in folded]
    near = difflib.get_close_matches(name, folded, n=1, cutoff=0.75)
    return next(iter([*alike, *(folded[n] for n in near)]), None)


def listed(names: Iterable[str]) -> str:
    """Format column names for a message."""
    return plain(cut(", ".join(names), 200)) or "no columns"


def _unknown(name: str, there: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(there, list(names), n=1, cutoff=0.6)
    hint = f" (did you mean {plain(cut(near[0], 80))}?)" if near else ""
    return f"task.columns: no column {shown(there)} for {name}{hint}; found {listed(names)}"


def as_option(columns: Mapping[str, str]) -> str:
    """Format as YAML: `{prompt: question}`."""
    plain_name = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
    pairs = ([n if plain_name.fullmatch(n) else json.dumps(n) for n in pair] for pair in columns.items())
    return f"{{{', '.join(map(': '.join, pairs))}}}"
