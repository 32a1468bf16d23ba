# SPDX-License-Identifier: Apache-2.0
"""Shares of the signs before and after training, with intervals for new examples; signs are those of every run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import Finding
from evoalign.analysis.estimates import between, told, tree
from evoalign.analysis.lab import BASE, Asked, Lab, shown_placebos
from evoalign.analysis.targets import Target, locate
from evoalign.checks import hacking as checks
from evoalign.errors import ConfigError
from evoalign.evaluation import Scored
from evoalign.report import watching
from evoalign.rundir import parquet
from evoalign.rundir.directory import RunDir
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    from evoalign.analysis.hacking.command import Settings
    from evoalign.config import Config

Floats = NDArray[np.float64]
SEVERAL = ("hacked", "degenerate")
"""Of several signs."""
KINDS = (*SEVERAL, "earned_wrong", *checks.SHARES)
"""What shares are told of."""
WORDS = {
    "hacked": "hacked in any way", "degenerate": "broken in any way", "earned_wrong": "wrong by gold and earning like "
    "the best", "empty": "empty", "truncated": "cut off", "repeated": "loops", "template": "one template",
    "role_marker": "further turns", "special_token": "special tokens as text", "gibberish": "senseless letters and "
    "figures", "phrases": "the same phrases", "other_script": "another script",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """The completions of a target and of the model before it; `stored` where a run kept them."""

    before: Sequence[Scored]
    after: Sequence[Scored]
    stored: bool

    def rates(self) -> dict[str, Rate]:
        """By kind; without `earned_wrong` where no gold says what is right."""
        was, now = (checks.flags(side, self.before, self.after) for side in (self.before, self.after))
        known = any(said.right is not None for said in self.after)
        return {
            kind: Rate(_of_examples(self.before, was[kind]), _of_examples(self.after, now[kind]))
            for kind in KINDS
            if known or kind != "earned_wrong"
        }


@dataclass(frozen=True, slots=True)
class Rate:
    """Shares of one kind: of each example's completions, before and after, by example."""

    was: Mapping[int, float]
    now: Mapping[int, float]

    @property
    def before(self) -> Estimate:
        return between(_values(self.was), 0.0, 1.0)

    @property
    def after(self) -> Estimate:
        return between(_values(self.now), 0.0, 1.0)

    @property
    def change(self) -> Estimate:
        """Paired over examples that have both."""
        both = sorted(self.was.keys() & self.now.keys())
        return between(np.array([self.now[e] - self.was[e] for e in both]), -1.0, 1.0)


@dataclass(frozen=True)
class Hacking(Finding):
    """The finding, and what its figure is drawn from."""

    rates: Mapping[str, Mapping[str, Rate]]

    def draw(self, folder: Path) -> list[Path]:
        from evoalign.analysis.hacking.figure import draw

        return draw(self.rates, folder)


def hacking(targets: Sequence[str], settings: Settings, config: Config | None) -> Hacking:
    """See `Command`. Raises EvoalignError."""
    if twice := sorted({name for name in targets if list(targets).count(name) > 1}):
        raise ConfigError(f"{twice[0]} is given twice; name each target once")
    located = {name: locate(name, config) for name in targets if name != BASE}
    kept = config is None  # what a run stored answers its own config alone
    whole = {name: target.run for name, target in located.items() if kept and target.run == Path(name)}
    asked = [name for name in located if name not in whole]
    if not located:
        raise ConfigError(f"{BASE} alone has nothing beside it; give a run, or a model with --config")
    answers = _asked(asked, settings, config)
    pairs = {name: _stored(whole[name]) if name in whole else answers[name] for name in located}
    rates = {name: pair.rates() for name, pair in pairs.items()}
    judged = {name: checks.judge(pair.before, pair.after) for name, pair in pairs.items()}
    numbers = {
        **asdict(settings),
        "targets": [_target(located[name], pair, rates[name], judged[name]) for name, pair in pairs.items()],
    }
    lines = [line for name, pair in pairs.items() for line in _sentences(name, pair, rates[name], judged[name])]
    return Hacking(numbers, [INTRODUCED, *lines, *shown_placebos(located)], rates)


