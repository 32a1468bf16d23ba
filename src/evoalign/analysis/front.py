# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze front`: reward against KL from the base model, over the saved means of runs.

Suffix E: examples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import BASE, Analysis, Finding, error_bars, row
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.report.figures import INK, canvas, frame, save_both, series
from evoalign.report.tables import shorten, visible
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    from evoalign.analysis.mixer import KlSums
    from evoalign.analysis.targets import Target
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """`examples` of the test split are evaluated, with `samples` completions each where there is a `temperature` (None:
    as the config's evaluation), and sampled at temperature 1 until there are `tokens` tokens for the KL. `last`
    takes only the last mean that each run saved."""

    examples: int = 64
    samples: int = 1
    temperature: float | None = None
    tokens: int = 2000
    last: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """A saved mean. `line` is the target as it was named, `group` the label of runs that differ in their seed alone."""

    name: str
    line: str
    group: str
    generation: int | None
    rewards_E: NDArray[np.float64]
    nats: KlSums

    @property
    def reward(self) -> Estimate:
        return statistics.mean(self.rewards_E)

    @property
    def kl(self) -> Estimate:
        """KL in nats per token."""
        return statistics.bounded(statistics.ratio(self.nats.nats_P, self.nats.tokens_P), high=np.inf)

    @property
    def kl_completion(self) -> Estimate:
        """KL in nats per completion."""
        return statistics.bounded(statistics.ratio(self.nats.nats_P, self.nats.draws_P), high=np.inf)


