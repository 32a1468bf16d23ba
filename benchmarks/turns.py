# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of episodes of three turns, as a ratio of single completions by the same members.

    python benchmarks/turns.py MODEL [--members 32 --rows 16 --tokens 128 --rounds 3]

Both have the same members, rows and length of completions. Later turns read the conversation so far again. Last line:
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

import evoalign
from evoalign import setup
from evoalign.config import from_dict
from evoalign.rollouts import Encoded, collect, requests_of
from evoalign.tasks import Task
from evoalign.tasks.base import Data
from evoalign.types import Example, Messages, Plan, Prompt, population

TURNS = 3
SUBJECTS = ("rivers", "engines", "bread", "maps", "glass", "clocks", "bridges", "music")


class Stories(Task):
    """A conversation in which the user asks for more."""

    name = "stories"

    def load_data(self, seed: int) -> Data:
        rows = [{"subject": f"{SUBJECTS[i % len(SUBJECTS)]} and the number {i}"} for i in range(1000)]
        return Data(rows, rows[:1])

    def prompt(self, example: Example) -> Prompt:
        return [{"role": "user", "content": f"Write a very long essay about {example['subject']}. Do not stop."}]

    def reply(self, example: Example, transcript: Messages) -> str | None:
        return "Go on, with many more details." if len(transcript) < 2 * TURNS else None

    def compute_reward(self, text: str, example: Example) -> float:
        return float(len(text))


def measure(parts: setup.Parts, members: int, rows: int, turns: int) -> tuple[float, int, int]:
    """Return the seconds, the generated tokens and the completions of one rollout."""
    parts.task.inside.config = parts.task.inside.config.model_copy(
        update={"episode": parts.config.task.limits.model_copy(update={"turns": turns})}
    )
    parts.task.config = parts.task.inside.config
    prompts = Encoded(parts.task, parts.tokens, parts.data.train)
    asked = requests_of(parts.config, range(rows), prompts, 0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    found = collect(parts.engine, Plan(0, parts.config.es.width, population(members)), asked)
    return time.perf_counter() - began, sum(len(r.token_ids) for r in found), sum(1 + len(r.later) for r in found)


def main() -> None:
    """Measure both in turn, and print the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default="transformers")
    given = parser.parse_args()
    config = from_dict({
        "model": {"name": given.model},
        "engine": {"name": given.engine},
        "space": "lowrank",
        "es": {"population_size": given.members, "num_generations": 1, "sigma": 0.001, "learning_rate": 0.0005},
        "sampling": {"max_tokens": given.tokens, "temperature": 1.0},
    })  # fmt: skip
    task: Any = Stories(config.task.model_copy(update={"name": "turns:Stories"}))
    parts = setup.assemble(
        config.model_copy(update={"grader": config.grader.model_copy(update={"isolated": False})}), task
    )
    rates: dict[int, list[float]] = {1: [], TURNS: []}
    for number in range(given.rounds + 1):
        for turns, found in rates.items():
            seconds, tokens, completions = measure(parts, given.members, given.rows, turns)
            print(
                f"round {number}, {turns} turns: {tokens} tokens of {completions} completions in {seconds:.2f} s",
                flush=True,
            )
            found += [tokens / seconds] if number else []  # the first round loads kernels
    parts.close()
    single, several = (statistics.median(found) for found in rates.values())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({
        "device": device, "versions": {"evoalign": evoalign.__version__, "torch": torch.__version__},
        "settings": {k: v for k, v in vars(given).items() if k != "model"},
        "tokens_per_second": {str(turns): found for turns, found in rates.items()}, "ratio": several / single,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
