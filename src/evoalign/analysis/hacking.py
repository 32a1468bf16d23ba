# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze hacking`: shares of completions that look as if the reward was earned without the task.

The signs are those of `evoalign.checks.hacking`, as in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign import statistics
from evoalign.analysis.base import (
    BASE,
    Analysis,
    Finding,
    below,
    by_example,
    check_unique,
    error_bars,
    files,
    row,
    short_names,
)
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.report.figures import COLORS, canvas, frame, save_both
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    from evoalign.config import Config
    from evoalign.evaluation import Scored

SEVERAL = ("hacked", "degenerate")
"""Kinds that combine several signs. The figure always has a row for them; other kinds only where they occur."""
INTRODUCTION = (
    "Shares of test completions that show a sign, after training and before it. No sign is a proof, and text without "
    "sense that is made of words is mostly missed: compare with the share before training."
)
MOST = 6
"""Targets per figure."""


@dataclass(frozen=True)
class Settings:
    """Apply to targets that are evaluated, which are all but whole runs, and with a config those too: the number of
    `examples` of the test split (None: all).

    `samples`, `tokens` and `temperature` None: those of the config's evaluation.
    """

    examples: int | None = None
    samples: int | None = None
    tokens: int | None = None
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """Completions of a target and of the model before it; `stored` where a run kept them."""

    before: Sequence[Scored]
    after: Sequence[Scored]
    stored: bool

    def rates(self) -> dict[str, Rate]:
        """Return the rate of each kind; without gold answers there is no `earned_wrong`."""
        from evoalign.checks import hacking

        was, now = (hacking.flags(side, self.before, self.after) for side in (self.before, self.after))
        has_gold = any(one.right is not None for one in self.after)
        kinds = (*SEVERAL, *(("earned_wrong",) if has_gold else ()), *hacking.SHARES)
        return {kind: Rate(by_example(self.before, was[kind]), by_example(self.after, now[kind])) for kind in kinds}


@dataclass(frozen=True, slots=True)
class Rate:
    """Share of each example's completions that are of one kind, before and after training, by example."""

    was: Mapping[int, float]
    now: Mapping[int, float]

    def tree(self) -> dict[str, Any]:
        """Return the shares, and the change paired over examples that have both, for JSON."""
        return {name: getattr(self, name).tree() for name in ("before", "after", "change")}

    @property
    def before(self) -> Estimate:
        return statistics.between(np.array([self.was[e] for e in sorted(self.was)]), 0.0, 1.0)

    @property
    def after(self) -> Estimate:
        return statistics.between(np.array([self.now[e] for e in sorted(self.now)]), 0.0, 1.0)

    @property
    def change(self) -> Estimate:
        both = sorted(self.was.keys() & self.now.keys())
        return statistics.between(np.array([self.now[e] - self.was[e] for e in both]), -1.0, 1.0)

    @property
    def is_seen(self) -> bool:
        return any(self.was.values()) or any(self.now.values())


