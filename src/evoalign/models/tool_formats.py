# SPDX-License-Identifier: Apache-2.0
"""Derive the format of tool calls from a chat template, and write messages with calls for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from evoalign.errors import shown
from evoalign.models.tool_calls import (
    NAME,
    NEVER,
    SPACE,
    BrokenError,
    Call,
    Chat,
    ToolFormat,
    Tools,
    Turn,
    read_json,
)

QUESTION, CONTENT, RESULT = "What is the question?", "This is the content.", "This is the result."
FIRST, SECOND = "tool_name", "other_tool"
VALUES: dict[str, Any] = {
    "argument_a": "<text> & more",
    "argument_b": 5,
    "argument_c": [1, "two"],
    "argument_d": {"k": [3]},
}
KINDS = ("string", "integer", "array", "object")
MARKER = "<tool_call>"
"""Text by which a template asks for JSON calls in the content, if it writes no calls itself (SmolLM3)."""
LONGEST = 10_000
"""Most characters that a template may write for two calls."""
CALL_ID = r"[\w.:-]{1,64}?"
USER: Chat = [{"role": "user", "content": QUESTION}]
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Describes it.",
            "parameters": {
                "type": "object",
                "properties": {k: {"type": t, "description": "A value."} for k, t in zip(VALUES, KINDS, strict=True)},
                "required": list(VALUES),
            },
        },
    }
    for name in (FIRST, SECOND)
]
ONE, TWO = Call(FIRST, VALUES), Call(SECOND, VALUES)
SHORT, EMPTY = Call(FIRST, {"argument_a": "some text"}), Call(FIRST, {})

Located: TypeAlias = tuple[list[tuple[int, int]], tuple[Any, ...]]
"""The places where each call begins, with its name or JSON object, and where its arguments end; parts of the first."""


class UnreadableError(Exception):
    """The reason why no format can be derived."""


class RaisedError(UnreadableError):
    """The message of an error that the template raised."""


@dataclass(frozen=True, slots=True)
class Template:
    """A model's chat template. `prompt` renders up to the model's turn, `whole` a finished conversation.

    Both raise RaisedError where the template raises. `seen` returns a text as it is after encoding and decoding.
    `stops` are the texts of stop tokens.
    """

    prompt: Callable[[Chat, Tools], str]
    whole: Callable[[Chat, Tools], str]
    seen: Callable[[str], str]
    stops: Sequence[str]


def prepare(messages: Sequence[Mapping[str, Any]], writer: str) -> Chat:
    """Return messages as a template reads them: with new call ids, and arguments as the `writer` has them.

    Ids have 9 letters and digits, since Mistral's templates refuse others. `writer`: `object` leaves arguments as they
    are; `json` writes them as JSON; `texts` writes each value as JSON; `content` writes calls into the content.
    """
    found, open_calls, count = Chat(), list[tuple[object, str, str]](), 0
    for message in messages:
        changed: dict[str, Any] = {**message, "content": message.get("content") or ""}
        if calls := changed.pop("tool_calls", None):
            open_calls, written = [], Chat()
            for call in calls:
                function = _written(call["function"], writer)
                open_calls.append((call.get("id"), f"call{count:05}", function["name"]))
                written.append({"type": "function", "id": f"call{count:05}", "function": function})
                count += 1
            if writer == "content":
                texts = [f"{MARKER}\n{json.dumps(c['function'], ensure_ascii=False)}\n</tool_call>" for c in written]
                changed["content"] = "\n".join(filter(None, [changed["content"], *texts]))
            else:
                changed["tool_calls"] = written
        elif message["role"] == "tool" and open_calls:
            replied = [c for c in open_calls if c[0] == message.get("tool_call_id") is not None] or open_calls
            changed |= {"tool_call_id": replied[0][1], "name": replied[0][2]}
            open_calls = [c for c in open_calls if c is not replied[0]]
        found.append(changed)
    return found


def _written(function: Mapping[str, Any], writer: str) -> dict[str, Any]:
    arguments: Any = function["arguments"]
    if writer == "json":
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif writer == "texts":
        arguments = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
    return {"name": function["name"], "arguments": arguments}


def derive(template: Template) -> ToolFormat:
    """Return the format of tool calls. Raises UnreadableError, ModelError."""
    start = template.prompt(USER, TOOLS)
    if FIRST not in start:
        raise UnreadableError("it leaves out the tools")
    reasons = list[UnreadableError]()
    for writer in ("object", "json", "texts", *["content"] * (MARKER in start)):
        if writer == "json" and not isinstance(reasons[0], RaisedError):
            continue  # it writes a dict in its own form
        try:
            found = Probe(template, writer).format()
            replied = prepare([*USER, _message([ONE]), {"role": "tool", "content": RESULT}], writer)
            if RESULT not in template.prompt(replied, TOOLS):
                raise UnreadableError("it leaves out the results of tools")
            return found
        except UnreadableError as error:
            reasons.append(error)
        except (ValueError, BrokenError):  # something is not where it is in other messages
            reasons.append(UnreadableError("it writes tool calls in several forms"))
    raise reasons[0]


def _message(calls: Sequence[Call], content: str = "") -> dict[str, Any]:
    written = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
    return {"role": "assistant", "content": content, "tool_calls": written}


class Probe:
    """Renders assistant messages with known calls."""

    def __init__(self, template: Template, writer: str) -> None:
        self.template, self.writer = template, writer
        plain = template.whole([*USER, {"role": "assistant", "content": CONTENT}], TOOLS).rpartition(QUESTION)[2]
        head, _, self.tail = plain.rpartition(CONTENT)
        opened = template.prompt(USER, TOOLS).rpartition(QUESTION)[2]
        self.heads = sorted({head, opened, opened.partition("<think>")[0]}, key=len, reverse=True)

    def turn(self, calls: Sequence[Call], content: str = "") -> str:
        """Return the completion that has these calls. Raises UnreadableError."""
        chat = prepare([*USER, _message(calls, content)], self.writer)
        text = self.template.whole(chat, TOOLS).rpartition(QUESTION)[2]
        if not all(call.name in text for call in calls):
            raise UnreadableError("it leaves out tool calls" + " of messages with content" * bool(content))
        head = next(filter(text.startswith, self.heads), None)
        if head is None:
            raise UnreadableError("it begins a message with tool calls as no other message")
        text = text[len(head) :]
        last = max(text.rfind(part) for call in calls for part in (call.name, *call.arguments))
        ends = [place for stop in self.template.stops if (place := text.find(stop, last)) >= 0]
        text = self.template.seen(text[: min(ends, default=len(text))].removesuffix(self.tail))
        if len(text) > LONGEST:
            raise UnreadableError(f"it writes {len(text):,} characters for {len(calls)} tool calls")
        return text

    def format(self) -> ToolFormat:
        """Return the format. Raises UnreadableError."""
        one = self.turn([ONE])
        for locate in (_objects, _named, _pairs):
            try:
                [(start, end)], parts = locate(one, [ONE])
                break
            except (ValueError, BrokenError):  # something is not where it is in this form
                continue
        else:
            raise UnreadableError(f"its tool calls have a form that cannot be read: {shown(one)}")
        before, after, between, several = one[:start], one[end:], "", False
        try:
            two = self.turn([ONE, TWO])
            (_, ends), (begins, _) = locate(two, [ONE, TWO])[0]
            between, several = two[ends:begins], True
        except (UnreadableError, ValueError, BrokenError):  # it refuses a second call, or leaves it out
            pass
        told = self.turn([ONE], CONTENT)
        lead, leads, _ = told[: locate(told, [ONE])[0][0][0]].rpartition(CONTENT)[::-1]
        if leads:
            before = before[len(before) - _shared(before, lead) :]
        marker, rest = "".join(before.split()[:1]), before.lstrip()
        if re.search(r"\w", marker) and re.search(r"[^\w\s.]", marker):  # such as <tool_call>
            marker, rest = _pattern(marker), _pattern(rest[len(marker) :])
        else:
            marker, rest = "", SPACE + _pattern(rest)
        example = (before + self.turn([SHORT])[start:]).strip()
        opens = pair = more = ""
        keys = parts if locate is _objects else ()
        following = _pattern(between) if several else NEVER
        if locate is _pairs:
            first_key, value, next_key = parts
            empty = self.turn([EMPTY])
            empty = empty[empty.index(FIRST) + len(FIRST) :]
            shared = _shared(empty, after)
            closed = after[: len(after) - shared]  # the text after the last value, but not after a call without any
            if not re.search(r"[^\w\s]", closed):
                raise UnreadableError("it writes no mark after an argument")
            following_empty = NEVER
            if several and between.startswith(closed):
                following_empty = _pattern(empty[: len(empty) - shared] + between[len(closed) :])
            opens = f"(?P<name>{NAME})(?:(?P<more>{_pattern(first_key)})|(?P<next>{following_empty})|{_pattern(empty)})"
            pair = f"(?P<key>{NAME})(?:{'|'.join(_pattern(v, before_value=True) for v in value)})"
            following = _pattern(between, after_value=True) if several else NEVER
            more = f"(?P<more>{_pattern(next_key, after_value=True)})|"
            ends = f"{more}(?P<next>{following})|{_pattern(after, after_value=True)}"
        else:
            begin = r"\{" if keys else NAME + _pattern(parts[0]) + r"\{"
            opens = "" if keys else f"(?P<name>{NAME}){_pattern(parts[0])}" + r"(?=\{)"
            ends = f"{SPACE}(?:(?P<next>{following}(?={SPACE}{begin}))|{_pattern(after)})"
        found = ToolFormat(marker, rest, ends, example, keys, opens, pair, bool(leads), several, self.writer)
        for calls in ([ONE], [SHORT], [EMPTY], *[[ONE, TWO], [EMPTY, TWO]] * several):
            if found.read(self.turn(calls), TOOLS) != Turn("", tuple(calls), ""):
                raise UnreadableError(f"its tool calls cannot be read back: {shown(self.turn(calls))}")
        return found


def _shared(one: str, two: str) -> int:
    """Return the number of equal characters at the ends of two texts."""
    same = zip(reversed(one), reversed(two), strict=False)
    return next((count for count, (a, b) in enumerate(same) if a != b), min(len(one), len(two)))


def _objects(text: str, calls: Sequence[Call]) -> Located:
    """Find calls that are JSON objects, and the keys, first name and arguments. Raises ValueError, BrokenError."""
    spans, keys, at = list[tuple[int, int]](), (), 0
    for call in calls:
        start = text.index(f'"{call.name}"', at)
        while True:
            start = text.rindex("{", at, start)
            try:
                found, end = read_json(text, start)
            except BrokenError:
                continue
            named = [key for key, value in found.items() if value == call.name]
            given = [key for key, value in found.items() if value in (call.arguments, json.dumps(call.arguments))]
            if named and given:
                break
        spans.append((start, end))
        keys, at = tuple(dict.fromkeys((named[0], given[0], *found))), end
    return spans, keys


def _named(text: str, calls: Sequence[Call]) -> Located:
    """Find calls that are a name and JSON arguments, and the text between these. Raises ValueError, BrokenError."""
    spans, middle, at = list[tuple[int, int]](), "", 0
    for call in calls:
        start = text.index(call.name, at)
        begin = text.index("{", start)
        found, end = read_json(text, begin)
        if found != call.arguments:
            raise ValueError("another JSON object")
        middle, at = text[start + len(call.name) : begin], end
        spans.append((start, end))
    return spans, (middle,)


def _pairs(text: str, calls: Sequence[Call]) -> Located:
    """Find calls that are a name and texts, and the texts up to the first key, a value, and a next key.

    The text between a key and its value may depend on the type of the value. Raises ValueError.
    """
    spans, betweens, values, at = list[tuple[int, int]](), list[str](), dict[str, None](), 0
    for call in calls:
        start = text.index(call.name, at)
        at, betweens = start + len(call.name), []
        for key, value in call.arguments.items():
            place = text.index(key, at)
            betweens.append(text[at:place])
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            begin = text.index(written, place + len(key))
            values[text[place + len(key) : begin]] = None
            at = begin + len(written)
        if len(set(betweens[1:])) != 1 or not all(map(str.strip, (*values, *betweens))):
            raise ValueError("arguments are written differently")
        spans.append((start, at))
    return spans, (betweens[0], sorted(values, key=len, reverse=True), betweens[1])


def _pattern(text: str, *, before_value: bool = False, after_value: bool = False) -> str:
    """Return a regular expression for what a template writes. Numbers, call ids and white space may differ.

    White space next to a value is part of the format only as far as the template writes it.
    """
    if not text.strip():
        return f"(?:{re.escape(text)})?" if before_value or after_value else SPACE if text else ""
    if len(re.findall(r"call\d{5}", text)) > 1:  # a search would try all pairs of lengths
        raise UnreadableError("it writes the id of a tool call several times")
    words = [
        "".join(
            CALL_ID if re.fullmatch(r"call\d{5}", part) else r"\d{1,6}" if part.isdecimal() else re.escape(part)
            for part in re.split(r"(call\d{5}|\d+)", word)
        )
        for word in text.split()
    ]
    lead, trail = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    first = f"(?:{re.escape(lead)})?" if after_value else SPACE if lead else ""
    last = f"(?:{re.escape(trail)})?" if before_value else SPACE if trail else ""
    return first + SPACE.join(words) + last
