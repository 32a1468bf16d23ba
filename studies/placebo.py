# SPDX-License-Identifier: Apache-2.0
"""How much of a config's gain is signal: runs of several seeds, each with placebos.

Trains once a seed (a run that is there is resumed, which costs little where it is done), then replays its journal with
shuffled coefficients and with all signs flipped. One JSON line a seed goes to OUTPUT/placebo.jsonl, with the reward of
every placebo; then a table in Markdown is printed.

    python studies/placebo.py                              (configs/quickstart.yaml, seeds 0 to 4, 20 shuffles)
    python studies/placebo.py --config A.yaml --seeds 0 1 --shuffles 50 --off-task B.yaml --set engine.threads=2
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

import evoalign
from evoalign.config import load
from evoalign.rundir.identity import versions
from evoalign.statistics import Estimate

COLUMNS = ("seed", "before", "after", "placebos: mean (least to greatest)", "reach it", "p", "without signal [95 %]",
           "beyond drift [95 %]", "flip", "distance / random walk")  # fmt: skip


def run(config: str, seed: int, shuffles: int, off_task: str | None, sets: list[str], output: Path) -> dict[str, Any]:
    """Train one seed and replay it with `shuffles` placebos; return the rewards and the wall time."""
    folder = output / f"seed_{seed}"
    settings = load([config], ["checks.placebo=0", *sets, f"seed={seed}", f"output_dir={folder}"])
    began = time.perf_counter()
    with (output / f"seed_{seed}.log").open("a", encoding="utf-8") as log:
        evoalign.train(settings, resume=folder.exists(), console=Console(file=log, width=160))
    trained = time.perf_counter()
    found = evoalign.placebo(folder, shuffles=shuffles, config=settings, off_task=off_task)
    seconds = {"train_seconds": trained - began, "placebo_seconds": time.perf_counter() - trained}
    return {"config": config, "set": sets, "seed": seed, **found.as_dict(), **seconds, "versions": versions()}


def row(found: dict[str, Any]) -> str:
    """A seed as a row of the table."""
    reward, distance = found["reward"], found["distance"]
    share = "-" if reward["share"] is None else interval(Estimate(**reward["share"]), ".0%")
    walk = "-" if not distance["expected"] else f"{distance['real'] / distance['expected']:.2f}"
    cells = [
        str(found["seed"]),
        f"{reward['before']:.4g}",
        f"{reward['real']:.4g}",
        f"{reward['mean']:.4g} ({reward['low']:.4g} to {reward['high']:.4g})",
        f"{reward['reached']} of {len(reward['placebos'])}",
        f"{reward['p']:.2g}",
        share,
        interval(Estimate(**reward["beside"]), "+.4g"),
        f"{reward['flip']:.4g}",
        walk,
    ]
    return f"| {' | '.join(cells)} |"


def interval(found: Estimate, form: str) -> str:
    if found.low is None or found.high is None:
        return f"{found.mean:{form}}"
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--shuffles", type=int, default=20)
    parser.add_argument("--off-task")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--output", type=Path, default=Path("runs/placebo"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with (args.output / "placebo.jsonl").open("a", encoding="utf-8") as file:
        for seed in args.seeds:
            rows.append(run(args.config, seed, args.shuffles, args.off_task, args.sets, args.output))
            file.write(json.dumps(rows[-1], allow_nan=False) + "\n")
            file.flush()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---:|' * len(COLUMNS)}")
    for found in rows:
        print(row(found))
    above = sum(found["reward"]["reached"] == 0 for found in rows)
    print(f"\n{above} of {len(rows)} runs are above every placebo.")


if __name__ == "__main__":
    main()
