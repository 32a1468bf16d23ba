# SPDX-License-Identifier: Apache-2.0
"""Costs of the driver of `engine: ray` alone, measured on this machine without a model.

    python studies/ray_costs.py

`Dispatcher` itself hands out chunks to replicas that answer at once, without Ray, and checks completions of 128
tokens; Ray's own calls, and reading completions from its store, are timed with one actor. Used by ray_simulation.py.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from evoalign.engines.ray.actor import Packed, packed
from evoalign.engines.ray.replicas import checked_rollouts
from evoalign.engines.ray.schedule import Dispatcher
from evoalign.types import Member, Plan, Request, Rollout, Sampling, population

TOKENS = 128
REPLICAS = (1, 16, 64, 256, 1024)
TEXT = "what a model says in " * 24
"""About four letters a token."""


def median(times: int, of: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of a call, the first one left out: of the processor, so that others on the machine do not count."""
    of()
    found: list[float] = []
    for _ in range(times):
        began = clock()
        of()
        found.append(clock() - began)
    return statistics.median(found)


def _rollouts(members: Sequence[Member], prompts: int) -> Packed:
    ids = tuple(range(1000, 1000 + TOKENS))
    return packed([Rollout(m, i, ids, TEXT, "length") for m in members for i in range(prompts)])


def completion_seconds(load: Callable[[Any], Any], data: Any, members: int, prompts: int) -> float:
    """Return the seconds to load and check one completion."""
    asked = [(m, Request(i, (1,), Sampling(TOKENS))) for m in population(members) for i in range(prompts)]
    return median(5, lambda: checked_rollouts(load(data), asked)) / len(asked)


class _Replica:
    stage = "ready"

    def __init__(self) -> None:
        self.actor = SimpleNamespace(rollout=SimpleNamespace(remote=_Call))


class _Call:
    def __init__(self, plan: Plan, requests: Any) -> None:
        self.members = plan.members


class _Pool:
    """Replicas whose results are there at once."""

    def __init__(self, replicas: int, chunks: int) -> None:
        self.ready = [_Replica() for _ in range(replicas)]
        self.cluster = SimpleNamespace(ray=SimpleNamespace(put=list))
        self.settings = SimpleNamespace(patience=1e9)
        self._results = {m.index: _rollouts([m], 1) for m in population(chunks)}

    def any_ready(self) -> _Replica:
        return self.ready[0]

    def poll(self, calls: Any) -> list[Any]:
        return [next(iter(calls))]

    def get(self, replica: _Replica, call: _Call) -> Any:
        return self._results[call.members[0].index]


def deal_seconds(replicas: Sequence[int] = REPLICAS) -> tuple[float, float]:
    """Return the seconds to assign and collect one chunk, and the seconds per replica."""
    found: list[float] = []
    for count in replicas:
        chunks = max(200, 2 * count)
        dispatcher = Dispatcher(cast(Any, _Pool(count, chunks)))
        plan, requests = Plan(0, 1.0, population(chunks)), [Request(0, (1,), Sampling(TOKENS))]
        found.append(median(3, lambda d=dispatcher, p=plan, r=requests: list(d.run(p, r, 1))) / chunks)
    slope, intercept = np.polyfit(replicas, found, 1, w=1 / np.asarray(found))
    return max(0.0, float(intercept) - completion_seconds(tuple, _rollouts(population(1), 1), 1, 1)), float(slope)


def ray_seconds(waiting: Sequence[int] = (1, 64, 256, 1024)) -> dict[str, float]:
    """Return the seconds of a call, its result, a wait for one of many, and a byte in the object store."""
    import ray as module

    ray: Any = module

    class Echo:
        def rollout(self, plan: Plan, requests: Sequence[Request]) -> bytes:
            return bytes(100)

        def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

    actor = ray.remote(Echo).options(num_cpus=0).remote()
    plan, asked = Plan(0, 1.0, population(128)), ray.put([])
    refs = [actor.rollout.remote(plan, asked) for _ in range(300)]
    ray.wait(refs, num_returns=len(refs))
    taken: list[float] = []
    for ref in refs:
        began = time.perf_counter()
        ray.get(ref)
        taken.append(time.perf_counter() - began)
    called: list[float] = []
    for _ in range(300):
        began = time.perf_counter()
        actor.rollout.remote(plan, asked)
        called.append(time.perf_counter() - began)
    ray.get(actor.rollout.remote(plan, asked))
    done = refs[0]
    block = actor.sleep.remote(3600)
    pending = [actor.rollout.remote(plan, asked) for _ in range(max(waiting))]
    waits = [
        median(9, lambda n=n: ray.wait([*pending[: n - 1], done], num_returns=1, timeout=0.5), time.perf_counter)
        for n in waiting
    ]
    slope, intercept = np.polyfit(waiting, waits, 1, w=1 / np.asarray(waits))
    data = bytes(4 * 2**20)
    put = median(5, lambda: ray.put(data), time.perf_counter) / len(data)
    ray.kill(actor)
    del block
    return {
        "call": statistics.median(called), "get": statistics.median(taken), "wait": max(0.0, float(intercept)),
        "wait_each": max(0.0, float(slope)), "put_byte": put,
    }  # fmt: skip


def update_bytes(members: int) -> int:
    """Return the size of an update as Ray sends it to each replica, as measured: 91 bytes, and 26.5 per member."""
    return 91 + members * 53 // 2


def costs() -> dict[str, float]:
    """Seconds of the driver, for ray_events.Costs, and of a byte that is put; and what they were put together from."""
    import ray as module

    ray: Any = module
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error",
             object_store_memory=2**28, _node_ip_address="127.0.0.1")  # fmt: skip
    gc.collect()
    gc.freeze()  # as a run does
    try:
        completion = completion_seconds(ray.get, ray.put(_rollouts(population(128), 8)), 128, 8)
        of_ray = ray_seconds()  # leaves calls to a dead actor, which keep the threads of Ray busy
    finally:
        ray.shutdown()
    deal, each = deal_seconds()
    return {
        "dispatch": of_ray["call"], "answer": deal + of_ray["get"] + of_ray["wait"],
        "completion": completion, "look": each + of_ray["wait_each"], "put_byte": of_ray["put_byte"],
        "deal": deal, "deal_each": each,
        **{f"ray_{name}": value for name, value in of_ray.items()},
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(costs(), indent=1))
