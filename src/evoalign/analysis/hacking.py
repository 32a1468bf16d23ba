# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze hacking`: shares of completions that look as if the reward was earned without the task.

The signs are those of `evoalign.checks.hacking`, as in every run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign import statistics
from evoalign.analysis.base import BASE, Analysis, Finding, check_unique, error_bars, row
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.report.figures import COLORS, canvas, frame, save_both
from evoalign.report.tables import shorten, visible
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
WIDTH, ROW, MOST, LABEL = 8.5, 0.28, 6, 70
"""Width of the figure and height of a row in inches, targets per figure, characters of a name."""
LEAST = 0.05
"""Smallest upper end of the axis of shares."""


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
        kinds = (*SEVERAL, "earned_wrong", *hacking.SHARES)
        if all(one.right is None for one in self.after):
            kinds = tuple(kind for kind in kinds if kind != "earned_wrong")
        return {kind: Rate(_by_example(self.before, was[kind]), _by_example(self.after, now[kind])) for kind in kinds}


@dataclass(frozen=True, slots=True)
class Rate:
    """Share of each example's completions that are of one kind, before and after training, by example."""

    was: Mapping[int, float]
    now: Mapping[int, float]

    @property
    def before(self) -> Estimate:
        return statistics.between(np.array([self.was[e] for e in sorted(self.was)]), 0.0, 1.0)

    @property
    def after(self) -> Estimate:
        return statistics.between(np.array([self.now[e] for e in sorted(self.now)]), 0.0, 1.0)

    @property
    def change(self) -> Estimate:
        """The change, paired over examples that have both."""
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
        located = {name: locate(name, config) for name in targets if name != BASE}
        if not located:
            raise ConfigError(f"{BASE} alone has no other model to compare; add a run, or a model with --config")
        runs = {name: t.run for name, t in located.items() if config is None and t.run and t.run == Path(name)}
        pairs = {name: _stored(run) for name, run in runs.items()}
        pairs |= _evaluated([name for name in located if name not in runs], settings, config)
        rates = {name: pairs[name].rates() for name in located}
        rows: list[dict[str, Any]] = []
        lines = [INTRODUCTION]
        for name, target in located.items():
            pair, judged = pairs[name], hacking.judge(pairs[name].before, pairs[name].after)
            examples = len({one.example for one in pair.after})
            shown = {
                kind: {"before": rate.before.tree(), "after": rate.after.tree(), "change": rate.change.tree()}
                for kind, rate in rates[name].items()
            }
            rows.append(
                {
                    **target.described(),
                    "stored": pair.stored,
                    "examples": examples,
                    "completions": {"before": len(pair.before), "after": len(pair.after)},
                    "rates": shown,
                    "verdict": judged.word,
                    "reasons": list(judged.reasons),
                }
            )
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


def _by_example(completions: Sequence[Scored], marks: Sequence[bool]) -> dict[int, float]:
    found: defaultdict[int, list[bool]] = defaultdict(list)
    for one, mark in zip(completions, marks, strict=True):
        found[one.example].append(mark)
    return {example: float(np.mean(own)) for example, own in found.items()}


def _row(label: str, rates: Mapping[str, Rate]) -> str:
    cells: dict[str, object] = {}
    for kind, rate in rates.items():
        if rate.is_seen:
            sure, mean = statistics.is_sure(rate.change), rate.change.mean
            change = "no significant change" if not sure else "up" if mean > 0 else "down"
            cells[kind.replace("_", " ")] = f"{rate.after}, {change} from {rate.before}"
    cells["other signs"] = "none"
    if "earned_wrong" not in rates:
        cells["gold answers"] = "none"
    return row(label, cells)


def draw(rates: Mapping[str, Mapping[str, Rate]], folder: Path) -> list[Path]:
    """Draw the share of each kind before and after training: a panel per target, a file for each `MOST` targets."""
    names = list(rates)
    drawn: list[Path] = []
    for number, start in enumerate(range(0, len(names), MOST), 1):
        file = "hacking.png" if number == 1 else f"hacking_{number}.png"
        drawn += _draw({name: rates[name] for name in names[start : start + MOST]}, folder / file)
    return drawn


def _draw(rates: Mapping[str, Mapping[str, Rate]], path: Path) -> list[Path]:
    shown = {name: {k: r for k, r in kinds.items() if k in SEVERAL or r.is_seen} for name, kinds in rates.items()}
    sides = [one for kinds in shown.values() for rate in kinds.values() for one in (rate.before, rate.after)]
    ends = [one.mean if one.high is None else one.high for one in sides]
    top = min(1.0, max(LEAST, 1.1 * max(ends, default=0.0)))
    heights = [ROW * len(kinds) + 0.9 for kinds in shown.values()]
    figure = canvas(WIDTH, sum(heights) + 0.7, layout="constrained")
    grid = figure.subplots(len(rates), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (name, kinds) in zip(grid[:, 0], shown.items(), strict=True):
        others = len(rates[name]) - len(kinds)
        frame(axes, f"{shorten(visible(name), LABEL)}{f' ({others} other kinds: none)' if others else ''}", "")
        for place, rate in enumerate(kinds.values()):
            for found, shift, label, form, color in (
                (rate.before, -0.16, "before", "o", COLORS[6]),
                (rate.after, 0.16, "after", "s", COLORS[1]),
            ):
                style: dict[str, Any] = {"fmt": form, "color": color, "markersize": 4, "capsize": 2}
                axes.errorbar(
                    [found.mean], [place + shift], xerr=error_bars([found]), label=None if place else label, **style
                )
        axes.set_yticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds])
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.set_xlim(-0.02 * top, 1.02 * top)
    grid[-1][0].set_xlabel("share of the test completions")
    handles, labels = grid[0][0].get_legend_handles_labels()
    title = "bars: 95 % for new examples"
    figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, title=title, alignment="left")
    return save_both(figure, path)
