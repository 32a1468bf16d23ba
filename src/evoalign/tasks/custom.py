# SPDX-License-Identifier: Apache-2.0
"""Data and rewards of the user's own: any rows with a prompt, any reward functions that TRL would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, DataError, cut, plain
from evoalign.plugins import load_object
from evoalign.rewards.functions import Batch, Calling, Completion, RewardFunction, call_all
from evoalign.rewards.objective import Columns, WeightedSum
from evoalign.rewards.script import Script
from evoalign.tasks import conversations, data
from evoalign.tasks.base import Data, Task
from evoalign.types import Example, Prompt


class Custom(Task):
    """Rows with a `prompt` column (a string, or a list of messages), scored by the sum of weighted reward functions.

    A row may have a conversation in its place: `messages`, or ShareGPT's `conversations`.
    The functions are those named in `task.rewards`, or `rewards` where given. Messages go through the chat template.
    A string goes to the model as it is, or as one user message with `prompt: chat`. The reward functions see prompts
    and completions in the form of the column, whatever `prompt` says, so that a reward goes with its data set.
    """

    name = "custom"
    reads_gold = True
    takes_system_prompt = True

    def __init__(self, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> None:
        super().__init__(config)
        if config.prompt not in (None, "raw", "chat"):
            raise ConfigError(f"task.prompt: custom has raw and chat, not {config.prompt}")
        named = [_named(path) for path in config.rewards] if rewards is None else None
        self.functions = [RewardFunction(function) for function in rewards or ()] if named is None else named
        self.calling: Calling | None = None
        if not self.functions:
            raise ConfigError("task.rewards is empty; name at least one function, such as my_rewards.py:accuracy")
        self.weights = config.reward_weights or [1.0] * len(self.functions)
        if len(self.weights) != len(self.functions):
            raise ConfigError(f"task.reward_weights has {len(self.weights)} weights for {len(self.functions)} rewards")
        self._sum = WeightedSum(dict(zip(_distinct([f.name for f in self.functions]), self.weights, strict=True)))
        # A subclass with `rewards` of its own has them as its one column: the sum of the functions is not its reward.
        self._is_sum = type(self).rewards is Custom.rewards
        if self._is_sum:
            self.weighted = self._sum

    @classmethod
    def make(cls, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Task:
        """The task of a config, with `rewards` in place of `task.rewards`; a derived class has its own."""
        return Custom(config, rewards) if cls is Custom else super().make(config, rewards)

    def load_data(self, seed: int) -> Data:
        """The files of the config. Raises DataError, also where a reward function wants a column that is not there."""
        loaded = data.load(self.config, seed, self._check)
        self._check_columns(loaded.train, "data")
        if loaded.validation:
            self._check_columns(loaded.validation, "validation data")
        return loaded

    def _check_columns(self, examples: Sequence[Example], what: str) -> None:
        columns = list(dict.fromkeys(name for example in examples for name in example))
        renamed = self.config.columns.items()
        for function in self.functions:
            missing = function.missing(columns)
            if missing:
                alike = {name: data.likely(name, columns) for name in missing}
                named = ", ".join(f"{name}: {there}" for name, there in alike.items() if there)
                raise DataError(
                    f"reward function {function.name} takes {', '.join(missing)}, which the {what} does not have "
                    f"(columns: {data.listed(columns)}); add the column or give the parameter a default"
                    + (f", or set task.columns: {{{named}}}" if named else "")
                    + "".join(f"; task.columns calls {there} {name}" for name, there in renamed if there in missing)
                    + ("; one completion a call takes two parameters, text and example" if "text" in missing else "")
                )

    def prompt(self, example: Example) -> Prompt:
        """The prompt column, as one user message where it is a string and `prompt: chat` is set."""
        prompt = cast(Prompt, example["prompt"])
        if not isinstance(prompt, str):
            return self.with_system(prompt)
        return self.with_system([{"role": "user", "content": prompt}]) if self.config.prompt == "chat" else prompt

    def gold(self, example: Example) -> str | None:
        """The column `task.gold`; None where that is not set, or the row has nothing there."""
        return None if self.config.gold is None else example.get(self.config.gold)

    def compute_reward(self, text: str, example: Example) -> float:
        return self._scored([text], [example])[1][0]

    def rewards(self, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """All completions in one call to each function. Raises RewardError."""
        return self._scored([self.clean(text) for text in texts], examples)[1]

    def columns(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """What each function gave, under its name; a name that comes again is numbered. Raises RewardError.

        Every completion needs a weighted sum, whatever the objective is: the evaluation reports it.
        """
        if not self._is_sum:
            return super().columns(texts, examples)
        return self._scored([self.clean(text) for text in texts], examples)[0]

    def _scored(self, texts: Sequence[str], examples: Sequence[Example]) -> tuple[Columns, list[float]]:
        """The columns, and their weighted sums, of cleaned texts."""
        if not texts:
            return {name: [] for name in self._sum.weights or ()}, []
        prompts = [cast(Prompt, example["prompt"]) for example in examples]
        completions = [_completion(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
        batch = Batch(prompts, completions, texts, examples)
        columns = dict(zip(self._sum.weights or (), call_all(self.functions, batch, self.calling), strict=True))
        return columns, self._sum.rewards(columns, texts, examples)

    def _check(self, where: str, row: dict[str, Any]) -> Example:
        row = conversations.with_prompt(where, row)
        if "prompt" not in row:
            raise data.lacking(where, row, self.config, "no prompt", "prompt")
        self._check_gold(where, row)
        prompt: Any = row["prompt"]
        if isinstance(prompt, str) and prompt:
            self._check_system_prompt(where)
            return row
        if not isinstance(prompt, list) or not prompt:
            raise DataError(f"{where}: prompt is {prompt!r}; expected a string or a list of messages")
        if self.config.prompt == "raw":
            raise DataError(f"{where}: prompt is a list of messages, which cannot be raw; leave task.prompt out")
        return row | {"prompt": conversations.read(where, cast("list[Any]", prompt))}

    def _check_system_prompt(self, where: str) -> None:
        if self.config.system_prompt is not None and self.config.prompt != "chat":
            raise DataError(
                f"{where}: prompt is a text, which goes to the model as it is, without task.system_prompt; set "
                "task.prompt: chat, or leave task.system_prompt out"
            )

    def _check_gold(self, where: str, row: dict[str, Any]) -> None:
        column = self.config.gold
        if column is None or (isinstance(row.get(column), str | None) and column in row):
            return
        found = f"holds {cut(repr(row[column]), 80)}, and not text" if column in row else "is not there"
        near = data.likely(column, row)
        hint = f" (did you mean {near}?)" if near not in (None, column) else ""
        raise DataError(
            f"{where}: task.gold: column {column} {plain(found)}{hint}; name a column of right answers, as text: there "
            f"are {data.listed(row)}"
        )


def _named(path: str) -> RewardFunction:
    """What an entry of `task.rewards` names: a function by its import path, or a script. Raises ConfigError."""
    return RewardFunction(load_object(path, "task.rewards")) if ":" in path else Script(path)


def _distinct(names: Sequence[str]) -> list[str]:
    """The names; one that was there before gets a number: f, f_2, f_3."""
    found: list[str] = []
    for name in names:
        count, own = 1, name
        while own in found:
            count += 1
            own = f"{name}_{count}"
        found.append(own)
    return found


def _completion(text: str, prompt: Prompt) -> Completion:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
