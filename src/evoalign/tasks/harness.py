# SPDX-License-Identifier: Apache-2.0
"""Episodes that a program outside this package plays and scores: an agent with its own harness.

`task.command` runs once per episode and reaches the model by an OpenAI or Anthropic API at a loopback address, where
its key names the member and the row (`evoalign.gateway`). It reports a score; nothing else about it has to be known.

SECURITY: an agent with a shell runs what the model writes, with the rights of the user who trains. Confine it.
"""

from __future__ import annotations

import json
import re
import shlex
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from evoalign import transcripts
from evoalign.config import GraderConfig, TaskConfig
from evoalign.errors import ConfigError, shown
from evoalign.rewards.objective import Columns, WeightedSum
from evoalign.tasks import data
from evoalign.tasks.base import Data, Task
from evoalign.transcripts import REWARD, Message
from evoalign.types import Example, Messages

PLACES = ("base_url", "api_key", "example")
"""Placeholders of a command. `example` is the path of a JSON file with the row."""
FUNCTION = re.compile(r"[\w./-]+:\w+")
SCORE = "score"
"""Role of the last record of a transcript, which has the scores."""


class Harness(Task):
    """Rows of any columns, or without files the numbers of rows (`index`); the reward is what the harness reports."""

    name = "harness"
    forms = ("chat",)
    weighted = WeightedSum({REWARD: 1.0})
    retries: int = 2
    """Repeated attempts at an episode that failed (`grader.retries`)."""
    is_serial: bool = False
    """Whether the engine gets one request at a time, so that a completion depends on nothing else
    (`deterministic: true`)."""
    record: Path | None = None
    """File that keeps the finished episodes of the present generation; None: none is kept."""

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        if config.command is None:
            raise ConfigError(
                "task.command is not set; name the command that runs an episode, such as "
                "./my_eval.sh {base_url} {api_key} {example}"
            )
        self.command = parsed(config.command)

    @property
    def player(self) -> str:
        return "program"

    def take_run(self, grader: GraderConfig, *, is_serial: bool) -> None:
        self.retries, self.is_serial = grader.retries, is_serial

    def keep_episodes(self, path: Path) -> None:
        self.record = path

    def load_data(self, seed: int) -> Data:
        """Load the files of the config; without one, the rows are numbers. Raises DataError, ConfigError."""
        if self.config.train_data is not None:
            return data.load(self.config, seed, lambda _, row: row)
        train, test = self.config.train_size, self.config.test_size
        if train is None or test is None:
            raise ConfigError("task harness needs task.train_data, or task.train_size and task.test_size")
        rows = [{"index": i} for i in range(train + test)]
        return Data(rows[:train], rows[train:])

    def prompt(self, example: Example) -> Messages:
        """Return the row as a message. Models get what the harness sends; this is for checks and reports."""
        return [{"role": "user", "content": json.dumps(dict(example), ensure_ascii=False, default=str)}]

    def compute_reward(self, text: str, example: Example) -> float:
        return scores_of(text)[REWARD]

    def columns(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """Return what the harness reported; None for a column that an episode does not have."""
        found = [scores_of(text) for text in texts]
        names = dict.fromkeys([REWARD, *(name for scores in found for name in scores)])
        return {name: [scores.get(name) for scores in found] for name in names}


def parsed(command: str) -> list[str]:
    """Return the words of a command, with its placeholders. Raises ConfigError for one that is not known."""
    if FUNCTION.fullmatch(command):
        return [command]
    try:
        words = shlex.split(command)
        names = {name for word in words for _, name, _, _ in string.Formatter().parse(word) if name is not None}
    except ValueError as error:
        raise ConfigError(
            f"task.command {shown(command)}: {error}; write braces that are no placeholder twice"
        ) from None
    if odd := sorted(names - set(PLACES)):
        raise ConfigError(
            f"task.command {shown(command)}: {{{odd[0]}}} is no placeholder; there are "
            + ", ".join(f"{{{name}}}" for name in PLACES)
        )
    return words


def finished(calls: Sequence[tuple[Sequence[Message], str]], scores: Mapping[str, float]) -> str:
    """Return the text of an episode from the calls of its harness (messages and completion) and its scores.

    Each record has the messages of the next call that are new. The last one has the scores and the first messages.
    """
    last = {"role": SCORE, "content": json.dumps(dict(scores)), "prompt": list(calls[0][0]) if calls else []}
    text = "" if calls else transcripts.answered("", [last])
    for place, (messages, completion) in enumerate(calls):
        text = transcripts.join(text, completion)
        after, known = [last], 0
        if place + 1 < len(calls):
            after = list(calls[place + 1][0])
            known = len(messages) + 1 if after[: len(messages)] == list(messages) else 0
        turn = {"role": "assistant", "content": transcripts.clean(completion)}
        text = transcripts.answered(text, [turn, *after[known:]])
    return text


def scores_of(text: str) -> dict[str, float]:
    """Return the scores at the end of an episode's text."""
    return json.loads(transcripts.messages(text)[-1]["content"])
