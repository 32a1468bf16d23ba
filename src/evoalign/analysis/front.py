# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze front`: reward against KL from the base model, over the saved means of runs. Suffix E: examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import BASE, Analysis, Finding, below, error_bars, row
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
        return self.nats.per_token


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
        best, pairs = not_beaten(points, base.mean), list(permutations(points, 2))
        numbers = {
            **asdict(settings),
            "base": base,
            "points": [
                {
                    **located[p.line].described(),
                    "weights": p.name,
                    "group": p.group,
                    "generation": p.generation,
                    "reward": p.reward,
                    "kl": p.kl,
                    "kl_completion": p.nats.per_completion,
                    "on_front": p.name in best,
                }
                for p in points
            ],
            "pairs_tested": len(pairs),
            "sure": [
                {"above": a.name, "below": b.name, "reward": statistics.paired(b.rewards_E, a.rewards_E)}
                for a, b in pairs
                if is_beaten(b, a)
            ],
        }
        lines = [*sentences(base, points, best), *placebo_hint(located)]
        return Finding(numbers, lines, figures=partial(draw, base, points, best))


def measure(located: Mapping[str, Target], settings: Settings, config: Config | None) -> tuple[Estimate, list[Point]]:
    """Return the reward of the base model, and a point for each saved mean. Raises EvoalignError."""
    from evoalign.analysis.mixer import EvalSettings, ModelMixer
    from evoalign.analysis.targets import alike

    wanted = EvalSettings(settings.examples, settings.samples, None, settings.temperature, kl_tokens=settings.tokens)
    means: list[tuple[str, str, int | None]] = []
    for line, target in located.items():
        saved = target.saved[-1 if settings.last else 0 :]
        means += [(line, line if step is None else str(folder), step) for folder, step in saved]
    watching.count(len(means))
    same = alike(list(located.values()), lambda target: target.settings(target.config))
    groups = {target.name: label for label, targets in same for target in targets}
    points: list[Point] = []
    base_E, rows = None, None
    for line, name, generation in means:
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
        points.append(Point(name, line, groups.get(line, line), generation, rewards_E, nats))
    assert base_E is not None
    return statistics.mean(base_E), points


def not_beaten(points: Sequence[Point], base: float) -> frozenset[str]:
    """Return the names of the points on the front of the means: none has at least their reward at at most their KL.

    `base` is the reward of the base model, which has a KL of 0.
    """
    means = {point.name: (point.reward.mean, point.kl.mean) for point in points}
    rivals = [*means.values(), (base, 0.0)]
    return frozenset(
        name for name, own in means.items() if not any(r >= own[0] and k <= own[1] and (r, k) != own for r, k in rivals)
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
        kl, completion = p.nats.per_token, p.nats.per_completion
        lines.append(
            row(p.name, {"reward": p.reward, "KL in nats per token": kl, "per completion": completion, "mean": front})
        )
    ends = list({p.line: p for p in points}.values())
    pairs = list(permutations(ends, 2))
    sure = [f"{a.line} over {b.line}" for a, b in pairs if is_beaten(b, a)]
    more = f"more reward at less KL at the end, each beyond its interval, of {len(pairs)} pairs (uncorrected)"
    return [*lines, row(more, {"": ", ".join(sure) or "none"})] if pairs else lines


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
        style, kl, reward = series(groups.index(group)), [p.kl for p in own], [p.reward for p in own]
        label = "_" if group in labelled else shorten(visible(group), 60)
        labelled.add(group)
        x, y = [0.0, *(one.mean for one in kl)], [base.mean, *(one.mean for one in reward)]
        axes.plot(x, y, label=label, markersize=4, linewidth=1.2, markevery=range(1, len(x)), **style)
        bars: dict[str, Any] = {"fmt": "none", "ecolor": style["color"], "elinewidth": 0.8, "alpha": 0.6}
        axes.errorbar(x[1:], y[1:], xerr=error_bars(kl), yerr=error_bars(reward), **bars)
    axes.set_xlim(left=0)
    x, y = zip((0.0, base.mean), *sorted((p.kl.mean, p.reward.mean) for p in points if p.name in best), strict=True)
    axes.plot(x, y, drawstyle="steps-post", color=INK, linewidth=0.8, alpha=0.5, label="front of the means")
    below(figure, axes, 1, "bars: 95 % for new examples")
    return save_both(figure, folder / "front.png")


def _root(x: Any) -> Any:
    return np.sqrt(np.maximum(x, 0.0))
