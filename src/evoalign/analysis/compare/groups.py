# SPDX-License-Identifier: Apache-2.0
"""Which runs can be compared, and which are seeds of one group."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from evoalign.analysis.compare.runs import Run
from evoalign.config import Config
from evoalign.config.spaces import SECTIONS
from evoalign.errors import ConfigError
from evoalign.rewards.objective import PREFIX, measure_of
from evoalign.rundir.identity import identity
from evoalign.rundir.method import Method

MAIN = ("method", "space.name", "grpo.tune", "grpo.rollouts", "model.name")
"""Settings that name a group before others do."""
STEP = ("es.learning_rate", "es.noise_multiplier", "es.sigma")
"""Settings of one thing, the step and its noise, of which a group names all that differ."""
FEW = 2
"""Settings that differ and are all named."""
LENGTHS = ("es.num_generations", "grpo.max_steps")
SAME_PROMPTS = ("task.batch_size", "task.validation_data")
"""Of the task, what may differ: how many training examples a generation takes is a matter of the method, and examples
of a file to choose by are none that are compared."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in their seed alone. `settings` are flat, `differing` those in which groups differ."""

    label: str
    method: str
    runs: tuple[Run, ...]
    settings: Mapping[str, Any]
    differing: Mapping[str, Any]


def usable(run: Run, measure: str | None) -> Run:
    """Raise DataError or ConfigError where a run has nothing to compare; None is what it was trained for."""
    ends = [point for point in run.points if point.step > 0]
    if not ends:
        raise ConfigError("it was never evaluated after its start; finish it, or set evaluation.every")
    measure = measure_of(run.config.task.fitness) if measure is None else measure
    if measure not in ends[-1].measures:
        raise ConfigError(f"its test split has no measure {measure!r}; it has {', '.join(ends[-1].measures)}")
    return run


def check_comparable(runs: Sequence[Run], measure: str) -> None:
    """Raise ConfigError where task, data or evaluation are not the same, or one run is there twice."""
    first, what = runs[0], _measured(runs[0], measure)
    for run in runs[1:]:
        other = _measured(run, measure)
        for key in sorted({*what, *other}):
            if what.get(key) != other.get(key):
                raise ConfigError(
                    f"these runs cannot be compared: {key} is {what.get(key)!r} in {first.path} and "
                    f"{other.get(key)!r} in {run.path}"
                )
    asked: dict[int | None, Run] = {}
    for run in runs:
        task = run.config.task  # a seeded split without a file of its own differs from seed to seed
        seed = run.seed if task.split == "seeded" and task.test_data is None else None
        same = asked.setdefault(seed, run) if run.questions else run
        if same.questions != run.questions:
            raise ConfigError(
                f"these runs cannot be compared: the test split of {run.path} has other prompts or targets than that "
                f"of {same.path}, though the settings of both are the same; their data files were not"
            )


