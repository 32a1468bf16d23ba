# SPDX-License-Identifier: Apache-2.0
"""A judge behind an OpenAI-compatible `/chat/completions`.

What may pass is asked again: no connection, no answer in time, 408, 425, 429, errors of the server, and answers that
are no chat completion. What is left of it then is a judgment without scores, with the reason. A refusal that every
question would meet (the key, the route, the model's name) raises.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from evoalign.analysis.judge.base import NoReplyError, Reply
from evoalign.config.reading import parse
from evoalign.errors import ConfigError, DataError, JudgeError, cut, plain
from evoalign.http import HttpClient, ReplyError, RequestError, is_loopback, parts_of
from evoalign.http import Reply as HttpReply

PASSING = frozenset({408, 409, 425, 429})
"""Refusals that may be none a moment later; so may all from 500 on."""
FINAL = {
    401: "it wants another key: see --key-env", 402: "the account has no credit left",
    403: "the key may not do this: see --key-env", 404: "it has no such model or address: see --endpoint and "
    "--judge-model", 405: "that address takes no questions: see --endpoint",
}  # fmt: skip
"""Refusals that the next question would meet as well, and where to look."""
WAIT, LONGEST = 1.0, 60.0
"""Seconds before the second attempt, which double, and at most."""
MOST_BYTES = 2**22
"""Of one answer."""
WORDS = 300
"""Characters of what an endpoint says that are kept with a judgment that it did not give."""


class Endpoint:
    """One model at one address. `key` goes with each request, and into no message; `timeout` is in seconds."""

    def __init__(
        self, url: str, model: str, key: str | None, *, max_tokens: int, timeout: float, retries: int, concurrency: int
    ) -> None:
        self.url, is_here = checked(url)
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() and " " not in key):
            raise ConfigError(
                "--key-env: the variable has a character that is none of a key's (a line break at its end?): set it to "
                "the key alone"
            )
        self._encrypted = self.url.startswith("https:")
        if key is not None and not self._encrypted and not is_here:
            raise ConfigError(
                f"--endpoint {self.url} is not encrypted, and the key would be read on the way: give an https address, "
                "one of this machine, or no --key-env"
            )
        self.name, self.concurrency = model, concurrency
        self._key, self._max_tokens, self._timeout, self._retries = key, max_tokens, timeout, retries
        self._http: HttpClient | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """While questions are asked. A proxy of the environment is used for https alone, which it cannot read."""
        self._http = HttpClient(self.url, self._key, MOST_BYTES, trust_env=self._encrypted)
        async with aclosing(self._http):
            yield

    async def ask(self, prompt: str) -> Reply:
        """What the judge says. Raises NoReplyError where it says nothing in all attempts, JudgeError for a refusal."""
        wait, why, after = WAIT, "", None
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(LONGEST, wait * random.uniform(0.5, 1.5) if after is None else after))
                wait *= 2
            try:
                reply = await self._post(prompt)
            except TimeoutError:
                why, after = f"no answer within {self._timeout:g} s", None
                continue
            except (RequestError, ReplyError) as error:
                why, after = str(error), None
                continue
            status, raw, after = reply.status, reply.body, _seconds(reply.headers.get("Retry-After", ""))
            if 200 <= status < 300:
                try:
                    return _reply(raw)
                except DataError as error:
                    why = str(error).rstrip("; ")
                    continue
            why = f"status {status}: {_start(raw)}"
            if status in FINAL or 300 <= status < 400:
                mend = FINAL.get(status, "it sends elsewhere: give the address that it leads to")
                raise JudgeError(f"{self.url} refuses ({self._hidden(why)}); {mend}; the same command then goes on")
            if status < 500 and status not in PASSING:
                raise NoReplyError(self._hidden(why))
        raise NoReplyError(self._hidden(f"no reply in {self._retries + 1} attempts; the last: {why}"))

    def hidden(self, text: str) -> str:
        """Without the key, which an endpoint may say again."""
        return text if self._key is None else text.replace(self._key, "***")

    def _hidden(self, text: str) -> str:
        return plain(cut(self.hidden(text), 2 * WORDS))

    async def _post(self, prompt: str) -> HttpReply:
        assert self._http is not None
        body = {
            "model": self.name, "messages": [{"role": "user", "content": prompt}], "temperature": 0,
            "max_tokens": self._max_tokens,
        }  # fmt: skip
        return await self._http.send("POST", "/chat/completions", json.dumps(body).encode(), seconds=self._timeout)


def checked(url: str) -> tuple[str, bool]:
    """The address without its route, `/v1` put in where it has no path, and whether it is this machine's.

    Raises ConfigError.
    """
    parts = parts_of(url)
    if "@" in (url if parts is None else parts.netloc):
        raise ConfigError("--endpoint has a name or password in it; give the key by --key-env NAME")
    if parts is None or parts.query:
        raise ConfigError(f"--endpoint {url!r} is no address; give one such as http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}", is_loopback(parts.hostname or "")


def _reply(raw: bytes) -> Reply:
    """Raises DataError for what is no chat completion."""
    tree: Any = parse(raw, "the answer", "")
    try:
        choice = tree["choices"][0]
        text, ended = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise DataError(f"the answer is no chat completion: {_start(raw)}") from None
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"the answer says nothing: {_start(raw)}")
    return Reply(text, ended == "length")


def _seconds(after: str) -> float | None:
    return float(after) if after.isascii() and after.isdecimal() and len(after) < 9 else None


def _start(raw: bytes) -> str:
    return cut(" ".join(raw[: 4 * WORDS].decode("utf-8", "replace").split()), WORDS) or "nothing"
