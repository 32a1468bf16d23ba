# SPDX-License-Identifier: Apache-2.0
"""Data and rewards of the user's own: any rows with a `prompt`, any reward functions that TRL would take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, DataError, RewardError
from evoalign.plugins import load_object
from evoalign.rewards.functions import Batch, Calling, Completion, RewardFunction, call_all, failure
from evoalign.tasks import data
from evoalign.tasks.base import Data, Task
from evoalign.types import Example, Prompt


class Custom(Task):
    """Rows with a `prompt` column (a string, or a list of messages), scored by the sum of weighted reward functions.

    The functions are those named in `task.rewards`, or `rewards` where given. Messages go through the chat template.
    A string goes to the model as it is, or as one user message with `prompt: chat`. The reward functions see prompts
    and completions in the form of the column, whatever `prompt` says, so that a reward goes with its data set.
    """

    name = "custom"

    def __init__(self, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> None:
        super().__init__(config)
        if config.prompt == "short":
            raise ConfigError("task.prompt: custom has raw and chat, not short")
        functions = [load_object(path, "task.rewards") for path in config.rewards] if rewards is None else rewards
        self.functions = [RewardFunction(function) for function in functions]
        self.calling: Calling | None = None
        if not self.functions:
            raise ConfigError("task.rewards is empty; name at least one function, such as my_rewards.py:accuracy")
        self.weights = config.reward_weights or [1.0] * len(self.functions)
        if len(self.weights) != len(self.functions):
            raise ConfigError(f"task.reward_weights has {len(self.weights)} weights for {len(self.functions)} rewards")
        if not all(map(math.isfinite, self.weights)):
            raise ConfigError(f"task.reward_weights holds a weight that is not finite: {self.weights}")

    @classmethod
    def make(cls, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Task:
        """The task of a config, with `rewards` in place of the import paths of `task.rewards`."""
        return cls(config, rewards)

    def load_data(self, seed: int) -> Data:
        """The files of the config. Raises DataError, also where a reward function wants a column that is not there."""
        loaded = data.load(self.config, seed, self._check)
        columns = list(dict.fromkeys(name for example in loaded.train for name in example))
        for function in self.functions:
            missing = function.missing(columns)
            if missing:
                raise DataError(
                    f"reward function {function.name} takes {', '.join(missing)}, which the data does not have "
                    f"(columns: {', '.join(columns)}); add the column or give the parameter a default"
                )
        return loaded

    def prompt(self, example: Example) -> Prompt:
        """The prompt column, as one user message where it is a string and `prompt: chat` is set."""
        prompt = cast(Prompt, example["prompt"])
        if isinstance(prompt, str) and self.config.prompt == "chat":
            return [{"role": "user", "content": prompt}]
        return prompt

    def compute_reward(self, text: str, example: Example) -> float:
        """The weighted sum for one completion."""
        return self._scored([text], [example])[0]

    def rewards(self, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """All completions in one call to each function. Raises RewardError."""
        return self._scored([self.clean(text) for text in texts], examples)

    def _scored(self, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        if not texts:
            return []
        prompts = [cast(Prompt, example["prompt"]) for example in examples]
        completions = [_completion(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
        batch = Batch(prompts, completions, texts, examples)
        by_function = call_all(self.functions, batch, self.calling)
        return [self._sum(values, batch, row) for row, values in enumerate(zip(*by_function, strict=True))]

    def _sum(self, values: Sequence[float | None], batch: Batch, row: int) -> float:
        text, names = batch.texts[row], ", ".join(function.name for function in self.functions)
        failed = (batch.prompts[row], text, batch.examples[row])
        terms = [w * value for w, value in zip(self.weights, values, strict=True) if value is not None]
        if not terms:
            raise RewardError(
                f"every reward function ({names}) returned None for the completion {text[:80]!r}; "
                "at least one has to return a number",
                failure("value", names, failed),
            )
        total = sum(terms)
        if not math.isfinite(total):
            raise RewardError(
                f"the weighted rewards {terms} of the completion {text[:80]!r} have no finite sum; "
                "return smaller numbers",
                failure("value", names, failed),
            )
        return total

    def _check(self, where: str, row: dict[str, Any]) -> Example:
        if "prompt" not in row:
            raise DataError(f"{where}: no prompt; found {', '.join(row) or 'no columns'}")
        prompt: Any = row["prompt"]
        if isinstance(prompt, str) and prompt:
            return row
        if not isinstance(prompt, list) or not prompt:
            raise DataError(f"{where}: prompt is {prompt!r}; expected a string or a list of messages")
        if self.config.prompt == "raw":
            raise DataError(f"{where}: prompt is a list of messages, which cannot be raw; leave task.prompt out")
        return row | {"prompt": [_message(where, message) for message in cast("list[Any]", prompt)]}


def _completion(text: str, prompt: Prompt) -> Completion:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _message(where: str, message: Any) -> dict[str, str]:
    """A message without the empty fields that columnar files give to every row."""
    fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    if not {"role", "content"} <= fields.keys() or not all(isinstance(v, str) for v in fields.values()):
        raise DataError(f"{where}: message {message!r}; expected {{'role': .., 'content': ..}} with strings")
    return cast("dict[str, str]", fields)
