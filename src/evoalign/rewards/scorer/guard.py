# SPDX-License-Identifier: Apache-2.0
"""Checks of a request before the scorer service reads it: the time of its headers, and those of `Guard`."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Iterable
from typing import ClassVar

import h11
from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp as App
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HOST = re.compile(r"([^:\[\]]+|\[[^\[\]]*\])(?::[0-9]*)?")
"""A name, or an IPv6 address in brackets, and a port."""
HEADER_SECONDS = 10.0
"""Maximum seconds for the headers of a request to arrive."""
WAITING = 256
"""Maximum connections whose headers have not arrived; for one more, the oldest of them is closed."""
BODY_SECONDS = 30.0
"""Maximum seconds for a body to arrive."""
DRAINED = 1 << 24
"""Bytes of an oversized body to read and discard, so that the client gets the response."""


def refused(status: int, words: str, headers: dict[str, str] | None = None) -> Response:
    """Return a response with the reason."""
    return JSONResponse({"detail": words}, status, headers)


class Guard:
    """ASGI middleware that checks host name, token and body size before the service reads a request.

    Without a token, the service only accepts loopback names (`names`; None: any name): a web page in a local browser
    could point its own name at this address (DNS rebinding). Bodies are read completely within `max_body`.
    """

    def __init__(self, app: App, *, token: str | None, names: Iterable[str] | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._token = None if token is None else f"Bearer {token}".encode()
        self._names = None if names is None else frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError("a scorer only supports HTTP")
        headers = Headers(scope=scope)
        if not self._is_for_us(headers):
            answer = refused(421, "unknown host name; use the address that the service was started with")
        elif not self._has_token(headers):
            required = {"WWW-Authenticate": "Bearer"}
            answer = refused(401, "the bearer token of the service is required", required)
        elif scope["method"] == "POST" and not headers.get("content-type", "").lower().startswith("application/json"):
            answer = refused(415, "send JSON, as application/json")
        else:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = await self._read(headers.get("content-length", ""), receive)
            except TimeoutError:
                answer = refused(408, f"the body did not arrive within {BODY_SECONDS:g} s")
            else:
                if body is not None:
                    await self._app(scope, _replayed(body, receive), send)
                    return
                answer = refused(
                    413, f"a body may have at most {self._max_body} bytes; send fewer pairs, or raise --max-body"
                )
        answer.headers["Connection"] = "close"
        await answer(scope, receive, send)

    def _is_for_us(self, headers: Headers) -> bool:
        if self._names is None:
            return True
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return False
        found = HOST.fullmatch(hosts[0])
        return found is not None and found[1].lower() in self._names

    def _has_token(self, headers: Headers) -> bool:
        """Return whether a request has the token, compared in constant time, and no other credentials."""
        given = headers.getlist("authorization")
        return self._token is None or (len(given) == 1 and hmac.compare_digest(given[0].encode("latin-1"), self._token))

    async def _read(self, announced: str, receive: Receive) -> bytes | None:
        """Return the whole body, or None if it is too long."""
        too_long = announced.isascii() and announced.isdigit() and int(announced) > self._max_body
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


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a receiver of the body that was read, and then of further messages."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class Connection(H11Protocol):
    """HTTP connection that is closed where the headers of a request take too long.

    Until they are complete, it is not counted in `CONNECTIONS`: any client without a token could hold all.
    """

    waiting: ClassVar[dict[Connection, asyncio.TimerHandle]] = {}
    """Connections without complete headers, the oldest first, with the timers that close them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait for the headers."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Handle the request if its headers are complete, or else wait for them."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # between two requests, or within the headers of one
            self._wait()
        else:
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._go_on()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self.connections.discard(self)
        if self not in self.waiting:
            self.waiting[self] = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
        if len(self.waiting) > WAITING:
            oldest = next(iter(self.waiting))
            oldest._go_on()
            oldest.transport.abort()

    def _go_on(self) -> None:
        timer = self.waiting.pop(self, None)
        if timer is not None:
            timer.cancel()
            self.connections.add(self)
