# SPDX-License-Identifier: Apache-2.0
"""What passes between this process and a server in one rollout: adapters go, all requests of all members are in flight,
answers come back as they are ready.

Adapters are made and loaded while members that came before answer already, as many at once as the server has slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from enum import Enum
from threading import Event
from typing import TypeAlias

from evoalign.engines.server.adapters import PeftAdapter, Shelf
from evoalign.engines.server.client import Client
from evoalign.engines.server.dialect import Dialect, Said, first_of, together
from evoalign.errors import EvoalignError
from evoalign.types import Member, Request

POLL = 0.2
"""Seconds after which it is told that nothing is new."""
AT_ONCE = 8
"""Members whose adapters are made in one go."""
LOADS = 4
"""Adapters that are loaded at once: servers take one after the other."""
FAREWELL = 15.0
"""Seconds within which an adapter is let go of: a server first notices that nobody waits for its answers any more."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer, of a member to a request."""

    member: Member
    request: Request
    said: Said


class Progress(Enum):
    """What comes beside answers."""

    LOADED = "loaded"
    END = "end"


Out: TypeAlias = "queue.SimpleQueue[Heard | Progress]"


@dataclass(frozen=True, slots=True)
class Traffic:
    """`by_files`: adapters lie on the `shelf` for the server to read; else they go to each of its `ranks` as tensors.

    `name` gives a member a name that was never used.
    """

    client: Client
    dialect: Dialect
    shelf: Shelf
    by_files: bool
    ranks: int
    slots: int
    batch: int
    stop_ids: Sequence[int]
    name: Callable[[Member], str]

    def hear(
        self,
        pairs: Sequence[tuple[Member, Request]],
        is_bare: Callable[[Member], bool],
        adapters: Callable[[Sequence[Member]], list[PeftAdapter]],
    ) -> Generator[Heard | Progress | None]:
        """Answers as they come, and None now and then where there is nothing new. `close` it, and nothing goes on.

        Members that are `is_bare` are answered for by the served weights; of others `adapters` makes what they need.
        """
        out, ended = queue.SimpleQueue[Heard | Progress](), Event()
        work = self.client.submit(self._ask_all(pairs, is_bare, adapters, out, ended))
        try:
            while True:
                try:
                    found = out.get(timeout=POLL)
                except queue.Empty:
                    yield None
                    continue
                if found is Progress.END:
                    with contextlib.suppress(CancelledError):
                        work.result()
                    return
                yield found
        finally:
            if not work.done():
                work.cancel()
                ended.wait(FAREWELL + 1.0)

    async def _ask_all(
        self,
        pairs: Sequence[tuple[Member, Request]],
        is_bare: Callable[[Member], bool],
        adapters: Callable[[Sequence[Member]], list[PeftAdapter]],
        out: Out,
        ended: Event,
    ) -> None:
        """All members, as many at once as there are slots."""
        asked: dict[Member, list[Request]] = {}
        for member, request in pairs:
            asked.setdefault(member, []).append(request)
        room, loading = asyncio.Semaphore(self.slots), asyncio.Semaphore(LOADS)
        try:
            async with asyncio.TaskGroup() as group:
                for member in [m for m in asked if is_bare(m)]:
                    group.create_task(self._ask(member, asked.pop(member), None, out))
                members = list(asked)
                for first in range(0, len(members), AT_ONCE):
                    some = members[first : first + AT_ONCE]
                    made = await asyncio.to_thread(adapters, some)
                    for member, adapter in zip(some, made, strict=True):
                        await room.acquire()
                        group.create_task(self._ask_adapted(member, asked[member], adapter, out, room, loading))
        except BaseExceptionGroup as failed:
            raise first_of(failed) from None
        finally:
            ended.set()
            out.put(Progress.END)

    async def _ask_adapted(
        self,
        member: Member,
        requests: Sequence[Request],
        adapter: PeftAdapter,
        out: Out,
        room: asyncio.Semaphore,
        loading: asyncio.Semaphore,
    ) -> None:
        """Load one member's adapter, ask all its requests, and have it unloaded."""
        name = self.name(member)
        try:
            async with loading:
                folder = await asyncio.to_thread(self.shelf.put, name, adapter) if self.by_files else None
                await self.dialect.load(self.client, name, adapter, folder, self.ranks)
            out.put(Progress.LOADED)
            await self._ask(member, requests, name, out)
        finally:
            room.release()
            with contextlib.suppress(EvoalignError, TimeoutError):  # a server that is lost has let it go
                async with asyncio.timeout(FAREWELL):
                    await self.dialect.unload(self.client, name)
            self.shelf.drop(name)

    async def _ask(self, member: Member, requests: Sequence[Request], name: str | None, out: Out) -> None:
        async def ask(part: Sequence[Request]) -> None:
            said = await self.dialect.generate(self.client, part, name, self.stop_ids)
            for request, one in zip(part, said, strict=True):
                out.put(Heard(member, request, one))

        await together(ask(requests[first : first + self.batch]) for first in range(0, len(requests), self.batch))
