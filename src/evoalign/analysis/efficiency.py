# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze efficiency`: what training costs until a measure reaches a threshold, and how much seeds differ.

Array suffix: N runs of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from math import exp, inf, isfinite, log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign.analysis.base import Analysis, Finding, as_json, row
from evoalign.errors import ConfigError, EvoalignError
from evoalign.report.figures import COLORS, INK, MARKERS, canvas, frame, save_both
from evoalign.report.tables import shorten, visible
from evoalign.statistics import FEWEST, FEWEST_IQM, FLAT, LEVEL, Estimate, ranks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from evoalign.analysis.compare.groups import Group
    from evoalign.analysis.compare.runs import Run
    from evoalign.config import Config

Floats: TypeAlias = NDArray[np.float64]
UNITS = {"wall": "seconds", "completions": "completions", "tokens": "tokens", "flops": "FLOPs"}
"""Budgets of `evoalign compare`, and their units."""
FEWEST_ROBUST = 5
"""Values of each group that the robust ratio needs: fewer cannot be trimmed."""


@dataclass(frozen=True)
class Settings:
    """`measure` of the test split; None: what all runs were trained for. `names`: label of a group to a pattern.

    `threshold`: the value to reach, from either side; None: half-way from the mean start to the best mean end of a
    group, which depends on the runs.
    """

    measure: str | None = None
    threshold: float | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Interval(Estimate):
    """An estimate whose `mean` and `high` may be infinite: not reached."""

    def tree(self) -> dict[str, Any]:
        """Return the fields for JSON: an infinite mean or bound is None, and `unbounded` lists the names of these."""
        ends = {"mean": self.mean, "low": self.low, "high": self.high}
        far = [name for name, value in ends.items() if value is not None and not isfinite(value)]
        return {**{k: None if k in far else v for k, v in ends.items()}, "n": self.n, "why": self.why, "unbounded": far}

    def __format__(self, spec: str) -> str:
        middle = "not reached" if self.mean == inf else _number(self.mean) if isfinite(self.mean) else "unknown"
        if self.low is None or self.high is None:
            return f"{middle} ({self.why})"
        high = f"to {_number(self.high)}" if isfinite(self.high) else "and above"
        return f"{middle} (95 %: {_number(self.low)} {high})"


@dataclass(frozen=True, slots=True)
class Time:
    """Cost of a run until its first evaluation at the threshold; more than `amount` where it is not `reached`."""

    amount: float
    reached: bool


@dataclass(frozen=True, slots=True)
class Timed:
    """A group of seeds. `times` by budget and seed, of runs that report what they took.

    `ends` by seed, of finished runs. `placebos`: number of known ends of placebos, and how many reach the threshold.
    """

    label: str
    method: str
    times: Mapping[str, Mapping[int, Time]]
    ends: Mapping[int, float]
    placebos: tuple[int, int]

    def tree(self) -> dict[str, Any]:
        """Return the fields and the intervals for JSON."""
        times = {by: list(of.values()) for by, of in self.times.items() if of}
        return as_json(
            {
                "label": self.label,
                "method": self.method,
                "times": {
                    by: {"runs": self.times[by], "median": median(own), "reached": reached(own)}
                    for by, own in times.items()
                },
                "ends": self.ends,
                "deviation": deviation(list(self.ends.values())) if self.ends else None,
                "placebos": {"known": self.placebos[0], "reached": self.placebos[1]},
            }
        )


