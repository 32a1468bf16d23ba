# SPDX-License-Identifier: Apache-2.0
"""Show a comparison on the terminal, and write it as Markdown, JSON and figures.

Labels, paths and measures may come from untrusted runs: control characters and markup are escaped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoalign.analysis.compare import figures
from evoalign.analysis.compare.comparison import Comparison, Match, ends_only
from evoalign.analysis.compare.groups import Group
from evoalign.analysis.compare.runs import amount
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
from evoalign.report.tables import escape, markdown_table, shorten, tell, visible
from evoalign.rundir.files import make_folder, write_json, write_text
from evoalign.statistics import mean

FORMAT_VERSION = 1
LABEL = 80
"""Longest text of a table cell on the terminal."""


def show(comparison: Comparison, console: Console) -> None:
    """Print notes, tables and the verdicts."""

    def lines(found: Iterable[str]) -> None:
        for line in found:
            tell(console, line)

    verdicts, alone = _verdicts(comparison), len(comparison.groups) < 2
    if alone:  # the reader would overlook it below the tables
        lines(verdicts)
    lines(f"note: {note}" for note in comparison.notes)
    for match in comparison.matches:
        if match in comparison.shown:
            console.print(_table(standing_grid(comparison, match)))
        lines(_notes(comparison, match))
    console.print(_table(end_grid(comparison)))
    lines(f"left out: {path}: {why}" for path, why in comparison.left_out)
    if not alone:
        lines(verdicts)


def _verdicts(comparison: Comparison) -> list[str]:
    plan = comparison.plan
    planned = [] if plan is None else [f"As planned in {plan.path.name} (SHA-256 {plan.sha256})."]
    return [*planned, *summary(comparison)]


def _notes(comparison: Comparison, match: Match) -> list[str]:
    """Return the notes of a budget that no earlier budget has, each with the names of all budgets that have it.

    A budget without a table has none if its cause, a group without evaluations, is a note of the whole comparison.
    """
    never = bool(ends_only(comparison.groups))
    by_match = [() if never and one not in comparison.shown else one.notes for one in comparison.matches]
    lines: list[str] = []
    for note in by_match[comparison.matches.index(match)]:
        having = [one for one, notes in zip(comparison.matches, by_match, strict=True) if note in notes]
        if having[0] is match:
            which = f" ({', '.join(one.by or '' for one in having)})" if len(having) > 1 else ""
            lines.append(f"note{which}: {note}")
    return lines


def _table(grid: Grid) -> Table:
    title, *header = (Text(shorten(visible(text), LABEL)) for text in (grid.title, *grid.header))
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(shorten(visible(cell), LABEL)) for cell in row))
    return table


def write(comparison: Comparison, folder: str | Path) -> list[Path]:
    """Write comparison.md, comparison.json and the figures to a folder, and return their paths."""
    folder = Path(folder)
    make_folder(folder)
    drawn = figures.draw(comparison, folder)
    tree = {**as_tree(comparison), "figures": [path.name for path in drawn.values()]}
    write_json(folder / "comparison.json", tree)
    write_text(folder / "comparison.md", markdown(comparison, {name: path.name for name, path in drawn.items()}))
    return [folder / "comparison.md", folder / "comparison.json", *drawn.values()]


@functools.cache
def _template() -> jinja2.Template:
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("evoalign.analysis", "compare"),
        autoescape=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    env.filters |= {"escape": escape, "markdown": _markdown}
    return env.get_template("comparison.md.jinja")


def _markdown(grid: Grid) -> str:
    rows = [[escape(cell) for cell in row] for row in (grid.header, *grid.rows)]
    return "\n".join(markdown_table(rows[0], rows[1:])[:-1])


def markdown(comparison: Comparison, pictures: Mapping[str, str] | None = None) -> str:
    """Return the whole comparison as a page. `pictures` are file names by budget, and `divergence`."""
    return _template().render(
        found=comparison,
        pictures=pictures or {},
        verdicts=_verdicts(comparison),
        problems=[*(f"left out: {path}: {why}" for path, why in comparison.left_out), *comparison.notes],
        notes=_notes,
        place=place,
        standing_grid=standing_grid,
        pair_grids=pair_grids,
        end_grid=end_grid,
        settings_grid=settings_grid,
        permutation=PERMUTATION,
    )


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
    copied = ("seed", "steps", "finished", "hardware", "distance", "shares_before", "shares_after")
    return {
        "label": group.label,
        "method": group.method,
        "settings": dict(group.settings),
        "differing": dict(group.differing),
        "end": {n: asdict(mean([end[n] for end in ends])) for n in comparison.measures} if ends else {},
        "runs": [
            {
                "path": str(run.path),
                **{name: getattr(run, name) for name in copied},
                "cost": asdict(run.cost) if run.cost else None,
                "points": [asdict(point) for point in run.points],
            }
            for run in group.runs
        ],
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
