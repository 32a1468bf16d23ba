# SPDX-License-Identifier: Apache-2.0
"""The files of a run as the report reads them, and what of them it says: plain data in, plain data out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from evoalign.analysis.page.view import Answer, Measure, Pair, Placebos
from evoalign.config import Config, from_dict
from evoalign.config.secrets import redacted
from evoalign.placebos import estimates
from evoalign.placebos.estimates import PlaceboResults
from evoalign.report.figures import Ends
from evoalign.report.tables import Interval, headline, shorten
from evoalign.rewards.fitness import aim_of
from evoalign.rundir.method import Method
from evoalign.statistics import Estimate, mean

MOST_MEASURES = 200
"""Of the test split that are shown. A run has some ten; its file is of anybody."""
MOST_LETTERS = 4_000
"""Of what is said of how a run was made."""


class _Plain(BaseModel):
    """Fields that are not known are not read."""

    model_config = ConfigDict(extra="ignore", frozen=True)


Measures = dict[str, FiniteFloat]
Amounts = dict[str, FiniteFloat | None]


class Alarms(_Plain):
    """Of results/evaluation.json: what the completions say."""

    verdict: Literal["likely hacked", "may be hacked", "broken", "may be broken"] | None = None
    reasons: list[str] = []


class Result(_Plain):
    """results/evaluation.json, as far as the page shows it."""

    generation: Annotated[int, Field(ge=0)] | None = None
    measuring: bool = False
    alarms: Alarms = Alarms()
    before: Measures
    after: Measures
    change_mean_low_high: dict[str, Interval] = {}
    validation: dict[str, Any] = {}
    placebo: dict[str, Any] | None = None


class Manifest(_Plain):
    """manifest.json, as far as the page shows it."""

    command: list[str] = []
    started: str = ""
    versions: dict[str, str] = {}
    hardware: dict[str, str | int | list[str] | None] = {}
    git: dict[str, str | bool] | None = None
    engine: dict[str, Any] = {}
    task: dict[str, str | None] = {}


class Budget(_Plain):
    """results/budget.json, as far as the page shows it."""

    training: Amounts = {}
    evaluation: Amounts | None = None


class Completion(_Plain):
    """A row of results/completions/before.parquet or after.parquet."""

    example: int
    seed: int = 0
    sample: int = 0
    prompt: str
    target: str | None = None
    text: str
    reward: FiniteFloat
    finish_reason: str = ""
    tokens: int = 0
    right: bool | None = None


def aim(result: Result | None) -> str:
    """The measure that training was after."""
    return "reward" if result is None else aim_of(result.after)


def headline_of(result: Result | None, before: Sequence[Completion]) -> str:
    """What became of it, in a line; of a run that is not done, where it began."""
    if result is not None:
        name = aim_of(result.after)
        if name in result.before and name in result.after:
            change, count = result.change_mean_low_high.get(name), len({c.example for c in before})
            return headline(result.before, result.after, change, count, name)
    if not before:
        return ""
    return (
        f"reward {by_example(before).mean:.4g} before training, on {len({c.example for c in before}):,} test examples"
    )


def change_line(result: Result | None, *, followed: bool = False) -> list[str]:
    """Whether what was trained for surely changed on the test split; nothing where that is not known yet.

    `followed`: sentences about the training come next, whose fitness may go another way.
    """
    if result is None or (name := aim_of(result.after)) not in result.change_mean_low_high:
        return []
    change, low, high = result.change_mean_low_high[name]
    by = "; go by this, the same examples before and after: what follows is of members and training examples"
    by = by if followed else ""
    if low == high:
        return [f"on the test split the {name} changed by {change:+.4g}, without an interval{by}"]
    sure = "is not sure to have changed" if low <= 0 <= high else "rose" if change > 0 else "fell"
    return [f"on the test split the {name} {sure}: {change:+.4g}, 95 % interval {low:+.4g} to {high:+.4g}{by}"]


def beside(path: Path, method: Method, result: Result | None, known: PlaceboResults | None) -> list[str]:
    """A gain of ES is told with what the noise alone brings."""
    if method != "es" or result is None:
        return []
    if known is None:
        return [f"No placebo was measured, so how much of it is drift is not known: evoalign placebo {path}"]
    whole = known.fitness
    return [estimates.sentence(known.reward) if whole is None else whole.line(), estimates.beyond_drift(known.reward)]


def by_example(said: Sequence[Completion]) -> Estimate:
    """The mean reward, and its interval for new examples."""
    rewards: dict[int, list[float]] = {}
    for one in said:
        rewards.setdefault(one.example, []).append(one.reward)
    return mean([sum(found) / len(found) for found in rewards.values()])


def ends(result: Result | None, before: Sequence[Completion], after: Sequence[Completion]) -> dict[str, Ends]:
    """The reward of the completions, with its interval, where that is what the results say; else what they say."""

    def end(said: Sequence[Completion], measures: Measures | None) -> Estimate | None:
        own = by_example(said) if said else None
        value = None if measures is None else measures.get(aim_of(measures))
        if value is None or (own is not None and abs(own.mean - value) <= 1e-6 * max(1.0, abs(value))):
            return own
        return Estimate(value, 0)

    found = {"test": Ends(end(before, result.before if result else None), end(after, result.after) if result else None)}
    validation = {} if result is None else result.validation
    sides = [validation.get(name) for name in ("before", "after")]
    values = [side.get(aim_of(side)) if isinstance(side, dict) else None for side in sides]
    estimates = [Estimate(float(v), 0) if isinstance(v, float | int) else None for v in values]
    return found | {"validation": Ends(*estimates)}


def measures(result: Result | None, before: Sequence[Completion], known: PlaceboResults | None) -> list[Measure]:
    """Those that the results have before and after; of a run that is not done, the reward of the start."""
    if result is None:
        return [Measure("reward", by_example(before).mean, None)] if before else []
    drift = known.measures if known else {}
    changes = result.change_mean_low_high
    return [
        Measure(name, value, result.after[name], changes.get(name), drift.get(name))
        for name, value in list(result.before.items())[:MOST_MEASURES]
        if name in result.after
    ]


def placebos(known: PlaceboResults | None) -> Placebos | None:
    """What was trained for, in the run and its placebos."""
    if known is None:
        return None
    split = known.reward
    lines = [estimates.sentence(split), estimates.beyond_drift(split)]
    if known.fitness is None:
        return Placebos("reward", split.before, split.real, split.placebos, split.flip, lines)
    whole = known.fitness
    lines = [whole.line(), f"the reward: {lines[0]}", *lines[1:]]
    return Placebos(whole.name, whole.before, whole.real, whole.placebos, None, lines)


def pairs(before: Sequence[Completion], after: Sequence[Completion]) -> list[Pair]:
    """Each question once, in order, with the answers that are there."""
    first, last = ({(c.example, c.seed, c.sample): c for c in said} for said in (before, after))
    pairs: list[Pair] = []
    for key in sorted(first.keys() | last.keys()):
        asked = last.get(key) or first[key]
        answers = (None if c is None else _answer(c) for c in (first.get(key), last.get(key)))
        pairs.append(Pair(key, asked.prompt, asked.target, *answers))
    return pairs


def _answer(said: Completion) -> Answer:
    return Answer(said.text, said.reward, said.right, said.finish_reason, said.tokens)


def settings(config: Config | None, method: Method) -> tuple[dict[str, str], dict[str, str]]:
    """Those that the method reads, by dotted name, and their defaults with this engine."""
    if config is None:
        return {}, {}
    unused = {"es_" if name == "es" else name for name in config.unused(grpo=method == "grpo")}
    usual = from_dict({"es": {"sigma": 1.0}, "engine": {"name": config.engine.name}}, needs_es=False)
    own, default = (_flat(c.model_dump(mode="json", exclude=unused)) for c in (config, usual))
    default["es.sigma"] = "none"
    return own, default


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def total(config: Config | None, method: Method) -> int | None:
    """Generations or steps that the config asks for."""
    if config is None:
        return None
    if method == "grpo":
        return config.grpo.max_steps
    return config.es_.num_generations if config.es_ is not None else None


def about(config: Config | None, manifest: Manifest) -> dict[str, str]:
    """What it is."""
    if config is None:
        return {}
    given = manifest.task.get("given_as")
    found = {"task": f"{config.task.name}{f' ({given} given as a Python object)' if given else ''}"}
    found |= {"model": config.model.name, "engine": config.engine.name, "seed": str(config.seed)}
    return found | ({"space": config.space.name} if config.es_ is not None else {})


def made(path: Path, manifest: Manifest) -> dict[str, str]:
    """Where and with what it was made."""
    hardware, commit = manifest.hardware, manifest.git or {}
    gpus = hardware.get("gpus")
    where = ", ".join(gpus) if isinstance(gpus, list) and gpus else f"{hardware.get('cores')} CPU cores"
    found = {
        "folder": str(path),
        "started": manifest.started,
        "command": redacted(" ".join(manifest.command)),
        "machine": f"{where}, {hardware.get('system')}" if hardware else "",
        "versions": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        "commit": f"{commit.get('commit', '')}{', with changes' if commit.get('dirty') else ''}",
    }
    return {name: shorten(value, MOST_LETTERS) for name, value in found.items() if value}
