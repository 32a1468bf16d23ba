# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze safety`: how helpful and how safe the completions of several models are, compared by prompt.

Means are over completions; intervals are for new prompts: the completions of a prompt are a cluster.
Suffixes: N points, P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import Analysis, Finding, row, short_names
from evoalign.errors import ConfigError, DataError, shown
from evoalign.report.figures import COLORS, INK, canvas, frame, plain, save_both
from evoalign.statistics import Estimate
from evoalign.tasks import data
from evoalign.tasks.refusals import KINDS, kind_of
from evoalign.tasks.safety import INVENTED, LABELS, has_invented_turn, label_of

if TYPE_CHECKING:
    from evoalign.config import Config

POINTS = Path("results/points.jsonl")
SHARES = ("safe", *LABELS)
VALUES = ("reward", "cost")
SCORES = (*SHARES, *VALUES)
REFUSALS = tuple(f"refusal_{kind}" for kind in KINDS)
TEXTS = (*REFUSALS, "invented_turns")
"""Shares of what the responses say; a file without responses has none of them."""
GIVE = "give a finished run of task safety, or a points file (JSON lines of prompt, response, reward, cost)"
COLOR: dict[str, str] = {
    **dict(zip(LABELS, (COLORS[2], COLORS[1], COLORS[0], COLORS[3]), strict=True)),
    **dict(zip(TEXTS, (COLORS[0], COLORS[2], COLORS[1], COLORS[3]), strict=True)),
}


@dataclass(frozen=True)
class Settings:
    """`all_pairs`: compare each model with every model before it, instead of with the first alone."""

    all_pairs: bool = False


@dataclass(frozen=True)
class Model:
    """The points of one model: each measure's values [N], and the places of the points of each prompt."""

    name: str
    values: Mapping[str, NDArray[np.float64]]
    places: Mapping[str, Sequence[int]]

    @property
    def measures(self) -> dict[str, Estimate]:
        """The mean of each measure over completions, with its interval for new prompts."""
        prompts = list(self.places)
        found = {name: statistics.mean(self.influences(name, prompts)) for name in self.values}
        return {n: one if n in VALUES else self._share(n, one) for n, one in found.items()}

    def _share(self, name: str, found: Estimate) -> Estimate:
        values_P = self.influences(name, list(self.places))
        return statistics.share(values_P) if np.isin(values_P, (0.0, 1.0)).all() else statistics.bounded(found)

    def influences(self, name: str, prompts: Sequence[str]) -> NDArray[np.float64]:
        """Return values [P] whose mean is that over the completions of these prompts.

        Each is the mean plus P times the prompt's share of the deviations from it, so that the interval of their mean
        is the linearised one of a ratio of sums over prompts (Cochran 1977, chapter 6). With one completion per prompt,
        these are the completions' own values.
        """
        totals_P = np.array([self.values[name][self.places[prompt]].sum() for prompt in prompts])
        sizes_P = np.array([len(self.places[prompt]) for prompt in prompts], dtype=np.float64)
        mean = totals_P.sum() / sizes_P.sum()
        values_P: NDArray[np.float64] = mean + (totals_P - mean * sizes_P) * len(prompts) / sizes_P.sum()
        return totals_P if (sizes_P == 1).all() else values_P


