# SPDX-License-Identifier: Apache-2.0
"""Effect of training with a config on its test split, for several seeds.

Prints one row a seed: the measure before and after, the change with its paired 95 % interval over the test examples,
the shares of empty completions, generations and seconds. The settings of both quickstarts were chosen on other
examples than their test splits.

    python benchmarks/learning.py                                                          (Countdown, accuracy)
    python benchmarks/learning.py --config configs/quickstart.yaml --measure reward --seeds 0 1 2 3 4   (Conciseness)
    python benchmarks/learning.py --config configs/quickstart_grpo.yaml --seeds 0                       (GRPO)
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from baseline import check
from evoalign.baselines.train import grpo
from evoalign.config import load
from evoalign.evaluation import paired_interval
from evoalign.rundir.identity import versions
from evoalign.training.train import train


def run(config: str, measure: str, seed: int, overrides: list[str], output: Path) -> dict[str, Any]:
    """Train once; seconds of wall time."""
    settings = load([config], [*overrides, f"seed={seed}", f"output_dir={output / f'seed_{seed}'}"])
    began = time.perf_counter()
    start = grpo if settings.es_ is None else train
    with (output / f"seed_{seed}.log").open("w") as log:
        result = start(settings, overwrite=True, console=Console(file=log, width=160))
    seconds = time.perf_counter() - began
    rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    change = paired_interval(result.before.measures_E[measure], result.after.measures_E[measure])
    return {
        "seed": seed,
        "before": result.before.measures[measure],
        "after": result.after.measures[measure],
        "change": change,
        "empty": result.after.measures["empty_share"],
        "exact": result.after.measures.get("exact", float("nan")),
        "generations": len(rows),
        "train_seconds": sum(sum(row["seconds"].values()) for row in rows),
        "seconds": seconds,
        "tokens": sum(row["tokens"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart_countdown.yaml")
    parser.add_argument("--measure", default="accuracy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_learning"))
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    print(f"{arguments.config} {' '.join(arguments.overrides)} on {device}; {versions()}\n")
    print(f"| seed | {arguments.measure} before | after | change (95 % interval, paired) | exact | empty | generations "
          "| training | whole | tokens/s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    changes: list[float] = []
    for seed in arguments.seeds:
        row = run(arguments.config, arguments.measure, seed, arguments.overrides, arguments.output)
        mean, low, high = row["change"]
        changes.append(mean)
        print(
            f"| {seed} | {row['before']:.4g} | {row['after']:.4g} | {mean:+.4g} ({low:+.4g} to {high:+.4g}) "
            f"| {row['exact']:.3f} | {row['empty']:.3f} | {row['generations']} | {row['train_seconds']:.0f} s "
            f"| {row['seconds']:.0f} s | {row['tokens'] / row['train_seconds']:,.0f} |",
            flush=True,
        )
    setting = " ".join([Path(arguments.config).stem, *arguments.overrides])
    check({f"learning {setting} {arguments.measure}, mean change": sum(changes) / len(changes)})


if __name__ == "__main__":
    main()