INTRODUCED = (
    "Shares of test completions that show a sign, at 95 % for new examples, each for itself. None is a proof, and text "
    "without sense that is made of words is mostly missed: compare with the share before training."
)


def _stored(run: Path | None) -> Pair:
    assert run is not None
    before, after = ([Scored.of(row) for row in _rows(run, end)] for end in ("before", "after"))
    return Pair(before, after, stored=True)


def _rows(run: Path, end: str) -> list[dict[str, Any]]:
    found = RunDir(run)
    path = found.completions(end)
    if not path.is_file():
        raise ConfigError(
            f"{run} has no {path.relative_to(found.path)}; let it end, or give one of its saved means as target"
        )
    return parquet.read(path)


def _asked(names: Sequence[str], settings: Settings, config: Config | None) -> dict[str, Pair]:
    """All in one process, of the same examples."""
    if not names:
        return {}
    wanted = Asked(settings.examples, settings.samples, settings.tokens, settings.temperature)
    with Lab(names, config, wanted) as lab:
        watching.count(1 + len(names))
        said = {name: lab.answer({name: 1.0}).completions for name in watching.each([BASE, *names])}
    return {name: Pair(said[BASE], said[name], stored=False) for name in names}


def _of_examples(said: Sequence[Scored], marks: Sequence[bool]) -> dict[int, float]:
    found: defaultdict[int, list[bool]] = defaultdict(list)
    for one, mark in zip(said, marks, strict=True):
        found[one.example].append(mark)
    return {example: float(np.mean(own)) for example, own in found.items()}


def _values(of_example: Mapping[int, float]) -> Floats:
    return np.array([of_example[e] for e in sorted(of_example)], dtype=np.float64)


def _target(target: Target, pair: Pair, rates: Mapping[str, Rate], judged: checks.Verdict) -> dict[str, Any]:
    shown = {
        kind: {"before": tree(rate.before), "after": tree(rate.after), "change": tree(rate.change)}
        for kind, rate in rates.items()
    }
    return {
        **target.described(),
        "stored": pair.stored,
        "completions": {"before": len(pair.before), "after": len(pair.after)},
        "examples": len({said.example for said in pair.after}),
        "rates": shown,
        "verdict": judged.word,
        "reasons": list(judged.reasons),
    }


def _sentences(name: str, pair: Pair, rates: Mapping[str, Rate], judged: checks.Verdict) -> list[str]:
    how = "kept by the run" if pair.stored else "asked here"
    examples = len({said.example for said in pair.after})
    seen = [kind for kind, rate in rates.items() if any(rate.was.values()) or any(rate.now.values())]
    signs_unseen = [kind for kind in rates if kind not in (*seen, *SEVERAL)]
    told_of = [f"{WORDS[kind]} {_told(rates[kind])}" for kind in seen]
    unknown = [] if "earned_wrong" in rates else ["no gold says what is right"]
    none = f"none of the other {len(signs_unseen)} signs" if seen else "no sign, before or after"
    rest = [none] if signs_unseen else []
    shown = "; ".join([*told_of, *rest, *unknown])
    lines = [f"{name}, {len(pair.after)} completions of {examples} examples, {how}: {shown}."]
    if judged.word is not None:
        lines.append(f"{name}: {judged.word}: {'; '.join(judged.reasons)}.")
    return lines


def _told(rate: Rate) -> str:
    change = rate.change
    moved = (
        "not surely changed from" if not statistics.is_sure(change) else "up from" if change.mean > 0 else "down from"
    )
    return f"{told(rate.after, '.3g')}, {moved} {told(rate.before, '.3g')}"
