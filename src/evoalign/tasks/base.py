# SPDX-License-Identifier: Apache-2.0
"""What is asked and what counts as good: one object drives ES, evaluation, baselines and analysis."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Event
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, overload

from pydantic import BaseModel

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, DataError, RewardError
from evoalign.plugins import own_settings
from evoalign.rewards import objective
from evoalign.rewards.functions import failure, finite, fresh, shown
from evoalign.rewards.gold import says
from evoalign.rewards.objective import Columns, Objective, SetObjective, WeightedSum
from evoalign.types import Example, Messages, Prompt

SHOWN = 3
"""Gold answers that are shown where some fail."""
RAW = ("raw", "short", "conversation")
"""What `task.prompt` is where the prompt is a text and no message."""


Split: TypeAlias = Literal["train", "validation", "test"]
"""What a task's examples are for: to train on, to choose by, to report."""


@dataclass(frozen=True, slots=True)
class Data:
    """The splits of a task, in a fixed order. Where `validation` is empty, nothing is chosen on the way."""

    train: Sequence[Example]
    test: Sequence[Example]
    validation: Sequence[Example] = ()

    def of(self, split: Split) -> Sequence[Example]:
        """The examples of one of them."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[split]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many there are for training, test and validation."""
        return len(self.train), len(self.test), len(self.validation)

    @property
    def all(self) -> Sequence[Example]:
        """The examples of all of them."""
        return Joined(self.train, self.validation, self.test)


class Joined(Sequence[Example]):
    """Sequences one after another, which stay where they are: rows may be many, and not in memory."""

    def __init__(self, *parts: Sequence[Example]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> list[Example]: ...
    def __getitem__(self, place: int | slice) -> Example | list[Example]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]  # negative ones count from the end, and there is none beyond
        for part in self._parts:
            if place < len(part):
                return part[place]
            place -= len(part)
        raise AssertionError

    def __iter__(self) -> Iterator[Example]:
        return chain.from_iterable(self._parts)


