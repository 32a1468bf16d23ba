# SPDX-License-Identifier: Apache-2.0
"""User data and reward functions: any rows with a prompt, and any reward functions that TRL accepts.

Instead of `prompt`, a row may have a conversation in one of two forms: `messages` with `role` and `content`, as TRL and
chat templates use them, or ShareGPT's `conversations` with `from` and `value`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar, cast

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, DataError, cut, plain
from evoalign.plugins import load_object
from evoalign.rewards.functions import Batch, Calling, RewardFunction, call_all, shown
from evoalign.rewards.objective import Columns, WeightedSum
from evoalign.rewards.script import Script
from evoalign.tasks import data
from evoalign.tasks.base import Data, Task
from evoalign.types import Example, Messages, Prompt

CONVERSATIONS = ("messages", "conversations")
"""Columns that hold a conversation."""
SEPARATE = {"input": "instruction", "system": None, "history": None}
"""Columns of public data sets with text that belongs to the prompt: Alpaca's `input` where the prompt is `instruction`,
and LLaMA-Factory's `system` and `history`."""
ALSO_READ = ("context", "passage", "document", "article", "input", "tools", "schema", "background")
"""Columns that often belong to the prompt too."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
ROLES.update({name: name for name in ("user", "assistant", "system")})
"""Roles by their names in ShareGPT data."""


class Custom(Task):
    """Rows with a `prompt` column (a string or a list of messages), scored by a weighted sum of reward functions.

    The functions are those named in `task.rewards`, or `rewards` if given. Messages go through the chat template.
    A string is a user message with `prompt: chat`, which a new run takes if the tokenizer has a chat template, and
    goes to the model unchanged with `prompt: raw`. The reward functions get prompts and completions in the form of the
    column, whatever `prompt` is, so that a reward function fits its data set.
    """

    name = "custom"
    reads_gold = True
    takes_weights = True
    takes_system_prompt = True
    forms = ("chat", "raw")
    arguments: ClassVar[tuple[str, ...]] = ()
    """Further arguments that reward functions may take."""

    def __init__(self, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> None:
        super().__init__(config)
        self.functions = self.loaded_functions(rewards)
        self.calling: Calling | None = None
        if not self.functions:
            raise ConfigError("task.rewards is empty; name at least one function, such as my_rewards.py:accuracy")
        self.weights = config.reward_weights or [1.0] * len(self.functions)
        if len(self.weights) != len(self.functions):
            raise ConfigError(f"task.reward_weights has {len(self.weights)} weights for {len(self.functions)} rewards")
        names: list[str] = []
        for name in (f.name for f in self.functions):  # numbers repeated names: f, f_2, f_3
            numbered = (name if i == 1 else f"{name}_{i}" for i in count(1))
            names.append(next(n for n in numbered if n not in names))
        self._sum = WeightedSum(dict(zip(names, self.weights, strict=True)))
        # A subclass that redefines `rewards` has one column, `reward`, instead of one per function.
        self._is_sum = type(self).rewards is Custom.rewards
        if self._is_sum:
            self.weighted = self._sum

    def loaded_functions(self, rewards: Sequence[Callable[..., Any]] | None) -> list[RewardFunction]:
        """Return the reward functions: `rewards`, or those of the config. Raises ConfigError."""
        if rewards is not None:
            return [RewardFunction(function) for function in rewards]
        return [RewardFunction(load_object(p, "task.rewards")) if ":" in p else Script(p) for p in self.config.rewards]

    @classmethod
    def make(cls, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Task:
        """Create the task of a config, with `rewards` instead of `task.rewards`. A subclass has its own reward."""
        return Custom(config, rewards) if cls is Custom else super().make(config, rewards)

    def load_data(self, seed: int) -> Data:
        """Load the files of the config. Raises DataError, also if a reward function needs a missing column."""
        loaded = data.load(self.config, seed, self._check)
        if unread := self._unread(loaded.train):
            columns = data.listed(unread)
            self.notes = [f"warning: the prompts do not contain the columns {columns}; if the model should read them, "
                          "write them into the prompt"]  # fmt: skip
        for what, examples in (("data", loaded.train), ("validation data", loaded.validation)):
            columns = list(dict.fromkeys(name for example in examples for name in example))
            for function in self.functions if examples or what == "data" else ():
                missing = function.missing([*columns, *self.arguments, *self.config.settings])
                if not missing:
                    continue
                alike = {name: data.likely(name, columns) for name in missing}
                named = ", ".join(f"{name}: {there}" for name, there in alike.items() if there)
                renamed = [(name, there) for name, there in self.config.columns.items() if there in missing]
                raise DataError(
                    f"reward function {function.name} takes {', '.join(missing)}, which the {what} does not have "
                    f"(columns: {data.listed(columns)}); add the column or give the parameter a default"
                    + (f", or set task.columns: {{{named}}}" if named else "")
                    + "".join(f"; task.columns calls {there} {name}" for name, there in renamed)
                    + ("; a function for one completion takes text and example" if "text" in missing else "")
                )
        return loaded

    def prompt(self, example: Example) -> Prompt:
        """Return the prompt column, as a user message if it is a string and `prompt: chat` is set."""
        prompt = cast(Prompt, example["prompt"])
        if not isinstance(prompt, str):
            return self.with_system(prompt)
        chats = self.config.prompt == "chat" or self.config.system_prompt is not None
        return self.with_system([{"role": "user", "content": prompt}]) if chats else prompt

    def gold(self, example: Example) -> str | None:
        """Return the column `task.gold`, or None."""
        return None if self.config.gold is None else example.get(self.config.gold)

    def compute_reward(self, text: str, example: Example) -> float:
        return self._scored([text], [example])[1][0]

    def rewards(self, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """Score all completions in one call to each function. Raises RewardError."""
        return self._scored([self.clean(text) for text in texts], examples)[1]

    def columns(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """Return the values of each function under its name; a repeated name gets a number. Raises RewardError.

        Every completion needs a weighted sum, whatever the objective, since the evaluation reports it.
        """
        if not self._is_sum:
            return super().columns(texts, examples)
        return self._scored([self.clean(text) for text in texts], examples)[0]

    def _scored(self, texts: Sequence[str], examples: Sequence[Example]) -> tuple[Columns, list[float]]:
        """Return the columns of cleaned texts and their weighted sums."""
        names = list(self._sum.weights or ())
        if not texts:
            return {name: [] for name in names}, []
        prompts = [cast(Prompt, example["prompt"]) for example in examples]
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        batch = Batch(prompts, completions, texts, examples)
        columns = dict(zip(names, call_all(self.functions, batch, self.calling), strict=True))
        return columns, self._sum.rewards(columns, texts, examples)

    def completed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row of a file with what it may leave out."""
        return row

    def _check(self, where: str, row: dict[str, Any]) -> Example:
        row = self.completed(with_prompt(where, row))
        self._refuse_separate(where, row)
        if "prompt" not in row:
            raise data.lacking(where, row, self.config, "no prompt", "prompt")
        gold = self.config.gold
        if gold is not None and not (gold in row and isinstance(row[gold], str | None)):
            found = f"holds {cut(repr(row[gold]), 80)}, which is not text" if gold in row else "is missing"
            near = data.likely(gold, row)
            hint = f" (did you mean {near}?)" if near not in (None, gold) else ""
            raise DataError(
                f"{where}: task.gold: column {gold} {plain(found)}{hint}; name a column of right answers as text; "
                f"found {data.listed(row)}"
            )
        prompt: Any = row["prompt"]
        if isinstance(prompt, str) and prompt:
            return row
        if not isinstance(prompt, list) or not prompt:
            raise DataError(f"{where}: prompt is {prompt!r}; expected a string or a list of messages")
        if self.config.prompt == "raw":
            raise DataError(f"{where}: prompt is a list of messages, which cannot be raw; leave task.prompt out")
        return row | {"prompt": _messages(where, cast("list[Any]", prompt))}

    def _refuse_separate(self, where: str, row: dict[str, Any]) -> None:
        """Raise DataError for text of the prompt in a second column, which the model would not see."""
        source = self.config.columns.get("prompt") or next((n for n in ("prompt", "instruction") if n in row), "prompt")
        for column, needed in SEPARATE.items():
            if not row.get(column) or column == source or needed not in (None, source.lower()) or self._uses(column):
                continue
            if column in ("system", "history") and not isinstance(row.get("prompt"), str):
                continue
            columns = {**self.config.columns, "prompt": source, f"own_{column}": column}
            raise DataError(
                f"{where}: {column} is {shown(row[column])}, which is not in the prompt (the column {plain(source)}); "
                "write one column with both, or messages; if the model should not read it, set task.columns: "
                f"{data.as_option(columns)}"
            )

    def _uses(self, column: str) -> bool:
        """Return whether a reward function takes a column by its name, or it is the gold column."""
        return column == self.config.gold or any(function.names(column) for function in self.functions)

    def _unread(self, examples: Sequence[Example]) -> list[str]:
        """Return columns with text that often belongs to the prompt and is not in it."""
        found = {
            column: None
            for example in examples[:100]
            for column in ALSO_READ
            if isinstance(example.get(column), str | list) and example[column]
            if not self._uses(column) and str(example[column]) not in str(example["prompt"])
        }
        return [*found]


