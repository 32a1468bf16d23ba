# SPDX-License-Identifier: Apache-2.0
"""Configs for SGLang in these tests, and its completions."""

from evoalign.config import from_dict

KEY = "EVOALIGN_TEST_KEY"


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


def answers(engine, plan, requests):
    """Return a rollout by member and request."""
    return {(r.member.index, r.request): r for r in engine.rollout(plan, requests)}
