# SPDX-License-Identifier: Apache-2.0
"""Does `evoalign probe` find the sigma that trains best? A sweep of short trainings against what the probe says before.

Every sigma is trained for each seed with the same generations, population and eta (learning rate = eta * sigma); the
best is the one with the highest mean of the measure on the test split. The probe runs once a seed, on the start alone.
Prints the sweep, the probes and how many times each recommendation is off; a run takes `device` from the config, so a
GPU is used where there is one.

    python studies/probe.py                                               (Countdown, the quickstart's settings)
    python studies/probe.py --config configs/quickstart.yaml --measure train --generations 40 \\
        --sigmas 0.0125 0.025 0.05 0.1 0.2 0.4                               (Conciseness)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console

from evoalign.config import load
from evoalign.preflight.advice import ETA, ProbeResult, lines, table
from evoalign.preflight.probe import probe
from evoalign.rundir.identity import versions
from evoalign.training.train import train

SIGMAS = [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064]


def trained(arguments: argparse.Namespace, sigma: float, seed: int) -> float:
    """The measure after training; `train` is the population's fitness, averaged over the run."""
    folder = arguments.output / f"sigma_{sigma:g}_seed_{seed}"
    changes = [
        f"es.sigma={sigma}",
        f"es.learning_rate={ETA * sigma}",
        f"es.num_generations={arguments.generations}",
        "evaluation.every=0",
        "checkpoint.every=0",
        f"seed={seed}",
        f"output_dir={folder}",
    ]
    config = load([arguments.config], [*arguments.overrides, *changes])
    with folder.with_suffix(".log").open("w") as log:
        result = train(config, overwrite=True, console=Console(file=log, width=160))
    if arguments.measure != "train":
        return result.after.measures[arguments.measure]
    rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    return mean(row["mean"] for row in rows)


def sweep(arguments: argparse.Namespace) -> float:
    """Print one row a sigma; the best of them."""
    print(f"| sigma | {' | '.join(f'seed {seed}' for seed in arguments.seeds)} | mean | seconds |")
    print("|---" * (len(arguments.seeds) + 3) + "|")
    means: dict[float, float] = {}
    for sigma in arguments.sigmas:
        began = time.perf_counter()
        values = [trained(arguments, sigma, seed) for seed in arguments.seeds]
        means[sigma] = mean(values)
        shown = " | ".join(f"{value:.4g}" for value in values)
        print(f"| {sigma:g} | {shown} | {means[sigma]:.4g} | {time.perf_counter() - began:.0f} |", flush=True)
    best = max(means, key=lambda sigma: means[sigma])
    print(f"\nbest of the sweep by {arguments.measure}: sigma {best:g}\n")
    return best


def probed(arguments: argparse.Namespace, seed: int) -> ProbeResult:
    """Print what the probe says before any training; its ladder is centred on the config's own sigma."""
    config = load([arguments.config], [*arguments.overrides, f"seed={seed}"])
    began = time.perf_counter()
    result = probe(config, members=arguments.members, examples=arguments.examples, sigmas=arguments.ladder)
    print(f"probe, seed {seed}: {result.completions:,} completions, {time.perf_counter() - began:.0f} s")
    Console(width=120).print(table(result))
    print("\n".join(lines(result)) + "\n", flush=True)
    return result


def verdict(best: float, results: Sequence[ProbeResult], seeds: Sequence[int]) -> None:
    for seed, result in zip(seeds, results, strict=True):
        if result.width is None:
            print(f"seed {seed}: no recommendation")
        else:
            off = max(result.width / best, best / result.width)
            print(f"seed {seed}: recommends {result.width:g}, {off:.2g} times off the best, {best:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart_countdown.yaml")
    parser.add_argument("--measure", default="accuracy", help="of the test split, or train: mean fitness of the run")
    parser.add_argument("--generations", type=int, default=40)
    parser.add_argument("--sigmas", type=float, nargs="+", default=SIGMAS, help="of the sweep")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ladder", type=float, nargs="+", default=None, help="of the probe; its own default")
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_probe"))
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    print(f"{arguments.config} {' '.join(arguments.overrides)}, {arguments.generations} generations, on {device}; "
          f"{versions()}\n")  # fmt: skip
    results = [probed(arguments, seed) for seed in arguments.seeds]
    verdict(sweep(arguments), results, arguments.seeds)


if __name__ == "__main__":
    main()
