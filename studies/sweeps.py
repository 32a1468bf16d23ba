# SPDX-License-Identifier: Apache-2.0
"""Sweeps of rank, population, what evolves and the noise on the tiny model: docs/results/sweeps.md.

    python studies/sweeps.py run --to DIR --jobs 60 --seconds 100
    python studies/sweeps.py collect --from DIR     # writes studies/results/sweeps.json, which result_pages.py reads

`run` trains every trial with three seeds, one core each, all sweeps side by side. Runs of one sweep have the same
completions; `--seconds` is the wall time of the base config for them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import benchmark_path  # noqa: F401
from evoalign.report.figures import COLORS, canvas, frame, save
from study_runs import ROOT, Task, calibrate, deadline, integers, names, pairs, read_results, rounded, side_by_side

ROWS = ROOT / "studies" / "results" / "sweeps.json"
RANKS = (1, 2, 4, 8, 16)
POPULATIONS = (8, 16, 32, 64, 128, 256)
WIDTHS = (0.001, 0.00316, 0.01, 0.0316, 0.1)
BASE_POPULATION = 128
SCALE = 5.0
"""Widths of the published Conciseness pairs times this are those at which the tiny model's answers change."""
PUBLISHED = (
    (0.0005, 0.001), (0.0005, 0.003), (0.0005, 0.005), (0.0005, 0.01), (0.001, 0.001),
    (0.001, 0.005), (0.0015, 0.001), (0.0015, 0.005), (0.0015, 0.01), (0.00075, 0.0015),
)  # fmt: skip
"""(alpha, sigma) of configs/sweeps/conciseness_alpha_sigma.yaml, which says where each is from."""
LOWRANK = {"space.name": "lowrank", "lowrank.rank": 1, "es.sigma": 0.01, "es.learning_rate": 0.02}


@dataclass(frozen=True)
class Sweep:
    """`axis` is what the figure lies over, `asks` the question, `note` what the cells have in common."""

    config: str
    axis: str
    asks: str
    note: str
    cells: Sequence[Mapping[str, Any]] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)
    y: str | None = None
    share: float = 1.0
    seconds: float = 1.0
    """Both relative to the other sweeps: of the jobs, and of the length of a run."""


SWEEPS = {
    "rank_lora": Sweep(
        "countdown_lora", "lora.rank", "The least useful rank of an adapter",
        "`lora.alpha` is twice the root of the rank, so that the noise of the effective weights is as wide everywhere.",
        [{"lora.rank": r, "lora.alpha": round(2 * math.sqrt(r), 4)} for r in RANKS],
    ),
    "rank_lowrank": Sweep(
        "countdown_lowrank", "lowrank.rank", "The least useful rank of noise on the weights",
        "The width of EGGROLL's noise does not depend on its rank.",
        [{"lowrank.rank": r} for r in RANKS],
    ),
    "population": Sweep(
        "countdown_lowrank", "es.population_size", "Few generations of many members, or many of few",
        "Every cell has the same completions in all, and the same learning rate: a quarter of what the search chose "
        "for 128 members, since small populations take many more steps.",
        sets={"es.learning_rate": 0.005},
        share=2.0,  # a generation of few members takes longer a completion
    ),
    "evolve": Sweep(
        "countdown_lora", "where", "What evolves: B alone, A and B, or the weights",
        "Noise of the effective weights is as wide in `lora` b and in `lowrank`; `ab` starts at A = B = 0, where its "
        "expected gain is 0. Antithetic pairs are off, since `ab` cannot have them.",
        [{"space.name": "lora", "lora.evolve": "b"}, {"space.name": "lora", "lora.evolve": "ab"}, LOWRANK],
        {"es.antithetic": False},
    ),
    "noise": Sweep(
        "countdown_lowrank", "es.sigma", "The width of the noise",
        "The learning rate is twice sigma in every cell.",
        [{"es.sigma": s, "es.learning_rate": round(2 * s, 6)} for s in WIDTHS],
    ),
    "conciseness": Sweep(
        "conciseness_lowrank", "es.sigma", "The alpha and sigma pairs of the Conciseness study",
        f"Pairs of configs/sweeps/conciseness_alpha_sigma.yaml, both numbers times {SCALE:g} for a model this small: "
        "the shape of the published grid, not its numbers.",
        [{"es.learning_rate": round(a * SCALE, 6), "es.sigma": round(s * SCALE, 6)} for a, s in PUBLISHED],
        y="es.learning_rate",
        share=2.0,
        seconds=0.4,
    ),
}  # fmt: skip
CALIBRATION_STEPS = {"es": 5}


