# SPDX-License-Identifier: Apache-2.0
"""The server of the page: for this machine alone, under its own names, reading alone, and the page of now."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from evoalign.analysis.page.serving import Server
from evoalign.errors import ConfigError, DataError


@dataclass
class State:
    """What the page is made of."""

    tag: str = "one"
    made: list[str] = field(default_factory=list)
    broken: bool = False
    error: Exception = field(default_factory=lambda: DataError("it is \x1b[2Jdamaged"))

    def stamp(self) -> str:
        return self.tag

    def render(self, tag: str) -> str:
        if self.broken:
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


def ask(
    server: Server, method: str = "GET", path: str = "/", host: str | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=host is not None)
    if host:
        connection.putheader("Host", host)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    connection.close()
    return found


def test_the_page_is_made_again_only_where_it_changed(server: Server, state: State) -> None:
    status, headers, body = ask(server)
    assert (status, body, headers["etag"]) == (200, "<p>one</p>", "one")
    assert ask(server, If_None_Match="one")[0] == 304
    assert state.made == ["one"]
    state.tag = "two"
    assert ask(server, If_None_Match="one")[2] == "<p>two</p>"
    assert state.made == ["one", "two"]
    rules = headers["content-security-policy"].split("; ")
    assert "connect-src 'self'" in rules and "frame-ancestors 'none'" in rules
    assert headers["cache-control"] == "no-store" and headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin" and "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil:80",
        "127.0.0.1@evil",
        "",
        "0.0.0.0",
        "[::1",
        "localhost:x",
    ],
)
def test_another_host_is_refused(server: Server, state: State, host: str) -> None:
    status, _, body = ask(server, host=host)
    assert status == 421 and not state.made and "<p>" not in body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "LOCALHOST:8050"])
def test_this_machine_is_answered(server: Server, host: str) -> None:
    assert ask(server, host=host)[0] == 200


def test_two_hosts_are_none(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b" 421 " in raw.recv(100)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW"])
def test_only_get(server: Server, state: State, method: str) -> None:
    assert ask(server, method=method)[0] in (405, 501) and not state.made


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/config.yaml", "/?x=1", "//evil.example/"])
def test_one_page(server: Server, path: str) -> None:
    assert ask(server, path=path)[0] == 404


def test_it_listens_on_the_loopback_address_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        other.settimeout(5)
        assert other.connect_ex(("127.0.0.2", server.server_port)) != 0


def test_a_run_that_cannot_be_read_is_said_and_asked_for_again(server: Server, state: State) -> None:
    state.broken = True
    status, _, body = ask(server)
    assert status == 503 and "damaged" in body and "\x1b" not in body
    state.broken = False
    assert ask(server)[0] == 200


def test_a_mistake_of_ours_is_answered(server: Server, state: State) -> None:
    state.broken, state.error = True, TypeError("no \x1b[2J number")
    status, _, body = ask(server)
    assert status == 500 and "TypeError" in body and "\x1b" not in body
    state.broken = False
    assert ask(server)[0] == 200


def test_a_port_that_is_taken_is_named(server: Server, state: State) -> None:
    with pytest.raises(ConfigError, match=f"--port {server.server_port}"):
        Server(state.stamp, state.render, server.server_port)
