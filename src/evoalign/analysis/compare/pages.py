# SPDX-License-Identifier: Apache-2.0
"""Show a comparison on the terminal, and write it as Markdown, JSON and figures.

Labels, paths and measures may come from untrusted runs: control characters and markup are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoalign.analysis.compare import figures
from evoalign.analysis.compare.comparison import Comparison, Match, ends_only
from evoalign.analysis.compare.groups import Group
from evoalign.analysis.compare.runs import Run, amount
from evoalign.analysis.compare.statistics import PERMUTATION
from evoalign.analysis.compare.tables import (
    Grid,
    end_grid,
    pair_grids,
    place,
    settings_grid,
    standing_grid,
    summary,
)
from evoalign.report.tables import bullets, escape, shorten, visible
from evoalign.report.tables import markdown_table as table
from evoalign.rundir.files import make_folder, write_text
from evoalign.statistics import mean

FORMAT_VERSION = 1
LABEL = 80
"""Longest text of a table cell on the terminal."""


def show(comparison: Comparison, console: Console) -> None:
    """Print notes, tables and the verdicts."""
    verdicts, alone = [*_plan_line(comparison), *summary(comparison)], len(comparison.groups) < 2
    if alone:  # the reader would overlook it below the tables
        _print(console, verdicts)
    _print(console, [f"note: {note}" for note in comparison.notes])
    for match in comparison.matches:
        if match in comparison.shown:
            console.print(_table(standing_grid(comparison, match)))
        _print(console, _notes(comparison, match))
    console.print(_table(end_grid(comparison)))
    _print(console, [f"left out: {path}: {why}" for path, why in comparison.left_out])
    if not alone:
        _print(console, verdicts)


def _notes(comparison: Comparison, match: Match) -> list[str]:
    """Return the notes of a budget that no earlier budget has, each with the names of all budgets that have it.

    A budget without a table has none if its cause, a group without evaluations, is a note of the whole comparison.
    """
    by_match = [
        () if one not in comparison.shown and ends_only(comparison.groups) else one.notes for one in comparison.matches
    ]
    lines: list[str] = []
    for note in by_match[comparison.matches.index(match)]:
        having = [one for one, notes in zip(comparison.matches, by_match, strict=True) if note in notes]
        if having[0] is match:
            which = f" ({', '.join(one.by or '' for one in having)})" if len(having) > 1 else ""
            lines.append(f"note{which}: {note}")
    return lines


def _plan_line(comparison: Comparison) -> list[str]:
    plan = comparison.plan
    return [] if plan is None else [f"As planned in {plan.path.name} (SHA-256 {plan.sha256})."]


def _table(grid: Grid) -> Table:
    table = Table(title=_cell(grid.title), title_justify="left", title_style="bold")
    for i, name in enumerate(grid.header):
        table.add_column(_cell(name), justify="right" if i else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> Text:
    return Text(shorten(visible(text), LABEL))


def _print(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def write(comparison: Comparison, folder: str | Path) -> list[Path]:
    """Write comparison.md, comparison.json and the figures to a folder, and return their paths."""
    folder = Path(folder)
    make_folder(folder)
    drawn = figures.draw(comparison, folder)
    tree = {**as_tree(comparison), "figures": [path.name for path in drawn.values()]}
    write_text(folder / "comparison.json", json.dumps(tree, indent=2, allow_nan=False) + "\n")
    write_text(folder / "comparison.md", markdown(comparison, {name: path.name for name, path in drawn.items()}))
    return [folder / "comparison.md", folder / "comparison.json", *drawn.values()]


def markdown(comparison: Comparison, pictures: dict[str, str] | None = None) -> str:
    """Return the whole comparison as a page. `pictures` are file names by budget, and `divergence`."""
    pictures = pictures or {}
    lines = [f"# Comparison of {len(comparison.groups)} groups of runs", ""]
    lines += _bullets([*_plan_line(comparison), *summary(comparison)])
    problems = [f"left out: {path}: {why}" for path, why in comparison.left_out]
    lines += ["## Notes", "", *_bullets([*problems, *comparison.notes])] if problems or comparison.notes else []
    for match in comparison.matches:
        lines += [f"## {escape(place(match))}", ""]
        lines += _picture(pictures, match.by or "", f"{comparison.measure} against {match.by}")
        if match in comparison.shown:
            lines += _grid(standing_grid(comparison, match))
        else:
            lines += ["Fewer than two groups have a run within this budget.", ""]
        lines += _bullets(_notes(comparison, match))
        lines += [line for grid in pair_grids(match) for line in _grid(grid)]
    lines += [f"## {escape(place(comparison.end))}", "", *_grid(end_grid(comparison))]
    lines += [line for grid in pair_grids(comparison.end) for line in _grid(grid)]
    lines += _picture(pictures, "divergence", f"{comparison.measure} against the divergence from the base model")
    settings = _grid(settings_grid(comparison))
    lines += ["<details><summary>Settings in which the groups differ</summary>", "", *settings, "</details>", ""]
    lines += HOW_TO_READ
    return "\n".join(lines) + "\n"


HOW_TO_READ = (
    "## How to read this",
    "",
    "- A budget is the cost of training only, without evaluation, figures and saving. Tokens are those of prompts and",
    "  completions; `comparison.json` lists generated ones separately.",
    "- Each run is taken at its last evaluation within the budget, which a plan sets beforehand; without a plan it is",
    "  the largest that all runs reached, so it depends on the results. Nothing is interpolated. *Budget used* is the",
    "  cost of that evaluation.",
    "- Intervals of means and differences are 95 % t intervals over runs, for new seeds on the same test questions;",
    "  so are bands in figures. They are exact for normal samples and too wide for heavy tails; for skewed runs, those",
    "  of means cover 88 to 90 % only. The interquartile mean drops the lowest and highest quarter of five runs or",
    "  more; its interval is based on ranks and also valid for skewed runs.",
    "- Over runs and questions: for new seeds and new questions, if each run kept its answers to the same questions,",
    "  as runs do at their end. With three runs it is slightly too wide.",
    f"- The {PERMUTATION} test decides if two groups share nearly all seeds (80 % of the larger group's, at least",
    "  three), else Welch's t test over all runs, at 5 % after Holm's correction over the pairs of one table. Other",
    "  tests are shown only. Each table is corrected separately, so significance in one of several tables is weaker.",
    "- Effect sizes are in standard deviations (of paired differences if paired) with Hedges' correction; their",
    "  intervals assume normal samples.",
    "- A hacked completion earns a reward as high as the best with a wrong final answer, is broken (empty, loops,",
    "  numbers without context, special tokens, other scripts, extra turns), or is a template used for many prompts.",
    "  Compare the share with the one before training: none of these signs is a proof.",
    "- If settings were chosen on this test split, the results are too optimistic; this cannot be detected here.",
)


def _picture(pictures: dict[str, str], name: str, alternative: str) -> list[str]:
    return [f"![{escape(alternative)}]({pictures[name]})", ""] if name in pictures else []


def _bullets(lines: Iterable[str]) -> list[str]:
    return bullets(map(escape, lines))


def _grid(grid: Grid) -> list[str]:
    if not grid.rows:
        return ["None.", ""]
    return table([escape(cell) for cell in grid.header], [[escape(cell) for cell in row] for row in grid.rows])


# --- JSON -------------------------------------------------------------------------------------------------------------


def as_tree(comparison: Comparison) -> dict[str, Any]:
    """Return all numbers of each seed, as in comparison.json."""
    plan = comparison.plan
    return {
        "format_version": FORMAT_VERSION,
        "measure": comparison.measure,
        "plan": None if plan is None else {"sha256": plan.sha256, **plan.settings.model_dump(mode="json")},
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
        "end": {n: asdict(mean([end[n] for end in ends])) for n in comparison.measures} if ends else {},
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
        "points": [asdict(point) for point in run.points],
    }


def _match_tree(match: Match) -> dict[str, Any]:
    return {
        "by": match.by,
        "limit": match.limit,
        "planned": match.plan is not None,
        "notes": list(match.notes),
        "groups": [
            {
                "label": s.group.label,
                "estimate": asdict(s.estimate) if s.estimate else None,
                "over_questions": asdict(s.over_questions) if s.over_questions else None,
                "interquartile_mean": asdict(s.middle) if s.middle else None,
                "runs": [
                    {
                        "path": str(m.run.path),
                        "seed": m.run.seed,
                        "step": m.point.step,
                        "used": amount(match.by, m.point.cost) if match.by else None,
                        "share": m.share if match.by else None,
                        "measures": dict(m.point.measures),
                    }
                    for m in s.matched
                ],
            }
            for s in match.standings
        ],
        "pairs": [asdict(pair) for pair in match.pairs],
        "sensitivity": [asdict(found) for found in match.sensitivity],
    }
