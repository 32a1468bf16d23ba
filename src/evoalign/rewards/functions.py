# SPDX-License-Identifier: Apache-2.0
"""User reward functions, called as TRL calls them.

Two forms are accepted, plain or `async`:

- TRL's: `f(prompts, completions, **columns) -> list[float | None]`, called by keyword. A function gets every column of
  the data that it names, or all of them with `**kwargs`. `None` means that the function does not apply.
- the simple one: two positional parameters named `text` and `example`, for one completion per call.

`log_extra` and `log_metric` of TRL's trainer are functions that do nothing. `completion_ids` and `trainer_state` do not
exist here: a function that requires them is rejected before the run starts.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import re
import reprlib
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from evoalign.config.secrets import redacted
from evoalign.errors import ConfigError, RewardError, cut, plain
from evoalign.plugins import FAILURES, raised
from evoalign.types import Example, Messages, Prompt

Completion: TypeAlias = str | Messages
Values: TypeAlias = list[float | None]
Calling: TypeAlias = Callable[[str], None]
"""Called with the name of the next function, so that an error can name one that never returns."""

_OURS = ("prompt", "prompts", "completion", "completions", "completion_ids")
"""Columns that would hide arguments of TRL with these names."""
_LOGGERS = ("log_extra", "log_metric")
_UNCHANGING = frozenset((str, int, float, bool, bytes, type(None)))
_ABSENT = ("completion_ids", "trainer_state")
_BETWEEN_DIGITS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DROPPED = re.compile(
    r"\*\*|\*(?=[^\W\d])|(?<=[^\W\d])\*"  # markdown
    r"|(?<!\d)\.|\.(?!\d)|[^\w\s.+*/<>=%^-]|_|(?<=[^\W\d])-(?=[^\W\d])"
)
_SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
SAVED = 20
"""Maximum number of completions that an error about a whole batch records."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Completions to score, one row each. Message prompts have message completions, as in TRL."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    texts: Sequence[str]
    examples: Sequence[Example]
    arguments: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """Further arguments in TRL's form, such as `environments`, which are passed as they are."""


class RewardFunction:
    """A user function, its name and its signature. Raises ConfigError."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = str(getattr(function, "__name__", type(function).__name__))
        if not callable(function):
            raise ConfigError(f"reward {function!r} is not a function")
        try:
            parameters = dict(inspect.signature(function).parameters)
        except ValueError:
            raise ConfigError(f"reward function {self.name} has no readable signature; wrap it in a def") from None
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = {p.name: p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._named = frozenset(named)
        self._required = frozenset(n for n, p in named.items() if p.default is p.empty)
        self.is_simple = list(parameters) == ["text", "example"]
        for absent in _ABSENT:
            if absent in self._required:
                raise ConfigError(
                    f"reward function {self.name} requires {absent}, which only TRL's trainer has; "
                    "give that parameter a default, or use the completions"
                )

    @property
    def is_async(self) -> bool:
        """Whether a call returns a coroutine."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )

    def names(self, column: str) -> bool:
        """Return whether a column is one of the function's parameters."""
        return column in self._named

    def reads(self, column: str) -> bool:
        """Return whether the function gets a column: by its name, with all others, or in the example."""
        return self.is_simple or self._takes_all or self.names(column)

    def missing(self, columns: Sequence[str]) -> list[str]:
        """Return required parameters that neither the data nor the caller can fill."""
        given = {"text", "example"} if self.is_simple else {"prompts", "completions", *_LOGGERS, *columns}
        return sorted(self._required - given)

    def call(self, batch: Batch) -> Any:
        """Return the function's result for the batch; an awaitable if it is async."""
        if not self.is_simple:
            # TRL never passes `completion`; a function that names it gets the column.
            ours = set(_OURS) - (self._named & {"completion"})
            columns = {name: None for example in batch.examples for name in example if name not in ours}
            arguments: dict[str, Any] = dict.fromkeys(_LOGGERS, _log_nothing)
            arguments |= {name: [example.get(name) for example in batch.examples] for name in columns}
            arguments |= {"prompts": list(batch.prompts), "completions": list(batch.completions)}
            taken = {*arguments, *batch.arguments} if self._takes_all else self._named
            given = {name: fresh(value) for name, value in arguments.items() if name in taken}
            return self.function(**given, **{n: list(v) for n, v in batch.arguments.items() if n in taken})
        pairs = zip(batch.texts, batch.examples, strict=True)
        results = [self.function(text, fresh(example)) for text, example in pairs]
        return asyncio.gather(*results) if self.is_async else results

    def checked(self, result: Any, batch: Batch) -> Values:
        """Return one finite number or None per completion. Raises RewardError."""
        values: Any = result.tolist() if hasattr(result, "tolist") else result
        wrong = "" if isinstance(values, list | tuple) else f"{shown(values)}; return a list of numbers"
        if not wrong and len(values) != len(batch.texts):
            wrong = f"{len(values)} values for {len(batch.texts)} completions; return one number, or None, for each"
        if wrong:
            failed = failure("value", self.name, texts=batch.texts)
            raise RewardError(f"reward function {self.name} returned {wrong}", failed)
        numbers = [None if value is None else finite(value) for value in values]
        for row, (value, number) in enumerate(zip(values, numbers, strict=True)):
            if value is not None and number is None:
                raise RewardError(
                    f"reward function {self.name} returned {shown(value)} for the completion "
                    f"{batch.texts[row][:80]!r}; return a finite number, float(x) of a bool, or None",
                    failure("value", self.name, (batch.prompts[row], batch.texts[row], batch.examples[row])),
                )
        return numbers


