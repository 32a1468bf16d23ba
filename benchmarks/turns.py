# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of episodes of three turns, as a ratio of completions of one turn by the same members.

    python benchmarks/turns.py MODEL [--members 32 --rows 16 --tokens 128 --rounds 3]
    python benchmarks/turns.py MODEL --shape 7b        vLLM, random weights of this shape with the tokenizer of MODEL

Compared with one turn of the same length, and with one turn as long as the three together, whose tokens attend to as
much text. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import evoalign
import vllm_shapes as v
from evoalign import setup
from evoalign.config import from_dict
from evoalign.rollouts import Encoded, collect, requests_of
from evoalign.tasks import Task
from evoalign.tasks.base import Data
from evoalign.types import Example, Messages, Plan, Prompt, population

TURNS, WARM = 3, 2
"""Turns of an episode, and rounds before those that count: they load kernels and make the memory as large as needed."""
SUBJECTS = ("rivers", "engines", "bread", "maps", "glass", "clocks", "bridges", "music")
WORD = re.compile(" [a-z]{3,}")
SPREAD = 0.3
"""Standard deviation of the head's weights of words. Those of all other tokens are 0, and so are never drawn."""


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


def words_alone(worker: Any, words: list[int]) -> None:
    """In a worker of vLLM: let the head draw only these tokens, each of which is one token in any text of them."""
    head = worker.model_runner.get_model().lm_head.weight
    with torch.inference_mode():
        own = torch.zeros_like(head)
        own[words] = torch.empty_like(own[words]).normal_(0, SPREAD)
        head.copy_(own)


def folder_of(shape: str, tokenizer: str, parent: str) -> str:
    """Return a model folder of a shape, without weights."""
    folder = Path(parent) / shape
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json", "*.bin"))
    (folder / "config.json").write_text(json.dumps(v.shape_of(shape)), encoding="utf-8")
    return str(folder)


def assembled(given: argparse.Namespace, model: str) -> setup.Parts:
    """Return the parts of a run, before training."""
    engine = {"name": "vllm", "load_format": "dummy", "max_num_seqs": given.members * given.rows}
    config = from_dict({
        "model": {"name": model},
        "engine": engine if given.shape else {"name": given.engine},
        "space": "lowrank",
        "es": {"population_size": given.members, "num_generations": 1, "sigma": 0.001, "learning_rate": 0.0005},
        "sampling": {"max_tokens": TURNS * given.tokens, "temperature": 1.0},
        "grader": {"isolated": False},
    })  # fmt: skip
    parts = setup.assemble(config, Stories(config.task.model_copy(update={"name": "turns:Stories"})))
    if given.shape:
        tokenizer = parts.tokens.tokenizer
        texts = {i: tokenizer.decode([i]) for i in range(len(tokenizer))}
        engine = parts.engine
        getattr(engine, "rpc")(v.redraw, config.seed)  # noqa: B009 - of vLLM's engine alone
        getattr(engine, "rpc")(words_alone, [i for i, text in texts.items() if WORD.fullmatch(text)])  # noqa: B009
    return parts


def measure(parts: setup.Parts, given: argparse.Namespace, turns: int, tokens: int) -> tuple[float, int, int]:
    """Return the seconds, the generated tokens and the completions of one rollout."""
    sampling = parts.config.sampling.model_copy(update={"max_tokens": tokens})
    limits = parts.config.task.limits.model_copy(update={"turns": turns})
    parts.task.config = parts.task.inside.config = parts.task.config.model_copy(update={"episode": limits})
    prompts = Encoded(parts.task, parts.tokens, parts.data.train)
    asked = requests_of(parts.config.model_copy(update={"sampling": sampling}), range(given.rows), prompts, 0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    found = collect(parts.engine, Plan(0, parts.config.es.width, population(given.members)), asked)
    return time.perf_counter() - began, sum(len(r.token_ids) for r in found), sum(1 + len(r.later) for r in found)


def main() -> None:
    """Measure all in turn, and print the ratios of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--shape")
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default="transformers")
    given = parser.parse_args()
    kinds = [(1, given.tokens), (TURNS, given.tokens), (1, TURNS * given.tokens)]
    rates: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as parent:
        parts = assembled(given, folder_of(given.shape, given.model, parent) if given.shape else given.model)
        for number in range(given.rounds + WARM):
            for (turns, length), found in rates.items():
                seconds, tokens, completions = measure(parts, given, turns, length)
                print(
                    f"round {number}, {turns} turns of {length}: {tokens} tokens of {completions} completions in "
                    f"{seconds:.2f} s",
                    flush=True,
                )
                found += [tokens / seconds] if number >= WARM else []
        parts.close()
    short, several, long = (statistics.median(found) for found in rates.values())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({
        "device": device, "versions": {"evoalign": evoalign.__version__, "torch": torch.__version__},
        "settings": {k: value for k, value in vars(given).items() if k != "model"},
        "tokens_per_second": {f"{turns} x {length}": found for (turns, length), found in rates.items()},
        "of_one_turn": several / short, "of_one_long_turn": several / long,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
