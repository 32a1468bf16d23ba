# SPDX-License-Identifier: Apache-2.0
"""The way to a server, when it is slow, busy, hostile or gone; tests/engine_sglang has real ones."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from evoalign.engines.server import client as client_module
from evoalign.engines.server.adapters import PeftAdapter
from evoalign.engines.server.client import Client
from evoalign.engines.server.dialect import Said, Server, checked_ids, checked_logprobs, measured
from evoalign.engines.server.engine import ServerEngine
from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.engines.server.link import Link
from evoalign.engines.server.traffic import LOADS, Heard, Traffic
from evoalign.engines.sglang import engine as sglang_engine
from evoalign.engines.sglang.dialect import _METRIC, MEASURED, SglangDialect
from evoalign.engines.sglang.settings import SglangConfig
from evoalign.engines.vllm_server.dialect import VllmDialect
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.types import MEAN, MEAN_PLAN, Request, Sampling, population
from hostile_server import SLOW, hostile

KEY = "sk-of-this-test"
Handle = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(handle: Handle) -> Generator[str]:
    """The address of a server that answers by `handle`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            handle(self)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def answer(to: BaseHTTPRequestHandler, body: bytes = b"{}", status: int = 200) -> None:
    to.send_response(status)
    to.send_header("Content-Length", str(len(body)))
    to.end_headers()
    to.wfile.write(body)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF", 0.01)


def test_whether_a_server_is_well_is_asked_beside_any_number_of_completions() -> None:
    release = threading.Event()

    def handle(to: BaseHTTPRequestHandler) -> None:
        if to.path == "/generate":
            release.wait(30)
        answer(to)

    with serving(handle) as url, closing(Client(url, concurrency=4)) as client:
        waiting = [client.submit(client.post("/generate", {}, seconds=None)) for _ in range(30)]
        time.sleep(0.3)
        assert client.submit(client.get("/health", seconds=5)).result(10) == {}
        release.set()
        assert [one.result(30) for one in waiting] == [{}] * 30


def test_no_more_completions_are_in_flight_than_were_set() -> None:
    now, most, lock, is_full = 0, 0, threading.Lock(), threading.Event()

    def handle(to: BaseHTTPRequestHandler) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            if now == 4:
                is_full.set()
        is_full.wait(20)
        time.sleep(0.05)
        with lock:
            now -= 1
        answer(to)

    with serving(handle) as url, closing(Client(url, concurrency=4)) as client:
        for one in [client.submit(client.post("/generate", {}, seconds=None)) for _ in range(20)]:
            one.result(30)
    assert most == 4


def test_a_deadline_is_for_the_whole_answer() -> None:
    def handle(to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.send_header("Content-Length", "100")
        to.end_headers()
        for _ in range(100):
            try:
                to.wfile.write(b" ")
            except OSError:
                return
            time.sleep(0.1)

    with serving(handle) as url, closing(Client(url)) as client:
        start = time.monotonic()
        with pytest.raises(LostError, match=r"does not answer within 0.5 s"):
            client.submit(client.get("/health", seconds=0.5)).result(20)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(("method", "tries"), [("completion", 4), ("load", 1)])
def test_what_does_not_get_through_is_sent_again_where_that_is_the_same(method: str, tries: int) -> None:
    seen: list[str] = []

    def handle(to: BaseHTTPRequestHandler) -> None:
        seen.append(to.path)
        to.close_connection = True
        to.connection.shutdown(socket.SHUT_RDWR)  # without a word

    seconds = None if method == "completion" else 5.0
    with serving(handle) as url, closing(Client(url)) as client, pytest.raises(LostError, match="does not answer"):
        client.call(client.post("/x", {}, seconds=seconds))
    assert len(seen) == tries


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_busy_server_is_asked_again(status: int) -> None:
    left = 2

    def handle(to: BaseHTTPRequestHandler) -> None:
        nonlocal left
        left -= 1
        answer(to, b'{"ok": 1}' if left < 0 else b"busy", 200 if left < 0 else status)

    with serving(handle) as url, closing(Client(url)) as client:
        assert client.call(client.post("/x", {})) == {"ok": 1}
        left = 99
        with pytest.raises(LostError, match=f"status {status}: busy"):
            client.call(client.post("/x", {}))


def test_no_message_holds_the_key() -> None:
    def handle(to: BaseHTTPRequestHandler) -> None:
        said = to.headers["Authorization"].encode()
        if to.path == "/json":
            return answer(to, json.dumps({"message": said.decode()}).encode(), 400)
        answer(to, said, 500 if to.path == "/fails" else 200)

    with serving(handle) as url, closing(Client(url, KEY)) as client:
        for path in ("/json", "/fails", "/odd"):
            with pytest.raises(EvoalignError, match=r"Bearer \*\*\*") as said:
                client.call(client.post(path, {}))
            assert KEY not in str(said.value)
    for key in ("sk-of a person", f"{KEY}\n", "sk-ключ-123"):
        with pytest.raises(ConfigError, match="set its variable to the key alone") as refused:
            Client("http://127.0.0.1:1", key)
        assert key.strip() not in str(refused.value)


@pytest.mark.parametrize("url", ["http://h:abc", "http://h:99999", "ftp://h", "http://", "http://a@h", "http://h:0"])
def test_what_is_no_address_is_refused(url: str) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="is no address of a server"):
        Client(url)
    assert threading.active_count() == threads


