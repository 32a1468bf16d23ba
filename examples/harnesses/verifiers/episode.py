# SPDX-License-Identifier: Apache-2.0
"""Run one episode of verifiers, and print its reward: episode.py BASE_URL API_KEY EXAMPLE."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.configs.cli.eval import EvalConfig

url, os.environ["EPISODE_API_KEY"], example = sys.argv[1:]
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # verifiers starts its chat program with uv
agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 8}  # null: a chat without a shell
with tempfile.TemporaryDirectory() as folder:
    config = {
        "env": {"taskset": {"id": "sums", "example": example}, "agent": agent},
        "client": {"base_url": url, "api_key_var": "EPISODE_API_KEY"},
        "model": "policy", "push": False, "rich": None, "output_dir": folder,
    }  # fmt: skip
    ((trace,),) = (episode.traces for episode in asyncio.run(run_eval(EvalConfig.model_validate(config))))
if not trace.ok:  # its reward is 0, also where the gateway failed
    sys.exit(f"verifiers: {trace.errors}")
print(json.dumps({**trace.metrics, "reward": trace.reward}))
