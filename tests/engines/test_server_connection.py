# SPDX-License-Identifier: Apache-2.0
"""The client, connection and dialects with servers that are slow, busy, hostile or gone; without a real server."""

import asyncio
import itertools
import json
import socket
import threading
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from hostile_server import SLOW, hostile, whole

from evoalign.engines.base import Completion
from evoalign.engines.server import client as client_module
from evoalign.engines.server.adapters import PeftAdapter
from evoalign.engines.server.client import Client, LostError, RefusedError
from evoalign.engines.server.connection import Connection
from evoalign.engines.server.dialect import ServerInfo, checked_ids, checked_logprobs
from evoalign.engines.server.engine import LOADS, ServerEngine
from evoalign.engines.server.settings import SglangConfig
from evoalign.engines.server.sglang import SglangDialect, begin_update
from evoalign.engines.server.vllm import VllmDialect
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.types import MEAN, MEAN_PLAN, Request, Sampling, population

KEY = "sk-of-this-test"


@contextmanager
def serving(handle):
    """Run a server that replies by `handle`, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            handle(self)

        do_POST = do_GET

        def log_message(self, format, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def answer(to, body=b"{}", status=200):
    to.send_response(status)
    to.send_header("Content-Length", str(len(body)))
    to.end_headers()
    to.wfile.write(body)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(client_module, "BACKOFF", 0.01)


def test_health_checks_are_not_queued_behind_completions_whose_number_is_limited():
    now, most, lock, release = 0, 0, threading.Lock(), threading.Event()

    def handle(to):
        nonlocal now, most
        if to.path == "/generate":
            with lock:
                now += 1
                most = max(most, now)
            release.wait(30)
            time.sleep(0.01)
            with lock:
                now -= 1
        answer(to)

    with serving(handle) as url, closing(Client(url, concurrency=4)) as client:
        waiting = [client.submit(client.post("/generate", {}, seconds=None)) for _ in range(30)]
        time.sleep(0.3)
        assert client.submit(client.get("/health", seconds=5)).result(10) == {}
        release.set()
        assert [one.result(30) for one in waiting] == [{}] * 30
    assert most == 4


def test_seconds_limit_the_whole_reply():
    with hostile(SLOW["body"]) as server, closing(Client(server.url)) as client:
        start = time.monotonic()
        with pytest.raises(LostError, match=r"0.5 s"):
            client.submit(client.get("/health", seconds=0.5)).result(20)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(("seconds", "tries"), [(None, 4), (5.0, 1)])
def test_completions_are_repeated_and_changes_are_not(seconds, tries):
    with hostile(lambda to: to.shutdown(socket.SHUT_RDWR)) as server, closing(Client(server.url)) as client:
        with pytest.raises(LostError):
            client.call(client.post("/x", {}, seconds=seconds))
        assert len(server.requests) == tries


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_request_to_a_busy_server_is_repeated(status):
    left = [status] * 2

    def reply(to):
        to.sendall(whole(b"busy", f"{left.pop()} Busy") if left else whole(b'{"ok": 1}'))

    with hostile(reply) as server, closing(Client(server.url)) as client:
        assert client.call(client.post("/x", {})) == {"ok": 1}
        left += [status] * 99
        with pytest.raises(LostError, match=f"status {status}: busy"):
            client.call(client.post("/x", {}))


def test_no_message_holds_the_key():
    def handle(to):
        key = to.headers["Authorization"].encode()
        if to.path == "/json":
            return answer(to, json.dumps({"message": key.decode()}).encode(), 400)
        answer(to, key, 500 if to.path == "/fails" else 200)

    with serving(handle) as url, closing(Client(url, KEY)) as client:
        for path in ("/json", "/fails", "/odd"):
            with pytest.raises(EvoalignError, match=r"Bearer \*\*\*") as raised:
                client.call(client.post(path, {}))
            assert KEY not in str(raised.value)
    for key in ("sk-of a person", f"{KEY}\n", "sk-ключ-123"):
        with pytest.raises(ConfigError, match="the key for") as refused:
            Client("http://127.0.0.1:1", key)
        assert key.strip() not in str(refused.value)


@pytest.mark.parametrize("url", ["http://h:abc", "http://h:99999", "ftp://h", "http://", "http://a@h", "http://h:0"])
def test_client_refuses_invalid_addresses(url):
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="address"):
        Client(url)
    assert threading.active_count() == threads


# --- a connection ----------------------------------------------------------------------------------------------------


class Well:
    """A dialect of a server that passes its health check, or fails it. It counts concurrent loads."""

    is_well = True
    now = most = 0

    async def is_ready(self, client):
        return self.is_well

    async def about(self, client):
        return ServerInfo("1", model="m")

    async def load(self, *_):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1

    async def unload(self, *_):
        pass

    async def generate(self, client, requests, adapter, stop_ids):
        return [Completion((2,), "stop", None) for _ in requests]

    async def metrics(self, client):
        return {"running": 1.0}


def connection(dialect, **more):
    own = {"url": "http://127.0.0.1:9", "timeout": 0.2, "start_timeout": 0.5, **more}
    settings = SglangConfig(name="sglang", **own)
    return Connection(settings, dialect, lambda port, key: pytest.fail("no server is started here"))


@contextmanager
def opened(dialect, **more):
    found = connection(dialect, **more)
    try:
        found.open()
        yield found
    finally:
        found.close(None)


def watch(found):
    found.received()
    found.client.call(found.watch(), 10)


def test_watch_raises_for_a_healthy_server_only_after_a_longer_time():
    with opened(Well()) as found:
        start = time.monotonic()
        with pytest.raises(LostError, match=r"engine.timeout"):
            watch(found)
        assert time.monotonic() - start > 4 * 0.2
        found._dialect.is_well = False
        with pytest.raises(LostError, match=r"0.2 s"):
            watch(found)
        with pytest.raises(EvoalignError, match=r"died; .*0.5 s"):
            found.recover(LostError("died"), lambda: None)


def test_recover_is_repeated_up_to_engine_restarts(monkeypatch):
    with opened(Well(), restarts=3) as found:
        reach, failing = found._reach, [LostError("port taken"), LostError("no memory")]

        def now_and_then():
            if failing:
                raise failing.pop()
            reach()

        monkeypatch.setattr(found, "_reach", now_and_then)
        met = []
        found.recover(LostError("died"), lambda: met.append(1))
        assert met == [1]
        failing += [LostError("again")] * 3
        with pytest.raises(EvoalignError, match=r"4 times \(engine.restarts 3\)"):
            found.recover(LostError("died"), lambda: None)


@pytest.mark.parametrize(
    ("settings", "sees"),
    [
        ({"url": "http://127.0.0.1:9"}, True),
        ({"url": "http://localhost.com:9"}, False),
        ({"url": "http://host:9", "adapter_folder": "/a"}, True),
        ({"url": None}, True),
    ],
)
def test_sees_files_only_on_this_machine_or_with_a_shared_folder(settings, sees):
    assert connection(Well(), **settings).sees_files == sees


def test_open_raises_where_no_server_listens(monkeypatch):
    monkeypatch.setattr(client_module, "RETRIES", 0)
    with pytest.raises(ModelError, match=r"http://127.0.0.1:9"), opened(SglangDialect()):
        pass


# --- dialects --------------------------------------------------------------------------------------------------------

REQUEST = Request(0, (5,), Sampling(4))


class Stub:
    """A client whose server replies by a function."""

    url = "http://stub"

    def __init__(self, says):
        self.says, self.asked = says, []
        self.now = self.most = 0

    async def post(self, path, body, *, seconds=None):
        self.asked.append(path)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        said = self.says(path, body)
        if isinstance(said, BaseException):
            raise said
        return said

    async def get(self, path, *, seconds=None):
        return await self.post(path, None, seconds=seconds)

    text = get


def test_sampled_requests_of_vllm_are_concurrent():
    choice = {"index": 0, "token_ids": [2], "finish_reason": "stop"}
    client = Stub(lambda path, body: {"choices": [choice]})
    requests = [Request(i, (5,), Sampling(4, temperature=1.0), seed=i) for i in range(16)]
    said = asyncio.run(VllmDialect().generate(client, requests, "mine", [2]))
    assert len(said) == 16 and client.most == 16


def test_a_failed_chat_cancels_the_others():
    client = Stub(lambda path, body: RefusedError("no") if body["input_ids"] == [3] else asyncio.CancelledError())
    requests = [Request(i, (i,), Sampling(4)) for i in range(8)]
    with pytest.raises(RefusedError, match="no"):
        asyncio.run(SglangDialect("chat").generate(client, requests, None, [2]))


def test_about_refuses_a_server_without_adapters_and_normalises_the_dtype():
    for said in (None, False):
        with pytest.raises(RefusedError, match="--enable-lora"):
            asyncio.run(SglangDialect().about(Stub(lambda path, body, said=said: {"enable_lora": said})))
    assert asyncio.run(SglangDialect().about(Stub(lambda path, body: {"dtype": "half"}))).dtype == "float16"


def test_begin_update_ends_a_session_that_was_left_open():
    refusals = [RefusedError("http://stub/begin_weight_update refuses: a session is already open")]
    client = Stub(lambda path, body: refusals.pop() if refusals and "begin" in path else {})
    assert asyncio.run(begin_update(client, 5.0))
    assert [path.split("_")[0] for path in client.asked] == ["/begin", "/end", "/begin"]
    assert not asyncio.run(begin_update(Stub(lambda path, body: RefusedError("not found", 404)), 5.0))


@pytest.mark.parametrize("ids", [[], None, [True], ["3"], [-1], [2**40], [3] * 5])
def test_checked_ids_rejects_invalid_completions(ids):
    with pytest.raises(LostError):
        checked_ids(ids, REQUEST, "it")


@pytest.mark.parametrize("value", [-(10**400), float("nan"), "0", None, 1.0, True])
def test_checked_logprobs_rejects_invalid_values(value):
    with pytest.raises(LostError):
        checked_logprobs([value], 1, "it")


def test_checked_logprobs_and_metrics_return_floats():
    assert checked_logprobs([-1, float("-inf")], 2, "it") == (-1.0, float("-inf"))
    text = 'sglang:num_running_reqs{a="b"} .\nsglang:num_queue_reqs 3.0\nsglang:num_queue_reqs 4.0\n'
    assert asyncio.run(SglangDialect().metrics(Stub(lambda path, body: text))) == {"queue": 3.0}


def engine_over(found, dialect, *, has_adapters, batch=16):
    """Return an engine without a model, over a connection, whose adapters are sent as tensors."""

    class Bare(ServerEngine):
        _by_files = False

        def _is_base(self, member):
            return not has_adapters

        def _adapters(self, plan, members):
            return [PeftAdapter({}, {})] * len(members)

    engine = object.__new__(Bare)
    engine.dialect, engine.connection, engine._config = dialect, found, None
    engine._store = SimpleNamespace(drop=lambda name: None)
    engine._settings = SimpleNamespace(timeout=0.2, batch=batch, slots=lambda config: 12)
    engine._tokens, engine._vocabulary, engine._load = SimpleNamespace(stop_ids=[2]), 2**31, {}
    engine._run, engine._serial, engine._total, engine._left = "run", itertools.count(), 0, 0
    return engine


def test_few_adapters_are_loaded_concurrently():
    dialect, members = Well(), population(12)
    with serving(answer) as url, opened(dialect, url=url) as found:
        engine = engine_over(found, dialect, has_adapters=True)
        completions = list(engine._completions(MEAN_PLAN, [(m, REQUEST) for m in members]))
    assert {member for member, _, _ in completions} == set(members) and dialect.most == LOADS
    assert engine._load == {"running": 1.0}


class Completes(Well):
    """A dialect whose completions are requests."""

    async def generate(self, client, requests, adapter, stop_ids):
        await client.post("/generate", {}, seconds=None)
        return await super().generate(client, requests, adapter, stop_ids)


@pytest.mark.parametrize("kind", ["body", "header line", "early hints"])
def test_an_endless_completion_is_ended_by_the_timeout_of_the_engine(kind):
    """In a rollout after four times the timeout, since the server passes its health check; otherwise after it."""
    dialect = Completes()
    with hostile(SLOW[kind]) as server, opened(dialect, url=server.url) as found:
        engine = engine_over(found, dialect, has_adapters=False)
        for work, least in (
            (lambda: list(engine._completions(MEAN_PLAN, [(MEAN, REQUEST)])), 4 * 0.2),
            (lambda: engine._complete([REQUEST], None), 0.2),
        ):
            began = time.monotonic()
            server.ended.clear()
            with pytest.raises(LostError):
                work()
            assert least <= time.monotonic() - began < 10
            assert server.ended.wait(10), "the connection is left open"


class FirstCompletes(Completes):
    """A dialect that completes request 0 without the server, once that has the other."""

    received: list[bytes]

    async def generate(self, client, requests, adapter, stop_ids):
        if requests[0].index == 0:
            while not self.received:
                await asyncio.sleep(0.01)
            return await Well.generate(self, client, requests, adapter, stop_ids)
        return await super().generate(client, requests, adapter, stop_ids)


def test_closing_a_rollout_cancels_its_requests():
    dialect, pairs = FirstCompletes(), [(MEAN, Request(i, (5,), Sampling(4))) for i in range(2)]
    with hostile(SLOW["body"]) as server, opened(dialect, url=server.url, timeout=60.0) as found:
        server.requests.clear()
        dialect.received = server.requests
        completions = engine_over(found, dialect, has_adapters=False, batch=1)._completions(MEAN_PLAN, pairs)
        assert next(completions)[1].index == 0
        completions.close()
        assert server.ended.wait(10), "the connection is left open"
