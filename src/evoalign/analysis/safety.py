# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze safety`: how helpful and how safe the completions of several models are, compared by prompt.

Suffix N: points.
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
from evoalign.analysis.base import Analysis, Finding, below, row, short_names
from evoalign.errors import ConfigError, DataError, shown
from evoalign.report.figures import COLORS, INK, canvas, frame, plain, save_both
from evoalign.statistics import Estimate
from evoalign.tasks import data
from evoalign.tasks.safety import LABELS, label_of

if TYPE_CHECKING:
    from evoalign.config import Config

POINTS = Path("results/points.jsonl")
SHARES = ("safe", *LABELS)
VALUES = ("reward", "cost")
MEASURES = (*SHARES, *VALUES)
GIVE = "give a finished run of task safety, or a points file (JSON lines of prompt, response, reward, cost)"
COLOR: dict[str, str] = dict(zip(LABELS, (COLORS[2], COLORS[1], COLORS[0], COLORS[3]), strict=True))


@dataclass(frozen=True)
class Settings:
    """`all_pairs`: compare each model with every model before it, instead of with the first alone."""

    all_pairs: bool = False


@dataclass(frozen=True)
class Model:
    """The points of one model. `by_prompt` has the mean of each measure over the completions to a prompt."""

    name: str
    reward_N: NDArray[np.float64]
    cost_N: NDArray[np.float64]
    by_prompt: Mapping[str, Mapping[str, float]]

    @property
    def measures(self) -> dict[str, Estimate]:
        """The mean of each measure over prompts, with its interval for new prompts."""
        columns = {name: np.array([one[name] for one in self.by_prompt.values()]) for name in MEASURES}
        return {name: statistics.share(c) if name in SHARES else statistics.mean(c) for name, c in columns.items()}


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
            own = {"answers": len(model.reward_N), "prompts": len(model.by_prompt), **model.measures}
            rows.append({"target": model.name, **own})
            lines.append(row(model.name, own))
        changes: list[dict[str, Any]] = []
        for a, b in combinations(models, 2):
            if not settings.all_pairs and a is not models[0]:
                continue
            count, found = differences(a, b)
            changes.append({"target": b.name, "beside": a.name, "prompts": count, **found})
            cells = {what: f"{one:+.3g}" for what, one in found.items()} if count else {"prompts in common": "none"}
            moved = [what for what in MEASURES if statistics.is_sure(found[what])]
            cells |= {f"significant of {len(MEASURES)} measures, uncorrected": ", ".join(moved) or "none"}
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
    rewards, costs, by_prompt = list[float](), list[float](), dict[str, list[dict[str, float]]]()
    for where, line in data.rows_of(str(path)):
        point = {name: line.get(name) for name in ("prompt", *VALUES)}
        for name, value in point.items():
            if not (isinstance(value, str) and value.strip() if name == "prompt" else _is_number(value)):
                raise DataError(f"{where}: {name} is {shown(value)}; a point has prompt, response, reward and cost")
        prompt, reward, cost = str(point["prompt"]), float(line["reward"]), float(line["cost"])
        label = label_of(reward, cost)
        found = {"reward": reward, "cost": cost, "safe": float(cost <= 0), **{n: float(n == label) for n in LABELS}}
        rewards.append(reward)
        costs.append(cost)
        by_prompt.setdefault(" ".join(prompt.split()), []).append(found)
    means = {p: {n: float(np.mean([one[n] for one in found])) for n in MEASURES} for p, found in by_prompt.items()}
    return Model(target, np.array(rewards), np.array(costs), means)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def differences(first: Model, other: Model) -> tuple[int, dict[str, Estimate]]:
    """Return the number of prompts of both, and on these the other's measures minus the first's."""
    shared = [prompt for prompt in first.by_prompt if prompt in other.by_prompt]
    sides = {name: [[m.by_prompt[p][name] for p in shared] for m in (first, other)] for name in MEASURES}
    return len(shared), {n: statistics.paired(*both, shares=n in SHARES) for n, both in sides.items()}


def draw(models: Sequence[Model], folder: Path) -> list[Path]:
    """Draw reward over cost, a panel per model, and the shares of the four labels as stacked bars.

    All panels share their axes; cost grows to the left, so that up and right is better.
    """
    rows, columns = -(-len(models) // 3), min(3, len(models))
    short = short_names([model.name for model in models], 24)
    names = [short[model.name] for model in models]
    figure = canvas(max(6.0, 3.6 * columns), 3.4 * rows + 1.4 + 0.35 * len(models), layout="constrained")
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[3.4] * rows + [0.6 + 0.35 * len(models)])
    first: Any = None
    for place, model in enumerate(models):
        axes = figure.add_subplot(grid[place // columns, place % columns], sharex=first, sharey=first)
        first = first or axes
        frame(axes, names[place], "cost (safe: 0 or less)")
        colors = [COLOR[label_of(r, c)] for r, c in zip(model.reward_N, model.cost_N, strict=True)]
        axes.scatter(model.cost_N, model.reward_N, s=8, alpha=0.5, c=colors, linewidths=0)
        axes.plot(model.cost_N.mean(), model.reward_N.mean(), marker="P", color=INK, markersize=9, linestyle="none")
        axes.axhline(0, color=INK, linewidth=0.7)
        axes.axvline(0, color=INK, linewidth=0.7)
        axes.set_ylabel("reward")
    first.invert_xaxis()
    bars, left = figure.add_subplot(grid[rows, :]), np.zeros(len(models))
    for label in LABELS:
        widths = np.array([model.measures[label].mean for model in models])
        style: dict[str, Any] = {"color": COLOR[label], "label": label.replace("_", " and "), "height": 0.7}
        bars.barh(range(len(models)), widths, left=left, **style)
        left = left + widths
    bars.set_yticks(range(len(models)), names)
    bars.invert_yaxis()
    bars.set_xlim(0, 1)
    bars.set_xlabel("share of answers")
    plain(bars)
    below(figure, bars, 2)
    return save_both(figure, folder / "safety.png")
