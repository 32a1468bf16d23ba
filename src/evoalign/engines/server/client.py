# SPDX-License-Identifier: Apache-2.0
"""An HTTP client of one server: requests run on a background event loop, so that a whole population is in flight.

Replies are checked to be JSON. `LostError` means that the server has to be started again, `RefusedError` that it is
well and rejects the request. No message holds the key, whatever the server replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from evoalign.errors import ConfigError, EvoalignError, ModelError, cut, plain
from evoalign.http import HttpClient, LoopThread, ReplyError, RequestError, parts_of

T = TypeVar("T")
CONNECT = 10.0
"""Seconds to connect."""
SHORT = 30.0
"""Seconds for a reply that needs no model."""
MOST_BYTES = 2**28
"""Maximum size of a reply."""
RETRIES, BACKOFF = 3, 0.5
"""How often a request is repeated, and the seconds before the first time, which then double."""
BUSY = frozenset({408, 425, 429, 502, 503, 504})
"""Status codes of a server, or a proxy in front of it, that may be available in a moment."""
WORDS = 400
"""Characters of a server's error that are shown."""


class RefusedError(ModelError):
    """The server rejects a request: an adapter that it does not know, a setting that it lacks."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class LostError(EvoalignError):
    """The server cannot be reached, does not reply in time, or replies with something invalid, which is not scored."""


class _AgainError(Exception):
    """A request that may be repeated failed."""


class Client:
    """Sends requests to one server. `key` is sent with each; `ca_file` holds certificates for an https address.

    `close` it. `submit` and `call` are for any thread but its own; the coroutines are for these two.
    """

    def __init__(self, url: str, key: str | None = None, *, ca_file: str | None = None, concurrency: int = 256) -> None:
        """`concurrency` limits the completions in flight. Raises ConfigError for an invalid address, key or file.

        `/v1` at the end of `url`, which OpenAI's clients expect, is removed.
        """
        if "@" in url or parts_of(url) is None:
            raise ConfigError(f"{url!r} is not the address of a server; give one such as http://127.0.0.1:30000")
        self.url, self.key = url.rstrip("/").removesuffix("/v1"), key
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(
                f"the key for {self.url} holds a space, a line break or another character that keys do not have; set "
                "its variable to the key alone"
            )
        self._completions = asyncio.Semaphore(concurrency)
        try:
            verify = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"engine.ca_file: {ca_file} holds no certificates ({error})") from error
        self._http = HttpClient(self.url, key, MOST_BYTES, connect=CONNECT, verify=verify)
        self._loop = LoopThread("evoalign-client")

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the client's event loop."""
        return self._loop.submit(work)

    def call(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Return the result of a coroutine. Cancels it when interrupted, or after `seconds`: LostError."""
        try:
            return self._loop.call(work, seconds)
        except TimeoutError as error:
            if seconds is None:
                raise
            raise LostError(f"{self.url} does not answer within {seconds:g} s") from error

    async def post(self, path: str, body: Any, *, seconds: float | None = SHORT) -> Any:
        """Return the JSON of a reply; None for an empty one. Raises LostError, RefusedError.

        `seconds` limit the whole reply. None is for completions, which the engine limits by `engine.timeout`.
        """
        return self._parsed(path, await self._send("POST", path, body, seconds))

    async def get(self, path: str, *, seconds: float | None = SHORT) -> Any:
        """Return the JSON of a reply, as `post` does."""
        return self._parsed(path, await self._send("GET", path, None, seconds))

    async def text(self, path: str, body: Any = None, *, seconds: float | None = SHORT) -> str:
        """Return a reply that is not JSON, such as metrics; sends a POST where there is a body. Raises as `post`."""
        return (await self._send("GET" if body is None else "POST", path, body, seconds)).decode("utf-8", "replace")

    def _parsed(self, path: str, raw: bytes) -> Any:
        if not raw.strip():
            return None
        try:
            return json.loads(raw, parse_constant=_constant)
        except (ValueError, RecursionError) as error:
            raise LostError(f"{self.url}{path} does not reply with JSON: {shown(raw)}") from error

    async def _send(self, method: str, path: str, body: Any, seconds: float | None) -> bytes:
        """Return a reply, repeating the request a few times where the server was not reached or is busy."""
        content = None if body is None else await asyncio.to_thread(lambda: json.dumps(body).encode())
        tries = 0
        while True:
            try:
                async with self._completions if seconds is None else contextlib.nullcontext():
                    return await self._send_once(method, path, content, seconds)
            except _AgainError as error:
                if tries == RETRIES:
                    raise LostError(str(error)) from error
            await asyncio.sleep(BACKOFF * 2**tries)
            tries += 1

    async def _send_once(self, method: str, path: str, content: bytes | None, seconds: float | None) -> bytes:
        where = f"{self.url}{path}"
        try:
            reply = await self._http.send(method, path, content, seconds=seconds)
        except TimeoutError as error:
            raise LostError(f"{where} does not answer within {seconds:g} s") from error
        except ReplyError as error:
            raise LostError(str(error)) from error
        except RequestError as error:
            # The server may have received it: a completion is the same twice, but an adapter cannot be loaded twice.
            kind = _AgainError if seconds is None or method == "GET" or not error.is_sent else LostError
            raise kind(f"{where} does not answer: {error}") from error
        status, raw = reply.status, reply.body
        if status in (401, 403):
            what = "requires a key: set" if self.key is None else "rejects the key of"
            raise RefusedError(f"{where} {what} engine.key_variable", status)
        if status in BUSY:
            raise _AgainError(f"{where} fails with status {status}: {shown(raw)}")
        if status >= 500 or 300 <= status < 400:
            raise LostError(f"{where} fails with status {status}: {shown(raw)}")
        if status >= 400:
            raise RefusedError(f"{where} refuses: {shown(raw)}", status)
        return raw

    def close(self) -> None:
        """Close all connections, and end the event loop."""
        self._loop.close(self._http)


def shown(raw: bytes) -> str:
    """Return a reply in one short line of printable characters; of a JSON error its message."""
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


def _constant(name: str) -> float:
    """Parse the constants that JSON lacks and Python reads: log-probabilities may be -Infinity."""
    return float("-inf") if name == "-Infinity" else float("nan")
