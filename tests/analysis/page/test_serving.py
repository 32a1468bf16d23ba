# SPDX-License-Identifier: Apache-2.0
"""The server of the page: for this machine alone, under its own names, reading alone, and the page of now."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from evoalign.analysis.page.serving import Server
from evoalign.errors import ConfigError, DataError


class State:
    """The page's tag, the tags of pages that were made, and what making one raises."""

    def __init__(self) -> None:
        self.tag, self.made = "one", list[str]()
        self.error: Exception | None = None

    def stamp(self) -> str:
        return self.tag

    def render(self, tag: str) -> str:
        if self.error:
            raise self.error
        self.made.append(tag)
        return f"<p>{tag}</p>"


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def server(state: State) -> Iterator[Server]:
    with Server(state.stamp, state.render, 0) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def request(server: Server, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    reply = connection.getresponse()
    found = reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read().decode()
    connection.close()
    return found


def test_the_page_is_made_again_only_where_it_changed(server: Server, state: State) -> None:
    status, headers, body = request(server)
    assert (status, body, headers["etag"]) == (200, "<p>one</p>", "one")
    assert request(server, If_None_Match="one")[0] == 304
    assert state.made == ["one"]
    state.tag = "two"
    assert request(server, If_None_Match="one")[2] == "<p>two</p>"
    assert state.made == ["one", "two"]
    rules = headers["content-security-policy"].split("; ")
    assert "connect-src 'self'" in rules and "frame-ancestors 'none'" in rules
    assert headers["cache-control"] == "no-store" and headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin" and "access-control-allow-origin" not in headers


STRANGERS = ("evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "127.0.0.1@evil", "", "0.0.0.0", "[::1",
             "localhost:x")  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "request_line", "headers"),
    [
        *(([421], {}, {"Host": host}) for host in STRANGERS),
        *(([405, 501], {"method": m}, {}) for m in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW")),
        *(([404], {"path": p}, {}) for p in ("/../../etc/passwd", "/config.yaml", "/?x=1", "//evil.example/")),
    ],
)
def test_another_host_method_or_path_is_refused(
    server: Server, state: State, statuses: list[int], request_line: dict[str, str], headers: dict[str, str]
) -> None:
    status, _, body = request(server, **request_line, **headers)
    assert status in statuses and not state.made and "<p>one" not in body


def test_this_machine_is_answered_under_one_name_on_the_loopback_address(server: Server) -> None:
    for host in ("localhost", "127.0.0.1:9000", "LOCALHOST:8050"):
        assert request(server, Host=host)[0] == 200
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b" 421 " in raw.recv(100)
    assert server.server_address[0] == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        other.settimeout(5)
        assert other.connect_ex(("127.0.0.2", server.server_port)) != 0


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(DataError("it is \x1b[2Jdamaged"), 503, "damaged"), (TypeError("no \x1b[2J number"), 500, "TypeError")],
    ids=["a run that cannot be read", "a mistake of ours"],
)  # fmt: skip
def test_an_error_is_answered_and_the_page_made_again(
    server: Server, state: State, error: Exception, status: int, said: str
) -> None:
    state.error = error
    found, _, body = request(server)
    assert found == status and said in body and "\x1b" not in body
    state.error = None
    assert request(server)[0] == 200


def test_a_port_that_is_taken_is_named(server: Server, state: State) -> None:
    with pytest.raises(ConfigError, match=f"--port {server.server_port}"):
        Server(state.stamp, state.render, server.server_port)
