# SPDX-License-Identifier: Apache-2.0
"""Check that runs can be compared, group those that differ in their seed only, and read plans."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from evoalign.analysis.compare.runs import Matching, Run
from evoalign.config import Config
from evoalign.config.base import Positive, Section
from evoalign.config.reading import YAML_CHARACTERS, parse_yaml, read_bytes
from evoalign.config.spaces import SECTIONS
from evoalign.errors import ConfigError, DataError, cut
from evoalign.rewards.objective import PREFIX, measure_of
from evoalign.rundir.identity import identity
from evoalign.rundir.method import Method
from evoalign.statistics import LEVEL

MAIN = ("method", "space.name", "grpo.tune", "grpo.rollouts", "model.name")
"""Settings that are named first in a label."""
STEP = ("es.learning_rate", "es.noise_multiplier", "es.sigma")
"""Settings of the step and its noise; a label names all of these that differ."""
REWARD = "grpo.reward"
"""A label always names it where rewards are random: such a group is a control and not the method."""
FEW = 2
"""Up to this many differing settings, a label names all."""
LENGTHS = ("es.num_generations", "grpo.max_steps")
MOST_SHOWN = 8
"""Most differing settings that an error names."""
SAME_PROMPTS = ("task.batch_size", "task.validation_data")
"""Task settings that may differ: the batch size belongs to the method, and validation examples are not compared."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in their seed only. `settings` are flat; `differing` are those in which groups differ."""

    label: str
    method: str
    runs: tuple[Run, ...]
    settings: Mapping[str, Any]
    differing: Mapping[str, Any]


def usable(run: Run, measure: str | None) -> Run:
    """Return the run. Raises ConfigError if it has no value of `measure` (None: its training objective)."""
    ends = [point for point in run.points if point.step > 0]
    if not ends:
        raise ConfigError("no evaluation after the start; finish the run, or set evaluation.every")
    measure = measure_of(run.config.task.fitness) if measure is None else measure
    if measure not in ends[-1].measures:
        raise ConfigError(f"the test split has no measure {measure!r}; it has {', '.join(ends[-1].measures)}")
    return run


def check_comparable(runs: Sequence[Run], measure: str) -> None:
    """Raise ConfigError if task, test data or evaluation settings differ."""
    first, what = runs[0], _measured(runs[0], measure)
    for run in runs[1:]:
        other = _measured(run, measure)
        odd = sorted((key for key in {*what, *other} if what.get(key) != other.get(key)), key=_task_first)
        if odd:
            differ = [f"{key} {what.get(key)!r} and {other.get(key)!r}" for key in odd[:MOST_SHOWN]]
            more = f" and {len(odd) - MOST_SHOWN} more" if len(odd) > MOST_SHOWN else ""
            raise ConfigError(
                f"{first.path} and {run.path} cannot be compared, they differ in {', '.join(differ)}{more}"
            )
    by_split: dict[int | None, Run] = {}
    for run in runs:
        task = run.config.task  # a seeded split without a test file differs from seed to seed
        seed = run.seed if task.split == "seeded" and task.test_data is None else None
        same = by_split.setdefault(seed, run) if run.questions else run
        if same.questions != run.questions:
            raise ConfigError(
                f"these runs cannot be compared: the test splits of {same.path} and {run.path} have different prompts "
                "or targets with the same settings, so their data files differed"
            )


def _task_first(key: str) -> tuple[int, str]:
    """Sort the task and its data first, then its other settings, then those of the evaluation."""
    first = ("the task", "task.name", "task.test_data", "task.train_data")
    return first.index(key) if key in first else len(first) + key.startswith("evaluation."), key


def _measured(run: Run, measure: str) -> dict[str, Any]:
    """Return the settings that determine a measure's value on the test split."""
    tree = run.config.model_dump(mode="json", include={"task", "evaluation"})
    free = ("evaluation.every", *SAME_PROMPTS, *([] if measure.startswith(PREFIX) else ["task.fitness"]))
    return {**{key: value for key, value in flat(tree) if key not in free}, "the task": run.task}


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group runs of equal settings, ES first, each with a label. Raises ConfigError for two runs of one seed."""
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(settings_of(run.config, run.method), sort_keys=True), []).append(run)
    for same in by_settings.values():
        seen: dict[int, Run] = {}
        for run in same:
            other = seen.setdefault(run.seed, run)
            if other is not run:
                raise ConfigError(
                    f"{other.path} and {run.path} have the same settings and the same seed {run.seed}; give one of them"
                )
    kinds: list[tuple[list[Run], dict[str, Any]]] = [(same, json.loads(key)) for key, same in by_settings.items()]
    kinds.sort(key=lambda kind: (kind[1]["method"] != "es", kind[1]["method"]))
    settings = [kind for _, kind in kinds]
    labels, names = labels_of(settings), sorted({key for kind in settings for key in kind})
    odd = [name for name in names if any(kind.get(name) != settings[0].get(name) for kind in settings)]
    groups: list[Group] = []
    for (same, kind), label in zip(kinds, labels, strict=True):
        runs = tuple(sorted(same, key=lambda run: run.seed))
        groups.append(Group(label, kind["method"], runs, kind, {name: kind[name] for name in odd if name in kind}))
    return groups


def settings_of(config: Config, method: Method) -> dict[str, Any]:
    """Return the flat settings that identify a run apart from its seed, with its length."""
    tree = identity(config, method)
    del tree["seed"]
    unused = set(SECTIONS) - {tree["space"]["name"]} if "space" in tree else set[str]()
    own = dict(flat({key: value for key, value in tree.items() if key not in unused}))
    ends = {} if config.stopping is None else dict(flat(config.stopping.model_dump(mode="json"), "stopping."))
    named = config.grpo.algorithm if method == "grpo" else method
    return {"method": named, **own, **ends, LENGTHS[method == "grpo"]: config.trained_by(method).steps}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested settings by dotted name."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def labels_of(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return short names: the method, then the settings in which its groups differ if these are few.

    Of many differing settings, as few are named as distinguish the groups, those in `STEP` together.
    """
    found: dict[int, str] = {}
    for method in dict.fromkeys(kind["method"] for kind in settings):
        places = [i for i, kind in enumerate(settings) if kind["method"] == method]
        parts = [_marked(settings[i], p) for i, p in zip(places, _parts([settings[j] for j in places]), strict=True)]
        found |= {i: " ".join([method.upper(), ", ".join(p)]).strip() for i, p in zip(places, parts, strict=True)}
    return [found[i] for i in range(len(settings))]


