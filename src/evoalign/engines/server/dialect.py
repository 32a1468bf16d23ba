# SPDX-License-Identifier: Apache-2.0
"""What a kind of server is asked, and in which words. All of it is asked of the server: nothing goes by its version."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from evoalign.engines.server.adapters import PeftAdapter
from evoalign.engines.server.client import Client
from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.errors import ConfigError
from evoalign.types import FinishReason, Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Server:
    """What a server says of itself; None is what it does not say."""

    version: str
    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    rank: int | None = None
    """The highest of an adapter."""
    modules: tuple[str, ...] | None = None
    """The projections that adapters may be on; None: any."""
    longest: int | None = None
    """Tokens of a prompt and its completion together."""
    ranks: int = 1
    """GPUs over which each matrix is split."""
    has_seeds: bool = True
    """Whether two requests of one seed draw alike."""

    def check(self, rank: int, modules: Set[str], where: str) -> None:
        """Raise ConfigError where it says that it cannot have adapters of this rank on these projections."""
        if self.rank is not None and rank > self.rank:
            raise ConfigError(
                f"rank {rank}: {where} takes adapters of rank {self.rank} at most; lower it, or start it with more"
            )
        missing = sorted(modules - set(self.modules or modules))
        if missing:
            raise ConfigError(
                f"{where} has no room for adapters on {', '.join(missing)}; start it with these target modules, or "
                "choose others"
            )


@dataclass(frozen=True, slots=True)
class Said:
    """One completion, as a server gave it and as it was checked."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None


class Dialect(Protocol):
    """Coroutines on a client's thread. All raise LostError, RefusedError."""

    async def is_ready(self, client: Client) -> bool:
        """Whether the server answers and its model is loaded."""
        ...

    async def about(self, client: Client) -> Server:
        """What the server says of itself."""
        ...

    async def load(self, client: Client, name: str, adapter: PeftAdapter, folder: Path | None, ranks: int) -> None:
        """Have the server take an adapter under a name that it has not had: from `folder`, where it lies, or
        None: then with a copy for each of its `ranks`."""
        ...

    async def unload(self, client: Client, name: str) -> None:
        """Have it let an adapter go."""
        ...

    async def generate(
        self, client: Client, requests: Sequence[Request], adapter: str | None, stop_ids: Sequence[int]
    ) -> list[Said]:
        """One completion of each request, in their order, by the adapter or the base model."""
        ...

    def naming(self, adapter: str | None, base: str) -> Mapping[str, Any]:
        """What an OpenAI-style request says to be answered by an adapter of the model `base`; None: by that itself."""
        ...

    async def metrics(self, client: Client) -> Mapping[str, float]:
        """How busy the server is."""
        ...


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What coroutines come to that run side by side; where one fails, the others end, too, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failed:
        raise first_of(failed) from None
    return [task.result() for task in tasks]


def first_of(failed: BaseExceptionGroup[Any]) -> BaseException:
    """Of what failed at once: the refusal of a server, or else the first."""
    leaves = [first_of(e) if isinstance(e, BaseExceptionGroup) else e for e in failed.exceptions]
    return next((e for e in leaves if isinstance(e, RefusedError)), leaves[0])


def checked_ids(value: Any, request: Request, where: str) -> tuple[int, ...]:
    """Token ids of an answer: one at least. Raises LostError for what are none, or more than were asked for."""
    if not isinstance(value, list) or not value or not all(type(t) is int and 0 <= t < 2**31 for t in value):
        raise LostError(f"{where} answers no token ids: {str(value)[:80]!r}")
    if len(value) > request.sampling.max_tokens:
        raise LostError(f"{where} answers {len(value)} tokens where {request.sampling.max_tokens} were asked for")
    return tuple(value)


def checked_logprobs(values: Any, count: int, where: str) -> tuple[float, ...]:
    """Log-probabilities of so many tokens. Raises LostError."""
    if not isinstance(values, list) or len(values) != count:
        raise LostError(f"{where} answers no log-probability of each of {count} tokens")
    if not all(_is_number(value) and value < 1e-3 for value in values):
        raise LostError(f"{where} answers log-probabilities that are none: {str(values)[:80]!r}")
    return tuple(min(0.0, float(value)) for value in values)


def _is_number(value: Any) -> bool:
    """Minus infinity is one; NaN is none, nor is an integer that no float holds."""
    return (type(value) is float and value == value) or (type(value) is int and abs(value) < 2**53)


def measured(text: str, pattern: re.Pattern[str], names: Mapping[str, str]) -> dict[str, float]:
    """Of metrics in Prometheus' form those of `names`; of several ranks the first. A value that is none is left out."""
    found: dict[str, float] = {}
    for name, value in pattern.findall(text):
        if name in names:
            with contextlib.suppress(ValueError):
                found.setdefault(names[name], float(value))
    return found


def checked_reason(value: Any, where: str) -> FinishReason:
    """Why a completion ended. Raises LostError for any other reason: it is not whole."""
    if value == "stop":
        return "stop"
    if value == "length":
        return "length"
    raise LostError(f"{where} gave up on a completion ({str(value)[:80]!r}); it is not scored")
