# SPDX-License-Identifier: Apache-2.0
"""HTTP requests, of every client in this package: replies are bounded in size and time, and never decompressed."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import ssl
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import httpx

from evoalign.errors import EvoalignError, cut, plain

T = TypeVar("T")
KEPT = 2.0
"""Seconds for which an idle connection is reused: servers close it after 5, and a request at that moment is lost."""
LAST = 2.0
"""Seconds that closing a client waits for its executor."""
LEAST_KEY = 8
"""Characters of a key that is hidden in replies: a shorter one may be a part of any word."""
WORDS = 300
"""Characters of an error that are kept."""


class RequestError(EvoalignError):
    """A request without a whole reply. `is_sent`: the server may have received it."""

    def __init__(self, message: str, *, is_sent: bool) -> None:
        super().__init__(message)
        self.is_sent = is_sent


class ReplyError(EvoalignError):
    """A reply that is compressed, or larger than the client accepts."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply, without the key of the client."""

    status: int
    headers: httpx.Headers
    body: bytes


class HttpClient:
    """Sends requests to one address, without following redirections. `aclose` it in the event loop of its requests.

    `key` is sent with each request, and hidden where a reply repeats it. `connect` limits the seconds to connect.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        most_bytes: int,
        *,
        connect: float | None = None,
        verify: ssl.SSLContext | bool = True,
        trust_env: bool = False,
    ) -> None:
        self._url, self._most_bytes = url, most_bytes
        forms = set[str]() if key is None or len(key) < LEAST_KEY else {key, json.dumps(key)[1:-1]}
        self._forms = [form.encode() for form in forms | {form.replace("/", r"\/") for form in forms}]
        headers = {"Accept-Encoding": "identity", **({} if key is None else {"Authorization": f"Bearer {key}"})}
        # Number of connections: bounded by the callers, who have to reach a server that is busy with other requests.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=connect),
            limits=limits,
            verify=verify,
            trust_env=trust_env,
        )

    async def send(self, method: str, path: str, body: bytes | None = None, *, seconds: float | None) -> Reply:
        """Return the whole reply to a request with a body of JSON, or none. Raises RequestError, ReplyError.

        Raises TimeoutError `seconds` after the call, whether the server accepts no connection, or sends header lines,
        interim responses or a body without end.
        """
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.stream(method, path, content=body, headers=headers) as response,
            ):
                raw = await self._read(response, f"{self._url}{path}")
        except httpx.HTTPError as error:
            text = self._hidden(f"{type(error).__name__}: {error}".encode()).decode()
            is_sent = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            raise RequestError(plain(cut(text, WORDS)), is_sent=is_sent) from None  # whose text may hold the key
        found = httpx.Headers([(name, self._hidden(value)) for name, value in response.headers.raw])
        return Reply(response.status_code, found, self._hidden(raw))

    async def _read(self, response: httpx.Response, where: str) -> bytes:
        encoding = response.headers.get("Content-Encoding", "identity")
        if {part.strip().lower() for part in encoding.split(",")} - {"", "identity"}:
            shown = plain(cut(self._hidden(encoding.encode()).decode(), WORDS))
            raise ReplyError(
                f"{where} answers with Content-Encoding {shown}, which is not decompressed: have the server, or the "
                "proxy in front of it, send replies uncompressed"
            )
        raw = bytearray()  # a list of chunks would take 40 times the bytes of chunks of 1 byte
        async for part in response.aiter_raw():
            raw += part
            if len(raw) > self._most_bytes:
                raise ReplyError(f"{where} answers more than {self._most_bytes >> 20} MiB")
        return bytes(raw)

    def _hidden(self, raw: bytes) -> bytes:
        for form in self._forms:
            raw = raw.replace(form, b"***")
        return raw

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()


class LoopThread:
    """An event loop on a daemon thread, which runs the coroutines of other threads. `close` it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Return the result of a coroutine. Cancels it when interrupted, or after `seconds`: TimeoutError."""
        future = self.submit(work)
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()
            raise

    def close(self, client: HttpClient) -> None:
        """Close the client, and end the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        self.call(client.aclose())
        with contextlib.suppress(TimeoutError):  # a name that is being resolved cannot be cancelled
            self.call(self._loop.shutdown_default_executor(), LAST)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


# --- addresses -------------------------------------------------------------------------------------------------------


def parts_of(url: str) -> SplitResult | None:
    """Return the parts of an http or https address; None where it is not a valid one."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        return None
    return parts if is_one else None


def is_loopback(host: str) -> bool:
    """Return whether a host is localhost or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_here(url: str) -> bool:
    """Return whether an address leads to a loopback address of this machine."""
    parts = parts_of(url)
    return parts is not None and is_loopback(parts.hostname or "")
