# SPDX-License-Identifier: Apache-2.0
"""A comparison of runs as tables, in plain words, as Markdown and as JSON.

Labels, paths and names of measures may come from a run that was downloaded: they are shown as text, with every control
character and every mark that a terminal or Markdown would act on written out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoalign.analysis.compare import figures as figures
from evoalign.analysis.compare.comparison import Comparison, Group, Match, Matching, amount, flops_of
from evoalign.analysis.compare.runs import Run
from evoalign.analysis.compare.statistics import COVERAGE, LEVEL, PERMUTATION, Estimate, Pair, estimate
from evoalign.report.tables import shorten, visible
from evoalign.rundir.files import write_text

FORMAT_VERSION = 1
LABEL = 60
FEW = 3
"""More groups than so many that cannot be told apart from the leading one share a sentence."""
TITLES: dict[Matching, str] = {
    "wall": "wall time of training",
    "completions": "completions",
    "tokens": "tokens, generated and prompt",
    "flops": "FLOPs, forward and backward",
}
END = "the end of each run, budgets not matched"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of plain text: the first column names the rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


# --- words ------------------------------------------------------------------------------------------------------------


def summary(comparison: Comparison) -> list[str]:
    """Who is ahead where, or that it cannot be told: one sentence a budget and pair with its leader."""
    if len(comparison.groups) < 2:
        return ["There is one group of runs: nothing to compare it with."]
    lines: list[str] = []
    leaders: dict[str, str] = {}
    for match in (*comparison.matches, comparison.end):
        ranked = sorted((s for s in match.standings if s.estimate), key=lambda s: -_mean(s.estimate))
        if len(ranked) < 2:
            lines.append(f"{_where(match)}: fewer than two groups can be compared.")
            continue
        leader = ranked[0].group.label
        if match.by is not None:
            leaders[TITLES[match.by]] = leader
        said = _with_leader(leader, match, comparison.measure)
        lines += [f"{_where(match)}: {line}" for line in said]
    if len(set(leaders.values())) > 1:
        said = "; ".join(f"{label} by {by}" for by, label in leaders.items())
        lines.append(f"Which mean is highest depends on what is matched: {said}.")
    return lines


def sentence(pair: Pair, measure: str, tests: int = 1) -> str:
    """What the test of one pair allows to say, with n and p. `tests` is how many Holm's correction is over."""
    gap = f"{pair.difference:+.4g} in {measure}"
    if pair.low is not None and pair.high is not None:
        gap += f" (95 % t interval {pair.low:.4g} to {pair.high:.4g})"
    unsure = f"whether {pair.a} is above {pair.b} cannot be told: {gap}, n = {_seeds(pair)}"
    if pair.p is None or pair.p_adjusted is None:
        few = min(pair.n_a, pair.n_b) < 2
        return f"{unsure}, no test: {'it takes two seeds or more of each' if few else 'the seeds do not vary'}."
    p = f"{pair.test} p = {pair.p:.3g}" + (
        f" ({pair.p_adjusted:.3g} after Holm over {tests} pairs)" if tests > 1 else ""
    )
    if pair.p_adjusted < LEVEL:
        return f"{pair.a} is above {pair.b}: {gap}, n = {_seeds(pair)}, {p}."
    floor = pair.p_smallest
    if floor is None or floor * tests < LEVEL:
        return f"{unsure}, {p}."
    times = f" ({min(1.0, floor * tests):.3g} for the best of {tests} pairs)" if tests > 1 else ""
    return f"{unsure}, {p}; {pair.n_a} seeds can give no p below {floor:.3g}{times}, so no claim is possible."


