# SPDX-License-Identifier: Apache-2.0
"""Episodes per second through the gateway against the same conversations in process, and what one at a time costs.

    python benchmarks/gateway.py --threads 1

Every member has a conversation of three turns with each row: 16 members, 8 rows, greedy, at most 16 tokens a turn. In
each round every side runs once, and the ratios are medians over rounds. The sides:

    in process           the replies are computed here (`Task.reply`): one batch for each turn
    threads              a harness in a thread for each episode, through the server
    threads, serial      the same with `deterministic: true`: the engine gets one request at a time
    processes            a process for each episode, as `task.command` has them: plain Python, urllib
    processes, serial    the same with `deterministic: true`

The CPU seconds are those of all processes; the ranges of baselines.json are for them, since wall time needs an idle
machine. An agent waits for its own tools, too, so that these speeds are limits of the gateway.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from baseline import check
from evoalign import setup
from evoalign.config import Config, TaskConfig, from_dict
from evoalign.gateway.player import Drive, Harnesses
from evoalign.rollouts import Encoded, collect, requests_of
from evoalign.tasks import Data, Task
from evoalign.tasks.harness import Harness
from evoalign.transcripts import Message, turns
from evoalign.types import Episode, Example, Plan, Player, Request, Rollout, population

TURNS = 3
HARNESS = f"""
import json, sys, urllib.request

def talk(url, key, word):
    messages = [{{"role": "user", "content": f"say {{word}}"}}]
    for turn in range(1, {TURNS} + 1):
        body = json.dumps({{"model": "any", "messages": messages}}).encode()
        head = {{"Authorization": f"Bearer {{key}}", "Content-Type": "application/json"}}
        with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, head)) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
        messages.append({{"role": "assistant", "content": text}})
        messages.append({{"role": "user", "content": f"{{word}} again, {{turn}}"}})
    return '{{"reward": 1}}'

if __name__ == "__main__":
    print(talk(*sys.argv[1:3], json.load(open(sys.argv[3]))["word"]))
