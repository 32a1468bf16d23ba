# SPDX-License-Identifier: Apache-2.0
"""A client of one server: bounded, kept-alive HTTP on a thread of its own, so that a whole population is in flight.

What a server says is checked here to be JSON and elsewhere to be what was asked for: `LostError` is of a server that
is to be started again, `RefusedError` of one that is well and says no. Neither message holds the key.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx

from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.errors import ConfigError, cut, plain

T = TypeVar("T")
CONNECT = 10.0
"""Seconds within which a server has to take a connection."""
SHORT = 30.0
"""Seconds within which what needs no model is answered."""
KEPT = 2.0
"""Seconds that an idle connection is used again: servers close it after 5, and a request at that moment is lost."""
MOST_BYTES = 2**30
"""Of one answer: more is no answer."""
WORDS = 400
"""Characters of a server's refusal that are shown."""


class Client:
    """Asks one server. `key` goes with each request; `ca_file` is what an https address is checked by.

    `close` it. Its methods may be called from any thread but its own; `post` and `get` are for coroutines on it.
    """

    def __init__(self, url: str, key: str | None = None, *, ca_file: str | None = None, concurrency: int = 256) -> None:
        self.url = url.rstrip("/")
        self._key, self._concurrency = key, concurrency
        try:
            self._verify = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"engine.ca_file: {ca_file} holds no certificates ({error})") from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="evoalign-client", daemon=True)
        self._thread.start()
        self._http: httpx.AsyncClient = self.call(self._open())

    async def _open(self) -> httpx.AsyncClient:
        """No proxy, no `.netrc`: the address that was given is the one that is asked."""
        most = self._concurrency + 8
        limits = httpx.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=KEPT)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        timeout = httpx.Timeout(SHORT, connect=CONNECT, pool=None)
        return httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=timeout, verify=self._verify, trust_env=False
        )

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the client's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine comes to; it is cancelled where the wait is interrupted."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def post(self, path: str, body: Any, *, seconds: float | None = SHORT) -> Any:
        """The JSON that the server answers; None for an empty answer. Raises LostError, RefusedError."""
        return await self._ask("POST", path, body, seconds)

    async def get(self, path: str, *, seconds: float | None = SHORT) -> Any:
        """As `post`."""
        return await self._ask("GET", path, None, seconds)

    async def text(self, path: str, body: Any = None, *, seconds: float | None = SHORT) -> str:
        """An answer that is no JSON, such as metrics; to a POST where there is a body. Raises as `post` does."""
        method = "GET" if body is None else "POST"
        return (await self._answer(method, path, body, seconds)).decode("utf-8", "replace")

    async def _ask(self, method: str, path: str, body: Any, seconds: float | None) -> Any:
        raw = await self._answer(method, path, body, seconds)
        if not raw.strip():
            return None
        try:
            return json.loads(raw, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise LostError(f"{self.url}{path} answers what is no JSON: {shown(raw)}") from error

    async def _answer(self, method: str, path: str, body: Any, seconds: float | None) -> bytes:
        timeout = httpx.Timeout(seconds, connect=CONNECT, pool=None)
        try:
            async with self._http.stream(method, path, json=body, timeout=timeout) as response:
                raw = await _read(response)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise LostError(f"{self.url}{path} does not answer: {plain(cut(why, WORDS))}") from error
        if response.status_code in (401, 403):
            raise RefusedError(f"{self.url}{path} wants a key: set engine.key_variable", response.status_code)
        if response.status_code >= 500 or response.is_redirect:
            raise LostError(f"{self.url}{path} fails with status {response.status_code}: {shown(raw)}")
        if response.status_code >= 400:
            raise RefusedError(f"{self.url}{path} refuses: {shown(raw)}", response.status_code)
        return raw

    def close(self) -> None:
        """End all that is in flight, and the thread."""
        if self._loop.is_closed():
            return
        self.call(self._http.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def shown(raw: bytes) -> str:
    """What a server said, as one short line of plain characters; of an error in JSON its message."""
    text = raw[: 4 * WORDS].decode("utf-8", "replace")
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):
        tree = None
    while isinstance(tree, dict):
        found = next((tree[name] for name in ("error_message", "message", "error", "detail") if tree.get(name)), None)
        if found is None:
            break
        tree, text = found, found if isinstance(found, str) else json.dumps(found)
    return plain(cut(" ".join(text.split()), WORDS)) or "nothing"


async def _read(response: httpx.Response) -> bytes:
    parts, size = list[bytes](), 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MOST_BYTES:
            raise LostError(f"{response.url} answers more than {MOST_BYTES // 2**20} MiB")
        parts.append(part)
    return b"".join(parts)


def _no_number(name: str) -> float:
    """Of NaN and Infinity, which JSON does not have and Python reads: log-probabilities may be -Infinity."""
    return float("-inf") if name == "-Infinity" else float("nan")
