# SPDX-License-Identifier: Apache-2.0
"""YAML as settings are written in it: the safe loader, with bounds, and without a key that is given twice.

A config may come with somebody else's run. An alias costs nothing until what it stands for is written out, so nodes
are counted as if every alias were.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import yaml
from yaml.constructor import ConstructorError
from yaml.error import MarkedYAMLError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from evoalign.errors import ConfigError, cut, shown

MOST_CHARACTERS = 1 << 19
MOST_NODES = 50_000
DEEPEST = 40
"""Mappings and lists in each other; the deepest setting of evoalign's own is at 4."""
MALFORMED = (ValueError, KeyError, IndexError, OverflowError, AttributeError, TypeError)
"""What the safe loader raises of `2020-13-45`, `0x_`, `!!bool maybe` or 5,000 digits."""


def parse(text: str, where: str) -> Any:
    """The value that a YAML text stands for. `where` is a file or an option, for the error. Raises ConfigError."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{where} has {len(text):,} characters; settings take at most {MOST_CHARACTERS:,}")
    try:
        return yaml.load(text, _Loader)  # a safe loader
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {cut(_said(error), 400)}") from None


def _said(error: yaml.YAMLError) -> str:
    """What is wrong and where; without the line itself, which may hold a secret."""
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
            if size > MOST_NODES:
                raise ConstructorError(None, None, f"it has more than {MOST_NODES:,} values", node.start_mark)
            if height > DEEPEST:
                raise _too_deep(node)
        return node

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self.depth += 1
        if self.depth > DEEPEST:
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
        """The last of two would win, and nobody would know. What `<<` brings in may be written over."""
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
    """Nodes of a tree with its aliases written out, and how deep it is then. Raises ConstructorError for one that holds
    itself."""
    found = known.get(id(node))
    if found == (0, 0):
        raise ConstructorError(None, None, "an alias stands for what it is in", node.start_mark)
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
    return ConstructorError(None, None, f"it nests deeper than {DEEPEST} mappings and lists", at.start_mark)
