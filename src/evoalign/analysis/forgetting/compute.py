# SPDX-License-Identifier: Apache-2.0
"""Base, checkpoints and placebos of each target on each task and text. Array suffixes: E examples, K placebos."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign import statistics
from evoalign.analysis.base import Finding
from evoalign.analysis.estimates import told, tree
from evoalign.analysis.forgetting.points import (
    Accuracy,
    Point,
    Probe,
    Text,
    has_placebos,
    own_points,
    points_of,
    scores,
)
from evoalign.analysis.lab import Floats
from evoalign.analysis.targets import Target, locate
from evoalign.config import Config, load
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.rundir.method import JOURNAL
from evoalign.setup import as_config
from evoalign.statistics import Estimate, is_sure

if TYPE_CHECKING:
    from evoalign.analysis.forgetting.command import Settings


@dataclass(frozen=True, slots=True)
class Course:
    """One target on one probe: [E] of the base, of each own point, of each placebo of the last one."""

    target: str
    probe: str
    falls: bool
    trained: bool
    """Whether the target was trained on this very task."""
    steps: tuple[int, ...]
    base_E: Floats
    own_E: tuple[Floats, ...]
    placebo_KE: tuple[Floats, ...]

    @property
    def changes(self) -> list[Estimate]:
        """Of each own point from the base, over examples."""
        return [statistics.paired(self.base_E, own_E) for own_E in self.own_E]

    @property
    def drift(self) -> Estimate | None:
        """What placebos change in the mean, over examples and placebos; None without any."""
        return statistics.crossed(np.stack(self.placebo_KE) - self.base_E) if self.placebo_KE else None

    @property
    def beyond(self) -> Estimate | None:
        """The last point less the placebos in the mean; 0 is in its interval were it but one placebo more."""
        return statistics.beside(self.own_E[-1], np.stack(self.placebo_KE)) if self.placebo_KE else None


@dataclass(frozen=True)
class Forgetting(Finding):
    """The finding, and what its figures are drawn from."""

    courses: Sequence[Course]

    def draw(self, folder: Path) -> list[Path]:
        from evoalign.analysis.forgetting.figure import draw

        return draw(self.courses, folder)


def forgetting(targets: Sequence[str], settings: Settings, config: Config | None) -> Forgetting:
    """See `Command`. Raises EvoalignError."""
    for name in ("examples", "pieces"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name}: {getattr(settings, name)} is none; ask 1 or more")
    if settings.window < 2 or settings.placebos < 0:
        raise ConfigError(f"window, placebos: {settings.window}, {settings.placebos}; give 2 or more, and 0 or more")
    if twice := sorted({name for name in targets if list(targets).count(name) > 1}):
        raise ConfigError(f"{twice[0]} is given twice; name each target once")
    files = [(file, as_config(load([file], needs_es=False))) for file in settings.tasks]
    probes: list[Probe] = [Accuracy(task, settings.measure) for _, task in files]
    probes.append(Text(settings.text, settings.pieces, settings.window))
    courses: list[Course] = []
    found = [locate(name, config) for name in targets]
    watching.count(sum(_stages(target, settings, len(probes)) for target in found))
    for target in found:
        with tempfile.TemporaryDirectory(prefix="evoalign-") as scratch:
            points = points_of(target, settings.placebos, Path(scratch))
            courses += [_course(target, probe, points, settings) for probe in probes]
    plain = {
        **asdict(settings),
        "tasks": [str(t) for t in settings.tasks],
        "text": settings.text and str(settings.text),
    }
    numbers = {**plain, "targets": [t.described() for t in found], "courses": [_tree(course) for course in courses]}
    return Forgetting(numbers, _sentences(courses, found, settings), courses)


def _stages(target: Target, settings: Settings, probes: int) -> int:
    """Placebos are made, and every point is asked by every probe."""
    placebos = settings.placebos if has_placebos(target) else 0
    return placebos + probes * (len(own_points(target)) + placebos)


def _course(target: Target, probe: Probe, points: Sequence[Point], settings: Settings) -> Course:
    base_E, *rest = _known(list(scores(probe, target, points, settings.examples)), probe)
    own = [(p, s) for p, s in zip(points, rest, strict=True) if p.placebo is None]
    placebos = tuple(s for p, s in zip(points, rest, strict=True) if p.placebo is not None)
    asked, made = probe.asked(target).task, target.config.task
    trained = isinstance(probe, Accuracy) and (asked.name, asked.files) == (made.name, made.files)
    steps = tuple(p.step for p, _ in own)
    return Course(target.name, probe.name, probe.falls, trained, steps, base_E, tuple(s for _, s in own), placebos)


def _known(scores_E: Sequence[Floats], probe: Probe) -> list[Floats]:
    """Of the examples that the measure applies to in every point. Raises ConfigError where there is none."""
    known_E = ~np.isnan(scores_E).any(axis=0)
    if not known_E.any():
        raise ConfigError(f"measure: {probe.name} applies to no example that was asked; ask more, or another one")
    return [own_E[known_E] for own_E in scores_E]


def _tree(course: Course) -> dict[str, Any]:
    def optional(found: Estimate | None) -> dict[str, Any] | None:
        return None if found is None else tree(found)

    rows = [
        {"step": step, **_values(scores_E, course), "change": tree(change)}
        for step, scores_E, change in zip(course.steps, course.own_E, course.changes, strict=True)
    ]
    return {
        "target": course.target, "probe": course.probe, "less_is_worse": course.falls, "trained": course.trained,
        "items": len(course.base_E), "base": _values(course.base_E, course), "points": rows,
        "placebos": [_values(one, course) for one in course.placebo_KE],
        "drift": optional(course.drift), "beyond_drift": optional(course.beyond),
    }  # fmt: skip


def _values(scores_E: Floats, course: Course) -> dict[str, float]:
    mean = float(scores_E.mean())
    return {"mean": mean} if course.falls else {"mean": mean, "perplexity": exp(min(mean, 700.0))}


# --- in words ---------------------------------------------------------------------------------------------------------


def _sentences(courses: Sequence[Course], targets: Sequence[Target], settings: Settings) -> list[str]:
    said = [line for course in courses for line in _of_course(course)]
    if not settings.tasks:
        said.append("No task was asked; name config files of tasks: tasks=[other.yaml].")
    if settings.text is None:
        said.append("The text is that of the test prompts; give one that has nothing to do with the task: text=FILE.")
    es = [t for t in targets if t.run is not None and (t.run / JOURNAL).is_file()]
    if es and not any(course.placebo_KE for course in courses):
        said.append("No placebo was asked, so that what training forgets and what noise does are not told apart.")
    if len(courses) > 1:
        said.append(
            f"{len(courses)} statements, each for itself: one in twenty is wrong by chance. Intervals are at 95 % for "
            "new examples, and beside placebos for new ones of these, too; other seeds may differ."
        )
    return said


def _of_course(course: Course) -> list[str]:
    last, change = course.own_E[-1], course.changes[-1]
    where = f" after {course.steps[-1]}" if course.steps[-1] else ""
    form = ".3g"
    head = f"{course.target}: {course.probe} {course.base_E.mean():{form}} of the base, {last.mean():{form}}{where}"
    if not course.falls:
        shown = [f"{exp(min(float(v.mean()), 700.0)):{form}}" for v in (course.base_E, last)]
        head += f" (perplexity {shown[0]} and {shown[1]})"
    line = f"{head}: {_verdict(change, course)}"
    if course.trained:
        line += "; it is a task that the target was trained on"
    if len(course.own_E) > 1:
        worst = (min if course.falls else max)(course.own_E, key=lambda v: float(v.mean()))
        count, low = len(course.own_E), "low" if course.falls else "high"
        line += f"; the worst of its {count} checkpoints {worst.mean():{form}}"
        line += f", and the worst of {count} is {low} by chance, too"
    return [f"{line}.", *_beside(course)]


def _verdict(change: Estimate, course: Course) -> str:
    """Whether it is worse, by the interval of the change."""
    if not is_sure(change):
        return f"a change of {told(change)}, not shown to be any"
    worse = (change.mean < 0) is course.falls
    return f"{'worse' if worse else 'better'} by {told(change)}"


def _beside(course: Course) -> list[str]:
    drift, beyond = course.drift, course.beyond
    if drift is None or beyond is None:
        return []
    noise = f"{course.target}: {course.probe}: {len(course.placebo_KE)} placebos change it by {told(drift)} in the mean"
    if not is_sure(beyond):
        return [f"{noise}; what the rewards did beside the noise, {told(beyond)}, is not shown to be any."]
    worse = (beyond.mean < 0) is course.falls
    what = "more is forgotten than by noise alone" if worse else "less is lost than by noise alone, or more is gained"
    return [f"{noise}; {what}: {told(beyond)}."]
