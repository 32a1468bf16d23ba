# SPDX-License-Identifier: Apache-2.0
"""A comparison in plain words: who is ahead where, or that the seeds cannot say."""

from __future__ import annotations

import math

from evoalign.analysis.compare.comparison import Comparison, Match, Matching
from evoalign.analysis.compare.statistics import Pair
from evoalign.statistics import LEVEL, Estimate

FEW = 3
"""More groups than so many that cannot be determined apart from the leading one share a sentence."""
TITLES: dict[Matching, str] = {
    "wall": "wall time of training",
    "completions": "completions",
    "tokens": "tokens, generated and prompt",
    "flops": "FLOPs, forward and backward",
}
END = "the end of each run, budgets not matched"


def summary(comparison: Comparison) -> list[str]:
    """Who is ahead where, or that it cannot be determined: one sentence a budget and pair with its leader."""
    if len(comparison.groups) < 2:
        return [
            "There is one group of runs, which differ in their seed alone: nothing to compare it with. `evoalign eval` "
            "gives their mean over seeds."
        ]
    lines: list[str] = []
    leaders: dict[str, str] = {}
    for match in (*comparison.matches, comparison.end):
        if match.exploratory:
            lines.append(f"{where(match)}: not in the plan, so shown as exploratory and not decided.")
            continue
        if match.plan is not None:
            lines += [f"{where(match)}: {line}" for line in _as_planned(match, comparison.measure)]
            continue
        ranked = sorted((s for s in match.standings if s.estimate), key=lambda s: -_mean(s.estimate))
        if len(ranked) < 2:
            lines.append(f"{where(match)}: fewer than two groups can be compared.")
            continue
        leader = ranked[0].group.label
        if match.by is not None:
            leaders[TITLES[match.by]] = leader
        said = _with_leader(leader, match, comparison.measure)
        lines += [f"{where(match)}: {line}" for line in said]
    if len(set(leaders.values())) > 1:
        said = "; ".join(f"{label} by {by}" for by, label in leaders.items())
        lines.append(f"Which mean is highest depends on what is matched: {said}.")
    return lines


def sentence(pair: Pair, measure: str, tests: int = 1, level: float = LEVEL) -> str:
    """What the test of one pair allows to say, with n and p. `tests` is how many Holm's correction is over."""
    gap = f"{pair.difference:+.4g} in {measure}{_intervals(pair)}"
    unsure = f"whether {pair.a} is above {pair.b} cannot be determined: {gap}, n = {seeds(pair)}"
    if pair.p is None or pair.p_adjusted is None:
        few = min(pair.n_a, pair.n_b) < 2
        return f"{unsure}, no test: {'it takes two seeds or more of each' if few else 'the seeds do not vary'}."
    p = f"{pair.test} p = {pair.p:.3g}" + (
        f" ({pair.p_adjusted:.3g} after Holm over {tests} pairs)" if tests > 1 else ""
    )
    if pair.p_adjusted < level:
        over = pair.over_questions
        unsure = over is not None and over.low is not None and over.low <= 0
        alone = " On these questions: whether it is on others cannot be determined." if unsure else ""
        return f"{pair.a} is above {pair.b}: {gap}, n = {seeds(pair)}, {p}.{alone}"
    floor = pair.p_smallest
    if floor is None or floor * tests < level:
        return f"{unsure}, {p}."
    times = f" ({min(1.0, floor * tests):.3g} for the best of {tests} pairs)" if tests > 1 else ""
    return f"{unsure}, {p}; {pair.n_a} seeds can give no p below {floor:.3g}{times}, so no claim is possible."


def _intervals(pair: Pair) -> str:
    said: list[str] = []
    if pair.low is not None and pair.high is not None:
        said.append(f"95 % t interval {pair.low:.4g} to {pair.high:.4g}")
    over = pair.over_questions
    if over is not None and over.low is not None and over.high is not None:
        said.append(f"over {over.items} questions, too, {over.low:.4g} to {over.high:.4g}")
    return f" ({'; '.join(said)})" if said else ""


def _with_leader(leader: str, match: Match, measure: str) -> list[str]:
    """A sentence for each group that the highest mean is compared with; one for all that it is not known to exceed,
    where these are many."""
    pairs, tests = [p for p in match.pairs if leader in (p.a, p.b)], len(_tested(match))
    sure = [p for p in pairs if p.a == leader and p.p_adjusted is not None and p.p_adjusted < LEVEL]
    unsure = [p for p in pairs if p not in sure]
    if len(unsure) <= FEW:
        return [sentence(pair, measure, tests) for pair in [*sure, *unsure]]
    others = "; ".join(f"{p.b if p.a == leader else p.a} (n = {seeds(p)}, p = {_p(p.p_adjusted)})" for p in unsure)
    known = [sentence(pair, measure, tests) for pair in sure]
    return [*known, f"{leader} has the highest mean, and whether it is above these cannot be determined: {others}. "
            f"The p are after Holm over {tests} pairs."]  # fmt: skip


def _as_planned(match: Match, measure: str) -> list[str]:
    """A sentence for each pair of the plan, whoever is ahead; none for others."""
    assert match.plan is not None
    plan = match.plan.settings
    pairs = [pair for pair in match.pairs if plan.is_primary(pair.a, pair.b)]
    lines = [sentence(pair, measure, len([p for p in pairs if p.p is not None]), match.level) for pair in pairs]
    missing = [pair for pair in plan.primary if not any(set(pair) == {p.a, p.b} for p in pairs)]
    return lines + [f"{a} and {b} cannot be compared: one has no run within the budget." for a, b in missing]


def _p(value: float | None) -> str:
    return "not tested" if value is None else f"{value:.3g}"


def seeds(pair: Pair) -> str:
    """How many runs a test is over."""
    return f"{pair.n_a} shared seeds" if pair.paired else f"{pair.n_a} and {pair.n_b} runs, not paired"


def _tested(match: Match) -> list[Pair]:
    return [pair for pair in match.pairs if pair.p is not None]


def _mean(found: Estimate | None) -> float:
    return found.mean if found else -math.inf


def where(match: Match) -> str:
    """At which budget."""
    if match.by is None:
        return f"At {END}" + (", exploratory" if match.exploratory else "")
    planned = ", as planned" if match.plan else ""
    return f"At equal {TITLES[match.by]} ({_quantity(match.by, match.limit)}{planned})"


def _quantity(by: Matching, value: float | None) -> str:
    if value is None:
        return "not known"
    return duration(value) if by == "wall" else counted(value)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"


def counted(value: float) -> str:
    """Whole below ten thousand, then in powers of ten."""
    if value < 10_000:
        return f"{value:,.0f}"
    power = int(math.log10(value)) // 3 * 3
    prefix = {3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", 21: "Z"}.get(power)
    return f"{value / 10**power:.3g} {prefix}" if prefix else f"{value:.3g}"
