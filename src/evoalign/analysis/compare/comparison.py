# SPDX-License-Identifier: Apache-2.0
"""ES and GRPO runs side by side under matched budgets, with what their seeds allow to say. Reads files, runs nothing.

Every run is taken at its last evaluation that lies within the budget all of them reached. Between two evaluations
nothing is interpolated, since the model in between was never measured and rewards move in steps, and no later one is
looked at, since that model cost more than the budget. The price is that a run evaluated seldom is taken early; the
share of the budget it had really used is therefore shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from evoalign.analysis.compare.groups import Group, at_the_end_alone, check_comparable, grouped, named, usable
from evoalign.analysis.compare.items import difference_over_questions, over_questions
from evoalign.analysis.compare.plan import Plan, read_plan
from evoalign.analysis.compare.runs import Point, Run, find, read
from evoalign.analysis.compare.sensitivity import Sensitivity, sensitivity
from evoalign.analysis.compare.statistics import Pair, adjust
from evoalign.analysis.compare.statistics import compare as compare_groups
from evoalign.cost.budget import Cost
from evoalign.errors import ConfigError, EvoalignError
from evoalign.rewards.objective import shared_aim
from evoalign.statistics import LEVEL, Estimate, interquartile_mean, mean

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


@dataclass(frozen=True, slots=True)
class Taken:
    """One run at a matched budget: its last point within, and the share of the budget used by then."""

    run: Run
    point: Point
    share: float


@dataclass(frozen=True, slots=True)
class Standing:
    """One group at a matched budget; `estimate`, the mean over runs, is None where none was evaluated within.

    `middle` is the interquartile mean, which a run that went astray does not move; `over_questions` has the interval
    for new runs and new questions, where answers to each question are known.
    """

    group: Group
    taken: tuple[Taken, ...]
    estimate: Estimate | None
    middle: Estimate | None
    over_questions: Estimate | None

    @property
    def share(self) -> float:
        """Mean share of the budget used; 0 where nothing was taken."""
        return sum(t.share for t in self.taken) / len(self.taken) if self.taken else 0.0


@dataclass(frozen=True, slots=True)
class Match:
    """All groups at one budget. `by` None: each run at its own end, whatever it took. `limit` is the budget.

    `plan`: it was set beforehand, and only the pairs that the plan names are decided on, at its level.
    """

    by: Matching | None
    limit: float | None
    standings: tuple[Standing, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]
    plan: Plan | None = None
    sensitivity: tuple[Sensitivity, ...] = ()
    exploratory: bool = False
    """A plan decides on another budget: this one is shown, and nothing is claimed by it."""

    @property
    def level(self) -> float:
        """The chance of a false claim that is accepted."""
        return self.plan.settings.alpha if self.plan else LEVEL


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
    plan: Plan | None = None

    @property
    def shown(self) -> list[Match]:
        """Those with a table: what was planned, and where two groups, or all, have a run within the budget."""
        least = min(2, len(self.groups))
        return [m for m in self.matches if m.plan is not None or sum(bool(s.taken) for s in m.standings) >= least]

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
    """Compare runs, or all runs below folders, at equal budgets; None: at each of the four.

    `measure` is one of the test split; None is what all were trained for, the reward or that of `task.fitness`, and the
    reward where that differs. `names` gives a group another label: label to a pattern, as in shells, of the
    path or the name of its runs. `plan` is a file that says all of these beforehand, with the size of the budget and
    the pairs to decide on. Raises ConfigError where runs cannot be compared, and names the setting.
    """
    planned = None if plan is None else read_plan(Path(plan))
    if planned is not None:
        if match is not None or names or measure is not None:
            raise ConfigError(
                f"{planned.path} says budget, measure and groups: leave out --match, --measure and --name"
            )
        match, measure, names = planned.settings.match, planned.settings.measure, planned.settings.groups
    if match is not None and match not in MATCHINGS:
        raise ConfigError(f"match {match!r}: use {', '.join(MATCHINGS)}")
    paths, left_out = find([runs] if isinstance(runs, str | Path) else runs), list[tuple[Path, str]]()
    found: list[Run] = []
    for path in paths:
        try:
            found.append(usable(read(path), measure))
        except (EvoalignError, OSError) as error:
            left_out.append((path, str(error)[:WHY]))
    if not found:
        raise ConfigError("no run can be read:\n" + "\n".join(f"{path}: {why}" for path, why in left_out))
    measure, said = shared_aim([run.config.task.fitness for run in found], measure)
    check_comparable(found, measure)
    groups = named(grouped(found), names or {})
    matches = [_match(groups, by, measure, planned) for by in ((match,) if match else MATCHINGS)]
    end = replace(_match(groups, None, measure), exploratory=planned is not None)
    return Comparison(measure, tuple(groups), tuple(matches), end, tuple(left_out), (*said, *_notes(groups)), planned)


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
    bands = [mean([_at(s, here) for s in steps]) for here in x]
    lows, highs = ([b.mean if end is None else end for b, end in ends]
                   for ends in ([(b, b.low) for b in bands], [(b, b.high) for b in bands]))  # fmt: skip
    return Curve(tuple(x), tuple(b.mean for b in bands), tuple(lows), tuple(highs), steps)


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


# --- equal budgets ----------------------------------------------------------------------------------------------------


def _match(groups: Sequence[Group], by: Matching | None, measure: str, plan: Plan | None = None) -> Match:
    if by is None:
        limit, notes = None, list[str]()
        takers = [_at_end(group) for group in groups]
    else:
        limit, notes = _limit(groups, by) if plan is None else (plan.settings.limit, _short(groups, by, plan))
        kept = [_reaching(group, by, plan) for group in groups]
        takers = [_within(group, by, limit) for group in kept]
        notes += _seldom(kept, takers, by) if limit is not None else []
        notes += [_apart(g, measure) for g in groups if (span := _span(g, by, measure)) and span[0] > span[1]]
    standings = [_standing(g, taken, measure) for g, taken in zip(groups, takers, strict=True)]
    at = {s.group.label: s for s in standings if s.taken}
    labels = list(at)
    pairs = [_pair(at[a], at[b], measure) for i, a in enumerate(labels) for b in labels[i + 1 :]]
    decided = adjust([p for p in pairs if plan is None or plan.settings.is_primary(p.a, p.b)])
    rest = [p for p in pairs if plan is not None and not plan.settings.is_primary(p.a, p.b)]
    found = Match(by, limit, tuple(standings), (*decided, *rest), tuple(notes), plan)
    return found if limit is None else replace(found, sensitivity=_sensitivity(found, decided, measure))


def _standing(group: Group, taken: Sequence[Taken], measure: str) -> Standing:
    if not taken:
        return Standing(group, (), None, None, None)
    values = [t.point.measures[measure] for t in taken]
    return Standing(
        group, tuple(taken), mean(values), interquartile_mean(values), over_questions(_places(taken), measure)
    )  # fmt: skip


def _places(taken: Sequence[Taken]) -> list[tuple[Run, Point]]:
    return [(t.run, t.point) for t in taken]


def _values(taken: Sequence[Taken], measure: str) -> dict[int, float]:
    return {t.run.seed: t.point.measures[measure] for t in taken}


def _pair(a: Standing, b: Standing, measure: str) -> Pair:
    of = {s.group.label: s for s in (a, b)}
    pair = compare_groups(a.group.label, _values(a.taken, measure), b.group.label, _values(b.taken, measure))
    over = difference_over_questions(_places(of[pair.a].taken), _places(of[pair.b].taken), measure)
    return replace(pair, over_questions=over)


def _sensitivity(match: Match, pairs: Sequence[Pair], measure: str) -> tuple[Sensitivity, ...]:
    groups, by, limit = {s.group.label: s.group for s in match.standings}, match.by, match.limit
    assert by is not None and limit is not None

    def values(label: str, share: float) -> dict[int, float]:
        return _values(_within(_reaching(groups[label], by, match.plan), by, share * limit), measure)

    return tuple(sensitivity(pair.a, pair.b, values) for pair in pairs)


def _reaching(group: Group, by: Matching, plan: Plan | None) -> Group:
    """The group without the runs that a plan leaves out."""
    if plan is None or plan.settings.short == "at_end":
        return group
    return replace(group, runs=tuple(run for run in group.runs if _reaches(run, by, plan.settings.limit)))


def _reaches(run: Run, by: Matching, limit: float) -> bool:
    """Whether another step would have gone beyond the budget."""
    total = amount(by, run.cost)
    return total is not None and total + total / run.steps > limit


def _short(groups: Sequence[Group], by: Matching, plan: Plan) -> list[str]:
    """Runs that a plan has a word for."""
    what = "is left out, as planned" if plan.settings.short == "leave_out" else "is taken at its end, as planned"
    runs = [run for group in groups for run in group.runs if not _reaches(run, by, plan.settings.limit)]
    why = {True: "ended before the budget", False: f"does not say what it took in {by}"}
    return [f"{run.path} {why[bool(amount(by, run.cost))]}: it {what}" for run in runs]


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
    notes.append(f"the outcome set this budget: it is what {least} took, the least of all; --plan sets one beforehand")
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
            count = "of every run" if not taken else f"of {len(missing)} of {len(group.runs)} runs"
            notes.append(f"{group.label}: {count} only the start lies within this budget; {_finer(missing)}")
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
    never = at_the_end_alone(groups)
    if never:
        which = " or ".join(group.label for group in never)
        notes.insert(0, f"no run of {which} was evaluated on the way (evaluation.every): known at the end alone")
    seldom = [r for group in groups if group not in never for r in group.runs if r.on_the_way == 0 and r.finished]
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
