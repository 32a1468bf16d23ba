# SPDX-License-Identifier: Apache-2.0
"""Tasks whose rows are generated: `tool_calls`, `word_problems`, `constraints`; dialogues: `guess`, `shopping`.

Without `task.train_data` the rows are drawn from a fixed seed, so that all runs have the same ones, and no file is
needed. The BLAKE2b digest of a row's key decides its split: no key is in two of them, whatever their sizes. With
`task.train_data`, the rows of files are used as in other tasks.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from evoalign import transcripts
from evoalign.config import TaskConfig
from evoalign.errors import DataError
from evoalign.rewards.objective import Columns
from evoalign.tasks import data
from evoalign.tasks.base import Data, Split, Task
from evoalign.tasks.data import random_state
from evoalign.types import Example, Messages, Prompt

SIZES: Mapping[Split, int] = MappingProxyType({"train": 600, "validation": 200, "test": 500})
"""Default number of rows. `task.train_size`, `task.validation_size` and `task.test_size` set others."""
MAX_RESPONSE = 20_000
"""Maximum characters of a completion; a longer one earns 0."""
MAX_MISSES = 10_000
"""Maximum number of draws for one row."""
NAMES = (
    "Ana", "Ben", "Cleo", "Dmitri", "Elif", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mateo", "Nadia",
    "Omar", "Priya", "Rosa", "Sven", "Tariq", "Uma",
)  # fmt: skip
"""Names of people in generated rows."""
_T = TypeVar("_T")


class Draw:
    """Random choices from numpy's RandomState, whose stream is frozen: one seed, one sequence on every machine."""

    def __init__(self, seed: int) -> None:
        self._random = random_state(seed)

    def number(self, low: int, high: int, step: int = 1) -> int:
        """Return one of low, low + step, ... up to high, with equal probability."""
        return low + step * int(self._random.randint((high - low) // step + 1))

    def one(self, items: Sequence[_T]) -> _T:
        """Return one of the items."""
        return items[self.number(0, len(items) - 1)]

    def some(self, items: Sequence[_T], count: int) -> list[_T]:
        """Return `count` different items in random order."""
        return [items[int(place)] for place in self._random.permutation(len(items))[:count]]

    def chance(self, percent: int) -> bool:
        """Return True with this probability."""
        return self.number(1, 100) <= percent


class Generated(Task):
    """Base class of the generated tasks: one question per row, graded by rules into columns from 0 to 1.

    A row has `unseen` if its kind may be missing in training: `seen` and `unseen` are then measures, the shares of
    right completions among the rows of either kind.
    """

    max_reward = 1.0
    per_call = 16
    takes_system_prompt = True
    forms = ("chat", "raw")
    names: ClassVar[tuple[str, ...]]
    """Names of the columns. The last one is 1 for a right completion, else 0."""

    @classmethod
    @abstractmethod
    def draw(cls, draw: Draw, split: Split) -> Example:
        """Return one random row for a split."""

    @classmethod
    @abstractmethod
    def key(cls, example: Example) -> str:
        """Return the text by which rows are distinguished and divided into splits: no two have the same."""

    @abstractmethod
    def text(self, example: Example) -> str:
        """Return the prompt: the content of the user's message."""

    @abstractmethod
    def grade(self, text: str, example: Example) -> dict[str, float]:
        """Return the columns of one cleaned completion of at most `MAX_RESPONSE` characters."""

    @abstractmethod
    def check(self, where: str, row: dict[str, Any]) -> Example:
        """Return the row of a user's file. Raises DataError that names `where`."""

    @abstractmethod
    def gold(self, example: Example) -> str:
        """Return a completion that earns `max_reward`."""

    @classmethod
    def rows(cls, split: Split, count: int, seed: int = 0) -> list[Example]:
        """Return the first `count` generated rows of a split. Raises DataError if there are fewer."""
        return distinct(cls.draw, cls.key, split, count, seed)

    def load_data(self, seed: int) -> Data:
        """Return the generated rows, the same for every `seed`, or those of the config's files. Raises DataError."""
        config = self.config
        if any(config.files) or config.columns:
            return data.load(config, seed, self._checked)
        return generated(config, self.rows)

    def prompt(self, example: Example) -> Prompt:
        text = self.text(example)
        return text if self.config.prompt == "raw" else self.with_system([{"role": "user", "content": text}])

    def graded(self, text: str, example: Example) -> dict[str, float]:
        """Return the columns of one cleaned completion."""
        return self.grade(text if len(text) <= MAX_RESPONSE else "", example)

    def columns(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        graded = [self.graded(self.clean(text), example) for text, example in zip(texts, examples, strict=True)]
        return {name: [columns[name] for columns in graded] for name in self.names}

    def compute_reward(self, text: str, example: Example) -> float:
        columns = {name: [value] for name, value in self.graded(text, example).items()}
        return self.weighted.rewards(columns, [text], [example])[0]

    def is_right(self, text: str, example: Example) -> bool:
        return self.graded(text, example)[self.names[-1]] == 1.0

    def measures(self, text: str, example: Example) -> Mapping[str, float | None]:
        """Return `seen` and `unseen`: whether the completion is right, for rows of that kind; None for other rows."""
        kind = example.get("unseen")
        right = None if kind is None else float(self.is_right(text, example))
        return {"seen": None if kind else right, "unseen": right if kind else None}

    def _checked(self, where: str, row: dict[str, Any]) -> Example:
        if not isinstance(row.get("unseen"), bool | None):
            raise DataError(f"{where}: unseen is {row['unseen']!r}; expected true or false")
        return self.check(where, row)


class Dialogue(Generated):
    """Base class of the dialogues: `text` is the user's first message, `reply` returns the later ones.

    The user follows rules, and so does the checker. `grade` gets the text of a whole episode;
    `evoalign.transcripts.turns` has the model's messages.
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


def distinct(
    row: Callable[[Draw, Split], Example], key: Callable[[Example], str], split: Split, count: int, seed: int
) -> list[Example]:
    """Return random rows of a split, no two with the same key. Raises DataError if there are fewer than `count`."""
    draw = Draw(seed * len(SIZES) + list(SIZES).index(split))
    found: dict[str, Example] = {}
    while len(found) < count:
        for _ in range(MAX_MISSES):
            drawn = row(draw, split)
            name = key(drawn)
            if name not in found and split_of(name) == split:
                found[name] = drawn
                break
        else:
            raise DataError(f"the task has {len(found)} rows for {split}, not {count}; ask for fewer")
    return list(found.values())


def generated(config: TaskConfig, rows: Callable[[Split, int], list[Example]]) -> Data:
    """Return the splits with the sizes of the config, or the default ones."""
    sizes = {"train": config.train_size, "validation": config.validation_size, "test": config.test_size}
    return Data(**{split: rows(split, sizes[split] or count) for split, count in SIZES.items()})


def split_of(key: str) -> Split:
    """Return the split of a generated row, by the digest of its key modulo 13: 6 train, 2 validation, 5 test."""
    place = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 13
    return "train" if place < 6 else "validation" if place < 8 else "test"


def texts_of(where: str, row: Mapping[str, Any], *names: str) -> None:
    """Raise DataError, naming `where`, unless the row has text in each of these columns."""
    for name in names:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise DataError(f"{where}: {name} is {row.get(name)!r}; expected text")
