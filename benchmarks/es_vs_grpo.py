# SPDX-License-Identifier: Apache-2.0
"""Compares ES in three spaces with GRPO on the tiny model: equal search, then twelve seeds per method.

    python benchmarks/es_vs_grpo.py tune   --task countdown --to DIR --jobs 60 --seconds 90
    python benchmarks/es_vs_grpo.py refine --task countdown --to DIR --jobs 60
    python benchmarks/es_vs_grpo.py final  --task countdown --to DIR --jobs 60 --seconds 210
    evoalign compare DIR/countdown/final --plan configs/comparison/plans/countdown.yaml --to REPORT

`tune` searches 12 settings of each method with two seeds on a validation split that no final figure uses; every run
takes about the same wall time on one core. `refine` tries two further learning rates per method around the best trial:
beyond it if it was the first or last of the grid, otherwise between it and its neighbours. `final` trains the best
settings and evaluates them on the test split. After a stop (`--limit`) the same command continues.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from baseline import check
from study_runs import (
    ROOT,
    STEPS,
    Task,
    calibrate,
    deadline,
    integers,
    names,
    pairs,
    read_results,
    side_by_side,
)

METHODS = {"lora": "es", "lowrank": "es", "full": "es", "grpo": "grpo", "grpo_es": "grpo"}
CALIBRATION_STEPS = {"countdown": {"es": 4, "grpo": 20}, "conciseness": {"es": 4, "grpo": 8}}
SECONDS = {"countdown": (150.0, 400.0), "conciseness": (60.0, 120.0)}
"""Training of one run of `tune` and of `final`."""
TUNE_SEEDS = [100, 101]
"""None of them is a seed of the final runs."""
FINAL_SEEDS = list(range(12))
"""With ten pairs of methods, Holm's correction leaves the exact permutation test no p below 0.05 under nine seeds."""
POINTS = {"es": 40, "grpo": 20}
"""Evaluations of a final run. ES has far more completions a generation, and is to have points where GRPO ends."""
KL_POINTS = 5
MEASURES = {"countdown": "accuracy", "conciseness": "reward"}

GRIDS: dict[str, dict[str, dict[str, list[Any]]]] = {
    "countdown": {
        "lora": {"es.sigma": [0.0025, 0.005, 0.01], "es.learning_rate": [0.00125, 0.0025, 0.005, 0.01]},
        "lowrank": {"es.sigma": [0.005, 0.01, 0.02], "es.learning_rate": [0.0025, 0.005, 0.01, 0.02]},
        "full": {"es.sigma": [0.005, 0.01, 0.02], "es.learning_rate": [0.00125, 0.0025, 0.005, 0.01]},
        "grpo": {"grpo.num_generations": [4, 8, 16], "grpo.learning_rate": [1e-4, 3e-4, 1e-3, 3e-3]},
        "grpo_es": {"es.sigma": [0.005, 0.01, 0.02], "grpo.learning_rate": [1e-4, 3e-4, 1e-3, 3e-3]},
    },
    "conciseness": {
        "lora": {"es.sigma": [0.0075, 0.01, 0.015], "es.learning_rate": [0.0025, 0.005, 0.01, 0.02]},
        "lowrank": {"es.sigma": [0.015, 0.02, 0.03], "es.learning_rate": [0.005, 0.01, 0.02, 0.04]},
        "full": {"es.sigma": [0.01, 0.02, 0.03], "es.learning_rate": [0.005, 0.01, 0.02, 0.04]},
        "grpo": {"grpo.beta": [0.0, 0.005, 0.02], "grpo.learning_rate": [3e-5, 1e-4, 3e-4, 1e-3]},
        "grpo_es": {"es.sigma": [0.015, 0.02, 0.03], "grpo.learning_rate": [3e-5, 1e-4, 3e-4, 1e-3]},
    },
}


def tune(arguments: argparse.Namespace) -> None:
    """Search all methods side by side, and write chosen.json."""
    folder = arguments.to / arguments.task
    seconds = arguments.seconds or SECONDS[arguments.task][0]
    base = _base(arguments, _validating(arguments, folder))
    (folder / "tune").mkdir(parents=True, exist_ok=True)
    steps = CALIBRATION_STEPS[arguments.task]
    speed = calibrate(base, steps, arguments.jobs, folder / "tune", arguments.deadline)
    tasks = [
        replace(task, cells=_cells(arguments.task, task.name)[: arguments.cells])
        for task in _lasting(base, seconds, speed)
    ]
    seeds = arguments.seeds or TUNE_SEEDS
    side_by_side(tasks, seeds, arguments.jobs, folder / "tune", arguments.deadline)
    found = {"task": arguments.task, "seconds": seconds, "seeds": seeds, "jobs": {"tune": arguments.jobs}}
    _write(folder, {**found, "methods": choose(folder / "tune")})


