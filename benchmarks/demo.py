# SPDX-License-Identifier: Apache-2.0
"""Gains of the demo and of the template of `evoalign init`, with the gains of shuffled coefficients.

Trains each for several seeds, then replays every journal with its coefficients shuffled over the noises of their
generation: the same noise and steps of the same length, without the signal of the reward. All are evaluated on the
test split. `exact` is the share of completions that are exactly the answer, `named` of those with the answer
as a word in them. A run that is already in the folder is taken as it is, and a row that is already written is kept.

    python benchmarks/demo.py --to DIR                             rows to benchmarks/results/demo.jsonl, and the table
    python benchmarks/demo.py --to DIR --only template --seeds 3   a part of it
    python benchmarks/demo.py --table                              the table again
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from baseline import check
from evoalign.cli.scaffold import init
from evoalign.config import load
from evoalign.evaluation import Evaluation
from evoalign.placebos.counterfactual import parse
from evoalign.placebos.run import Counterfactuals, open_run
from evoalign.rundir.identity import versions
from evoalign.training.train import train

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "results" / "demo.jsonl"
CONFIGS = {"quickstart": ROOT / "configs" / "quickstart.yaml", "template": Path("config.yaml")}
MEASURES = ("reward", "exact", "named")


def trained(name: str, seed: int, run: Path) -> float | None:
    """Train, unless it is done; processor seconds, None where it was done before."""
    if (run / "results" / "evaluation.json").exists():
        return None
    config = load([CONFIGS[name]], [f"seed={seed}", f"output_dir={run}", "checks.placebo=0"])
    began = time.process_time()
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_suffix(".log").open("w") as log:
        train(config, overwrite=True, console=Console(file=log, width=160))
    return time.process_time() - began


def figures(found: Evaluation, golds: Sequence[str]) -> dict[str, float]:
    """Reward, and the shares of right answers, by themselves and among other words."""
    pairs = [(done.text.strip(), golds[done.example]) for done in found.completions]
    named = [re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", text, re.IGNORECASE) is not None for text, gold in pairs]
    return {
        "reward": found.measures["reward"],
        "exact": mean(text == gold for text, gold in pairs),
        "named": mean(named),
    }


def measured(run: Path, placebos: int, config: Path | None) -> dict[str, Any]:
    """The start, the run and its placebos."""
    with open_run(run, config=None if config is None else str(config)) as found:
        data = found.parts.data.test
        golds = [str(row.get("target", row.get("answer"))) for row in data]
        return {
            "examples": len(data),
            "before": figures(found.start().evaluation, golds),
            "real": figures(found.reach(None).evaluation, golds),
            "placebos": [figures(_shuffled(found, seed), golds) for seed in range(placebos)],
        }


def _shuffled(found: Counterfactuals, seed: int) -> Evaluation:
    return found.reach(parse("shuffle", found.log, seed)).evaluation


def row(name: str, seed: int, folder: Path, placebos: int) -> dict[str, Any]:
    """One config with one seed. The template's files are in the folder that `evoalign init` made."""
    run = folder / name / f"seed_{seed}"
    home = ROOT
    if name == "template":
        home = folder / "my_task"
        if not home.exists():
            init(home)
    with contextlib.chdir(home):
        seconds = trained(name, seed, run)
        found = measured(run, placebos, run / "config.yaml" if name == "template" else None)
    return {"config": name, "seed": seed, "cpu_seconds": seconds, **found, "versions": versions()}


def written() -> list[dict[str, Any]]:
    """All rows so far, the latest of each config and seed."""
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    rows = {(found["config"], found["seed"]): found for found in map(json.loads, lines)}
    return [rows[key] for key in sorted(rows)]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table in Markdown."""
    lines = [
        "| config | seed | reward before | real | placebos, mean (least to most) | placebos at or above the real run "
        "| share of the gain that would have come without signal "
        "| exact before | real | placebos, mean (most) | named real |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for found in rows:
        before, real, placebos = found["before"], found["real"], found["placebos"]
        rewards, exact = ([p[key] for p in placebos] for key in ("reward", "exact"))
        reached = sum(value >= real["reward"] for value in rewards)
        share = (mean(rewards) - before["reward"]) / (real["reward"] - before["reward"])
        lines.append(
            f"| {found['config']} | {found['seed']} | {before['reward']:.3g} | {real['reward']:.3g} "
            f"| {mean(rewards):.3g} ({min(rewards):.3g} to {max(rewards):.3g}) | {reached} of {len(placebos)} "
            f"| {share:.0%} | {before['exact']:.1%} | {real['exact']:.1%} | {mean(exact):.1%} ({max(exact):.1%}) "
            f"| {real['named']:.1%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="A folder for the runs.")
    parser.add_argument("--only", choices=CONFIGS, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--placebos", type=int, default=20)
    parser.add_argument("--table", action="store_true", help="Print the rows that there are; run nothing.")
    arguments = parser.parse_args()
    if not arguments.table:
        if arguments.to is None:
            parser.error("give --to DIR for the runs, or --table")
        os.environ["TQDM_DISABLE"] = "1"
        there = {(found["config"], found["seed"]) for found in written()}
        wanted = [(name, seed) for name in CONFIGS if arguments.only in (None, name) for seed in arguments.seeds]
        for name, seed in wanted:
            if (name, seed) in there:
                continue
            found = row(name, seed, arguments.to.resolve(), arguments.placebos)
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(table([found])[-1], flush=True)
    rows = written()
    print("\n".join(table(rows)))
    shares = {name: [found["real"]["exact"] for found in rows if found["config"] == name] for name in CONFIGS}
    figures = {f"demo {name}, mean share of exact answers": mean(found) for name, found in shares.items() if found}
    reached = [p["reward"] >= found["real"]["reward"] for found in rows for p in found["placebos"]]
    check({**figures, "demo, placebos that reach their run": float(sum(reached))})


if __name__ == "__main__":
    main()
