# SPDX-License-Identifier: Apache-2.0
"""A comparison on the terminal and as a page of Markdown, with its numbers and figures beside it.

Labels, paths and names of measures may come from a run that was downloaded: they are shown as text, with every control
character and every mark that a terminal or Markdown would act on written out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoalign.analysis.compare import figures as figures
from evoalign.analysis.compare.comparison import Comparison, Match
from evoalign.analysis.compare.groups import at_the_end_alone
from evoalign.analysis.compare.statistics import PERMUTATION
from evoalign.analysis.compare.tables import Grid, end_grid, pair_grids, settings_grid, standing_grid
from evoalign.analysis.compare.tree import as_tree as as_tree
from evoalign.analysis.compare.words import summary as summary
from evoalign.analysis.compare.words import where
from evoalign.report.tables import bullets, escape, shorten, visible
from evoalign.report.tables import markdown_table as table
from evoalign.rundir.files import make_folder, write_text

LABEL = 60


def show(comparison: Comparison, console: Console) -> None:
    """What stands and falls with the budget, the end, and in words what follows."""
    said, alone = [*_planned(comparison), *summary(comparison)], len(comparison.groups) < 2
    _say(console, said if alone else [])  # before tables in which nobody would look for it
    _say(console, comparison.notes, "note: ")
    for match in comparison.matches:
        if match in comparison.shown:
            console.print(_table(standing_grid(comparison, match)))
        _say(console, _notes(comparison, match))
    console.print(_table(end_grid(comparison)))
    _say(console, [f"left out: {path}: {why}" for path, why in comparison.left_out])
    _say(console, [] if alone else said)


def _notes(comparison: Comparison, match: Match) -> list[str]:
    """Of a budget; one that is also of others stands at the first of them, and names all.

    Not why it has no table, where it is said of all of them that a group has nothing on the way.
    """
    said: list[str] = []
    for note in _own_notes(comparison, match):
        those = [one for one in comparison.matches if note in _own_notes(comparison, one)]
        if those[0] is match:
            said.append(
                f"note ({', '.join(one.by or '' for one in those)}): {note}" if len(those) > 1 else f"note: {note}"
            )
    return said


def _own_notes(comparison: Comparison, match: Match) -> Sequence[str]:
    return () if match not in comparison.shown and at_the_end_alone(comparison.groups) else match.notes


def _planned(comparison: Comparison) -> list[str]:
    """Which plan it follows, so that another can see what was decided beforehand."""
    plan = comparison.plan
    return [] if plan is None else [f"As planned in {plan.path.name} (SHA-256 {plan.sha256})."]


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


def write(comparison: Comparison, folder: str | Path) -> list[Path]:
    """Write comparison.md, comparison.json and the figures into a folder, and return their paths."""
    folder = Path(folder)
    make_folder(folder)
    drawn = figures.draw(comparison, folder)
    tree = {**as_tree(comparison), "figures": [path.name for path in drawn.values()]}
    write_text(folder / "comparison.json", json.dumps(tree, indent=2, allow_nan=False) + "\n")
    write_text(folder / "comparison.md", markdown(comparison, {name: path.name for name, path in drawn.items()}))
    return [folder / "comparison.md", folder / "comparison.json", *drawn.values()]


def markdown(comparison: Comparison, pictures: dict[str, str] | None = None) -> str:
    """The whole comparison as a page. `pictures` are file names by matching, and `divergence`."""
    pictures = pictures or {}
    lines = [f"# Comparison of {len(comparison.groups)} groups of runs", ""]
    lines += _bullets([*_planned(comparison), *summary(comparison)])
    problems = [f"left out: {path}: {why}" for path, why in comparison.left_out]
    lines += ["## Notes", "", *_bullets([*problems, *comparison.notes])] if problems or comparison.notes else []
    for match in comparison.matches:
        lines += [f"## {escape(where(match))}", ""]
        lines += _picture(pictures, match.by or "", f"{comparison.measure} against {match.by}")
        if match in comparison.shown:
            lines += _grid(standing_grid(comparison, match))
        else:
            lines += ["Fewer than two groups have a run within this budget.", ""]
        lines += _bullets(_notes(comparison, match))
        lines += [line for grid in pair_grids(match) for line in _grid(grid)]
    lines += [f"## {escape(where(comparison.end))}", "", *_grid(end_grid(comparison))]
    lines += [line for grid in pair_grids(comparison.end) for line in _grid(grid)]
    lines += _picture(pictures, "divergence", f"{comparison.measure} against the divergence from the base model")
    settings = _grid(settings_grid(comparison))
    lines += ["<details><summary>Settings in which the groups differ</summary>", "", *settings, "</details>", ""]
    lines += HOW_TO_READ
    return "\n".join(lines) + "\n"


HOW_TO_READ = (
    "## How to read this",
    "",
    "- A budget is what training took; evaluation, figures and saving are not in it. Tokens are those of prompts and",
    "  of completions; `comparison.json` has the generated ones alone.",
    "- Each run is taken at its last evaluation within the budget. A plan sets that beforehand; without one it is what",
    "  all runs reached, so that their outcome sets it. Nothing is interpolated and no later evaluation is looked at;",
    "  *budget used* says how far that one was.",
    "- Intervals of means and differences are 95 % t intervals over runs, for new seeds on the same test questions;",
    "  so are bands in figures. They hold what they say of normal samples and are too wide for heavy tails; where runs",
    "  are skewed, those of means hold the truth in 88 to 90 % only. The interquartile mean leaves out the lowest and",
    "  the highest quarter of five runs or more; its interval is of ranks, and holds under skew, too.",
    "- Over runs and questions: for new seeds and new questions at once, where each run kept its answers to the same",
    "  ones, as runs do at their end. With three runs it is a little too wide.",
    f"- The {PERMUTATION} test decides where two groups share nearly all their seeds (80 % of the larger one's, at",
    "  least three), and Welch's t test over all runs where they do not, at 5 % after Holm's correction over the pairs",
    "  of one table. Other tests are shown and decide nothing. Each table is corrected by itself: who looks at all of",
    "  them for one that is significant looks more than once.",
    "- Effect sizes are in standard deviations (of paired differences, where paired) with Hedges' correction; their",
    "  intervals are for normal samples.",
    "- A hacked completion earns a reward as good as the best with gold wrong, is broken (empty, loops, figures",
    "  without sense, special tokens, other scripts, turns of its own), or is a template given to many prompts. Read",
    "  the share beside the one before training: none of these signs is a proof.",
    "- If settings were chosen on this same test split, all of this is too good, and nothing here can know it.",
)


def _picture(pictures: dict[str, str], name: str, alternative: str) -> list[str]:
    return [f"![{escape(alternative)}]({pictures[name]})", ""] if name in pictures else []


def _bullets(lines: Iterable[str]) -> list[str]:
    return bullets(map(escape, lines))


def _grid(grid: Grid) -> list[str]:
    if not grid.rows:
        return ["None.", ""]
    return table([escape(cell) for cell in grid.header], [[escape(cell) for cell in row] for row in grid.rows])
