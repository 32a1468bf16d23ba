# SPDX-License-Identifier: Apache-2.0
"""What stands before a service: whom it answers, and how much it reads.

Without a token it answers on the loopback address alone, and under its own names: a web page of a stranger, open in a
browser here, can have a name of its own lead there (DNS rebinding). A body is read whole and bounded before anything
looks at it, whether its length is announced or not.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

NAMES = ("localhost", "127.0.0.1", "[::1]")
"""What this machine may be called. A port may be another than ours: it may be brought here through a tunnel."""
BODY_SECONDS = 30.0
"""That a body may take to arrive."""
DRAINED = 1 << 24
"""Bytes of a body that is too long which are read and dropped, so that who sends them reads why."""


class Guard:
    """An ASGI application before another. `names`: the hosts it is asked for; None: any."""

    def __init__(self, app: App, *, token: str | None, names: Iterable[str] | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._token = None if token is None else f"Bearer {token}".encode()
        self._names = None if names is None else frozenset(names)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, or let the other do so."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError("a scorer answers HTTP alone")
        if not self._is_for_us(scope):
            await _say(send, 421, "this is not that host; ask for the address that the service was started with")
            return
        if not self._may(scope):
            await _say(send, 401, "a bearer token is needed, the one of the service", ("www-authenticate", "Bearer"))
            return
        if scope["method"] == "POST" and not _header(scope, b"content-type").lower().startswith(b"application/json"):
            await _say(send, 415, "send JSON, as application/json")
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(scope, receive)
        except TimeoutError:
            await _say(send, 408, f"the body did not arrive within {BODY_SECONDS:g} s")
            return
        if body is None:
            await _say(send, 413, f"a body has at most {self._max_body} bytes; send fewer pairs, or raise --max-body")
            return
        await self._app(scope, _replayed(body, receive), send)

    def _is_for_us(self, scope: Message) -> bool:
        if self._names is None:
            return True
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1:
            return False
        host = hosts[0].decode("latin-1").lower()
        name, _, port = host.partition("]:") if host.startswith("[") else host.partition(":")
        name = f"{name.removesuffix(']')}]" if host.startswith("[") else name
        return name in self._names and (port == "" or (port.isascii() and port.isdecimal()))

    def _may(self, scope: Message) -> bool:
        """In a time that does not depend on how much of the token is right."""
        return self._token is None or hmac.compare_digest(_header(scope, b"authorization"), self._token)

    async def _read(self, scope: Message, receive: Receive) -> bytes | None:
        """The whole body; None where it is too long."""
        announced = _header(scope, b"content-length")
        too_long = announced.isdigit() and int(announced) > self._max_body
        parts, size, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            too_long = too_long or size > self._max_body
            if not too_long:
                parts.append(part)
            elif size > DRAINED:
                break
        return None if too_long else b"".join(parts)


def _header(scope: Message, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A receiver of the body that was read, and then of what comes after it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _say(send: Send, status: int, words: str, *headers: tuple[str, str]) -> None:
    body = json.dumps({"detail": words}).encode()
    given = [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("connection", "close"),
        *headers,
    ]
    encoded = [(name.encode(), value.encode()) for name, value in given]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