class Efficiency(Analysis[Settings]):
    """Completions, tokens, seconds and FLOPs of training until the mean model reaches a threshold on the test split.

    By groups of seeds, as `evoalign compare` makes them; runs that never reach it are censored, not left out. Also the
    standard deviation of the ends between seeds, and the ratio of variances of two groups. Reads files only.
    """

    name = "efficiency"
    help = "What training takes to reach a threshold, by group of seeds; the variance between seeds and its ratio."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Every run has its own config. Raises ConfigError where runs cannot be compared."""
        from evoalign.analysis.compare.comparison import WHY
        from evoalign.analysis.compare.groups import check_comparable, grouped, named, usable
        from evoalign.analysis.compare.runs import find, read
        from evoalign.rewards.objective import shared_aim

        found, left_out = list["Run"](), list[tuple[Path, str]]()
        for path in find(targets):
            try:
                found.append(usable(read(path), settings.measure))
            except (EvoalignError, OSError) as error:
                left_out.append((path, str(error)[:WHY]))
        if not found:
            raise ConfigError("no run can be read:\n" + "\n".join(f"{path}: {why}" for path, why in left_out))
        measure, notes = shared_aim([run.config.task.fitness for run in found], settings.measure)
        check_comparable(found, measure)
        groups = named(grouped(found), settings.names)
        firsts = [run.points[0] for run in found]
        starts = [one.measures[measure] for one in firsts if one.step == 0 and measure in one.measures]
        if not starts:
            raise ConfigError(f"no run measured {measure} before its training; choose another measure")
        start = float(np.mean(starts))
        threshold = _halfway(groups, measure, start) if settings.threshold is None else settings.threshold
        if not isfinite(threshold) or threshold == start:
            raise ConfigError(f"threshold: {threshold:g} is what {measure} starts from; set another value")
        timed = [_timed(group, measure, threshold, rises=threshold > start) for group in groups]
        chosen = "half-way to the best mean end, so it depends on the runs" if settings.threshold is None else "as set"
        lines = [f"Threshold: {measure} of {threshold:.4g} on the test split ({chosen}), from {start:.4g}.", *notes]
        lines += [line for group in timed for line in _sentences(group)]
        pairs: list[dict[str, Any]] = []
        for a, b in combinations(timed, 2):
            ratio = robust_ratio(list(a.ends.values()), list(b.ends.values())) if a.ends and b.ends else None
            pairs.append({"a": a.label, "b": b.label, "variances": ratio and {"robust": ratio}})
            if ratio is not None:
                lines.append(row(f"{a.label} to {b.label}", {"ratio of the variances between seeds": ratio}))
        lines += [f"{path} is left out: {why}" for path, why in left_out]
        numbers = {
            "measure": measure,
            "threshold": threshold,
            "given": settings.threshold is not None,
            "start": start,
            "groups": timed,
            "pairs": pairs,
            "left_out": [[str(path), why] for path, why in left_out],
        }
        return Finding(numbers, [*lines, *_notes(found)], figures=partial(draw, measure, threshold, timed))


def _halfway(groups: Sequence[Group], measure: str, start: float) -> float:
    """Return the value halfway from the mean start to the highest mean end of a group. Larger values are better."""
    means = [float(np.mean(list(ends.values()))) for group in groups if (ends := _ends(group, measure))]
    if not means:
        raise ConfigError("no run is finished, so there is no default threshold; set threshold=...")
    if max(means) <= start:
        raise ConfigError(
            f"no group ends above the start ({measure} {start:.4g}, the best mean end {max(means):.4g}), so there is "
            "no default threshold; set threshold=..."
        )
    return (start + max(means)) / 2


def _ends(group: Group, measure: str) -> dict[int, float]:
    return {run.seed: run.points[-1].measures[measure] for run in group.runs if run.finished}


def _timed(group: Group, measure: str, threshold: float, *, rises: bool) -> Timed:
    from evoalign.analysis.compare.comparison import MATCHINGS, amount

    def is_there(value: float | None) -> bool:
        return value is not None and (value >= threshold if rises else value <= threshold)

    times: dict[str, dict[int, Time]] = {by: {} for by in MATCHINGS}
    for by in MATCHINGS:
        for run in group.runs:
            total = amount(by, run.cost)
            at = (amount(by, p.cost) for p in run.points if p.step > 0 and is_there(p.measures.get(measure)))
            first = next((spent for spent in at if spent), None)
            if total:
                times[by][run.seed] = Time(total, False) if first is None else Time(first, True)
    placebos = [p for run in group.runs if run.placebo for p in run.placebo.reward.placebos if measure == "reward"]
    return Timed(group.label, group.method, times, _ends(group, measure), (len(placebos), sum(map(is_there, placebos))))


def _sentences(group: Timed) -> list[str]:
    times = {by: list(of.values()) for by, of in group.times.items() if of}
    cells: dict[str, object] = {} if times else {"costs": "not reported"}
    if times:
        known = next(iter(times.values()))
        share = reached(known)
        count = f"{sum(t.reached for t in known)} of {share.n}"
        cells["runs that reach it"] = f"{count} ({share.low:.0%} to {share.high:.0%})"
    cells |= {f"median {UNITS[by]}": median(own) for by, own in times.items()}
    if len(group.ends) > 1:
        cells["standard deviation of the ends"] = deviation(list(group.ends.values()))
    if group.placebos[0]:
        cells["placebos that reach it"] = f"{group.placebos[1]} of {group.placebos[0]}"
    elif group.method == "es":
        cells["placebos"] = "none, so drift alone may reach it; run `evoalign placebo`"
    return [row(group.label, cells)]


def _notes(runs: Sequence[Run]) -> list[str]:
    lines = [f"{run.path} is not finished, so it may still reach the threshold" for run in runs if not run.finished]
    if seldom := sum(run.on_the_way == 0 for run in runs):
        count = f"{seldom} of {len(runs)} runs"
        lines.append(f"{count} were evaluated only at their end, so their whole cost counts; set evaluation.every")
    places = sorted({run.hardware for run in runs if run.hardware})
    if len(places) > 1:
        lines.append(f"runs were made on different hardware ({'; '.join(places)}): their seconds do not compare")
    return lines


def _number(value: float) -> str:
    """Format three digits, with commas, and from a million on with a letter for the power of ten."""
    from evoalign.analysis.compare.tables import counted

    rounded = float(f"{value:.3g}")
    return f"{value:.3g}" if abs(rounded) < 1000 else f"{rounded:,.0f}" if abs(rounded) < 1e6 else counted(rounded)


def median(times: Sequence[Time]) -> Interval:
    """Return the median over runs, and a distribution-free interval of ranks.

    The interval lies between two order statistics: the lower one of the lower bounds of the times, the upper one of
    the upper bounds, infinite for a run that never reached the threshold. So it covers the median at least as often as
    without censoring, with a probability of `RANKS` or more (95 % where n allows). The median is infinite where half or
    more of the runs never reached the threshold.
    """
    n = len(times)
    least_N, most_N = sorted(t.amount for t in times), sorted(t.amount if t.reached else inf for t in times)
    middle = (most_N[(n - 1) // 2] + most_N[n // 2]) / 2
    if n < FEWEST_IQM:
        return Interval(middle, n, why=f"{n} runs: no interval")
    k = ranks_of(n)
    return Interval(middle, n, least_N[k - 1], most_N[n - k])


def reached(times: Sequence[Time]) -> Interval:
    """Return the share of runs that reached the threshold, with the exact interval of Clopper and Pearson (1934)."""
    from scipy.stats import binomtest

    count = sum(t.reached for t in times)
    test: Any = binomtest(count, len(times))
    found = test.proportion_ci(1 - LEVEL, method="exact")
    return Interval(count / len(times), len(times), float(found.low), float(found.high))


def deviation(values: Sequence[float]) -> Interval:
    """Return the standard deviation between runs, with the interval of chi-squared: exact for normal values."""
    from scipy.special import chdtri

    values_N = np.asarray(values, dtype=np.float64)
    n = len(values_N)
    if n < 2:
        return Interval(float("nan"), n, why="1 run: no spread")
    sd = float(values_N.std(ddof=1))
    if n < FEWEST or _is_flat(values_N):
        return Interval(sd, n, why=f"{n} runs: no interval" if n < FEWEST else "all alike: no interval")
    low, high = (sd * sqrt((n - 1) / float(chdtri(n - 1, tail))) for tail in (LEVEL / 2, 1 - LEVEL / 2))
    return Interval(sd, n, low, high)


def robust_ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return var(a) / var(b) with Bonett's interval (2006, Computational Statistics and Data Analysis 50).

    The logarithm of the ratio is normal with a variance by the kurtosis of both samples together, about their trimmed
    means: for large samples it holds for any distribution that both share but for location and scale.
    """
    from scipy.special import ndtri
    from scipy.stats import trim_mean

    both = [np.asarray(values, dtype=np.float64) for values in (a, b)]
    n = min(map(len, both))
    if n < 2 or any(map(_is_flat, both)):
        why = "1 run: no spread" if n < 2 else "all runs of a group end alike: no ratio"
        return Interval(float("nan"), n, why=why)
    ratio = float(both[0].var(ddof=1) / both[1].var(ddof=1))
    if n < FEWEST_ROBUST:
        return Interval(ratio, n, why=f"{n} runs: no interval")
    z, (m, k) = float(ndtri(1 - LEVEL / 2)), map(len, both)
    fourth = sum(((v - trim_mean(v, min(0.49, 1 / (2 * sqrt(len(v) - 4))))) ** 4).sum() for v in both)
    second = sum(((v - v.mean()) ** 2).sum() for v in both)
    kurtosis = (m + k) * fourth / second**2
    square = sum((kurtosis - (size - 3) / size) / (size - 1) for size in (m, k))
    centre, half = log(m / (m - z) / (k / (k - z)) * ratio), z * sqrt(max(square, 0.0))
    return Interval(ratio, n, exp(centre - half), exp(centre + half))


