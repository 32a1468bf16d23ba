# SPDX-License-Identifier: Apache-2.0
"""`evoalign gateway` in this process: which model answers, with which settings, and what is refused."""

import contextlib
import functools
import os
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import yaml
from small_runs import UNCHECKED, write_rows

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

import evoalign
from evoalign.engines.transformers import engine as engines
from evoalign.episodes import LostError
from evoalign.errors import ConfigError, EvoalignError, JournalError
from evoalign.gateway.serving import Address, serve
from evoalign.rollouts import collect
from evoalign.training.hosting import opened
from evoalign.training.replay import log_of, rebuilt
from evoalign.types import MEAN, MEAN_PLAN, Plan, Request, Sampling

PROMPT = [{"role": "user", "content": "Which month comes after May?"}]
SECONDS = 120
LOOPBACK = Address()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two generations with wide noise. The run names code of a reward, which is gone."""
    folder = tmp_path_factory.mktemp("serving")
    write_rows(folder / "rows.jsonl", [{"prompt": f"What is {a} + 1?"} for a in range(5)])
    code = folder / "own.py"
    code.write_text("def length(text, example):\n    return -float(len(text))\n")
    task = {"name": "custom", "train_data": str(folder / "rows.jsonl"), "rewards": [f"{code}:length"]}
    es = {"sigma": 0.3, "learning_rate": 0.15, "num_generations": 2, "population_size": 4}
    tree = {
        "output_dir": str(folder / "run"), "task": task, "es": es, "grader": {"isolated": False}, "report": False,
        "evaluation": {"max_tokens": 8}, "checks": UNCHECKED,
        "lora": {"target_layers": [3], "target_modules": ["down_proj"]},
    }  # fmt: skip
    evoalign.train(tree)
    code.unlink()
    return str(folder / "run")


def served(work, *target, address=LOOPBACK, **how):
    """Serve a model, and return what `work` gives for its address and key, after which Ctrl-C ends the server."""
    found, told = [], []

    def tell(model, url, key):
        told.append((model, url))

        def ask():
            try:
                found.append(work(url, key or os.environ[address.token_env]))
            finally:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threading.Thread(target=ask).start()

    with contextlib.suppress(KeyboardInterrupt):
        serve(lambda: opened(*target, **how), address, tell)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{told[0][1].removesuffix('/v1')}/health")
    assert not [thread for thread in threading.enumerate() if thread.name == "evoalign-gateway"]
    return found[0]


def post(url, key, **more):
    body = {"model": "m", "messages": PROMPT, **more}
    return httpx.post(f"{url}/chat/completions", json=body, headers={"x-api-key": key}, timeout=SECONDS)


def text_of(url, key, **more):
    return post(url, key, **more).raise_for_status().json()["choices"][0]["message"]["content"]


@functools.cache
def direct(run, generation, member=None, max_tokens=8):
    """Return the completion of the mean, or of a member, without a server."""
    log = log_of(run)
    with rebuilt(log, generation=generation) as (there, _):
        plan, request = MEAN_PLAN, Request(0, there.tokens.encode(PROMPT), Sampling(max_tokens))
        if member is not None:
            update = log.generations[generation].update
            plan = Plan(update.generation, update.sigma, update.members)
        found = {rollout.member.index: rollout.text for rollout in collect(there.engine, plan, [request])}
        return found[MEAN.index if member is None else member]


def test_the_mean_and_members_are_those_of_the_run(run):
    means = {generation: direct(run, generation) for generation in (0, 1, 2)}
    members = {place: direct(run, *place) for place in ((0, 1), (1, 3))}
    assert len({*means.values(), *members.values()}) == 5, "else this test shows nothing"
    assert served(text_of, run) == means[2]
    assert served(text_of, run, generation=1) == means[1]
    for (generation, member), text in members.items():
        assert served(text_of, run, generation=generation, member=member) == text


def test_other_models_are_served_with_settings_of_the_command(run):
    sets = ["evaluation.max_tokens=3"]
    assert served(text_of, "tiny", (), sets) == direct(run, 0, max_tokens=3)
    assert served(text_of, run, (), sets) == direct(run, 2, max_tokens=3)
    assert served(text_of, run, (), sets, generation=1) == direct(run, 1, max_tokens=3)


def test_requests_set_their_own_sampling(run):
    def work(url, key):
        usage = post(url, key, max_tokens=20).json()["usage"]
        drawn = [text_of(url, key, temperature=1.0) for _ in range(4)]
        full = post(url, key, max_tokens=10**6).json()
        return usage["completion_tokens"], drawn, full["choices"][0]["finish_reason"]

    tokens, drawn, reason = served(work, "tiny")
    assert 8 < tokens <= 20 and len(set(drawn)) > 1 and reason in ("stop", "length")


def test_requests_at_the_same_time_are_answered_alike(run):
    def work(url, key):
        with ThreadPoolExecutor(12) as threads:
            return list(threads.map(lambda _: text_of(url, key), range(12)))

    assert set(served(work, run)) == {direct(run, 2)}


def test_only_the_key_is_accepted_and_scores_are_ignored(run, monkeypatch):
    def work(url, key):
        bad = [post(url, wrong).status_code for wrong in ("", "sk-other", f"{key}x", key[:-1])]
        score = httpx.post(f"{url}/score", json={"reward": 1}, headers={"Authorization": f"Bearer {key}"})
        return bad, post(url, key).status_code, score.status_code

    expected = ([401] * 4, 200, 200)
    assert served(work, "tiny") == expected
    monkeypatch.setenv("GATEWAY_KEY", "0123456789abcdef")
    assert served(work, "tiny", address=Address(token_env="GATEWAY_KEY")) == expected


@pytest.mark.parametrize(
    ("target", "how", "error"),
    [
        ("run", {"member": 1}, ConfigError),
        ("run", {"generation": 2, "member": 0}, ConfigError),
        ("run", {"generation": 1, "member": 4}, ConfigError),
        ("run", {"generation": 3}, JournalError),
        ("tiny", {"generation": 1}, ConfigError),
        ("run", {"generation": 1, "sets": ["engine=vllm"]}, ConfigError),
        ("missing", {}, EvoalignError),
    ],
)
def test_models_that_do_not_exist_are_refused(run, tmp_path, target, how, error):
    place = {"run": run, "missing": str(tmp_path / "missing")}.get(target, target)
    with pytest.raises(error), opened(place, **how):
        pass


def test_a_run_from_elsewhere_chooses_no_address(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    tree = yaml.safe_load((copy / "config.yaml").read_text())
    forged = {**tree, "engine": {"name": "sglang", "url": "http://127.0.0.1:9"}}
    (copy / "config.yaml").write_text(yaml.safe_dump(forged))
    with pytest.raises(ConfigError, match=r"engine\.url"), opened(str(copy)):
        pass


@pytest.mark.parametrize("more", [{}, {"token_env": "GATEWAY_KEY"}])
def test_other_addresses_need_a_key_and_a_certificate(monkeypatch, more):
    monkeypatch.setenv("GATEWAY_KEY", "0123456789abcdef")
    with pytest.raises(ConfigError, match="--certfile"):
        serve(lambda: pytest.fail("loaded"), Address("0.0.0.0", **more), print)


def test_a_port_in_use_and_a_short_key_are_refused_before_the_model_is_loaded(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        serve(lambda: pytest.fail("loaded"), Address(port=taken.getsockname()[1]), print)
    monkeypatch.setenv("GATEWAY_KEY", "short")
    with pytest.raises(ConfigError, match="GATEWAY_KEY"):
        serve(lambda: pytest.fail("loaded"), Address(token_env="GATEWAY_KEY"), print)


def test_a_lost_engine_ends_the_server(monkeypatch):
    def rollout(self, plan, requests):
        raise LostError("gone", MEAN)

    monkeypatch.setattr(engines.TransformersEngine, "rollout", rollout)
    status = []

    def tell(model, url, key):
        threading.Thread(target=lambda: status.append(post(url, key).status_code)).start()

    with pytest.raises(LostError):
        serve(lambda: opened("tiny"), Address(), tell)
    while not status:
        time.sleep(0.01)
    assert status == [503]
