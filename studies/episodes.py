# SPDX-License-Identifier: Apache-2.0
"""ES with a tool: sums with a calculator, by a real model, against placebos and against a calculator that lies.

    python studies/episodes.py MODEL --to DIR --jobs honest/0 honest/1 honest/2 lying/0 lying/1 lying/2

Each job trains with `configs/sums.yaml` and leaves studies/results/episodes/JOB.json: config, versions, device, costs,
the course, the test split before and after, placebos, and the test split with the other calculator. Seeds of 100 or
more are for choosing settings, on the validation split. Jobs that have their rows are skipped. `--set` changes a
setting of every job.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import evoalign
from evoalign.config import from_dict, load
from evoalign.cost.budget import totals
from evoalign.evaluation import Evaluation
from evoalign.statistics import paired
from evoalign.tasks.sums import Calculator, Sums
from evoalign.types import Example

ROWS = Path(__file__).parent / "results" / "episodes"
ARMS = {"honest": "sums", "lying": "episodes:LyingSums"}


class LyingCalculator(Calculator):
    """Gives a wrong value for what it can calculate."""

    def calculate(self, expression: str) -> str:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: Whole numbers with + - * / and parentheses, such as (12 + 3) * 4.

        Returns:
            The value.
        """
        return str(int(float(super().calculate(expression))) + random.randint(1, 999_999))


class LyingSums(Sums):
    """The control: the tool is of no use, and all else is the same."""

    environment = LyingCalculator

    def gold(self, example: Example) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return None: no episode with this tool is known to be right."""


def measured(found: Evaluation) -> dict[str, Any]:
    """Return the measures of an evaluation, and the reward of each example."""
    first = [{"prompt": c.prompt, "text": c.text, "reward": c.reward} for c in found.completions[:3]]
    return {"measures": found.measures, "reward_E": list(found.measures_E["reward"]), "first": first}


def run(model: str, folder: Path, job: str, sets: list[str]) -> None:
    """Train and measure one job, and write its rows."""
    arm, seed = job.split("/")
    if int(seed) >= 100:
        sets = [*sets, "checks.placebo=0", "task.test_size=8"]
    config = load(["configs/sums.yaml"], [f"model.name={model}", f"seed={seed}", *sets])
    tree = config.model_dump()
    tree["task"]["name"], tree["output_dir"] = ARMS[arm], str(folder / job.replace("/", "_"))
    config = from_dict(tree)
    result = evoalign.train(config, overwrite=True)
    path = Path(config.output_dir)
    written = json.loads((path / "results/evaluation.json").read_text())
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = ("generation", "mean", "best", "validation", "evaluation", "seconds", "tokens")
    rows: dict[str, Any] = {
        "job": job,
        "config": config.model_dump(mode="json"),
        "versions": {"evoalign": evoalign.__version__, "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "before": measured(result.before),
        "after": measured(result.after),
        "validation": written.get("validation"),
        "placebos": {"reward": written["placebo"]["reward"]["placebos"]} if "placebo" in written else None,
        "cost": totals(metrics)[0].as_dict(),
        "course": [{key: row[key] for key in kept if key in row} for row in metrics],
    }
    if int(seed) < 100:
        other = {**tree, "task": {**tree["task"], "name": ARMS["lying" if arm == "honest" else "honest"]}}
        rows["other_tool"] = measured(evoalign.evaluate(path, config=other))
    file = ROWS / f"{job}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n")


def tables() -> dict[str, Iterator[str]]:
    """Return the tables of docs/results/episodes.md."""
    return {"gains": _gains(), "course": _course()}


def _kept(arm: str) -> list[dict[str, Any]]:
    files = sorted((ROWS / arm).glob("?.json"))  # seeds below 100
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _gains() -> Iterator[str]:
    yield "| calculator | seed | before | after | gain (95 % interval) | gains of placebos | with the other one |"
    yield "|---|---|---|---|---|---|---|"
    for arm in ARMS:
        for rows in _kept(arm):
            before, after = rows["before"]["reward_E"], rows["after"]["reward_E"]
            gain, start = paired(before, after, shares=True), 100 * fmean(before)
            between = f"{100 * (gain.low or 0):.1f} to {100 * (gain.high or 0):.1f}"
            placebos = [f"{100 * value - start:+.1f}" for value in (rows["placebos"] or {"reward": ()})["reward"]]
            yield (
                f"| {arm} | {rows['job'].partition('/')[2]} | {start:.1f} % | {100 * fmean(after):.1f} % | "
                f"{100 * gain.mean:+.1f} ({between}) | {', '.join(placebos) or '-'} | "
                f"{100 * fmean(rows['other_tool']['reward_E']):.1f} % |"
            )


def _course() -> Iterator[str]:
    shown = (1, 5, 10, 15, 20, 30, 40)
    yield f"| seed | {' | '.join(f'generation {g}' for g in shown)} |"
    yield "|---" * (1 + len(shown)) + "|"
    for rows in _kept("honest"):
        means = [100 * rows["course"][g - 1]["mean"] for g in shown]
        yield f"| {rows['job'].partition('/')[2]} | {' | '.join(f'{value:.1f} %' for value in means)} |"


def main() -> None:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--to", type=Path, default=Path("runs/episodes"))
    parser.add_argument("--jobs", nargs="*", default=[])
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    for job in given.jobs:
        if not (ROWS / f"{job}.json").exists():
            run(given.model, given.to, job, given.set)


if __name__ == "__main__":
    main()
