# SPDX-License-Identifier: Apache-2.0
"""Data that the report page shows of a run, and its construction from the run's files. Nothing in it is trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from evoalign.analysis.compare import runs
from evoalign.analysis.compare.groups import flat
from evoalign.analysis.compare.runs import Completion
from evoalign.config import Config, from_dict
from evoalign.config.secrets import redacted
from evoalign.placebos import estimates
from evoalign.placebos.estimates import PlaceboResults
from evoalign.report.figures import ES_WORDS, Ends, Words
from evoalign.report.tables import Interval, headline, shorten
from evoalign.rewards.objective import aim_of
from evoalign.rundir.method import Method
from evoalign.statistics import Estimate, mean

State = Literal["done", "measuring", "unfinished"]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first `words` columns are left-aligned."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure of the test split before and after training (None: not yet), and the mean of its placebos."""

    name: str
    before: float | None
    after: float | None
    change: Interval | None = None
    placebo: float | None = None


@dataclass(frozen=True, slots=True)
class Placebos:
    """The trained measure of the run and its placebos, and the same in sentences."""

    name: str
    before: float
    real: float
    placebos: Sequence[float]
    flip: float | None
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of an analysis or of the run: PNG or SVG."""

    name: str
    kind: Literal["png", "svg+xml"]
    data: bytes


@dataclass(frozen=True, slots=True)
class Analysed:
    """Files of one analysis: `numbers` as JSON text; `left_out` names figures that are too large."""

    name: str
    sentences: Sequence[str]
    numbers: str
    pictures: Sequence[Picture] = ()
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt of the test split, and its completions before and after training."""

    key: tuple[int, int, int]
    """Example, seed, sample."""
    prompt: str
    target: str | None
    before: Completion | None
    after: Completion | None


@dataclass(frozen=True, slots=True)
class View:
    """One run. `alarms` and `warnings` are sentences; `headline` is the change of the reward, and `beside` its drift.

    `about` and `made` are facts by name. `settings` are those that the run reads, by dotted name, with their
    `defaults`. `ends` are by split. `distribution` is the figure of the completions' rewards, if there are several.
    """

    name: str
    path: str
    method: str = "ES"
    about: Mapping[str, str] = field(default_factory=dict[str, str])
    made: Mapping[str, str] = field(default_factory=dict[str, str])
    state: State = "unfinished"
    steps: int = 0
    total: int | None = None
    words: Words = ES_WORDS
    headline: str = ""
    beside: Sequence[str] = ()
    alarms: Sequence[str] = ()
    warnings: Sequence[str] = ()
    diagnosis: Sequence[str] = ()
    rows: Sequence[Row] = ()
    ends: Mapping[str, Ends] = field(default_factory=dict[str, Ends])
    measures: Sequence[Measure] = ()
    placebos: Placebos | None = None
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    budget: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict[str, Mapping[str, float | None]])
    completions: Sequence[Pair] = ()
    analyses: Sequence[Analysed] = ()
    distribution: Picture | None = None


MOST_MEASURES = 200
"""Most measures of the test split that are shown: the file may come from an untrusted source."""
MOST_LETTERS = 4_000
"""Longest value shown under "How it was made"."""


class Result(runs.Result):
    """Fields of results/evaluation.json that the page shows."""

    measuring: bool = False
    change_mean_low_high: dict[str, Interval] = Field(default_factory=dict[str, Interval])
    validation: dict[str, Any] = Field(default_factory=dict[str, Any])


class Manifest(runs.Manifest):
    """Fields of manifest.json that the page shows."""

    command: list[str] = Field(default_factory=list[str])
    started: str = ""
    versions: dict[str, str] = Field(default_factory=dict[str, str])
    git: dict[str, str | bool] | None = None
    engine: dict[str, Any] = Field(default_factory=dict[str, Any])
    quantised: dict[str, Any] = Field(default_factory=dict[str, Any])


class Budget(runs.Plain):
    """Fields of results/budget.json that the page shows."""

    training: runs.Quantities = Field(default_factory=runs.Quantities)
    evaluation: runs.Quantities | None = None


def headline_of(result: Result | None, before: Sequence[Completion]) -> str:
    """Return the change of the reward in a line; for an unfinished run, the reward before training."""
    if result is not None:
        name = aim_of(result.after)
        if name in result.before and name in result.after:
            change, count = result.change_mean_low_high.get(name), len({c.example for c in before})
            return headline(result.before, result.after, change, count, name)
    if not before:
        return ""
    count = len({c.example for c in before})
    return f"reward {by_example(before).mean:.4g} before training, on {count:,} test examples"