class Task(ABC):
    """Base of all tasks. A task of one's own defines `load_data`, `prompt` and `compute_reward`."""

    name: str
    max_reward: float = math.inf
    """What a perfect answer earns; infinite where there is no such thing."""
    from_config: bool = False
    """Set by `create`: the config alone makes the same task again, in another process too."""
    settings: ClassVar[type[BaseModel] | None] = None
    """A pydantic model of the settings that only this task has, which `options` then is one of; None takes all as they
    are, in a dict."""
    gradings: ClassVar[tuple[str, ...]] = ("strict",)
    """What `task.grading` may be."""
    reads_gold: ClassVar[bool] = False
    """Whether it takes right answers from the column `task.gold`."""
    takes_system_prompt: ClassVar[bool] = False
    """Whether its chat prompts have `task.system_prompt`, as `with_system` puts it there."""
    isolated: ClassVar[bool] = False
    """For tasks that are shipped: whether an answer can make the grading hang or take all memory, so that it is done in
    the process of the grader. That of a task of one's own always is."""
    shipped: ClassVar[tuple[str, str | None] | None] = None
    """The training and the test file, below the project's folder, where the config names no training data."""
    per_call: int | None = None
    """How many completions `columns` is given at once, which `grader.timeout` is for, where it scores each alone. None:
    it may look at all of them together, and is given all, or as many as `grader.batch` says, which `isolate` puts
    here."""
    scores_elsewhere: bool = False
    """Whether `columns` waits for another process, and may be called by a thread of this one."""
    stopping: Event | None = None
    """Set where nobody waits any more for `columns`, which a thread then leaves with CancelledError."""
    graded_text: ClassVar[str] = ""
    """What an answer has to hold in order to count, where there is such a text: a stop text must not cut it off."""
    weighted: WeightedSum = WeightedSum()
    """What a completion's columns come to: the `reward` of an evaluation, and the objective where no other is set."""

    asks_scorer: ClassVar[bool] = False
    """Whether models score its completions: those of the section `scorer`."""
    scorer_columns: ClassVar[tuple[str, ...]] = ()
    """The columns that it needs of these."""
    make_scorer: Callable[[], Any] | None = None
    """Makes what scores, where `asks_scorer`; None: nobody has said which."""
    text_form: str = "raw text"
    """What its prompts are called where they are texts and no messages."""
    commands: Mapping[str, str] = MappingProxyType({})
    """Commands of evoalign that look at a run of it, `{run}` being the run's folder, and what each is for: told as a
    run ends, where the files that they name in it are there."""
    notes: Sequence[str] = ()
    """What there is to say of the rows that were loaded, a sentence each: told as a run begins."""
    set_objective: SetObjective | None = None
    """The objective that `task.fitness` names, if set."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "per_call" not in vars(cls) and vars(cls).keys() & {"columns", "rewards"}:
            cls.per_call = None  # what a base says of its own scoring

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self.set_objective = None if config.fitness is None else SetObjective(config.fitness, self.clean)
        if config.grading not in self.gradings:
            raise ConfigError(f"task.grading: {config.grading} is not for task {config.name}; leave it out")
        if config.gold is not None and not self.reads_gold:
            raise ConfigError(f"task.gold: {config.gold} is not for task {config.name}; leave it out")
        if config.system_prompt is not None and not self.takes_system_prompt:
            raise ConfigError(f"task.system_prompt is not for task {config.name}; leave it out")
        if config.system_prompt is not None and config.prompt in RAW:
            raise ConfigError(
                f"task.system_prompt: prompts of task.prompt: {config.prompt} go to the model as they are, without "
                "messages; leave one of the two out, or choose a prompt of messages"
            )
        self.options: Any = own_settings(config.options, self.settings, "task", TaskConfig.model_fields)

    @classmethod
    def make(cls, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Task:
        """The task of a config. Raises ConfigError for reward functions, which only `custom` takes."""
        if rewards is not None or config.rewards:
            raise ConfigError(f"task {config.name} has a reward of its own; rewards go with task.name: custom")
        return cls(config)

    @abstractmethod
    def load_data(self, seed: int) -> Data:
        """The training and the test split, and where there is one the validation split.

        Where `task.validation_size` is set and this gives none, it is taken from the end of the training split.
        Raises DataError that names the file and the row.
        """

    @abstractmethod
    def prompt(self, example: Example) -> Prompt:
        """A raw string, or messages for the chat template."""

    def with_system(self, messages: Messages) -> Messages:
        """The messages, after one of `task.system_prompt` where that is set and they have none of their own."""
        text = self.config.system_prompt
        if text is None or any(message["role"] in ("system", "developer") for message in messages):
            return messages
        return [{"role": "system", "content": text}, *messages]

    @abstractmethod
    def compute_reward(self, text: str, example: Example) -> float:
        """The reward of one completion: a pure function of the cleaned text and the row."""

    def gold(self, example: Example) -> str | None:
        """A completion that earns `max_reward`, where one is known."""
        return None

    def is_right(self, text: str, example: Example) -> bool | None:
        """Whether a cleaned completion is right, by gold and not by the reward; None where that is not known.

        Here: it says what gold says, with other words around it. A task with many right answers to a prompt tells them.
        """
        gold = self.gold(example)
        return None if gold is None else says(text, self.clean(gold))

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """Further figures of one cleaned completion for the evaluation, such as accuracy or exact match."""
        return {}

    def judged(self, rewards: Mapping[str, float | None]) -> Mapping[str, float]:
        """Further figures of one completion that follow from its columns, which nobody has to score again."""
        return {}

    def point(self, text: str, example: Example, rewards: Mapping[str, float | None]) -> Mapping[str, Any] | None:
        """What results/points.jsonl, and the points of `evoalign eval`, keep of a completion; None: nothing."""
        return None

    def clean(self, text: str) -> str:
        """The completion as it is scored."""
        return text.strip() if self.config.strip else text

    def rewards(self, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """Rewards of completions, one example each, checked to be finite numbers. Raises RewardError."""
        return self.checked(
            [self.compute_reward(self.clean(t), fresh(e)) for t, e in zip(texts, examples, strict=True)],
            texts,
            examples,
        )

    def columns(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """The rewards of completions under their names, None where one does not apply: here all is one `reward`.

        A task that gives more says in `weighted` which of them add up to the reward. Raises RewardError.
        """
        return {"reward": self.checked(self.rewards(texts, examples), texts, examples)}

    def handed(self, example: Example) -> Example:
        """A row as the methods that score are given it: a copy, so that none can change it for the next one."""
        return fresh(example)

    def objective(self) -> Objective:
        """A new one, which makes scores of the columns: `task.fitness`, that of `task.objective`, or the weighted sum.

        Raises ConfigError.
        """
        if self.set_objective is not None:
            return self.set_objective
        chosen = self.config.objective
        return self.weighted if chosen is None else objective.create(chosen)

    def checked(self, rewards: Any, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """The rewards as floats. Raises RewardError unless there is one finite number for each text."""
        return [self._number(*row) for row in zip(self._listed(rewards, texts), texts, examples, strict=True)]

    def checked_columns(self, columns: Any, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """The columns as floats. Raises RewardError unless each has one finite number, or None, for each text."""
        named: dict[Any, Any] = dict(columns)
        if not named or not all(isinstance(name, str) and name.isprintable() for name in named):
            raise RewardError(f"task {self.name} gave columns named {shown(list(named))}; name each with plain text")
        rows = list(zip(texts, examples, strict=True))
        return {
            name: [
                None if reward is None else self._number(reward, *row)
                for reward, row in zip(self._listed(values, texts), rows, strict=True)
            ]
            for name, values in named.items()
        }

    def _listed(self, rewards: Any, texts: Sequence[str]) -> list[Any]:
        found: list[Any] = list(rewards.tolist() if hasattr(rewards, "tolist") else rewards)
        if len(found) != len(texts):
            raise RewardError(
                f"task {self.name} gave {len(found)} rewards for {len(texts)} texts; give one for each",
                failure("value", f"task {self.name}", texts=texts),
            )
        return found

    def _number(self, reward: object, text: str, example: Example) -> float:
        number = finite(reward)
        if number is None:
            raise RewardError(
                f"task {self.name} gave {shown(reward)} as the reward of {text[:80]!r}; a reward is one finite number",
                failure("value", f"task {self.name}", (self.prompt(example), text, example)),
            )
        return number

    def self_check(self, examples: Sequence[Example]) -> None:
        """Every gold answer must earn the maximum, where there is one.

        Raises DataError that says how many do not, of how many, and which are the first.
        """
        if math.isinf(self.max_reward):
            return
        known, wrong = 0, list[tuple[int, str, float]]()
        for row, example in enumerate(examples):
            answer = self.gold(self.handed(example))
            if answer is None:
                continue
            known += 1
            reward = self.compute_reward(self.clean(answer), self.handed(example))
            if reward != self.max_reward:
                wrong.append((row, answer, reward))
        if wrong:
            first = "; ".join(f"{shown(answer)} of row {row} earns {reward}" for row, answer, reward in wrong[:SHOWN])
            more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise DataError(
                f"task {self.name}: {len(wrong)} of {known} gold answers do not earn {self.max_reward}: "
                f"{first}{more}; fix the rows or the reward"
            )

    def scorer_digest(self) -> str | None:
        """Of all that the scores of the models depend on that it asks, which are made for it; None: it asks none, or
        they have none. A run is not resumed with others."""
        return None

    def close(self) -> None:  # noqa: B027 (most tasks hold nothing)
        """Give back what the task holds, such as a worker process. Nothing here."""
