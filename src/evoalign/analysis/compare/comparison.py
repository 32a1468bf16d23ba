# SPDX-License-Identifier: Apache-2.0
"""Compare ES and GRPO runs at equal budgets. Reads files, runs nothing.

Each run is taken at its last evaluation within the budget that all runs reached. Nothing is interpolated, since the
model between two evaluations was not measured, and no later evaluation is used, since it cost more than the budget. A
run that is evaluated rarely is therefore taken early; the share of the budget used is reported.

A plan sets budget, measure, pairs and level beforehand. Without one the budget is the smallest that all runs reached,
which depends on the results: one run that was cut short sets it for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evoalign.analysis.compare.groups import REWARD, Group, Plan, check_comparable, grouped, named, read_plan, usable
from evoalign.analysis.compare.runs import MATCHINGS, Matching, Point, Run, amount, find, read
from evoalign.analysis.compare.statistics import (
    Pair,
    Sensitivity,
    adjust,
    difference_over_questions,
    over_questions,
    sensitivity,
)
from evoalign.analysis.compare.statistics import compare as compare_groups
from evoalign.errors import ConfigError, EvoalignError
from evoalign.rewards.objective import shared_aim
from evoalign.statistics import LEVEL, Estimate, interquartile_mean, mean

LOW_SHARE = 0.8
"""If less of the budget was used, a note advises to evaluate more often."""
WHY = 400
"""Maximum length of an error that is kept: it may quote a file."""


@dataclass(frozen=True, slots=True)
class MatchedRun:
    """A run at a budget: its last point within it, and the share of the budget used by then."""

    run: Run
    point: Point
    share: float


@dataclass(frozen=True, slots=True)
class Standing:
    """One group at a budget; `estimate`, the mean over runs, is None if no run was evaluated within it.

    `middle` is the interquartile mean, which is robust to single runs; `over_questions` has an interval for new runs
    and new questions, if the answers to each question are known.
    """

    group: Group
    matched: tuple[MatchedRun, ...]
    estimate: Estimate | None
    middle: Estimate | None
    over_questions: Estimate | None

    @property
    def share(self) -> float:
        """Mean share of the budget used; 0 without runs."""
        return sum(m.share for m in self.matched) / len(self.matched) if self.matched else 0.0


@dataclass(frozen=True, slots=True)
class Match:
    """All groups at one budget of size `limit`. `by` None: each run at its own end.

    With a `plan`, only its pairs are decided on, at its level.
    """

    by: Matching | None
    limit: float | None
    standings: tuple[Standing, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]
    plan: Plan | None = None
    sensitivity: tuple[Sensitivity, ...] = ()
    exploratory: bool = False
    """Whether a plan decides on another budget, so that this one makes no claim."""

    @property
    def level(self) -> float:
        """Accepted chance of a false claim."""
        return self.plan.settings.alpha if self.plan else LEVEL


@dataclass(frozen=True, slots=True)
class Curve:
    """A group's mean over seeds as a step function of the budget, with 95 % t intervals, where all runs are measured.

    `steps` are those of each run, in the order of `Group.runs`.
    """

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    steps: tuple[tuple[tuple[float, float], ...], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The whole result. `end` compares each run at its end; `left_out` are unreadable runs with the error."""

    measure: str
    groups: tuple[Group, ...]
    matches: tuple[Match, ...]
    end: Match
    left_out: tuple[tuple[Path, str], ...]
    notes: tuple[str, ...]
    plan: Plan | None = None

    @property
    def shown(self) -> list[Match]:
        """Matches with a table: planned ones, and those where two groups (or the only one) have a run."""
        least = min(2, len(self.groups))
        return [m for m in self.matches if m.plan is not None or sum(bool(s.matched) for s in m.standings) >= least]

    @property
    def measures(self) -> list[str]:
        """Measures that every run has at its end; the compared one first."""
        ends = [run.points[-1].measures for group in self.groups for run in group.runs]
        return [self.measure, *(n for n in ends[0] if n != self.measure and all(n in end for end in ends))]


