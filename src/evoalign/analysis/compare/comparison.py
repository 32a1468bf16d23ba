# SPDX-License-Identifier: Apache-2.0
"""ES and GRPO runs side by side under matched budgets, with what their seeds allow to say. Reads files, runs nothing.

Every run is taken at its last evaluation that lies within the budget all of them reached. Between two evaluations
nothing is interpolated, since the model in between was never measured and rewards move in steps, and no later one is
looked at, since that model cost more than the budget. The price is that a run evaluated seldom is taken early; the
share of the budget it had really used is therefore shown beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, get_args

from evoalign.analysis.compare.runs import Point, Run, find, read
from evoalign.analysis.compare.statistics import Estimate, Pair, adjust, band, estimate
from evoalign.analysis.compare.statistics import compare as compare_groups
from evoalign.cost.budget import Cost
from evoalign.errors import ConfigError, EvoalignError
from evoalign.rundir.identity import identity

Matching = Literal["wall", "completions", "tokens", "flops"]
MATCHINGS: tuple[Matching, ...] = get_args(Matching)
AMOUNTS: Mapping[Matching, Callable[[Cost], float | None]] = {
    "wall": lambda cost: cost.wall_seconds,
    "completions": lambda cost: cost.completions,
    "tokens": lambda cost: cost.prompt_tokens + cost.generated_tokens,
    "flops": lambda cost: flops_of(cost),
}
"""What is counted of the training: seconds on the wall; completions; tokens of prompts and completions; floating point
operations forward and backward."""
LOW_SHARE = 0.8
"""Below so much of the budget used, the answer is to evaluate more often."""
WHY = 400
"""Characters of an error that are kept: it may quote a file of any length."""
MAIN = ("method", "space.name", "grpo.tune", "grpo.rollouts", "model.name")
"""Settings that name a group before others do."""
LENGTHS = ("es.num_generations", "grpo.max_steps")
SAME_PROMPTS = ("task.batch_size",)
"""Of the task, what may differ: how many training examples a generation takes is a matter of the method."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in their seed alone. `settings` are flat, `differing` those in which groups differ."""

    label: str
    method: str
    runs: tuple[Run, ...]
    settings: Mapping[str, Any]
    differing: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Taken:
    """One run at a matched budget: its last point within, and the share of the budget used by then."""

    run: Run
    point: Point
    share: float


@dataclass(frozen=True, slots=True)
class Standing:
    """One group at a matched budget; `estimate` is None where none of its runs was evaluated within."""

    group: Group
    taken: tuple[Taken, ...]
    estimate: Estimate | None

    @property
    def share(self) -> float:
        """Mean share of the budget used; 0 where nothing was taken."""
        return sum(t.share for t in self.taken) / len(self.taken) if self.taken else 0.0


