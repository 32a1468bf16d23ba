# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster that a run starts answers clients with its token alone: whoever reaches it can run code."""

import json
import os
import subprocess
import sys

import pytest

CLUSTER = """
import json, os, sys
from evoalign.config import from_dict
from evoalign.engines.ray.cluster import Cluster

replica = {"name": "transformers", "device": "cpu"}
engine = {"name": "ray", "replicas": 1, "cpus": 1, "replica": replica}
cluster = Cluster(from_dict({"es": {"sigma": 0.1}, "engine": engine}))
address = cluster.ray.get_runtime_context().gcs_address
print(json.dumps([address, os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]]), flush=True)
sys.stdin.read()
cluster.close()
"""
CLIENT = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=20)))
"""


@pytest.mark.slow
def test_cluster_serves_its_token_and_refuses_another_and_none(tmp_path):
    pytest.importorskip("ray")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    plain |= {"HOME": str(tmp_path)}  # Ray reads a token from ~/.ray
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": plain}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], **pipes) as run:
        try:
            address, mode, token = json.loads(run.stdout.readline())
            clients = {
                name: subprocess.run(
                    [sys.executable, "-c", CLIENT, address],
                    env=plain | given, capture_output=True, text=True, timeout=120, check=False,
                )
                for name, given in {
                    "right": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
                    "wrong": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * len(token)},
                    "none": {"RAY_AUTH_MODE": "disabled"},
                }.items()
            }  # fmt: skip
        finally:
            run.communicate("")
    assert mode == "token" and address.startswith("127.0.0.1:") and run.returncode == 0
    assert clients["right"].returncode == 0 and int(clients["right"].stdout) > 0, clients["right"].stderr
    for name in ("wrong", "none"):
        assert clients[name].returncode == 1 and "AuthenticationError" in clients[name].stderr, name
