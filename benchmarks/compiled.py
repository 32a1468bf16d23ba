# SPDX-License-Identifier: Apache-2.0
"""The compiled numbers of a CPU against plain torch, in turns in one process: CPU seconds and their ratio.

    python benchmarks/compiled.py parts                         # normals a second, updates, hashes
    python benchmarks/compiled.py generation [--space lora] [--model tiny] [--dtype float32] [--tokens 16]

`generation` is all that a generation computes: members and their answers, the update, the hash of the weights. CPU
seconds of all threads, so that another process on the machine does not count; medians of `--repeats` turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from transformers.utils import logging

from baseline import check
from evoalign import noise, spaces
from evoalign.config import from_dict
from evoalign.engines.hash import tensor_sum
from evoalign.rollouts import collect, requests_of
from evoalign.setup import assemble
from evoalign.types import Plan, TensorSpec, Update, population

SHAPE = (1536, 576)
"""Shape of an up projection of SmolLM2-135M."""


def turns(works: Mapping[str, tuple[str, Callable[[], object]]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each work, done in turns; its first word is whether the library is used."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, (library, work) in works.items():
            os.environ["EVOALIGN_COMPILED"] = library
            started = time.process_time()
            work()
            if turn:  # the first warms up
                seconds[name].append(time.process_time() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def update(size: int, summation: str = "ordered") -> Update:
    coefficients = tuple(map(float, np.random.default_rng(0).normal(size=size)))
    return Update(0, 0, population(size), coefficients, 0.01, 0.005, 0.0, summation)  # type: ignore[arg-type]


def parts(repeats: int) -> None:
    """Print a row for each kind of number."""
    key, mean, count = noise.key(3, "noise", "x"), torch.randn(SHAPE), SHAPE[0] * SHAPE[1]
    whole = (slice(0, SHAPE[0]), slice(0, SHAPE[1]))

    def moved(space: str, rank: int, summation: str = "ordered") -> Callable[[], None]:
        tree = {"seed": 3, "space": space, "es": {"sigma": 0.01, "learning_rate": 0.005}, "lowrank": {"rank": rank}}
        made = spaces.create(from_dict(tree))
        name = "model.layers.0.mlp.up_proj.weight"
        layout = made.layout([TensorSpec(name, SHAPE, "linear", 0, 0.02)], torch.bfloat16)
        served, master = torch.zeros(SHAPE, dtype=torch.bfloat16), mean.clone()

        def move() -> None:
            done = update(30, summation)
            made.accumulate(layout, master, name, whole, done, None, None, served)

        return move

    def pair(widths: list[float]) -> Callable[[], object]:
        return lambda: noise.scaled(key, SHAPE, 5, [2] * len(widths), widths, mean=mean, dtype=torch.bfloat16)

    cases: dict[str, tuple[Callable[[], object], float, str]] = {
        "perturb, one member": (pair([0.003]), count / 1e6, "M normals/s"),
        "perturb, an antithetic pair": (pair([0.003, -0.003]), 2 * count / 1e6, "M normals/s"),
        "dense update, 30 members": (moved("full", 1), 30 * count / 1e6, "M normals/s"),
        "lowrank update, rank 1, 30 members": (moved("lowrank", 1), 30 * count / 1e6, "M products/s"),
        "lowrank update, rank 3, 30 members": (moved("lowrank", 3), 90 * count / 1e6, "M products/s"),
        "hash": (lambda: tensor_sum(mean), count / 1e6, "M numbers/s"),
    }
    figures: dict[str, float] = {}
    print("| work on 1536 x 576 | torch, ms | compiled, ms | ratio | compiled |\n|---|---:|---:|---:|---:|")
    for name, (work, size, unit) in cases.items():
        found = turns({"torch": ("0", work), "compiled": ("1", work)}, repeats)
        ratio, rate = found["torch"] / found["compiled"], size / found["compiled"]
        figures[f"compiled {name}"] = ratio
        print(
            f"| {name} | {found['torch'] * 1e3:.2f} | {found['compiled'] * 1e3:.2f} | {ratio:.1f} | {rate:.0f} {unit} |"
        )
    for rank in (1, 3):
        ways = {
            "library": ("1", moved("lowrank", rank, "library")),
            "ordered": ("1", moved("lowrank", rank)),
            "ordered, torch": ("0", moved("lowrank", rank)),
        }
        found = turns(ways, repeats)
        words = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in found.items())
        print(f"lowrank update of one matrix, rank {rank}, 30 members: {words}")
    check(figures)


def generation(options: argparse.Namespace) -> None:
    """Print a row for a generation with and without the library."""
    logging.disable_progress_bar()
    config = from_dict(
        {
            "seed": 1, "space": options.space, "model": {"name": options.model, "dtype": options.dtype},
            "task": {"name": "conciseness", "batch_size": 2}, "sampling": {"max_tokens": options.tokens},
            "engine": {"device": "cpu", "threads": options.threads},
            "es": {"population_size": options.members, "sigma": 0.003, "learning_rate": 0.0015, "antithetic": True},
        }
    )  # fmt: skip
    served = assemble(config)
    prompts = [served.tokens.encode(served.task.prompt(row)) for row in served.data.train]
    members, phases = population(options.members, antithetic=True), dict[str, float]()

    def generate() -> None:
        marks = [time.process_time()]
        plan = Plan(0, 0.003, members)
        collect(served.engine, plan, requests_of(config, [0, 1], prompts, 0))
        marks.append(time.process_time())
        served.engine.apply(update(options.members))
        marks.append(time.process_time())
        served.engine.fingerprint()
        marks.append(time.process_time())
        way = "compiled" if os.environ["EVOALIGN_COMPILED"] == "1" else "torch"
        for name, first, last in zip(("members and answers", "update", "hash"), marks, marks[1:], strict=False):
            phases[f"{way}, {name}"] = last - first

    found = turns({"torch": ("0", generate), "compiled": ("1", generate)}, options.repeats)
    model = options.model.rsplit("/", 1)[-1]
    print(f"{options.space}, {model}, {options.dtype}, {options.members} members x 2 prompts x "
          f"{options.tokens} tokens, {options.threads} thread(s): torch {found['torch']:.2f} s, compiled "
          f"{found['compiled']:.2f} s, ratio {found['torch'] / found['compiled']:.2f}")  # fmt: skip
    print("; ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items()))
    served.close()


def main() -> None:
    """Measure the parts, or a generation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parts", "generation"])
    parser.add_argument("--space", default="full")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n"
    )
    parts(options.repeats) if options.what == "parts" else generation(options)


if __name__ == "__main__":
    main()