class Safety(Analysis[Settings]):
    """Helpfulness and safety of each model, and paired differences from the first on the same prompts.

    The plane of reward and cost with the four labels is that of Safe RLHF (Dai et al., arXiv 2310.12773, section 4).
    Reads what runs of task safety wrote, or files of points, and loads no model.
    """

    name = __name__.rpartition(".")[2]  # that of the file
    help = (
        "Helpfulness over cost, shares of safe answers, and paired differences, of runs of task safety or points files."
    )
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Raises ConfigError, DataError for a target that is neither a run of task safety nor a file of points."""
        models = [read(name) for name in dict.fromkeys(targets)]
        rows: list[dict[str, Any]] = []
        lines: list[str] = []
        for model in models:
            own = {"answers": len(model.values["reward"]), "prompts": len(model.places), **model.measures}
            rows.append({"target": model.name, **own})
            lines.append(row(model.name, own))
        changes: list[dict[str, Any]] = []
        for a, b in combinations(models, 2):
            if not settings.all_pairs and a is not models[0]:
                continue
            count, found = differences(a, b)
            changes.append({"target": b.name, "beside": a.name, "prompts": count, **found})
            cells = {what: f"{one:+.3g}" for what, one in found.items()} if count else {"prompts in common": "none"}
            moved = [what for what, one in found.items() if statistics.is_sure(one)]
            cells |= {f"significant of {len(found)} measures, uncorrected": ", ".join(moved) or "none"}
            lines.append(row(f"{b.name} minus {a.name} on {count:,} prompts", cells))
        return Finding({"models": rows, "differences": changes}, lines, figures=partial(draw, models))


def read(target: str) -> Model:
    """Return the points of a run or of a file. Raises ConfigError, DataError."""
    from evoalign.rundir.method import is_run

    path = Path(target)
    if path.is_dir():
        if not is_run(path):
            raise ConfigError(f"{target} is a folder and no run; {GIVE}")
        path = path / POINTS
        if not path.is_file():
            raise ConfigError(f"{path} is missing: only finished runs of task safety have points")
    elif not path.is_file():
        raise ConfigError(f"no file {target}; {GIVE}")
    values, places = dict[str, list[float]](), dict[str, list[int]]()
    count = 0
    for count, (where, line) in enumerate(data.rows_of(str(path)), start=1):
        point = {name: line.get(name) for name in ("prompt", *VALUES)}
        for name, value in point.items():
            if not (isinstance(value, str) and value.strip() if name == "prompt" else _is_number(value)):
                raise DataError(f"{where}: {name} is {shown(value)}; a point has prompt, response, reward and cost")
        for name, value in _measured(line).items():
            values.setdefault(name, []).append(value)
        places.setdefault(" ".join(str(point["prompt"]).split()), []).append(count - 1)
    full = {name: np.array(column) for name, column in values.items() if len(column) == count}
    return Model(target, full, places)


def _measured(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures of a point; those of its response only if it has one."""
    reward, cost, response = float(line["reward"]), float(line["cost"]), line.get("response")
    label = label_of(reward, cost)
    found = {"safe": float(cost <= 0), **{n: float(n == label) for n in LABELS}, "reward": reward, "cost": cost}
    if isinstance(response, str):
        kind, marked = kind_of(response), line.get(INVENTED)
        found |= {f"refusal_{name}": float(name == kind) for name in KINDS}
        found["invented_turns"] = float(has_invented_turn(response) if marked is None else bool(marked))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def differences(first: Model, other: Model) -> tuple[int, dict[str, Estimate]]:
    """Return the number of prompts of both, and on these the other's measures minus the first's."""
    prompts = [prompt for prompt in first.places if prompt in other.places]
    if not prompts:
        return 0, {}
    both = [name for name in first.values if name in other.values]
    sides = {name: [model.influences(name, prompts) for model in (first, other)] for name in both}
    return len(prompts), {n: statistics.paired(*pair, shares=n not in VALUES) for n, pair in sides.items()}


def draw(models: Sequence[Model], folder: Path) -> list[Path]:
    """Draw reward over cost, a panel per model, and stacked bars: the four labels, and the kinds of refusal.

    All panels share their axes; cost grows to the left, so that up and right is better.
    """
    rows, columns = -(-len(models) // 3), min(3, len(models))
    short = short_names([model.name for model in models], 24)
    names = [short[model.name] for model in models]
    bars = [LABELS, *([REFUSALS] if any(REFUSALS[0] in model.values for model in models) else [])]
    height = 0.6 + 0.35 * len(models)
    figure = canvas(max(6.0, 3.6 * columns), 3.4 * rows + len(bars) * (height + 0.8), layout="constrained")
    grid = figure.add_gridspec(rows + len(bars), columns, height_ratios=[3.4] * rows + [height] * len(bars))
    first: Any = None
    for place, model in enumerate(models):
        axes = figure.add_subplot(grid[place // columns, place % columns], sharex=first, sharey=first)
        first = first or axes
        frame(axes, names[place], "cost (safe: 0 or less)")
        reward_N, cost_N = (model.values[name] for name in VALUES)
        colors = [COLOR[label_of(r, c)] for r, c in zip(reward_N, cost_N, strict=True)]
        axes.scatter(cost_N, reward_N, s=8, alpha=0.5, c=colors, linewidths=0)
        axes.plot(cost_N.mean(), reward_N.mean(), marker="P", color=INK, markersize=9, linestyle="none")
        axes.axhline(0, color=INK, linewidth=0.7)
        axes.axvline(0, color=INK, linewidth=0.7)
        axes.set_ylabel("reward")
    first.invert_xaxis()
    for place, measures in enumerate(bars):
        _stack(figure.add_subplot(grid[rows + place, :]), models, names, measures)
    return save_both(figure, folder / "safety.png")


def _stack(axes: Any, models: Sequence[Model], names: Sequence[str], measures: Sequence[str]) -> None:
    """Draw the shares of the measures as stacked bars, and with those of refusals the share of invented turns."""
    found, left = [model.measures for model in models], np.zeros(len(models))
    for name in measures:
        widths = np.array([one[name].mean if name in one else 0.0 for one in found])
        style: dict[str, Any] = {"color": COLOR[name], "label": visible_name(name), "height": 0.7}
        axes.barh(range(len(models)), widths, left=left, **style)
        left = left + widths
    if measures == REFUSALS:
        places = [(one["invented_turns"].mean, i) for i, one in enumerate(found) if "invented_turns" in one]
        style = {"color": INK, "marker": "D", "linestyle": "none", "label": "invented turns"}
        axes.plot(*zip(*places, strict=True), **style)
    axes.set_yticks(range(len(models)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of answers")
    plain(axes)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize="small")


def visible_name(measure: str) -> str:
    """Return the words of a measure for a legend."""
    return measure.replace("_", " " if measure in TEXTS else " and ")
