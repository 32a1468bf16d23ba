# SPDX-License-Identifier: Apache-2.0
"""Environments of TRL as tasks: a class with `reset`, tools and a reward, the same one for ES and GRPO.

`reset(**columns)` gets the columns of the row and returns None or a text that is appended to the last user message. The
public methods are the tools. `get_reward()`, if defined, and the functions of `task.rewards`, which may take the
parameter `environments`, score an episode. Deviations from TRL: Python's and NumPy's random numbers are seeded by the
row before `reset` and each call, so that all members play the same episode; `sampling.max_tokens` limits a turn, and
`task.episode` the episode; the calls of the last turn are still made.

Instances live where the task scores, which is a worker process: a tool that hangs is killed after `grader.timeout`. A
new worker repeats the calls of the episodes so far. An environment that then replies otherwise stops the run.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeAlias, cast

import numpy as np

from evoalign import transcripts
from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, RewardError, plain
from evoalign.plugins import load_object
from evoalign.rewards.functions import Batch, RewardFunction, call_all, shown
from evoalign.rewards.objective import Columns
from evoalign.tasks.custom import Custom
from evoalign.transcripts import Message
from evoalign.types import Example, Messages, Prompt

MOST_LIVE = 65_536
"""Environments that are kept for the next turn of their episodes; the state of others is made again when needed."""
State: TypeAlias = list[list[Message]]
"""Turns that called tools, each with its results: all that an environment has seen."""
OWN = ("reset", "get_reward")
"""Public methods that are not tools."""


class Environment(Custom):
    """Rows with an optional `prompt`, and an environment that a model acts in by tool calls.

    A turn without a tool call ends the episode. A call that fails is answered with a message that says why.
    """

    name = "environment"
    forms = ("chat",)
    arguments = ("environments",)
    environment: type[Any] | None = None
    """The environment class of a subclass; None: `task.environment`."""

    def __init__(self, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> None:
        given = type(self).environment
        if given is None and config.environment is None:
            raise ConfigError("task.environment is not set; name a class, such as my_env.py:MyEnv")
        found = given or load_object(str(config.environment), "task.environment")
        self.methods = tools_of(found)
        self.factory: type[Any] = seeded(found)
        self.has_reward = callable(getattr(self.factory, "get_reward", None))
        self._idle, self._live = list[Any](), OrderedDict[str, list[Any]]()
        super().__init__(config, rewards)
        self.per_call = None if len(self.functions) > self.has_reward else 64

    @functools.cached_property
    def tools(self) -> Sequence[Mapping[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride] (only read)
        """Schemas of the tools. Made when read: a worker process does without, and transformers takes three seconds."""
        return tuple(_schema(name, method) for name, method in self.methods.items())

    @classmethod
    def make(cls, config: TaskConfig, rewards: Sequence[Callable[..., Any]] | None = None) -> Environment:
        """Create the task of a config, with `rewards` instead of `task.rewards`."""
        return cls(config, rewards)

    def loaded_functions(self, rewards: Sequence[Callable[..., Any]] | None) -> list[RewardFunction]:
        """Return the environment's own reward, if it has one, and the reward functions."""
        own = [RewardFunction(_reward_of(self.factory))] if self.has_reward else []
        return own + (super().loaded_functions(rewards) if rewards or self.config.rewards else [])

    def completed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with an empty prompt if the environment's `reset` writes the whole prompt."""
        return row if row.get("prompt") is not None else {**row, "prompt": [{"role": "user", "content": ""}]}

    def before_reset(self, example: Example) -> Messages:
        """Return the prompt without the text of `reset`."""
        prompt = super().prompt(example)
        return prompt if not isinstance(prompt, str) else self.with_system([{"role": "user", "content": prompt}])

    def environment_factory(self) -> type[Any]:
        """Return the class for TRL's `environment_factory`, without `get_reward`: the task scores the episodes.

        Its `reset` drops the column `row`, which is not one of the data.
        """

        def reset(environment: Any, row: int, **columns: Any) -> Any:
            return self.factory.reset(environment, **columns)

        return type(self.factory.__name__, (self.factory,), {"get_reward": None, "reset": reset})

    def prompt(self, example: Example) -> Prompt:
        """Return the prompt with the text that `reset` returned. Raises RewardError."""
        *rest, last = self.before_reset(example)
        environment, opening = self._begun(example)
        self._idle.append(environment)
        return [*rest, {**last, "content": last["content"] + opening}]

    def replies(self, texts: Sequence[str], examples: Sequence[Example]) -> list[list[Message] | None]:
        """Return the results of the tool calls with which episodes end so far, or None without a call.

        Each text ends with the messages of its last turn, which has the calls.
        """
        return [self._reply(text, example) for text, example in zip(texts, examples, strict=True)]

    def _reply(self, text: str, example: Example) -> list[Message] | None:
        *_, [turn] = transcripts.exchanges(text)
        if not (calls := turn.get("tool_calls")):
            return None
        state = _state(text)[:-1]
        environment = self._at(state, example)
        found = [self._call(environment, call["function"]) for call in calls]
        self._keep([*state, [turn, *found]], example, environment)
        return found

    def _scored(self, texts: Sequence[str], examples: Sequence[Example]) -> tuple[Columns, list[float]]:
        """Score episodes by their environments, as they are after the last call."""
        names = list(self._sum.weights or ())
        if not texts:
            return {name: [] for name in names}, []
        after = list(map(_state, texts))
        environments = [self._at(state, example) for state, example in zip(after, examples, strict=True)]
        try:
            prompts = [cast(Prompt, example["prompt"]) for example in examples]
            completions = [transcripts.messages(text) for text in texts]
            lasts = [self.clean(transcripts.turns(text)[-1]) for text in texts]
            batch = Batch(prompts, completions, lasts, examples, {"environments": environments})
            columns = dict(zip(names, call_all(self.functions, batch, self.calling), strict=True))
            rewards = self._sum.rewards(columns, texts, examples)
        except BaseException:  # a retry finds them in the same state
            for state, example, environment in zip(after, examples, environments, strict=True):
                self._keep(state, example, environment)
            raise
        self._idle += environments
        return columns, rewards

    # --- instances ---------------------------------------------------------------------------------------------------

    def _at(self, state: State, example: Example) -> Any:
        """Return the environment of an episode after these calls: a kept one, or a new one that repeats them.

        Raises RewardError if it replies otherwise.
        """
        key = _key(json.dumps(state), example)
        if (kept := self._live.get(key)) is not None:
            environment = kept.pop()
            if not kept:
                del self._live[key]
            return environment
        environment, _ = self._begun(example)
        for turn, *recorded in state:
            found = [self._call(environment, call["function"]) for call in turn["tool_calls"]]
            if found != recorded:
                raise RewardError(
                    f"environment {self._name()} replied {shown(recorded)} to {shown(turn['tool_calls'])}, and "
                    f"{shown(found)} when the calls of the episode were repeated: it is not deterministic; derive what "
                    "is random from the row, or from Python's `random`, which is seeded before each call"
                )
        return environment

    def _begun(self, example: Example) -> tuple[Any, str]:
        """Return an environment after `reset`, and the text that it returned."""
        environment = self._idle.pop() if self._idle else self.factory()
        opening = _awaited(environment.reset(**{**example, "prompt": self.before_reset(example)}))
        if not isinstance(opening, str | None):
            raise RewardError(
                f"environment {self._name()}: reset returned {shown(opening)}; return None, or a text that is appended "
                "to the last user message"
            )
        return environment, opening or ""

    def _keep(self, state: State, example: Example, environment: Any) -> None:
        self._live.setdefault(_key(json.dumps(state), example), []).append(environment)
        if len(self._live) > MOST_LIVE:
            self._live.popitem(last=False)

    def _call(self, environment: Any, call: dict[str, Any]) -> Message:
        """Return the message with the result of a call, or with its error."""
        name = str(call.get("name"))
        try:
            if name not in self.methods:
                raise ValueError(f"Tool {name} not found.")
            result = _awaited(getattr(environment, name)(**call["arguments"]))
        except Exception as error:  # what the model asked for, or the environment's way to refuse it
            result = {"error": str(error)}
        return {"role": "tool", "name": name, "content": transcripts.clean(str(result))}

    def _name(self) -> str:
        return getattr(self.factory, "__name__", type(self.factory).__name__)


