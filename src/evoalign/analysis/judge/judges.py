# SPDX-License-Identifier: Apache-2.0
"""The judge interface, and a judge behind an OpenAI-compatible `/chat/completions` endpoint.

Temporary failures are retried: no connection, a timeout, status 408, 425, 429 or 5xx, and responses that are not a chat
completion. If all attempts fail, the judgment is recorded without scores. Errors that every request would get (the key,
the URL, the model name) raise JudgeError.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from evoalign.config.reading import parse
from evoalign.errors import ConfigError, DataError, JudgeError, cut, plain
from evoalign.http import HttpClient, ReplyError, RequestError, is_loopback, parts_of

RETRIED = frozenset({408, 409, 425, 429})
"""Status codes to retry, besides all from 500 on."""
FATAL = {
    401: "the key is not accepted: check --key-env",
    402: "the account has no credit left",
    403: "the key has no permission: check --key-env",
    404: "no such model or URL: check --endpoint and --judge-model",
    405: "the URL does not accept POST: check --endpoint",
}
"""Status codes that every request would get, and what to check."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before the second attempt, doubled for each further one, and the maximum."""
MOST_BYTES = 2**22
"""Largest response that is read."""
MAX_QUOTED = 300
"""Characters of a response that are quoted in an error."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A judge's output; `is_cut` if it hit the token limit, so that its last line may be incomplete."""

    text: str
    is_cut: bool


class NoReplyError(Exception):
    """The judge gave no output for a prompt; the message says why and is recorded in place of the output."""


class NoRoomError(NoReplyError):
    """The prompt does not fit into the judge's context; this does not count as a failing judge."""


class Judge(Protocol):
    """A model that compares two answers; at most `concurrency` prompts are sent at once."""

    name: str
    concurrency: int

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Return a context that holds connections while prompts are sent."""
        ...

    async def ask(self, prompt: str) -> Reply:
        """Return the judge's output. Raises NoReplyError, JudgeError."""
        ...

    def redacted(self, text: str) -> str:
        """Return a text without secrets, as it may be written to disk."""
        ...


class Endpoint:
    """One model at one URL. `key` is sent with each request and never printed; `timeout` is in seconds."""

    def __init__(
        self, url: str, model: str, key: str | None, *, max_tokens: int, timeout: float, retries: int, concurrency: int
    ) -> None:
        self.url, is_local = checked(url)
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() and " " not in key):
            raise ConfigError(
                "--key-env: the variable has a character that keys do not have, perhaps a line break at the end; "
                "set it to the key alone"
            )
        self._encrypted = self.url.startswith("https:")
        if key is not None and not self._encrypted and not is_local:
            raise ConfigError(
                f"--endpoint {self.url} is not encrypted, so the key would be readable on the network; use https, "
                "a local address, or no --key-env"
            )
        self.name, self.concurrency = model, concurrency
        self._key, self._max_tokens, self._timeout, self._retries = key, max_tokens, timeout, retries
        self._http: HttpClient | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Hold the connections. Proxies from the environment are used for https only, which they cannot read."""
        self._http = HttpClient(self.url, self._key, MOST_BYTES, trust_env=self._encrypted)
        async with aclosing(self._http):
            yield

    async def ask(self, prompt: str) -> Reply:
        """Send a prompt, with retries. Raises NoReplyError if all attempts fail, JudgeError for a fatal status."""
        assert self._http is not None
        message = {"role": "user", "content": prompt}
        tree = {"model": self.name, "messages": [message], "temperature": 0, "max_tokens": self._max_tokens}
        body = json.dumps(tree).encode()
        wait, why, after = FIRST_WAIT, "", None
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(LONGEST_WAIT, wait * random.uniform(0.5, 1.5) if after is None else after))
                wait *= 2
            after = None
            try:
                reply = await self._http.send("POST", "/chat/completions", body, seconds=self._timeout)
            except TimeoutError:
                why = f"no response within {self._timeout:g} s"
                continue
            except (RequestError, ReplyError) as error:
                why = str(error)
                continue
            status, after = reply.status, _seconds(reply.headers.get("Retry-After", ""))
            if 200 <= status < 300:
                try:
                    return _completion(reply.body)
                except DataError as error:
                    why = str(error).rstrip("; ")
                    continue
            why = f"status {status}: {_start(reply.body)}"
            if status in FATAL or 300 <= status < 400:
                mend = FATAL.get(status, "the server redirects: give the URL it redirects to")
                raise JudgeError(f"{self.url} refused a request ({self._short(why)}); {mend}; then rerun the command")
            if status < 500 and status not in RETRIED:
                raise NoReplyError(self._short(why))
        raise NoReplyError(self._short(f"no reply in {self._retries + 1} attempts; the last: {why}"))

    def redacted(self, text: str) -> str:
        """Return a text without the key, which an endpoint may echo."""
        return text if self._key is None else text.replace(self._key, "***")

    def _short(self, text: str) -> str:
        return plain(cut(self.redacted(text), 2 * MAX_QUOTED))


def checked(url: str) -> tuple[str, bool]:
    """Return the base URL, with `/v1` if it has no path, and whether it is local. Raises ConfigError."""
    parts = parts_of(url)
    if "@" in (url if parts is None else parts.netloc):
        raise ConfigError("--endpoint contains a user name or password; give the key with --key-env NAME")
    if parts is None or parts.query:
        raise ConfigError(f"--endpoint {url!r} is not a valid URL; give one such as http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}", is_loopback(parts.hostname or "")


def _completion(raw: bytes) -> Reply:
    tree: Any = parse(raw, "the response", "")
    try:
        choice = tree["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise DataError(f"the response is not a chat completion: {_start(raw)}") from None
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"the response has no text: {_start(raw)}")
    return Reply(text, reason == "length")


def _seconds(after: str) -> float | None:
    return float(after) if after.isascii() and after.isdecimal() and len(after) < 9 else None


def _start(raw: bytes) -> str:
    return cut(" ".join(raw[: 4 * MAX_QUOTED].decode("utf-8", "replace").split()), MAX_QUOTED) or "empty"
