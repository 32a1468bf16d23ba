# SPDX-License-Identifier: Apache-2.0
"""Figures of coverage: pass@k by k, what becomes of the problems that the base solves, and a page of all problems.

The page is one HTML file that needs no network. Prompts and completions are hostile: they are escaped text, control
characters are written out, and the content security policy allows only the page's own script and style, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evoalign.analysis.base import BASE, error_bars
from evoalign.analysis.coverage import estimators as of
from evoalign.analysis.coverage.estimators import TEMPERATURE, All, Problem, Tries, Way
from evoalign.report.figures import COLORS, GRID, canvas, frame, plain, save_both, series
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN, ROW, MOST, LABEL = 4.6, 2.9, 6, 28
"""Width and height of a panel in inches, targets per figure, characters of a target's name."""
APART = 1.06
"""Factor between the intervals of the largest k."""
PARTS = (("preserved", COLORS[0]), ("shrunk", COLORS[1]), ("expanded", COLORS[2]), ("neither", GRID))
"""Shares of the problems, and their colours."""
HERE = Path(__file__).resolve().parent
PROMPT, SHOWN = 160, 2000
"""Characters of a prompt in the heading of a row, and of a text inside."""


def draw(
    tries: All, problems: Sequence[Problem], ks: Sequence[int], rule: str, sentences: Sequence[str], folder: Path
) -> list[Path]:
    """Draw both figures, a file for each `MOST` targets, and write the page."""
    from evoalign.rundir.files import write_text

    drawn: list[Path] = []
    for kind, draw_one, names in (
        ("coverage", _curves, list(tries)),
        ("coverage_support", _bars, [name for name in tries if name != BASE]),
    ):
        for number, start in enumerate(range(0, len(names), MOST), 1):
            file = folder / (f"{kind}.png" if number == 1 else f"{kind}_{number}.png")
            drawn += draw_one(tries, names[start : start + MOST], ks, file)
    write_text(folder / "coverage.html", page(tries, problems, rule, sentences))
    return [*drawn, folder / "coverage.html"]


def _curves(tries: All, names: Sequence[str], ks: Sequence[int], path: Path) -> list[Path]:
    kinds = list(dict.fromkeys(way.kind for way in tries[names[0]]))
    figure = canvas(COLUMN * len(kinds) + 1.4, ROW * len(names) + 0.6, layout="constrained")
    grid = figure.subplots(len(names), len(kinds), sharex=True, sharey=True, squeeze=False)
    for index, name in enumerate(names):
        for column, kind in enumerate(kinds):
            axes, last = grid[index][column], index == len(names) - 1
            how = "by temperature" if kind == TEMPERATURE else "by noise on the weights"
            frame(axes, how if column else f"{shorten(visible(name), LABEL)}, {how}", "k" if last else "")
            _panel(axes, {way: one for way, one in tries[name].items() if way.kind == kind}, ks)
            if last:
                axes.legend(frameon=False, fontsize=7, title=kind, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        grid[index][0].set_ylabel("pass@k")
    return save_both(figure, path)


def _panel(axes: Axes, ways: Mapping[Way, Tries], ks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ks), [str(k) for k in ks])
    axes.set_xticks([], minor=True)
    for index, (way, one) in enumerate(ways.items()):
        found = [of.estimate(one.solved_NP, k, shared=way.shared) for k in ks]
        style, last = series(index), found[-1]
        axes.plot(list(ks), [e.mean for e in found], label=f"{way.value:g}", markersize=3, linewidth=1.3, **style)
        x, halves = ks[-1] * APART ** (index + 1), error_bars([last])
        axes.errorbar([x], [last.mean], yerr=halves, fmt="none", capsize=2, color=style["color"])


