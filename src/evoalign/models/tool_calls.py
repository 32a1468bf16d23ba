# SPDX-License-Identifier: Apache-2.0
"""Read the tool calls of a completion, in the format in which the model's chat template writes them.

There is no table of models: `derive` renders conversations with known calls and looks at what the template writes
around the names and the arguments. It looks at decoded text, which lacks special tokens such as [TOOL_CALLS].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

Chat: TypeAlias = list[dict[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]]

DEEPEST = 64
"""Most levels of nested lists and objects in a call."""
MOST_BROKEN = 16
"""Broken calls after which the rest of a completion is content, so that reading takes linear time."""
THOUGHT = "</think>"
"""End of a reasoning block. Calls before it are part of the reasoning."""
NAME = r"[\w.-]{1,128}?"
SPACE = r"\s{0,8}"
NEVER = "(?!)"
PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Values that some templates write as Python does, and their JSON."""
KINDS: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. Neither the name nor the arguments are checked against the tools."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """A completion: the text outside of its calls, the calls, and `error`, which tells the model what to correct.

    A call that cannot be read stays in `content`. White space around `content` is removed if there are calls.
    """

    content: str
    calls: tuple[Call, ...]
    error: str


class BrokenError(Exception):
    """The reason why a tool call cannot be read. Reading continues at `at`."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.at = at


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of tool calls. Texts but `example` and `writer` are regular expressions.

    A call is one of
    * a JSON object, in which the first `keys` are those of the name and the arguments;
    * `opens`, which matches the name, and the arguments as JSON;
    * `opens`, then for each argument `pair`, which matches the key, and the value as text. JSON types are lost: a value
      is converted to the type that the tool's schema gives. A text that contains the end of a value ends there.

    `marker` begins the first call, and `rest` is what follows it; without a marker, calls begin with what a call needs.
    `ends` matches the end of a call, with the groups `next` up to a following call and `more` up to a following key.
    `leads`: content may precede calls. `several`: a message may have several calls. `writer`: as in
    `tool_formats.prepare`.
    """

    marker: str
    rest: str
    ends: str
    example: str
    keys: tuple[str, ...] = ()
    opens: str = ""
    pair: str = ""
    leads: bool = True
    several: bool = True
    writer: str = "object"

    def read(self, text: str, tools: Tools = ()) -> Turn:
        """Return the content and the calls of a completion. Never raises."""
        calls, content, error, at, broken = list[Call](), list[str](), "", 0, 0
        schemas, thought = _schemas(tools), text.find(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0
        starts = re.compile(self.marker or self._unmarked(schemas))
        begin = starts.search(text) if self.leads or self.marker else starts.match(text, thought)
        while begin is not None and broken < MOST_BROKEN:
            found, reason, end = self._section(text, begin.end(), schemas)
            end = max(end, begin.start() + 1)
            if begin.start() < thought and (reason or end < thought):
                found, reason, end = [], "", thought
            content.append(text[at : begin.start()] if found and not reason else text[at:end])
            calls += found
            broken += bool(reason)
            if reason and not error:
                error = f"Tool call {len(calls) + 1} cannot be read: {reason}."
            at, begin = end, starts.search(text, end)
        content.append(text[at:])
        if len(calls) > 1 and not self.several:
            error = error or f"There are {len(calls)} tool calls. Write one tool call per message."
        outside = "".join(content)
        error = error and f"{error} Write a tool call like this:\n{self.example}"
        return Turn(outside.strip() if calls else outside, tuple(calls), error)

    def _unmarked(self, schemas: Mapping[str, Any]) -> str:
        """Return a regular expression for the beginning of calls without a marker."""
        if self.keys:
            named = "|".join(map(re.escape, {*self.keys, "type"}))
            return rf'{self.rest}(?=\{{{SPACE}"(?:{named})"{SPACE}:)'
        return f"(?={self.rest}{self._opens(schemas)})"

    def _opens(self, schemas: Mapping[str, Any]) -> str:
        """Return `opens`, without a marker for names of tools only."""
        known = "|".join(re.escape(name) for name in sorted(schemas, key=len, reverse=True)) or NEVER
        return self.opens if self.marker else self.opens.replace(NAME, known, 1)

    def _section(self, text: str, at: int, schemas: Mapping[str, Any]) -> tuple[list[Call], str, int]:
        """Return calls that follow each other, the reason if one is broken, and the place after them."""
        calls = list[Call]()
        try:
            if self.marker or self.opens:
                at = _expect(self.rest, text, at, "it begins differently").end()
            while True:
                end = (self._object if self.keys else self._pairs if self.pair else self._named)(
                    text, at, calls, schemas
                )
                at = end.end()
                if end["next"] is None:
                    return calls, "", at
        except BrokenError as error:
            return calls, str(error), max(at, error.at)

    def _object(self, text: str, at: int, calls: list[Call], _: object) -> re.Match[str]:
        found, end = read_json(text, at)
        if not isinstance(found, dict) or not isinstance(found.get(self.keys[0]), str):
            raise BrokenError(f"it is not a JSON object with the tool's name as {self.keys[0]!r}", end)
        if self.keys[1] not in found:
            raise BrokenError(f"it has no {self.keys[1]!r}", end)
        return self._closed(text, end, calls, found[self.keys[0]], found[self.keys[1]])

    def _named(self, text: str, at: int, calls: list[Call], schemas: Mapping[str, Any]) -> re.Match[str]:
        begin = _expect(self._opens(schemas), text, at, "the tool's name is missing")
        arguments, end = read_json(text, begin.end())
        return self._closed(text, end, calls, begin["name"], arguments)

    def _closed(self, text: str, at: int, calls: list[Call], name: str, arguments: Any) -> re.Match[str]:
        """Add a call, and return the match of its end."""
        if isinstance(arguments, str):
            arguments, _ = read_json(arguments, 0, at)
        if not isinstance(arguments, dict):
            raise BrokenError("the arguments are not a JSON object", at)
        end = _expect(self.ends, text, at, "its end is missing")
        calls.append(Call(name, arguments))
        return end

    def _pairs(self, text: str, at: int, calls: list[Call], schemas: Mapping[str, Any]) -> re.Match[str]:
        end = begin = _expect(self._opens(schemas), text, at, "the tool's name is missing or its end is")
        arguments, schema = dict[str, Any](), schemas.get(begin["name"], {})
        while end["more"] is not None:
            pair = _expect(self.pair, text, end.end(), "the name of a parameter is missing")
            found = re.compile(self.ends).search(text, pair.end())
            if found is None:
                raise BrokenError(f"the end of the parameter {pair['key']} is missing", len(text))
            arguments[pair["key"]] = _converted(text[pair.end() : found.start()], schema.get(pair["key"]))
            end = found
        calls.append(Call(begin["name"], arguments))
        return end


def _expect(pattern: str, text: str, at: int, reason: str) -> re.Match[str]:
    if (found := re.compile(pattern).match(text, at)) is None:
        raise BrokenError(reason, at)
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON value")


JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)


def read_json(text: str, at: int, outside: int | None = None) -> tuple[Any, int]:
    """Return the JSON value at a place, and its end. Raises BrokenError; `outside` is its place, by default the end."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    place = len(text) if outside is None else outside
    try:
        value, end = JSON.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        place = error.pos if outside is None else outside
        raise BrokenError(f"invalid JSON, {error.msg} at character {error.pos - at + 1} of the JSON", place) from error
    except UnicodeEncodeError as error:
        raise BrokenError("invalid JSON, a surrogate without its pair", place) from error
    except RecursionError as error:
        raise BrokenError("the JSON is nested too deeply", place) from error
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise BrokenError(f"invalid JSON, {str(error)[:80]}", place) from error
    level = [value]
    for _ in range(DEEPEST):
        level = [x for v in level for x in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())]
    if level:
        raise BrokenError("the JSON is nested too deeply", place)
    return value, end


def _schemas(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of each tool's parameters."""
    found = [tool.get("function", tool) for tool in tools]
    return {str(f.get("name")): (f.get("parameters") or {}).get("properties") or {} for f in found}


def _kinds(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; empty: all."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type", ())
    inner = [x for key in ("anyOf", "oneOf") for x in schema.get(key) or ()]
    return {*([kind] if isinstance(kind, str) else kind), *(k for x in inner for k in _kinds(x))}


def _converted(text: str, schema: Any) -> Any:
    """Return a parameter's text as the type of its schema; unchanged where it is text or is not of that type."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    source = PYTHON.get(text.strip(), text)
    try:
        value, end = read_json(source, 0)
    except BrokenError:
        return text
    if source[end:].strip() or isinstance(value, str) or ("string" in kinds and not kinds & KINDS[type(value)]):
        return text
    return value