def _is_flat(values_N: Floats) -> bool:
    return float(np.ptp(values_N)) <= FLAT * float(np.abs(values_N).max())


def draw(measure: str, threshold: float, groups: Sequence[Timed], folder: Path) -> list[Path]:
    """Draw what each run took to the threshold, a panel per budget, and where each run ended."""
    known = [by for by in UNITS if any(group.times[by] for group in groups)]
    found: list[Path] = []
    if known:
        figure = canvas(9.0, (0.5 * len(groups) + 1.1) * len(known) + 0.6, layout="constrained")
        panels = figure.subplots(len(known), 1, squeeze=False)[:, 0]
        what = f"To {visible(measure)} {threshold:.4g} (>: it was not reached; line: 95 % of the median)"
        for axes, by in zip(panels, known, strict=True):
            _times(axes, by, groups)
            frame(axes, what if by == known[0] else "", UNITS[by])
        found += save_both(figure, folder / "efficiency_times.png")
    figure = canvas(9.0, 0.5 * len(groups) + 1.8, layout="constrained")
    axes = figure.subplots()
    for index, group in enumerate(groups):
        axes.plot(list(group.ends.values()), [index] * len(group.ends), **_look(index))
    axes.axvline(threshold, color=INK, linestyle=(0, (2, 2)), linewidth=1.0)
    _rows(axes, [(group.label, "" if group.ends else "no run is finished") for group in groups])
    frame(axes, "Where runs end: each mark is a seed", f"{visible(measure)} on the test split; dashed: the threshold")
    return [*found, *save_both(figure, folder / "efficiency_ends.png")]


