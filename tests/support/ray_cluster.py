# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of engine `ray`: a cluster on loopback, a small run and its journal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import evoalign
from evoalign.engines.ray.engine import RayEngine
from evoalign.engines.ray.replicas import Replica
from evoalign.testing import engines as contract

CORES = 8
DATA = Path(__file__).parents[2] / "data" / "tasks" / "conciseness"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Generator[Any]:
    """Start one cluster for all tests: an engine uses the cluster that its process is connected to."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback, as a run's own
    ray = pytest.importorskip("ray")
    ray.init(
        address="local", num_cpus=CORES, num_gpus=0, include_dashboard=False, object_store_memory=2**27,
        log_to_driver=False, logging_level="error", _node_ip_address="127.0.0.1",
    )  # fmt: skip
    yield ray
    ray.shutdown()


def settings(space: str, replicas: int, **ray: Any) -> dict[str, Any]:
    replica = {"name": "transformers", "device": "cpu", "threads": 1}
    return {
        "space": space, "model": {"name": "tiny"}, "deterministic": True, "checks": {"placebo": 0},
        "task": {"name": "conciseness", "train_data": str(DATA / "questions_train.json"),
                 "test_data": str(DATA / "questions_test.json"), "train_size": 6, "test_size": 6},
        "es": {"num_generations": 3, "population_size": 12, "sigma": 0.01, "learning_rate": 0.005},
        "sampling": {"max_tokens": 8}, "evaluation": {"max_tokens": 8}, "report": False,
        "engine": {"name": "ray", "replicas": replicas, "cpus": 1, "chunk": 2, "replica": replica, **ray},
    }  # fmt: skip


def journal(to: Path, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Train and return the journal's lines of its generations."""
    evoalign.train({**given, "output_dir": str(to)})
    return generations(to)


def generations(run: Path) -> list[dict[str, Any]]:
    """Return a journal's lines without its header, which has the number of replicas, and without the hash chain."""
    lines = (run / "journal.jsonl").read_text().splitlines()[1:]
    return [{k: v for k, v in json.loads(line).items() if k not in ("hash", "previous")} for line in lines]


def call(replica: Replica, what: Callable[[Any], Any]) -> Any:
    import ray

    return ray.get(replica.actor.__ray_call__.remote(what), timeout=60)


def all_hashes(bench: contract.Bench) -> list[str]:
    """Return the hashes of all replicas, once none is joining: asking may reveal that one hangs."""
    pool = engine_of(bench).pool
    while True:
        while any(replica.joining for replica in pool.replicas):
            pool.poll(())
        found = pool.fingerprints()
        if not any(replica.joining for replica in pool.replicas):
            return list(found.values())


def engine_of(bench: contract.Bench) -> RayEngine:
    assert isinstance(bench.engine, RayEngine)
    return bench.engine
