# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of the gateway, in a thread of the trainer.

    POST /v1/chat/completions, /v1/responses, /v1/messages    completions, in the form of each API
    POST /v1/score    {"reward": 0.5}, or several named numbers
    GET /v1/models, GET /health

The key of a request (`Authorization: Bearer` or `x-api-key`) names its episode. A completion is computed as a whole: a
streamed response begins when it is ready, with all of its events. Logs have no keys and no texts of requests.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import socket
import sys
import threading
from collections import Counter
from collections.abc import Coroutine, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from evoalign.errors import ConfigError, RefusedError, shown
from evoalign.gateway import anthropic, openai_chat, openai_responses
from evoalign.gateway.chat import Backend
from evoalign.gateway.dialect import Body, Dialect, flag, openai_error, refused, text
from evoalign.http import is_loopback
from evoalign.http.guard import NAMES, Guard, GuardedServer, settings

logger = logging.getLogger(__name__)
T = TypeVar("T")
DIALECTS = {one.DIALECT.path: one.DIALECT for one in (openai_chat, openai_responses, anthropic)}
SCORE, MODELS, HEALTH = "/v1/score", "/v1/models", "/health"
METHODS = {SCORE: "POST", MODELS: "GET", HEALTH: "GET"} | dict.fromkeys(DIALECTS, "POST")
MODEL: Body = {"id": "evoalign", "object": "model", "created": 0, "owned_by": "evoalign"}
"""The only model that is listed. Requests may name any."""
MOST_SCORES = 64
MOST_SCORE = sys.float_info.max
COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,63}")
BUSY = "too_many_requests"
"""Code of the only error after which a client should try again."""
IDLE_SECONDS = 75
"""Seconds that an idle connection stays open: longer than clients reuse one, or a request at that moment is lost."""
END_SECONDS = 2
"""Seconds for the last responses to be sent."""


class Server:
    """Gateway to a backend, open as a context manager. Leaving it ends pending requests with status 503.

    An address other than loopback needs a `token`, `certfile` and `keyfile`. With a token, the key of an episode is
    sent as `TOKEN.KEY`, and an empty key as `TOKEN`. `most_requests` limits the requests of one key at a time.
    """

    def __init__(
        self,
        backend: Backend,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        certfile: Path | None = None,
        keyfile: Path | None = None,
        max_body: int = 1 << 24,
        most_requests: int = 16,
    ) -> None:
        if not is_loopback(host) and not (token and certfile and keyfile):
            raise ConfigError(
                f"gateway: host {host} is reachable from other machines: set token, certfile and keyfile, "
                "or use 127.0.0.1"
            )
        if (certfile is None) != (keyfile is None):
            raise ConfigError("gateway: set both certfile and keyfile, or none")
        app = _App(backend, token, most_requests)
        names = NAMES if is_loopback(host) else None
        guard = Guard(app, admit=app.admit, refused=_refusal, names=names, max_body=max_body)
        self._config = settings(
            guard,
            lifespan="off",
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=END_SECONDS,
            ssl_certfile=certfile,
            ssl_keyfile=keyfile,
        )
        self._ready = threading.Event()
        self._server = GuardedServer(self._config, ready=self._ready.set, end=app.end)
        self._host, self._port = host.strip("[]"), port
        self._listening: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Base address of OpenAI's clients; that of Anthropic's is without /v1."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http{'s' if self._config.is_ssl else ''}://{host}:{self._port}/v1"

    def listen(self) -> socket.socket:
        """Open the port and return its socket; clients wait until the context is entered. Raises ConfigError."""
        try:
            self._config.load()
        except OSError as error:
            raise ConfigError(f"gateway: certfile or keyfile cannot be used ({error})") from None
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listening = socket.create_server((self._host, self._port), family=family)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"gateway: cannot listen on {self._host}, port {self._port} ({error})") from None
        self._port = self._listening.getsockname()[1]
        return self._listening

    def __enter__(self) -> Self:
        listening = self._listening or self.listen()
        self._thread = threading.Thread(target=self._run, args=(listening,), name="evoalign-gateway", daemon=True)
        self._thread.start()
        self._ready.wait()
        return self

    def _run(self, listening: socket.socket) -> None:
        with listening:
            try:
                self._server.run(sockets=[listening])
            finally:
                self._ready.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()


def _refusal(path: str, error: RefusedError) -> Response:
    """Return an error in the form of the API that a path is of."""
    dialect = DIALECTS.get(path)
    headers = {"Retry-After": "1"} if error.code == BUSY else {"x-should-retry": "false"}
    return _json((openai_error if dialect is None else dialect.error)(error), error.status, headers)


def _json(found: Body, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(found), status, headers, "application/json")


