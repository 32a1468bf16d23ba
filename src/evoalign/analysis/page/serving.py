# SPDX-License-Identifier: Apache-2.0
"""The page from a server of its own, for who sits at this machine: it follows a run that is being trained.

It answers on the loopback address alone. A web page of a stranger, open in the same browser, can have a name of its own
lead there (DNS rebinding): so the name that was asked for is checked, and nothing but reading is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from evoalign.analysis.page.page import policy
from evoalign.errors import ConfigError, EvoalignError
from evoalign.report.tables import visible

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
"""What this machine may be called. A port may be another than ours: it may be brought here through a tunnel."""
SECONDS = 10.0
"""That a request may take to arrive."""


class Server(ThreadingHTTPServer):
    """Serves one page. `stamp` says what state it is of, and `render` makes it, of that state; both may raise
    EvoalignError or OSError, and are not called at once.
    """

    daemon_threads = True

    def __init__(self, stamp: Callable[[], str], render: Callable[[str], str], port: int) -> None:
        """Raises ConfigError where the port cannot be taken; 0: any that is free."""
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} cannot be used ({error}); choose another, or 0 for any") from None
        self._stamp, self._render = stamp, render
        self._lock, self._made = threading.Lock(), ("", b"")

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def page(self) -> tuple[str, bytes]:
        """The state of now and its page, which is made again where the state is another."""
        with self._lock:
            tag = self._stamp()
            if tag != self._made[0]:
                self._made = (tag, self._render(tag).encode("utf-8"))
            return self._made

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing of a browser that went away."""


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = SECONDS
    server_version, sys_version = "evoalign", ""

    def do_GET(self) -> None:
        """The page at `/`, and nothing else."""
        if not self._is_for_us():
            self._say(HTTPStatus.MISDIRECTED_REQUEST, f"this is not that host; ask for {self.server.url}")
        elif self.path != "/":
            self._say(HTTPStatus.NOT_FOUND, "there is one page, at /")
        else:
            self._page()

    def _page(self) -> None:
        try:
            tag, page = self.server.page()
        except (EvoalignError, OSError) as error:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"the run cannot be read: {visible(str(error))}")
            return
        except Exception as error:  # of files that change meanwhile: said, and asked for again
            kind = type(error).__name__
            self._say(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"the page cannot be made ({kind}): {visible(str(error))[:500]}"
            )
            return
        if self.headers.get("If-None-Match") == tag:
            self._head(HTTPStatus.NOT_MODIFIED, tag)
            return
        self._head(HTTPStatus.OK, tag, "text/html; charset=utf-8", len(page))
        self.wfile.write(page)

    def _is_for_us(self) -> bool:
        """Whether the one Host of the request is a name of the loopback address."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1:
            return False
        name, _, port = hosts[0].partition(":")
        return name.lower() in NAMES and (port == "" or (port.isascii() and port.isdecimal()))

    def _refuse(self) -> None:
        self._say(HTTPStatus.METHOD_NOT_ALLOWED, "only GET", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _say(self, status: HTTPStatus, words: str, **headers: str) -> None:
        body = f"{words}\n".encode("utf-8", "backslashreplace")
        self._head(status, None, "text/plain; charset=utf-8", len(body), **headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(
        self, status: HTTPStatus, tag: str | None, kind: str | None = None, length: int = 0, **headers: str
    ) -> None:
        self.send_response(status)
        given = {
            **headers,
            "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            **({} if tag is None else {"ETag": tag}),
            **({} if kind is None else {"Content-Type": kind, "Content-Length": str(length)}),
        }
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal is for what the user asked."""
