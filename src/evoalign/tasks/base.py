# SPDX-License-Identifier: Apache-2.0
"""Tasks: prompts, rewards and measures, shared by ES training, evaluation, baselines and analysis."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, overload

from pydantic import BaseModel

from evoalign import transcripts
from evoalign.config import GraderConfig, ScorerConfig, TaskConfig
from evoalign.errors import ConfigError, DataError, RewardError
from evoalign.plugins import own_settings
from evoalign.rewards import objective
from evoalign.rewards.functions import failure, finite, fresh, says, shown
from evoalign.rewards.objective import Columns, Objective, SetObjective, WeightedSum
from evoalign.transcripts import Message
from evoalign.types import Example, Messages, Prompt

SHOWN = 3
"""Number of failing gold answers that an error shows."""
RAW = ("raw", "short", "conversation")
"""Values of `task.prompt` for which the prompt is plain text, without messages."""

Split: TypeAlias = Literal["train", "validation", "test"]


@dataclass(frozen=True, slots=True)
class Data:
    """Splits of a task, in a fixed order. Training chooses nothing by validation if `validation` is empty."""

    train: Sequence[Example]
    test: Sequence[Example]
    validation: Sequence[Example] = ()

    def of(self, split: Split) -> Sequence[Example]:
        """Return the examples of one split."""
        return getattr(self, split)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of training, test and validation examples."""
        return len(self.train), len(self.test), len(self.validation)

    @property
    def all(self) -> Sequence[Example]:
        """Examples of all splits."""
        return Joined(self.train, self.validation, self.test)


class Joined(Sequence[Example]):
    """Concatenation of sequences without copying them: rows may be on disk."""

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
        place = range(len(self))[place]  # counts negative indices from the end; raises IndexError beyond it
        for part in self._parts:
            if place < len(part):
                return part[place]
            place -= len(part)
        raise AssertionError