def _parsed(raw: bytes) -> Body:
    """Return the object of a body. Raises RefusedError, also for half surrogates, which no tokenizer takes."""
    try:
        found = json.loads(raw)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not valid JSON ({type(error).__name__})", 400) from None
    if not isinstance(found, dict):
        raise RefusedError("the body is not an object of JSON", 400)
    return cast(Body, found)


def _scores(body: Body) -> dict[str, float]:
    if not 1 <= len(body) <= MOST_SCORES:
        raise RefusedError(f'send from 1 to {MOST_SCORES} scores, such as {{"reward": 0.5}}', 400)
    for name, value in body.items():
        if COLUMN.fullmatch(name) is None:
            raise refused(name, "this is not a name of a score; use letters, digits and _")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= MOST_SCORE:
            raise refused(name, f"{shown(value)} is not a finite number")
    return {name: float(value) for name, value in body.items()}


class _App:
    """ASGI application behind `Guard`."""

    def __init__(self, backend: Backend, token: str | None, most_requests: int) -> None:
        self._backend, self._most_requests = backend, most_requests
        self._token = b"" if token is None else f"{token}.".encode()
        self._active, self._ends = Counter[str](), False
        self._watched: set[asyncio.Task[Any]] = set()

    def end(self) -> None:
        """Refuse requests from now on, and those that wait for the backend."""
        self._ends = True
        for one in self._watched:
            one.cancel()

    @contextmanager
    def admit(self, scope: Scope) -> Generator[None]:
        """Surround a request. Raises RefusedError where its key is unknown, or has too many requests."""
        if scope["path"] == HEALTH:
            yield
            return
        key = self._key(Headers(scope=scope))
        if key is None:
            raise RefusedError("unknown API key; use the one that this program was given", 401, "invalid_api_key")
        if self._active[key] >= self._most_requests:
            raise RefusedError(f"a key may have at most {self._most_requests} requests at a time", 429, BUSY)
        scope["key"] = key
        self._active[key] += 1
        try:
            yield
        finally:
            self._active[key] -= 1
            if not self._active[key]:
                del self._active[key]

    def _key(self, headers: Headers) -> str | None:
        """Return the episode's part of the first known key."""
        bearer = [one[7:] for one in headers.getlist("authorization") if one[:7].lower() == "bearer "]
        for given in (*headers.getlist("x-api-key"), *bearer):
            size, raw = len(self._token), f"{given}.".encode("latin-1")
            if hmac.compare_digest(raw[:size], self._token) and self._backend.knows(given[size:]):
                return given[size:]
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        path = scope["path"]
        try:
            response = await self._respond(path, scope, receive)
        except RefusedError as error:
            response = _refusal(path, error)
        except Exception as error:  # its message might contain text of a request
            logger.error("gateway: a request for %s failed: %s", path if path in METHODS else "?", type(error).__name__)
            response = _refusal(path, RefusedError(f"the backend failed: {type(error).__name__}", 500, "server_error"))
        await response(scope, receive, send)

    async def _respond(self, path: str, scope: Scope, receive: Receive) -> Response:
        if path not in METHODS:
            raise RefusedError(f"no such path; use one of {', '.join(METHODS)}", 404, "not_found")
        if scope["method"] != METHODS[path]:
            raise RefusedError(f"use {METHODS[path]}", 405, "method_not_allowed")
        if self._ends:
            raise RefusedError("the gateway is closing", 503, "closing")
        raw = (await receive()).get("body", b"")
        if path == HEALTH:
            return _json({"status": "ok"})
        if path == MODELS:
            return _json({"object": "list", "data": [MODEL]})
        if path == SCORE:
            scores = _scores(_parsed(raw))
            await self._watch(self._backend.score(scope["key"], scores), receive)
            return _json({"scores": scores})
        return await self._complete(DIALECTS[path], scope["key"], _parsed(raw), receive)

    async def _complete(self, dialect: Dialect, key: str, body: Body, receive: Receive) -> Response:
        is_streamed = flag(body.get("stream"), "stream")
        text(body.get("model"), "model")
        answers = await self._watch(self._backend.complete(key, dialect.read(body)), receive)
        if answers is None:
            return Response(status_code=499)
        reply = dialect.reply(body, answers)
        if not is_streamed:
            return _json(reply)
        events = dialect.stream(body, reply)
        return Response(events, headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")

    async def _watch(self, work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
        """Return the result; None where the client disconnects before. Cancels the work then, and on `end`."""
        task = asyncio.create_task(work)
        task.add_done_callback(_retrieved)
        gone = asyncio.ensure_future(receive())
        watched = cast(asyncio.Task[Any], gone)
        self._watched.add(watched)
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            if self._ends or task.cancelled():
                raise RefusedError("the gateway is closing", 503, "closing")
            return None
        finally:
            self._watched.discard(watched)
            gone.cancel()
            task.cancel()


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task: asyncio would log it otherwise, with its text."""
    if not task.cancelled():
        task.exception()