"""


class Dialogue(Task):
    """The user names the number of turns so far."""

    name = "dialogue"

    def load_data(self, seed: int) -> Data:
        return Data([{"word": f"{row}"} for row in range(1000)], [{"word": "test"}])

    def prompt(self, example: Example) -> list[Message]:
        return [{"role": "user", "content": f"say {example['word']}"}]

    def reply(self, example: Example, transcript: Sequence[Message]) -> str | None:
        count = sum(message["role"] == "assistant" for message in transcript)
        return f"{example['word']} again, {count}" if count < TURNS else None

    def compute_reward(self, text: str, example: Example) -> float:
        return 1.0


def config_of(arguments: argparse.Namespace) -> Config:
    return from_dict(
        {
            "es": {"sigma": 0.05, "population_size": arguments.members},
            "sampling": {"max_tokens": arguments.tokens},
            "engine": {"name": "transformers", "threads": arguments.threads},
        }
    )


def harness(file: Path, *, is_serial: bool) -> Harness:
    """Return the task whose command is the harness in a file."""
    command = f"{sys.executable} -S {file} {{base_url}} {{api_key}} {{example}}"
    made = Harness(TaskConfig(name="harness", command=command))
    made.is_serial = is_serial
    return made


class Sides:
    """The engine, and the work of each side by its name."""

    def __init__(self, arguments: argparse.Namespace, file: Path) -> None:
        config = config_of(arguments)
        self.parts = setup.assemble(config, task=Dialogue(TaskConfig(name="custom")))
        parts = self.parts
        self.plan = Plan(0, config.es.width, population(arguments.members))
        encoded = Encoded(parts.task, parts.tokens, parts.data.train)
        self.requests = requests_of(parts.config, range(arguments.rows), encoded, 0)
        talk: Callable[[str, str, str], str] = runpy.run_path(str(file))["talk"]

        def drive(url: str, key: str, example: Example, seconds: float) -> str:
            return talk(url, key, example["word"])

        drives: dict[str, Drive | None] = {"threads": drive, "processes": None}
        self.players: dict[str, Player | None] = {"in process": None}
        for name, how in drives.items():
            for is_serial in (False, True):
                task = harness(file, is_serial=is_serial)
                self.players[name + ", serial" * is_serial] = Harnesses(task, parts.tokens, how)

    def run(self, side: str) -> tuple[float, float, list[Rollout]]:
        """Return the seconds of a side, the CPU seconds of all its processes, and its episodes."""
        player, requests = self.players[side], list(self.requests)
        if player is not None:
            requests = [_through(player, request) for request in requests]
        began, busy = time.perf_counter(), sum(os.times()[:4])
        found = collect(self.parts.engine, self.plan, requests)
        return time.perf_counter() - began, sum(os.times()[:4]) - busy, found


def _through(player: Player, request: Request) -> Request:
    assert request.episode is not None
    return replace(request, prompt_ids=(), episode=Episode(player, request.episode.example))


def ratios_of(rounds: Sequence[Mapping[str, float]], pairs: Sequence[tuple[str, str]]) -> dict[str, list[float]]:
    """Return the speed of one side over that of another in each round, sorted."""
    return {f"{side} over {of}": sorted(r[of] / r[side] for r in rounds) for side, of in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the engine")
    parser.add_argument("--machine", default="", help="a note for the row")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "harness.py")
        file.write_text(HARNESS, encoding="utf-8")
        sides = Sides(arguments, file)
        expected = [turns(rollout.text) for rollout in sides.run("in process")[2]]
        rounds, busy, same = list[dict[str, float]](), list[dict[str, float]](), dict[str, float]()
        for _ in range(arguments.rounds):
            rounds.append({})
            busy.append({})
            for side in sides.players:
                rounds[-1][side], busy[-1][side], found = sides.run(side)
                same[side] = statistics.mean(turns(r.text) == e for r, e in zip(found, expected, strict=True))
        sides.parts.close()
    episodes = arguments.members * arguments.rows
    pairs = [(side, "in process") for side in sides.players if side != "in process"]
    pairs += [(f"{side}, serial", side) for side in ("threads", "processes")]
    print(f"{arguments.members} members x {arguments.rows} rows x {TURNS} turns of at most {arguments.tokens} tokens")
    for side in sides.players:
        median, cpu = (statistics.median(r[side] for r in some) for some in (rounds, busy))
        speed = f"{episodes / median:9.1f} episodes/s{median:8.2f} s, CPU{cpu:7.2f} s"
        print(f"  {side:<18}{speed}, {same[side]:.1%} of the conversations as in process")
    ratios, cpu_ratios = ratios_of(rounds, pairs), ratios_of(busy, pairs)
    print("ratios of episodes per second, and per CPU second")
    for name in ratios:
        spans = (f"{statistics.median(r):7.3f} ({r[0]:.3f} to {r[-1]:.3f})" for r in (ratios[name], cpu_ratios[name]))
        print(f"  {name:<34}{''.join(spans)}")
    row = {
        "benchmark": "gateway", "model": "tiny", "members": arguments.members, "rows": arguments.rows, "turns": TURNS,
        "tokens": arguments.tokens, "threads": arguments.threads,
        "seconds": {side: [round(r[side], 4) for r in rounds] for side in sides.players},
        "cpu_seconds": {side: [round(r[side], 4) for r in busy] for side in sides.players},
        "same": same,
        "ratios": {name: round(statistics.median(some), 4) for name, some in ratios.items()},
        "cpu_ratios": {name: round(statistics.median(some), 4) for name, some in cpu_ratios.items()},
        "machine": f"{arguments.machine}, Python {platform.python_version()}, torch {torch.__version__}".lstrip(", "),
        "date": f"{date.today()}",
    }  # fmt: skip
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        with arguments.json.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
    check({f"gateway {name}, per CPU second": statistics.median(some) for name, some in cpu_ratios.items()})


if __name__ == "__main__":
    main()
