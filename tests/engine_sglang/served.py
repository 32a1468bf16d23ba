# SPDX-License-Identifier: Apache-2.0
"""Configs for SGLang in these tests, and its completions."""

from contextlib import closing, contextmanager

from evoalign import engines, spaces, tokens
from evoalign.config import from_dict
from evoalign.types import Request, Sampling

KEY = "EVOALIGN_TEST_KEY"
QUESTIONS = ["What is the capital of Japan?", "Next number: 3, 6, 9,", "True or false: all dogs are animals."]


def config(space="lora", name="sglang", **more):
    """Return a config of the tiny model in float32, with a population of 30."""
    own = {"context_length": 512, "max_total_tokens": 32_768, "timeout": 60.0, **more.pop("engine", {})}
    if "url" in own:
        own = {n: v for n, v in own.items() if n not in ("context_length", "max_total_tokens")}
    tree = {
        "seed": 5, "space": space, "model": {"name": "tiny", "dtype": "float32"},
        "engine": {"name": name, **(own if name == "sglang" else {"device": "cpu"})},
        "lora": {"rank": 8}, "lowrank": {"rank": 8},
        "es": {"sigma": 0.05, "learning_rate": 0.02, "population_size": 30}, **more,
    }  # fmt: skip
    return from_dict(tree)


def attached(url, space="lora", **more):
    """Return the same over a running server."""
    return config(space, engine={"url": url, "key_variable": KEY, **more.pop("engine", {})}, **more)


@contextmanager
def opened(settings, sampling=Sampling(24), **fields):  # noqa: B008
    """Yield an engine that has started, and requests."""
    tokens_, space = tokens.load(settings.model), spaces.create(settings)
    with closing(engines.create(settings, tokens_)) as engine:
        engine.start(space, space.layout(engine.specs(), engine.dtype), None, keep_start=False)
        yield engine, [Request(i, tokens_.encode(q), sampling, **fields) for i, q in enumerate(QUESTIONS)]


def answers(engine, plan, requests):
    """Return a rollout by member and request."""
    return {(r.member.index, r.request): r for r in engine.rollout(plan, requests)}
