# SPDX-License-Identifier: Apache-2.0
"""Rollouts of two checkouts of evoalign, in two processes that take turns: the ratio of their processor time.

    python benchmarks/two_checkouts.py OLD NEW [--pairs 15]     # folders of two checkouts; one thread each

30 members of `lora` on the tiny model answer two prompts. What a change brings is told from what the machine does
meanwhile by the turns: each pair gives a ratio, and the quartiles of the ratios are shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CASES: dict[str, tuple[list[int] | None, int | None, int]] = {
    "all layers, 64 tokens": (None, None, 64),
    "layers 2 and 3, 64 tokens": ([2, 3], None, 64),
    "layer 3, prompts of 300, 8 tokens": ([3], 300, 8),
    "all layers, prompts of 300, 8 tokens": (None, 300, 8),
}
"""The layers that evolve, the length of the prompts (None: those of population.py), the tokens that are answered."""


def serve() -> None:
    """Do each case that is asked for on standard input, and print its seconds."""
    import torch

    import population
    from evoalign.config import from_dict
    from evoalign.types import Sampling

    torch.set_num_threads(1)
    population.transformers.utils.logging.set_verbosity_error()

    def work(layers: list[int] | None, length: int | None, tokens: int) -> Callable[[], object]:
        config = from_dict(
            {
                "space": {"name": "lora"}, "lora": {"target_layers": layers}, "deterministic": False,
                "model": {"name": "tiny", "dtype": "float32"}, "engine": {"name": "transformers", "device": "cpu"},
                "es": {"sigma": 0.02, "population_size": 30},
            }
        )  # fmt: skip
        loaded = population.tokens.load(config.model)
        side = population.Side(config, population.Tokens(loaded.tokenizer, []))  # no stop token: all are as long
        prompts = population.prompts_of(config, loaded, 2)
        if length is not None:
            prompts = [tuple(3 + (7 * i * i + k) % 900 for i in range(length)) for k in range(2)]
        return lambda: side.rollout(prompts, Sampling(tokens))

    works = {name: work(*case) for name, case in CASES.items()}
    for do in works.values():
        do()
    print("ready", flush=True)
    for line in sys.stdin:
        started = time.process_time()
        works[line.strip()]()
        print(time.process_time() - started, flush=True)


def begin(root: Path) -> subprocess.Popen[str]:
    """A process that serves the checkout in `root`."""
    path = f"{root / 'src'}{os.pathsep}{root / 'benchmarks'}"
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, "--serve"]
    process = subprocess.Popen(words, cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while process.stdout is not None and (line := process.stdout.readline()).strip() != "ready":
        if not line:
            raise SystemExit(f"{root} ended before it was ready")
    return process


def ask(process: subprocess.Popen[str], case: str) -> float:
    """Seconds of a case."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(case + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.old is None or options.new is None:
        parser.error("two checkouts are needed")
    sides = {"old": begin(options.old.resolve()), "new": begin(options.new.resolve())}
    print("| work | old, s | new, s | old / new | quartiles |\n|---|---:|---:|---:|---|")
    for case in CASES:
        pairs: list[dict[str, float]] = []
        for turn in range(options.pairs):
            order = ("old", "new") if turn % 2 == 0 else ("new", "old")
            pairs.append({name: ask(sides[name], case) for name in order})
        old, new = (statistics.median(pair[name] for pair in pairs) for name in ("old", "new"))
        ratios = sorted(pair["old"] / pair["new"] for pair in pairs)
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        middle = statistics.median(ratios)
        print(f"| {case} | {old:.2f} | {new:.2f} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)
    for process in sides.values():
        if process.stdin is not None:
            process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