def _bars(tries: All, names: Sequence[str], _: Sequence[int], path: Path) -> list[Path]:
    """Draw what becomes of the problems; hatched next to it the base compared with itself, as by chance."""
    ways = list(tries[BASE])
    figure = canvas(max(6.0, 0.62 * len(ways) + 2.6), ROW * len(names) + 0.5, layout="constrained")
    grid = figure.subplots(len(names), 1, sharex=True, squeeze=False)
    for axes, name in zip(grid[:, 0], names, strict=True):
        frame(axes, f"{shorten(visible(name), LABEL)} and the base", "")
        plain(axes)
        for place, way in enumerate(ways):
            base = tries[BASE][way].solved_NP
            for shift, other, hatch in ((-0.2, tries[name][way].solved_NP, None), (0.2, base, "///")):
                found, bottom = of.support(base, other), 0.0
                for part, color in PARTS:
                    height = float(getattr(found, f"{part}_P").mean())
                    label = part if place == 0 and hatch is None else None
                    style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
                    axes.bar(place + shift, height, 0.36, bottom=bottom, label=label, **style)
                    bottom += height
        axes.set_ylabel("share of the problems")
        axes.set_ylim(0, 1)
    grid[-1][0].set_xticks(range(len(ways)), [way.short for way in ways], rotation=45, ha="right", fontsize=8)
    title = "hatched: the base compared with itself"
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, title=title, alignment="left")
    return save_both(figure, path)


def page(tries: All, problems: Sequence[Problem], rule: str, sentences: Sequence[str]) -> str:
    """Return the HTML page: a row per problem with its solved counts, and a solved and a failed completion of each."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    allowed = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    policy = "; ".join(f"{name} {value}" for name, value in allowed.items())
    names = list(tries)
    n = len(next(iter(tries[names[0]].values())).solved_NP)
    targets = "".join(f'<option value="{i}">{_text(name)}</option>' for i, name in enumerate(names))
    lines = "".join(f"<li>{_text(line)}</li>" for line in sentences)
    head = "".join(f'<th scope="colgroup" colspan="{len(tries[name])}">{_text(name)}</th>' for name in names)
    ways = "".join(f'<th scope="col">{_text(way.short)}</th>' for name in names for way in tries[name])
    rows = "\n".join(_row(problem, i, tries) for i, problem in enumerate(problems))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Solved problems</title>
<style>{style}</style>
</head>
<body>
<h1>Solved problems</h1>
<p>How many of {n} tries in each way solved each problem; solved is: {_text(rule)}. T: sampled at this temperature.
σ: each try with other noise of this width on all weights.</p>
<details><summary>In words</summary><ul>{lines}</ul></details>
<form id="filter">
<label>Solved by <select id="by"><option value="any">any or none</option><option value="none">none</option>
{targets}</select></label>
<label>and not by <select id="not"><option value="any">-</option>{targets}</select></label>
<label>Prompt has <input id="text" type="search"></label>
<output id="count"></output>
</form>
<div class="wide"><table>
<thead><tr><th scope="col" rowspan="2">Problem</th>{head}</tr><tr>{ways}</tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
<script>{script}</script>
</body>
</html>
"""


def _row(problem: Problem, index: int, tries: All) -> str:
    solved = [
        str(i) for i, ways in enumerate(tries.values()) if any(t.solved_NP[:, index].any() for t in ways.values())
    ]
    cells = ""
    for one in (one for ways in tries.values() for one in ways.values()):
        count, n = int(one.solved_NP[:, index].sum()), len(one.solved_NP)
        cells += f'<td class="c{-(-4 * count // n)}">{count}</td>'
    gold = "" if problem.target is None else f"<h2>Gold</h2><pre>{_text(problem.target, SHOWN)}</pre>"
    texts = "".join(_completions(name, ways, index) for name, ways in tries.items())
    return (
        f'<tr data-solved="{" ".join(solved)}"><th scope="row"><details><summary>{_text(problem.prompt, PROMPT)}'
        f"</summary><h2>Prompt</h2><pre>{_text(problem.prompt, SHOWN)}</pre>{gold}{texts}</details></th>{cells}</tr>"
    )


def _completions(name: str, ways: Mapping[Way, Tries], index: int) -> str:
    """Return the first solved and the first failed completion of a target."""
    found: list[str] = []
    for heading, wanted in (("solved", True), ("failed", False)):
        for way, one in ways.items():
            hits = (one.solved_NP[:, index] == wanted).nonzero()[0]
            if len(hits):
                text = one.texts_PN[index][int(hits[0])]
                shown = _text(text, SHOWN) if text else "(empty)"
                found.append(f"<h2>{_text(name)} {heading}, {way.name}</h2><pre>{shown}</pre>")
                break
    return "".join(found)


def _text(text: str, length: int = 10**6) -> str:
    """Escape a text for HTML; new lines stay, other control characters are written out."""
    lines = shorten(text, length).split("\n")
    return html.escape("\n".join(visible(line) for line in lines))


def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
