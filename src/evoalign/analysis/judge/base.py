# SPDX-License-Identifier: Apache-2.0
"""What a judge is to those who ask it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reply:
    """What a judge said. `is_cut`: it was not at its end, so that its last line may be half of one."""

    text: str
    is_cut: bool


class NoReplyError(Exception):
    """A judge said nothing to this question; the message says why, and is written down in place of its words."""


class NoRoomError(NoReplyError):
    """The question is too long for this judge, which says nothing of whether it is well."""


class Judge(Protocol):
    """A model that is asked. `concurrency` questions are under way at once, at most."""

    name: str
    concurrency: int

    def opened(self) -> AbstractAsyncContextManager[None]:
        """While it is asked."""
        ...

    async def ask(self, prompt: str) -> Reply:
        """Raises NoReplyError, JudgeError."""
        ...

    def hidden(self, text: str) -> str:
        """A text as it may be written down."""
        ...