def _parts(kinds: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the settings named in the labels of one method's groups."""
    odd = [n for n in sorted({key for kind in kinds for key in kind}, key=_rank) if _differs(n, kinds)]
    main = [(n,) for n in odd if n in MAIN]
    rest = [(n,) for n in odd if n not in MAIN + STEP]
    labels: list[tuple[str, ...]] = [()] * len(kinds)
    for names in [tuple(odd)] if len(odd) <= FEW else [*main, STEP, *rest]:
        before = list(labels)
        for i, kind in enumerate(kinds):
            alike = [other for other, label in zip(kinds, before, strict=True) if label == before[i]]
            labels[i] += tuple(_setting(n, kind[n]) for n in names if n in kind and _differs(n, alike))
    return labels


def _marked(kind: Mapping[str, Any], parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts of a label with that of random rewards, if the group has these."""
    part = _setting(REWARD, kind.get(REWARD))
    return (part, *parts) if kind.get(REWARD) == "random" and part not in parts else parts


def _differs(name: str, kinds: Sequence[Mapping[str, Any]]) -> bool:
    return len({json.dumps(kind.get(name)) for kind in kinds}) > 1


def _rank(name: str) -> tuple[int, int, str]:
    """Sort `MAIN` first, then settings of the method, then the rest."""
    main = MAIN.index(name) if name in MAIN else len(MAIN)
    return main, 0 if name.startswith(("es.", "grpo.")) else 1, name


def _setting(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return str(text) if name in MAIN else f"{name.rsplit('.', 1)[-1]} {text}"


def named(groups: Sequence[Group], names: Mapping[str, str]) -> list[Group]:
    """Return the groups with the given labels. Raises ConfigError if a pattern does not match exactly one group."""
    labels = {group.label: group.label for group in groups}
    for label, pattern in names.items():
        hit: list[str] = []
        for group in groups:
            paths = [text for r in group.runs for text in (str(r.path), r.path.name, str(r.path.resolve()))]
            hit += [group.label] if any(fnmatch(path, pattern) for path in paths) else []
        if len(hit) != 1:
            found = f"runs of {len(hit)} groups ({'; '.join(hit)})" if hit else "no run"
            raise ConfigError(f"name {label}={pattern} matches {found}; it must match runs of one group")
        labels[hit[0]] = label
    if len(set(labels.values())) < len(labels):
        raise ConfigError(f"two groups have one name: {', '.join(labels.values())}")
    return [Group(labels[g.label], g.method, g.runs, g.settings, g.differing) for g in groups]


# --- plan -------------------------------------------------------------------------------------------------------------


class PlanConfig(Section):
    """The file of `evoalign compare --plan`."""

    format_version: Literal[1] = 1
    match: Matching
    """The kind of budget."""
    limit: Positive
    """The budget per run: seconds, completions, tokens or floating point operations."""
    measure: str = "reward"
    """The endpoint: a measure of the test split."""
    groups: Annotated[dict[str, str], Field(min_length=2)]
    """Label to a glob pattern for the path or the name of a group's runs."""
    primary: Annotated[list[tuple[str, str]], Field(min_length=1)]
    """Pairs of labels to decide on. Other pairs are shown only."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = LEVEL
    """Accepted chance of any false claim over the primary pairs (Holm)."""
    short: Literal["leave_out", "at_end"] = "leave_out"
    """Runs that end before the budget: leave them out, or use their end."""

    @model_validator(mode="after")
    def _check_labels(self) -> PlanConfig:
        for pair in self.primary:
            odd = [label for label in pair if label not in self.groups]
            if odd or pair[0] == pair[1]:
                raise ValueError(f"primary {list(pair)}: give two labels of groups ({', '.join(self.groups)})")
        return self

    def is_primary(self, a: str, b: str) -> bool:
        """Return whether the plan decides on a pair."""
        return any({a, b} == set(pair) for pair in self.primary)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan, its file, and the SHA-256 of the file's bytes."""

    path: Path
    sha256: str
    settings: PlanConfig


def read_plan(path: Path) -> Plan:
    """Read a plan. Raises ConfigError that names the file and the setting."""
    try:
        raw = read_bytes(path, YAML_CHARACTERS, "give a plan")
        tree: Any = parse_yaml(raw.decode("utf-8"), str(path))
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} is not a plan: it has no settings; see docs/guides/compare.md")
        return Plan(path, hashlib.sha256(raw).hexdigest(), PlanConfig.model_validate(tree))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; give a plan") from None
    except DataError as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        where = ".".join(map(str, errors[0]["loc"]))
        text = cut(f"{where}: {errors[0]['msg']}" if where else errors[0]["msg"], 300)
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ConfigError(f"{path}: {text}{more}") from None