def with_prompt(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with a `prompt` made from its conversation, if it has no prompt. Raises DataError.

    If the assistant speaks last, that message becomes the `completion`, unless the row has one, and the messages before
    it become the prompt. Otherwise all messages do. The column `system` becomes the first message.
    """
    column = next((name for name in CONVERSATIONS if row.get(name) is not None), None)
    if row.get("prompt") is not None or column is None:
        return row
    found: Any = row[column]
    if not isinstance(found, list) or not found:
        raise DataError(f"{where}: {column} is {shown(found)}; expected a list of messages")
    messages = _messages(where, cast("list[Any]", found))
    if (system := row.get("system")) and messages[0]["role"] != "system":
        messages = _messages(where, [{"role": "system", "content": system}, *messages])
    if messages[-1]["role"] != "assistant":
        return row | {"prompt": messages}
    if len(messages) == 1:
        raise DataError(f"{where}: {column} has only an assistant message; add the user message before it")
    completion = {"completion": messages[-1]["content"]} if row.get("completion") is None else {}
    return row | {"prompt": messages[:-1]} | completion


def _messages(where: str, messages: list[Any]) -> Messages:
    """Return messages with only string fields, without the empty fields of columnar files and without OpenAI's `weight`
    (of the loss on a message). Raises DataError."""
    found: list[dict[str, str]] = []
    for message in messages:
        fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        if isinstance(fields.get("weight"), int | float):
            del fields["weight"]
        if "role" not in fields and "from" in fields:
            role = fields["from"]
            if not isinstance(role, str) or role not in ROLES:
                raise DataError(f"{where}: a message is from {shown(role)}; expected human, gpt or system")
            fields = {"role": ROLES[role], "content": fields.get("value")}
        if isinstance(fields.get("content"), list):  # parts, which may be images
            given = cast("list[Any]", fields["content"])
            parts: list[dict[str, Any]] = [part if isinstance(part, dict) else {"type": part} for part in given]
            for part in parts:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    kind = shown(part.get("type", part))
                    raise DataError(f"{where}: a message has a part of type {kind}; only parts of type 'text' are read")
            fields["content"] = "".join(part["text"] for part in parts)
        if not {"role", "content"} <= fields.keys() or not all(isinstance(v, str) for v in fields.values()):
            odd = next(
                (f"its {plain(str(k))} is {shown(v)}; " for k, v in fields.items() if not isinstance(v, str)), ""
            )
            raise DataError(
                f"{where}: message {shown(message)}: {odd}expected {{'role': .., 'content': ..}} with strings"
            )
        found.append(cast("dict[str, str]", fields))
    return found
