# SPDX-License-Identifier: Apache-2.0
"""A backend of the gateway that gives planned completions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

from evoalign.gateway.chat import Answer, Call, Chat

KEY = "episode-key-5f1c"
SECONDS = 30
USED = {"prompt_tokens": 11, "completion_tokens": 7}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]


def said(content, finish_reason="stop"):
    """Return a completion of text alone."""
    return Answer(content=content, calls=(), finish_reason=finish_reason, **USED)


def called(*calls, content=""):
    """Return a completion with calls."""
    return Answer(content=content, calls=calls, finish_reason="tool_calls", **USED)


BOTH = called(Call("weather", {"city": "Zürich"}), Call("now", {}), content="Let me look.")
"""Two calls after some text."""


class Planned:
    """Gives the completions of `plan`, one request each, or raises the error; waits for ever where it is empty."""

    def __init__(self, *plan: list[Answer] | Exception) -> None:
        self.plan = list(plan)
        self.chats: list[Chat] = []
        self.keys: list[str] = []
        self.scores: list[Mapping[str, float]] = []
        self.waits, self.cancelled = threading.Semaphore(0), threading.Event()

    def knows(self, key: str) -> bool:
        return key == KEY

    async def complete(self, key: str, chat: Chat) -> list[Answer]:
        self.keys.append(key)
        self.chats.append(chat)
        if not self.plan:
            self.waits.release()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        found = self.plan.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def score(self, key: str, scores: Mapping[str, float]) -> None:
        self.keys.append(key)
        self.scores.append(scores)
