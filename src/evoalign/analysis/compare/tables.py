# SPDX-License-Identifier: Apache-2.0
"""The tables of a comparison, as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evoalign.analysis.compare.comparison import Comparison, Group, Match, flops_of
from evoalign.analysis.compare.runs import Run
from evoalign.analysis.compare.sensitivity import SHARES
from evoalign.analysis.compare.statistics import Pair
from evoalign.analysis.compare.words import counted, duration, seeds, where
from evoalign.placebos.estimates import PlaceboResults, Split, Whole, drift_together
from evoalign.statistics import Estimate, mean

PLACEBO = "reward of the mean placebo"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of plain text: the first column names the rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def grids(comparison: Comparison) -> list[Grid]:
    """All tables, as text, in the order in which they are shown."""
    found: list[Grid] = []
    for match in comparison.shown:
        found += [standing_grid(comparison, match), *pair_grids(match)]
    return [*found, end_grid(comparison), *pair_grids(comparison.end), settings_grid(comparison)]


def standing_grid(comparison: Comparison, match: Match) -> Grid:
    """One row a group: what it reached within the budget. Columns that no group has anything for are left out."""
    measure = comparison.measure
    columns: list[tuple[str, list[str]]] = [
        ("runs", [str(len(s.taken)) for s in match.standings]),
        (f"{measure} [95 %, over runs]", [_interval(s.estimate) for s in match.standings]),
        (f"interquartile mean of {measure} [median, 92.5 % or more]", [_sure(s.middle) for s in match.standings]),
        ("[95 %, over runs and questions]", [_ends(s.over_questions) for s in match.standings]),
        ("budget used", [f"{s.share:.0%}" if s.taken else "-" for s in match.standings]),
    ]
    shown = [(name, cells) for name, cells in columns if set(cells) != {"-"} or name == "budget used"]
    labels = [s.group.label for s in match.standings]
    rows = zip(labels, *(cells for _, cells in shown), strict=True)
    return Grid(where(match), ("group", *(name for name, _ in shown)), tuple(rows))


def _sure(found: Estimate | None) -> str:
    """With its interval, or not at all."""
    return "-" if found is None or found.low is None else _interval(found)


def pair_grids(match: Match) -> list[Grid]:
    """One row a pair of groups: difference, effect size and tests; no table where there is no pair."""
    if not match.pairs:
        return []
    header = ("pair", "n", "difference [95 %]", "[95 %, over runs and questions]", "effect size [95 %]",
              "deciding test", "p", "p, Holm", "other tests")  # fmt: skip
    rows = [_pair_row(pair) for pair in match.pairs]
    shown = [i for i in range(len(header)) if i != 3 or any(row[i] != "-" for row in rows)]
    cut = [tuple(row[i] for i in shown) for row in (header, *rows)]
    return [Grid(f"{where(match)}: tests", cut[0], tuple(cut[1:])), *_sensitivity_grids(match)]


def _sensitivity_grids(match: Match) -> list[Grid]:
    """One row a pair that is decided on: its difference at parts of the budget, and without each of the runs."""
    if not match.sensitivity:
        return []
    header = ("difference [95 %]", *(f"at {share:.0%} of the budget" for share in SHARES), "without one run")
    rows = [
        (f"{s.a} - {s.b}", *(_interval(found) for _, found in s.at),
         "-" if s.without_one is None else "{:.4g} to {:.4g}".format(*s.without_one))
        for s in match.sensitivity
    ]  # fmt: skip
    return [Grid(f"{where(match)}: on what it hangs", header, tuple(rows))]


def _ends(found: Estimate | None) -> str:
    return "-" if found is None or found.low is None or found.high is None else f"[{found.low:.4g}, {found.high:.4g}]"


def _pair_row(pair: Pair) -> tuple[str, ...]:
    others = [f"{name} {p:.3g}" for name, p in pair.p_values.items() if name != pair.test]
    return (
        f"{pair.a} - {pair.b}",
        seeds(pair),
        _between(pair.difference, pair.low, pair.high),
        _ends(pair.over_questions),
        _between(pair.effect, pair.effect_low, pair.effect_high),
        pair.test or "none",
        "-" if pair.p is None else f"{pair.p:.3g}",
        "-" if pair.p_adjusted is None else f"{pair.p_adjusted:.3g}",
        ", ".join(others) or "-",
    )


def _between(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if low is None or high is None else f"{value:.3g} [{low:.3g}, {high:.3g}]"


Numbers = Callable[[Run], float | None]


def end_grid(comparison: Comparison) -> Grid:
    """One column a group: measures, text, divergence and costs of its finished runs, as means over them."""
    ends = {group.label: [run for run in group.runs if run.finished] for group in comparison.groups}
    rows = [("seeds", *(str(len(runs)) for runs in ends.values()))]
    loose = [sum(not run.verified for run in runs) for runs in ends.values()]
    rows += [("not verified", *map(str, loose))] if any(loose) else []
    alarms = [sum(run.alarm is not None for run in runs) for runs in ends.values()]
    rows += [("runs whose completions alarm", *map(str, alarms))] if any(alarms) else []
    rows += [(f"{name} [95 %]", *(_at_end(name, runs) for runs in ends.values())) for name in comparison.measures]
    for name, (value, shown, pick) in _quantities().items():
        rows.append((name, *(_averaged([value(run) for run in runs], shown, pick) for runs in ends.values())))
        if name == PLACEBO:
            rows += _drift_rows(list(ends.values()))
    return Grid(where(comparison.end), ("", *ends), tuple(rows))


def _drift_rows(groups: Sequence[Sequence[Run]]) -> list[tuple[str, ...]]:
    """How much of the gain is drift: of the reward and, where runs were trained for it, of `task.fitness`."""
    drift = "share of the gain that is drift, of all runs together"
    rows = [(drift, *map(_drift, groups))]
    names = {run.placebo.fitness.name for runs in groups for run in runs if run.placebo and run.placebo.fitness}
    for name in sorted(names):

        def of(known: PlaceboResults, name: str = name) -> Whole | None:
            return known.fitness if known.fitness and known.fitness.name == name else None

        means = [[None if found is None else found.mean for found in _known(runs, of)] for runs in groups]
        rows.append(
            (f"{name} of the mean placebo", *(_averaged(of_runs, "{:.4g}".format, "mean") for of_runs in means))
        )
        rows.append((f"{name}: {drift}", *(_drift(runs, of) for runs in groups)))
    return rows


def _known(runs: Sequence[Run], of: Callable[[PlaceboResults], Split | Whole | None]) -> list[Split | Whole | None]:
    return [None if run.placebo is None else of(run.placebo) for run in runs]


def _reward(known: PlaceboResults) -> Split:
    return known.reward


def _drift(runs: Sequence[Run], of: Callable[[PlaceboResults], Split | Whole | None] = _reward) -> str:
    known = [found for found in _known(runs, of) if found is not None]
    share = drift_together([(found.mean - found.before, found.real - found.before) for found in known])
    if share is None:
        return "-"
    text = f"{share:.0%}"
    return text if len(known) == len(runs) else f"{text} (of {len(known)})"


def _at_end(name: str, runs: Sequence[Run]) -> str:
    return _interval(mean([run.points[-1].measures[name] for run in runs])) if runs else "-"


def _quantities() -> dict[str, tuple[Numbers, Callable[[float], str], str]]:
    """Of a finished run, what the table at the end has beside the measures: the number, its form, mean or max."""

    def share(name: str) -> Numbers:
        return lambda run: (run.shares_after or {}).get(name)

    def divergence(name: str) -> Numbers:
        return lambda run: (run.points[-1].divergence or {}).get(name)

    def distance(name: str) -> Numbers:
        return lambda run: (run.distance or {}).get(name)

    def spent(name: str) -> Numbers:
        return lambda run: getattr(run.cost, name) if run.cost else None

    percent, plain = "{:.1%}".format, "{:.4g}".format
    return {
        "hacked share": (share("hacked"), percent, "mean"),
        "hacked share before training": (lambda run: (run.shares_before or {}).get("hacked"), percent, "mean"),
        "truncated share": (share("truncated"), percent, "mean"),
        PLACEBO: (lambda run: run.placebo.reward.mean if run.placebo else None, plain, "mean"),
        "KL from the base model, exact (nats a token)": (divergence("exact"), plain, "mean"),
        "KL from the base model, exact (nats a completion)": (divergence("completion"), plain, "mean"),
        "tokens that the KL is over": (divergence("tokens"), plain, "mean"),
        "KL from the base model, k3": (divergence("k3"), plain, "mean"),
        "distance moved, L2": (distance("l2"), plain, "mean"),
        "distance moved, relative": (distance("relative"), plain, "mean"),
        "generations or steps": (lambda run: float(run.steps), plain, "mean"),
        "completions": (spent("completions"), counted, "mean"),
        "tokens generated": (spent("generated_tokens"), counted, "mean"),
        "tokens of prompts": (spent("prompt_tokens"), counted, "mean"),
        "FLOPs": (lambda run: flops_of(run.cost) if run.cost else None, counted, "mean"),
        "wall time": (spent("wall_seconds"), duration, "mean"),
        "device time": (spent("device_seconds"), duration, "mean"),
        "seconds a step": (lambda run: run.cost.wall_seconds / run.steps if run.cost else None, plain, "mean"),
        "peak memory, highest": (spent("peak_memory_bytes"), _bytes, "max"),
    }


def _averaged(values: Sequence[float | None], shown: Callable[[float], str], pick: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = shown(max(known) if pick == "max" else sum(known) / len(known))
    return text if len(known) == len(values) else f"{text} (of {len(known)})"


def settings_grid(comparison: Comparison) -> Grid:
    """The settings in which groups differ."""
    names = sorted({name for group in comparison.groups for name in group.differing})
    rows = [(name, *(_setting(group, name) for group in comparison.groups)) for name in names]
    return Grid("Settings that differ", ("", *(group.label for group in comparison.groups)), tuple(rows))


def _setting(group: Group, name: str) -> str:
    if name not in group.differing:
        return "-"
    value = group.differing[name]
    return value if isinstance(value, str) else json.dumps(value)


def _bytes(value: float) -> str:
    return f"{value / 2**30:.3g} GiB"


def _interval(found: Estimate | None) -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.mean:.4g}"
    return f"{found.mean:.4g} [{found.low:.4g}, {found.high:.4g}]"
