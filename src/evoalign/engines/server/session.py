# SPDX-License-Identifier: Apache-2.0
"""A server that is somebody else's, with adapters of ours on it for a while. Nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from evoalign.engines.server.adapters import PeftAdapter, Shelf
from evoalign.engines.server.asking import Answer, Answers, Asker, apart
from evoalign.engines.server.client import Client
from evoalign.engines.server.dialect import Dialect, Server
from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.engines.sglang.dialect import SglangDialect
from evoalign.engines.vllm_server.dialect import VllmDialect
from evoalign.errors import ConfigError, EvoalignError
from evoalign.http import is_here

Kind: TypeAlias = Literal["sglang", "vllm"]
SERVES = {"sglang": "SGLang", "vllm": "vLLM"}
PATIENCE = 30.0
"""Seconds that a load which was interrupted has to end, so that it can be undone."""
FAREWELL = 10.0
"""Seconds within which an adapter is let go of."""


class Session:
    """Loads adapters under names that were never used, asks `prompts` of them, and unloads them, whatever happens.

    `folder` is one that the server sees, too; None: in memory, and where an SGLang server does not see that, tensors.
    """

    def __init__(
        self, client: Client, kind: Kind, asker: Asker, server: Server, prompts: Sequence[str], folder: Path | None
    ) -> None:
        self.client, self.kind, self.asker, self.server = client, kind, asker, server
        self.prompts = list(prompts)
        here = is_here(client.url)
        self._may_send = kind == "sglang" and folder is None
        self.by_files = not self._may_send or here
        self._shelf = Shelf(None if folder is None else str(folder), "--folder")
        self._run, self._serial = secrets.token_hex(4), itertools.count()
        self._loaded: dict[str, bool] = {}
        """Names that the server may have; True: it said so."""
        self._loading: Future[None] | None = None

    @property
    def dialect(self) -> Dialect:
        return self.asker.dialect

    @property
    def what(self) -> str:
        """The server's name and version, as people know it."""
        return f"{SERVES[self.kind]} {self.server.version}"

    def name(self) -> str:
        """One that was never used."""
        return f"evoalign-canary-{self._run}-{next(self._serial)}"

    # --- adapters ----------------------------------------------------------------------------------------------------

    @contextmanager
    def loaded(self, adapter: PeftAdapter, name: str | None = None, place: str | None = None) -> Generator[str]:
        """Its name, while the server has it. `place` names its folder. Raises RefusedError, LostError."""
        name, place = name or self.name(), place or self.name()
        try:
            self._load(adapter, name, place)
            yield name
        finally:
            self._unload(name)
            self._shelf.drop(place)

    def _load(self, adapter: PeftAdapter, name: str, place: str) -> None:
        if self.by_files:
            try:
                self._send(adapter, name, self._shelf.put(place, adapter))
                self._may_send = False
                return
            except RefusedError:
                self._shelf.drop(place)
                if not self._may_send:
                    raise
        self._send(adapter, name, None)
        self.by_files = False

    def _send(self, adapter: PeftAdapter, name: str, folder: Path | None) -> None:
        self._loaded.setdefault(name, False)
        work = self.dialect.load(self.client, name, adapter, folder, self.server.ranks)
        self._loading = self.client.submit(work)
        self._loading.result()
        self._loading, self._loaded[name] = None, True

    def _unload(self, name: str) -> None:
        """Also of a load that was interrupted, or refused. What may still be there is tried again at the end."""
        loading, self._loading = self._loading, None
        if loading is not None:
            with contextlib.suppress(EvoalignError, LateError):
                loading.result(PATIENCE)
                self._loaded[name] = True
        if name not in self._loaded:
            return
        try:
            self.client.submit(self.dialect.unload(self.client, name)).result(FAREWELL)
        except RefusedError:
            if self._loaded[name]:
                return
        except (EvoalignError, LateError):
            self._loaded[name] = False
            return
        del self._loaded[name]

    # --- answers -----------------------------------------------------------------------------------------------------

    def ask(self, name: str | None, asker: Asker | None = None) -> Answers:
        """All prompts at once, of the adapter of that name or the base model."""
        return self.client.call((asker or self.asker).answers(self.prompts, name))

    def answers(self, adapter: PeftAdapter) -> Answers:
        """Of an adapter that is loaded for it."""
        with self.loaded(adapter) as name:
            return self.ask(name)

    def at_once(self, names: Sequence[str | None]) -> list[Answers]:
        """Of several adapters in the same batches."""

        async def ask() -> list[Answer]:
            prompts = [(prompt, name) for prompt in self.prompts for name in names]
            return list(await asyncio.gather(*(self.asker.answer(*pair) for pair in prompts)))

        said = self.client.call(ask())
        return [tuple(said[place :: len(names)]) for place in range(len(names))]

    def noise(self, name: str | None, said: Answers) -> float:
        """How far equal weights answer apart: the same prompts one by one, and twice at once in another order."""
        alone = tuple(self.client.call(self.asker.answer(prompt, name)) for prompt in self.prompts)
        crowd = self.at_once([name, name, name])
        return max(apart(said, other) for other in (alone, *crowd))

    def drop_refused(self) -> None:
        """Leave out prompts that are too long for the server. Raises the refusal where none is left."""
        kept: list[str] = []
        refused: RefusedError | None = None
        for prompt in self.prompts:
            try:
                self.client.call(self.asker.answer(prompt, None))
                kept.append(prompt)
            except RefusedError as error:
                if error.status in (401, 403):
                    raise
                refused = error
        if not kept and refused is not None:
            raise refused
        self.prompts = kept

    def close(self) -> list[str]:
        """Unload and delete all that is left; the names that the server may have nevertheless."""
        for name in list(self._loaded):
            self._unload(name)
        self._shelf.close()
        return list(self._loaded)


async def kind_of(client: Client) -> Kind:
    """What a server is, by its own list of models, or by a call that one kind alone has. Raises EvoalignError."""
    for row in await _models(client):
        if row.get("owned_by") in SERVES:
            return cast(Kind, row["owned_by"])
    for path, kind in (("/server_info", "sglang"), ("/get_server_info", "sglang"), ("/version", "vllm")):
        with contextlib.suppress(RefusedError):
            if isinstance(await client.get(path), dict):
                return cast(Kind, kind)
    raise ConfigError(f"{client.url} does not say whether it is SGLang or vLLM; set --server")


async def base_of(client: Client) -> str | None:
    """The name of the served model: the first that is no adapter of another."""
    rows = [row for row in await _models(client) if not row.get("parent") and isinstance(row.get("id"), str)]
    return rows[0]["id"] if rows else None


async def _models(client: Client) -> list[dict[str, Any]]:
    try:
        said = await client.get("/v1/models")
    except RefusedError as error:
        if error.status in (401, 403):
            raise
        return []
    rows = cast(dict[str, Any], said).get("data") if isinstance(said, dict) else None
    if not isinstance(rows, list):
        raise LostError(f"{client.url}/v1/models names no model: {str(said)[:80]!r}")
    return [row for row in cast(list[Any], rows) if isinstance(row, dict)]


def dialect_of(kind: Kind) -> Dialect:
    """The words of a kind of server."""
    return SglangDialect() if kind == "sglang" else VllmDialect()
