# SPDX-License-Identifier: Apache-2.0
"""Points of reward and KL, and what can be said of two of them. Suffix E: examples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign import statistics
from evoalign.analysis.base import Finding
from evoalign.analysis.compare.groups import labels_of, settings_of
from evoalign.analysis.estimates import bounded, told, tree
from evoalign.analysis.lab import BASE, Asked, Floats, Lab, Nats, shown_placebos
from evoalign.analysis.targets import Target, locate
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.rundir.directory import generation_of, saved_folders
from evoalign.rundir.method import method_of
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    from evoalign.analysis.front.command import Settings
    from evoalign.config import Config


@dataclass(frozen=True, slots=True)
class Point:
    """A saved mean. `line` is the target that was named, `group` that of runs which differ in their seed alone."""

    name: str
    line: str
    group: str
    generation: int | None
    rewards_E: Floats
    nats: Nats

    @property
    def reward(self) -> Estimate:
        return statistics.mean(self.rewards_E)

    @property
    def kl(self) -> Estimate:
        """Nats a token."""
        return bounded(statistics.ratio(self.nats.nats_P, self.nats.tokens_P), high=np.inf)

    @property
    def kl_completion(self) -> Estimate:
        """Nats a completion."""
        return bounded(statistics.ratio(self.nats.nats_P, self.nats.draws_P), high=np.inf)


@dataclass(frozen=True)
class Front(Finding):
    """The finding, and what its figure is drawn from."""

    base: Estimate
    points: Sequence[Point]
    best: frozenset[str]

    def draw(self, folder: Path) -> list[Path]:
        from evoalign.analysis.front.figure import draw

        return draw(self, folder)


def front(targets: Sequence[str], settings: Settings, config: Config | None) -> Front:
    """See `Command`. Raises EvoalignError."""
    located = {name: locate(name, config) for name in dict.fromkeys(targets) if name != BASE}
    if not located:
        raise ConfigError("no target but base, which is on every front; name runs or models")
    asked = Asked(
        examples=settings.examples, samples=settings.samples, temperature=settings.temperature,
        kl_tokens=settings.tokens,
    )  # fmt: skip
    groups, points = _groups(located), list[Point]()
    base_E, rows = None, None
    means = {line: _means(line, target, last=settings.last) for line, target in located.items()}
    watching.count(sum(map(len, means.values())))
    for line, found in means.items():
        for name, generation in found:
            watching.begin(name)
            with Lab([name], config, asked) as lab:
                if rows is None:
                    rows, base_E = lab.examples, lab.rewards(lab.answer({BASE: 1.0}))
                elif list(rows) != list(lab.examples):
                    raise ConfigError(
                        f"{line} has another test split than {points[0].line}: their rewards are of other examples; "
                        "name runs of one split, or say with --config on what all are asked"
                    )
                rewards_E = lab.rewards(lab.answer({name: 1.0}))
                nats = lab.divergence({BASE: 1.0}, {name: 1.0})
            points.append(Point(name, line, groups[line], generation, rewards_E, nats))
    assert base_E is not None
    base = statistics.mean(base_E)
    best = not_beaten(points, base.mean)
    numbers = {
        **asdict(settings),
        "base": tree(base),
        "points": [_row(point, located[point.line], point.name in best) for point in points],
        "pairs_tested": len(points) * (len(points) - 1),
        "sure": [_pair(a, b) for a, b in permutations(points, 2) if is_beaten(b, a)],
    }
    return Front(numbers, [*_sentences(base, points, best), *shown_placebos(located)], base, points, best)


def not_beaten(points: Sequence[Point], base: float) -> frozenset[str]:
    """The names of the points, by their means, beside which none has more reward at no more KL, or as much at less.

    `base` is the reward of the base model, which is there at no KL.
    """
    means = {point.name: (point.reward.mean, point.kl.mean) for point in points}

    def is_beaten(reward: float, kl: float) -> bool:
        others = [*means.values(), (base, 0.0)]
        return any(r >= reward and k <= kl and (r, k) != (reward, kl) for r, k in others)

    return frozenset(name for name, mean in means.items() if not is_beaten(*mean))


def is_beaten(b: Point, a: Point) -> bool:
    """Whether `a` earns more than `b` on the same examples at less KL, each beyond its 95 % interval."""
    more = statistics.paired(b.rewards_E, a.rewards_E)
    apart = a.kl.high is not None and b.kl.low is not None and a.kl.high < b.kl.low
    return apart and more.low is not None and more.low > 0


def _groups(located: Mapping[str, Target]) -> dict[str, str]:
    """What each target is called in the figure: runs that differ in their seed alone together."""
    keys = {
        line: json.dumps(settings_of(target.config, method), sort_keys=True)
        for line, target in located.items()
        if target.run is not None and (method := method_of(target.run)) is not None
    }
    several = dict.fromkeys(keys.values())
    labels = dict(zip(several, labels_of([json.loads(key) for key in several]), strict=True)) if several else {}
    return {line: labels[keys[line]] if line in keys else line for line in located}


def _means(line: str, target: Target, *, last: bool) -> list[tuple[str, int | None]]:
    """The saved means of a run, with their generations; the target itself where it is no run."""
    if target.run is None or target.run != Path(line):
        return [(line, None)]
    folders = saved_folders(target.run)
    return [(str(folder), generation_of(folder)) for folder in (folders[-1:] if last else folders)]


def _row(point: Point, target: Target, on_front: bool) -> dict[str, Any]:
    return {
        **target.described(), "weights": point.name, "group": point.group, "generation": point.generation,
        "reward": tree(point.reward), "kl": tree(point.kl), "kl_completion": tree(point.kl_completion),
        "on_front": on_front,
    }  # fmt: skip


def _pair(a: Point, b: Point) -> dict[str, Any]:
    return {"above": a.name, "below": b.name, "reward": tree(statistics.paired(b.rewards_E, a.rewards_E))}


def _sentences(base: Estimate, points: Sequence[Point], best: frozenset[str]) -> list[str]:
    lines = [f"The base model earns {told(base)}. Intervals are at 95 %, for new examples of these models."]
    lines += [
        f"{p.name}: reward {told(p.reward)} at {told(p.kl)} nats a token, {told(p.kl_completion)} a completion"
        f"{'; no other mean has as much at as little' if p.name in best else ''}."
        for p in points
    ]
    ends = {p.line: p for p in points}
    sure = [(a, b) for a, b in permutations(ends.values(), 2) if is_beaten(b, a)]
    lines += [f"{a.line} ends with more reward at less KL than {b.line}, each beyond its interval." for a, b in sure]
    if len(ends) > 1:
        count = len(ends) * (len(ends) - 1)
        none = "" if sure else "Of no two targets the one surely has more reward at less KL than the other. "
        lines.append(
            f"{none}{count} ordered pairs of ends were tested, each for itself: up to one in forty is so by chance."
        )
    return lines