def tools_of(factory: Any) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment class by name: its public methods. Raises ConfigError."""
    name = getattr(factory, "__name__", repr(factory))
    if not inspect.isclass(factory):
        raise ConfigError(f"task.environment: {plain(name)} is not a class")
    members = dict(inspect.getmembers(factory, inspect.isfunction))
    if "reset" not in members:
        raise ConfigError(f"task.environment: class {name} has no method reset(**columns)")
    return {key: found for key, found in members.items() if not key.startswith("_") and key not in OWN}


def _schema(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(MethodType(method, object()))
    except Exception as error:  # of transformers' parser of docstrings, which has its own types
        raise ConfigError(
            f"task.environment: tool {name}: {plain(str(error))}; give each parameter a type, and describe it in the "
            "docstring under Args:"
        ) from None


def _reward_of(factory: Any) -> Callable[..., Any]:
    """Return the environment's own reward as a reward function with the name of its class, as in TRL."""

    def reward(environments: Sequence[Any]) -> list[Any]:
        return [_awaited(environment.get_reward()) for environment in environments]

    reward.__name__ = factory.__name__
    return reward


def _awaited(result: Any) -> Any:
    """Return a result, of a coroutine after running it."""
    if not inspect.iscoroutine(result):
        return result

    async def whole() -> Any:
        return await result

    return asyncio.run(whole())


def _state(text: str) -> State:
    """Return the turns of an episode that called tools, each with the results."""
    return [messages for messages in transcripts.exchanges(text) if messages[0].get("tool_calls")]


def _key(text: str, example: Example) -> str:
    return hashlib.blake2b(
        f"{sorted(example.items())!r}\n{text}".encode("utf-8", "replace"), digest_size=16
    ).hexdigest()


def seeded(cls: type[Any]) -> type[Any]:
    """Return the class with random numbers of `random` and `numpy.random` that depend on the row and the number of
    calls of the episode, so that all members play the same episode, and a repeated one is the same."""

    def around(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def begin(self: Any, columns: dict[str, Any]) -> None:
            if name == "reset":
                self._evoalign_row, self._evoalign_calls = _key("", columns), 0
            self._evoalign_calls += 1
            number = int(hashlib.blake2b(f"{self._evoalign_row} {self._evoalign_calls}".encode()).hexdigest()[:8], 16)
            random.seed(number)
            np.random.seed(number)

        @functools.wraps(method)
        def called(self: Any, *arguments: Any, **named: Any) -> Any:
            begin(self, named)
            return method(self, *arguments, **named)

        @functools.wraps(method)
        async def awaited(self: Any, *arguments: Any, **named: Any) -> Any:
            begin(self, named)
            return await method(self, *arguments, **named)

        return awaited if inspect.iscoroutinefunction(method) else called

    methods = {name: found for name, found in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}
    own = {name: around(name, found) for name, found in methods.items() if name != "get_reward"}
    return type(cls.__name__, (cls,), {**own, "__module__": cls.__module__, "__doc__": cls.__doc__})
