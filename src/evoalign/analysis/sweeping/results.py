# SPDX-License-Identifier: Apache-2.0
"""Results of a sweep: results.json with every number, table.md, and the figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from evoalign.analysis.compare.statistics import compare
from evoalign.analysis.compare.tables import DRIFT
from evoalign.analysis.sweeping import report as figures
from evoalign.analysis.sweeping.cells import Run, Settings, Tree, chosen_on, has_validation
from evoalign.analysis.sweeping.children import Ended
from evoalign.checks import hacking
from evoalign.config.reading import object_of
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
from evoalign.rundir.files import write_json, write_text
from evoalign.statistics import LEVEL

FORMAT_VERSION = 1
ENDS = ("before", "after")
VALIDATION = "validation/"
"""Prefix of a number on the validation split."""
COLUMNS = {
    "reward": "reward",
    "validation/reward": "validation reward",
    "hacked_share": "hacked",
    "kl": "KL, nats per token",
    "kl_completion": "KL, nats per completion",
    "distance": "relative distance",
    "completions": "training completions",
    "seconds": "training seconds",
}
"""Numbers of table.md and their headings; the measure of the sweep comes first."""
UNRANKED = {*COLUMNS, "empty_share", "truncated_share", "tokens"} - {"reward", "validation/reward"}
"""Measures whose highest value is not the best."""
AXES = (("es.sigma", "es.learning_rate"), ("es.noise_multiplier", "es.learning_rate"))
"""Default axes of the heat map if both are swept; otherwise the first two swept settings."""


def collect(runs: Sequence[Run], failed: Mapping[str, Ended], known: dict[str, Tree]) -> list[Tree]:
    """Return the cells in order, each with its runs and the mean and standard deviation (ddof 1) over finished ones.

    `known` caches the results of finished runs.
    """
    cells: dict[str, Tree] = {}
    for run in runs:
        cell = cells.setdefault(run.cell.name, {**asdict(run.cell), "runs": []})
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


def outcome(run: Run, failed: Ended | None) -> Tree:
    """Return a run's state and, if it is finished, its numbers, measures, divergence and cost."""
    tree = run.evaluation()
    found: Tree = {"seed": run.seed, "path": str(run.path), "state": "done"}
    if tree is None:
        if failed is not None:
            return found | {"state": "failed", "how": failed.how, "log": str(failed.log), "tail": list(failed.tail)}
        return found | {"state": "unfinished" if run.path.is_dir() else "waiting"}
    cost, divergence, distance = cost_of(run), tree.get("divergence") or {}, tree.get("distance") or {}
    numbers = {
        **tree["after"],
        "start": tree["before"].get("reward"),
        "hacked_share": hacked_share(run.path),
        "kl": divergence.get("exact"),
        "kl_completion": divergence.get("completion"),
        "distance": distance.get("relative"),
        "completions": cost.get("completions"),
        "seconds": cost.get("wall_seconds"),
    }
    if has_validation(tree):
        numbers |= {f"{VALIDATION}{name}": value for name, value in chosen_on(tree).items()}
    return found | {
        "numbers": {n: float(v) for n, v in numbers.items() if v is not None and math.isfinite(float(v))},
        "before": tree["before"],
        "after": tree["after"],
        **({"validation": tree["validation"]} if has_validation(tree) else {}),
        "divergence": tree.get("divergence"),
        "distance": tree.get("distance"),
        "training": cost,
        "placebo": placebo_of(run, tree),
    }


def placebo_of(run: Run, tree: Tree) -> Tree | None:
    """Return the gains of a run and of its placebos in its training objective; None without readable placebos."""
    try:
        own = estimates.parse(tree["placebo"], str(run.path / EVALUATION)) if "placebo" in tree else None
        known = estimates.largest(own, placebo_file.read(run.path, run.config))
    except DataError:
        return None
    if known is None:
        return None
    found = known.aim
    measure = {} if known.fitness is None else {"measure": known.fitness.name}
    gains = {"drift": found.mean - found.before, "gain": found.real - found.before}
    return {"placebos": len(found.placebos), **measure, **gains}


def hacked_share(path: Path) -> float | None:
    """Return the hacked share of the final test completions by `hacking.shares`; None without completions."""
    try:
        before, after = ([Scored.of(row) for row in parquet.read(RunDir(path).completions(n))] for n in ENDS)
    except (DataError, TypeError):
        return None
    return hacking.shares(after, before, after)["hacked"]


