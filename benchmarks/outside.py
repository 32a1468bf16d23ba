# SPDX-License-Identifier: Apache-2.0
"""Share of a generation outside rollout, score and update, with its parts, and the seconds that a checkpoint blocks.

    python benchmarks/outside.py --shape tiny --device cpu
    python benchmarks/outside.py --shape 1.5b --json runs/outside.jsonl

Trains with `train` as a user does: space `lowrank`, rank 1, custom task, `--members` x `--prompts` greedy completions
of 128 tokens, 400 test and 100 validation rows that are evaluated every 10 generations, a checkpoint every 10, and the
default checks. Weights of a shape are random (benchmarks/decoding.py); `tiny` is the shipped model. The first
generation, which compiles kernels, does not count. Each part (calls, seconds of all, median) is timed where it is
called; a part inside another is in both. `blocks` is the longest time that the loop waited for a checkpoint before the
last one, which is waited for, `finish` the seconds after the last generation, and `check` the seconds of the start-up
check, and of a second one, which uses no kernel for the first time.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from baseline import check
from decoding import saved

PARTS = {
    "evaluations": "evoalign.training.session:Session.evaluate",
    "evaluations, completions": "evoalign.evaluation:collect",
    "evaluations, measures": "evoalign.evaluation:summarise",
    "prompts to tokens": "evoalign.tokens:Tokens.encode",
    "control": "evoalign.training.train:_EvolutionStrategies._control",
    "canary": "evoalign.training.train:_EvolutionStrategies._check_canary",
    "figures": "evoalign.training.recorder:Recorder._draw",
    "text signs": "evoalign.checks.diagnosis:Diagnosis._text_shares",
    "probe": "evoalign.engines.master:MeanMethods.probe_weights",
    "checkpoint": "evoalign.training.session:Session.save",
    "record": "evoalign.training.train:_EvolutionStrategies._record",
    "finish": "evoalign.training.session:Session._finish",
}
"""Name of each part, and the method that is timed."""


CHECK = "evoalign.engines.transformers.engine:TransformersEngine.check_mean"


def timed(place: str, calls: list[float], times: int = 1) -> None:
    """Replace a method by one that is called `times` times and appends the seconds of each."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    where = functools.reduce(getattr, owners, importlib.import_module(module))
    method = getattr(where, name)

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        found = None
        for _ in range(times):
            began = time.perf_counter()
            try:
                found = method(*arguments, **named)
            finally:
                calls.append(time.perf_counter() - began)
        return found

    setattr(where, name, call)


def briefness(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Reward: minus the characters of the completion."""
    return [-float(len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--members", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=31)
    parser.add_argument("--every", type=int, default=10, help="Generations between evaluations, and checkpoints.")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--to", type=Path, default=Path("runs/outside"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    folder = saved(options.shape, options.to, dtype)
    rows = [{"prompt": f"Question {i}: " + " ".join(f"{(i * 7919 + j * 104729) % 997}" for j in range(24))}
            for i in range(900)]  # fmt: skip
    for name, some in (("train", rows[:400]), ("test", rows[400:800]), ("validation", rows[800:])):
        (options.to / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    calls: dict[str, list[float]] = defaultdict(list)
    for name, place in PARTS.items():
        timed(place, calls[name])
    checks = list[float]()
    timed(CHECK, checks, 2)
    from evoalign.config import from_dict
    from evoalign.training.train import train

    config = from_dict({
        "output_dir": str(options.to / f"run_{options.shape}"), "space": "lowrank", "lowrank": {"rank": 1},
        "model": {"name": folder, "dtype": dtype}, "engine": {"name": "transformers", "device": options.device},
        "task": {
            "name": "custom", "batch_size": options.prompts, "prompt": "raw",
            **{f"{split}_data": str(options.to / f"{split}.jsonl") for split in ("train", "test", "validation")},
        },
        "es": {
            "num_generations": options.generations, "population_size": options.members, "sigma": 1e-3,
            "learning_rate": 1e-6, "antithetic": True,
        },
        "sampling": {"max_tokens": options.tokens}, "checkpoint": {"every": options.every},
        "evaluation": {"every": options.every, "max_tokens": options.tokens}, "checks": {"placebo": 0},
    })  # fmt: skip
    with (options.to / "log.txt").open("w") as log:
        result = train(config, reward=briefness, overwrite=True, console=Console(file=log, width=160))
    found = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()][1:]
    phases = {name: sum(row["seconds"].get(name, 0.0) for row in found) for name in found[0]["seconds"]}
    whole = sum(phases.values())
    row = {
        "shape": options.shape,
        "device": torch.cuda.get_device_name() if dtype == "bfloat16" else "cpu",
        "members": options.members, "prompts": options.prompts, "every": options.every,
        "generation": round(whole / len(found), 4),
        "tokens": sum(r["tokens"] for r in found),
        "shares": {name: round(seconds / whole, 4) for name, seconds in phases.items()},
        "parts": {
            name: [len(some), round(sum(some), 3), round(statistics.median(some), 4)]
            for name, some in calls.items() if some
        },
        "blocks": round(max(calls["checkpoint"][: (options.generations - 1) // options.every], default=0.0), 3),
        "check": [round(seconds, 3) for seconds in checks],
        "finish": round(sum(calls["finish"]), 3),
        "torch": torch.__version__,
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        with options.json.open("a") as file:
            file.write(json.dumps(row) + "\n")
    check({
        f"outside {options.shape}, share of a generation": row["shares"]["other"],
        f"outside {options.shape}, seconds that a checkpoint blocks": row["blocks"],
        f"outside {options.shape}, seconds of the start-up check": row["check"][-1],
    })  # fmt: skip


if __name__ == "__main__":
    main()
