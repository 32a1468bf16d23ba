# SPDX-License-Identifier: Apache-2.0
"""Conversations as data sets write them, as a prompt and the answer to it.

Two forms are read: messages of `role` and `content`, as TRL and the chat templates have them, and ShareGPT's turns of
`from` and `value`.
"""

from __future__ import annotations

from typing import Any, cast

from evoalign.errors import DataError
from evoalign.rewards.functions import shown
from evoalign.types import Messages

COLUMNS = ("messages", "conversations")
"""Columns that hold a conversation: its last turns are the answer, where a `prompt` is what is asked alone."""
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system",
}  # fmt: skip
"""Roles by ShareGPT's names."""


def with_prompt(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row with a `prompt` where it has a conversation in its place. Raises DataError.

    Where the assistant has the last word, that is the `completion`, unless the row has one, and what was said before
    is the prompt. Else all of it is asked.
    """
    column = next((name for name in COLUMNS if row.get(name) is not None), None)
    if row.get("prompt") is not None or column is None:
        return row
    found: Any = row[column]
    if not isinstance(found, list) or not found:
        raise DataError(f"{where}: {column} is {shown(found)}; expected a list of messages")
    said = read(where, cast("list[Any]", found))
    if said[-1]["role"] != "assistant":
        return row | {"prompt": said}
    if len(said) == 1:
        raise DataError(f"{where}: {column} holds the assistant's answer alone; put what is asked before it")
    answer = {"completion": said[-1]["content"]} if row.get("completion") is None else {}
    return row | {"prompt": said[:-1]} | answer


def read(where: str, messages: list[Any]) -> Messages:
    """The messages, each with `role` and `content` as text. Raises DataError."""
    return [_message(where, message) for message in messages]


def _message(where: str, message: Any) -> dict[str, str]:
    """A message without the empty fields that columnar files give to every row."""
    fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    if "role" not in fields and "from" in fields:
        fields = {"role": _role(where, fields["from"]), "content": fields.get("value")}
    if isinstance(fields.get("content"), list):
        fields["content"] = _joined(where, cast("list[Any]", fields["content"]))
    if not {"role", "content"} <= fields.keys() or not all(isinstance(v, str) for v in fields.values()):
        raise DataError(f"{where}: message {shown(message)}; expected {{'role': .., 'content': ..}} with strings")
    return cast("dict[str, str]", fields)


def _role(where: str, said_by: Any) -> str:
    role = ROLES.get(said_by) if isinstance(said_by, str) else None
    if role is None:
        raise DataError(f"{where}: a turn is from {shown(said_by)}; expected human, gpt or system")
    return role


def _joined(where: str, parts: list[Any]) -> str:
    """The text of a content in parts."""
    texts: list[str] = []
    for part in parts:
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            kind = fields.get("type", part)
            raise DataError(f"{where}: a message has a part of type {shown(kind)}; only parts of type 'text' are read")
        texts.append(fields["text"])
    return "".join(texts)
