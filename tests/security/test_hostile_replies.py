# SPDX-License-Identifier: Apache-2.0
"""Replies to every HTTP client of the package: never decompressed, of bounded size and time, without the key."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import TypeAlias

import pytest
from hostile_server import BOMBS, LARGE, SLOW, Reply, hostile, memory, repeats, sends, whole

from evoalign import http
from evoalign.analysis.judge import judges
from evoalign.analysis.judge.judges import Endpoint, NoReplyError
from evoalign.config import ScorerConfig
from evoalign.engines.server import client as server_client
from evoalign.engines.server.client import Client, LostError
from evoalign.errors import EvoalignError, JudgeError, RewardError, ScorerAwayError
from evoalign.rewards.scorer import client as scorer_client
from evoalign.rewards.scorer.client import Service

KEY = "sk-Abcdefgh/jklmnopqrstuvwxyz+012345"
LATE = 10.0
"""Seconds after which a request with a limit of 0.5 s counts as endless, on a busy machine."""
HEALTH = {"/health": json.dumps({"columns": ["reward"], "digest": "d", "limits": {"items": 8, "body": 2000}}).encode()}
Ask: TypeAlias = Callable[[str, float], object]


def ask_scorer(url: str, seconds: float) -> object:
    """Score one pair. The run stops after the first request that takes `seconds`."""
    config = ScorerConfig(name="service", url=url, token_env="A_KEY", timeout=seconds, deadline=min(seconds, 6.0))
    with closing(Service(config)) as service:
        return service.score(["a"], ["b"])


def ask_judge(url: str, seconds: float) -> object:
    judge = Endpoint(url, "j", KEY, max_tokens=9, timeout=seconds, retries=0, concurrency=1)

    async def ask() -> object:
        async with judge.opened():
            return await judge.ask("Which is better?")

    return asyncio.run(ask())


def ask_server(url: str, seconds: float) -> object:
    with closing(Client(url, KEY)) as client:
        return client.call(client.post("/x", {}, seconds=seconds))


CLIENTS: dict[str, tuple[Ask, type[Exception] | tuple[type[Exception], ...]]] = {
    "scorer": (ask_scorer, RewardError),
    "judge": (ask_judge, (NoReplyError, JudgeError)),
    "server": (ask_server, LostError),
}
each_client = pytest.mark.parametrize("name", CLIENTS)


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setattr(server_client, "BACKOFF", 0.01)
    monkeypatch.setattr(scorer_client, "BACKOFF", 0.01)


def failure(name: str, reply: Reply, seconds: float = 60.0, secure: bool = False) -> str:
    """Return the message of the error that a client raises for a reply, in good time and in little memory."""
    ask, error = CLIENTS[name]
    began = time.monotonic()
    with memory(100), hostile(reply, HEALTH) as server, pytest.raises(error) as raised:
        ask(server.url.replace("http", "https") if secure else server.url, seconds)
    assert time.monotonic() - began < LATE and (seconds > LATE or time.monotonic() - began >= seconds)
    return str(raised.value).replace(server.url, "URL")


@each_client
def test_no_request_accepts_a_compressed_reply(name):
    ask, _ = CLIENTS[name]
    with hostile(sends(whole(b"")), HEALTH) as server, contextlib.suppress(Exception):
        ask(server.url, 1.0)
    assert server.requests and all(b"Accept-Encoding: identity\r\n" in request for request in server.requests)


@each_client
@pytest.mark.parametrize(
    ("status", "encoding"),
    [*(("200 OK", e) for e in ("br", "gzip", "GZIP", "identity, br", "zstd", "unknown")), ("500 Error", "br")],
)
def test_a_compressed_reply_is_refused_and_not_unpacked(name, status, encoding):
    body = BOMBS.get(encoding.lower().split()[-1], b"{}")
    assert len(body) < 3000
    said = failure(name, sends(whole(body, status, f"Content-Encoding: {encoding}")))
    assert f"Content-Encoding {encoding}," in said and ("URL" in said or status != "200 OK")


def test_a_reply_that_is_not_compressed_may_say_so():
    with hostile(sends(whole(b'{"a": 1}', "200 OK", "Content-Encoding: identity"))) as server:
        assert ask_server(server.url, 60.0) == {"a": 1}


@each_client
@pytest.mark.parametrize("kind", [*SLOW, "handshake"])
def test_a_deadline_is_for_the_whole_reply_and_the_connection(name, kind):
    """The last is an https server that accepts the connection, and never answers its handshake."""
    failure(name, SLOW["no reply" if kind == "handshake" else kind], 0.5, kind == "handshake")


def test_a_request_to_a_scorer_takes_no_longer_than_the_deadline_of_the_run():
    began = time.monotonic()
    with hostile(SLOW["body"], HEALTH) as server:
        config = ScorerConfig(name="service", url=server.url, timeout=60.0, deadline=0.5)
        with closing(Service(config)) as service, pytest.raises(ScorerAwayError):
            service.score(["a"], ["b"])
    assert 0.5 <= time.monotonic() - began < LATE


@each_client
@pytest.mark.parametrize("kind", LARGE)
def test_a_reply_is_of_bounded_size(name, kind, monkeypatch):
    for module in (scorer_client, judges, server_client):
        monkeypatch.setattr(module, "MOST_BYTES", 2**20)
    assert ("1 MiB" in failure(name, LARGE[kind])) == ("header" not in kind)


def test_the_longest_replies():
    """As SECURITY.md has them."""
    assert [m.MOST_BYTES for m in (scorer_client, judges, server_client)] == [64 * 2**20, 4 * 2**20, 256 * 2**20]


@each_client
def test_no_redirection_is_followed(name):
    with hostile(sends(whole(b"{}"))) as other:
        failure(name, sends(whole(b"{}", "307 Temporary Redirect", f"Location: {other.url}/x")))
    assert other.requests == []


PLACES: dict[str, Callable[[str], bytes]] = {
    "400": lambda key: whole(f"{'x' * 270} auth {key} end".encode(), "400 Bad Request"),
    "401": lambda key: whole(f"{'x' * 270} auth {key} end".encode(), "401 Unauthorized"),
    "500": lambda key: whole(f"<html>{'x' * 250} Bearer {key}</html>".encode(), "500 Error"),
    "JSON": lambda key: whole(f'{{"detail": "{"x" * 285}{key}"}}'.encode(), "422 Unprocessable"),
    "escaped": lambda key: whole(f'{{"detail": "{"x" * 240}{key}"}}'.replace("/", r"\/").encode(), "400 Bad Request"),
    "200": lambda key: whole(f"{'x' * 285} {key}".encode()),
    "header": lambda key: whole(b"{}", "200 OK", f"Content-Encoding: {key}"),
    "status line": lambda key: f"HTTP/1.1 {key}\r\n\r\n".encode(),
}


@each_client
@pytest.mark.parametrize("place", PLACES)
def test_a_key_that_a_reply_repeats_is_hidden_before_it_is_cut(name, place):
    ask, _ = CLIENTS[name]
    errors = (EvoalignError, NoReplyError)
    with hostile(sends(PLACES[place](KEY)), HEALTH) as server, pytest.raises(errors) as raised:
        ask(server.url, 2.0)
    assert not any(KEY[i : i + 6] in str(raised.value) for i in range(len(KEY) - 6))
    assert KEY not in str(raised.value.__cause__)


def test_a_key_in_the_digest_of_a_scorer_is_hidden():
    reply = sends(whole(b'{"reward": [1]}', "200 OK", f"X-Scorer-Digest: {KEY}"))
    assert KEY[:6] not in failure("scorer", reply)


def test_requests_of_many_threads_share_a_loop_and_end_with_it():
    loop, client = http.LoopThread("test"), http.HttpClient("http://127.0.0.1:1", None, 9)

    async def name() -> str:
        return threading.current_thread().name

    assert loop.call(name()) == "test"
    with pytest.raises(TimeoutError):
        loop.call(asyncio.sleep(60), 0.1)
    loop.close(client)
    loop.close(client)
    assert "test" not in {thread.name for thread in threading.enumerate()}


def test_a_reply_that_never_ends_is_closed_at_the_deadline():
    with hostile(repeats(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" " * 100)) as server:
        with pytest.raises(LostError):
            ask_server(server.url, 0.5)
        assert server.ended.wait(LATE)
