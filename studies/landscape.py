# SPDX-License-Identifier: Apache-2.0
"""Runs of ES and GRPO that the analyses are shown on, from one base model each study.

    python studies/landscape.py conciseness countdown --to DIR --jobs 16          8 seeds of all, one core each
    python studies/landscape.py conciseness --to DIR --methods es,grpo --seeds 0,1
    python studies/landscape.py smollm2 --to DIR --jobs 4                          4 seeds, on a GPU

Conciseness and Countdown: full fine-tuning of a tiny model whose head is not tied (models/tiny_untied). The settings
of Conciseness are those of one trial by hand for each method, before any analysis; those of Countdown were searched for
the tiny model that is shipped (docs/results/countdown.md). SmolLM2: rank-1 noise on all matrices (ES), all weights
(GRPO), on Conciseness; sigma is the one of 0.003, 0.006 and 0.012 that had the best training reward after nine
generations of a seed that no run has, GRPO's learning rate the middle one of three. The methods are not matched in
budget, and nothing here says which is better: see
es_vs_grpo.py. Runs lie in DIR/STUDY/METHOD/base/seed_S; the same command continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

import benchmark_path  # noqa: F401
from study_runs import ROOT, Task, integers, names, side_by_side

Tree = dict[str, Any]
CHECKS: Tree = {"canary_every": 0, "control_every": 0, "perplexity": False}
ES_CHECKS: Tree = {"checks": {**CHECKS, "placebo": 0}}
QUESTIONS = ROOT / "data" / "tasks" / "conciseness"
TINY: Tree = {
    "model": {"name": str(ROOT / "studies" / "models" / "tiny_untied"), "dtype": "float32"},
    "engine": {"device": "cpu", "threads": 1},
    "checks": CHECKS,
}
CONCISENESS: Tree = {
    "name": "conciseness",
    "train_data": str(QUESTIONS / "questions_train.json"),
    "test_data": str(QUESTIONS / "questions_test.json"),
}
COUNTDOWN: Tree = {
    "name": "countdown", "train_data": str(ROOT / "data" / "tasks" / "countdown" / "countdown.json"),
    "split": "first_last", "train_size": 1700, "test_size": 500, "prompt": "short",
}  # fmt: skip
COMMON: dict[str, Tree] = {
    "conciseness": {**TINY, "task": CONCISENESS, "evaluation": {"max_tokens": 100}},
    "countdown": {**TINY, "task": COUNTDOWN, "evaluation": {"max_tokens": 40}},
    "smollm2": {
        "task": {**CONCISENESS, "prompt": "chat"}, "checks": CHECKS, "sampling": {"max_tokens": 60},
        "evaluation": {"max_tokens": 60},
        "model": {"name": str(ROOT / ".cache" / "smollm2"), "dtype": "float32"}, "engine": {"device": "cuda"},
    },
}  # fmt: skip


def es(sigma: float, rate: float, members: int, generations: int) -> Tree:
    """Return the settings of ES with full fine-tuning of a tiny model, evaluated four times."""
    found = {"sigma": sigma, "learning_rate": rate, "population_size": members, "num_generations": generations}
    return {
        **ES_CHECKS,
        "space": "full",
        "es": found,
        "task": {"batch_size": 16},
        "evaluation": {"every": generations // 4},
    }


def grpo(rate: float, group: int, steps: int) -> Tree:
    """Return the settings of GRPO on all weights, 64 completions per step, evaluated five times."""
    found = {"max_steps": steps, "num_generations": group, "per_device_train_batch_size": 64, "learning_rate": rate}
    every = {"evaluation": {"every": steps // 5}, "checkpoint": {"every": steps // 2}}
    return {**every, "grpo": {**found, "rollouts": "engine", "tune": "full"}}


STUDIES: dict[str, dict[str, Tree]] = {
    "conciseness": {
        "es": es(0.01, 0.005, 32, 40),
        "grpo": grpo(1.0e-4, 8, 100),
        "es_eta4": es(0.01, 0.04, 32, 40),
        "es_wide": es(0.05, 0.025, 32, 40),
        "es_8": es(0.01, 0.005, 8, 160),
        "es_128": es(0.01, 0.005, 128, 10),
    },
    "countdown": {
        "es": es(0.01, 0.01, 32, 40),
        "grpo": grpo(3.33e-5, 16, 240),
        "es_eta4": es(0.01, 0.04, 32, 40),
        "es_wide": es(0.05, 0.05, 32, 40),
    },
    "smollm2": {
        "es": {**es(0.012, 0.006, 64, 24), "space": "lowrank", "evaluation": {"every": 12}},
        "grpo": grpo(1.0e-5, 8, 40),
        "es_eta4": {**es(0.012, 0.048, 64, 24), "space": "lowrank", "evaluation": {"every": 12}},
    },
}  # fmt: skip
"""eta (learning rate over sigma) is 1 on Countdown and 0.5 on Conciseness."""
SEEDS = {"conciseness": range(8), "countdown": range(8), "smollm2": range(4)}


def run_of(folder: Path, method: str, seed: int) -> Path:
    """Where a run of a study lies; `folder` is the study's."""
    return folder / method / "base" / f"seed_{seed}"


def written(study: str, method: str, folder: Path) -> Path:
    """The config of a method, below the study's folder."""
    tree = deepcopy(COMMON[study])
    for section, values in STUDIES[study][method].items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, Mapping) else values
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{method}.yaml"
    config.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return config


def train(study: str, folder: Path, methods: list[str], seeds: list[int] | None, jobs: int) -> list[Task]:
    """Return the requested sweeps of a study."""
    return [
        Task(f"{study}/{m}", written(study, m, folder), "grpo" if m == "grpo" else "es",
             gpu=study == "smollm2")
        for m in STUDIES[study] if not methods or m in methods
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=list(STUDIES))
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=integers)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--methods", type=names, default=[])
    given = parser.parse_args()
    for study in given.studies:
        tasks = train(study, given.to / study, given.methods, given.seeds, given.jobs)
        side_by_side(tasks, given.seeds or list(SEEDS[study]), given.jobs, given.to)


if __name__ == "__main__":
    main()