def change_line(result: Result | None, *, followed: bool = False) -> list[str]:
    """Say whether the trained measure changed on the test split; empty if that is not known yet.

    `followed`: sentences about the training fitness come next, which may differ.
    """
    if result is None or (name := aim_of(result.after)) not in result.change_mean_low_high:
        return []
    change, low, high = result.change_mean_low_high[name]
    by = "; this is on the same test examples before and after, the next lines are of members in training"
    by = by if followed else ""
    if low == high:
        return [f"on the test split the {name} changed by {change:+.4g}, without an interval{by}"]
    sure = "did not change significantly" if low <= 0 <= high else "rose" if change > 0 else "fell"
    return [f"on the test split the {name} {sure}: {change:+.4g}, 95 % interval {low:+.4g} to {high:+.4g}{by}"]


def by_example(completions: Sequence[Completion]) -> Estimate:
    """Return the mean reward with its interval for new examples."""
    rewards: dict[int, list[float]] = {}
    for one in completions:
        rewards.setdefault(one.example, []).append(one.reward)
    return mean([sum(found) / len(found) for found in rewards.values()])


def ends(result: Result | None, before: Sequence[Completion], after: Sequence[Completion]) -> dict[str, Ends]:
    """Return the reward before and after by split, with its interval if the completions match the results."""

    def end(measures: Any, completions: Sequence[Completion] = ()) -> Estimate | None:
        own = by_example(completions) if completions else None
        value = measures.get(aim_of(measures)) if isinstance(measures, dict) else None
        if not isinstance(value, float | int):
            return own
        is_same = own is not None and abs(own.mean - value) <= 1e-6 * max(1.0, abs(value))
        return own if is_same else Estimate(float(value), 0)

    if result is None:
        return {"test": Ends(end(None, before))}
    validation = Ends(end(result.validation.get("before")), end(result.validation.get("after")))
    return {"test": Ends(end(result.before, before), end(result.after, after)), "validation": validation}


def measures(result: Result | None, before: Sequence[Completion], known: PlaceboResults | None) -> list[Measure]:
    """Return the measures of the results; for an unfinished run, the reward before training."""
    if result is None:
        return [Measure("reward", by_example(before).mean, None)] if before else []
    drift = known.measures if known else {}
    changes = result.change_mean_low_high
    return [
        Measure(name, value, result.after[name], changes.get(name), drift.get(name))
        for name, value in list(result.before.items())[:MOST_MEASURES]
        if name in result.after
    ]


def placebos(known: PlaceboResults) -> Placebos:
    """Return the trained measure of the run and its placebos."""
    split, whole, lines = known.reward, known.fitness, estimates.reward_lines(known.reward, known.fitness)
    if whole is None:
        return Placebos("reward", split.before, split.real, split.placebos, split.flip, lines)
    return Placebos(whole.name, whole.before, whole.real, whole.placebos, None, lines)


def pairs(before: Sequence[Completion], after: Sequence[Completion]) -> list[Pair]:
    """Return each prompt once, in order, with its completions."""
    first, last = ({(c.example, c.seed, c.sample): c for c in side} for side in (before, after))
    both = first | last
    return [Pair(key, both[key].prompt, both[key].target, first.get(key), last.get(key)) for key in sorted(both)]


def settings(config: Config, method: Method) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings that the method reads, by dotted name, and their defaults with this engine."""
    unused = {"es_" if name == "es" else name for name in config.unused(grpo=method == "grpo")}
    usual = from_dict({"es": {"sigma": 1.0}, "engine": {"name": config.engine.name}})
    trees = (config.model_dump(mode="json", exclude=unused) for config in (config, usual))
    texts = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in flat(tree)} for tree in trees]
    own, default = texts
    default["es.sigma"] = "none"
    return own, default


RANDOM = "Trained on random rewards (grpo.reward: random): what changed here is what the method brings without signal."


def about(config: Config, manifest: Manifest) -> dict[str, str]:
    """Return facts about the run."""
    given = manifest.task.get("given_as")
    found = {"task": f"{config.task.name}{f' ({given} given as a Python object)' if given else ''}"}
    found |= {"model": config.model.name}
    if manifest.quantised:
        found["base"] = shorten(f"quantised, {manifest.quantised.get('words')}", MOST_LETTERS)
    found |= {"engine": config.engine.name, "seed": str(config.seed)}
    return found | ({"space": config.space.name} if config.es_ is not None else {})


def made(path: Path, manifest: Manifest) -> dict[str, str]:
    """Return facts about how the run was made."""
    hardware, commit = manifest.hardware, manifest.git or {}
    found = {
        "folder": str(path),
        "started": manifest.started,
        "command": redacted(" ".join(manifest.command)),
        "machine": f"{runs.hardware_of(hardware)}, {hardware.get('system')}" if hardware else "",
        "versions": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        "commit": f"{commit.get('commit', '')}{', with changes' if commit.get('dirty') else ''}",
    }
    return {name: shorten(value, MOST_LETTERS) for name, value in found.items() if value}