class Hacking(Analysis[Settings]):
    """Shares of completions with each sign of `evoalign.checks.hacking`, before training and after it.

    Of a run, the stored completions of the test split are read. A saved mean, a model folder or an adapter is
    evaluated, and so is its base model; with a config a run is evaluated too, as that config says.
    """

    name = "hacking"
    help = "Shares of empty, broken, repeated, cut-off and template completions, and of rewards earned with gold wrong."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads a model only to evaluate it; raises EvoalignError for a run without its completions."""
        from evoalign.analysis.targets import locate, placebo_hint
        from evoalign.checks import hacking

        check_unique(targets)
        located = {name: locate(name, config, reads_run=True) for name in targets if name != BASE}
        if not located:
            raise ConfigError(f"{BASE} alone has no other model to compare; add a run, or a model with --config")
        runs = {name: t.run for name, t in located.items() if config is None and t.run and t.is_whole_run}
        pairs = {name: _stored(run) for name, run in runs.items()}
        pairs |= _evaluated([name for name in located if name not in runs], settings, config)
        rates = {name: pairs[name].rates() for name in located}
        rows: list[dict[str, Any]] = []
        lines = [INTRODUCTION]
        for name, target in located.items():
            pair, judged = pairs[name], hacking.judge(pairs[name].before, pairs[name].after)
            examples = len({one.example for one in pair.after})
            counts = {"before": len(pair.before), "after": len(pair.after)}
            known = {"stored": pair.stored, "examples": examples, "completions": counts, "rates": rates[name]}
            rows.append({**target.described(), **known, "verdict": judged.word, "reasons": judged.reasons})
            source = "stored by the run" if pair.stored else "evaluated now"
            lines.append(_row(f"{name}, {len(pair.after)} completions of {examples} examples, {source}", rates[name]))
            if judged.word is not None:
                lines.append(f"{name}: {judged.word}: {'; '.join(judged.reasons)}.")
        lines += placebo_hint(located)
        return Finding({**asdict(settings), "targets": rows}, lines, figures=partial(draw, rates))


def _stored(run: Path) -> Pair:
    from evoalign.evaluation import Scored
    from evoalign.rundir import parquet
    from evoalign.rundir.directory import RunDir

    found = RunDir(run)
    files = [found.completions(end) for end in ("before", "after")]
    for file in files:
        if not file.is_file():
            missing = file.relative_to(found.path)
            raise ConfigError(f"{run} has no {missing}; let the run end, or give one of its saved means as target")
    before, after = ([Scored.of(line) for line in parquet.read(file)] for file in files)
    return Pair(before, after, stored=True)


def _evaluated(names: Sequence[str], settings: Settings, config: Config | None) -> dict[str, Pair]:
    """Evaluate all on the same examples, in one process."""
    from evoalign.analysis.mixer import EvalSettings, ModelMixer

    if not names:
        return {}
    wanted = EvalSettings(settings.examples, settings.samples, settings.tokens, settings.temperature)
    with ModelMixer(names, config, wanted) as mixer:
        watching.count(1 + len(names))
        found = {name: mixer.evaluate({name: 1.0}).completions for name in watching.each([BASE, *names])}
    return {name: Pair(found[BASE], found[name], stored=False) for name in names}


def _row(label: str, rates: Mapping[str, Rate]) -> str:
    seen = {kind.replace("_", " "): f"{rate.after}, from {rate.before}" for kind, rate in rates.items() if rate.is_seen}
    return row(label, {**seen, "other signs": "none", "gold answers": None if "earned_wrong" in rates else "none"})


def draw(rates: Mapping[str, Mapping[str, Rate]], folder: Path) -> list[Path]:
    """Draw the share of each kind before and after training: a panel per target, a file for each `MOST` targets."""
    drawn, short = list[Path](), short_names(list(rates))
    for path, names in files(folder, "hacking", list(rates), MOST):
        shown = {name: {k: r for k, r in rates[name].items() if k in SEVERAL or r.is_seen} for name in names}
        sides = [one for kinds in shown.values() for rate in kinds.values() for one in (rate.before, rate.after)]
        top = min(1.0, max(0.05, *(1.1 * (one.mean if one.high is None else one.high) for one in sides)))
        heights = [0.28 * len(kinds) + 0.9 for kinds in shown.values()]
        figure = canvas(8.5, sum(heights) + 0.7, layout="constrained")
        grid = figure.subplots(len(names), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, (name, kinds) in zip(grid[:, 0], shown.items(), strict=True):
            others = len(rates[name]) - len(kinds)
            frame(axes, f"{short[name]}{f' ({others} other kinds: none)' if others else ''}", "")
            for side, shift, form, color in (("before", -0.16, "o", COLORS[6]), ("after", 0.16, "s", COLORS[1])):
                found: list[Estimate] = [getattr(rate, side) for rate in kinds.values()]
                style: dict[str, Any] = {"fmt": form, "color": color, "markersize": 4, "capsize": 2, "label": side}
                places = [place + shift for place in range(len(kinds))]
                axes.errorbar([one.mean for one in found], places, xerr=error_bars(found), **style)
            axes.set_yticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds])
            axes.set_ylim(len(kinds) - 0.5, -0.5)
            axes.set_xlim(-0.02 * top, 1.02 * top)
        grid[-1][0].set_xlabel("share of the test completions")
        below(figure, grid[0][0], 2, "bars: 95 % for new examples")
        drawn += save_both(figure, path)
    return drawn
