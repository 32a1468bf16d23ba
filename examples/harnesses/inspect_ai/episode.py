# SPDX-License-Identifier: Apache-2.0
"""Run one episode of Inspect, and print its accuracy as the reward: episode.py BASE_URL API_KEY EXAMPLE."""

import json
import sys
import tempfile
from pathlib import Path

import inspect_ai
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import match
from inspect_ai.tool import Tool, tool


@tool
def add() -> Tool:
    """Make the tool."""

    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: First number.
            b: Second number.
        """
        return a + b

    return execute


url, key, example = sys.argv[1:]
row = json.loads(Path(example).read_text(encoding="utf-8"))
sample = Sample(input=row["question"], target=row["answer"])
task = inspect_ai.Task(dataset=[sample], solver=react(tools=[add()]), scorer=match(numeric=True), message_limit=16)
model = get_model("openai-api/gateway/policy", base_url=url, api_key=key)  # the name openai/policy: the API Responses
with tempfile.TemporaryDirectory() as folder:
    (log,) = inspect_ai.eval(task, model=model, display="none", log_dir=folder, max_retries=3, log_format="json")
if log.status != "success" or log.results is None:
    sys.exit(f"inspect: {log.error.message if log.error else log.status}")
print(json.dumps({"reward": log.results.scores[0].metrics["accuracy"].value}))
