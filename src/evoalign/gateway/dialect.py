# SPDX-License-Identifier: Apache-2.0
"""Common parts of the APIs of the gateway: checks of fields, conversations, tools, and events of a stream."""

from __future__ import annotations

import json
import secrets
from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from evoalign.errors import RefusedError, shown
from evoalign.gateway.chat import Answer, Chat

Body = dict[str, Any]
"""An object of JSON."""
IGNORED = frozenset(
    {
        "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "seed", "service_tier", "store", "stream", "stream_options",
        "user",
    }
)  # fmt: skip
"""Fields of all APIs that do not change a completion, or are read by the server."""
MOST_STOPS = 64
HOTTEST = 2.0
"""Maximum temperature, as OpenAI's."""
LEAST_TOP_P = 1e-6


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: a path, and functions from its requests and to its responses.

    A streamed response is written from the whole one, since a completion is whole before any of it is sent.
    """

    path: str
    read: Callable[[Body], Chat]
    """Returns the request of a body. Raises RefusedError."""
    reply: Callable[[Body, Sequence[Answer]], Body]
    """Returns the response to a body."""
    stream: Callable[[Body, Body], str]
    """Returns the events of a body and its response."""
    error: Callable[[RefusedError], Body]


# --- fields ---


def refused(field: str, words: str) -> RefusedError:
    """Return the error of a field."""
    return RefusedError(f"{field}: {words}", 400, field=field)


def check(body: Body, read: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields other than those that are read, ignored, null, or have a `neutral` value."""
    for field, value in body.items():
        if field in IGNORED or field in read or value in (None, *neutral.get(field, ())):
            continue
        allowed = "".join(f", or set it to {json.dumps(one)}" for one in neutral.get(field, ())[:1])
        raise refused(field, f"{shown(value)} is not supported; leave it out{allowed}")


def text(value: Any, field: str) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise refused(field, f"{shown(value)} is not a text")
    return value


def flag(value: Any, field: str) -> bool:
    """Return a boolean; null is false."""
    if value is not None and not isinstance(value, bool):
        raise refused(field, f"{shown(value)} is not true or false")
    return bool(value)


def objects(value: Any, field: str) -> list[tuple[str, Body]]:
    """Return the objects of a list, each with its field; null is an empty list."""
    items = cast(list[Any], value) if isinstance(value, list) else [] if value is None else None
    if items is None or not all(isinstance(one, dict) for one in items):
        raise refused(field, "this must be a list of objects")
    return [(f"{field}[{i}]", one) for i, one in enumerate(items)]


def integer(value: Any, field: str, most: int = 1 << 31) -> int | None:
    """Return a positive integer, or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most):
        raise refused(field, f"{shown(value)} is not an integer from 1 to {most}")
    return value


def number(value: Any, field: str, most: float, *, least: float = 0.0) -> float | None:
    """Return a number, or None."""
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise refused(field, f"{shown(value)} is not a number from {least:g} to {most:g}")
    return float(value)


def chat(
    body: Body,
    messages: list[Body],
    tool_of: Callable[[Body, str], Body],
    limits: Sequence[str],
    *,
    stop: str = "stop",
    n: int = 1,
) -> Chat:
    """Return the request of a body with these messages: the maximum of tokens is the first of `limits` with a value."""
    found = [integer(body.get(field), field) for field in limits]
    tools = [tool_of(one, where) for where, one in objects(body.get("tools"), "tools")]
    return Chat(
        messages=messages,
        tools=tools if _uses_tools(body.get("tool_choice")) else [],
        max_tokens=next((limit for limit in found if limit is not None), None),
        temperature=number(body.get("temperature"), "temperature", HOTTEST),
        top_p=number(body.get("top_p"), "top_p", 1.0, least=LEAST_TOP_P),
        stop=_stops(body.get(stop), stop),
        n=n,
    )


def _stops(value: Any, field: str) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(given, list):
        raise refused(field, f"{shown(given)} is not a text or a list of texts")
    stops = tuple(text(one, field) for one in cast(list[Any], given))
    if len(stops) > MOST_STOPS or "" in stops:
        raise refused(field, f"at most {MOST_STOPS} texts are supported, none of them empty")
    return stops


def content(value: Any, field: str, kinds: Collection[Any]) -> str:
    """Return the text of a message, which is null, a text, or a list of parts of these types, joined by line breaks."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = objects(value, field)
    for where, part in parts:
        if part.get("type") not in kinds:
            raise refused(where, f"type {shown(part.get('type'))} is not supported; send text")
    return "\n".join(text(part.get("text"), f"{where}.text") for where, part in parts)