def fresh(value: Any) -> Any:
    """Return a deep copy for user code, which may modify it: all members share the rows.

    Immutable values and objects that cannot be copied are returned unchanged.
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
    except Exception:  # its class may raise anything
        return value


def finite(value: Any) -> float | None:
    """Convert one finite number of Python, numpy or torch to float; return None for anything else, also bools."""
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
    except OverflowError:  # an integer with more than 308 digits
        return None
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """Format any value for a message, on one short line."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # Python rejects integers with more than 4300 digits
        return f"a value of type {type(value).__name__}"


def failure(
    reason: str,
    function: str,
    where: tuple[Prompt, str, Example] | None = None,
    trace: str | None = None,
    texts: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the record for `RewardError.failed`; `where` is the prompt, the completion and the example that failed.

    Without `where`, the record has the first of the `texts` as `completions`, and their `count`.
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
    """Call every function and return its values, in order. Awaits async functions together. Raises RewardError.

    In a running event loop (a notebook), a separate thread awaits them.
    """

    async def awaited(function: RewardFunction) -> Any:
        try:
            return await cast("Awaitable[Any]", function.call(batch))
        except (Exception, SystemExit) as error:
            raise _failed(function.name, error, batch) from error

    async def together() -> list[Any]:
        return await asyncio.gather(*(awaited(functions[i]) for i in waiting))

    tell = calling or _log_nothing
    results: dict[int, Any] = {}
    waiting = [i for i, f in enumerate(functions) if f.is_async]
    for index, function in enumerate(functions):
        if not function.is_async:
            tell(function.name)
            try:
                results[index] = function.call(batch)
            except FAILURES as error:
                raise _failed(function.name, error, batch) from error
    if waiting:
        names = " or ".join(functions[i].name for i in waiting)
        tell(names)
        try:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                found = asyncio.run(together())
            else:
                with ThreadPoolExecutor(max_workers=1) as thread:
                    found = thread.submit(asyncio.run, together()).result()
        except (SystemExit, asyncio.CancelledError) as error:  # Ctrl-C cancels too, but raises KeyboardInterrupt here
            raise _failed(names, error, batch) from error
        results |= zip(waiting, found, strict=True)
    return [function.checked(results[i], batch) for i, function in enumerate(functions)]


def _failed(name: str, error: BaseException, batch: Batch) -> RewardError:
    columns = list(dict.fromkeys(str(name) for example in batch.examples for name in example))
    hint = ""
    looked_up = error.args[0] if isinstance(error, KeyError) and error.args else None
    if columns and isinstance(looked_up, str) and looked_up not in columns:
        hint = f"; the data has the columns {plain(cut(', '.join(columns), 200))}"
    return RewardError(
        f"reward function {name} failed: {raised(error)}{hint}; fix it",
        failure("raised", name, trace="".join(traceback.format_exception(error)), texts=batch.texts),
    )


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Ignore all arguments: replaces TRL's `log_extra` and `log_metric`."""


def normalized(text: str) -> str:
    """Lower-case a text, remove punctuation and markdown, collapse white space, and write 1,000 as 1000.

    Arithmetic signs and decimal points stay, but `**` counts as markdown.
    """
    return " ".join(_DROPPED.sub(" ", _BETWEEN_DIGITS.sub("", text.casefold())).split())


def says(text: str, gold: str) -> bool:
    """Return whether the normalised text contains the gold answer as whole words.

    If the script of the gold answer has no spaces between words, it may be anywhere in the text.
    """
    wanted, found = normalized(gold), normalized(text)
    if not wanted:
        return text.strip() == gold.strip() != ""
    return wanted in found if _SPACELESS.search(wanted) else f" {wanted} " in f" {found} "