def cost_of(run: Run) -> Tree:
    """Return the training cost so far, finished or not; only seconds if its rows have no budget."""
    rows = list(RunDir(run.path).read_metrics().values())
    total = budget.cost_of((object_of(run.path / "results" / "budget.json") or {}).get("training"))
    if total is None:
        known, missing = budget.totals(rows)
        total = known if missing < len(rows) else None
    return {"wall_seconds": sum(sum(row["seconds"].values()) for row in rows)} if total is None else asdict(total)


def write(folder: Path, tree: Tree, cells: Sequence[Tree], measure: str, keys: Sequence[str] = ()) -> None:
    """Write results.json and table.md, with the settings `keys` as columns."""
    found = {} if tree.get("search") else {"best": best(cells, measure)}
    whole = {"format_version": FORMAT_VERSION, **tree, "measure": measure, **found, "cells": list(cells)}
    write_json(folder / "results.json", whole)
    write_text(folder / "table.md", table(cells, measure, keys))


def best(cells: Sequence[Tree], measure: str) -> Tree | None:
    """Return the finished cell with the highest mean, on validation if all have it, else on test (then optimistic).

    `next` is the cell with the next highest mean, and the difference tested over seeds. None for fewer than two cells,
    and for a measure whose highest value is not the best.
    """
    known = [cell for cell in cells if cell["mean"] and all(run["state"] == "done" for run in cell["runs"])]
    name = measure.removeprefix(VALIDATION)
    is_fair = all(f"{VALIDATION}{name}" in cell["mean"] for cell in known)
    key = f"{VALIDATION}{name}" if is_fair else name
    ranked = [cell for cell in known if key in cell["mean"]]
    if measure in UNRANKED or len(ranked) < 2:
        return None
    first, second, *_ = sorted(ranked, key=lambda cell: -cell["mean"][key])
    split, pair = "validation" if is_fair else "test", compare(*_by_seed(first, key), *_by_seed(second, key))
    test = {"difference": pair.difference, "low": pair.low, "high": pair.high, "test": pair.test, "p": pair.p}
    found = {"cell": first["name"], "settings": first["settings"], "chosen_on": split, measure: first["mean"][key]}
    return {**found, "next": {"cell": second["name"], "seeds": [pair.n_a, pair.n_b], **test}}


def _by_seed(cell: Tree, key: str) -> tuple[str, dict[int, float]]:
    return cell["name"], {run["seed"]: run["numbers"][key] for run in cell["runs"] if key in run["numbers"]}


def _best_line(found: Tree, measure: str) -> str:
    """Name the best cell, or say that none is shown to be best."""
    second = found["next"]
    seeds = " and ".join(map(str, sorted(set(second["seeds"]))))
    tested = (
        f"n {seeds}: too few to test" if second["p"] is None else f"n {seeds}, {second['test']} p {second['p']:.2g}"
    )
    less = f"the next, `{second['cell']}`, is {second['difference']:.3g} lower ({tested})"
    if second["p"] is not None and second["p"] < LEVEL:
        return f"Best on the {found['chosen_on']} split by mean {measure}: `{found['cell']}`; {less}."
    return (
        f"No cell is shown to be best on the {found['chosen_on']} split by mean {measure}: `{found['cell']}` has the "
        f"highest, and {less}; add seeds."
    )


def table(cells: Sequence[Tree], measure: str, keys: Sequence[str] = ()) -> str:
    """Return a Markdown table of the cells with seeds, means and standard deviations; `keys` are settings to show."""
    wanted = dict.fromkeys([measure, f"{VALIDATION}{measure}", *COLUMNS])
    names = [name for name in wanted if any(name in cell["mean"] for cell in cells)]
    has_drift = any(cell.get("drift_share") is not None for cell in cells)
    heads = ["cell", *keys, "seeds done", *map(_heading, names), *([DRIFT] if has_drift else [])]
    rows: list[list[str]] = []
    for cell in cells:
        done = [run for run in cell["runs"] if run["state"] == "done"]
        values = [_with_std(cell["mean"].get(name), cell["std"].get(name), name) for name in names]
        if has_drift:
            known, drift = sum(run["placebo"] is not None for run in done), cell["drift_share"]
            of = f" (of {known})" if known < len(done) else ""
            values.append("" if drift is None else f"{drift:.0%}{of}")
        settings = [figures.shown(cell["settings"].get(key)).replace("|", "\\|") for key in keys]
        rows.append([f"`{cell['name']}`", *settings, f"{len(done)} of {len(cell['runs'])}", *values])
    split = "test or validation split" if any(name.startswith(VALIDATION) for name in names) else "test split"
    notes = [f"Mean and standard deviation over seeds (ddof 1), of the final model on the {split}."]
    starts = [cell["mean"]["start"] for cell in cells if "start" in cell["mean"]]
    if starts:
        notes.append(f"The reward before training is {np.mean(starts):.4g}.")
    firsts = [run["before"][measure] for cell in cells for run in cell["runs"] if measure in run.get("before", {})]
    if measure.startswith(PREFIX) and firsts:
        notes.append(f"{measure} before training is {np.mean(firsts):.4g}.")
    found = None if keys else best(cells, measure)
    if found is not None:
        notes.append(_best_line(found, measure))
        if found["chosen_on"] == "test":
            notes.append("It is chosen on the test split, so its mean is optimistic: set task.validation_size.")
    first, *rest = ("| " + " | ".join(row) + " |" for row in (heads, *rows))
    return "\n".join([first, "|---|" + "---:|" * (len(heads) - 1), *rest, "", " ".join(notes)]) + "\n"


