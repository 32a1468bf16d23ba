# SPDX-License-Identifier: Apache-2.0
"""One generation of many members (RandOpt, CoRP) against generations of ES with the same completions, and a vote.

    python studies/thickets.py --width 0.01 --seeds 0 1 2                                    # Countdown, tiny model
    python studies/thickets.py --setting real --model DIR --width 0.001 --seeds 0            # word problems, 1.5B
    python studies/thickets.py --table

Each seed trains once with 1 generation of 5,000 members and once with 20 of 250, on 16 prompts a member and generation,
and leaves studies/results/thickets/SETTING/SEED.json: the test split of the base, of a vote of the 50 best members, of
self-consistency with 50 samples, of the average of the 50 best, of CoRP, and of ES, by prompt.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import evoalign
from evoalign import statistics
from evoalign.analysis.base import Finding
from evoalign.analysis.selection.command import select
from evoalign.config import load
from methods import ETA, SETTINGS, device, written
from study_points import points

ROWS = Path(__file__).resolve().parent / "results" / "thickets"
MEMBERS, GENERATIONS, PROMPTS, TOP = 5000, 20, 16, 50


def tree(given: argparse.Namespace, seed: int, generations: int) -> dict[str, Any]:
    """Return the config of a run with this many generations."""
    setting, width = SETTINGS[given.setting].tree, given.width
    return {
        "model": {"name": given.model},
        **setting,
        "output_dir": str(given.to / given.setting / f"{seed}_{generations}"),
        "seed": seed,
        "space": "lowrank",
        "task": {**setting["task"], "batch_size": PROMPTS},
        "es": {
            "num_generations": generations,
            "population_size": MEMBERS // generations,
            "sigma": width,
            "learning_rate": ETA * width,
        },
        "evaluation": {**setting["sampling"], "temperature": 0.0, "every": 0},
        "checkpoint": {"every": 0, "keep_best": False},
        "checks": {"placebo": 0, "perplexity": False},
        "report": False,
    }


def run(given: argparse.Namespace, seed: int) -> None:
    """Train both runs of a seed, apply the rules, and write the rows."""
    folder, found = given.to / given.setting, dict[str, Any]()
    for generations in (1, GENERATIONS):
        name = f"{seed}_{generations}"
        config = load([written(folder / f"{name}.yaml", tree(given, seed, generations))], given.set)
        with (folder / f"{name}.log").open("w", encoding="utf-8") as out:
            result = evoalign.train(
                config, resume=Path(config.output_dir).exists(), console=Console(file=out, width=160)
            )
        name = "one step of ES" if generations == 1 else f"ES, {GENERATIONS} generations"
        found[name] = {
            "each": list(result.after.measures_E["right"]),
            "test_completions": len(result.after.completions),
        }
    one = folder / f"{seed}_1"
    for chosen in (select(one, top=[TOP], vote=True), select(one, top=[TOP], merge="mean"), corp(one)):
        for row in chosen.numbers["rows"]:
            each = [float(value) for value in row["per_prompt"]]
            name = "CoRP" if row["name"].startswith("corp") else row["name"]
            found.setdefault(
                name, {"committed": row["committed"], "each": each, "test_completions": row["test_completions"]}
            )
        print(
            seed,
            [(row["name"], round(float(np.mean(row["per_prompt"])), 4)) for row in chosen.numbers["rows"]],
        )
    file = given.rows / given.setting / f"{seed}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"seed": seed, "width": given.width, "device": device(), "rows": found}) + "\n")


def corp(run: Path) -> Finding:
    """Apply CoRP to a tenth of the members."""
    return select(run, top=[MEMBERS // 10], merge="corp")


def table(setting: str) -> Iterator[str]:
    """Yield the table: accuracy by seed, and less the base, for new seeds and prompts at once."""
    files = sorted((ROWS / setting).glob("*.json"), key=lambda file: int(file.stem))
    seeds: list[Mapping[str, Any]] = [json.loads(file.read_text(encoding="utf-8"))["rows"] for file in files]
    names = [name for name in seeds[0] if all(name in rows for rows in seeds)] if seeds else []
    base = next((name for name in names if "base" in name), None)
    yield "| method | completions per test prompt | accuracy, by seed | less the base, points (95 %) |"
    yield "|---|---:|---|---|"
    for name in names:
        each = np.array([rows[name]["each"] for rows in seeds])
        accuracy = ", ".join(f"{100 * value:.1f}" for value in each.mean(axis=1))
        gap = (
            "-"
            if name == base or base is None
            else points(statistics.crossed(each - np.array([rows[base]["each"] for rows in seeds])))
        )
        yield f"| {name} | {seeds[0][name]['test_completions'] // each.shape[1]} | {accuracy} | {gap} |"


def main() -> None:
    """Run the seeds, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=("tiny", "real"), default="tiny")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--width", type=float, default=0.01)
    parser.add_argument("--to", type=Path, default=Path("runs/thickets"))
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    for seed in given.seeds:
        run(given, seed)
    if given.table:
        print("\n".join(table(given.setting)))


if __name__ == "__main__":
    main()
