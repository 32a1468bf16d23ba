# SPDX-License-Identifier: Apache-2.0
"""Safety alignment on the tiny model: settings chosen on validation prompts, then seeds on the test prompts.

    python benchmarks/safety.py tune  --to DIR --jobs 16
    python benchmarks/safety.py final --to DIR --jobs 16 --seeds 0,1,2,3,4

`tune` trains each cell of CELLS with one seed that no final run has, evaluated on validation.jsonl, and ranks them in
DIR/tune.json. Of the cells whose mean reward does not fall it prefers the one with the largest safe share, less the
share of harmless prompts (look-alikes among them) that are refused. `final` trains the best of them on test.jsonl, with
placebos, KL and the answers at the start and at the end. Both go on where they were.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evoalign.tasks.safety.refusals import kind_of
from study_runs import ROOT, environment

CONFIG = ROOT / "configs" / "quickstart_safety.yaml"
DATA = ROOT / "data" / "tasks" / "safety"
TUNE_SEED = 90
SHARES = {"all": None, "tt75": {"TT": 375, "FF": 75, "FT": 25, "TF": 25}, "tt90": {"TT": 450, "FF": 50}}
"""Rows to train with: as they come, or more of those whose answers are both safe: most of these ask for no harm."""


def cells() -> dict[str, dict[str, Any]]:
    """Settings by name: which rows, lambda's start and rate, what is counted of an unsafe answer's reward."""
    found: dict[str, dict[str, Any]] = {}
    for rows, shares in SHARES.items():
        for name, objective in {
            "l1": {"start": 1.0, "rate": 0.05, "safe_first": "product"},
            "l03": {"start": 0.3, "rate": 0.05, "safe_first": "product"},
            "l03_fixed": {"start": 0.3, "rate": 0.0, "safe_first": "product"},
            "l03_none": {"start": 0.3, "rate": 0.05, "safe_first": "none"},
            "std": {"start": 1.0, "rate": 0.05, "safe_first": "product", "standardize": True},
        }.items():
            sets: dict[str, Any] = {"task.objective": {"name": "lagrangian", **objective}}
            if shares is not None:
                sets["task.shares"] = shares
            found[f"{rows}_{name}"] = sets
    found["tt75_l03_fast"] = {**found["tt75_l03"], "es.learning_rate": 0.02}
    return found


def measured(points: Path) -> dict[str, float]:
    """Shares and means of one evaluation's answers."""
    kinds = {row["prompt"]: row["kind"] for split in ("validation", "test") for row in _rows(DATA / f"{split}.jsonl")}
    rows = list(_rows(points))
    texts = Counter(row["response"] for row in rows)
    found = {
        "prompts": len(rows),
        "safe": _mean(row["cost"] <= 0 for row in rows),
        "reward": _mean(row["reward"] for row in rows),
        "cost": _mean(row["cost"] for row in rows),
        "largest_template": texts.most_common(1)[0][1] / len(rows),
        "distinct": len(texts) / len(rows),
    }
    for group, wanted in (("look_alike", {"look-alike"}), ("harmless", {"harmless"})):
        found[f"refused_{group}"] = _mean(
            kind_of(r["response"]) is not None for r in rows if kinds[r["prompt"]] in wanted
        )
    harmful = (r for r in rows if kinds[r["prompt"]] not in ("look-alike", "harmless"))
    found["refused_harmful"] = _mean(kind_of(r["response"]) is not None for r in harmful)
    needless = (r for r in rows if kinds[r["prompt"]] in ("look-alike", "harmless"))
    return {**found, "refused_needlessly": _mean(kind_of(r["response"]) is not None for r in needless)}


def train(to: Path, sets: Mapping[str, Any]) -> float:
    """One run in a process of its own, taken up where it was; its seconds."""
    began = time.monotonic()
    words = [sys.executable, "-m", "evoalign.cli", "train", str(CONFIG)]
    for key, value in {"output_dir": str(to), "engine.threads": 1, "engine.device": "cpu", **sets}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    if to.exists():
        words.append("--resume")
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.with_suffix(".log").open("ab") as log:
        subprocess.run(
            words, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        )
    return time.monotonic() - began


def all_of(runs: Mapping[Path, Mapping[str, Any]], jobs: int) -> None:
    """Train all, so many at once."""
    with ThreadPoolExecutor(jobs) as pool:
        for to, seconds in zip(runs, pool.map(train, runs, runs.values()), strict=True):
            print(f"{to.name}: {seconds:.0f} s", flush=True)


def tune(to: Path, jobs: int, generations: int) -> None:
    """See the module."""
    sets = {
        "seed": TUNE_SEED,
        "es.num_generations": generations,
        "task.test_data": str(DATA / "validation.jsonl"),
        "checks.placebo": 0,
        "evaluation.every": 0,
    }
    all_of({to / "tune" / name: {**sets, **cell} for name, cell in cells().items()}, jobs)
    found: list[dict[str, Any]] = []
    for name, cell in cells().items():
        results = to / "tune" / name / "results"
        if (results / "points.jsonl").is_file():
            before, after = measured(results / "points_before.jsonl"), measured(results / "points.jsonl")
            found.append({"cell": name, "settings": cell, "before": before, "after": after})
    found.sort(key=_rank, reverse=True)
    (to / "tune.json").write_text(json.dumps(found, indent=2) + "\n")
    for row in found:
        print(row["cell"], {k: f"{row['before'][k]:.2f}->{row['after'][k]:.2f}" for k in row["after"]}, flush=True)


def _rank(row: Mapping[str, Any]) -> tuple[bool, float]:
    after = row["after"]
    return after["reward"] >= row["before"]["reward"], after["safe"] - after["refused_needlessly"]


def final(to: Path, jobs: int, seeds: Sequence[int], best: int, generations: int) -> None:
    """See the module. More than the best cell are reported, and none of them chosen."""
    ranked = json.loads((to / "tune.json").read_text())[:best]
    sets = {"es.num_generations": generations, "evaluation.every": 10, "checks.kl_every": 20, "checks.placebo": 5}
    runs = {
        to / "final" / f"{row['cell']}_{seed}": {"seed": seed, **sets, **row["settings"]}
        for seed in seeds
        for row in ranked
    }
    all_of(runs, jobs)
    for run in runs:
        if (run / "results" / "points.jsonl").is_file():
            before, after = (measured(run / "results" / f"{name}.jsonl") for name in ("points_before", "points"))
            print(run.name, {k: f"{before[k]:.2f}->{after[k]:.2f}" for k in after}, flush=True)


def _rows(file: Path) -> Iterable[dict[str, Any]]:
    return map(json.loads, file.read_text(encoding="utf-8").splitlines())


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept)


def main() -> None:
    """Read the arguments; make one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "final"))
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--best", type=int, default=1, help="cells of `final`, from the first of the ranking on")
    parser.add_argument("--generations", type=int, default=60)
    given = parser.parse_args()
    if given.what == "tune":
        tune(given.to.resolve(), given.jobs, given.generations)
    else:
        final(given.to.resolve(), given.jobs, [int(s) for s in given.seeds.split(",")], given.best, given.generations)


if __name__ == "__main__":
    main()
