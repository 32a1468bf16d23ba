# SPDX-License-Identifier: Apache-2.0
"""A client of one server: bounded, kept-alive HTTP on a thread of its own, so that a whole population is in flight.

What a server says is checked here to be JSON and elsewhere to be what was asked for: `LostError` is of a server that
is to be started again, `RefusedError` of one that is well and says no. No message holds the key, whatever is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx

from evoalign.config.addresses import parts_of
from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.errors import ConfigError, cut, plain

T = TypeVar("T")
CONNECT = 10.0
"""Seconds within which a server has to take a connection."""
SHORT = 30.0
"""Seconds within which what needs no model is answered."""
KEPT = 2.0
"""Seconds that an idle connection is used again: servers close it after 5, and a request at that moment is lost."""
MOST_BYTES = 2**28
"""Of one answer: more is no answer."""
RETRIES, BACKOFF = 3, 0.5
"""How often a request is sent again, and the seconds before the first time, which then double."""
BUSY = frozenset({408, 425, 429, 502, 503, 504})
"""What is answered by a server, or a proxy before it, that may be well in a moment."""
WORDS = 400
"""Characters of a server's refusal that are shown."""


class Client:
    """Asks one server. `key` goes with each request; `ca_file` is what an https address is checked by.

    `close` it. Its methods may be called from any thread but its own; `post` and `get` are for coroutines on it.
    """

    def __init__(self, url: str, key: str | None = None, *, ca_file: str | None = None, concurrency: int = 256) -> None:
        """At most `concurrency` completions are in flight at once. Raises ConfigError for what no request can hold."""
        self.url = checked_url(url)
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(
                f"the key for {self.url} has a character that is none of a key's (a line break at its end?): set its "
                "variable to the key alone"
            )
        self._key, self._room = key, asyncio.Semaphore(concurrency)
        try:
            self._verify = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"engine.ca_file: {ca_file} holds no certificates ({error})") from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="evoalign-client", daemon=True)
        self._thread.start()
        self._http: httpx.AsyncClient = self.call(self._open())

    async def _open(self) -> httpx.AsyncClient:
        """No proxy, no `.netrc`: the address that was given is the one that is asked.

        Connections are not bounded: completions are, and whether the server is well has to be asked beside these.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        return httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, verify=self._verify, trust_env=False
        )

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the client's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """What a coroutine comes to; it is cancelled where the wait is interrupted. LostError after `seconds`."""
        future = self.submit(work)
        try:
            return future.result(seconds)
        except BaseException as error:
            is_late = isinstance(error, TimeoutError) and not future.done()
            future.cancel()
            if is_late:
                raise LostError(f"{self.url} does not answer within {seconds:g} s") from error
            raise

    async def post(self, path: str, body: Any, *, seconds: float | None = SHORT) -> Any:
        """The JSON that the server answers; None for an empty answer. Raises LostError, RefusedError.

        `seconds` are for the whole answer; None is for completions, which take what they take.
        """
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
        """Sent again, a few times, where the server was not reached or is busy."""
        content = None if body is None else await asyncio.to_thread(_encoded, body)
        tries = 0
        while True:
            try:
                async with self._room if seconds is None else contextlib.nullcontext():
                    return await self._once(method, path, content, seconds)
            except _AgainError as error:
                if tries == RETRIES:
                    raise LostError(str(error)) from error
            await asyncio.sleep(BACKOFF * 2**tries)
            tries += 1

    async def _once(self, method: str, path: str, content: bytes | None, seconds: float | None) -> bytes:
        where = f"{self.url}{path}"
        headers = {} if content is None else {"Content-Type": "application/json"}
        timeout = httpx.Timeout(None, connect=CONNECT)
        try:
            async with asyncio.timeout(seconds):
                async with self._http.stream(
                    method, path, content=content, headers=headers, timeout=timeout
                ) as response:
                    raw = self._hidden(await _read(response))
        except TimeoutError as error:
            raise LostError(f"{where} does not answer within {seconds:g} s") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _AgainError(f"{where} does not answer: {_why(error)}") from error
        except httpx.HTTPError as error:
            # What is asked for may be done already: a completion is the same twice, an adapter is not loaded twice.
            kind = _AgainError if seconds is None or method == "GET" else LostError
            raise kind(f"{where} does not answer: {_why(error)}") from error
        status = response.status_code
        if status in (401, 403):
            what = "wants a key: set" if self._key is None else "refuses the key that it is given: see"
            raise RefusedError(f"{where} {what} engine.key_variable", status)
        if status in BUSY:
            raise _AgainError(f"{where} fails with status {status}: {shown(raw)}")
        if status >= 500 or response.is_redirect:
            raise LostError(f"{where} fails with status {status}: {shown(raw)}")
        if status >= 400:
            raise RefusedError(f"{where} refuses: {shown(raw)}", status)
        return raw

    def _hidden(self, raw: bytes) -> bytes:
        """Without the key, which a server or a proxy may say again; one of a few signs may be a part of anything."""
        return raw if self._key is None or len(self._key) < 8 else raw.replace(self._key.encode(), b"***")

    def close(self) -> None:
        """End all that is in flight, and the thread."""
        if self._loop.is_closed():
            return
        self.call(self._http.aclose())
        self.call(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _AgainError(Exception):
    """Of a request that may be sent again."""


def checked_url(url: str) -> str:
    """Without `/v1` at its end, which clients of OpenAI's write. Raises ConfigError for what is no server's address."""
    if "@" in url or parts_of(url) is None:
        raise ConfigError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:30000")
    return url.rstrip("/").removesuffix("/v1")


def _why(error: Exception) -> str:
    return plain(cut(str(error) or type(error).__name__, WORDS))


def _encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


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
