# SPDX-License-Identifier: Apache-2.0
"""How many normals a second `evoalign.noise` draws, for a few shapes and numbers of members.

Each figure is the median of five calls after one that warms up. `OMP_NUM_THREADS` or `--threads` sets the threads.

    python benchmarks/noise.py [--device cpu] [--threads 2] [--repeats 5]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time

import numpy as np
import torch

from baseline import check
from evoalign import noise
from evoalign.types import Slices

CASES: tuple[tuple[str, tuple[int, ...], int, Slices | None], ...] = (
    ("LoRA factor", (896, 1), 30, None),
    ("tiny matrix", (128, 128), 30, None),
    ("0.5B matrix", (896, 4864), 1, None),
    ("0.5B matrix, 30 members", (896, 896), 30, None),
    ("0.5B embedding", (151_936, 64), 1, None),
    ("half the columns", (2048, 2048), 4, (slice(0, 2048), slice(1024, 2048))),
    ("columns off the grid", (2048, 2048), 4, (slice(0, 2048), slice(3, 1027))),
    ("1024 members", (128, 128), 1024, None),
)


def seconds(
    shape: tuple[int, ...], members: int, slices: Slices | None, device: str, repeats: int
) -> tuple[float, float, int]:
    """Return the median seconds of a call, the median CPU seconds, and the normals it draws."""
    key = noise.key(0, "noise", "benchmark")
    times: list[float] = []
    busy: list[float] = []
    drawn = 0
    for generation in range(repeats + 1):
        started, used = time.perf_counter(), time.process_time()
        drawn = noise.normals(key, shape, generation, range(members), slices, device).numel()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        busy.append(time.process_time() - used)
    return statistics.median(times[1:]), statistics.median(busy[1:]), drawn


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    hardware = torch.cuda.get_device_name() if options.device != "cpu" else f"{torch.get_num_threads()} CPU threads"
    print(f"{hardware}, {platform.machine()}, Python {sys.version.split()[0]}, torch {torch.__version__}, "
          f"numpy {np.__version__}; median of {options.repeats}\n")  # fmt: skip
    print("| case | shape | members | normals | ms | M normals/s |\n|---|---|---:|---:|---:|---:|")
    figures: dict[str, float] = {}
    for name, shape, members, slices in CASES:
        took, used, drawn = seconds(shape, members, slices, options.device, options.repeats)
        size = " x ".join(map(str, shape))
        print(f"| {name} | {size} | {members} | {drawn:,} | {took * 1e3:.2f} | {drawn / took / 1e6:.0f} |")
        figures[f"noise {size}, {members} members, M normals per CPU second"] = drawn / used / 1e6
    check(figures if options.device == "cpu" else {})


if __name__ == "__main__":
    main()