def _heading(name: str) -> str:
    return COLUMNS.get(name) or name.replace(VALIDATION, "validation ", 1)


def _with_std(mean: float | None, std: float | None, name: str) -> str:
    if mean is None:
        return ""
    if name.endswith("_share"):
        return f"{mean:.1%}" if std is None else f"{mean:.1%} ± {std:.1%}"
    return f"{mean:,.4g}" if std is None else f"{mean:,.4g} ± {std:,.2g}"


# --- figures ----------------------------------------------------------------------------------------------------------


def draw(folder: Path, cells: Sequence[Tree], measure: str, axes: Sequence[str] | None = None) -> list[Path]:
    """Draw heat maps over two settings, or lines over one."""
    varied = varied_settings([cell["settings"] for cell in cells])
    if axes is None:
        axes = varied if len(varied) == 1 else next((pair for pair in AXES if set(pair) <= set(varied)), varied[:2])
    if not axes or not any(cell["mean"] for cell in cells):
        return []
    drawn: list[Path] = []
    groups: dict[str, list[Tree]] = {}
    for cell in cells:  # one figure for each combination of the other settings
        name = ", ".join(f"{key} {cell['settings'].get(key)}" for key in varied if key not in axes)
        groups.setdefault(name, []).append(cell)
    for name, group in groups.items():
        points = [_point(cell, measure) for cell in group]
        title = f"{measure} after training" + (f", {name}" if name else "")
        suffix = f"_{name.replace(' ', '').replace('/', '_')}" if name else ""
        drawn.append(folder / "figures" / f"{'heat_map' if len(axes) == 2 else 'lines'}{suffix}.png")
        if len(axes) == 2:
            figures.heat_map(points, drawn[-1], x=axes[0], y=axes[1], measure=measure, title=title)
        else:
            figures.lines(points, drawn[-1], x=axes[0], measure=measure, title=title)
    return drawn


def draw_search(folder: Path, cells: Sequence[Tree], measure: str, keys: Sequence[str]) -> list[Path]:
    """Draw the completed trials of a search over each setting, by the validation measure."""
    measure = measure if measure.startswith(VALIDATION) else f"{VALIDATION}{measure}"
    points = [point for point in (_point(cell, measure) for cell in cells) if point.values]
    if not points:
        return []
    path, name = folder / "figures" / "search.png", _heading(measure)
    figures.scatter(points, path, keys=keys, measure=name, title=f"{name} after training, {len(points)} trials")
    return [path]


def check_axes(axes: Sequence[str] | None, many: Sequence[Settings]) -> None:
    """Raise ConfigError unless these are one or two swept settings."""
    swept = list(dict.fromkeys(key for settings in many for key in settings))
    if axes is not None and (not 1 <= len(set(axes)) == len(axes) <= 2 or not set(axes) <= set(swept)):
        known = ", ".join(swept) or "none"
        raise ConfigError(f"--axes {','.join(axes)}: give one or two of the swept settings: {known}")


def varied_settings(many: Sequence[Settings]) -> list[str]:
    """Return the settings with more than one value, in order."""
    keys = dict.fromkeys(key for settings in many for key in settings)
    return [key for key in keys if len({json.dumps(s.get(key)) for s in many}) > 1]


def _point(cell: Tree, measure: str) -> figures.Point:
    done = [run["numbers"] for run in cell["runs"] if run["state"] == "done"]
    values = [numbers[measure] for numbers in done if measure in numbers]
    hacked = [numbers["hacked_share"] for numbers in done if "hacked_share" in numbers]
    rewards = [numbers["reward"] - numbers["start"] for numbers in done if "start" in numbers]
    starts = [run["before"][measure] for run in cell["runs"] if run["state"] == "done" and measure in run["before"]]
    gain = float(np.mean(rewards)) if rewards else None
    start = float(np.mean(starts)) if starts else None
    return figures.Point(cell["settings"], values, hacked, start, gain)