def _with_leader(leader: str, match: Match, measure: str) -> list[str]:
    """A sentence for each group that the highest mean is compared with; one for all that it is not known to exceed,
    where these are many."""
    pairs, tests = [p for p in match.pairs if leader in (p.a, p.b)], len(_tested(match))
    sure = [p for p in pairs if p.a == leader and p.p_adjusted is not None and p.p_adjusted < LEVEL]
    unsure = [p for p in pairs if p not in sure]
    if len(unsure) <= FEW:
        return [sentence(pair, measure, tests) for pair in [*sure, *unsure]]
    others = "; ".join(f"{p.b if p.a == leader else p.a} (n = {_seeds(p)}, p = {_p(p.p_adjusted)})" for p in unsure)
    known = [sentence(pair, measure, tests) for pair in sure]
    return [*known, f"{leader} has the highest mean, and whether it is above these cannot be told: {others}. "
            f"The p are after Holm over {tests} pairs."]  # fmt: skip


def _p(value: float | None) -> str:
    return "not tested" if value is None else f"{value:.3g}"


def _seeds(pair: Pair) -> str:
    return f"{pair.n_a} shared seeds" if pair.paired else f"{pair.n_a} and {pair.n_b} runs, not paired"


def _where(match: Match) -> str:
    if match.by is None:
        return f"At {END}"
    return f"At equal {TITLES[match.by]} ({_quantity(match.by, match.limit)})"


def _tested(match: Match) -> list[Pair]:
    return [pair for pair in match.pairs if pair.p is not None]


def _mean(found: Estimate | None) -> float:
    return found.mean if found else -math.inf


# --- numbers ----------------------------------------------------------------------------------------------------------


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


def _bytes(value: float) -> str:
    return f"{value / 2**30:.3g} GiB"


def _interval(found: Estimate | None) -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.mean:.4g}"
    return f"{found.mean:.4g} [{found.low:.4g}, {found.high:.4g}]"


# --- tables -----------------------------------------------------------------------------------------------------------


def grids(comparison: Comparison) -> list[Grid]:
    """All tables, as text, in the order in which they are shown."""
    found: list[Grid] = []
    for match in comparison.matches:
        found += [standing_grid(comparison, match), *_pair_grids(match)]
    return [*found, end_grid(comparison), *_pair_grids(comparison.end), settings_grid(comparison)]


def standing_grid(comparison: Comparison, match: Match) -> Grid:
    """One row a group: what it reached within the budget."""
    rows = [
        (s.group.label, str(len(s.taken)), _interval(s.estimate), f"{s.share:.0%}" if s.taken else "-")
        for s in match.standings
    ]
    return Grid(_where(match), ("group", "seeds", f"{comparison.measure} [95 %]", "budget used"), tuple(rows))


def _pair_grids(match: Match) -> list[Grid]:
    if not match.pairs:
        return []
    header = ("pair", "n", "difference [95 %]", "effect size [95 %]", "deciding test", "p", "p, Holm", "other tests")
    return [Grid(f"{_where(match)}: tests", header, tuple(_pair_row(pair) for pair in match.pairs))]


