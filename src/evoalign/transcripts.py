# SPDX-License-Identifier: Apache-2.0
"""The text of an episode of several turns: what the model wrote, and what it got back.

It is one string, so that rewards, stored completions and reports treat an episode as they treat one completion. Records
are separated by `SEPARATOR`, which is removed from what the model writes: a turn of the model as it wrote it, then a
JSON list of messages (the same turn as the chat template reads it, and the replies to it), then the next turn, and so
on. The text of a single turn is that turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from evoalign.errors import DataError, shown

REWARD = "reward"
"""The score that a harness has to report; others are columns next to it."""
SEPARATOR = "\x04"
"""A control character that is not white space, so that no `strip` removes it."""
Message: TypeAlias = dict[str, Any]
"""A message of a chat template: `role`, `content`, and `tool_calls` or `name` where it has them."""


def clean(turn: str) -> str:
    """Return a turn of the model without separators."""
    return turn.replace(SEPARATOR, "")


def join(text: str, turn: str) -> str:
    """Return the text of an episode with one more turn of the model."""
    return f"{text}{SEPARATOR}{clean(turn)}" if text else clean(turn)


def answered(text: str, messages: Sequence[Message]) -> str:
    """Return the text with the messages of its last turn: the turn itself and the replies to it."""
    return f"{text}{SEPARATOR}{json.dumps(list(messages), ensure_ascii=False).replace(SEPARATOR, '')}"


def _records(text: str) -> list[str]:
    """Return the records of an episode. Any other text is one turn, also if it has a separator by chance."""
    records = text.split(SEPARATOR)
    try:
        is_episode = all(_is_record(json.loads(record)) for record in records[1::2])
    except (ValueError, RecursionError):
        is_episode = False
    return records if is_episode else [text]


def _is_record(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in found)


def turns(text: str) -> list[str]:
    """Return what the model wrote in each turn."""
    return _records(text)[::2]


def messages(text: str) -> list[Message]:
    """Return the messages after the prompt: the model's and the replies."""
    records, found = _records(text), list[Message]()
    for place, turn in enumerate(records[::2]):
        replies = records[2 * place + 1 : 2 * place + 2]
        said = [{"role": "assistant", "content": turn}]
        found += cast(list[Message], json.loads(replies[0])) if replies else said
    return found


def exchanges(text: str) -> list[list[Message]]:
    """Return the messages of each turn that has been replied to: the turn and its replies."""
    return [json.loads(record) for record in _records(text)[1::2]]


def of_messages(found: Sequence[Message]) -> str:
    """Return the text of an episode from the messages after its prompt: the model's, each with the replies to it."""
    text, last = "", list[Message]()
    for place, message in enumerate(found):
        if message["role"] != "assistant":
            last.append(message)
            continue
        if last:
            text = answered(text, last)
        text = join(text, message.get("content") or "") if place else clean(message.get("content") or "")
        last = [message]
    return answered(text, last) if len(last) > 1 else text


def spoken(text: str) -> str:
    """Return what the model wrote, one turn per line, without the replies."""
    return "\n".join(turns(text))


def readable(text: str) -> str:
    """Return an episode for a reader: each message after its role. A single turn is returned as it is."""
    if len(_records(text)) == 1:
        return text
    lines = list[str]()
    for message in messages(text):
        lines = [*map(_line, message.get("prompt", ())), *lines, _line(message)]
    return "\n".join(lines)


def _line(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    named = f"{message['role']} {message['name']}" if "name" in message else message["role"]
    written = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return f"[{named}] " + " ".join(filter(None, [message["content"], *written]))


def checked_scores(found: Any) -> dict[str, float]:
    """Return scores: a number, or named numbers with a `reward`. Raises DataError."""
    named: Any = found if isinstance(found, Mapping) else {REWARD: found}
    scores = {
        str(name): float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if REWARD not in scores:
        raise DataError(f"the score {shown(found)} has no number {REWARD!r}")
    if odd := [name for name, value in scores.items() if not math.isfinite(value)]:
        raise DataError(f"the score {shown(found)}: {odd[0]} is not finite")
    return scores