class Front(Analysis[Settings]):
    """Reward and KL(target || base) of every saved mean of runs, and of other targets; which are on the front.

    As in Gao, Schulman and Hilton (arXiv 2210.10760). Each point is loaded by itself with its base model.
    """

    name = "front"
    help = "Reward against KL from the base model, over the saved means of runs, and which are on the front."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Raises EvoalignError where a target does not load, or is of another task than the first."""
        from evoalign.analysis.targets import locate, placebo_hint

        located = {name: locate(name, config) for name in dict.fromkeys(targets) if name != BASE}
        if not located:
            raise ConfigError(f"{BASE} is on every front; name runs or models")
        base, points = measure(located, settings, config)
        best = not_beaten(points, base.mean)
        numbers = {
            **asdict(settings),
            "base": base.tree(),
            "points": [
                {
                    **located[p.line].described(),
                    "weights": p.name,
                    "group": p.group,
                    "generation": p.generation,
                    "reward": p.reward.tree(),
                    "kl": p.kl.tree(),
                    "kl_completion": p.kl_completion.tree(),
                    "on_front": p.name in best,
                }
                for p in points
            ],
            "pairs_tested": len(points) * (len(points) - 1),
            "sure": [
                {"above": a.name, "below": b.name, "reward": statistics.paired(b.rewards_E, a.rewards_E).tree()}
                for a, b in permutations(points, 2)
                if is_beaten(b, a)
            ],
        }
        lines = [*sentences(base, points, best), *placebo_hint(located)]
        return Finding(numbers, lines, figures=partial(draw, base, points, best))


def measure(located: Mapping[str, Target], settings: Settings, config: Config | None) -> tuple[Estimate, list[Point]]:
    """Return the reward of the base model, and a point for each saved mean. Raises EvoalignError."""
    from evoalign.analysis.mixer import EvalSettings, ModelMixer
    from evoalign.rundir.directory import generation_of, saved_folders

    wanted = EvalSettings(settings.examples, settings.samples, None, settings.temperature, kl_tokens=settings.tokens)
    means: dict[str, list[tuple[str, int | None]]] = {}
    for line, target in located.items():
        if target.run is None or target.run != Path(line):
            means[line] = [(line, None)]
        else:
            folders = saved_folders(target.run)
            means[line] = [(str(f), generation_of(f)) for f in (folders[-1:] if settings.last else folders)]
    watching.count(sum(map(len, means.values())))
    groups, points = _groups(located), list[Point]()
    base_E, rows = None, None
    for line, found in means.items():
        for name, generation in found:
            watching.begin(name)
            with ModelMixer([name], config, wanted) as mixer:
                if rows is None:
                    rows, base_E = mixer.examples, mixer.rewards(mixer.evaluate({BASE: 1.0}))
                elif list(rows) != list(mixer.examples):
                    raise ConfigError(
                        f"{line} has another test split than {points[0].line}, so their rewards do not compare; name "
                        "runs of one split, or set the examples with --config"
                    )
                rewards_E = mixer.rewards(mixer.evaluate({name: 1.0}))
                nats = mixer.divergence({BASE: 1.0}, {name: 1.0})
            points.append(Point(name, line, groups[line], generation, rewards_E, nats))
    assert base_E is not None
    return statistics.mean(base_E), points


def _groups(located: Mapping[str, Target]) -> dict[str, str]:
    """Return the legend label of each target: runs that differ in their seed alone share one."""
    from evoalign.analysis.compare.groups import labels_of, settings_of
    from evoalign.rundir.method import method_of

    keys = {
        line: json.dumps(settings_of(target.config, method), sort_keys=True)
        for line, target in located.items()
        if target.run is not None and (method := method_of(target.run)) is not None
    }
    several = list(dict.fromkeys(keys.values()))
    labels = dict(zip(several, labels_of([json.loads(key) for key in several]), strict=True)) if several else {}
    return {line: labels[keys[line]] if line in keys else line for line in located}


def not_beaten(points: Sequence[Point], base: float) -> frozenset[str]:
    """Return the names of the points on the front of the means: none has at least their reward at at most their KL.

    `base` is the reward of the base model, which has a KL of 0.
    """
    means = {point.name: (point.reward.mean, point.kl.mean) for point in points}
    others = [*means.values(), (base, 0.0)]
    return frozenset(
        name
        for name, (reward, kl) in means.items()
        if not any(r >= reward and k <= kl and (r, k) != (reward, kl) for r, k in others)
    )


def is_beaten(b: Point, a: Point) -> bool:
    """Return whether `a` earns more than `b` on the same examples at less KL, each beyond its 95 % interval."""
    more = statistics.paired(b.rewards_E, a.rewards_E)
    apart = a.kl.high is not None and b.kl.low is not None and a.kl.high < b.kl.low
    return apart and more.low is not None and more.low > 0


def sentences(base: Estimate, points: Sequence[Point], best: frozenset[str]) -> list[str]:
    """Return a row for each point, and which targets end better than which."""
    lines = [row(BASE, {"reward": base})]
    for p in points:
        front = "on the front" if p.name in best else None
        cells = {"reward": p.reward, "KL in nats per token": p.kl, "per completion": p.kl_completion, "mean": front}
        lines.append(row(p.name, cells))
    ends = {p.line: p for p in points}
    sure = [(a, b) for a, b in permutations(ends.values(), 2) if is_beaten(b, a)]
    lines += [f"{a.line} ends with more reward at less KL than {b.line}, each beyond its interval." for a, b in sure]
    if len(ends) > 1:
        count = len(ends) * (len(ends) - 1)
        none = "" if sure else "No target ends with significantly more reward at less KL than another. "
        lines.append(f"{none}{count} ordered pairs of ends were tested, uncorrected: 1 in 40 is a false positive.")
    return lines


def draw(base: Estimate, points: Sequence[Point], best: frozenset[str], folder: Path) -> list[Path]:
    """Draw reward over the square root of KL (Gao et al., section 3): a line per target, a colour per group."""
    groups = list(dict.fromkeys(point.group for point in points))
    figure = canvas(8.0, 5.0 + 0.22 * len(groups), layout="constrained")
    axes = figure.subplots()
    frame(axes, "reward and distance from the base model", "KL(model || base), nats per token (square root)")
    axes.set_xscale("function", functions=(_root, np.square))
    axes.set_ylabel("reward, test split")
    axes.axhline(base.mean, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), label=BASE)
    labelled = set[str]()
    for line in dict.fromkeys(point.line for point in points):
        own = [point for point in points if point.line == line]
        group = own[0].group
        label = "_" if group in labelled else shorten(visible(group), 60)
        labelled.add(group)
        x, y = [[0.0, *(p.kl.mean for p in own)], [base.mean, *(p.reward.mean for p in own)]]
        style = series(groups.index(group))
        axes.plot(x, y, label=label, markersize=4, linewidth=1.2, markevery=range(1, len(x)), **style)
        for p in own:
            bars: dict[str, Any] = {
                "xerr": error_bars([p.kl]),
                "yerr": error_bars([p.reward]),
                "ecolor": style["color"],
            }
            axes.errorbar([p.kl.mean], [p.reward.mean], fmt="none", elinewidth=0.8, alpha=0.6, **bars)
    axes.set_xlim(left=0)
    steps = [(0.0, base.mean), *sorted((p.kl.mean, p.reward.mean) for p in points if p.name in best)]
    x, y = zip(*steps, strict=True)
    axes.plot(x, y, drawstyle="steps-post", color=INK, linewidth=0.8, alpha=0.5, label="front of the means")
    title = "bars: 95 % for new examples"
    figure.legend(loc="outside lower left", frameon=False, title=title, alignment="left")
    return save_both(figure, folder / "front.png")


def _root(x: Any) -> Any:
    return np.sqrt(np.maximum(np.asarray(x, dtype=float), 0.0))
