# SPDX-License-Identifier: Apache-2.0
"""Rank, population, what evolves and the width of the noise, on the tiny model: docs/results/sweeps.md.

    python benchmarks/sweep_pages.py run  --to DIR --jobs 60 --seconds 100
    python benchmarks/sweep_pages.py page --from DIR

`run` trains every cell with three seeds, one core each, all sweeps side by side. Runs of one sweep have the same
completions; `--seconds` is what the base config takes for them. `page` without --from writes the page again from
benchmarks/results/sweeps.json. `python benchmarks/es_vs_grpo.py pack --from DIR --file X.tgz` packs the runs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from evoalign.report.tables import bullets, listed
from evoalign.report.tables import markdown_table as table
from study_runs import ROOT, Task, calibrate, deadline, integers, names, pairs, read_results, rounded, side_by_side

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


def collect(folder: Path, figures: Path) -> dict[str, Any]:
    """The numbers of all cells, small enough to commit; draws the figures."""
    tree: dict[str, Any] = {"format_version": 1, "sweeps": {}}
    for name, sweep in SWEEPS.items():
        found = read_results(folder / name)
        cells = [_cell(cell, folder / name) for cell in found["cells"]] if found else []
        cells = [cell for cell in cells if cell["runs"]]
        if cells:
            tree["sweeps"][name] = cells
            _draw(name, sweep, cells, figures)
    return rounded(tree)


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


def _draw(name: str, sweep: Sweep, cells: Sequence[Mapping[str, Any]], figures: Path) -> None:
    from evoalign.analysis.sweeping import report as report

    points = [
        report.Point(
            cell["settings"],
            [run["reward"] for run in cell["runs"]],
            [run["hacked_share"] for run in cell["runs"] if "hacked_share" in run],
            mean(run["before"] for run in cell["runs"]),
            mean(run["reward"] - run["before"] for run in cell["runs"]),
        )
        for cell in cells
    ]
    path = figures / f"sweep_{name}.png"
    if sweep.y:
        report.heat_map(points, path, x=sweep.axis, y=sweep.y, title=sweep.asks)
    else:
        report.lines(points, path, x=sweep.axis, title=sweep.asks)


def page(tree: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = [
        "# Sweeps on the tiny model",
        "",
        "What rank, population and the width of the noise do to half a million weights, on the shipped test splits: "
        "500 problems of Countdown, eight questions of Conciseness. One core a run. Three seeds or fewer say little: "
        "where two cells do not differ significantly, this page says so. The sentences follow from the numbers by "
        "rules: a cell differs significantly from the best where the p of a paired t test over seeds is below 0.05 "
        "after Holm's correction over the cells of the sweep. The best cell is the luckiest too: its mean is a little "
        "high.",
        "",
        "**These rows are old.** The best of each sweep is chosen on the test split itself, so its mean is optimistic. "
        "They have a mean for each run and not what each question earned: what is said holds for these questions. "
        "There is no placebo, so nothing here separates learning from drift.",
        "",
    ]
    for name, cells in tree["sweeps"].items():
        sweep = SWEEPS[name]
        lines += [f"## {sweep.asks}", "", sweep.note, "", *bullets(in_words(name, cells))]
        lines += [f"![{sweep.asks}](figures/sweep_{name}.png)", "", *_cells_table(sweep, cells)]
    lines += [
        "## Made with",
        "",
        "```sh",
        "python benchmarks/sweep_pages.py run --to DIR --jobs 2 --seconds 80 --sweeps "
        + ",".join(name for name in SWEEPS if name != "population"),
        "python benchmarks/sweep_pages.py run --to DIR --jobs 2 --seconds 100 --sweeps population",
        "python benchmarks/sweep_pages.py page --from DIR",
        "```",
        "",
        "How many generations fit the seconds depends on your machine; the tables have those of these runs. "
        "Numbers: `benchmarks/results/sweeps.json`. Base configs: `configs/comparison/`. The cells are those of "
        "`SWEEPS` in the script; `evoalign sweep` ran them.",
    ]
    return "\n".join(lines) + "\n"


def in_words(name: str, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the best cell is, and which do not differ significantly from it."""
    from evoalign.analysis.compare.statistics import LEVEL, adjust, compare, shared

    sweep = SWEEPS[name]
    means = {_name(sweep, cell): mean(run["reward"] for run in cell["runs"]) for cell in cells}
    values = {_name(sweep, cell): {run["seed"]: run["reward"] for run in cell["runs"]} for cell in cells}
    start = mean(run["before"] for cell in cells for run in cell["runs"])
    best = max(means, key=lambda label: means[label])
    lines = [f"The best mean reward is {means[best]:.4g}, at {best}; the start has {start:.4g}."]
    others = [label for label in means if label != best]
    few = [label for label in others if not shared(values[label], values[best])]
    tests = [compare(best, values[best], label, values[label]) for label in others if label not in few]
    # A permutation test of three seeds can give no p below 0.25; a t test can, where differences are normal.
    tests = adjust([replace(pair, p=pair.p_values.get("paired t")) for pair in tests])
    apart = [pair.b for pair in tests if pair.p_adjusted is not None and pair.p_adjusted < LEVEL]
    alike = [pair.b for pair in tests if pair.b not in apart]
    if apart:
        lines.append(f"Significantly below it: {listed(apart)}.")
    if alike:
        lines.append(f"No significant difference from it with these seeds: {listed(alike)}.")
    if few:
        lines.append(f"Not tested against it, for want of seeds in common: {listed(few)}.")
    ordered = [label for label in means if label == best or label in alike]
    if name.startswith("rank"):
        lines.append(f"The least rank that does not differ significantly from the best one: {ordered[0]}.")
    harmed = [label for label in means if means[label] <= start]
    if harmed:
        lines.append(f"Mean reward not above the start's: {listed(harmed)}.")
    if name == "population":
        lines += _diversity(sweep, cells)
    return lines