def compare(
    runs: str | Path | Iterable[str | Path],
    match: Matching | None = None,
    *,
    measure: str | None = None,
    names: Mapping[str, str] | None = None,
    plan: str | Path | None = None,
) -> Comparison:
    """Compare runs, or all runs below folders, at equal budgets; `match` None: at each of the four.

    `measure` is one of the test split; None is the common training objective, or the reward if objectives differ.
    `names` maps labels to a glob pattern for the path or the name of a group's runs. `plan` is a file that sets all
    of these beforehand, with the size of the budget and the pairs to decide on. Raises ConfigError if runs cannot
    be compared.
    """
    planned = None if plan is None else read_plan(Path(plan))
    if planned is not None:
        if match is not None or names or measure is not None:
            raise ConfigError(
                f"{planned.path} sets budget, measure and groups: leave out --match, --measure and --name"
            )
        match, measure, names = planned.settings.match, planned.settings.measure, planned.settings.groups
    if match is not None and match not in MATCHINGS:
        raise ConfigError(f"--match {match}: use {', '.join(MATCHINGS)}")
    paths, left_out = find([runs] if isinstance(runs, str | Path) else runs), list[tuple[Path, str]]()
    found: list[Run] = []
    for path in paths:
        try:
            found.append(usable(read(path), measure))
        except (EvoalignError, OSError) as error:
            left_out.append((path, str(error)[:WHY]))
    if not found:
        raise ConfigError("no run can be read:\n" + "\n".join(f"{path}: {why}" for path, why in left_out))
    measure, reasons = shared_aim([run.config.task.fitness for run in found], measure)
    check_comparable(found, measure)
    groups = named(grouped(found), names or {})
    matches = [_match(groups, by, measure, planned) for by in ((match,) if match else MATCHINGS)]
    end = replace(_match(groups, None, measure, None), exploratory=planned is not None)
    notes = (*reasons, *_notes(groups))
    return Comparison(measure, tuple(groups), tuple(matches), end, tuple(left_out), notes, planned)


def curve(group: Group, by: Matching, measure: str) -> Curve | None:
    """Return a group's curve; None if a cost is unknown, or no range of the budget has a measurement of every run."""
    span = _span(group, by, measure)
    if span is None or span[0] > span[1]:
        return None
    first, last = span
    steps = tuple(tuple(_steps(run, by, measure)) for run in group.runs)
    x = sorted({at for s in steps for at, _ in s if first <= at <= last} | {first, last})
    bands = [mean([[value for at, value in s if at <= here][-1] for s in steps]) for here in x]
    lows = tuple(band.mean if band.low is None else band.low for band in bands)
    highs = tuple(band.mean if band.high is None else band.high for band in bands)
    return Curve(tuple(x), tuple(band.mean for band in bands), lows, highs, steps)


def _span(group: Group, by: Matching, measure: str) -> tuple[float, float] | None:
    """Return the latest first measurement and the smallest total cost of a group's runs; None if one is unknown.

    The first may exceed the second: an unfinished run has only the reward at the start.
    """
    firsts = [next((at for at, _ in _steps(run, by, measure)), None) for run in group.runs]
    totals = [amount(by, run.cost) for run in group.runs]
    known = [at for at in firsts if at is not None], [total for total in totals if total is not None]
    return (max(known[0]), min(known[1])) if all(len(k) == len(group.runs) for k in known) else None


def _steps(run: Run, by: Matching, measure: str) -> Iterator[tuple[float, float]]:
    for point in run.points:
        at = amount(by, point.cost)
        if at is not None and measure in point.measures:
            yield at, point.measures[measure]


# --- equal budgets ----------------------------------------------------------------------------------------------------


