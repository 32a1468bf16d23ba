# SPDX-License-Identifier: Apache-2.0
"""Server of the report page on this machine, which follows a run during training.

It listens on the loopback address only. Another web page in the same browser could point its own host name there (DNS
rebinding), so the Host header is checked, and only GET is answered.
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
"""Accepted host names. The port is not checked: a tunnel may have another."""
SECONDS = 10.0
"""Seconds in which a request has to arrive."""


class Server(ThreadingHTTPServer):
    """Serves one page. `stamp` returns the tag of the current state, and `render` the page for a tag.

    Both may raise EvoalignError or OSError, and are never called at the same time.
    """

    daemon_threads = True

    def __init__(self, stamp: Callable[[], str], render: Callable[[str], str], port: int) -> None:
        """Listen on a port (0: any free one). Raises ConfigError if it cannot be used."""
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} cannot be used ({error}); choose another, or 0 for any") from None
        self._stamp, self._render = stamp, render
        self._lock, self._made = threading.Lock(), ("", b"")

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def page(self) -> tuple[str, bytes]:
        """Return the current tag and its page, rendered again if the tag changed."""
        with self._lock:
            tag = self._stamp()
            if tag != self._made[0]:
                self._made = (tag, self._render(tag).encode("utf-8"))
            return self._made

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = SECONDS
    server_version, sys_version = "evoalign", ""

    def do_GET(self) -> None:
        """Serve the page at `/`."""
        if not self._has_our_host():
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, f"this is not that host; ask for {self.server.url}")
        elif self.path != "/":
            self._answer(HTTPStatus.NOT_FOUND, "there is one page, at /")
        else:
            self._page()

    def _page(self) -> None:
        try:
            tag, page = self.server.page()
        except (EvoalignError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"the run cannot be read: {visible(str(error))}")
            return
        except Exception as error:  # files may change meanwhile; the page asks again
            kind = type(error).__name__
            self._answer(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"the page cannot be made ({kind}): {visible(str(error))[:500]}"
            )
            return
        if self.headers.get("If-None-Match") == tag:
            self._head(HTTPStatus.NOT_MODIFIED, tag)
            return
        self._head(HTTPStatus.OK, tag, "text/html; charset=utf-8", len(page))
        self.wfile.write(page)

    def _has_our_host(self) -> bool:
        """Whether the request has one Host header, with a name of the loopback address."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1:
            return False
        name, _, port = hosts[0].partition(":")
        return name.lower() in NAMES and (port == "" or (port.isascii() and port.isdecimal()))

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "only GET", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, status: HTTPStatus, words: str, **headers: str) -> None:
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
        """Print nothing."""