# --- a link ----------------------------------------------------------------------------------------------------------


class Well:
    """A dialect of a server that says that it is well, or not."""

    def __init__(self, is_well: bool = True) -> None:
        self.is_well = is_well

    async def is_ready(self, client: Client) -> bool:
        return self.is_well

    async def about(self, client: Client) -> Server:
        return Server("1", model="m")


def link(dialect: Any, **more: Any) -> Link:
    own = {"url": "http://127.0.0.1:9", "timeout": 0.2, "start_timeout": 0.5, **more}
    return Link(SglangConfig(name="sglang", **own), dialect, lambda port, key: pytest.fail("nothing is started here"))


def silent_until_lost(found: Link) -> float:
    start = time.monotonic()
    found.heard()
    while time.monotonic() - start < 10:
        found.silent()
        time.sleep(0.01)
    return pytest.fail("it was waited for without end")


def test_a_server_that_is_well_and_never_answers_counts_as_hung_at_last() -> None:
    with closing_link(link(Well())) as found:
        found.open()
        start = time.monotonic()
        with pytest.raises(LostError, match="says that it is well, and has answered nothing"):
            silent_until_lost(found)
        assert time.monotonic() - start > 4 * 0.2
        found._dialect.is_well = False  # type: ignore[attr-defined]
        with pytest.raises(LostError, match=r"hangs: no answer for 0.2 s"):
            silent_until_lost(found)


def test_a_recovery_that_fails_is_tried_again_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing_link(link(Well(), restarts=3)) as found:
        found.open()
        reach, failing = found._reach, [LostError("port taken"), LostError("no memory")]

        def now_and_then() -> None:
            if failing:
                raise failing.pop()
            reach()

        monkeypatch.setattr(found, "_reach", now_and_then)
        met: list[int] = []
        found.recover(LostError("died"), lambda: met.append(1))
        assert met == [1]
        failing += [LostError("again")] * 3
        with pytest.raises(EvoalignError, match=r"lost 4 times \(engine.restarts 3\)"):
            found.recover(LostError("died"), lambda: None)


def test_one_that_does_not_come_back_is_told_with_what_it_was_lost_by() -> None:
    with closing_link(link(Well())) as found:
        found.open()
        found._dialect.is_well = False  # type: ignore[attr-defined]
        with pytest.raises(EvoalignError, match=r"died; no SGLang answers at .*waited 0.5 s"):
            found.recover(LostError("died"), lambda: None)


@contextmanager
def closing_link(found: Link) -> Generator[Link]:
    try:
        yield found
    finally:
        found.close(None)


# --- what is asked, and what is taken for an answer ------------------------------------------------------------------


class Stub:
    """A client whose server answers by a function."""

    url = "http://stub"

    def __init__(self, says: Callable[[str, Any], Any]) -> None:
        self.says, self.asked = says, list[str]()
        self.now = self.most = 0

    async def post(self, path: str, body: Any, *, seconds: float | None = None) -> Any:
        self.asked.append(path)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        said = self.says(path, body)
        if isinstance(said, Exception):
            raise said
        return said

    async def get(self, path: str, *, seconds: float | None = None) -> Any:
        return await self.post(path, None, seconds=seconds)


def test_draws_of_a_vllm_server_are_in_flight_at_once() -> None:
    choice = {"index": 0, "token_ids": [2], "finish_reason": "stop"}
    client = Stub(lambda path, body: {"choices": [choice]})
    requests = [Request(i, (5,), Sampling(4, temperature=1.0), seed=i) for i in range(16)]
    said = asyncio.run(VllmDialect().generate(client, requests, "mine", [2]))  # type: ignore[arg-type]
    assert len(said) == 16 and client.most == 16


def test_one_chat_that_fails_ends_the_others() -> None:
    client = Stub(lambda path, body: RefusedError("no") if body["input_ids"] == [3] else asyncio.CancelledError())
    requests = [Request(i, (i,), Sampling(4)) for i in range(8)]
    with pytest.raises(RefusedError, match="no"):
        asyncio.run(SglangDialect("chat").generate(client, requests, None, [2]))  # type: ignore[arg-type]


@pytest.mark.parametrize("said", [{"enable_lora": None}, {"enable_lora": False}])
def test_a_server_without_adapters_is_told_at_once(said: Any) -> None:
    with pytest.raises(RefusedError, match="start it with --enable-lora"):
        asyncio.run(SglangDialect().about(Stub(lambda path, body: said)))  # type: ignore[arg-type]