def _match(groups: Sequence[Group], by: Matching | None, measure: str, plan: Plan | None) -> Match:
    if by is None:
        limit, notes = None, list[str]()
        matched = [[MatchedRun(run, run.points[-1], 1.0) for run in g.runs if run.finished] for g in groups]
    else:
        limit, notes = _limit(groups, by) if plan is None else (plan.settings.limit, _short(groups, by, plan))
        matched = [_within(group, by, limit, plan) for group in groups]
        if limit is not None:
            notes += [
                note for g, runs in zip(groups, matched, strict=True) for note in _early(g, runs, by, limit, plan)
            ]
        for group in groups:
            if (span := _span(group, by, measure)) and span[0] > span[1]:
                finer = _finer(group.runs)
                more = f", or {finer}" if finer.startswith("set") else ""
                notes.append(
                    f"{group.label} has no curve: one of its runs ended before {measure} was first measured in "
                    f"another; let them finish{more}"
                )
    standings: list[Standing] = []
    for group, runs in zip(groups, matched, strict=True):
        reached = [m.point.measures[measure] for m in runs]
        questions = over_questions([(m.run, m.point) for m in runs], measure) if runs else None
        estimates = (mean(reached), interquartile_mean(reached)) if runs else (None, None)
        standings.append(Standing(group, tuple(runs), *estimates, questions))
    at = [s for s in standings if s.matched]
    pairs = [_pair(a, b, measure) for i, a in enumerate(at) for b in at[i + 1 :]]
    decided = adjust([p for p in pairs if plan is None or plan.settings.is_primary(p.a, p.b)])
    rest = [p for p in pairs if plan is not None and not plan.settings.is_primary(p.a, p.b)]
    found = Match(by, limit, tuple(standings), (*decided, *rest), tuple(notes), plan)
    if by is None or limit is None:
        return found
    by_label = {group.label: group for group in groups}

    def values(label: str, share: float, by: Matching = by, limit: float = limit) -> dict[int, float]:
        return _values(_within(by_label[label], by, share * limit, plan), measure)

    return replace(found, sensitivity=tuple(sensitivity(pair.a, pair.b, values) for pair in decided))


def _values(matched: Sequence[MatchedRun], measure: str) -> dict[int, float]:
    return {m.run.seed: m.point.measures[measure] for m in matched}


def _pair(a: Standing, b: Standing, measure: str) -> Pair:
    pair = compare_groups(a.group.label, _values(a.matched, measure), b.group.label, _values(b.matched, measure))
    first, second = (a, b) if pair.a == a.group.label else (b, a)
    points = [[(m.run, m.point) for m in standing.matched] for standing in (first, second)]
    return replace(pair, over_questions=difference_over_questions(points[0], points[1], measure))


def _within(group: Group, by: Matching, limit: float | None, plan: Plan | None) -> list[MatchedRun]:
    """Return each run at its last evaluation within the budget, the start excluded: it is the same for all."""
    matched: list[MatchedRun] = []
    for run in _usable(group, by, plan):
        if limit is None:
            continue
        costs = [(point, amount(by, point.cost)) for point in run.points if point.step > 0]
        inside = [(point, cost) for point, cost in costs if cost is not None and cost <= limit * (1 + 1e-9)]
        if inside:
            point, cost = inside[-1]
            matched.append(MatchedRun(run, point, min(1.0, cost / limit)))
    return matched


def _usable(group: Group, by: Matching, plan: Plan | None) -> list[Run]:
    """Return the runs with a known cost that the plan, if any, does not leave out."""
    left_out = plan is not None and plan.settings.short == "leave_out"
    runs = [run for run in group.runs if amount(by, run.cost)]
    return [run for run in runs if plan is None or not left_out or _reaches(run, by, plan.settings.limit)]


def _reaches(run: Run, by: Matching, limit: float) -> bool:
    """Return whether one more step would have exceeded the budget."""
    total = amount(by, run.cost)
    return total is not None and total + total / run.steps > limit


def _short(groups: Sequence[Group], by: Matching, plan: Plan) -> list[str]:
    """Name the runs that did not reach a plan's budget."""
    what = "left out" if plan.settings.short == "leave_out" else "taken at its end"
    runs = [run for group in groups for run in group.runs if not _reaches(run, by, plan.settings.limit)]
    why = {True: "ended before the budget", False: f"has no known cost in {by}"}
    return [f"{run.path} {why[bool(amount(by, run.cost))]}: {what}, as planned" for run in runs]


