# SPDX-License-Identifier: Apache-2.0
"""Read untrusted files as data: regular files of bounded size, JSON of bounded depth, and YAML without duplicate keys.

Whatever is wrong with a file is one DataError (for YAML one ConfigError) that names it and says what to do. A pipe, a
device or a circle of links is refused before it is opened, so that reading never blocks.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Hashable
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.constructor import ConstructorError
from yaml.error import MarkedYAMLError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from evoalign.errors import ConfigError, DataError, cut, shown

FILE_BYTES = 2**30
"""Largest file that grows with a run."""
JSON_BYTES = 2**24
"""Largest file that is one JSON value, which takes many times its size in memory."""
DEPTH = 64
"""Deepest nesting of JSON. Python reads up to a thousand levels, but cannot always write them."""
WORD = 2**64
MEND = "put it back from a copy"
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")

YAML_CHARACTERS = 1 << 19
YAML_NODES = 50_000
"""Most values of a YAML text, with each alias counted as what it refers to."""
YAML_DEPTH = 40
"""Deepest nesting of YAML. The settings of evoalign have 4 levels."""
MALFORMED = (ValueError, KeyError, IndexError, OverflowError, AttributeError, TypeError)
"""The errors of YAML's safe loader for `2020-13-45`, `0x_`, `!!bool maybe` or 5,000 digits."""


class MissingError(DataError):
    """There is no file of that name."""


def check_regular(path: Path, limit: int = FILE_BYTES, mend: str = MEND) -> None:
    """Raise DataError where a path is not a regular file of at most `limit` bytes, or a link to one.

    Raise MissingError where nothing is there.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise DataError(f"{path} is a link to nothing; {mend}") from None
        raise MissingError(f"{path} is missing; {mend}") from None
    except (OSError, ValueError) as error:  # a circle of links, no permission; a NUL in the name
        raise _unreadable(path, error, mend) from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is not a file; {mend}")
    if found.st_size > limit:
        raise DataError(f"{path} is larger than {limit // 2**10} KiB, the most that a run writes; {mend}")


def open_plain(path: Path, limit: int = FILE_BYTES, mend: str = MEND) -> BufferedReader:
    """Open a regular file for reading. Raises DataError, and MissingError where it is not there."""
    check_regular(path, limit, mend)
    try:
        # O_NONBLOCK: a pipe may have replaced the file since the check.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        return os.fdopen(handle, "rb")
    except OSError as error:
        raise _unreadable(path, error, mend) from None


def read_bytes(path: Path, limit: int = FILE_BYTES, mend: str = MEND) -> bytes:
    """Read a regular file. Raises DataError, and MissingError where it is not there."""
    with open_plain(path, limit, mend) as file:
        try:
            return file.read(min(limit, os.fstat(file.fileno()).st_size))
        except OSError as error:
            raise _unreadable(path, error, mend) from None


def _unreadable(path: Path, error: Exception, mend: str) -> DataError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(f"{path} cannot be read ({why}); {mend}")


# --- JSON ------------------------------------------------------------------------------------------------------------


def read_json(path: Path, limit: int = JSON_BYTES, mend: str = MEND) -> Any:
    """Read a JSON file with `parse`. Raises DataError, and MissingError where it is not there."""
    return parse(read_bytes(path, limit, mend), str(path), mend)


def read_object(path: Path, limit: int = JSON_BYTES, mend: str = MEND) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises DataError, and MissingError where it is not there."""
    found = read_json(path, limit, mend)
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged (it holds no JSON object); {mend}")
    return found  # pyright: ignore[reportUnknownVariableType]


def object_of(path: Path) -> dict[str, Any] | None:
    """Read a JSON file that holds an object; None where it is missing or damaged."""
    try:
        return read_object(path)
    except DataError:
        return None


def parse(raw: bytes, where: str, mend: str = MEND, *, finite: bool = True) -> Any:
    """Parse JSON in UTF-8. Raises DataError, which names `where`.

    Refused: more than DEPTH levels, integers beyond 64 bits, and, with `finite`, numbers that are not finite. Lone
    surrogates, which cannot be written to a file or a terminal, become U+FFFD.
    """
    number = as_finite if finite else float
    try:
        found = json.loads(raw.decode("utf-8"), parse_int=_integer, parse_float=number, parse_constant=number)
        if raw.count(b"[") + raw.count(b"{") > DEPTH and _is_deep(found):
            raise RecursionError
        if not _ESCAPED.search(raw):
            return found
        text = json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return json.loads(text.decode("utf-8", "replace"))
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


# --- YAML ------------------------------------------------------------------------------------------------------------


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML with a bounded safe loader. `where` is a file or an option, for the error. Raises ConfigError."""
    if len(text) > YAML_CHARACTERS:
        raise ConfigError(f"{where} has {len(text):,} characters; settings take at most {YAML_CHARACTERS:,}")
    try:
        return yaml.load(text, _Loader)  # a safe loader
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {cut(_explain(error), 400)}") from None


def _explain(error: yaml.YAMLError) -> str:
    """Say what is wrong and where, without the line itself, which may hold a secret."""
    if not isinstance(error, MarkedYAMLError):
        return " ".join(str(error).split())
    words = ", ".join(text for text in (error.context, error.problem) if text)
    mark = error.problem_mark or error.context_mark
    return words if mark is None else f"{words} (line {mark.line + 1}, column {mark.column + 1})"


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_document(self) -> Node | None:
        node = super().compose_document()
        if node is not None:
            size, height = _measure(node, {})
            if size > YAML_NODES:
                raise ConstructorError(None, None, f"it has more than {YAML_NODES:,} values", node.start_mark)
            if height > YAML_DEPTH:
                raise _too_deep(node)
        return node

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self.depth += 1
        if self.depth > YAML_DEPTH:
            raise _too_deep(self.peek_event())
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except MALFORMED as error:
            if isinstance(node, ScalarNode):
                kind = node.tag.rpartition(":")[2]
                raise ConstructorError(None, None, f"{shown(node.value)} is no {kind}", node.start_mark) from None
            raise ConstructorError(None, None, type(error).__name__, node.start_mark) from None

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse duplicate keys, of which YAML would silently keep the last; those of a `<<` merge may be replaced."""
        lines: dict[Hashable, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name: Hashable = self.construct_object(key)
            if name in lines:
                raise ConstructorError(
                    None, None, f"the key {shown(name)} is on line {lines[name]} already; keep one", key.start_mark
                )
            lines[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _measure(node: Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return a tree's number of nodes and its depth, with aliases written out. Raises ConstructorError for a cycle."""
    found = known.get(id(node))
    if found == (0, 0):
        raise ConstructorError(None, None, "an alias refers to a value that contains it", node.start_mark)
    if found is None:
        known[id(node)] = (0, 0)
        below: list[Node] = []
        if isinstance(node, MappingNode):
            below = [part for pair in node.value for part in pair]
        elif isinstance(node, SequenceNode):
            below = cast("list[Node]", node.value)
        parts = [_measure(part, known) for part in below]
        found = known[id(node)] = (1 + sum(size for size, _ in parts), 1 + max((deep for _, deep in parts), default=0))
    return found


def _too_deep(at: Node | yaml.Event) -> ConstructorError:
    return ConstructorError(None, None, f"it nests deeper than {YAML_DEPTH} mappings and lists", at.start_mark)