# --- tools ---


def tool(given: Body, field: str, parameters: str = "parameters") -> Body:
    """Return a tool in the form of chat templates. `strict` is ignored: completions follow no grammar."""
    schema = given.get(parameters)
    if schema is not None and not isinstance(schema, dict):
        raise refused(f"{field}.{parameters}", "this must be a JSON schema")
    function = {
        "name": text(given.get("name"), f"{field}.name"),
        "description": text(given.get("description") or "", f"{field}.description"),
        "parameters": {"type": "object", "properties": {}} if schema is None else schema,
    }
    return {"type": "function", "function": function}


def _uses_tools(choice: Any) -> bool:
    """Return whether the tools are offered to the model. `choice` is a word, or an object whose type is one."""
    kind = cast(Body, choice).get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        raise refused("tool_choice", f"{shown(choice)} is not supported; use auto or none")
    return kind != "none"


def arguments(value: Any) -> Body:
    """Return the arguments of a call as a dict; a text that is no object of JSON is {"arguments": text}."""
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = value
    return cast(Body, found) if isinstance(found, dict) else {"arguments": value}


def new_id(prefix: str) -> str:
    """Return an id of a response or a call."""
    return f"{prefix}_{secrets.token_hex(12)}"


class Conversation:
    """Messages of a request, brought into the form of chat templates.

    Ids of calls are dropped: results get the names of their calls instead, and are sorted in the order of these.
    """

    def __init__(self) -> None:
        self.messages: list[Body] = []
        self._calls: dict[str, tuple[int, str]] = {}
        self._results: list[int] = []

    def system(self, words: str) -> None:
        """Add a system message. Those before all other messages are joined, since templates expect one."""
        if [message["role"] for message in self.messages] == ["system"]:
            self.messages[0]["content"] += f"\n\n{words}"
        else:
            self.messages.append({"role": "system", "content": words})

    def user(self, words: str) -> None:
        """Add a user message, to the one before if that is the user's too: many templates want turns to alternate."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += f"\n\n{words}"
        else:
            self.messages.append({"role": "user", "content": words})

    def assistant(self, words: str) -> None:
        """Add an assistant message, or the text of one that began with a call."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not last["content"]:
            last["content"] = words
        else:
            self._calls = {}
            self.messages.append({"role": "assistant", "content": words})

    def call(self, call_id: Any, name: Any, given: Any, field: str) -> None:
        """Add a call to the last message if it is the assistant's, or else to a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.assistant("")
        calls = self.messages[-1].setdefault("tool_calls", [])
        name = text(name, f"{field}.name")
        self._calls[text(call_id, f"{field}.id")] = (len(calls), name)
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments(given)}})

    def result(self, call_id: Any, words: str, field: str) -> None:
        """Add the result of a call of the last assistant message."""
        if not isinstance(call_id, str) or call_id not in self._calls:
            raise refused(field, f"{shown(call_id)} is no open call of the last assistant message")
        order, name = self._calls.pop(call_id)
        if self.messages[-1]["role"] != "tool":
            self._results = []
        at = bisect(self._results, order)
        after = len(self._results) - at
        self._results.insert(at, order)
        self.messages.insert(len(self.messages) - after, {"role": "tool", "name": name, "content": words})

    def whole(self, field: str) -> list[Body]:
        """Return the messages. Raises RefusedError where the model has nothing to reply to."""
        if not self.messages or self.messages[-1]["role"] not in ("user", "tool"):
            raise refused(field, "the last message must be of a user, or the result of a tool")
        return self.messages


# --- responses ---


def written(call_arguments: Body) -> str:
    """Return the arguments of a call as JSON."""
    return json.dumps(call_arguments, ensure_ascii=False)


def event(data: Body | str, name: str = "") -> str:
    """Return one server-sent event."""
    words = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {words}\n\n" if name else f"data: {words}\n\n"


def openai_error(error: RefusedError) -> Body:
    """Return an error in the form of OpenAI's APIs."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "rate_limit_error" if error.status == 429 else kind
    return {"error": {"message": str(error), "type": kind, "param": error.field or None, "code": error.code}}
