# SPDX-License-Identifier: Apache-2.0
"""The page of which problem is solved by whom: one file, without network, that runs nothing which a model said.

Prompts and completions are hostile: they stand as text alone, characters that steer are written out, and the content
security policy allows the page's own script and style by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from evoalign.analysis.coverage.compute import Problem, Tries, Way

    All = Mapping[str, Mapping[Way, Tries]]

HERE = Path(__file__).resolve().parent
PROMPT, SHOWN = 160, 2000
"""Characters of a prompt in a row's heading, and of a text inside."""


def page(tries: All, problems: Sequence[Problem], rule: str, sentences: Sequence[str]) -> str:
    """HTML. A row for each problem with how often who solved it, and one solved and one failed answer of each."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    allowed = {"default-src": "'none'", "style-src": _hash(style), "script-src": _hash(script), "base-uri": "'none'",
               "form-action": "'none'"}  # fmt: skip
    policy = "; ".join(f"{name} {value}" for name, value in allowed.items())
    names = list(tries)
    n = len(next(iter(tries[names[0]].values())).solved_NP)
    whom = "".join(f'<option value="{i}">{_text(name)}</option>' for i, name in enumerate(names))
    told = "".join(f"<li>{_text(line)}</li>" for line in sentences)
    head = "".join(f'<th scope="colgroup" colspan="{len(tries[name])}">{_text(name)}</th>' for name in names)
    ways = "".join(f'<th scope="col">{_text(way.short)}</th>' for name in names for way in tries[name])
    rows = "\n".join(_row(problem, i, tries) for i, problem in enumerate(problems))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Who solves which problem</title>
<style>{style}</style>
</head>
<body>
<h1>Who solves which problem</h1>
<p>How many of {n} tries in each way solved it; solved is: {_text(rule)}. T: sampled at this temperature. σ: each try
with other noise of this width on all weights.</p>
<details><summary>In words</summary><ul>{told}</ul></details>
<form id="filter">
<label>Solved by <select id="by"><option value="any">anybody or nobody</option><option value="none">nobody</option>
{whom}</select></label>
<label>and not by <select id="not"><option value="any">-</option>{whom}</select></label>
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
    cells = "".join(_cell(one, index) for ways in tries.values() for one in ways.values())
    gold = "" if problem.target is None else f"<h2>Gold</h2><pre>{_text(problem.target, SHOWN)}</pre>"
    said = "".join(_answers(name, ways, index) for name, ways in tries.items())
    return (
        f'<tr data-solved="{" ".join(solved)}"><th scope="row"><details><summary>{_text(problem.prompt, PROMPT)}'
        f"</summary><h2>Prompt</h2><pre>{_text(problem.prompt, SHOWN)}</pre>{gold}{said}</details></th>{cells}</tr>"
    )


def _cell(one: Tries, index: int) -> str:
    count, n = int(one.solved_NP[:, index].sum()), len(one.solved_NP)
    shade = -(-4 * count // n)
    return f'<td class="c{shade}">{count}</td>'


def _answers(name: str, ways: Mapping[Way, Tries], index: int) -> str:
    found: list[str] = []
    for heading, wanted in (("solved", True), ("did not", False)):
        for way, one in ways.items():
            hits = (one.solved_NP[:, index] == wanted).nonzero()[0]
            if len(hits):
                text = one.texts_PN[index][int(hits[0])]
                shown = _text(text, SHOWN) if text else "(empty)"
                found.append(f"<h2>{_text(name)} {heading}, {way.name}</h2><pre>{shown}</pre>")
                break
    return "".join(found)


def _text(text: str, length: int = 10**6) -> str:
    """As text of HTML; new lines stay, and whatever else has no shape of its own is written out."""
    lines = shorten(text, length).split("\n")
    return html.escape("\n".join(visible(line) for line in lines))


def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