def _measured(run: Run, measure: str) -> dict[str, Any]:
    """The settings that decide what a number on the test split means: `task.fitness` where it gives that number."""
    tree = run.config.model_dump(mode="json", include={"task", "evaluation"})
    unasked = ("evaluation.every", *SAME_PROMPTS, *([] if measure.startswith(PREFIX) else ["task.fitness"]))
    flat = {key: value for key, value in _flat(tree) if key not in unasked}
    return {**flat, "the task": run.task}


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs of equal settings, those of ES first; with labels of their own."""
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(settings_of(run.config, run.method), sort_keys=True), []).append(run)
    for same in by_settings.values():
        _check_seeds(same)
    kinds: list[tuple[list[Run], dict[str, Any]]] = [(same, json.loads(key)) for key, same in by_settings.items()]
    kinds.sort(key=lambda kind: kind[1]["method"])
    settings = [kind for _, kind in kinds]
    labels, names = labels_of(settings), sorted({key for kind in settings for key in kind})
    odd = [name for name in names if any(kind.get(name) != settings[0].get(name) for kind in settings)]
    return [
        Group(label, kind["method"], tuple(sorted(same, key=lambda run: run.seed)), kind,
              {name: kind[name] for name in odd if name in kind})
        for (same, kind), label in zip(kinds, labels, strict=True)
    ]  # fmt: skip


def settings_of(config: Config, method: Method) -> dict[str, Any]:
    """What makes a run what it is, but for its seed; its length is a part of it, since the end is compared too."""
    tree = identity(config, method)
    del tree["seed"]
    length = config.es.num_generations if method == "es" else config.grpo.max_steps
    unused = set(SECTIONS) - {tree["space"]["name"]} if "space" in tree else set[str]()
    flat = dict(_flat({key: value for key, value in tree.items() if key not in unused}))
    ends = {} if config.stopping is None else dict(_flat(config.stopping.model_dump(mode="json"), "stopping."))
    return {"method": method, **flat, **ends, LENGTHS[method == "grpo"]: length}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def _check_seeds(same: Sequence[Run]) -> None:
    seen: dict[int, Run] = {}
    for run in same:
        other = seen.setdefault(run.seed, run)
        if other is not run:
            raise ConfigError(
                f"{other.path} and {run.path} have the same settings and the same seed {run.seed}: as two they would "
                "count one result twice; give one of them"
            )


def labels_of(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Short names: the method, then the settings in which its groups differ, where these are few.

    Where they are many, as few of them as tell the groups apart, with those of the step together: one alone would be
    taken for what the groups are about.
    """
    found: dict[int, str] = {}
    for method in dict.fromkeys(kind["method"] for kind in settings):
        places = [i for i, kind in enumerate(settings) if kind["method"] == method]
        parts = _parts([settings[i] for i in places])
        found |= {i: " ".join([method.upper(), ", ".join(p)]).strip() for i, p in zip(places, parts, strict=True)}
    return [found[i] for i in range(len(settings))]


def _parts(kinds: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """What the labels of groups of one method say of their settings."""
    odd = [n for n in sorted({key for kind in kinds for key in kind}, key=_rank) if _differs(n, kinds)]
    main = [(n,) for n in odd if n in MAIN]
    rest = [(n,) for n in odd if n not in MAIN + STEP]
    labels: list[tuple[str, ...]] = [()] * len(kinds)
    for names in [tuple(odd)] if len(odd) <= FEW else [*main, STEP, *rest]:
        before = list(labels)
        for i, kind in enumerate(kinds):
            alike = [other for other, label in zip(kinds, before, strict=True) if label == before[i]]
            labels[i] += tuple(_said(n, kind[n]) for n in names if n in kind and _differs(n, alike))
    return labels


def _differs(name: str, kinds: Sequence[Mapping[str, Any]]) -> bool:
    return len({json.dumps(kind.get(name)) for kind in kinds}) > 1


def _rank(name: str) -> tuple[int, int, str]:
    """First what a group is mainly, then settings of the method, then the rest."""
    main = MAIN.index(name) if name in MAIN else len(MAIN)
    return main, 0 if name.startswith(("es.", "grpo.")) else 1, name


def _said(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return str(text) if name in MAIN else f"{name.rsplit('.', 1)[-1]} {text}"


def at_the_end_alone(groups: Sequence[Group]) -> list[Group]:
    """Groups of which no run was evaluated on the way."""
    return [group for group in groups if not any(run.on_the_way for run in group.runs)]


def named(groups: Sequence[Group], names: Mapping[str, str]) -> list[Group]:
    """The groups with labels that were asked for. Raises ConfigError where a pattern is not of exactly one group."""
    labels = {group.label: group.label for group in groups}
    for label, pattern in names.items():
        hit = [g.label for g in groups if any(_fits(run.path, pattern) for run in g.runs)]
        if len(hit) != 1:
            found = f"runs of {len(hit)} groups ({'; '.join(hit)})" if hit else "no run"
            raise ConfigError(f"name {label}={pattern} fits {found}; it has to fit runs of one group")
        labels[hit[0]] = label
    if len(set(labels.values())) < len(labels):
        raise ConfigError(f"two groups would have one name: {', '.join(labels.values())}")
    return [Group(labels[g.label], g.method, g.runs, g.settings, g.differing) for g in groups]


def _fits(path: Path, pattern: str) -> bool:
    return any(fnmatch(text, pattern) for text in (str(path), path.name, str(path.resolve())))
