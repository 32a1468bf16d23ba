# SPDX-License-Identifier: Apache-2.0
"""The client with a service that is wrong, late or unavailable: correct scores or an error."""

import json
import re
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evoalign.config import ScorerConfig
from evoalign.errors import ConfigError, RewardError
from evoalign.rewards.scorer import client
from evoalign.rewards.scorer.client import Service

HEALTH = {"columns": ["reward", "cost"], "digest": "d" * 64, "limits": {"items": 8, "body": 2000}}
DIGEST = {"X-Scorer-Digest": "d" * 64}


def right(body):
    """Scores are the lengths of the texts."""
    reward, cost = (list(map(len, body[name])) for name in ("responses", "prompts"))
    return 200, json.dumps({"reward": reward, "cost": cost}).encode(), DIGEST


class Fake:
    """A service whose answers are those of `answers`, one after another, and then right ones."""

    def __init__(self):
        self.answers = []
        self.health = (200, json.dumps(HEALTH).encode(), {})
        self.asked = []
        self.clients = []
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def client(self, **settings):
        self.clients.append(Service(ScorerConfig(name="service", url=self.url, **settings)))
        return self.clients[-1]

    def answer(self, path, headers, raw):
        if path == "/health":
            return self.health
        body = json.loads(raw)
        with self.lock:
            self.asked.append((len(body["prompts"]), headers))
            how = self.answers.pop(0) if self.answers else right
        return how(body)


class _Handler(BaseHTTPRequestHandler):
    fake: Fake

    def do_GET(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body, headers = self.fake.answer(self.path, dict(self.headers), raw)
        if status == 0:  # gone without a word
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format, *args):
        """Nothing."""


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF", 0.01)
    found = Fake()
    yield found
    for scorer in found.clients:
        scorer.close()
    found.server.shutdown()
    found.server.server_close()


def of(*parts, status=200, headers=None):
    body = parts[0] if isinstance(parts[0], bytes) else json.dumps(parts[0]).encode()
    return lambda _: (status, body, DIGEST if headers is None else headers)


PROMPTS, RESPONSES = ["aaa", "aa", "a"], ["b", "bb", "bbb"]
WANTED = {"reward": [1, 2, 3], "cost": [3, 2, 1]}


@pytest.mark.parametrize("answer", [
    of(b"", status=0), of({"detail": "full"}, status=429, headers={"Retry-After": "1"}),
    of({"detail": "full"}, status=429, headers={"Retry-After": "-inf"}), of(b"<html>bad gateway</html>", status=502),
    of({"detail": "scoring failed", "again": True}, status=500), of({"ready": False}, status=503),
    of(b'{"reward": [1', headers={**DIGEST, "Content-Length": "4000"}),
])  # fmt: skip
def test_temporary_failures_are_retried(answer, fake):
    scorer = fake.client()
    fake.answers = [answer, answer]
    assert scorer.score(PROMPTS, RESPONSES) == WANTED
    assert len(fake.asked) == 3


def test_timeouts_are_retried(fake):
    over = threading.Event()
    fake.answers = [lambda body: (over.wait(60), right(body))[1]]
    scorer = fake.client(timeout=2)
    assert scorer.score(PROMPTS, RESPONSES) == WANTED
    assert len(fake.asked) == 2
    over.set()


@pytest.mark.parametrize(("answer", "said"), [
    (of({"reward": [1, 2], "cost": [1, 2, 3]}), "2 scores of reward for 3 pairs"),
    (of({"reward": [1, 2, 3]}), "other columns than reward, cost"),
    (of({"reward": [1, 2, 3], "cost": [1, 2, 3], "more": []}), "other columns"),
    (of(b'{"reward": [1, 2, NaN], "cost": [1, 2, 3]}'), "not finite"),
    (of(b'{"reward": [1, 2, 1e999], "cost": [1, 2, 3]}'), "not finite"),
    (of({"reward": [1, 2, None], "cost": [1, 2, 3]}), "reward that is not a finite number"),
    (of({"reward": [1, 2, True], "cost": [1, 2, 3]}), "reward that is not a finite number"),
    (of({"reward": [1, 2, "3"], "cost": [1, 2, 3]}), "reward that is not a finite number"),
    (of({"reward": 0, "cost": [1, 2, 3]}), "0 scores of reward"), (of([0, 0, 0]), "other columns"),
    (of(b"<html>hello</html>"), "damaged"), (of(WANTED, headers={"X-Scorer-Digest": "e" * 64}), "changed its models"),
    (of(WANTED, headers={}), "changed its models"),
    (of({"detail": "scorer.reward gives nan", "again": False}, status=500), "status 500: scorer.reward gives nan"),
    (of({"detail": "no"}, status=401), "status 401: no; set scorer.token_env"),
    (of({"detail": [{"loc": []}]}, status=422), "status 422"),
    (of(b"{}", status=307, headers={"Location": "http://127.0.0.1:1/"}), "status 307"),
])  # fmt: skip
def test_invalid_responses_raise_immediately(answer, said, fake):
    scorer = fake.client()
    fake.answers = [answer]
    with pytest.raises(RewardError, match=said):
        scorer.score(PROMPTS, RESPONSES)
    assert len(fake.asked) == 1
    assert scorer.score(PROMPTS, RESPONSES) == WANTED  # it is asked again as if nothing had been