def run(arguments: argparse.Namespace) -> None:
    """All sweeps side by side."""
    extra = pairs(arguments.sets)
    chosen = {name: SWEEPS[name] for name in arguments.sweeps}
    base = [Task(config, _file(config), "es", (), extra) for config in sorted({s.config for s in chosen.values()})]
    arguments.to.mkdir(parents=True, exist_ok=True)
    speed = calibrate(base, CALIBRATION_STEPS, arguments.jobs, arguments.to, arguments.deadline)
    tasks: list[Task] = []
    for name, sweep in chosen.items():
        # All Countdown sweeps have the length of lowrank's, so that cells of two sweeps compare.
        reference = "countdown_lowrank" if sweep.config.startswith("countdown") else sweep.config
        seconds = speed.get(reference, speed.get(sweep.config))
        if seconds is None:
            continue
        steps = max(2, round(arguments.seconds * sweep.seconds / seconds))
        cells = (sweep.cells or _populations(steps))[: arguments.cells]
        every = {} if name == "population" else {"evaluation.every": max(1, steps // 10)}
        more = {"es.num_generations": steps, **every, **sweep.sets, **extra}
        tasks.append(Task(name, _file(sweep.config), "es", cells, more, sweep.share))
    side_by_side(tasks, arguments.seeds, arguments.jobs, arguments.to, arguments.deadline)


def _file(config: str) -> Path:
    return ROOT / "configs" / "comparison" / f"{config}.yaml"


def _populations(steps: int) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for size in POPULATIONS:
        generations = max(2, round(steps * BASE_POPULATION / size))
        cells.append({"es.population_size": size, "es.num_generations": generations,
                      "evaluation.every": max(1, generations // 10)})  # fmt: skip
    return cells


def collect(arguments: argparse.Namespace) -> None:
    """Write the numbers of all trials to studies/results/sweeps.json."""
    tree: dict[str, Any] = {"format_version": 1, "sweeps": {}}
    for name in SWEEPS:
        found = read_results(arguments.source / name)
        cells = [_cell(cell, arguments.source / name) for cell in found["cells"]] if found else []
        tree["sweeps"] |= {name: cells} if (cells := [cell for cell in cells if cell["runs"]]) else {}
    ROWS.write_text(json.dumps(rounded(tree), separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")


def _cell(cell: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    settings = dict(cell["settings"])
    if "space.name" in settings:
        settings["where"] = "lowrank" if settings["space.name"] == "lowrank" else f"lora {settings['lora.evolve']}"
    runs = []
    for run in cell["runs"]:
        if run["state"] == "done":
            numbers = {k: v for k, v in run["numbers"].items() if k not in ("tokens", "format", "answer_reward")}
            runs.append(
                {"seed": run["seed"], "before": run["before"]["reward"], **numbers, **_along(folder, cell, run)}
            )
    return {"name": cell["name"], "settings": settings, "runs": runs}


def _along(folder: Path, cell: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Generations, members' diversity and the evaluations on the way."""
    file = folder / cell["name"] / f"seed_{run['seed']}" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    changed = [row["diagnosis"]["changed_share"] for row in rows
               if row["diagnosis"] and row["diagnosis"].get("changed_share") is not None]  # fmt: skip
    curve = [[row["generation"] + 1, row["evaluation"]["reward"]] for row in rows if row["evaluation"]]
    return {
        "generations": len(rows),
        "changed_share": mean(changed) if changed else None,
        "zero_variance": mean(bool(row["zero_variance"]) for row in rows),
        "curve": curve,
    }


def read() -> dict[str, list[dict[str, Any]]]:
    """Return the trials of each sweep."""
    return json.loads(ROWS.read_text(encoding="utf-8"))["sweeps"]


def draw(to: Path) -> None:
    """Draw the mean reward of each trial, one panel per sweep."""
    figure = canvas(9, 5, layout="constrained")
    for axes, (name, cells) in zip(figure.subplots(2, 3).flat, read().items(), strict=True):
        rewards = [[run["reward"] for run in cell["runs"]] for cell in cells]
        for place, values in enumerate(rewards):
            axes.plot([place] * len(values), values, ".", color=COLORS[0], alpha=0.6)
        style = "_" if SWEEPS[name].y or SWEEPS[name].axis == "where" else "-"
        axes.plot(range(len(cells)), [mean(values) for values in rewards], style, color=COLORS[0])
        axes.axhline(mean(run["before"] for cell in cells for run in cell["runs"]), color=COLORS[6], linestyle=":")
        frame(axes, name, SWEEPS[name].axis)
        axes.set_xticks(range(len(cells)), [str(cell["settings"][SWEEPS[name].axis]) for cell in cells], fontsize=6)
    save(figure, to / "sweeps.png")


def tables() -> dict[str, Iterator[str]]:
    """Return a table per sweep."""
    return {name: _table(SWEEPS[name], cells) for name, cells in read().items()}


def _table(sweep: Sweep, cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from evoalign.analysis.compare.statistics import adjust, compare

    second = "accuracy" if "accuracy" in cells[0]["runs"][0] else "exact"
    values = {_name(sweep, cell): {run["seed"]: run["reward"] for run in cell["runs"]} for cell in cells}
    best = max(values, key=lambda label: mean(values[label].values()))
    tests = [compare(best, values[best], label, values[label]) for label in values if label != best]
    # Three seeds give a permutation test no p below 0.25; a t test can, if differences are normal.
    found = {pair.b: pair.p_adjusted for pair in adjust([replace(p, p=p.p_values.get("paired t")) for p in tests])}
    yield f"| trial | reward of each seed | mean | {second} | p against the best | steps |"
    yield "|---|---|---:|---:|---:|---:|"
    for cell, label in zip(cells, values, strict=True):
        runs, p = cell["runs"], found.get(label)
        shown = "best" if label == best else "-" if p is None else f"{p:.2g}"
        seeds = ", ".join(f"{value:.3g}" for value in values[label].values())
        yield (
            f"| {label} | {seeds} | {_mean(runs, 'reward', '{:.3g}')} | {_mean(runs, second, '{:.1%}')} | {shown} | "
            f"{_mean(runs, 'generations', '{:.0f}')} |"
        )


def _name(sweep: Sweep, cell: Mapping[str, Any]) -> str:
    settings = cell["settings"]
    text = f"{sweep.axis.rsplit('.', 1)[-1].replace('_', ' ')} {settings[sweep.axis]}"
    if sweep.axis == "where":
        return f"`{settings['where']}`"
    return f"{text}, alpha {settings[sweep.y]}" if sweep.y else text


def _mean(runs: Sequence[Mapping[str, Any]], key: str, form: str) -> str:
    values = [run[key] for run in runs if run.get(key) is not None]
    return form.format(mean(values)) if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.set_defaults(call=run)
    command.add_argument("--to", type=Path, required=True)
    command.add_argument("--jobs", type=int, default=5, help="Runs at once, over all sweeps.")
    command.add_argument("--seconds", type=float, default=100.0, help="Training of one run of the base config.")
    command.add_argument("--seeds", type=integers, default=[0, 1, 2])
    command.add_argument("--sweeps", type=names, default=list(SWEEPS))
    command.add_argument("--cells", type=int, help="Number of trials of each sweep, for a quick try.")
    command.add_argument("--limit", type=float, help="Stop after this many seconds; the same command continues.")
    command.add_argument("--set", dest="sets", action="append", default=[], metavar="a.b=c")
    command = commands.add_parser("collect")
    command.set_defaults(call=collect)
    command.add_argument("--from", dest="source", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.deadline = deadline(getattr(arguments, "limit", None))
    arguments.call(arguments)


if __name__ == "__main__":
    main()
