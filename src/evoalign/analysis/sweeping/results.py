# SPDX-License-Identifier: Apache-2.0
"""What the runs of a sweep came to: results.json with every number, table.md for people, and the figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from evoalign.analysis.sweeping import report as figures
from evoalign.analysis.sweeping.cells import Run, Settings, Tree, has_validation, judged, read_json
from evoalign.analysis.sweeping.children import Ended
from evoalign.checks import hacking
from evoalign.cost import budget
from evoalign.errors import ConfigError, DataError
from evoalign.evaluation import Scored
from evoalign.placebos import estimates
from evoalign.placebos import file as placebo_file
from evoalign.placebos.estimates import drift_together
from evoalign.rewards.objective import PREFIX
from evoalign.rundir import parquet
from evoalign.rundir.checksums import EVALUATION
from evoalign.rundir.directory import RunDir
from evoalign.rundir.files import write_text

FORMAT_VERSION = 1
ENDS = ("before", "after")
VALIDATION = "validation/"
"""Before a number of a run: on its validation split."""
COLUMNS = {
    "reward": "reward",
    "validation/reward": "validation reward",
    "hacked_share": "hacked",
    "kl": "KL, nats a token",
    "kl_completion": "KL, nats a completion",
    "distance": "relative distance",
    "completions": "training completions",
    "seconds": "training seconds",
}
"""Numbers of table.md and their headings; a measure that is asked for comes first."""
DRIFT = "share of the gain that is drift, of all runs together"
UNRANKED = {*COLUMNS, "empty_share", "truncated_share", "tokens"} - {"reward", "validation/reward"}
"""Measures of which the highest is not the best."""


def collect(runs: Sequence[Run], failed: Mapping[str, Ended], known: dict[str, Tree]) -> list[Tree]:
    """Cells in their order, each with its runs, and the mean and standard deviation (ddof 1) over its done runs.

    `known` keeps the outcomes of runs that are done: a sweep asks often.
    """
    cells: dict[str, Tree] = {}
    for run in runs:
        cell = cells.setdefault(run.cell.name, {"name": run.cell.name, "settings": run.cell.settings, "runs": []})
        found = known.get(run.name) or outcome(run, failed.get(run.name))
        if found["state"] == "done":
            known[run.name] = found
        cell["runs"].append(found)
    for cell in cells.values():
        done = [r["numbers"] for r in cell["runs"] if r["state"] == "done"]
        names = dict.fromkeys(name for numbers in done for name in numbers)
        values = {name: [numbers[name] for numbers in done if name in numbers] for name in names}
        cell["mean"] = {name: float(np.mean(v)) for name, v in values.items()}
        cell["std"] = {name: float(np.std(v, ddof=1)) if len(v) > 1 else None for name, v in values.items()}
        split = [run["placebo"] for run in cell["runs"] if run.get("placebo")]
        cell["drift_share"] = drift_together([(p["drift"], p["gain"]) for p in split])
    return list(cells.values())


def outcome(run: Run, failed: Ended | None = None) -> Tree:
    """One run: its state, its numbers where it is done, and what else its files say of divergence and cost."""
    tree = run.evaluation()
    state = "done" if tree is not None else "failed" if failed is not None else "unfinished"
    found: Tree = {"seed": run.seed, "path": str(run.path), "state": state}
    if tree is None:
        if failed is not None:
            found |= {"how": failed.how, "log": str(failed.log), "tail": list(failed.tail)}
        elif not run.path.is_dir():
            found["state"] = "waiting"
        return found
    cost, divergence, distance = cost_of(run), tree.get("divergence") or {}, tree.get("distance") or {}
    numbers = {name: float(value) for name, value in tree["after"].items()}
    more = {
        "start": tree["before"].get("reward"),
        "hacked_share": hacked_share(run.path),
        "kl": divergence.get("exact"),
        "kl_completion": divergence.get("completion"),
        "distance": distance.get("relative"),
        "completions": cost.get("completions"),
        "seconds": cost.get("wall_seconds"),
    }
    numbers |= {name: float(value) for name, value in more.items() if value is not None}
    if has_validation(tree):
        numbers |= {f"{VALIDATION}{name}": float(value) for name, value in judged(tree).items()}
    return found | {
        "numbers": {name: value for name, value in numbers.items() if math.isfinite(value)},
        "before": tree["before"],
        "after": tree["after"],
        **({"validation": tree["validation"]} if has_validation(tree) else {}),
        "divergence": tree.get("divergence"),
        "distance": tree.get("distance"),
        "training": cost,
        "placebo": placebo_of(run, tree),
    }


def placebo_of(run: Run, tree: Tree) -> Tree | None:
    """What its placebos gained in what it was trained for, and what it gained beside them; None where there are none
    that can be read."""
    try:
        own = estimates.parse(tree["placebo"], str(run.path / EVALUATION)) if "placebo" in tree else None
        known = estimates.largest(own, placebo_file.read(run.path, run.config))
    except DataError:
        return None
    if known is None:
        return None
    found = known.aim
    of = {} if known.fitness is None else {"measure": known.fitness.name}
    gains = {"drift": found.mean - found.before, "gain": found.real - found.before}
    return {"placebos": len(found.placebos), **of, **gains}


def hacked_share(path: Path) -> float | None:
    """Share of the final test completions that `hacking.flags` calls hacked; None where they are not there."""
    try:
        before, after = ([Scored.of(row) for row in parquet.read(RunDir(path).completions(n))] for n in ENDS)
    except (DataError, TypeError):
        return None
    return hacking.shares(after, before, after)["hacked"]


def cost_of(run: Run) -> Tree:
    """What its training has cost until now, done or not; seconds alone where its rows have no budget."""
    rows = RunDir(run.path).read_metrics().values()
    totals = budget.cost_of((read_json(run.path / "results" / "budget.json") or {}).get("training"))
    known = [cost for cost in (budget.cost_of(row.get("budget")) for row in rows) if cost is not None]
    if totals is None and known:
        totals = sum(known, budget.Cost())
    seconds = sum(sum(row["seconds"].values()) for row in rows)
    return totals.as_dict() if totals is not None else {"wall_seconds": seconds}


def write(folder: Path, tree: Tree, cells: Sequence[Tree], measure: str, keys: Sequence[str] = ()) -> None:
    """results.json and table.md, which shows the settings `keys` in columns of their own."""
    found = {} if tree.get("search") else {"best": best(cells, measure)}
    whole = {"format_version": FORMAT_VERSION, **tree, "measure": measure, **found, "cells": list(cells)}
    write_text(folder / "results.json", json.dumps(whole, indent=2, allow_nan=False) + "\n")
    write_text(folder / "table.md", table(cells, measure, keys))


def best(cells: Sequence[Tree], measure: str) -> Tree | None:
    """The cell with the highest mean, of those whose runs are all done, and on which split: validation where each has
    one, else the test split, where the highest of several means is higher than it will be again.

    None of fewer than two, and for a measure of which more is not better.
    """
    known = [cell for cell in cells if cell["mean"] and all(run["state"] == "done" for run in cell["runs"])]
    name = measure.removeprefix(VALIDATION)
    validated = [cell for cell in known if f"{VALIDATION}{name}" in cell["mean"]]
    if measure in UNRANKED or len(known) < 2:
        return None
    is_fair = len(validated) == len(known)
    key = f"{VALIDATION}{name}" if is_fair else name
    ranked = [cell for cell in known if key in cell["mean"]]
    if len(ranked) < 2:
        return None
    first = max(ranked, key=lambda cell: cell["mean"][key])
    split = "validation" if is_fair else "test"
    return {"cell": first["name"], "settings": first["settings"], "chosen_on": split, measure: first["mean"][key]}


def best_line(found: Tree | None, measure: str) -> str:
    """The best cell in words, and what may be believed of it; empty where none is known."""
    if found is None:
        return ""
    if found["chosen_on"] == "validation":
        return f"The highest mean {measure} on the validation split has `{found['cell']}`."
    return (
        f"The highest mean {measure} has `{found['cell']}`. It is chosen on the test split, so what it has there "
        "is optimistic; with task.validation_size the best cell is chosen on other examples."
    )


def table(cells: Sequence[Tree], measure: str, keys: Sequence[str] = ()) -> str:
    """Markdown: each cell with its seeds, mean and standard deviation; `keys` are settings that no name says."""
    wanted = dict.fromkeys([measure, f"{VALIDATION}{measure}", *COLUMNS])
    names = [name for name in wanted if any(name in cell["mean"] for cell in cells)]
    split = any(cell.get("drift_share") is not None for cell in cells)
    heads = ["cell", *keys, "seeds done", *map(_heading, names), *([DRIFT] if split else [])]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for cell in cells:
        done = sum(run["state"] == "done" for run in cell["runs"])
        values = [_with_std(cell["mean"].get(name), cell["std"].get(name), name) for name in names]
        values += [_drift(cell)] if split else []
        settings = [figures.shown(cell["settings"].get(key)).replace("|", "\\|") for key in keys]
        lines.append(
            "| " + " | ".join([f"`{cell['name']}`", *settings, f"{done} of {len(cell['runs'])}", *values]) + " |"
        )
    starts = [cell["mean"]["start"] for cell in cells if "start" in cell["mean"]]
    start = f" The reward of the start is {np.mean(starts):.4g}." if starts else ""
    firsts = [run["before"][measure] for cell in cells for run in cell["runs"] if measure in run.get("before", {})]
    start += f" {measure} of the start is {np.mean(firsts):.4g}." if measure.startswith(PREFIX) and firsts else ""
    where = "on the test split" + (" or the validation split" if any(map(_is_validated, names)) else "")
    ranked = best_line(None if keys else best(cells, measure), measure)
    note = f"Mean and standard deviation over seeds (ddof 1), of the final model {where}.{start} {ranked}".rstrip()
    return "\n".join([*lines, "", note]) + "\n"


def _is_validated(name: str) -> bool:
    return name.startswith(VALIDATION)


def _heading(name: str) -> str:
    return COLUMNS.get(name) or (name.replace(VALIDATION, "validation ", 1) if _is_validated(name) else name)


def draw(folder: Path, cells: Sequence[Tree], measure: str, axes: Sequence[str] | None = None) -> list[Path]:
    """The figures that these cells allow: a heat map over two settings, lines over one."""
    done = [cell for cell in cells if cell["mean"]]
    varied = varied_settings([cell["settings"] for cell in cells])
    if axes is None:
        axes = varied if len(varied) == 1 else next((pair for pair in PAIRS if set(pair) <= set(varied)), varied[:2])
    if not done or not axes:
        return []
    drawn: list[Path] = []
    for name, group in _groups(cells, [key for key in varied if key not in axes]).items():
        points = [_point(cell, measure) for cell in group]
        title = f"{measure} after training" + (f", {name}" if name else "")
        suffix = f"_{name.replace(' ', '').replace('/', '_')}" if name else ""
        if len(axes) == 2:
            path = folder / "figures" / f"heat_map{suffix}.png"
            figures.heat_map(points, path, x=axes[0], y=axes[1], measure=measure, title=title)
        else:
            path = folder / "figures" / f"lines{suffix}.png"
            figures.lines(points, path, x=axes[0], measure=measure, title=title)
        drawn.append(path)
    return drawn


def draw_search(folder: Path, cells: Sequence[Tree], measure: str, keys: Sequence[str]) -> list[Path]:
    """The trials of a search that are complete, over each setting, by what they are chosen by."""
    measure = measure if _is_validated(measure) else f"{VALIDATION}{measure}"
    points = [point for point in (_point(cell, measure) for cell in cells) if point.values]
    if not points:
        return []
    path, name = folder / "figures" / "search.png", _heading(measure)
    figures.scatter(points, path, keys=keys, measure=name, title=f"{name} after training, {len(points)} trials")
    return [path]


def check_axes(axes: Sequence[str] | None, many: Sequence[Settings]) -> None:
    """Raise ConfigError unless these are one or two of the settings that are swept."""
    swept = list(dict.fromkeys(key for settings in many for key in settings))
    if axes is not None and (not 1 <= len(set(axes)) == len(axes) <= 2 or not set(axes) <= set(swept)):
        known = f"swept are {', '.join(swept)}" if swept else "nothing is swept"
        raise ConfigError(f"--axes {','.join(axes)}: give one setting or two that are swept; {known}")


PAIRS = (("es.sigma", "es.learning_rate"), ("es.noise_multiplier", "es.learning_rate"))
"""Drawn against each other where both are swept; else the first two that are."""


def varied_settings(many: Sequence[Settings]) -> list[str]:
    """Settings that have more than one value, in the order in which they come."""
    keys = dict.fromkeys(key for settings in many for key in settings)
    return [key for key in keys if len({json.dumps(s.get(key)) for s in many}) > 1]


def _groups(cells: Sequence[Tree], keys: Sequence[str]) -> dict[str, list[Tree]]:
    """Cells that agree in `keys`, by those in words."""
    groups: dict[str, list[Tree]] = {}
    for cell in cells:
        name = ", ".join(f"{key} {cell['settings'].get(key)}" for key in keys)
        groups.setdefault(name, []).append(cell)
    return groups


def _point(cell: Tree, measure: str) -> figures.Point:
    done = [run["numbers"] for run in cell["runs"] if run["state"] == "done"]
    values = [numbers[measure] for numbers in done if measure in numbers]
    hacked = [numbers["hacked_share"] for numbers in done if "hacked_share" in numbers]
    rewards = [numbers["reward"] - numbers["start"] for numbers in done if "start" in numbers]
    starts = [run["before"][measure] for run in cell["runs"] if run["state"] == "done" and measure in run["before"]]
    gain = float(np.mean(rewards)) if rewards else None
    start = float(np.mean(starts)) if starts else None
    return figures.Point(cell["settings"], values, hacked, start, gain)


def _drift(cell: Tree) -> str:
    """Of all runs together, and of how many where not of all that are done."""
    if cell["drift_share"] is None:
        return ""
    done = [run for run in cell["runs"] if run["state"] == "done"]
    known = sum(run["placebo"] is not None for run in done)
    return f"{cell['drift_share']:.0%}" + (f" (of {known})" if known < len(done) else "")


def _with_std(mean: float | None, std: float | None, name: str) -> str:
    if mean is None:
        return ""
    if name.endswith("_share"):
        return f"{mean:.1%}" if std is None else f"{mean:.1%} ± {std:.1%}"
    return f"{mean:,.4g}" if std is None else f"{mean:,.4g} ± {std:,.2g}"
