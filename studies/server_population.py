# SPDX-License-Identifier: Apache-2.0
"""Output tokens per second of a population over HTTP, against the bare model on as many rows; swaps, pushes, the start.

    python studies/server_population.py --model tiny --rows 60 240 --tokens 32        a CPU
    python studies/server_population.py --shape 7b --rows 60 240 960 --push 3         one GPU, random weights
    python studies/server_population.py --generations 200 --model tiny --rows 60      memory of client and server

30 members answer `rows` / 30 prompts each of 100 random tokens, greedily; the bare model answers `rows` prompts. What
is timed is the whole rollout: adapters made, sent, loaded, answers checked, adapters unloaded. In each round both sides
answer new prompts; the ratio is of medians over rounds. `swap` is a generation of one prompt and one token: what
adapters cost by files and by tensors. `push` is an update of `lowrank` until the server answers with it.

Random weights of a 7B shape are written to memory (/dev/shm) once. Results are JSON lines, appended as they come.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import benchmark_path  # noqa: F401
import vllm_shapes as v
from evoalign import engines, spaces, tokens
from evoalign.config import from_dict
from evoalign.types import MEAN_PLAN, Plan, Request, Sampling, Update, population

MEMBERS, PROMPT = 30, 100


def config_of(options: argparse.Namespace, model: str, **engine: Any) -> Any:
    own = {"context_length": options.length, "max_running": max(options.rows), "timeout": 120.0, **engine}
    if options.cpu_tokens:
        own["max_total_tokens"] = options.cpu_tokens
    tree = {
        "output_dir": str(options.file.parent / "server_run"), "seed": 0, "space": options.space,
        "model": {"name": model, "dtype": options.dtype}, "lora": {"rank": options.rank},
        "lowrank": {"rank": options.rank}, "es": {"sigma": 1e-3, "learning_rate": 5e-4, "population_size": MEMBERS},
        "engine": {"name": options.engine, **own, **json.loads(options.settings)},
    }  # fmt: skip
    return from_dict(tree)


class Served:
    """An engine, started, and its clock."""

    def __init__(self, config: Any) -> None:
        start = time.perf_counter()
        self.config = config
        self.engine: Any = engines.create(config, tokens.load(config.model))
        self.ready = time.perf_counter() - start
        self.space = spaces.create(config)
        self.layout = self.space.layout(self.engine.specs(), self.engine.dtype)
        self.facts = self.engine.start(self.space, self.layout, None, keep_start=False)
        self.generation = 0

    def ask(self, rows: int, length: int, members: int) -> tuple[float, int]:
        """Seconds of a rollout, and tokens; of the bare model where there are no members."""
        self.generation += 1
        draw = random.Random(self.generation)
        prompts = rows // max(1, members)
        requests = [
            Request(i, tuple(draw.randint(*v.VOCABULARY) for _ in range(PROMPT)), Sampling(length))
            for i in range(prompts)
        ]
        plan = Plan(self.generation, 1e-3, population(members, antithetic=True)) if members else MEAN_PLAN
        start = time.perf_counter()
        said = list(self.engine.rollout(plan, requests))
        seconds = time.perf_counter() - start
        assert len(said) == rows
        return seconds, sum(len(r.token_ids) for r in said)


def both(served: Served, rows: int, options: argparse.Namespace) -> None:
    """Rounds of the bare model and of the population."""
    found: dict[int, list[tuple[float, int]]] = {0: [], MEMBERS: []}
    for _ in range(options.repeats):
        for members, runs in found.items():
            runs.append(served.ask(rows, options.tokens, members))
    rates = {m: statistics.median(count / seconds for seconds, count in runs) for m, runs in found.items()}
    emit(options, "population", served, rows=rows, base=found[0], population=found[MEMBERS],
         base_tokens_per_second=round(rates[0]), population_tokens_per_second=round(rates[MEMBERS]),
         ratio=round(rates[MEMBERS] / rates[0], 3))  # fmt: skip


def swap(served: Served, options: argparse.Namespace, transport: str) -> None:
    """Measure the cost of 30 adapters in a generation of one prompt and one token."""
    bare = statistics.median(served.ask(MEMBERS, 1, 0)[0] for _ in range(options.repeats + 1))
    swaps = [served.ask(MEMBERS, 1, MEMBERS)[0] for _ in range(options.repeats + 1)]
    emit(options, "swap", served, transport=transport, bare_seconds=round(bare, 3),
         seconds=[round(s, 3) for s in swaps], adapters_seconds=round(statistics.median(swaps) - bare, 3))  # fmt: skip


def push(served: Served, options: argparse.Namespace) -> None:
    """An update, and the weights on their way."""
    rows: list[dict[str, float]] = []
    for index in range(options.push):
        who = population(MEMBERS, antithetic=True)
        start = time.perf_counter()
        served.engine.apply(Update(index, index, who, tuple(float(i % 3) for i in range(MEMBERS)), 1e-3, 5e-4))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        moved = time.perf_counter()
        served.engine._serve_mean()
        rows.append({"apply": round(moved - start, 2), "push": round(time.perf_counter() - moved, 2)})
    size = sum(t.numel() * t.element_size() for n, t in served.engine._parameters.items() if n in served.layout.by_name)
    emit(options, "push", served, gigabytes=round(size / 1e9, 2), rounds=rows)


def generations(served: Served, options: argparse.Namespace) -> None:
    """Measure the memory of client and server, ten times over the generations."""
    import psutil

    seen: list[tuple[int, int, int]] = []
    for index in range(options.generations):
        served.ask(options.rows[0], options.tokens, MEMBERS)
        who = population(MEMBERS, antithetic=True)
        served.engine.apply(Update(index, index, who, tuple(float(i % 3) for i in range(MEMBERS)), 1e-6, 5e-7))
        if index % max(1, options.generations // 10) == 0 or index == options.generations - 1:
            server = psutil.Process(served.engine.connection.process.pid)
            whole = [server, *server.children(recursive=True)]
            seen.append((index, psutil.Process().memory_info().rss, sum(p.memory_info().rss for p in whole)))
            print(seen[-1], flush=True)
    emit(options, "memory", served, rows=options.rows[0], generation_client_server_bytes=seen)


def emit(options: argparse.Namespace, what: str, served: Served, **found: Any) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    row = {
        "benchmark": f"server_{what}", "engine": options.engine, "server": served.facts.library, "device": device,
        "model": options.shape or options.model, "space": options.space, "rank": options.rank, "tokens": options.tokens,
        "ready_seconds": round(served.ready, 1), **found,
    }  # fmt: skip
    options.file.parent.mkdir(parents=True, exist_ok=True)
    with options.file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({k: v for k, v in row.items() if k not in ("base", "population")}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="sglang", choices=["sglang", "vllm-server"])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", help="Random weights of this shape instead, such as 7b.")
    parser.add_argument("--space", default="lora", choices=["lora", "lowrank"])
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[60, 240, 960])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--push", type=int, default=0)
    parser.add_argument("--generations", type=int, default=0)
    parser.add_argument("--transports", nargs="*", default=[])
    parser.add_argument("--settings", default="{}", help="JSON: further settings of the engine.")
    parser.add_argument("--cpu-tokens", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/evoalign-bench"))
    parser.add_argument("--file", type=Path, default=Path("runs/server.jsonl"))
    options = parser.parse_args()
    start = time.perf_counter()
    model = v.random_model(options.shape, options.folder) if options.shape else options.model
    print(f"model in {time.perf_counter() - start:.0f} s", flush=True)
    for transport in options.transports or ["files"]:
        served = Served(config_of(options, model, **({"transport": transport} if options.transports else {})))
        with closing(served.engine):
            first, _ = served.ask(MEMBERS, options.tokens, MEMBERS)
            emit(options, "start", served, first_generation_seconds=round(first, 2))
            if options.generations:
                generations(served, options)
                continue
            swap(served, options, transport)
            if transport == (options.transports or ["files"])[0]:
                for rows in options.rows:
                    both(served, rows, options)
            if options.push:
                push(served, options)


if __name__ == "__main__":
    main()
