# SPDX-License-Identifier: Apache-2.0
"""Service processes, tested over HTTP."""

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest
from command_line import caller
from planted_scorers import pairs, safe_rlhf, text
from served_scorers import SECONDS, Served, ask_one_by_one, count, until

from evoalign.config import ScorerConfig
from evoalign.errors import ConfigError, RewardError
from evoalign.rewards.scorer.client import Service
from evoalign.rewards.scorer.models import Local

service = pytest.importorskip("evoalign.rewards.scorer.service")
guard = pytest.importorskip("evoalign.http.guard")
uvicorn = pytest.importorskip("uvicorn")
TOKEN = {"SCORER_TOKEN_OF_TEST": "0123456789abcdef0123"}
VARIABLE = next(iter(TOKEN))
BEARER = {"Authorization": f"Bearer {TOKEN[VARIABLE]}"}
APART = 0.0105


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models whose scores are far apart: a thousand texts of other scores each."""
    folder = tmp_path_factory.mktemp("scorers")
    safe_rlhf(folder / "reward", scale=30.0)
    safe_rlhf(folder / "cost", scale=30.0, seed=5, said={"score_type": "cost"})
    return folder


def words(place, *more):
    return "--reward", str(place / "reward"), "--cost", str(place / "cost"), *more


@pytest.fixture(scope="module")
def direct(place):
    models = {"reward": str(place / "reward"), "cost": str(place / "cost")}
    yield Local(ScorerConfig(name="local", device="cpu", batch_size=1, **models))


@pytest.fixture(scope="module")
def served(place):
    with Served(place, *words(place)) as service:
        yield service


@pytest.fixture(scope="module")
def waiting(place):
    """One whose batches wait ten minutes for more, with a token."""
    more = ("--batch-size", "64", "--queue", "64", "--max-wait", "600", "--token-env", VARIABLE)
    with Served(place, *words(place, *more), environment=TOKEN) as service:
        yield service


def client(url, **settings):
    return Service(ScorerConfig(name="service", url=url, **settings))


def apart(direct, many):
    """Pairs whose rewards all differ by more than 1e-2, with their scores, in an order that is not theirs."""
    prompts = [text(i, 1 + i % 4) for i in range(2 * many)]
    responses = [f"{text(i + 10**6, 1 + i % 7)} {i}" for i in range(2 * many)]
    found = direct.score(prompts, responses)
    chosen, last = [], float("-inf")
    for at in sorted(range(len(prompts)), key=found["reward"].__getitem__):
        if found["reward"][at] > last + APART:
            chosen.append(at)
            last = found["reward"][at]
    chosen = sorted(chosen)[:many]
    assert len(chosen) == many
    rewards = sorted(found["reward"][at] for at in chosen)
    assert all(b - a > 1e-2 for a, b in pairwise(rewards))
    return (
        [prompts[at] for at in chosen], [responses[at] for at in chosen],
        {column: [scores[at] for at in chosen] for column, scores in found.items()},
    )  # fmt: skip


def test_published_clients_get_scores_in_their_form(served, direct):
    """Routes /score_batch and /score_texts; prompts may be in the template, texts may end with the end token."""
    prompts, responses = pairs(4)
    wanted = direct.score(prompts, responses)
    texts = [f"BEGINNING OF CONVERSATION: USER: {p} ASSISTANT:{r}" for p, r in zip(prompts, responses, strict=True)]
    formed = [one.removesuffix(response) for one, response in zip(texts, responses, strict=True)]
    bodies = [("score_batch", {"prompts": p, "responses": responses}) for p in (prompts, formed)]
    bodies += [("score_texts", {"texts": t}) for t in (texts, [f"{one}</s>" for one in texts])]
    for route, body in bodies:
        found = httpx.post(f"{served.url}/{route}", json=body, timeout=SECONDS).json()
        assert found.keys() == {"rewards", "costs"}
        assert found["rewards"] == pytest.approx(wanted["reward"], abs=1e-3), body
        assert found["costs"] == pytest.approx(wanted["cost"], abs=1e-3)
    for route, body in (("score_batch", {"prompts": [], "responses": []}), ("score_texts", {"texts": []})):
        assert httpx.post(f"{served.url}/{route}", json=body, timeout=SECONDS).json() == {"rewards": [], "costs": []}


@pytest.mark.parametrize(("route", "body", "status"), [
    ("score_texts", {"texts": ["of no template"]}, 422), ("score_texts", {"texts": [1]}, 422),
    ("score_texts", {"prompts": [], "responses": []}, 422), ("score_batch", {"texts": ["a"]}, 422),
    ("score_batch", {"prompts": ["a"], "responses": []}, 422),
    ("score_batch", {"prompts": ["a"] * 1025, "responses": ["b"] * 1025}, 413),
    ("score_texts", {"texts": ["BEGINNING OF CONVERSATION: USER: a ASSISTANT:b"] * 1025}, 413),
])  # fmt: skip
def test_routes_of_published_clients_have_the_same_limits(route, body, status, served):
    found = httpx.post(f"{served.url}/{route}", json=body, timeout=SECONDS)
    assert found.status_code == status and "of no template" not in found.text


def test_routes_of_published_clients_need_the_token(waiting):
    for route in ("score_batch", "score_texts"):
        assert httpx.post(f"{waiting.url}/{route}", json={"texts": []}, timeout=SECONDS).status_code == 401
    answer = httpx.post(f"{waiting.url}/score_texts", json={"texts": []}, headers=BEARER, timeout=SECONDS)
    assert answer.status_code == 200


@pytest.mark.slow
@pytest.mark.last("1000")
@pytest.mark.parametrize("requests", [200, 1000])
def test_many_requests_keep_their_scores(requests, served, direct):
    prompts, responses, wanted = apart(direct, requests)
    before = count(served.url, "items_total"), count(served.url, "batch_size_count")
    found = ask_one_by_one(served.url, prompts, responses)
    for column in ("reward", "cost"):
        assert [len(answer[column]) for answer in found] == [1] * requests
        assert [answer[column][0] for answer in found] == pytest.approx(wanted[column], abs=1e-3)
    batches = count(served.url, "batch_size_count") - before[1]
    assert count(served.url, "items_total") - before[0] == requests and batches < requests / 2
    assert (count(served.url, "queue_length"), count(served.url, "refused_total")) == (0, 0)


def test_client_returns_the_models_scores(served, direct):
    prompts, responses = pairs(150)
    scorer = client(served.url, concurrency=3)
    assert scorer.columns == ("reward", "cost") == direct.columns
    assert scorer.digest == direct.digest
    found, wanted = scorer.score(prompts, responses), direct.score(prompts, responses)
    for column in scorer.columns:
        assert found[column] == pytest.approx(wanted[column], abs=1e-3)
    assert scorer.score([], []) == {"reward": [], "cost": []}
    scorer.close()
    items = [{"prompt": prompt, "response": response} for prompt, response in zip(prompts[:5], responses, strict=False)]
    found = httpx.post(f"{served.url}/score", json={"items": items}, timeout=SECONDS).json()
    assert found["reward"] == pytest.approx(wanted["reward"][:5], abs=1e-3)


def test_health_describes_the_scorer(served):
    found = httpx.get(f"{served.url}/health").json()
    assert found["ready"] is True and found["columns"] == ["reward", "cost"] and found["device"] == "cpu"
    assert {model["name"] for model in found["models"].values()} == {"reward", "cost"}
    assert len({model["digest"] for model in found["models"].values()}) == 2
    assert "/score" in httpx.get(f"{served.url}/openapi.json").json()["paths"]


@pytest.mark.parametrize("body", [
    {"prompts": ["zqxtext"], "responses": []}, {"prompts": ["zqxtext"], "responses": [1]},
    {"items": [{"prompt": "zqxtext", "zqxkey": "b"}]}, {"items": "zqxtext"}, ["zqxtext"], "zqxtext",
])  # fmt: skip
def test_validation_errors_do_not_repeat_the_request(body, served):
    answer = httpx.post(f"{served.url}/score", json=body)
    assert answer.status_code == 422 and "zqx" not in answer.text and answer.json()["form"]
    broken = httpx.post(f"{served.url}/score", content=b'{"items": zqx', headers={"Content-Type": "application/json"})
    assert broken.status_code == 422 and "zqx" not in broken.text


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_long_is_refused(announced, served):
    body = b'{"prompts": ["' + b"a" * 2_000_000 + b'"], "responses": ["b"]}'
    content = body if announced else (body[i : i + 65536] for i in range(0, len(body), 65536))
    answer = httpx.post(f"{served.url}/score", content=content, headers={"Content-Type": "application/json"})
    assert answer.request.headers.get("Transfer-Encoding") == (None if announced else "chunked")
    assert answer.status_code == 413 and "1048576" in answer.json()["detail"]
    scorer = client(served.url)
    with pytest.raises(RewardError, match=r"take 20000\d\d bytes, .* a larger --max-body"):
        scorer.score(["a" * 2_000_000], ["b"])


def test_other_names_forms_and_methods_are_refused(served):
    port = served.port
    ours = (f"localhost:{port}", "LOCALHOST", "[::1]:1", "[::1]")
    others = (f"evil.example:{port}", "", "[::1", "[::1]evil", "::1", "127.0.0.1:x")
    for host, status in (*((host, 200) for host in ours), *((host, 421) for host in others)):
        assert httpx.get(f"{served.url}/health", headers={"Host": host}).status_code == status, host
    plain = httpx.post(f"{served.url}/score", content=b'{"items": []}', headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415
    assert httpx.get(f"{served.url}/score").status_code == 405
    assert httpx.get(f"{served.url}/docs").status_code == 404
    answer = httpx.post(f"{served.url}/score", json={"prompts": ["a"] * 1025, "responses": ["b"] * 1025})
    assert answer.status_code == 413 and "1024" in answer.json()["detail"], "more pairs than the queue holds"


def test_a_missing_or_wrong_token_is_refused(waiting, monkeypatch):
    wrong = [{}, *({"Authorization": text} for text in ("Bearer wrong", TOKEN[VARIABLE], "Bearer é".encode()))]
    for path in ("/health", "/metrics", "/openapi.json", "/nothing"):
        for headers in wrong:
            assert httpx.get(f"{waiting.url}{path}", headers=headers).status_code == 401
    for others in (["Bearer wrong"], [BEARER["Authorization"]]):
        for both in ([*others, BEARER["Authorization"]], [BEARER["Authorization"], *others]):
            headers = [("Authorization", text) for text in both]
            assert httpx.get(f"{waiting.url}/health", headers=headers).status_code == 401, "one counts, or none"
    assert httpx.post(f"{waiting.url}/score", json={"items": []}).status_code == 401
    assert httpx.post(f"{waiting.url}/score", json={"items": []}, headers=BEARER).json() == {"reward": [], "cost": []}
    with pytest.raises(RewardError, match=r"status 401.*scorer\.token_env"):
        client(waiting.url)
    monkeypatch.setenv(VARIABLE, TOKEN[VARIABLE])
    client(waiting.url, token_env=VARIABLE).close()
    assert TOKEN[VARIABLE] not in waiting.said


def test_client_continues_after_a_service_restart(place, direct):
    prompts, responses = pairs(20)
    first = Served(place, *words(place, "--batch-size", "64", "--max-wait", "600"))
    scorer = client(first.url, deadline=SECONDS)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(scorer.score, prompts, responses)
        until(lambda: count(first.url, "queue_length") == 20, "the request does not arrive")
        first.stop(9)
        assert not found.done()
        with Served(place, *words(place), port=first.port):
            scores = found.result(SECONDS)
    for column, wanted in direct.score(prompts, responses).items():
        assert scores[column] == pytest.approx(wanted, abs=1e-3)


def test_unavailable_service_raises_error(served):
    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(RewardError, match=rf"no scores from the scorer at {url} for 0.5 s .*start the service"):
            client(url, deadline=0.5)
        scorer = client(served.url)
        scorer._config = scorer._config.model_copy(update={"deadline": 0.5})
        scorer._http._http.base_url = httpx.URL(url)
        with pytest.raises(RewardError, match=r"no scores .* for 0.5 s"):
            scorer.score(["a"] * 100, ["b"] * 100)
        assert threading.active_count() < 60


@pytest.mark.parametrize(("more", "said"), [
    (("--host", "0.0.0.0"), "--host 0.0.0.0"),
    (("--host", "0.0.0.0", "--token-env", "NOT_THERE_AT_ALL"), "NOT_THERE_AT_ALL"),
    (("--template", "{prompt}"), "--template: write chat"), (("--queue", "3"), "--queue 3 is less than --batch-size"),
    (("--reward", "/nowhere/at/all"), "error: --reward: no folder /nowhere/at/all"),
])  # fmt: skip
def test_invalid_serve_options_raise_config_error(more, said, place, monkeypatch, capsys):
    found = caller(monkeypatch, capsys)("score", "serve", *words(place, "--port", "0", *more))
    assert found.code == 2 and said in found.err


def test_port_in_use_fails_before_loading_models(served, place):
    from evoalign.rewards.scorer.service import Limits, serve

    config = ScorerConfig(name="local", reward="/nowhere/at/all")
    with pytest.raises(ConfigError, match=f"--port {served.port} cannot be used"):
        serve(config, Limits(), host="127.0.0.1", port=served.port, token_env=None, tell=print)


HALF = b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
HALF_OPEN = 1100
"""More than the connections that a service serves."""


def test_half_sent_requests_take_no_place_of_those_with_a_token(waiting):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * HALF_OPEN)), hard))
    half = []
    try:
        for _ in range(HALF_OPEN):
            half.append(socket.create_connection(("127.0.0.1", waiting.port), timeout=SECONDS))
            half[-1].sendall(HALF)
        for _ in range(3):
            assert httpx.get(f"{waiting.url}/health", headers=BEARER, timeout=SECONDS).status_code == 200
        assert all(is_closed(one) for one in half[: HALF_OPEN - guard.WAITING - 3]), "the oldest ones"
    finally:
        for one in half:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "sent", [b"", HALF, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + HALF], ids=["none", "half", "second"]
)
def test_connection_is_closed_where_its_headers_take_too_long(sent, monkeypatch):
    """Also where a byte of them arrives now and then."""
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.5)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def closed():
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, timeout_keep_alive=60)
        state = guard.State()
        server = await asyncio.get_running_loop().create_server(
            lambda: guard.Connection(config, state, {}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent)
        answer, begun = b"", time.monotonic()
        while (part := await dripped(reader, writer if sent else None)) is not None:
            answer += part
            assert time.monotonic() < begun + SECONDS
        writer.close()
        server.close()
        assert not state.waiting and not state.connections
        return answer

    answer = asyncio.run(closed())
    assert answer.endswith(b"ok") == (len(sent) > len(HALF))


async def dripped(reader, writer):
    """Return what arrives within a tenth of a second, while a byte is sent; None at the end."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        if writer is not None:
            writer.write(b"a")
        part = await asyncio.wait_for(reader.read(4096), 0.1)
        return part or None
    return None if reader.at_eof() or reader.exception() else b""


