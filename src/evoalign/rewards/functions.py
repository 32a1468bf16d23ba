# SPDX-License-Identifier: Apache-2.0
"""Reward functions of the user's own, called as TRL calls them.

Two forms are accepted, plain or `async`:

- TRL's: `f(prompts, completions, **columns) -> list[float | None]`, called by keyword. A function gets every column
  of the data that it names, or all of them where it takes `**kwargs`. `None` means that the function does not apply.
- the simple one: two positional parameters named `text` and `example`, one completion a call.

Of what TRL's trainer passes besides, `log_extra` and `log_metric` are given as functions that do nothing.
`completion_ids` and `trainer_state` do not exist here (rewards see text, and there is no trainer): a function that
cannot do without them is refused before the run starts.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import reprlib
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from evoalign.config.secrets import redacted
from evoalign.errors import ConfigError, RewardError, cut, plain
from evoalign.plugins import FAILURES, raised
from evoalign.types import Example, Messages, Prompt

Completion: TypeAlias = str | Messages
Values: TypeAlias = list[float | None]
Calling: TypeAlias = Callable[[str], None]
"""Told the name of the function that is called next, so that one that never returns can be named."""

_OURS = ("prompt", "prompts", "completion", "completions", "completion_ids")
"""Columns that would hide what TRL passes under, or keeps from, these names."""
_LOGGERS = ("log_extra", "log_metric")
_UNCHANGING = frozenset((str, int, float, bool, bytes, type(None)))
_ABSENT = ("completion_ids", "trainer_state")
SAVED = 20
"""Completions of a batch that failed as a whole, which are kept to see it happen again."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Completions to be rewarded, one row each. Message prompts come with message completions, as in TRL."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    texts: Sequence[str]
    examples: Sequence[Example]


class RewardFunction:
    """A user's function, its name for messages, and what its signature asks for. Raises ConfigError."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self._parameters = self._signature()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        named = {p.name: p for p in self._parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._named = frozenset(named)
        self._required = frozenset(n for n, p in named.items() if p.default is p.empty)
        self.is_simple = list(self._parameters) == ["text", "example"]
        for absent in _ABSENT:
            if absent in self._required:
                raise ConfigError(
                    f"reward function {self.name} asks for {absent}, which only TRL's trainer has; "
                    "give that parameter a default, or work from the completions"
                )

    def _signature(self) -> dict[str, inspect.Parameter]:
        if not callable(self.function):
            raise ConfigError(f"reward {self.function!r} is not a function")
        try:
            return dict(inspect.signature(self.function).parameters)
        except ValueError:
            raise ConfigError(f"reward function {self.name} has no signature to read; wrap it in a def") from None

    @property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )

    def missing(self, columns: Sequence[str]) -> list[str]:
        """Parameters without a default that neither the data nor the trainer's place can fill."""
        given = {"text", "example"} if self.is_simple else {"prompts", "completions", *_LOGGERS, *columns}
        return sorted(self._required - given)

    def call(self, batch: Batch) -> Any:
        """Whatever the function returns for the batch, awaitable where it is async."""
        if not self.is_simple:
            return self.function(**self._arguments(batch))
        pairs = zip(batch.texts, batch.examples, strict=True)
        results = [self.function(text, fresh(example)) for text, example in pairs]
        return asyncio.gather(*results) if self.is_async else results

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        ours = set(_OURS) - (self._named & {"completion"})  # which TRL never gives; here who names it gets the column
        columns = {name: None for example in batch.examples for name in example if name not in ours}
        arguments: dict[str, Any] = dict.fromkeys(_LOGGERS, _log_nothing)
        arguments |= {name: [example.get(name) for example in batch.examples] for name in columns}
        arguments |= {"prompts": list(batch.prompts), "completions": list(batch.completions)}
        return {name: fresh(value) for name, value in arguments.items() if self._takes_all or name in self._named}

    def checked(self, result: Any, batch: Batch) -> Values:
        """One finite number or None a completion. Raises RewardError."""
        values: Any = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(values, list | tuple):
            raise RewardError(
                f"reward function {self.name} returned {shown(values)}; return a list of numbers",
                failure("value", self.name, texts=batch.texts),
            )
        values = cast("Sequence[Any]", values)
        if len(values) != len(batch.texts):
            raise RewardError(
                f"reward function {self.name} returned {len(values)} values for {len(batch.texts)} completions; "
                "return one number, or None, for each",
                failure("value", self.name, texts=batch.texts),
            )
        return [self._number(value, batch, row) for row, value in enumerate(values)]

    def _number(self, value: Any, batch: Batch, row: int) -> float | None:
        number = None if value is None else finite(value)
        if value is not None and number is None:
            raise RewardError(
                f"reward function {self.name} gave {shown(value)} for the completion {batch.texts[row][:80]!r}; "
                "return a finite number, float(x) of a truth value, or None where the function does not apply",
                failure("value", self.name, (batch.prompts[row], batch.texts[row], batch.examples[row])),
            )
        return number