@dataclass(frozen=True, slots=True)
class Match:
    """All groups at one budget. `by` None: each run at its own end, whatever it took. `limit` is the budget."""

    by: Matching | None
    limit: float | None
    standings: tuple[Standing, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """A group's mean over seeds as a step function of the budget, with a 95 % t interval at each place.

    It covers what all its runs did; `steps` are those of each run, in the order of `Group.runs`.
    """

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    steps: tuple[tuple[tuple[float, float], ...], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was found. `end` compares each run at its end; `left_out` are runs that could not be read."""

    measure: str
    groups: tuple[Group, ...]
    matches: tuple[Match, ...]
    end: Match
    left_out: tuple[tuple[Path, str], ...]
    notes: tuple[str, ...]

    @property
    def measures(self) -> list[str]:
        """Measures that every run has at its end; the compared one first."""
        ends = [run.points[-1].measures for group in self.groups for run in group.runs]
        return [self.measure, *(n for n in ends[0] if n != self.measure and all(n in end for end in ends))]


def compare(
    runs: str | Path | Iterable[str | Path],
    match: Matching | None = None,
    *,
    measure: str = "reward",
    names: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare runs, or all runs below folders, at equal budgets; None: at each of the four.

    `measure` is one of the test split. `names` gives a group another label: label to a pattern, as in shells, of the
    path or the name of its runs. Raises ConfigError where runs cannot be compared, and names the setting.
    """
    if match is not None and match not in MATCHINGS:
        raise ConfigError(f"match {match!r}: use {', '.join(MATCHINGS)}")
    paths, left_out = find([runs] if isinstance(runs, str | Path) else runs), list[tuple[Path, str]]()
    found: list[Run] = []
    for path in paths:
        try:
            found.append(_usable(read(path), measure))
        except (EvoalignError, OSError) as error:
            left_out.append((path, str(error)[:WHY]))
    if not found:
        raise ConfigError("no run can be read:\n" + "\n".join(f"{path}: {why}" for path, why in left_out))
    _check_comparable(found)
    groups = _named(_groups(found), names or {})
    matches = [_match(groups, by, measure) for by in ((match,) if match else MATCHINGS)]
    return Comparison(
        measure, tuple(groups), tuple(matches), _match(groups, None, measure), tuple(left_out),
        tuple(_notes(groups)),
    )  # fmt: skip


def amount(by: Matching, cost: Cost | None) -> float | None:
    """How much of a budget a cost is; None where it is not known."""
    found = None if cost is None else AMOUNTS[by](cost)
    return None if found is None else float(found)


def flops_of(cost: Cost) -> float | None:
    """Forward and backward together; None where the formula does not know the model."""
    known = cost.forward_flops is not None and cost.backward_flops is not None
    return (cost.forward_flops or 0.0) + (cost.backward_flops or 0.0) if known else None


def curve(group: Group, by: Matching, measure: str) -> Curve | None:
    """A group's curve; None where a budget is not known, or no stretch of it has a measurement of every run."""
    span = _span(group, by, measure)
    if span is None or span[0] > span[1]:
        return None
    first, last = span
    steps = tuple(tuple(_steps(run, by, measure)) for run in group.runs)
    x = sorted({at for s in steps for at, _ in s if first <= at <= last} | {first, last})
    bands = [band([_at(s, here) for s in steps]) for here in x]
    mean, low, high = zip(*bands, strict=True)
    return Curve(tuple(x), mean, low, high, steps)


def _span(group: Group, by: Matching, measure: str) -> tuple[float, float] | None:
    """From the latest first measurement of its runs to the least that one of them took; None where not known.

    The first may lie beyond: of a run that is not finished, only the reward of the start is kept.
    """
    firsts = [next((at for at, _ in _steps(run, by, measure)), None) for run in group.runs]
    totals = [amount(by, run.cost) for run in group.runs]
    known = [at for at in firsts if at is not None], [total for total in totals if total is not None]
    return (max(known[0]), min(known[1])) if all(len(k) == len(group.runs) for k in known) else None


def _steps(run: Run, by: Matching, measure: str) -> Iterator[tuple[float, float]]:
    for point in run.points:
        where = amount(by, point.cost)
        if where is not None and measure in point.measures:
            yield where, point.measures[measure]


def _at(steps: Sequence[tuple[float, float]], where: float) -> float:
    """Of a step function: the value of the last step that is not beyond."""
    return [value for at, value in steps if at <= where][-1]


# --- which runs can be compared, and which are one group --------------------------------------------------------------


def _usable(run: Run, measure: str) -> Run:
    """Raise DataError or ConfigError where a run has nothing to compare."""
    ends = [point for point in run.points if point.step > 0]
    if not ends:
        raise ConfigError("it was never evaluated after its start; finish it, or set evaluation.every")
    if measure not in ends[-1].measures:
        raise ConfigError(f"its test split has no measure {measure!r}; it has {', '.join(ends[-1].measures)}")
    return run


def _check_comparable(runs: Sequence[Run]) -> None:
    """Raise ConfigError where task, data or evaluation are not the same, or one run is there twice."""
    first, what = runs[0], _measured(runs[0])
    for run in runs[1:]:
        other = _measured(run)
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


def _measured(run: Run) -> dict[str, Any]:
    """The settings that decide what a number on the test split means."""
    tree = run.config.model_dump(mode="json", include={"task", "evaluation"})
    flat = {key: value for key, value in _flat(tree) if key not in ("evaluation.every", *SAME_PROMPTS)}
    return {**flat, "the task": run.task}


def _groups(runs: Sequence[Run]) -> list[Group]:
    """Runs of equal settings, those of ES first; with labels of their own."""
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    for same in by_settings.values():
        _check_seeds(same)
    kinds: list[tuple[list[Run], dict[str, Any]]] = [(same, json.loads(key)) for key, same in by_settings.items()]
    kinds.sort(key=lambda kind: kind[1]["method"])
    settings = [kind for _, kind in kinds]
    labels, names = _labels(settings), sorted({key for kind in settings for key in kind})
    odd = [name for name in names if any(kind.get(name) != settings[0].get(name) for kind in settings)]
    return [
        Group(label, kind["method"], tuple(sorted(same, key=lambda run: run.seed)), kind,
              {name: kind[name] for name in odd if name in kind})
        for (same, kind), label in zip(kinds, labels, strict=True)
    ]  # fmt: skip


def _settings(run: Run) -> dict[str, Any]:
    """What makes a run what it is, but for its seed; its length is a part of it, since the end is compared too."""
    tree = identity(run.config, run.method)
    del tree["seed"]
    config = run.config
    length = config.es.num_generations if run.method == "es" else config.grpo.max_steps
    spaces = {"lora", "lowrank", "full"} - {tree.get("space", {}).get("name", "lora")}
    flat = dict(_flat({key: value for key, value in tree.items() if key not in spaces}))
    return {"method": run.method, **flat, LENGTHS[run.method == "grpo"]: length}


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


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Short names: the method, then as few of the settings in which groups differ as tell them apart."""
    labels: list[tuple[str, ...]] = [(kind["method"].upper(),) for kind in settings]
    for name in sorted({key for kind in settings for key in kind if key != "method"}, key=_rank):
        before = list(labels)
        for i, kind in enumerate(settings):
            alike = [other for other, label in zip(settings, before, strict=True) if label == before[i]]
            if name in kind and len({json.dumps(other.get(name)) for other in alike}) > 1:
                labels[i] = (*before[i], _said(name, kind[name]))
    return [label[0] + (" " + ", ".join(label[1:]) if label[1:] else "") for label in labels]


def _rank(name: str) -> tuple[int, int, str]:
    """First what a group is mainly, then settings of the method, then the rest."""
    main = MAIN.index(name) if name in MAIN else len(MAIN)
    return main, 0 if name.startswith(("es.", "grpo.")) else 1, name


def _said(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return str(text) if name in MAIN else f"{name.rsplit('.', 1)[-1]} {text}"


def _named(groups: Sequence[Group], names: Mapping[str, str]) -> list[Group]:
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


# --- equal budgets ----------------------------------------------------------------------------------------------------


def _match(groups: Sequence[Group], by: Matching | None, measure: str) -> Match:
    if by is None:
        limit, notes = None, list[str]()
        takers = [_at_end(group) for group in groups]
    else:
        limit, notes = _limit(groups, by)
        takers = [_within(group, by, limit) for group in groups]
        notes += _seldom(groups, takers, by) if limit is not None else []
        notes += [_apart(g, measure) for g in groups if (span := _span(g, by, measure)) and span[0] > span[1]]
    standings = [
        Standing(g, tuple(taken), estimate([t.point.measures[measure] for t in taken]) if taken else None)
        for g, taken in zip(groups, takers, strict=True)
    ]
    values = {s.group.label: {t.run.seed: t.point.measures[measure] for t in s.taken} for s in standings if s.taken}
    labels = list(values)
    pairs = [
        compare_groups(a, values[a], b, values[b]) for i, a in enumerate(labels) for b in labels[i + 1 :]
    ]  # fmt: skip
    return Match(by, limit, tuple(standings), tuple(adjust(pairs)), tuple(notes))


def _at_end(group: Group) -> list[Taken]:
    """Runs that have come to their end, there."""
    return [Taken(run, run.points[-1], 1.0) for run in group.runs if run.finished]


def _limit(groups: Sequence[Group], by: Matching) -> tuple[float | None, list[str]]:
    """The largest budget that all runs reached, and who sets it. Runs that do not say what they took are left out."""
    runs = [run for group in groups for run in group.runs]
    unknown = [run for run in runs if not amount(by, run.cost)]
    notes = [
        f"{run.path} does not say what all of it took in {by}, which is so unknown: it is left out here"
        for run in unknown
    ]
    reached = {run.path: amount(by, run.cost) or 0.0 for run in runs if run not in unknown}
    if not reached:
        return None, [*notes, "no run says what it took: nothing can be matched"]
    least = min(reached, key=lambda path: reached[path])
    alike = next(sorted(reached.get(r.path, 0.0) for r in g.runs) for g in groups if least in [r.path for r in g.runs])
    if reached[least] < 0.5 * alike[len(alike) // 2]:
        notes.append(
            f"{least} sets the budget, with less than half of what its group took: give it more, or leave it out"
        )
    return reached[least], notes


def _within(group: Group, by: Matching, limit: float | None) -> list[Taken]:
    """Each run at its last evaluation within the budget, the start not counted: of it, every run has the same."""
    taken: list[Taken] = []
    for run in group.runs:
        if limit is None or not amount(by, run.cost):
            continue
        spent = [(point, amount(by, point.cost)) for point in run.points if point.step > 0]
        inside = [(point, cost) for point, cost in spent if cost is not None and cost <= limit * (1 + 1e-9)]
        if inside:
            point, cost = inside[-1]
            taken.append(Taken(run, point, min(1.0, cost / limit)))
    return taken


def _seldom(groups: Sequence[Group], takers: Sequence[Sequence[Taken]], by: Matching) -> list[str]:
    """Of runs that say what they took; the others are named where the budget is set."""
    notes: list[str] = []
    for group, taken in zip(groups, takers, strict=True):
        missing = [run for run in group.runs if amount(by, run.cost) and run not in [t.run for t in taken]]
        share = sum(t.share for t in taken) / len(taken) if taken else 1.0
        if missing:
            count = "no run" if not taken else f"{len(missing)} of {len(group.runs)} runs"
            was = "was" if not taken else "were not"
            notes.append(f"{group.label}: {count} {was} evaluated within this budget; {_finer(missing)}")
        if share < LOW_SHARE:
            late = _finer([t.run for t in taken])
            notes.append(f"{group.label} is taken after {share:.0%} of the budget on average; {late}")
    return notes


def _finer(runs: Sequence[Run]) -> str:
    """What would have runs measured nearer to a budget."""
    if all(run.config.evaluation.every == 1 for run in runs):
        return "each step is evaluated already, a step is coarser than that"
    return "set evaluation.every lower" if any(run.config.evaluation.every for run in runs) else "set evaluation.every"


def _apart(group: Group, measure: str) -> str:
    more = "" if all(run.config.evaluation.every == 1 for run in group.runs) else f", or {_finer(group.runs)}"
    return (
        f"{group.label} has no curve: one of its runs ended before {measure} was first measured in another; let them "
        f"finish{more}"
    )


def _notes(groups: Sequence[Group]) -> list[str]:
    """What a reader has to know beside the numbers."""
    runs = [run for group in groups for run in group.runs]
    notes = [
        f"{run.path} is not finished: used up to step {run.steps}, and not in the comparison at the end"
        for run in runs
        if not run.finished
    ]
    seldom = [run for run in runs if run.on_the_way == 0 and run.finished]
    if seldom:
        which = f"{seldom[0].path} was" if len(seldom) == 1 else f"{len(seldom)} of {len(runs)} runs were"
        notes.append(f"{which} not evaluated on the way (evaluation.every): known at the end alone")
    places = sorted({run.hardware for run in runs if run.hardware})
    if len(places) > 1:
        notes.append(f"runs were made on different hardware ({'; '.join(places)}): their seconds do not compare")
    if len({group.settings.get("model.name") for group in groups}) > 1:
        notes.append("groups start from different models: what they reach is not the method's doing alone")
    lonely = [group.label for group in groups if len(group.runs) < 3]
    if lonely:
        notes.append(f"fewer than three seeds, so no interval: {', '.join(lonely)}")
    return notes