def _pair_row(pair: Pair) -> tuple[str, ...]:
    others = [f"{name} {p:.3g}" for name, p in pair.p_values.items() if name != pair.test]
    return (
        f"{pair.a} - {pair.b}",
        _seeds(pair),
        _between(pair.difference, pair.low, pair.high),
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
    rows += [(f"{name} [95 %]", *(_at_end(name, runs) for runs in ends.values())) for name in comparison.measures]
    for name, (value, shown, pick) in _quantities().items():
        rows.append((name, *(_averaged([value(run) for run in runs], shown, pick) for runs in ends.values())))
    return Grid("At " + END, ("", *ends), tuple(rows))


def _at_end(name: str, runs: Sequence[Run]) -> str:
    return _interval(estimate([run.points[-1].measures[name] for run in runs])) if runs else "-"


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
        "KL from the base model, exact (nats a token)": (divergence("exact"), plain, "mean"),
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


# --- the terminal -----------------------------------------------------------------------------------------------------


def show(comparison: Comparison, console: Console) -> None:
    """What stands and falls with the budget, the end, and in words what follows."""
    for match in comparison.matches:
        console.print(_table(standing_grid(comparison, match)))
        _say(console, match.notes, "note: ")
    console.print(_table(end_grid(comparison)))
    _say(console, [f"left out: {path}: {why}" for path, why in comparison.left_out])
    _say(console, comparison.notes, "note: ")
    _say(console, summary(comparison))


def _table(grid: Grid) -> Table:
    table = Table(title=Text(_plain(grid.title)), title_justify="left", title_style="bold")
    for i, name in enumerate(grid.header):
        table.add_column(Text(_plain(name)), justify="right" if i else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    return table


def _say(console: Console, lines: Iterable[str], start: str = "") -> None:
    for line in lines:
        console.print(_plain(start + line, None), markup=False, highlight=False, soft_wrap=True)


def _plain(text: str, length: int | None = LABEL) -> str:
    shown = visible(text)
    return shown if length is None else shorten(shown, max(length, 80))


# --- files ------------------------------------------------------------------------------------------------------------


def write(comparison: Comparison, folder: str | Path) -> list[Path]:
    """Write comparison.md, comparison.json and the figures into a folder, and return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(comparison, folder)
    write_text(folder / "comparison.json", json.dumps(as_tree(comparison), indent=2, allow_nan=False) + "\n")
    write_text(folder / "comparison.md", markdown(comparison, {name: path.name for name, path in drawn.items()}))
    return [folder / "comparison.md", folder / "comparison.json", *drawn.values()]


def markdown(comparison: Comparison, pictures: dict[str, str] | None = None) -> str:
    """The whole comparison as a page. `pictures` are file names by matching, and `divergence`."""
    pictures = pictures or {}
    lines = [f"# Comparison of {len(comparison.groups)} groups of runs", ""]
    lines += _bullets(summary(comparison))
    problems = [f"left out: {path}: {why}" for path, why in comparison.left_out]
    lines += ["## Notes", "", *_bullets([*problems, *comparison.notes])] if problems or comparison.notes else []
    for match in comparison.matches:
        lines += [f"## {_escape(_where(match))}", ""]
        lines += _picture(pictures, match.by or "", f"{comparison.measure} against {match.by}")
        lines += [*_grid(standing_grid(comparison, match)), *_bullets(match.notes)]
        lines += [line for grid in _pair_grids(match) for line in _grid(grid)]
    lines += [f"## {_escape('At ' + END)}", "", *_grid(end_grid(comparison))]
    lines += [line for grid in _pair_grids(comparison.end) for line in _grid(grid)]
    lines += _picture(pictures, "divergence", f"{comparison.measure} against the divergence from the base model")
    settings = _grid(settings_grid(comparison))
    lines += ["<details><summary>Settings in which the groups differ</summary>", "", *settings, "</details>", ""]
    lines += HOW_TO_READ
    return "\n".join(lines) + "\n"


def _coverage() -> str:
    """How often a bootstrap interval really has the mean in it."""
    *rest, last = (f"{share} % with {n} seeds" for n, share in COVERAGE.items())
    return f"{', '.join(rest)} and {last}"


HOW_TO_READ = (
    "## How to read this",
    "",
    "- A budget is what training took; evaluation, figures and saving are not in it. Tokens are those of prompts and",
    "  of completions; `comparison.json` has the generated ones alone.",
    "- Each run is taken at its last evaluation within the budget that all runs reached. Nothing is interpolated and",
    "  no later evaluation is looked at; *budget used* says how far that one was.",
    "- Intervals of means are 95 % BCa bootstrap intervals over three seeds or more. With so few they are too narrow,",
    f"  and hold the true mean less often than they say: of normal samples in {_coverage()}.",
    "- Those of differences and the bands in figures are 95 % t intervals, which are right for normal samples.",
    f"- The {PERMUTATION} test over shared seeds decides, Welch's t test where fewer than two are shared, at 5 % after",
    "  Holm's correction over the pairs of one table. Other tests are shown and decide nothing. Each table is",
    "  corrected by itself: who looks at all of them for one that is significant looks more than once.",
    "- Effect sizes are in standard deviations (of paired differences, where paired) with Hedges' correction.",
    "- A hacked completion is empty, loops, plays other roles, or is a template given to many prompts. Read the share",
    "  beside the one before training: none of these signs is a proof.",
    "- If settings were chosen on this same test split, all of this is too good, and nothing here can know it.",
)


def _picture(pictures: dict[str, str], name: str, alternative: str) -> list[str]:
    return [f"![{_escape(alternative)}]({pictures[name]})", ""] if name in pictures else []


def _bullets(lines: Iterable[str]) -> list[str]:
    found = [f"- {_escape(line)}" for line in lines]
    return [*found, ""] if found else []


def _grid(grid: Grid) -> list[str]:
    if not grid.rows:
        return ["None.", ""]
    width = len(grid.header)
    rule = "|---|" + "---:|" * (width - 1)
    return [_row(grid.header), rule, *(_row(row) for row in grid.rows), ""]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_escape(cell) or " " for cell in cells) + " |"


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line: no link, picture, markup or mention."""
    return re.sub(r"([\\`*_\[\]<>|#!~$&@])", r"\\\1", visible(text))


def as_tree(comparison: Comparison) -> dict[str, Any]:
    """All numbers, for each seed, as comparison.json has them."""
    return {
        "format_version": FORMAT_VERSION,
        "measure": comparison.measure,
        "summary": summary(comparison),
        "notes": list(comparison.notes),
        "left_out": [{"path": str(path), "why": why} for path, why in comparison.left_out],
        "groups": [_group_tree(comparison, group) for group in comparison.groups],
        "matches": [_match_tree(match) for match in comparison.matches],
        "end": _match_tree(comparison.end),
    }


def _group_tree(comparison: Comparison, group: Group) -> dict[str, Any]:
    ends = [run.points[-1].measures for run in group.runs if run.finished]
    return {
        "label": group.label,
        "method": group.method,
        "settings": dict(group.settings),
        "differing": dict(group.differing),
        "end": {n: asdict(estimate([end[n] for end in ends])) for n in comparison.measures} if ends else {},
        "runs": [_run_tree(run) for run in group.runs],
    }


def _run_tree(run: Run) -> dict[str, Any]:
    return {
        "path": str(run.path),
        "seed": run.seed,
        "steps": run.steps,
        "finished": run.finished,
        "hardware": run.hardware,
        "cost": asdict(run.cost) if run.cost else None,
        "distance": dict(run.distance) if run.distance else None,
        "shares_before": dict(run.shares_before) if run.shares_before else None,
        "shares_after": dict(run.shares_after) if run.shares_after else None,
        "points": [
            {
                "step": point.step,
                "cost": asdict(point.cost) if point.cost else None,
                "measures": dict(point.measures),
                "divergence": dict(point.divergence) if point.divergence else None,
            }
            for point in run.points
        ],
    }


def _match_tree(match: Match) -> dict[str, Any]:
    return {
        "by": match.by,
        "limit": match.limit,
        "notes": list(match.notes),
        "groups": [
            {
                "label": s.group.label,
                "estimate": asdict(s.estimate) if s.estimate else None,
                "runs": [
                    {
                        "path": str(t.run.path),
                        "seed": t.run.seed,
                        "step": t.point.step,
                        "used": amount(match.by, t.point.cost) if match.by else None,
                        "share": t.share if match.by else None,
                        "measures": dict(t.point.measures),
                    }
                    for t in s.taken
                ],
            }
            for s in match.standings
        ],
        "pairs": [{**asdict(pair), "p_values": dict(pair.p_values)} for pair in match.pairs],
    }
