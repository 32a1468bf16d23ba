# SPDX-License-Identifier: Apache-2.0
"""Seconds of whole training runs from a config, by phase, with what they learned.

    python benchmarks/training_speed.py --config configs/quickstart_countdown.yaml --generations 100 --seeds 0 1 2 \
        --decoders auto library --json runs/training_speed.jsonl

    python benchmarks/training_speed.py --sums .cache/smollm2 --generations 100 --seeds 0
        # two-digit sums (probe_real.py) by SmolLM2 (recipes/smollm2), lowrank, 256 members x 16 prompts, 24 tokens

Each run is a process of its own, one after the other: `evoalign train` with the config's settings. Seconds are those of
metrics.jsonl, from the first generation to the last: rollouts, scoring, updates, and all else between them (evaluations
of the mean, figures, journal). What comes before and after, loading and the placebos, is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from probe_real import rows_of
from vllm_shapes import machine

RUN = "import sys; from evoalign.cli import main; sys.exit(main())"


def trained(options: argparse.Namespace, decoder: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run's row."""
    settings = [f"es.num_generations={options.generations}", f"seed={seed}", f"output_dir={folder}", *options.set]
    settings += [f"engine.decoder={decoder}"] if decoder else []
    command = [sys.executable, "-c", RUN, "train", options.config, "--overwrite"]
    subprocess.run([*command, *(word for one in settings for word in ("--set", one))], check=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((folder / "results" / "evaluation.json").read_text())
    phases = {phase: sum(row["seconds"][phase] for row in rows) for phase in rows[0]["seconds"]}
    return {
        "benchmark": "training_speed", "config": options.config, "generations": len(rows), "seed": seed,
        "decoder": decoder, "seconds": sum(phases.values()), "phases": phases,
        "each": [sum(row["seconds"].values()) for row in rows], "tokens": sum(row["tokens"] for row in rows),
        "before": found["before"], "after": found["after"], "device": machine(),
    }  # fmt: skip


def sums(model: str, folder: Path) -> Path:
    """A config of two-digit sums, with its rows beside it; for its speed: the noise's width is not a chosen one."""
    rows = rows_of("sums", 128)
    for name, part in (("train", rows[:96]), ("test", rows[96:])):
        (folder / f"{name}.json").write_text(json.dumps(part))
    config = {
        "space": "lowrank", "lowrank": {"rank": 1}, "model": {"name": str(Path(model).resolve())},
        "es": {"sigma": 0.001, "learning_rate": 0.0005, "population_size": 256, "antithetic": True},
        "task": {"name": "custom", "train_data": str(folder / "train.json"), "test_data": str(folder / "test.json"),
                 "rewards": [f"{Path(__file__).parent / 'probe_real.py'}:right_sum"], "batch_size": 16},
        "grader": {"isolated": False}, "sampling": {"max_tokens": 24}, "evaluation": {"max_tokens": 24, "every": 25},
    }  # fmt: skip
    path = folder / "sums.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart_countdown.yaml")
    parser.add_argument("--sums", metavar="MODEL", help="in place of --config: two-digit sums by this model")
    parser.add_argument("--generations", type=int, default=100)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--decoders", nargs="+", default=["auto"], help="of the engine transformers; '' sets none")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, as evoalign train takes them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for seed in options.seeds:
        for decoder in options.decoders:
            with tempfile.TemporaryDirectory() as parent:
                if options.sums:
                    options.config = str(sums(options.sums, Path(parent)))
                row = trained(options, decoder, seed, Path(parent) / "run")
                row |= {"config": f"sums by {options.sums}"} if options.sums else {}
            phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in row["phases"].items())
            print(f"seed {seed}, {decoder or 'as it is'}: {row['seconds']:.1f} s ({phases}); {row['after']}")
            if options.json is not None:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