def test_outage_and_recovery_are_logged_once(fake, caplog, monkeypatch):
    """However many requests meet it. A queue that is full is none."""
    monkeypatch.setattr(client, "QUIET", 0.0)
    scorer = fake.client(concurrency=4, deadline=100.0)
    fake.answers = [of({}, status=429)] * 2
    scorer.score(PROMPTS * 10, RESPONSES * 10)
    assert caplog.messages == []
    for _ in range(2):
        caplog.clear()
        fake.answers = [of(b"", status=0)] * 6
        scorer.score(PROMPTS, RESPONSES)
        away, back = caplog.messages
        said = rf"no scores from the scorer at {fake.url} \(.+\): retrying for 100 s, until [\d:]{{8}}; "
        assert re.match(said, away)
        assert back.startswith(f"the scorer at {fake.url} ")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_deadline_counts_time_without_any_scores_and_logs_one_outage(concurrency, fake, caplog, monkeypatch):
    monkeypatch.setattr(client, "QUIET", 0.1)
    scorer = fake.client(concurrency=concurrency, deadline=3)
    fake.answers = [of({}, status=503)] * 10_000
    with pytest.raises(RewardError, match=r"no scores .* for 3 s \((status 503|no response).*start it again"):
        scorer.score(PROMPTS * 10, RESPONSES * 10)
    assert len(caplog.messages) == 1 and "retrying for 3 s" in caplog.text


def test_failures_between_and_after_successes_are_not_logged(fake, caplog, monkeypatch):
    monkeypatch.setattr(client, "QUIET", 60.0)
    fake.answers = [*[right] * 3, of({}, status=503)] * 50
    fake.client(concurrency=4).score(PROMPTS * 400, RESPONSES * 400)
    assert len(fake.asked) > 150 and caplog.messages == []
    fake.asked.clear()
    monkeypatch.setattr(client, "QUIET", 0.0)
    scorer = fake.client(concurrency=2)
    answered = threading.Event()
    monkeypatch.setattr(scorer, "_note_success", lambda tell=scorer._note_success: (tell(), answered.set()))
    fake.answers = [lambda _: (answered.wait(60), of({}, status=503)(_))[1]]
    scorer.score(PROMPTS * 4, RESPONSES * 4)
    assert len(fake.asked) == 3 and caplog.messages == []


def test_outage_is_logged_before_the_deadline(fake, monkeypatch):
    """However long the first line takes to be written, while another request is answered."""
    monkeypatch.setattr(client, "QUIET", 0.0)
    told, writing = [], threading.Event()

    def write(line, *_):
        if "no scores" in line:
            writing.set()
            time.sleep(0.2)
        told.append(line)

    monkeypatch.setattr(client.logger, "warning", write)
    scorer = fake.client(concurrency=2)
    fake.answers = [of({}, status=503), lambda body: (writing.wait(60), right(body))[1]]
    scorer.score(PROMPTS * 4, RESPONSES * 4)
    assert ["no scores" in line for line in told] == [True, False]


def test_the_last_try_is_at_the_deadline(fake):
    """However long a pause would be."""
    scorer = fake.client(deadline=2)
    full = of({}, status=429, headers={"Retry-After": "3600"})
    for answers, asked in (([full], 2), ([full, full], 4)):
        fake.answers, began = answers, time.monotonic()
        with nullcontext() if len(answers) == 1 else pytest.raises(RewardError, match=r"no scores .* for 2 s"):
            assert scorer.score(PROMPTS, RESPONSES) == WANTED
        assert len(fake.asked) == asked and time.monotonic() - began >= 2


def test_chunks_respect_limits_and_keep_order(fake):
    scorer = fake.client(concurrency=5)
    prompts = ["p" * (1 + 37 * i % 900) for i in range(100)]
    responses = ["r" * (1 + 11 * i % 700) for i in range(100)]
    found = scorer.score(prompts, responses)
    assert found == {"reward": list(map(len, responses)), "cost": list(map(len, prompts))}
    assert all(int(headers["Content-Length"]) <= 2000 and count <= 8 for count, headers in fake.asked)
    assert sum(count for count, _ in fake.asked) == 100
    with pytest.raises(RewardError, match="2 prompts but 1 responses"):
        scorer.score(["a", "b"], ["c"])


@pytest.mark.parametrize("health", [
    {}, [], {**HEALTH, "columns": ["cost"]}, {**HEALTH, "digest": None}, {**HEALTH, "limits": {"items": 0, "body": 1}},
])  # fmt: skip
def test_other_servers_are_rejected(health, fake):
    fake.health = (200, json.dumps(health).encode(), {})
    with pytest.raises(RewardError, match="the server there is not a scorer"):
        fake.client()


def test_the_token_is_sent_from_the_environment_alone(fake, monkeypatch):
    with pytest.raises(ConfigError, match="NO_TOKEN_HERE"):
        fake.client(token_env="NO_TOKEN_HERE")
    monkeypatch.setenv("A_TOKEN_OF_TEST", "s3cret-s3cret-s3cret")
    scorer = fake.client(token_env="A_TOKEN_OF_TEST")
    scorer.score(["a"], ["b"])
    assert fake.asked[0][1]["Authorization"] == "Bearer s3cret-s3cret-s3cret"
    for url in ("http://scorer.example:8011", "http://127.0.0.1.example", "http://10.0.0.7"):
        with pytest.raises(ConfigError, match="not sent over plain http to another machine") as refused:
            Service(ScorerConfig(name="service", url=url, token_env="A_TOKEN_OF_TEST"))
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://:80", "http://127.0.0.1:99999", "http://[::1"])
def test_invalid_addresses_are_rejected(url):
    with pytest.raises(ConfigError, match=r"scorer.url .* is not the address of a service"):
        Service(ScorerConfig(name="service", url=url))