def test_numbers_are_called_as_they_are_here() -> None:
    about = asyncio.run(SglangDialect().about(Stub(lambda path, body: {"dtype": "half"})))  # type: ignore[arg-type]
    assert about.dtype == "float16"


def test_a_session_of_weights_that_somebody_left_open_is_ended() -> None:
    refusals = [RefusedError("http://stub/begin_weight_update refuses: a session is already open")]
    client = Stub(lambda path, body: refusals.pop() if refusals and "begin" in path else {})
    assert asyncio.run(sglang_engine._begin(client, 5.0))  # type: ignore[arg-type]
    assert [path.split("_")[0] for path in client.asked] == ["/begin", "/end", "/begin"]
    absent = Stub(lambda path, body: RefusedError("not found", 404))
    assert not asyncio.run(sglang_engine._begin(absent, 5.0))  # type: ignore[arg-type]


def test_answers_that_are_none() -> None:
    request = Request(0, (5,), Sampling(4))
    for ids in ([], None, [True], ["3"], [-1], [2**40], [3] * 5):
        with pytest.raises(LostError):
            checked_ids(ids, request, "it")
    for value in (-(10**400), float("nan"), "0", None, 1.0, True):
        with pytest.raises(LostError):
            checked_logprobs([value], 1, "it")
    assert checked_logprobs([-1, float("-inf")], 2, "it") == (-1.0, float("-inf"))
    text = 'sglang:num_running_reqs{a="b"} .\nsglang:num_queue_reqs 3.0\nsglang:num_queue_reqs 4.0\n'
    assert measured(text, _METRIC, MEASURED) == {"queue": 3.0}


class Slow:
    """A dialect that counts what is loaded at once."""

    now = most = 0

    async def load(self, *_: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1

    async def unload(self, *_: Any) -> None:
        pass

    async def generate(self, client: Any, requests: Any, adapter: Any, stop_ids: Any) -> list[Said]:
        return [Said((2,), "stop", None) for _ in requests]


class Bare:
    """A shelf that nothing lies on: adapters go as tensors."""

    def drop(self, name: str) -> None:
        pass


def test_few_adapters_are_on_their_way_at_once() -> None:
    dialect, members = Slow(), population(12)
    with serving(answer) as url, closing(Client(url)) as client:
        traffic = Traffic(client, dialect, Bare(), False, 1, 12, 16, [2], lambda m: f"m{m.index}")  # type: ignore[arg-type]
        pairs = [(m, Request(0, (5,), Sampling(4))) for m in members]
        adapters = [PeftAdapter({}, {})] * len(members)
        said = list(traffic.hear(pairs, lambda m: False, lambda some: adapters[: len(some)]))
    assert sum(isinstance(one, Heard) for one in said) == 12 and dialect.most == LOADS


class Completes(Well):
    """A dialect whose completions are requests, of a server that says that it is well."""

    async def generate(self, client: Client, requests: Any, adapter: Any, stop_ids: Any) -> list[Said]:
        await client.post("/generate", {}, seconds=None)
        return [Said((2,), "stop", None) for _ in requests]


@pytest.mark.parametrize("kind", ["body", "header line", "early hints"])
def test_a_completion_without_end_is_ended_by_the_timeout_of_the_engine(kind: str) -> None:
    """After four times as long in a rollout, and at once where a few answers are asked for apart from one."""
    dialect, request = Completes(), Request(0, (5,), Sampling(4))
    with hostile(SLOW[kind]) as server, closing_link(link(dialect, url=server.url)) as found:
        found.open()
        engine: Any = SimpleNamespace(
            dialect=dialect, _link=found, _there=lambda: found.client, _shelf=Bare(), _by_files=False, _config=None,
            _settings=SimpleNamespace(timeout=0.2, batch=16, slots=lambda config: 1), _name=lambda member: "m",
            _tokens=SimpleNamespace(stop_ids=[2]), _is_bare=lambda member: True, _adapters=None,
        )  # fmt: skip
        for work, least in (
            (lambda: list(ServerEngine._hear(engine, MEAN_PLAN, [(MEAN, request)])), 4 * 0.2),
            (lambda: ServerEngine._asked(engine, [request], None), 0.2),
        ):
            began = time.monotonic()
            server.ended.clear()
            with pytest.raises(LostError):
                work()
            assert least <= time.monotonic() - began < 10
            assert server.ended.wait(10), "the connection is left open"


def test_an_address_elsewhere_sees_no_files() -> None:
    for own, sees in (({"url": "http://127.0.0.1:9"}, True), ({"url": "http://localhost.com:9"}, False),
                      ({"url": "http://host:9", "adapter_folder": "/a"}, True), ({"url": None}, True)):  # fmt: skip
        assert link(Well(), **own).sees_files == sees


def test_an_address_where_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRIES", 0)
    with closing_link(link(SglangDialect())) as found, pytest.raises(ModelError, match="no SGLang answers at"):
        found.open()