class Task(ABC):
    """Base class of all tasks. A custom task defines `load_data`, `prompt` and `compute_reward`."""

    name: str
    max_reward: float = math.inf
    """Reward of a perfect completion; infinite if there is no maximum."""
    from_config: bool = False
    """Whether the config alone recreates this task, also in another process. `create` sets it."""
    settings: ClassVar[type[BaseModel] | None] = None
    """Pydantic model of the settings that only this task has. `options` is then an instance of it; otherwise a dict."""
    gradings: ClassVar[tuple[str, ...]] = ("strict",)
    """Allowed values of `task.grading`."""
    forms: ClassVar[tuple[str, ...]] = ()
    """Allowed values of `task.prompt`; empty: the task checks them itself. If none is set, `task.system_prompt` is
    checked as for the first."""
    reads_gold: ClassVar[bool] = False
    """Whether the task reads right answers from the column `task.gold`."""
    takes_system_prompt: ClassVar[bool] = False
    """Whether chat prompts contain `task.system_prompt`; `with_system` adds it."""
    isolated: ClassVar[bool] = False
    """For built-in tasks: whether a completion can make the grading hang or exhaust memory, so that it needs a worker
    process. Custom tasks are always isolated."""
    shipped: ClassVar[tuple[str, str | None] | None] = None
    """Default training and test file, below the project's folder."""
    per_call: int | None = None
    """Number of completions that `columns` gets at once, if it scores each alone; `grader.timeout` limits one call.
    None: it gets all of them, or `grader.batch`. A subclass that redefines `columns` or `rewards` does not inherit it.
    """
    graded_text: ClassVar[str] = ""
    """Text that a completion needs in order to score. A stop text must not cut it off."""
    correctness: str | None = None
    """Name of the reward column, or of one of `parts`, that says whether a completion is right; None: `accuracy` or
    `exact`, if there is such a column. The axis report (`checks.axes`) warns if the members are selected by others."""
    takes_weights: ClassVar[bool] = False
    """Whether `task.reward_weights` weighs the columns, or `parts`, in their order."""
    earlier_weights: ClassVar[Sequence[float] | None] = None
    """Weights of a built-in task in releases that ignored `task.reward_weights`; runs with others cannot be resumed."""
    weighted: WeightedSum = WeightedSum()
    """Sum of the columns: the `reward` of an evaluation, and the default objective."""
    asks_scorer: ClassVar[bool] = False
    """Whether the models of the section `scorer` score the completions; `take_scorer` receives it."""
    text_form: str = "raw text"
    """Description of the prompts that are plain text, for messages."""
    commands: Mapping[str, str] = MappingProxyType({})
    """Further evoalign commands for a finished run, with `{run}` for its folder, and the purpose of each. A run prints
    them at its end if the files that they name exist."""
    notes: Sequence[str] = ()
    """Sentences about the loaded rows, printed at the start of a run."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools that the model can call, as chat templates take them."""
    set_objective: SetObjective | None = None
    """The objective that `task.fitness` names, if set."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        declaring = next(base for base in cls.__mro__ if vars(base).keys() & {"per_call", "columns", "rewards"})
        if "per_call" not in vars(declaring):
            cls.per_call = None

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self.set_objective = None if config.fitness is None else SetObjective(config.fitness, self.clean)
        if config.grading not in self.gradings:
            raise ConfigError(f"task.grading: {config.grading} is not for task {config.name}; leave it out")
        if config.gold is not None and not self.reads_gold:
            raise ConfigError(f"task.gold: {config.gold} is not for task {config.name}; leave it out")
        if config.system_prompt is not None and not self.takes_system_prompt:
            raise ConfigError(f"task.system_prompt is not for task {config.name}; leave it out")
        if self.forms and config.prompt not in (None, *self.forms):
            raise ConfigError(f"task.prompt: {config.name} has {', '.join(self.forms)}, not {config.prompt}")
        form = config.prompt or next(iter(self.forms), None)
        of_chat = {"system_prompt": config.system_prompt is not None, "template_kwargs": bool(config.template_kwargs)}
        for name in (name for name, is_set in of_chat.items() if is_set and form in RAW):
            raise ConfigError(
                f"task.{name}: prompts of task.prompt: {form} are plain text, without messages; remove task.{name}, or "
                "set task.prompt: chat"
            )
        self.options: Any = own_settings(config.options, self.settings, "task", TaskConfig.model_fields)

    @classmethod
    def make(cls, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Task:
        """Create the task of a config. Raises ConfigError for reward functions, which only `custom` takes."""
        if rewards is not None or config.rewards:
            raise ConfigError(f"task {config.name} has its own reward; use reward functions with task.name: custom")
        return cls(config)

    @abstractmethod
    def load_data(self, seed: int) -> Data:
        """Return the training and test split, and the validation split if there is one.

        If there is none and `task.validation_size` is set, the end of the training split becomes the validation split.
        Raises DataError that names the file and the row.
        """

    @abstractmethod
    def prompt(self, example: Example) -> Prompt:
        """Return a raw string, or messages for the chat template."""

    def reply(self, example: Example, transcript: Messages) -> str | None:
        """Return the user's next message, or None where the episode ends: a pure function of its arguments.

        Define it for dialogues. The transcript has the messages of the prompt and those after it; the last one is the
        model's. `task.episode` limits the turns.
        """
        return None

    def replies(self, texts: Sequence[str], examples: Sequence[Example]) -> list[list[Message] | None]:
        """Return the replies to the last turn of episodes, one example each; None where an episode ends.

        Each text (see `evoalign.transcripts`) ends with the message of its last turn. By default the user's `reply`.
        """
        return [self._user_reply(text, example) for text, example in zip(texts, examples, strict=True)]

    def _user_reply(self, text: str, example: Example) -> list[Message] | None:
        found: Any = self.reply(fresh(example), self.transcript(text, example))
        if not isinstance(found, str | None):
            raise RewardError(f"task {self.name}: reply returned {shown(found)}; return a text, or None")
        return None if found is None else [{"role": "user", "content": transcripts.clean(found)}]

    def transcript(self, text: str, example: Example) -> Messages:
        """Return the messages of an episode: the prompt, the model's turns, and the replies."""
        prompt = self.prompt(example)
        if isinstance(prompt, str):
            raise ConfigError(f"task {self.name} has several turns, so its prompts are messages; set task.prompt: chat")
        return [*prompt, *transcripts.messages(text)]

    @property
    def player(self) -> str:
        """Kind of player of the episodes: empty, where a completion is all there is; `turns`, with the task's own
        replies; `program`, through the gateway; `given`, where the task's own completions are scored."""
        own = type(self)
        return "turns" if own.reply is not Task.reply or own.replies is not Task.replies else ""

    @property
    def scored(self) -> str:
        """Name, in a run's output, of what is scored: `completions`, `episodes`, or the `targets` that are given."""
        return {"": "completions", "given": "targets"}.get(self.player, "episodes")

    @property
    def inside(self) -> Task:
        """The task itself, without the process that it is isolated in."""
        return self

    def environment_factory(self) -> type[Any] | None:
        """Return the environment class for GRPO with TRL, which plays its episodes; None without one."""
        return None

    def before_reset(self, example: Example) -> Prompt:
        """Return the prompt without what an environment adds to it."""
        return self.prompt(example)

    def with_system(self, messages: Messages) -> Messages:
        """Prepend `task.system_prompt`, if set, to messages that have no system message."""
        text = self.config.system_prompt
        if text is None or any(message["role"] in ("system", "developer") for message in messages):
            return messages
        return [{"role": "system", "content": text}, *messages]

    @abstractmethod
    def compute_reward(self, text: str, example: Example) -> float:
        """Return the reward of one completion: a pure function of the cleaned text and the row."""

    def gold(self, example: Example) -> str | None:
        """Return a completion that earns `max_reward`, or None if unknown."""
        return None

    def is_right(self, text: str, example: Example) -> bool | None:
        """Return whether a cleaned completion is right by gold, whatever its reward; None if unknown.

        By default, whether what the model wrote contains the gold answer's words. Redefine it for a task with many
        right answers.
        """
        gold = self.gold(example)
        return None if gold is None else says(transcripts.spoken(text), self.clean(gold))

    def final_answer(self, text: str, example: Example) -> str | None:
        """Return the final answer of a cleaned completion, or None: the same text for answers that are equal.

        Define it for `evoalign select --vote`. By default raises ConfigError.
        """
        raise ConfigError(
            f"task {self.name} has no final answers to vote on; leave out --vote, or define final_answer(text, example)"
        )

    def measures(self, text: str, example: Example) -> Mapping[str, float | None]:
        """Return further evaluation measures of one cleaned completion, such as accuracy or exact match.

        The value is None where a measure does not apply to the row.
        """
        return {}

    def judged(self, rewards: Mapping[str, float | None]) -> Mapping[str, float]:
        """Return further evaluation measures that follow from a completion's columns alone."""
        return {}

    def point(self, text: str, example: Example, rewards: Mapping[str, float | None]) -> Mapping[str, Any] | None:
        """Return the record of a completion for results/points.jsonl and `evoalign eval`; None for no record."""
        return None

    def clean(self, text: str) -> str:
        """Return the part of a completion that is scored."""
        return text.strip() if self.config.strip else text

    def rewards(self, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """Return the rewards of completions, one example each, as finite numbers. Raises RewardError."""
        cleaned = [self.compute_reward(self.clean(t), fresh(e)) for t, e in zip(texts, examples, strict=True)]
        return self.checked(cleaned, texts, examples)

    def columns(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """Return named rewards of completions, None where a reward does not apply. By default one column, `reward`.

        A task with several columns sets `weighted` to the sum that is the reward. `tasks.grading` checks the result.
        """
        return {"reward": self.rewards(texts, examples)}

    def parts(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """Return named parts that the rewards of completions are made of, for the axis report; empty: the columns."""
        return {}

    def handed(self, example: Example) -> Example:
        """Return the row for the methods that score: a copy, which they may modify."""
        return fresh(example)

    def objective(self) -> Objective:
        """Return the objective of `task.fitness` or `task.objective`, else the weighted sum. Raises ConfigError."""
        if self.set_objective is not None:
            return self.set_objective
        chosen = self.config.objective
        return self.weighted if chosen is None else objective.create(chosen)

    def checked(self, rewards: Any, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """Return the rewards as floats. Raises RewardError unless there is one finite number for each text."""
        return self._numbers(rewards, texts, examples, gaps=False)

    def checked_columns(self, columns: Any, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """Return the columns as floats. Raises RewardError unless each has a finite number, or None, for each text."""
        named: dict[Any, Any] = dict(columns)
        if not named or not all(isinstance(name, str) and name.isprintable() for name in named):
            raise RewardError(f"task {self.name} returned columns named {shown(list(named))}; use plain text as names")
        return {name: self._numbers(values, texts, examples, gaps=True) for name, values in named.items()}

    def _numbers(self, rewards: Any, texts: Sequence[str], examples: Sequence[Example], *, gaps: bool) -> list[Any]:
        found: list[Any] = list(rewards.tolist() if hasattr(rewards, "tolist") else rewards)
        if len(found) != len(texts):
            raise RewardError(
                f"task {self.name} returned {len(found)} rewards for {len(texts)} texts; return one for each",
                failure("value", f"task {self.name}", texts=texts),
            )
        for i, (reward, text, example) in enumerate(zip(found, texts, examples, strict=True)):
            found[i] = finite(reward)
            if found[i] is None and not (gaps and reward is None):
                raise RewardError(
                    f"task {self.name} returned {shown(reward)} as the reward of {text[:80]!r}; return one finite "
                    "number",
                    failure("value", f"task {self.name}", (self.prompt(example), text, example)),
                )
        return found

    def self_check(self, examples: Sequence[Example]) -> None:
        """Raise DataError unless every gold answer earns `max_reward`. Nothing to check without a maximum."""
        if math.isinf(self.max_reward):
            return
        known, wrong = 0, list[str]()
        for row, example in enumerate(examples):
            answer = self.gold(self.handed(example))
            if answer is not None:
                known += 1
                reward = self.compute_reward(self.clean(answer), self.handed(example))
                wrong += [] if reward == self.max_reward else [f"{shown(answer)} of row {row} earns {reward}"]
        if wrong:
            first = "; ".join(wrong[:SHOWN])
            more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise DataError(
                f"task {self.name}: {len(wrong)} of {known} gold answers do not earn {self.max_reward}: "
                f"{first}{more}; fix the rows or the reward"
            )

    def take_scorer(self, section: ScorerConfig | None) -> None:
        """Receive the section `scorer`. Raises ConfigError if it is missing or the task cannot score with it."""
        if self.asks_scorer and section is None:
            raise self.lacks_scorer()

    def take_run(self, grader: GraderConfig, *, is_serial: bool) -> None:  # noqa: B027 (most tasks need nothing)
        """Receive the section `grader`, and whether completions are asked for one at a time. Nothing by default."""

    def keep_episodes(self, path: Path) -> None:  # noqa: B027 (episodes of most tasks take no time of their own)
        """Receive the file in which finished episodes of a generation may be kept. Nothing by default."""

    def lacks_scorer(self) -> ConfigError:
        """Return the error of a task that is scored by models without a section `scorer`."""
        return ConfigError(
            f"task {self.name} is scored by models; set the section scorer, such as {{name: local, reward: FOLDER, "
            "cost: FOLDER}"
        )

    def scorer_digest(self) -> str | None:
        """Return a hash of the scoring models and their settings, or None. A run resumes only with the same hash."""
        return None

    def close(self) -> None:  # noqa: B027 (most tasks hold nothing)
        """Release resources such as a worker process. Nothing by default."""
