# SPDX-License-Identifier: Apache-2.0
"""A client of one server: kept-alive HTTP on a thread of its own, so that a whole population is in flight.

What a server says is checked here to be JSON and elsewhere to be what was asked for: `LostError` is of a server that
is to be started again, `RefusedError` of one that is well and says no. No message holds the key, whatever is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.errors import ConfigError, cut, plain
from evoalign.http import HttpClient, LoopThread, ReplyError, RequestError, parts_of

T = TypeVar("T")
CONNECT = 10.0
"""Seconds within which a server has to take a connection."""
SHORT = 30.0
"""Seconds within which what needs no model is answered."""
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
            verify = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"engine.ca_file: {ca_file} holds no certificates ({error})") from error
        self._http = HttpClient(self.url, key, MOST_BYTES, connect=CONNECT, verify=verify)
        self._loop = LoopThread("evoalign-client")

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the client's thread."""
        return self._loop.submit(work)

    def call(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """What a coroutine comes to; it is cancelled where the wait is interrupted. LostError after `seconds`."""
        try:
            return self._loop.call(work, seconds)
        except TimeoutError as error:
            if seconds is None:
                raise
            raise LostError(f"{self.url} does not answer within {seconds:g} s") from error

    async def post(self, path: str, body: Any, *, seconds: float | None = SHORT) -> Any:
        """The JSON that the server answers; None for an empty answer. Raises LostError, RefusedError.

        `seconds` are for the whole answer. None is for completions, which the engine ends by `engine.timeout`.
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
        try:
            reply = await self._http.send(method, path, content, seconds=seconds)
        except TimeoutError as error:
            raise LostError(f"{where} does not answer within {seconds:g} s") from error
        except ReplyError as error:
            raise LostError(str(error)) from error
        except RequestError as error:
            # What is asked for may be done already: a completion is the same twice, an adapter is not loaded twice.
            kind = _AgainError if seconds is None or method == "GET" or not error.is_sent else LostError
            raise kind(f"{where} does not answer: {error}") from error
        status, raw = reply.status, reply.body
        if status in (401, 403):
            what = "wants a key: set" if self._key is None else "refuses the key that it is given: see"
            raise RefusedError(f"{where} {what} engine.key_variable", status)
        if status in BUSY:
            raise _AgainError(f"{where} fails with status {status}: {shown(raw)}")
        if status >= 500 or 300 <= status < 400:
            raise LostError(f"{where} fails with status {status}: {shown(raw)}")
        if status >= 400:
            raise RefusedError(f"{where} refuses: {shown(raw)}", status)
        return raw

    def close(self) -> None:
        """End all that is in flight, and the thread."""
        self._loop.close(self._http)


class _AgainError(Exception):
    """Of a request that may be sent again."""


def checked_url(url: str) -> str:
    """Without `/v1` at its end, which clients of OpenAI's write. Raises ConfigError for what is no server's address."""
    if "@" in url or parts_of(url) is None:
        raise ConfigError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:30000")
    return url.rstrip("/").removesuffix("/v1")


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


def _no_number(name: str) -> float:
    """Of NaN and Infinity, which JSON does not have and Python reads: log-probabilities may be -Infinity."""
    return float("-inf") if name == "-Infinity" else float("nan")
