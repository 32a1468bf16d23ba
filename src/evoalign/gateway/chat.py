# SPDX-License-Identifier: Apache-2.0
"""The requests and completions of the gateway, the same for every API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from evoalign.errors import RefusedError
from evoalign.models.tool_calls import Call

__all__ = ["Answer", "Backend", "Call", "Chat", "RefusedError"]


@dataclass(frozen=True, slots=True)
class Chat:
    """One request of a harness, in the form of chat templates. None: the harness leaves it to the backend."""

    messages: list[dict[str, Any]]
    """Roles system, user, assistant, tool; the last one is of a user or a tool. `content` is a text.

    An assistant's `tool_calls` have arguments as a dict. A tool's message has the `name` of the tool; results are in
    the order of their calls.
    """
    tools: list[dict[str, Any]]
    """{"type": "function", "function": {name, description, parameters}}."""
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stop: tuple[str, ...]
    n: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion."""

    content: str
    calls: tuple[Call, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int


class Backend(Protocol):
    """Generates completions of episodes. All methods are called in the event loop of the server.

    A method raises RefusedError to refuse: 401 for an unknown key, 400 with code `context_length_exceeded` also for an
    exhausted budget, 503 while closing. The response tells clients not to retry these.
    """

    async def complete(self, key: str, chat: Chat) -> list[Answer]:
        """Return `chat.n` completions. Cancelled where the client disconnects or the server closes."""
        ...

    async def score(self, key: str, scores: Mapping[str, float]) -> None:
        """Take the named scores of an episode; all are finite."""
        ...

    def knows(self, key: str) -> bool:
        """Return whether a key is that of an episode. Called before the body of a request is read."""
        ...
