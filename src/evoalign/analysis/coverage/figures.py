# SPDX-License-Identifier: Apache-2.0
"""Figures of coverage: pass@k by k, what becomes of the problems that the base solves, and a page of all problems.

The page is one HTML file that needs no network. Prompts and completions are hostile: they are escaped text, control
characters are written out, and the content security policy allows only the page's own script and style, by hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from evoalign.analysis import base as drawing
from evoalign.analysis.base import BASE
from evoalign.analysis.coverage import estimators as of
from evoalign.analysis.coverage.estimators import TEMPERATURE, All, Problem, Tries, Way
from evoalign.report.figures import COLORS, GRID, canvas, frame, plain, save_both, series
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST, LABEL = 6, 28
"""Targets per figure, characters of a target's name."""
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
    short = drawing.short_names(list(tries), LABEL)
    for path, names in drawing.files(folder, "coverage", list(tries), MOST):
        drawn += _curves(tries, names, ks, short, path)
    for path, names in drawing.files(folder, "coverage_support", [name for name in tries if name != BASE], MOST):
        drawn += _bars(tries, names, short, path)
    write_text(folder / "coverage.html", page(tries, problems, rule, sentences))
    return [*drawn, folder / "coverage.html"]


def _curves(tries: All, names: Sequence[str], ks: Sequence[int], short: Mapping[str, str], path: Path) -> list[Path]:
    kinds = list(dict.fromkeys(way.kind for way in tries[names[0]]))
    figure = canvas(4.6 * len(kinds) + 1.4, 2.9 * len(names) + 0.6, layout="constrained")
    grid = figure.subplots(len(names), len(kinds), sharex=True, sharey=True, squeeze=False)
    for index, name in enumerate(names):
        for column, kind in enumerate(kinds):
            axes, last = grid[index][column], index == len(names) - 1
            how = "by temperature" if kind == TEMPERATURE else "by noise on the weights"
            frame(axes, how if column else f"{short[name]}, {how}", "k" if last else "")
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
        bar: dict[str, Any] = {"fmt": "none", "capsize": 2, "color": style["color"]}
        axes.errorbar([ks[-1] * 1.06 ** (index + 1)], [last.mean], yerr=drawing.error_bars([last]), **bar)


def _bars(tries: All, names: Sequence[str], short: Mapping[str, str], path: Path) -> list[Path]:
    """Draw what becomes of the problems; hatched next to it the base compared with itself, as by chance."""
    ways = list(tries[BASE])
    figure = canvas(max(6.0, 0.62 * len(ways) + 2.6), 2.9 * len(names) + 0.5, layout="constrained")
    grid = figure.subplots(len(names), 1, sharex=True, squeeze=False)
    for axes, name in zip(grid[:, 0], names, strict=True):
        solved_NP = tries[BASE][ways[0]].solved_NP
        frame(axes, f"{short[name]} and the base, {solved_NP.shape[1]} problems x {len(solved_NP) // 2} tries", "")
        plain(axes)
        for place, way in enumerate(ways):
            base = tries[BASE][way].solved_NP
            for shift, other, hatch in ((-0.2, tries[name][way].solved_NP, None), (0.2, base, "///")):
                found, bottom = of.support(base, other), 0.0
                for part, color in PARTS:
                    height = float(found[part].mean())
                    label = part if place == 0 and hatch is None else None
                    style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
                    axes.bar(place + shift, height, 0.36, bottom=bottom, label=label, **style)
                    bottom += height
        axes.set_ylabel("share of the problems")
        axes.set_ylim(0, 1)
    grid[-1][0].set_xticks(range(len(ways)), [way.short for way in ways], rotation=45, ha="right", fontsize=8)
    drawing.below(figure, grid[0][0], 4, "hatched: the base compared with itself")
    return save_both(figure, path)


def page(tries: All, problems: Sequence[Problem], rule: str, sentences: Sequence[str]) -> str:
    """Return the HTML page: a row per problem with its solved counts, and a solved and a failed completion of each."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digests = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in (style, script)]
    policy = "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'".format(*digests)
    loader = jinja2.FileSystemLoader(HERE)
    env = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown)
    return env.get_template("page.html.jinja").render(
        policy=Markup(policy + "; base-uri 'none'; form-action 'none'"),
        style=Markup(style),
        script=Markup(script),
        samples=len(next(iter(next(iter(tries.values())).values())).solved_NP),
        rule=rule,
        sentences=sentences,
        tries=tries,
        rows=[_row(problem, i, tries) for i, problem in enumerate(problems)],
    )


def _row(problem: Problem, index: int, tries: All) -> dict[str, Any]:
    """Return what the page shows of a problem; of each target the first solved and the first failed completion."""
    counts = [[int(one.solved_NP[:, index].sum()) for one in ways.values()] for ways in tries.values()]
    texts = [("Prompt", problem.prompt)] + ([] if problem.target is None else [("Gold", problem.target)])
    for name, ways in tries.items():
        for heading, wanted in (("solved", True), ("failed", False)):
            hits = ((way, one, (one.solved_NP[:, index] == wanted).nonzero()[0]) for way, one in ways.items())
            for way, one, tried in [hit for hit in hits if len(hit[2])][:1]:
                texts.append((f"{name} {heading}, {way.name}", one.texts_PN[index][int(tried[0])] or "(empty)"))
    return {
        "solved": " ".join(str(i) for i, own in enumerate(counts) if any(own)),
        "heading": shorten(problem.prompt, PROMPT),
        "texts": [(heading, shorten(text, SHOWN)) for heading, text in texts],
        "counts": sum(counts, list[int]()),
    }


def _shown(value: object) -> object:
    """Write out control characters of a text; new lines stay."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(map(visible, value.split("\n")))