def fresh(value: Any) -> Any:
    """The value for code of the user's own, which may change what it is given: rows are shared by all members.

    Lists, dicts and other objects are copied in depth; what no code can change is itself, and so is an object that
    cannot be copied.
    """
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is list:
        return [fresh(item) for item in value]
    if kind is dict:
        return {key: fresh(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever its class says to that
        return value


def finite(value: Any) -> float | None:
    """The value as a float where it is one finite number (of Python, numpy or torch) and no truth value; else None."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    try:
        plain: Any = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # an array of several numbers
        return None
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        return None
    try:
        number = float(plain)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """A value for a message: on one line, and short whatever it is."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # Python refuses to write integers of more than 4300 digits
        return f"a value of type {type(value).__name__}"


def failure(
    reason: str,
    function: str,
    where: tuple[Prompt, str, Example] | None = None,
    trace: str | None = None,
    texts: Sequence[str] = (),
) -> dict[str, Any]:
    """What `RewardError.failed` holds; `where` is the prompt, the completion and the example to blame, if one is.

    Where none is, `texts` are what the function was asked: `completions` holds the first of them, `count` how many.
    """
    prompt, completion, example = where or (None, None, None)
    failed = {
        "reason": reason,
        "function": function,
        "prompt": prompt,
        "completion": completion,
        "example": None if example is None else {str(name): value for name, value in example.items()},
        "traceback": None if trace is None else redacted(trace),
        "attempts": 1,
        "seconds": None,
    }
    if where is None and texts:
        failed |= {"completions": list(texts[:SAVED]), "count": len(texts)}
    return json.loads(json.dumps(failed, default=repr, skipkeys=True))


def call_all(functions: Sequence[RewardFunction], batch: Batch, calling: Calling | None = None) -> list[Values]:
    """The values of every function, in order. Async functions are awaited together. Raises RewardError.

    Works inside a running event loop too (a notebook): the awaiting then happens on a thread of its own.
    """
    tell = calling or _log_nothing
    results: dict[int, Any] = {}
    for index, function in enumerate(functions):
        if not function.is_async:
            tell(function.name)
            results[index] = _guarded(function, batch)
    waiting = [i for i, f in enumerate(functions) if f.is_async]
    if waiting:
        tell(" or ".join(functions[i].name for i in waiting))
        results |= zip(waiting, _run_all([functions[i] for i in waiting], batch), strict=True)
    return [function.checked(results[i], batch) for i, function in enumerate(functions)]


def _guarded(function: RewardFunction, batch: Batch) -> Any:
    try:
        return function.call(batch)
    except FAILURES as error:
        raise _failed(function.name, error, batch) from error


def _run_all(functions: Sequence[RewardFunction], batch: Batch) -> list[Any]:
    try:
        return _run(_together(functions, batch))
    except (SystemExit, asyncio.CancelledError) as error:  # told apart from Ctrl-C, which cancels too, only out here
        raise _failed(" or ".join(function.name for function in functions), error, batch) from error


async def _together(functions: Sequence[RewardFunction], batch: Batch) -> list[Any]:
    return await asyncio.gather(*(_awaited(function, batch) for function in functions))


async def _awaited(function: RewardFunction, batch: Batch) -> Any:
    try:
        return await cast("Awaitable[Any]", function.call(batch))
    except (Exception, SystemExit) as error:
        raise _failed(function.name, error, batch) from error


def _run(work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()


def _failed(name: str, error: BaseException, batch: Batch) -> RewardError:
    return RewardError(
        f"reward function {name} failed: {raised(error)}{_columns(error, batch)}; fix it",
        failure("raised", name, trace="".join(traceback.format_exception(error)), texts=batch.texts),
    )


def _columns(error: BaseException, batch: Batch) -> str:
    """The columns that there are, where a name was looked up that is none of them."""
    columns = list(dict.fromkeys(str(name) for example in batch.examples for name in example))
    looked_up = isinstance(error, KeyError) and bool(error.args) and isinstance(error.args[0], str)
    if not looked_up or not columns or error.args[0] in columns:
        return ""
    return f"; the data has the columns {plain(cut(', '.join(columns), 200))}"


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for TRL's `log_extra` and `log_metric`, and for nobody who wants to know what is called."""
