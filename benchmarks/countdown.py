# SPDX-License-Identifier: Apache-2.0
"""Held-out Countdown accuracy before and after a config's training, for several seeds.

Prints one row a seed: accuracy before and after, the change with its paired 95 % interval over the test problems,
generations and seconds of training. Settings of the shipped config were chosen on other problems than the test split.

    python benchmarks/countdown.py [--config configs/quickstart_countdown.yaml] [--seeds 0 1 2] [--set a.b=c ...]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evoalign.api import train
from evoalign.config import load
from evoalign.evaluation import paired_interval
from evoalign.rundir import versions


def run(config: str, seed: int, overrides: list[str], output: Path) -> dict[str, Any]:
    """Train once; accuracy in percent, seconds of wall time."""
    settings = load([config], [*overrides, f"seed={seed}", f"output_dir={output / f'seed_{seed}'}"])
    began = time.perf_counter()
    with (output / f"seed_{seed}.log").open("w") as log:
        result = train(settings, overwrite=True, console=Console(file=log, width=160))
    seconds = time.perf_counter() - began
    rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    change = paired_interval(result.before.measures_E["accuracy"], result.after.measures_E["accuracy"])
    return {
        "seed": seed,
        "before": 100 * result.before.measures["accuracy"],
        "after": 100 * result.after.measures["accuracy"],
        "change": [100 * x for x in change],
        "generations": len(rows),
        "train_seconds": sum(sum(row["seconds"].values()) for row in rows),
        "seconds": seconds,
        "tokens": sum(row["tokens"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart_countdown.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_countdown"))
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    print(f"{arguments.config} {' '.join(arguments.overrides)} on {device}; {versions()}\n")
    print("| seed | before | after | change (95 % interval, paired) | generations | training | whole | tokens/s |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in arguments.seeds:
        row = run(arguments.config, seed, arguments.overrides, arguments.output)
        mean, low, high = row["change"]
        print(
            f"| {seed} | {row['before']:.1f} % | {row['after']:.1f} % | {mean:+.1f} points ({low:+.1f} to {high:+.1f}) "
            f"| {row['generations']} | {row['train_seconds']:.0f} s | {row['seconds']:.0f} s "
            f"| {row['tokens'] / row['train_seconds']:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
