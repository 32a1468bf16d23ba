# SPDX-License-Identifier: Apache-2.0
"""The requests that engines send to a kind of server, and checks of its replies.

The server itself reports its capabilities; none depends on its version.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from evoalign.engines.base import Completion
from evoalign.engines.server.adapters import PeftAdapter
from evoalign.engines.server.client import Client, LostError, RefusedError
from evoalign.errors import ConfigError
from evoalign.types import FinishReason, Request

T = TypeVar("T")
LOADING = 300.0
"""Seconds for loading an adapter."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's description of itself; None is what it does not report."""

    version: str
    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    rank: int | None = None
    """Highest rank of an adapter."""
    modules: tuple[str, ...] | None = None
    """Projections that adapters may change; None: any."""
    longest: int | None = None
    """Tokens of a prompt and its completion together."""
    ranks: int = 1
    """GPUs over which each matrix is split."""
    has_seeds: bool = True
    """Whether two requests with the same seed sample alike."""

    def check(self, rank: int, modules: Set[str], where: str) -> None:
        """Raise ConfigError where the server reports that it cannot serve adapters of this rank on these modules."""
        if self.rank is not None and rank > self.rank:
            raise ConfigError(
                f"rank {rank}: {where} serves adapters of rank {self.rank} at most; lower it, or start it with more"
            )
        missing = sorted(modules - set(self.modules or modules))
        if missing:
            raise ConfigError(
                f"{where} serves no adapters on {', '.join(missing)}; start it with these target modules, or choose "
                "others"
            )


class Dialect:
    """Coroutines for a client's event loop. All raise LostError, RefusedError."""

    health: ClassVar[tuple[str, float]]
    """Path of the health check, and the seconds that it may take."""
    metric: ClassVar[re.Pattern[str]]
    """Pattern of a Prometheus metric: its name and its value."""
    measured: ClassVar[Mapping[str, str]]
    """Metrics of the server's load, and their names in a run."""

    async def is_ready(self, client: Client) -> bool:
        """Return whether the server replies and its model is loaded."""
        try:
            await client.get(self.health[0], seconds=self.health[1])
        except RefusedError as error:
            if error.status in (401, 403):
                raise
            return False
        return True

    async def about(self, client: Client) -> ServerInfo:
        """Return the server's description of itself."""
        raise NotImplementedError

    async def load(self, client: Client, name: str, adapter: PeftAdapter, folder: Path | None, ranks: int) -> None:
        """Load an adapter under a new name: from `folder`, where it was written, or as tensors for each of `ranks`."""
        raise NotImplementedError

    async def unload(self, client: Client, name: str) -> None:
        """Unload an adapter."""
        raise NotImplementedError

    async def generate(
        self, client: Client, requests: Sequence[Request], adapter: str | None, stop_ids: Sequence[int]
    ) -> list[Completion]:
        """Return one completion of each request, in order, by the adapter or the base model."""
        raise NotImplementedError

    def naming(self, adapter: str | None, base: str) -> Mapping[str, Any]:
        """Return the fields of an OpenAI-style request that select an adapter of the model `base`, or the model."""
        raise NotImplementedError

    async def metrics(self, client: Client) -> Mapping[str, float]:
        """Return the server's load; the first rank's, if there are several. Skips invalid values."""
        found: dict[str, float] = {}
        for name, value in self.metric.findall(await client.text("/metrics")):
            if name in self.measured:
                with contextlib.suppress(ValueError):
                    found.setdefault(self.measured[name], float(value))
        return found


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of concurrent coroutines; where one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failed:
        raise first_error(failed) from None
    return [task.result() for task in tasks]


def first_error(failed: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first RefusedError of a group, or its first error."""
    leaves = [first_error(e) if isinstance(e, BaseExceptionGroup) else e for e in failed.exceptions]
    return next((e for e in leaves if isinstance(e, RefusedError)), leaves[0])


def as_object(value: Any) -> dict[str, Any]:
    """Return a JSON object; an empty one for any other value."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a JSON array; an empty one for any other value."""
    return cast(list[Any], value) if isinstance(value, list) else []


def checked_ids(value: Any, request: Request, where: str) -> tuple[int, ...]:
    """Return the token ids of a completion. Raises LostError for none, for invalid ones, and for too many."""
    ids = as_list(value)
    if not ids or not all(type(t) is int and 0 <= t < 2**31 for t in ids):
        raise LostError(f"{where} returns no token ids: {str(value)[:80]!r}")
    if len(ids) > request.sampling.max_tokens:
        raise LostError(f"{where} returns {len(ids)} tokens for max_tokens {request.sampling.max_tokens}")
    return tuple(ids)


def checked_logprobs(values: Any, count: int, where: str) -> tuple[float, ...]:
    """Return the log-probabilities of `count` tokens; -inf is valid. Raises LostError."""
    if not isinstance(values, list) or len(cast(list[Any], values)) != count:
        raise LostError(f"{where} does not return the log-probabilities of {count} tokens")
    for value in cast(list[Any], values):
        is_number = (type(value) is float and value == value) or (type(value) is int and abs(value) < 2**53)
        if not is_number or value >= 1e-3:
            raise LostError(f"{where} returns invalid log-probabilities: {str(values)[:80]!r}")
    return tuple(min(0.0, float(value)) for value in cast(list[Any], values))


def checked_reason(value: Any, where: str) -> FinishReason:
    """Return why a completion ended. Raises LostError for another reason than stop and length: it is incomplete."""
    if value in ("stop", "length"):
        return value
    raise LostError(f"{where} ends a completion early ({str(value)[:80]!r}); it is not scored")
