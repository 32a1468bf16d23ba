# SPDX-License-Identifier: Apache-2.0
"""How often `evoalign canary` blames a server that is sound, and whether it finds each planted fault.

    OMP_NUM_THREADS=1 python benchmarks/canary.py --engine sglang --runs 200 --faults       about 20 minutes

Starts a server of the tiny model on the CPU (its environment has to have the server), asks it by every API in turn with
prompts drawn anew for each run, and then, with `--faults`, through a server between that has each fault of the tests.
Each run is a row of benchmarks/results/canary.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from evoalign import engines, tokens
from evoalign.config import from_dict
from evoalign.engines.server.asking import Api
from evoalign.engines.server.canary import PROMPTS, Report, examine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from faulty_server import FAULTS, between

RESULTS = Path(__file__).parent / "results" / "canary.jsonl"
OWN = {
    "sglang": {"context_length": 512, "max_total_tokens": 32_768},
    "vllm-server": {"context_length": 256, "kv_cache_gib": 0.125, "max_running": 64},
}
APIS: dict[str, Sequence[Api]] = {
    "sglang": ("completions", "chat", "generate"),
    "vllm-server": ("completions", "chat"),
}
KNOWN = {"vllm-server": {"base beside"}}
"""Faults of the server itself: of vLLM 0.32 on a CPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=OWN, default="sglang")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="Number of the first run, by which prompts are drawn.")
    parser.add_argument("--minutes", type=float, default=15.0, help="No further run is begun after so many.")
    parser.add_argument("--faults", action="store_true", help="Then each planted fault, by each API.")
    parser.add_argument("--to", type=Path, default=RESULTS)
    options = parser.parse_args()
    config = from_dict({
        "model": {"name": "tiny", "dtype": options.dtype}, "lora": {"rank": 8}, "es": {"sigma": 0.05},
        "engine": {"name": options.engine, **OWN[options.engine]},
    })  # fmt: skip
    engine = engines.create(config, tokens.load(config.model))
    try:
        client = engine._there()
        _measure(options, client.url, client._key)
    finally:
        engine.close()


def _measure(options: argparse.Namespace, url: str, key: str) -> None:
    apis, known = APIS[options.engine], KNOWN.get(options.engine, set())
    started, blamed, seconds = time.monotonic(), 0, list[float]()
    for run in range(options.first, options.first + options.runs):
        if time.monotonic() - started > 60 * options.minutes:
            break
        report = examine(url, key=key, api=apis[run % len(apis)], prompts=_prompts(run))
        blamed += bool(_faults(report) - known)
        seconds.append(report.seconds)
        _write(options, report, run, None)
    if seconds:
        print(f"{len(seconds)} runs, {blamed} false alarms, {_spread(seconds)} s, floor {report.floor:.2g}", flush=True)
    for name, (make, wanted) in FAULTS.items() if options.faults else ():
        found = 0
        for run, api in enumerate(apis):
            with between(url, key, make()) as address:
                report = examine(address, api=api)
            found += _faults(report) - known == wanted
            _write(options, report, run, name)
        print(f"{name}: found {found} of {len(apis)}", flush=True)


def _prompts(run: int) -> list[str]:
    """The long one, which a prefix cache holds, and seven of other words each time."""
    draw, words = random.Random(run), " ".join(PROMPTS).split()
    return [" ".join(draw.sample(words, draw.randint(3, 16))) for _ in PROMPTS[1:]] + [PROMPTS[-1]]


def _faults(report: Report) -> set[str]:
    return {check.name for check in report.faults}


def _write(options: argparse.Namespace, report: Report, run: int, fault: str | None) -> None:
    row = {
        "engine": options.engine, "server": report.server, "dtype": options.dtype, "fault": fault, "run": run,
        "api": report.api, "seconds": round(report.seconds, 2), "floor": report.floor,
        "found": sorted(_faults(report)), "warnings": [c.name for c in report.checks if c.status == "warning"],
        "not_checked": [c.name for c in report.checks if c.status == "not checked"],
    }  # fmt: skip
    with options.to.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:.1f} to {ordered[-1]:.1f}, median {ordered[len(ordered) // 2]:.1f}"


if __name__ == "__main__":
    main()