def refine(arguments: argparse.Namespace) -> None:
    """Search two further learning rates of each method, of runs as long as before, and choose again."""
    folder = arguments.to / arguments.task
    chosen = json.loads((folder / "chosen.json").read_text())
    base = [t for t in _base(arguments, _validating(arguments, folder)) if t.name in chosen["methods"]]
    # Chosen from the first round alone, so that the same command goes on with the same cells.
    first = choose(folder / "tune")
    tasks = [
        replace(task, cells=further(GRIDS[arguments.task][task.name], first[task.name]["settings"]))
        for task in _lasting(base, chosen["seconds"], _pace(folder))
    ]
    side_by_side(tasks, chosen["seeds"], arguments.jobs, folder / "refine", arguments.deadline)
    jobs = {**chosen["jobs"], "refine": arguments.jobs}
    _write(folder, {**chosen, "refined": True, "jobs": jobs, "methods": choose(folder / "tune", folder / "refine")})


def _validating(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Overrides of runs that settings are chosen by."""
    size = {"task.test_size": VALIDATION_ROWS["countdown"]} if arguments.task == "countdown" else {}
    return {**size, "task.test_data": str(write_validation(arguments.task, folder)), **pairs(arguments.sets)}


def further(grid: Mapping[str, list[Any]], best: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two cells that differ from the best one in the learning rate alone."""
    (key,) = (key for key in grid if key.endswith("learning_rate"))
    rates, rate = sorted(grid[key]), best[key]
    i = rates.index(rate)
    if 0 < i < len(rates) - 1:
        wanted = [math.sqrt(rate * rates[i - 1]), math.sqrt(rate * rates[i + 1])]
    else:
        factor = rate / rates[1 if i == 0 else -2]
        wanted = [rate * factor, rate * factor**2]
    return [{**best, key: float(f"{value:.3g}")} for value in wanted]


def _pace(folder: Path) -> dict[str, float]:
    """Seconds of a step of each method, measured with all methods at once."""
    return json.loads((folder / "tune" / "calibration.json").read_text())


def _lasting(tasks: Sequence[Task], seconds: float, speed: Mapping[str, float]) -> list[Task]:
    """Return the tasks with a known speed, with the number of steps that fills the seconds."""
    known = [task for task in tasks if task.name in speed]
    steps = {task.name: max(2, round(seconds / speed[task.name])) for task in known}
    return [replace(task, sets={**task.sets, STEPS[task.method]: steps[task.name]}) for task in known]


def _write(folder: Path, chosen: Mapping[str, Any]) -> None:
    (folder / "chosen.json").write_text(json.dumps(chosen, indent=2) + "\n")
    for name, found in chosen["methods"].items():
        budget, reward = found["budget"], found["validation"]["mean"]["reward"]
        print(f"{name}: {found['settings']}, reward {reward:.4g} after {budget['trials']} trials")


def final(arguments: argparse.Namespace) -> None:
    """Train the chosen settings with each seed, side by side, evaluated on the test split along the way."""
    folder = arguments.to / arguments.task
    seconds = arguments.seconds or SECONDS[arguments.task][1]
    chosen = json.loads((folder / "chosen.json").read_text())
    base = [task for task in _base(arguments, pairs(arguments.sets)) if task.name in chosen["methods"]]
    tasks: list[Task] = []
    for task in _lasting(base, seconds, _pace(folder)):
        every = max(1, task.sets[STEPS[task.method]] // POINTS[task.method])
        more = {"evaluation.every": every, "checks.kl_every": every * max(1, POINTS[task.method] // KL_POINTS)}
        tasks.append(replace(task, sets={**task.sets, **chosen["methods"][task.name]["settings"], **more}))
    chosen |= {"final_seconds": seconds, "jobs": {**chosen["jobs"], "final": arguments.jobs}}
    (folder / "chosen.json").write_text(json.dumps(chosen, indent=2) + "\n")
    side_by_side(tasks, arguments.seeds or FINAL_SEEDS, arguments.jobs, folder / "final", arguments.deadline)
    measure, means = MEASURES[arguments.task], dict[str, float]()
    for task in tasks:
        found = read_results(folder / "final" / task.name) or {"cells": []}
        values = [run["numbers"][measure] for cell in found["cells"] for run in cell["runs"] if "numbers" in run]
        print(f"{task.name}: {measure} {[round(value, 4) for value in values]}")
        means |= {task.name: fmean(values)} if values else {}
    gap = f"es_vs_grpo {arguments.task}, {measure} of grpo less"
    check({f"{gap} {name}": means["grpo"] - means[name] for name in means if "grpo" in means and name != "grpo"})


def _base(arguments: argparse.Namespace, sets: Mapping[str, Any]) -> list[Task]:
    return [
        Task(name, ROOT / "configs" / "comparison" / f"{arguments.task}_{name}.yaml", METHODS[name], (), sets)
        for name in arguments.methods
    ]


def _cells(task: str, method: str) -> list[dict[str, Any]]:
    grid = GRIDS[task][method]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def choose(*folders: Path) -> dict[str, Any]:
    """Return the trial with the best mean validation reward of each method, and the cost of its search."""
    from evoalign.cost.budget import Cost, cost_of

    chosen: dict[str, Any] = {}
    for method in METHODS:
        tried = [cell for folder in folders for cell in (read_results(folder / method) or {"cells": []})["cells"]]
        cells = [cell for cell in tried if "reward" in cell["mean"]]
        if not cells:
            continue
        runs = [run for cell in tried for run in cell["runs"]]
        most = max(sum(run["state"] == "done" for run in cell["runs"]) for cell in cells)
        whole = [cell for cell in cells if sum(run["state"] == "done" for run in cell["runs"]) == most]
        best = max(whole, key=lambda cell: cell["mean"]["reward"])
        costs = [cost for run in runs if (cost := cost_of(run.get("training"))) is not None]
        total = sum(costs, Cost())
        chosen[method] = {
            "cell": best["name"],
            "settings": best["settings"],
            "validation": {"mean": best["mean"], "std": best["std"]},
            "budget": {
                "trials": len(tried),
                "runs": len(runs),
                "not_done": sum(run["state"] != "done" for run in runs),
                "completions": total.completions,
                "tokens": total.prompt_tokens + total.generated_tokens,
                "flops": (total.forward_flops or 0.0) + (total.backward_flops or 0.0),
                "wall_seconds": total.wall_seconds,
                "run_seconds": [min(c.wall_seconds for c in costs), max(c.wall_seconds for c in costs)],
            },
        }
    return chosen


VALIDATION_ROWS = {"countdown": 500, "conciseness": 48}
VALIDATION_SEED = 20
"""Settings of configs/quickstart_countdown.yaml were chosen on problems of other seeds."""


def write_validation(task: str, folder: Path) -> Path:
    """The file that settings are chosen on: the same rows everywhere, none of them in the shipped files."""
    rows = {"countdown": _more_problems, "conciseness": _more_questions}[task](VALIDATION_ROWS[task])
    path = folder / "validation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    return path.absolute()


def _more_problems(count: int) -> list[dict[str, Any]]:
    from evoalign.tasks.countdown import generate, held_out

    shipped = {_problem(row) for row in _shipped("countdown/countdown.json")}

    def is_wanted(numbers: tuple[int, ...], target: int) -> bool:
        return held_out(numbers, target) and (tuple(sorted(numbers)), target) not in shipped

    return generate(count, "mixed", VALIDATION_SEED, keep=is_wanted)


def _problem(row: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    return tuple(sorted(row["numbers"])), int(row["target"])


def _more_questions(count: int) -> list[dict[str, Any]]:
    """Return new questions of the families in the tiny model's recipe."""
    families = [family for family, _ in runpy.run_path(str(ROOT / "recipes/tiny_base/questions.py"))["FAMILIES"]]
    taken = {row["prompt"] for name in ("train", "test") for row in _shipped(f"conciseness/conciseness_{name}.json")}
    drawn = random.Random(VALIDATION_SEED)
    rows: list[dict[str, Any]] = []
    for i in itertools.count():
        question, answer, _ = families[i % len(families)](drawn)
        if question not in taken:
            taken.add(question)
            rows.append({"id": f"validation-{len(rows)}", "prompt": question, "target": answer})
        if len(rows) == count:
            return rows
    raise AssertionError


def _shipped(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "data/tasks" / name).read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, call in (("tune", tune), ("refine", refine), ("final", final)):
        command = commands.add_parser(name)
        command.set_defaults(call=call)
        command.add_argument("--task", choices=sorted(GRIDS), required=True)
        command.add_argument("--to", type=Path, required=True)
        command.add_argument("--jobs", type=int, default=5, help="Runs at once, over all methods.")
        command.add_argument("--seconds", type=float, help="Training of one run.")
        command.add_argument("--seeds", type=integers)
        command.add_argument("--methods", type=names, default=list(METHODS))
        command.add_argument("--cells", type=int, help="Number of trials of each grid, for a quick try.")
        command.add_argument("--limit", type=float, help="Stop after this many seconds; the same command continues.")
        command.add_argument("--set", dest="sets", action="append", default=[], metavar="a.b=c")
    arguments = parser.parse_args()
    arguments.deadline = deadline(getattr(arguments, "limit", None))
    arguments.call(arguments)


if __name__ == "__main__":
    main()
