# SPDX-License-Identifier: Apache-2.0
"""Columns under the names that the task uses, and what to say of those that are not there."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from evoalign.config import TaskConfig
from evoalign.errors import DataError, cut, plain
from evoalign.rewards.functions import shown
from evoalign.tasks.data.files import Row

ALIKE: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "query", "problem", "input", "text"),
    "messages": ("conversation", "chat", "dialog", "dialogue", "turns"),
    "target": ("answer", "completion", "response", "output", "solution", "label"),
    "answer": ("target", "completion", "response", "output", "solution", "label"),
    "solution": ("answer", "target", "completion", "response", "output"),
    "numbers": ("nums",),
    "context": ("prompt",),
}
"""Names under which public data sets have what a task looks for, the likeliest first."""


def renamed(rows: Iterable[Row], columns: Mapping[str, str], source: str) -> Iterator[Row]:
    """The rows with `task.columns`, which names each by the file's own. Raises DataError.

    A row may lack a column that others have, unless it has another of the name that the task uses: that one is not what
    was asked for. A column that no row has is a slip.
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
                f"{where}: task.columns calls {shown(there)} {name}, and there is a column {name} too; name that "
                f"one as well, as in {_option({**columns, f'own_{name}': name})}"
            )
        found.update(dict.fromkeys(row))
        yield where, {names.get(name, name): value for name, value in row.items()}
    for name, there in columns.items():
        if there not in found:
            raise DataError(f"{source}: {_unknown(name, there, found)}")


def lacking(where: str, row: Mapping[str, Any], config: TaskConfig, what: str, *wanted: str) -> DataError:
    """What is wrong with a row that lacks some of the `wanted` columns: what there is, and the option to set."""
    names = [config.columns.get(name, name) for name in row]
    for name in wanted:
        if name not in row and name in config.columns:
            return DataError(f"{where}: {_unknown(name, config.columns[name], names)}")
    set_ = dict(config.columns)
    for name in wanted:
        if name not in row:
            set_[name] = likely(name, [n for n in names if n not in (*set_.values(), *wanted)]) or "COLUMN"
    if set_.get("prompt") == "COLUMN" and (chat := likely("messages", names)):
        set_ = {name: there for name, there in set_.items() if name != "prompt"} | {"messages": chat}
    hint = f"; set task.columns: {_option(set_)}" if names else ""
    if "COLUMN" in set_.values():
        hint += ", with its name in place of COLUMN" if names else ""
    return DataError(f"{where}: {what}; found {listed(names)}{hint}")


def likely(name: str, names: Iterable[str]) -> str | None:
    """The column that is likely to be meant by a name; None where none is."""
    folded = {there.lower(): there for there in reversed(list(names)) if there.isprintable() and len(there) < 80}
    alike = [folded[known] for known in (name, *ALIKE.get(name, ())) if known in folded]
    near = difflib.get_close_matches(name, folded, n=1, cutoff=0.75)
    return next(iter([*alike, *(folded[n] for n in near)]), None)


def listed(names: Iterable[str]) -> str:
    """Names of columns for a message."""
    return plain(cut(", ".join(names), 200)) or "no columns"


def _unknown(name: str, there: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(there, list(names), n=1, cutoff=0.6)
    hint = f" (did you mean {plain(cut(near[0], 80))}?)" if near else ""
    return f"no column {shown(there)}, which task.columns takes as {name}{hint}; found {listed(names)}"


def _option(columns: Mapping[str, str]) -> str:
    """`{prompt: question}`, as YAML has it."""
    return f"{{{', '.join(f'{_yaml(name)}: {_yaml(there)}' for name, there in columns.items())}}}"


def _yaml(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][\w.-]*", name, re.ASCII) else json.dumps(name)
