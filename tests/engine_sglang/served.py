# SPDX-License-Identifier: Apache-2.0
"""Configs for SGLang in these tests, and its completions."""

from __future__ import annotations

from typing import Any

from evoalign.config import Config, from_dict
from evoalign.engines import Engine
from evoalign.types import Plan, Request, Rollout

KEY = "EVOALIGN_TEST_KEY"


def config(space: str = "lora", name: str = "sglang", **more: Any) -> Config:
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


def attached(url: str, space: str = "lora", **more: Any) -> Config:
    """Return the same over a running server."""
    return config(space, engine={"url": url, "key_variable": KEY, **more.pop("engine", {})}, **more)


def answers(engine: Engine, plan: Plan, requests: list[Request]) -> dict[tuple[int, int], Rollout]:
    """Return a rollout by member and request."""
    return {(r.member.index, r.request): r for r in engine.rollout(plan, requests)}
