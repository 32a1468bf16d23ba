# SPDX-License-Identifier: Apache-2.0
"""Checks of requests before a server of this package reads them: time of the headers, host name, key, size of the body.

A server runs `Guard` around its application, with `settings`, in a `GuardedServer`.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp as App
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from evoalign.errors import ConfigError, RefusedError

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
CONNECTIONS = 1024
"""Maximum connections; the status for more is 503."""
NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Host names of a server on a loopback address. Any port is allowed, since a tunnel may change it."""
SHORTEST_TOKEN = 16
"""Fewest characters of a server's token."""


class Guard:
    """ASGI middleware that checks host name, key and body size before the application reads a request.

    On a loopback address, `names` are the accepted host names (None: any): a web page in a local browser could point
    its own name at this address (DNS rebinding). `admit` surrounds the rest of a request, and raises RefusedError
    where its headers lack the key. Bodies are read completely within `max_body`, and reach the application as one
    message. `refused` makes the response to a request for a path.
    """

    def __init__(
        self,
        app: App,
        *,
        admit: Callable[[Scope], AbstractContextManager[None]],
        refused: Callable[[str, RefusedError], Response],
        names: Iterable[str] | None,
        max_body: int,
        advice: str = "",
    ) -> None:
        self._app, self._admit, self._refused = app, admit, refused
        self._names = None if names is None else frozenset(names)
        self._max_body, self._advice = max_body, advice

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError("this server only supports HTTP")
        try:
            if not self._is_for_us(Headers(scope=scope)):
                raise RefusedError("unknown host name; use the address that the service was started with", 421)
            with self._admit(scope):
                body = await self._checked(scope, receive)
                await self._app(scope, _replayed(body, receive), send)
        except RefusedError as error:
            answer = self._refused(scope["path"], error)
            answer.headers["Connection"] = "close"
            await answer(scope, receive, send)

    async def _checked(self, scope: Scope, receive: Receive) -> bytes:
        """Return the whole body. Raises RefusedError."""
        headers = Headers(scope=scope)
        if scope["method"] == "POST" and not headers.get("content-type", "").lower().startswith("application/json"):
            raise RefusedError("send JSON, as application/json", 415)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(headers.get("content-length", ""), receive)
        except TimeoutError:
            raise RefusedError(f"the body did not arrive within {BODY_SECONDS:g} s", 408) from None
        if body is None:
            raise RefusedError(f"a body may have at most {self._max_body} bytes{self._advice}", 413)
        return body

    def _is_for_us(self, headers: Headers) -> bool:
        if self._names is None:
            return True
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return False
        found = HOST.fullmatch(hosts[0])
        return found is not None and found[1].lower() in self._names

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

    def __init__(self, config: uvicorn.Config, server_state: State, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, server_state, *args, **kwargs)
        self._waiting = server_state.waiting

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
        if self not in self._waiting:
            self._waiting[self] = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
        if len(self._waiting) > WAITING:
            oldest = next(iter(self._waiting))
            oldest._go_on()
            oldest.transport.abort()

    def _go_on(self) -> None:
        timer = self._waiting.pop(self, None)
        if timer is not None:
            timer.cancel()
            self.connections.add(self)


class State(ServerState):
    """State of one server, with its connections without complete headers."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[Connection, asyncio.TimerHandle] = {}
        """The oldest first, with the timers that close them."""


class GuardedServer(uvicorn.Server):
    """Server with connections of class `Connection`. Calls `ready` once it accepts them, and `end` on shutdown."""

    def __init__(self, config: uvicorn.Config, *, ready: Callable[[], None], end: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._end, self._state = ready, end, State()
        self.server_state = self._state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish requests, and close all connections."""
        self._end()
        for connection in list(self._state.waiting):
            connection.transport.abort()
        await super().shutdown(sockets)
        for connection in list(self._state.connections):  # open after `timeout_graceful_shutdown`
            connection.transport.abort()


def settings(guard: Guard, **more: Any) -> uvicorn.Config:
    """Return the settings of a server: limited in connections, without logs of requests."""
    return uvicorn.Config(
        guard,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=Connection,
        loop="asyncio",
        ws="none",
        limit_concurrency=CONNECTIONS,
        **more,
    )


def token_of(variable: str) -> str:
    """Return the token in an environment variable. Raises ConfigError, without the token."""
    token = os.environ.get(variable, "")
    if len(token) < SHORTEST_TOKEN or not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(
            f"token_env {variable}: this environment variable needs a token of at least {SHORTEST_TOKEN} letters and "
            "digits, such as the output of `openssl rand -hex 16`"
        )
    return token
