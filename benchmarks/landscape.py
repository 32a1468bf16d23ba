# SPDX-License-Identifier: Apache-2.0
"""Runs of ES and GRPO that the analyses are shown on: full fine-tuning of a tiny model whose head is not tied.

    python benchmarks/landscape.py --to DIR --jobs 16             8 seeds of each, one core each; 16 cores: 3 minutes
    python benchmarks/landscape.py --to DIR --seeds 0,1 --only es

Conciseness on the questions that the project ships. The settings are those of one trial by hand for each method, before
any analysis: ES at sigma 0.01 and eta 0.5, GRPO at a third of the quickstart's learning rate. They are not matched in
budget, and nothing here says which method is better: see `benchmarks/es_vs_grpo.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from study_runs import ROOT, Task, integers, side_by_side

DATA = ROOT / "data" / "tasks" / "conciseness"
COMMON: dict[str, Any] = {
    "task": {
        "name": "conciseness",
        "train_data": str(DATA / "questions_train.json"),
        "test_data": str(DATA / "questions_test.json"),
    },
    "model": {"name": str(ROOT / "benchmarks" / "models" / "tiny_untied"), "dtype": "float32"},
    "engine": {"device": "cpu", "threads": 1},
    "evaluation": {"max_tokens": 100},
    "checks": {"canary_every": 0, "control_every": 0, "perplexity": False},
}
METHODS: dict[str, Mapping[str, Any]] = {
    "es": {
        "space": "full",
        "es": {"population_size": 32, "sigma": 0.01, "learning_rate": 0.005, "num_generations": 40},
        "checks": {**COMMON["checks"], "placebo": 0},
        "evaluation": {**COMMON["evaluation"], "every": 10},
        "task": {**COMMON["task"], "batch_size": 16},
    },
    "grpo": {
        "grpo": {
            "max_steps": 100, "num_generations": 8, "per_device_train_batch_size": 64, "learning_rate": 1.0e-4,
            "rollouts": "engine", "tune": "full",
        },
        "evaluation": {**COMMON["evaluation"], "every": 20},
        "checkpoint": {"every": 50},
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=integers, default=list(range(8)))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=list(METHODS))
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    tasks: list[Task] = []
    for method in [given.only] if given.only else METHODS:
        config = given.to / f"{method}.yaml"
        config.write_text(yaml.safe_dump({**COMMON, **METHODS[method]}, sort_keys=False), encoding="utf-8")
        tasks.append(Task(method, config, method))
    side_by_side(tasks, given.seeds, given.jobs, given.to)


if __name__ == "__main__":
    main()
