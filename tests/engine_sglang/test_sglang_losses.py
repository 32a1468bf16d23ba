# SPDX-License-Identifier: Apache-2.0
"""Invalid replies of SGLang, and a server that changed, are never scored."""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from faulty_server import Body, between
from served import KEY, answers, attached, config

from evoalign import engines, spaces, tokens
from evoalign.engines.base import ABSENT
from evoalign.engines.server import client
from evoalign.engines.server.base_model import PROBES
from evoalign.errors import EvoalignError, ModelError
from evoalign.models.origin import model_path
from evoalign.types import MEAN, MEAN_PLAN, Plan, Request, Sampling, Update, population

QUESTIONS = ["What is the capital of Japan?", "Next number: 3, 6, 9,"]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF", 0.01)


def opened(settings, length=12):
    """Return an engine that has started, and requests."""
    tokens_ = tokens.load(settings.model)
    engine = engines.create(settings, tokens_)
    space = spaces.create(settings)
    engine.start(space, space.layout(engine.specs(), engine.dtype), None, keep_start=False)
    return engine, [Request(i, tokens_.encode(q), Sampling(length)) for i, q in enumerate(QUESTIONS)]


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
    with between(url, os.environ[KEY], now) as address:
        engine, requests = opened(attached(address, engine={"restarts": 0}))
        with closing(engine):
            now.change = change
            with pytest.raises(EvoalignError, match=why):
                list(engine.rollout(MEAN_PLAN, requests))


@pytest.mark.long
def test_push_accepts_a_server_that_already_has_the_mean():
    """After an invalid reply it gets the weights that it has once more; one that was restarted while idle, and has the
    base model again, gets them too."""
    now, plan = Now(), Plan(1, 0.05, (*population(4), MEAN))
    settings = config("lowrank")
    with (
        closing(engines.create(settings, tokens.load(settings.model))) as own,
        between(own.connection.client.url, own.connection.client.key, now) as address,
    ):
        engine, requests = opened(attached(address, "lowrank"))
        with closing(engine):

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
            own.connection.client.call(own.connection.client.post("/update_weights_from_disk", base, seconds=60.0))
            assert said() == moved and engine.connection.losses == 1


def test_a_server_that_comes_back_with_other_weights_is_refused(url):
    """The log-probabilities are those of another model."""
    now = Now()
    with between(url, os.environ[KEY], now) as address:
        engine, requests = opened(attached(address))
        with closing(engine):

            def other(body, right):
                if len(right) == len(PROBES):  # the prompts by which a server is recognised
                    for one in right:
                        rows = one["meta_info"].get("output_token_logprobs") or []
                        one["meta_info"]["output_token_logprobs"] = [[p - 3.0, *rest] for p, *rest in rows]
                    return right
                return "invalid"

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

    with between(url, os.environ[KEY], handle) as address:
        engine, requests = opened(attached(address, engine={"timeout": 5.0}))
        with closing(engine), pytest.raises(ModelError, match="is not there"):
            start = time.monotonic()
            list(engine.rollout(Plan(0, 0.0, (ABSENT,)), requests))
        release.set()
        assert not left and engine.connection.losses == 1 and time.monotonic() - start < 60
