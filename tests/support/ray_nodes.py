# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of three nodes on this host, in a process that is told by its standard input which node to kill."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import psutil
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 2**27, "include_dashboard": False}
HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 10_000, "health_check_failure_threshold": 5}


def lose(node: Any) -> None:
    """Kill a node manager and all processes that it started."""
    process = node.all_processes["raylet"][0].process
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in started:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def replicas_on(node: Any) -> bool:
    children = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
    return any("ReplicaActor" in " ".join(child.cmdline()) for child in children)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"_system_config": HEALTH})
    for _ in range(2):
        cluster.add_node(**NODE)
    try:
        for line in sys.stdin:
            reply = "done"
            if line.strip() == "address":
                reply = cluster.address
            elif line.strip() == "lose a replica":
                lose(next(node for node in cluster.worker_nodes if replicas_on(node)))
            else:
                lose(cluster.head_node)
            print(f"nodes: {reply}", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