def _limit(groups: Sequence[Group], by: Matching) -> tuple[float | None, list[str]]:
    """Return the largest budget that all runs with a known cost reached, and notes on which run sets it."""
    reached = {run.path: amount(by, run.cost) or 0.0 for group in groups for run in group.runs}
    notes = [f"{path} has no known total cost in {by}: left out here" for path, cost in reached.items() if not cost]
    known = {path: cost for path, cost in reached.items() if cost}
    if not known:
        return None, [*notes, "no run has a known cost: nothing can be matched"]
    least = min(known, key=lambda path: known[path])
    own = next(group for group in groups if least in [run.path for run in group.runs])
    costs = sorted(reached[run.path] for run in own.runs)
    notes.append(f"the budget depends on the results: it is the cost of {least}, the smallest; set it with --plan")
    if known[least] < 0.5 * costs[len(costs) // 2]:
        notes.append(f"{least} sets the budget at less than half its group's median: train on, or leave it out")
    return known[least], notes


def _early(group: Group, matched: Sequence[MatchedRun], by: Matching, limit: float, plan: Plan | None) -> list[str]:
    """Advise on runs that have no evaluation within the budget, or only an early one."""
    notes: list[str] = []
    missing = [run for run in _usable(group, by, plan) if run not in [m.run for m in matched]]
    share = sum(m.share for m in matched) / len(matched) if matched else 1.0
    if missing:
        count = f"{len(missing)} of {len(group.runs)} runs have" if matched else "no run has"
        within = [int(limit / (amount(by, run.cost) or 1.0) * run.steps) for run in missing]
        steps = min((number for number in within if number), default=0)
        coarse = any(run.config.evaluation.every != 1 for run in missing)
        finer = f"set evaluation.every to at most {steps}" if steps and coarse else "one step costs more"
        notes.append(f"{group.label}: {count} an evaluation within this budget after the start; {finer}")
    if share < LOW_SHARE:
        late = _finer([m.run for m in matched])
        notes.append(f"{group.label} is taken after {share:.0%} of the budget on average; {late}")
    return notes


def _finer(runs: Sequence[Run]) -> str:
    """Advise how to have runs evaluated closer to a budget."""
    every = {run.config.evaluation.every for run in runs}
    if every == {1}:
        return "each step is evaluated already, one step costs more"
    return "set evaluation.every lower" if any(every) else "set evaluation.every"


def _notes(groups: Sequence[Group]) -> list[str]:
    """Return what limits the whole comparison."""
    runs, notes = [run for group in groups for run in group.runs], list[str]()
    never = ends_only(groups)
    if never:
        which = " or ".join(group.label for group in never)
        notes.append(f"no run of {which} was evaluated during training (evaluation.every): only the end is known")
    notes += [
        f"{run.path} is not finished: used up to step {run.steps}, not at the end" for run in runs if not run.finished
    ]
    rare = [r for group in groups if group not in never for r in group.runs if r.on_the_way == 0 and r.finished]
    if rare:
        which = f"{rare[0].path} was" if len(rare) == 1 else f"{len(rare)} of {len(runs)} runs were"
        notes.append(f"{which} not evaluated during training (evaluation.every): only the end is known")
    places = sorted({run.hardware for run in runs if run.hardware})
    if len(places) > 1:
        notes.append(f"runs used different hardware ({'; '.join(places)}): their times are not comparable")
    if len({group.settings.get("model.name") for group in groups}) > 1:
        notes.append("groups start from different models, so differences are not due to the method only")
    notes += [
        f"{group.label}: trained on random rewards (grpo.reward), so its gain is what the method brings without signal"
        for group in groups
        if group.settings.get(REWARD) == "random"
    ]
    few = [group.label for group in groups if len(group.runs) < 3]
    if few:
        notes.append(f"fewer than three seeds, so no interval: {', '.join(few)}")
    return notes


def ends_only(groups: Sequence[Group]) -> list[Group]:
    """Return the groups without any evaluation between start and end."""
    return [group for group in groups if not any(run.on_the_way for run in group.runs)]
