# SPDX-License-Identifier: Apache-2.0
"""Invalid replies of SGLang, and a server that changed, are never scored."""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from typing import Any

import pytest
from faulty_server import Body, between
from served import KEY, answers, attached, config, opened

from evoalign import engines, tokens
from evoalign.engines.base import ABSENT
from evoalign.engines.server import client
from evoalign.engines.server.base_model import PROBES
from evoalign.errors import EvoalignError, ModelError
from evoalign.models.origin import model_path
from evoalign.types import MEAN, MEAN_PLAN, Plan, Sampling, Update, population


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF", 0.01)


@contextmanager
def faulty(url, handle, space="lora", **engine):
    """Yield an engine over a server behind a proxy, and two requests."""
    with (
        between(url, os.environ[KEY], handle) as address,
        opened(attached(address, space, engine=engine), Sampling(12)) as (found, requests),
    ):
        yield found, requests[:2]


class Now:
    """A server that replies as SGLang does until `change` is set, which then gets SGLang's replies."""

    change: Callable[[Body, Any], Any] | None = None

    def __call__(self, path, body, forward):
        status, said = forward(path, body)
        if self.change is None or path != "/generate" or status != 200:
            return status, said
        return 200, json.dumps(self.change(body, json.loads(said))).encode()


def _with(**fields):
    return lambda body, said: [{**one, **fields} for one in said]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_with(output_ids=[]), "returns no token ids"),
        (_with(output_ids=[99_999_999] * 12), "token 99999999, and the model has 1024"),
        (_with(output_ids=[5], meta_info={"finish_reason": {"type": "length"}}), "after 1 tokens"),
        (_with(output_ids=[5], meta_info={"finish_reason": {"type": "stop"}}), "stop token"),
        (_with(meta_info={"finish_reason": {"type": "abort"}}), "abort"),
        (lambda body, said: said[:-1], "2 completions"),
        (lambda body, said: {"error": "nothing"}, "2 completions"),
    ],
)  # fmt: skip
def test_an_incomplete_completion_is_not_scored(url, change, why):
    now = Now()
    with faulty(url, now, restarts=0) as (engine, requests):
        now.change = change
        with pytest.raises(EvoalignError, match=why):
            list(engine.rollout(MEAN_PLAN, requests))


@pytest.mark.long
def test_push_accepts_a_server_that_already_has_the_mean(monkeypatch):
    """After an invalid reply it gets the weights that it has once more; one that was restarted while idle, and has the
    base model again, gets them too."""
    now, plan, settings = Now(), Plan(1, 0.05, (*population(4), MEAN)), config("lowrank")
    with closing(engines.create(settings, tokens.load(settings.model))) as own:
        server = own.connection.client
        monkeypatch.setenv(KEY, server.key)
        with faulty(server.url, now, "lowrank") as (engine, requests):

            def said():
                return {key: rollout.token_ids for key, rollout in answers(engine, plan, requests).items()}

            before = said()
            engine.apply(Update(0, 0, population(4), (1.0, -1.0, 0.5, 0.0), 0.05, 0.5))
            moved = said()
            assert moved != before
            wrong = [_with(output_ids=[])]
            now.change = lambda body, right: wrong.pop()(body, right) if wrong else right
            assert said() == moved and not wrong and engine.connection.losses == 1
            base = {"model_path": str(model_path(settings.model)), "flush_cache": True}
            server.call(server.post("/update_weights_from_disk", base, seconds=60.0))
            assert said() == moved and engine.connection.losses == 1


def test_a_server_that_comes_back_with_other_weights_is_refused(url):
    """The log-probabilities are those of another model."""

    def other(body, right):
        if len(right) != len(PROBES):  # the prompts by which a server is recognised
            return "invalid"
        for one in right:
            rows = one["meta_info"].get("output_token_logprobs") or []
            one["meta_info"]["output_token_logprobs"] = [[p - 3.0, *rest] for p, *rest in rows]
        return right

    now = Now()
    with faulty(url, now) as (engine, requests):
        now.change = other
        with pytest.raises(EvoalignError, match="other weights than before it was lost"):
            list(engine.rollout(MEAN_PLAN, requests))


@pytest.mark.parametrize("how", ["garbage", "hang"])
def test_a_loss_during_the_check_of_an_unknown_adapter_is_recovered(url, how):
    left, release = [1], threading.Event()

    def handle(path, body, forward):
        if path == "/generate" and "lora_path" in body and left:
            left.pop()
            if how == "garbage":
                return 200, b"[]"
            release.wait(60)
        return forward(path, body)

    with faulty(url, handle, timeout=5.0) as (engine, requests):
        start = time.monotonic()
        with pytest.raises(ModelError, match="is not there"):
            list(engine.rollout(Plan(0, 0.0, (ABSENT,)), requests))
        release.set()
        assert not left and engine.connection.losses == 1 and time.monotonic() - start < 60