def _diversity(sweep: Sweep, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Over population sizes: completions that differ from the unperturbed model's, and generations without a step."""
    still = {_name(sweep, cell): mean(run["zero_variance"] for run in cell["runs"]) for cell in cells}
    lines = [f"Generations without an update: {', '.join(f'{k} {v:.1%}' for k, v in still.items())}."]
    found = {_name(sweep, cell): [run["changed_share"] for run in cell["runs"] if run["changed_share"] is not None]
             for cell in cells}  # fmt: skip
    known = {label: mean(values) for label, values in found.items() if values}
    if known:
        lines.append("Share of completions that differ between members, mean over the run: "
                     + ", ".join(f"{label} {value:.1%}" for label, value in known.items()) + ".")  # fmt: skip
    return lines


def _name(sweep: Sweep, cell: Mapping[str, Any]) -> str:
    settings = cell["settings"]
    text = f"{sweep.axis.rsplit('.', 1)[-1].replace('_', ' ')} {settings[sweep.axis]}"
    if sweep.axis == "where":
        return f"`{settings['where']}`"
    return f"{text}, alpha {settings[sweep.y]}" if sweep.y else text


def _cells_table(sweep: Sweep, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    second = "accuracy" if "accuracy" in cells[0]["runs"][0] else "exact"
    rows = []
    for cell in cells:
        runs = cell["runs"]
        half = [_halfway(run) for run in runs]
        rows.append((
            _name(sweep, cell), " ".join(f"{run['reward']:.4g}" for run in runs),
            f"{mean(run['reward'] for run in runs):.4g}", f"{mean(run[second] for run in runs):.1%}",
            f"{mean(half):.2f}" if all(h is not None for h in half) else "-",
            *(_mean(runs, key, form) for key, form in (
                ("changed_share", "{:.1%}"), ("hacked_share", "{:.1%}"), ("distance", "{:.3g}"),
                ("generations", "{:.0f}"), ("completions", "{:,.0f}"), ("seconds", "{:.0f}"))),
        ))  # fmt: skip
    header = ("cell", "reward of each seed", "mean", second, "share of the run to half of the gain", "changed",
              "hacked", "distance", "generations", "completions", "training seconds")  # fmt: skip
    return table(header, rows)


def _mean(runs: Sequence[Mapping[str, Any]], key: str, form: str) -> str:
    values = [run[key] for run in runs if run.get(key) is not None]
    return form.format(mean(values)) if values else "-"


def _halfway(run: Mapping[str, Any]) -> float | None:
    """Convergence: the share of the generations after which half of the final gain was first reached."""
    wanted = (run["before"] + run["reward"]) / 2
    if run["reward"] <= run["before"]:
        return None
    return next((step / run["generations"] for step, reward in run["curve"] if reward >= wanted), 1.0)


def write_page(arguments: argparse.Namespace) -> None:
    """docs/results/sweeps.md, its figures and the numbers it is made of."""
    figures = arguments.docs / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    if arguments.source is not None:
        tree = collect(arguments.source, figures)
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(tree, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
    tree = json.loads(arguments.results.read_text(encoding="utf-8"))
    (arguments.docs / "sweeps.md").write_text(page(tree), encoding="utf-8")
    print(f"wrote {arguments.docs / 'sweeps.md'}")


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
    command.add_argument("--cells", type=int, help="Only so many cells of each, to try this out.")
    command.add_argument("--limit", type=float, help="Stop after so many seconds; the same command goes on.")
    command.add_argument("--set", dest="sets", action="append", default=[], metavar="a.b=c")
    command = commands.add_parser("page")
    command.set_defaults(call=write_page)
    command.add_argument("--from", dest="source", type=Path)
    command.add_argument("--docs", type=Path, default=ROOT / "docs" / "results")
    command.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "sweeps.json")
    arguments = parser.parse_args()
    arguments.deadline = deadline(getattr(arguments, "limit", None))
    arguments.call(arguments)


if __name__ == "__main__":
    main()
