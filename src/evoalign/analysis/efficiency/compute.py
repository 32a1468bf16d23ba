# SPDX-License-Identifier: Apache-2.0
"""Groups of seeds, what each of their runs took to a threshold, and where they end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import inf, isfinite, isnan, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign.analysis.base import Finding
from evoalign.analysis.compare.comparison import MATCHINGS, WHY, Matching, amount
from evoalign.analysis.compare.groups import Group, check_comparable, grouped, named, usable
from evoalign.analysis.compare.runs import Run, find, read
from evoalign.analysis.compare.words import counted
from evoalign.analysis.efficiency.measures import (
    Between,
    Time,
    deviation,
    median,
    reached,
    robust_ratio,
    times_ratio,
    variances_ratio,
)
from evoalign.errors import ConfigError, EvoalignError
from evoalign.rewards.objective import shared_aim

if TYPE_CHECKING:
    from evoalign.analysis.efficiency.command import Settings

UNITS: Mapping[Matching, str] = {
    "completions": "completions", "tokens": "tokens", "wall": "seconds", "flops": "FLOPs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timed:
    """A group of seeds; `times` by kind of budget and seed, of those runs that say what they took.

    `ends` by seed, of runs that came to their end. `placebos`: how many ends of placebos are known, and how many of
    these are at the threshold.
    """

    label: str
    method: str
    times: Mapping[Matching, Mapping[int, Time]]
    ends: Mapping[int, float]
    placebos: tuple[int, int]

    def of(self, by: Matching) -> list[Time]:
        return list(self.times[by].values())


@dataclass(frozen=True)
class Efficiency(Finding):
    """The finding, and what its figures are drawn from."""

    measure: str
    threshold: float
    groups: Sequence[Timed]

    def draw(self, folder: Path) -> list[Path]:
        from evoalign.analysis.efficiency.figure import draw

        return draw(self.measure, self.threshold, self.groups, folder)


def efficiency(targets: Sequence[str], settings: Settings) -> Efficiency:
    """See `Command`. Raises ConfigError."""
    found, left_out = list[Run](), list[tuple[Path, str]]()
    for path in find(targets):
        try:
            found.append(usable(read(path), settings.measure))
        except (EvoalignError, OSError) as error:
            left_out.append((path, str(error)[:WHY]))
    if not found:
        raise ConfigError("no run can be read:\n" + "\n".join(f"{path}: {why}" for path, why in left_out))
    measure, said = shared_aim([run.config.task.fitness for run in found], settings.measure)
    check_comparable(found, measure)
    groups = named(grouped(found), settings.names)
    start = _start(found, measure)
    threshold = _halfway(groups, measure, start) if settings.threshold is None else settings.threshold
    if not isfinite(threshold) or threshold == start:
        raise ConfigError(f"threshold: {threshold:g} is what {measure} starts from; give one to be reached")
    timed = [_timed(group, measure, threshold, rises=threshold > start) for group in groups]
    numbers = {
        "measure": measure, "threshold": threshold, "given": settings.threshold is not None, "start": start,
        "groups": [_tree(group) for group in timed],
        "pairs": [_pair(a, b) for a, b in combinations(timed, 2)],
        "left_out": [[str(path), why] for path, why in left_out],
    }  # fmt: skip
    notes = [*said, *(f"{path} is left out: {why}" for path, why in left_out), *_notes(found)]
    return Efficiency(numbers, _sentences(measure, settings, threshold, start, timed, notes), measure, threshold, timed)


def _start(runs: Sequence[Run], measure: str) -> float:
    starts = [run.points[0].measures[measure] for run in runs if _starts(run, measure)]
    if not starts:
        raise ConfigError(f"no run measured {measure} before its training; choose another measure")
    return float(np.mean(starts))


def _starts(run: Run, measure: str) -> bool:
    return run.points[0].step == 0 and measure in run.points[0].measures


def _halfway(groups: Sequence[Group], measure: str, start: float) -> float:
    """From the mean start to the best mean end of a group. More is taken for better, as of a reward."""
    ends = [e for e in (list(_ends(group, measure).values()) for group in groups) if e]
    if not ends:
        raise ConfigError("no run has come to its end, from which a threshold could be made; give one: threshold=...")
    best = max(float(np.mean(e)) for e in ends)
    if best <= start:
        raise ConfigError(
            f"no group ends above the start ({measure} {start:.4g}, the best mean end {best:.4g}): there is nothing to "
            "be half-way to; give a threshold: threshold=..."
        )
    return (start + best) / 2


def _ends(group: Group, measure: str) -> dict[int, float]:
    return {run.seed: run.points[-1].measures[measure] for run in group.runs if run.finished}


def _timed(group: Group, measure: str, threshold: float, *, rises: bool) -> Timed:
    times: dict[Matching, dict[int, Time]] = {by: {} for by in MATCHINGS}
    for by, of in times.items():
        found = {run.seed: _time(run, by, measure, threshold, rises) for run in group.runs}
        of.update({seed: time for seed, time in found.items() if time is not None})
    placebos = [p for run in group.runs if run.placebo for p in run.placebo.reward.placebos if measure == "reward"]
    there = sum(_is_there(p, threshold, rises) for p in placebos)
    return Timed(group.label, group.method, times, _ends(group, measure), (len(placebos), there))


def _time(run: Run, by: Matching, measure: str, threshold: float, rises: bool) -> Time | None:
    """Where it was first seen there, the start not counted; None of a run that does not say what it took."""
    total = amount(by, run.cost)
    if not total:
        return None
    for point in run.points:
        spent = amount(by, point.cost)
        if point.step > 0 and spent and _is_there(point.measures.get(measure), threshold, rises):
            return Time(spent, True)
    return Time(total, False)


def _is_there(value: float | None, threshold: float, rises: bool) -> bool:
    return value is not None and (value >= threshold if rises else value <= threshold)


def _tree(group: Timed) -> dict[str, Any]:
    kinds = {
        by: {
            "runs": {str(seed): asdict(t) for seed, t in of.items()},
            "median": median(list(of.values())).tree(),
            "reached": reached(list(of.values())).tree(),
        }
        for by, of in group.times.items()
        if of
    }
    ends = list(group.ends.values())
    return {
        "label": group.label, "method": group.method, "times": kinds,
        "ends": {str(seed): end for seed, end in group.ends.items()},
        "deviation": deviation(ends).tree() if ends else None,
        "placebos": {"known": group.placebos[0], "reached": group.placebos[1]},
    }  # fmt: skip


def _pair(a: Timed, b: Timed) -> dict[str, Any]:
    ends = list(a.ends.values()), list(b.ends.values())
    ratios = {by: times_ratio(a.of(by), b.of(by)).tree() for by in MATCHINGS if a.times[by] and b.times[by]}
    spread = None
    if all(ends):
        spread = {"normal": variances_ratio(*ends).tree(), "robust": robust_ratio(*ends).tree()}
    return {"a": a.label, "b": b.label, "times": ratios, "variances": spread}


# --- in words ---------------------------------------------------------------------------------------------------------


def _notes(runs: Sequence[Run]) -> list[str]:
    unfinished = [run.path for run in runs if not run.finished]
    said = [f"{path} is not finished: what it has not reached yet it may reach" for path in unfinished]
    seldom = [run for run in runs if run.on_the_way == 0]
    if seldom:
        said.append(
            f"{len(seldom)} of {len(runs)} runs were evaluated at their end alone: all that they took counts as what "
            "they took to it; set evaluation.every"
        )
    places = sorted({run.hardware for run in runs if run.hardware})
    if len(places) > 1:
        said.append(f"runs were made on different hardware ({'; '.join(places)}): their seconds do not compare")
    return said


def _sentences(
    measure: str, settings: Settings, threshold: float, start: float, groups: Sequence[Timed], notes: Sequence[str]
) -> list[str]:
    chosen = "as given"
    if settings.threshold is None:
        chosen = "half-way from the start to the best mean end, and so an outcome of these runs"
    said = [
        f"Threshold: {measure} of {threshold:.4g} on the test split ({chosen}), from {start:.4g}. A run is there at "
        "its first evaluation that is; one that never is took more than all that it did."
    ]
    for group in groups:
        said += _of_group(group)
    for a, b in combinations(groups, 2):
        said += _of_pair(a, b)
    if len(groups) > 2:
        said.append("Each interval is for itself: of many, one in twenty is wrong by chance.")
    return [*said, *notes]


def _of_group(group: Timed) -> list[str]:
    said: list[str] = []
    known = next((of for of in group.times.values() if of), None)
    if known is None:
        return [f"{group.label}: its runs do not say what they took."]
    count = reached(list(known.values()))
    there = sum(t.reached for t in known.values())
    said.append(f"{group.label}: {there} of {count.n} runs reach it ({count.low:.0%} to {count.high:.0%} of runs).")
    parts = [(median(list(of.values())), UNITS[by]) for by, of in group.times.items() if of]
    said.append(f"{group.label}: a run takes, in the median, {_listed(parts)}.")
    placebos, at = group.placebos
    if placebos:
        said.append(f"{group.label}: of {placebos} placebos (shuffled coefficients), {at} end there.")
    elif group.method == "es":
        said.append(f"{group.label}: no placebo is known, so that drift alone may reach it; `evoalign placebo` tells.")
    if len(group.ends) > 1:
        spread = deviation(list(group.ends.values()))
        said.append(f"{group.label}: standard deviation of the ends between seeds {_told(spread)}.")
    return said


def _of_pair(a: Timed, b: Timed) -> list[str]:
    who = f"{a.label} against {b.label}"
    parts = [(times_ratio(a.of(by), b.of(by)), f"of the {UNITS[by]}") for by in MATCHINGS
             if a.times[by] and b.times[by]]  # fmt: skip
    said = [f"{who}: it takes {_listed(parts, 'x ')}."] if parts else []
    ends = list(a.ends.values()), list(b.ends.values())
    if not all(ends):
        return said
    normal, robust = variances_ratio(*ends), robust_ratio(*ends)
    if not isfinite(normal.mean):
        return [*said, f"{who}: no ratio of variances between seeds ({normal.why})."]
    seeds = f"{len(ends[0])} and {len(ends[1])} seeds"
    line = f"{who}: ratio of the variances between seeds ({seeds}) {_told(normal)} if ends are normal; "
    line += f"{_told(robust)} by an interval that is robust to that (Bonett); standard deviations "
    line += f"{sqrt(normal.mean):.3g} to 1"
    if any(r.low is None or r.high is None or r.low <= 1 <= r.high for r in (normal, robust)):
        line += "; not shown to differ"
    few = ". So few seeds tell a ratio to a factor of several" if min(map(len, ends)) < 10 else ""
    return [*said, f"{line}{few}."]


def _listed(found: Sequence[tuple[Between, str]], before: str = "") -> str:
    """Each with its unit; why there is no interval once, where that is the same for all."""
    why = {one.why for one, _ in found}
    if len(found) > 1 and len(why) == 1 and None not in why:
        return f"{'; '.join(f'{before}{_middle(one)} {unit}' for one, unit in found)} ({why.pop()})"
    return "; ".join(f"{before}{_told(one)} {unit}" for one, unit in found)


def _told(found: Between) -> str:
    if found.low is None or found.high is None:
        return f"{_middle(found)} ({found.why})"
    high = f"to {_number(found.high)}" if isfinite(found.high) else "and no upper end"
    return f"{_middle(found)} (95 %: {_number(found.low)} {high})"


def _middle(found: Between) -> str:
    return "not reached" if found.mean == inf else "unknown" if isnan(found.mean) else _number(found.mean)


def _number(value: float) -> str:
    """Three digits, with commas, and from a million on with a letter for the power of ten."""
    rounded = float(f"{value:.3g}")
    return f"{value:.3g}" if abs(rounded) < 1000 else f"{rounded:,.0f}" if abs(rounded) < 1e6 else counted(rounded)
