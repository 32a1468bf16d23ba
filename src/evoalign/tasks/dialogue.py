# SPDX-License-Identifier: Apache-2.0
"""Dialogues whose rows are generated: `guess` and `shopping`. The user follows rules, and so does the checker."""

from __future__ import annotations

from abc import abstractmethod

from evoalign import transcripts
from evoalign.tasks.generated import Generated
from evoalign.types import Example, Messages


class Dialogue(Generated):
    """Base class of the dialogues: `text` is the user's first message, `reply` returns the later ones.

    `grade` gets the text of a whole episode; `evoalign.transcripts.turns` has the model's messages.
    """

    forms = ("chat",)

    @abstractmethod
    def reply(self, example: Example, transcript: Messages) -> str | None:
        """Return the user's next message, or None where the episode ends: a pure function of its arguments."""

    @abstractmethod
    def play(self, example: Example, transcript: Messages) -> str:
        """Return the model's next message in an episode that earns `max_reward`."""

    def gold(self, example: Example) -> str:
        """Return the text of an episode that earns `max_reward`."""
        messages = [{"role": "user", "content": self.text(example)}]
        while True:
            messages.append({"role": "assistant", "content": self.play(example, messages)})
            reply = self.reply(example, messages)
            if reply is None:
                return transcripts.of_messages(messages[1:])
            messages.append({"role": "user", "content": reply})


def spoken(transcript: Messages) -> list[str]:
    """Return the model's messages."""
    return [message["content"] for message in transcript if message["role"] == "assistant"]
