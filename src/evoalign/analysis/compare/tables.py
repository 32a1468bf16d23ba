# SPDX-License-Identifier: Apache-2.0
"""The tables of a comparison as text, and its verdicts: which group is ahead at each budget, if significant."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evoalign.analysis.compare.comparison import Comparison, Match
from evoalign.analysis.compare.runs import Matching, Run
from evoalign.analysis.compare.statistics import SHARES, Pair
from evoalign.placebos.estimates import Split, Whole, drift_together, is_gain_together
from evoalign.statistics import LEVEL, Estimate, mean

FEW = 3
"""If the leading group is not significantly above more groups than this, they share a sentence."""
TITLES: dict[Matching, str] = {
    "wall": "wall time of training",
    "completions": "completions",
    "tokens": "tokens, generated and prompt",
    "flops": "FLOPs, forward and backward",
}
END = "the end of each run, budgets not matched"
PLACEBO = "reward of the mean placebo"
DRIFT = "share of the gain that would have come without signal, all runs pooled"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of plain text: the first column names the rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def standing_grid(comparison: Comparison, match: Match) -> Grid:
    """Return the results within the budget, a row per group, without columns that are empty."""
    measure, standings = comparison.measure, match.standings
    ranked = [s.middle if s.middle and s.middle.low is not None else None for s in standings]
    columns: list[tuple[str, list[str]]] = [
        ("runs", [str(len(s.matched)) for s in standings]),
        (f"{measure} [95 %, over runs]", [_interval(s.estimate) for s in standings]),
        (f"interquartile mean of {measure} [median, 92.5 % or more]", [_interval(middle) for middle in ranked]),
        ("[95 %, over runs and questions]", [_ends(s.over_questions) for s in standings]),
        ("budget used", [f"{s.share:.0%}" if s.matched else "-" for s in standings]),
    ]
    shown = [(name, cells) for name, cells in columns if set(cells) != {"-"} or name == "budget used"]
    rows = zip([s.group.label for s in standings], *(cells for _, cells in shown), strict=True)
    return Grid(place(match), ("group", *(name for name, _ in shown)), tuple(rows))


def pair_grids(match: Match) -> list[Grid]:
    """Return the tests, a row per pair of groups, and the sensitivity of those that are decided on."""
    if not match.pairs:
        return []
    header = ("pair", "n", "difference [95 %]", "[95 %, over runs and questions]", "effect size [95 %]")
    header += ("deciding test", "p", "p, Holm", "other tests")
    rows = [_pair_row(pair) for pair in match.pairs]
    shown = [i for i in range(len(header)) if i != 3 or any(row[i] != "-" for row in rows)]
    cut = [tuple(row[i] for i in shown) for row in (header, *rows)]
    tests = Grid(f"{place(match)}: tests", cut[0], tuple(cut[1:]))
    if not match.sensitivity:
        return [tests]
    header = ("difference [95 %]", *(f"at {share:.0%} of the budget" for share in SHARES), "without one run")
    rows = [
        (
            f"{s.a} - {s.b}",
            *(_interval(found) for _, found in s.at),
            "-" if s.without_one is None else "{:.4g} to {:.4g}".format(*s.without_one),
        )
        for s in match.sensitivity
    ]
    return [tests, Grid(f"{place(match)}: sensitivity", header, tuple(rows))]


def _pair_row(pair: Pair) -> tuple[str, ...]:
    others = [f"{name} {p:.3g}" for name, p in pair.p_values.items() if name != pair.test]
    return (
        f"{pair.a} - {pair.b}",
        _runs(pair),
        _shown(pair.difference, pair.low, pair.high, ".3g"),
        _ends(pair.over_questions),
        _shown(pair.effect, pair.effect_low, pair.effect_high, ".3g"),
        pair.test or "none",
        "-" if pair.p is None else f"{pair.p:.3g}",
        "-" if pair.p_adjusted is None else f"{pair.p_adjusted:.3g}",
        ", ".join(others) or "-",
    )


def end_grid(comparison: Comparison) -> Grid:
    """Return measures, signs of hacking, divergence and costs of finished runs, averaged, a column per group."""
    ends = {group.label: [run for run in group.runs if run.finished] for group in comparison.groups}
    columns = list(ends.values())
    rows = [("seeds", *(str(len(runs)) for runs in columns))]
    counts = {
        "not verified": [sum(not run.verified for run in runs) for runs in columns],
        "runs with a warning on their completions": [sum(run.alarm is not None for run in runs) for runs in columns],
    }
    rows += [(name, *map(str, numbers)) for name, numbers in counts.items() if any(numbers)]
    for name in comparison.measures:
        values = [[run.points[-1].measures[name] for run in runs] for runs in columns]
        rows.append((f"{name} [95 %]", *(_interval(mean(of)) if of else "-" for of in values)))
    for name, path, shown, pick in QUANTITIES:
        rows.append((name, *(_averaged([_number(run, path) for run in runs], shown, pick) for runs in columns)))
        if name == PLACEBO:  # then the drift of the reward, and of each `task.fitness` that runs were trained for
            rows.append((DRIFT, *(_drift(runs, "reward") for runs in columns)))
            known = [run.placebo.fitness for runs in columns for run in runs if run.placebo]
            for own in sorted({fitness.name for fitness in known if fitness}):
                means = [[found and found.mean for found in _placebos(runs, own)] for runs in columns]
                rows.append((f"{own} of the mean placebo", *(_averaged(of, PLAIN, "mean") for of in means)))
                rows.append((f"{own}: {DRIFT}", *(_drift(runs, own) for runs in columns)))
    return Grid(place(comparison.end), ("", *ends), tuple(rows))


def _placebos(runs: Sequence[Run], name: str) -> list[Split | Whole | None]:
    """Return each run's placebos in the reward, or in the `task.fitness` of this name."""
    found: list[Split | Whole | None] = []
    for known in (run.placebo for run in runs):
        whole = None if known is None or known.fitness is None or known.fitness.name != name else known.fitness
        found.append(known.reward if known is not None and name == "reward" else whole)
    return found


