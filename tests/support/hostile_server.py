# SPDX-License-Identifier: Apache-2.0
"""A server whose replies are compressed, endless or slow, for any client: it writes raw bytes to the connection."""

from __future__ import annotations

import base64
import contextlib
import gzip
import resource
import socket
import threading
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Reply: TypeAlias = Callable[[socket.socket], None]
PACKED = (
    "eNo7//9/PYOKw6ONDkXv///8/5+/gcVBRqzh3V/7////M05g6DjMdGHv/+f//9szCDEURjDs+v7/z///7A5MCnzcDt//zQeqYvBgOJLI+OLe/8///8sz"
    "cDZY6DDc/V3/7/9/ZgVGgXbWBdX/z4MtYXi0gaFk1JJRS0YtGbVk1JJRS0YtGbVkpFpiDwCo7wv6"
)
BOMBS = {"br": zlib.decompress(base64.b64decode(PACKED)), "gzip": gzip.compress(bytes(2**20))}
"""Bodies by encoding: 2.4 kB of brotli that unpack to 3 GiB of spaces, 1 kB of gzip that unpack to 1 MiB."""
OK = b"HTTP/1.1 200 OK\r\n"
PAUSE = 0.1
"""Seconds between the parts of a reply that is sent slowly."""


def whole(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def sends(reply: bytes) -> Reply:
    return lambda to: to.sendall(reply)


def repeats(first: bytes, part: bytes, pause: float = PAUSE) -> Reply:
    """Send `part` without end, until the client closes the connection."""

    def reply(to: socket.socket) -> None:
        to.sendall(first)
        while True:
            to.sendall(part)
            time.sleep(pause)

    return reply


SLOW = {
    "body": repeats(OK + b"Content-Length: 1000000\r\n\r\n", b" "),
    "chunks": repeats(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "header line": repeats(OK + b"X-Long: ", b"x"),
    "header lines": repeats(OK, b"x: \r\n"),
    "early hints": repeats(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "no reply": lambda to: threading.Event().wait(60),
}
"""Replies that never end, a few bytes at a time."""
LARGE = {
    "body": repeats(OK + b"Content-Length: 1000000000000\r\n\r\n", b" " * 2**16, 0.0),
    "chunks": repeats(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b" " * 0x1000 + b"\r\n", 0.0),
    "header line": repeats(OK + b"X-Long: ", b"x" * 2**16, 0.0),
    "header lines": repeats(OK, b"x: \r\n" * 2**10, 0.0),
}
"""Replies that never end, as fast as they are read."""


@dataclass
class Server:
    """Received requests. `ended`: a client closed its connection while a reply was sent."""

    url: str
    requests: list[bytes] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


@contextmanager
def hostile(reply: Reply, well: dict[str, bytes] | None = None) -> Generator[Server]:
    """Serve `reply` to each request; a path in `well` gets that body instead."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    server = Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
    open_connections: list[socket.socket] = []

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as reader:
            while line := reader.readline():
                head = line
                while (more := reader.readline()) not in (b"\r\n", b""):
                    head += more
                lengths = [h.split(b":")[1] for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")]
                server.requests.append(head + reader.read(int(lengths[0]) if lengths else 0))
                path = line.decode("latin-1").partition(" ")[2].partition(" ")[0]
                try:
                    sends(whole((well or {})[path]))(connection) if path in (well or {}) else reply(connection)
                except OSError:
                    server.ended.set()
                    return

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                open_connections.append(connection)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server
    finally:
        for each in (listening, *open_connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def memory(most_mib: int) -> Generator[None]:
    """Fail where the peak memory of this process grows by more; an allocation of 2 GiB fails at once."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**31, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < most_mib, f"{grown:.0f} MiB"
