# SPDX-License-Identifier: Apache-2.0
"""How the rows of one source, or of two, become a training, a validation and a test split."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from evoalign.config import TaskConfig
from evoalign.config.load import locate
from evoalign.errors import ConfigError, DataError
from evoalign.tasks.base import Data, Split
from evoalign.tasks.data.columns import renamed
from evoalign.tasks.data.sources import HUB, rows_of
from evoalign.tasks.data.spool import gathered, taken
from evoalign.types import Example

Check: TypeAlias = Callable[[str, dict[str, Any]], Example]
"""Turns a row into an example, or raises DataError with the place it was given."""
Parts: TypeAlias = tuple[Sequence[Example], Sequence[Example]]
"""Rows to train on, and rows to choose by."""


def load(config: TaskConfig, seed: int, check: Check, default: tuple[str, str | None] | None = None) -> Data:
    """The splits of a task: two files, or one file split by `config.split`. Raises DataError, ConfigError.

    The validation split is a file of its own, or a part of the training side: see `TaskConfig`. `default` names the
    training and the test file where the config names none; the default test file goes with the default training file
    only. `seed` decides the `seeded` split and nothing else.
    """
    train_source, test_source = _sources(config, default)
    if test_source is None:
        found = split(_rows(train_source, config, check), config, seed, train_source)
    else:
        train = _rows(train_source, config, check, _wanted(config))
        test = _rows(test_source, config, check, config.test_size)
        kept, validation = _parted(train, config, train_source)
        found = Data(kept, _first(test, config.test_size, "test_size", test_source), validation)
    own = config.validation_data
    if own is None:
        return found
    rows = _rows(own, config, check, config.validation_size)
    return replace(found, validation=_first(rows, config.validation_size, "validation_size", own))


def parted_otherwise(made: TaskConfig, given: TaskConfig, split: Split) -> dict[str, tuple[Any, Any]]:
    """The settings, but for the seed, by which a split of the same training data has other rows: what each was and is.

    Empty where the data are others, or the rows of the split are those of a file of their own that was not trained on.
    Data are the same by whatever path.
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
    if names and (made.test_data is None) != (given.test_data is None):  # with a test file all rows are for training
        return {"test_data": (made.test_data, given.test_data)}
    pairs = {name: (getattr(made, name), getattr(given, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _place(source: str | None) -> str | None:
    """Of a file or folder, or the name of a data set of the hub."""
    return source if source is None or source.startswith(HUB) else os.path.realpath(locate(source))


def _rows(source: str, config: TaskConfig, check: Check, most: int | None = None) -> Sequence[Example]:
    """The rows of a source, or its first ones: what is not used is not read."""
    rows = islice(rows_of(source), most)
    named = renamed(rows, config.columns, source) if config.columns else rows
    return gathered(check(where, row) for where, row in named)


def _wanted(config: TaskConfig) -> int | None:
    """How many rows of a training file of its own are used; None: all."""
    if config.train_size is None:
        return None
    return config.train_size + (0 if config.validation_data else config.validation_size or 0)


def _sources(config: TaskConfig, default: tuple[str, str | None] | None) -> tuple[str, str | None]:
    if config.train_data is not None:
        return config.train_data, config.test_data
    if default is None:
        raise ConfigError(
            f"task.train_data is not set; task {config.name} needs a JSON, JSONL, CSV or parquet file or hub:NAME"
        )
    return default[0], config.test_data or default[1]


def split(examples: Sequence[Example], config: TaskConfig, seed: int, source: str) -> Data:
    """One file as two splits: a seeded 80/20, or its first `train_size` and last `test_size` rows.

    `seeded` takes the permutation of `random_state(seed)`. Its parts are cut to their first `train_size` and
    `test_size` rows where those are set. A validation split is taken from the training part.
    """
    if config.split == "first_last":
        return _first_last(examples, config, source)
    order = random_state(seed).permutation(len(examples))
    cut = len(examples) * 4 // 5
    train, test = taken(examples, order[:cut]), taken(examples, order[cut:])
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
        raise DataError(f"task.{setting} is {size}, but {source} has {len(examples)} rows; lower it or add rows")
    return examples[:size]