def _drift(runs: Sequence[Run], name: str) -> str:
    """Return the share of drift of all runs, or why there is none, as `evoalign placebo` says it of one run."""
    known = [found for found in _placebos(runs, name) if found is not None]
    share = drift_together([(found.mean - found.before, found.real - found.before) for found in known])
    splits = [found for found in known if isinstance(found, Split)]
    if splits and not is_gain_together([found.gain for found in splits]):
        text = "no significant gain"
    elif share is None:
        return "-"
    elif splits and sum(len(found.placebos) for found in splits) == 1:
        text = "not known from one placebo"
    elif splits and round(share, 2) < 0:
        text = "none shown"
    else:
        text = f"{round(share, 2) + 0.0:.0%}" if share <= 1 or not splits else "may be all"
    return text if len(known) == len(runs) else f"{text} (of {len(known)})"


def _averaged(values: Sequence[float | None], shown: Callable[[float], str], pick: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = shown(max(known) if pick == "max" else sum(known) / len(known))
    return text if len(known) == len(values) else f"{text} (of {len(known)})"


def settings_grid(comparison: Comparison) -> Grid:
    """Return the settings in which groups differ, a column per group."""
    rows: list[tuple[str, ...]] = []
    for name in sorted({name for group in comparison.groups for name in group.differing}):
        values = [group.differing.get(name, "-") for group in comparison.groups]
        rows.append((name, *(value if isinstance(value, str) else json.dumps(value) for value in values)))
    return Grid("Settings that differ", ("", *(group.label for group in comparison.groups)), tuple(rows))


# --- verdicts ---------------------------------------------------------------------------------------------------------


def summary(comparison: Comparison) -> list[str]:
    """Return the verdicts: for each budget, the leading group compared with the others, or the pairs of the plan."""
    if len(comparison.groups) < 2:
        return [
            "There is only one group of runs, so nothing to compare. `evoalign eval` gives the mean over its seeds."
        ]
    lines: list[str] = []
    leaders: dict[str, str] = {}
    for match in (*comparison.matches, comparison.end):
        if match.exploratory:
            lines.append(f"{place(match)}: not in the plan, so not decided.")
            continue
        if match.plan is not None:
            lines += [f"{place(match)}: {line}" for line in _planned_verdicts(match, comparison.measure)]
            continue
        ranked = sorted((s for s in match.standings if s.estimate), key=lambda s: -s.estimate.mean if s.estimate else 0)
        if len(ranked) < 2:
            lines.append(f"{place(match)}: fewer than two groups can be compared.")
            continue
        leader = ranked[0].group.label
        if match.by is not None:
            leaders[TITLES[match.by]] = leader
        lines += [f"{place(match)}: {line}" for line in _leader_verdicts(leader, match, comparison.measure)]
    if len(set(leaders.values())) > 1:
        which = "; ".join(f"{label} by {by}" for by, label in leaders.items())
        lines.append(f"Which group leads depends on the budget: {which}.")
    return lines


def verdict(pair: Pair, measure: str, tests: int = 1, level: float = LEVEL) -> str:
    """Return the verdict of the test of one pair; Holm's correction is over `tests` pairs."""
    intervals: list[str] = []
    if pair.low is not None and pair.high is not None:
        intervals.append(f"95 % t interval {pair.low:.4g} to {pair.high:.4g}")
    over = pair.over_questions
    if over is not None and over.low is not None and over.high is not None:
        intervals.append(f"over {over.items} questions too: {over.low:.4g} to {over.high:.4g}")
    within = f" ({'; '.join(intervals)})" if intervals else ""
    gap = f"{pair.difference:+.4g} in {measure}{within}, n = {_runs(pair)}"
    both = f"{pair.a} against {pair.b}, {gap}"
    undecided = f"not significant: {both}"
    if pair.p is None or pair.p_adjusted is None:
        why = "needs two seeds or more of each" if min(pair.n_a, pair.n_b) < 2 else "the seeds do not vary"
        return f"not tested: {both}: {why}."
    adjusted = f" ({pair.p_adjusted:.3g} with Holm's correction over {tests} pairs)" if tests > 1 else ""
    p = f"{pair.test} p = {pair.p:.3g}{adjusted}"
    if pair.p_adjusted < level:
        caveat = over is not None and over.low is not None and over.low <= 0
        alone = " This holds for these questions only: over new questions it is not significant." if caveat else ""
        return f"{pair.a} is above {pair.b}: {gap}, {p}.{alone}"
    floor = pair.p_smallest
    if floor is None or floor * tests < level:
        return f"{undecided}, {p}."
    best = f" ({min(1.0, floor * tests):.3g} for the best of {tests} pairs)" if tests > 1 else ""
    return f"{undecided}, {p}; with {pair.n_a} seeds the smallest possible p is {floor:.3g}{best}: run more seeds."


def _leader_verdicts(leader: str, match: Match, measure: str) -> list[str]:
    pairs, tests = [p for p in match.pairs if leader in (p.a, p.b)], sum(pair.p is not None for pair in match.pairs)
    sure = [p for p in pairs if p.a == leader and p.p_adjusted is not None and p.p_adjusted < LEVEL]
    unsure = [p for p in pairs if p not in sure]
    if len(unsure) <= FEW:
        return [verdict(pair, measure, tests) for pair in [*sure, *unsure]]
    others: list[str] = []
    for pair in unsure:
        p = "not tested" if pair.p_adjusted is None else f"{pair.p_adjusted:.3g}"
        others.append(f"{pair.b if pair.a == leader else pair.a} (n = {_runs(pair)}, p = {p})")
    last = (
        f"{leader} has the highest mean, not significantly above {'; '.join(others)}. p with Holm over {tests} pairs."
    )
    return [*(verdict(pair, measure, tests) for pair in sure), last]


def _planned_verdicts(match: Match, measure: str) -> list[str]:
    assert match.plan is not None
    plan = match.plan.settings
    pairs = [pair for pair in match.pairs if plan.is_primary(pair.a, pair.b)]
    tests = sum(pair.p is not None for pair in pairs)
    missing = [pair for pair in plan.primary if not any(set(pair) == {p.a, p.b} for p in pairs)]
    lines = [verdict(pair, measure, tests, match.level) for pair in pairs]
    return lines + [f"{a} and {b} cannot be compared: one has no run within the budget." for a, b in missing]


# --- text -------------------------------------------------------------------------------------------------------------


def place(match: Match) -> str:
    """Return the budget as a title."""
    if match.by is None:
        return f"At {END}" + (", exploratory" if match.exploratory else "")
    size = "not known"
    if match.limit is not None:
        size = duration(match.limit) if match.by == "wall" else counted(match.limit)
    return f"At equal {TITLES[match.by]} ({size}{', as planned' if match.plan else ''})"


def _runs(pair: Pair) -> str:
    return f"{pair.n_a} shared seeds" if pair.paired else f"{pair.n_a} and {pair.n_b} runs, not paired"


def _interval(found: Estimate | None) -> str:
    return "-" if found is None else _shown(found.mean, found.low, found.high, ".4g")


def _shown(value: float | None, low: float | None, high: float | None, form: str) -> str:
    if value is None:
        return "-"
    return f"{value:{form}}" if low is None or high is None else f"{value:{form}} [{low:{form}}, {high:{form}}]"


def _ends(found: Estimate | None) -> str:
    return "-" if found is None or found.low is None or found.high is None else f"[{found.low:.4g}, {found.high:.4g}]"


def duration(seconds: float) -> str:
    """Return seconds, minutes or hours."""
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"


def counted(value: float) -> str:
    """Return a whole number below ten thousand, and above it one with an SI prefix."""
    if value < 10_000:
        return f"{value:,.0f}"
    power = int(math.log10(value)) // 3 * 3
    prefix = {3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", 21: "Z"}.get(power)
    return f"{value / 10**power:.3g} {prefix}" if prefix else f"{value:.3g}"


def _number(run: Run, path: str) -> float | None:
    """Return the number of a run at a dotted path of attributes and keys; None if a part is missing."""
    value: Any = run
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return None if value is None else float(value)


PERCENT, PLAIN = "{:.1%}".format, "{:.4g}".format
QUANTITIES: tuple[tuple[str, str, Callable[[float], str], str], ...] = (
    ("hacked share", "shares_after.hacked", PERCENT, "mean"),
    ("hacked share before training", "shares_before.hacked", PERCENT, "mean"),
    ("truncated share", "shares_after.truncated", PERCENT, "mean"),
    (PLACEBO, "placebo.reward.mean", PLAIN, "mean"),
    ("KL from the base model, exact (nats per token)", "divergence.exact", PLAIN, "mean"),
    ("KL from the base model, exact (nats per completion)", "divergence.completion", PLAIN, "mean"),
    ("tokens of the KL estimate", "divergence.tokens", PLAIN, "mean"),
    ("KL from the base model, k3", "divergence.k3", PLAIN, "mean"),
    ("distance moved, L2", "distance.l2", PLAIN, "mean"),
    ("distance moved, relative", "distance.relative", PLAIN, "mean"),
    ("generations or steps", "steps", PLAIN, "mean"),
    ("completions", "cost.completions", counted, "mean"),
    ("tokens generated", "cost.generated_tokens", counted, "mean"),
    ("tokens of prompts", "cost.prompt_tokens", counted, "mean"),
    ("FLOPs", "flops", counted, "mean"),
    ("wall time", "cost.wall_seconds", duration, "mean"),
    ("device time", "cost.device_seconds", duration, "mean"),
    ("seconds per step", "seconds_per_step", PLAIN, "mean"),
    ("peak memory, highest", "cost.peak_memory_bytes", lambda value: f"{value / 2**30:.3g} GiB", "max"),
)
"""Rows of the table at the end: name, where a run has the number, format, and whether mean or maximum is shown."""