def test_full_queue_returns_429_shutdown_finishes_requests_and_logs_have_no_text(waiting, direct):
    """The last test of this service, which it ends."""
    prompts, responses = pairs(40)
    prompts[0], responses[0] = "zqxtext", "zqx"
    body = {"prompts": prompts, "responses": responses}
    unread = httpx.post(f"{waiting.url}/score", json={"prompts": ["zqxtext"]}, headers=BEARER, timeout=SECONDS)
    nowhere = httpx.get(f"{waiting.url}/zqxpath?zqx=zqx", headers=BEARER, timeout=SECONDS)
    assert (unread.status_code, nowhere.status_code) == (422, 404)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, f"{waiting.url}/score", json=body, headers=BEARER, timeout=SECONDS)
        until(lambda: count(waiting.url, "queue_length", BEARER) == 40, "the first request does not arrive")
        second = httpx.post(f"{waiting.url}/score", json=body, headers=BEARER)
        assert second.status_code == 429 and 1 <= int(second.headers["Retry-After"]) <= 60
        assert count(waiting.url, "refused_total", BEARER) == 1
        assert waiting.stop() == 0
        answer = first.result()
    assert waiting.said == f"{waiting.url} is ready\nended\n"
    assert answer.status_code == 200
    for column, scores in direct.score(prompts, responses).items():
        assert answer.json()[column] == pytest.approx(scores, abs=1e-3)