def _times(axes: Axes, by: str, groups: Sequence[Timed]) -> None:
    for index, group in enumerate(groups):
        times = list(group.times[by].values())
        if not times:
            continue
        for is_there in (True, False):
            amounts = [t.amount for t in times if t.reached is is_there]
            look: dict[str, Any] = _look(index) | ({} if is_there else {"marker": ">", "markerfacecolor": "white"})
            axes.plot(amounts, [index] * len(amounts), **look)
        middle, color = median(times), COLORS[index % len(COLORS)]
        if middle.low is not None and middle.high is not None:
            most = middle.high if isfinite(middle.high) else max(t.amount for t in times)
            axes.plot([middle.low, most], [index + 0.28] * 2, color=color, linewidth=2.0)
        if isfinite(middle.mean):
            axes.plot([middle.mean], [index + 0.28], color=color, marker="|", markersize=9)
    _rows(axes, [(group.label, "" if group.times[by] else "not known") for group in groups])
    axes.set_xlim(left=0)


def _rows(axes: Axes, rows: Sequence[tuple[str, str]]) -> None:
    """Label the rows, and write a note into those that have no mark."""
    box: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    for index, (_, note) in enumerate(rows):
        if note:
            axes.text(0.01, index - 0.05, note, transform=axes.get_yaxis_transform(), bbox=box, fontsize=9)
    axes.set_yticks(range(len(rows)), [shorten(visible(label), 36) for label, _ in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.invert_yaxis()


def _look(index: int) -> dict[str, Any]:
    look = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
    return {**look, "linestyle": "", "markersize": 5.5, "alpha": 0.8}
