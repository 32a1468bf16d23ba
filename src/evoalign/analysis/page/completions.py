# SPDX-License-Identifier: Apache-2.0
"""The completions of the test split as JSON that the page's script searches, and the controls that it has for it.

Nothing here is markup: the script sets texts. So that a page stays one that a browser opens, the longest texts are cut
first; rows are left out last, and never one of the first `LEAST` of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from evoalign.analysis.page.markup import NOTHING, Markup, lines_visible, tag, text
from evoalign.analysis.page.view import Answer, Pair, View

MOST_BYTES = 3_000_000
"""Of the JSON of all runs together."""
LEAST = 200
"""Rows of each run that are in the page whatever they take."""
LENGTHS = (20_000, 4_000, 1_500, 600)
"""Characters of a text; the next where all rows do not fit."""
FILTERS = {
    "right": ("Right by gold", {"": "any", "gained": "became right", "lost": "became wrong", "right": "right after",
                                "wrong": "wrong after"}),
    "changed": ("Text", {"": "any", "changed": "changed", "same": "the same"}),
    "reward": ("Reward", {"": "any", "rose": "rose", "fell": "fell", "equal": "did not change"}),
    "end": ("Ended", {"": "any", "length": "cut off after", "empty": "empty after"}),
    "order": ("Order", {"": "as asked", "worst": "lowest reward first", "best": "highest reward first",
                        "gain": "largest gain first", "loss": "largest loss first", "long": "longest first"}),
}  # fmt: skip
"""What the script knows, by name: the label, and values with their words."""


def embedded(views: Sequence[View]) -> tuple[Markup, list[str]]:
    """A block of JSON for the script, and what was cut or left out, in sentences."""
    room = MOST_BYTES // max(1, sum(bool(view.completions) for view in views))
    runs: list[str] = []
    notes: list[str] = []
    for view in views:
        rows, length = _fitting(view.completions, room)
        runs.append(f'{{"name":{_json(lines_visible(view.name))},"rows":[{",".join(rows)}]}}')
        notes += _notes(view, len(rows), length, named=len(views) > 1)
    return Markup(f'<script type="application/json" id="completions-data">[{",".join(runs)}]</script>'), notes


def _fitting(pairs: Sequence[Pair], room: int) -> tuple[list[str], int]:
    """The rows as JSON, and to how many characters a text is cut."""
    for length in LENGTHS:
        rows = [_json(_row(pair, length)) for pair in pairs]
        if sum(map(len, rows)) <= room:
            return rows, length
    kept, size = list[str](), 0
    for row in (_json(_row(pair, LENGTHS[-1])) for pair in pairs):
        size += len(row)
        if len(kept) >= LEAST and size > room:
            break
        kept.append(row)
    return kept, LENGTHS[-1]


def _notes(view: View, shown: int, length: int, *, named: bool) -> Iterator[str]:
    whose = f"of {view.name} " if named else ""
    if shown < len(view.completions):
        count = f"{shown:,} of the {len(view.completions):,} completions"
        yield f"{count} {whose}are in this page; results/completions has all"
    texts = [t for p in view.completions[:shown] for t in (p.prompt, *(a.text for a in (p.before, p.after) if a))]
    cut = sum(len(text) > length for text in texts)
    if cut:
        yield f"{cut:,} texts {whose}are cut to {length:,} characters; results/completions has all of them"


def _row(pair: Pair, length: int) -> dict[str, Any]:
    row: dict[str, Any] = {"k": pair.key, "p": _cut(pair.prompt, length)}
    if pair.target is not None:
        row["g"] = _cut(pair.target, length)
    for name, answer in (("b", pair.before), ("a", pair.after)):
        if answer is not None:
            row[name] = _answer(answer, length)
    return row


def _answer(answer: Answer, length: int) -> dict[str, Any]:
    known = {} if answer.right is None else {"k": int(answer.right)}
    return {
        "t": _cut(answer.text, length), "r": answer.reward, "f": lines_visible(answer.finish_reason[:40]),
        "n": answer.tokens, **known,
    }  # fmt: skip


def _cut(said: str, length: int) -> str:
    more = len(said) - length
    return lines_visible(said) if more <= 0 else f"{lines_visible(said[:length])} [... {more:,} more characters]"


def _json(found: Any) -> str:
    """JSON that ends no element and opens none, in ASCII."""
    said = json.dumps(found, allow_nan=False, separators=(",", ":"))
    return said.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def explorer(views: Sequence[View], notes: Sequence[str]) -> Markup:
    """The controls, and an empty list that the script fills."""
    if not any(view.completions for view in views):
        return tag("p", text("No completions of the test split are there yet."))
    names = {"": "all", **{str(i): view.name for i, view in enumerate(views)}}
    chosen = {"run": ("Run", names), **FILTERS} if len(views) > 1 else dict(FILTERS)
    if not any(
        a is not None and a.right is not None for v in views for p in v.completions for a in (p.before, p.after)
    ):
        del chosen["right"]
    search = tag(
        "label",
        text("Search"),
        tag("input", type="search", id="find", autocomplete="off", spellcheck="false"),
        class_="find",
    )
    selects = (_select(name, label, options) for name, (label, options) in chosen.items())
    return Markup(
        tag("div", search, *selects, class_="controls", role="search", aria_label="completions")
        + tag("p", text("The list of completions needs JavaScript."), id="found", role="status")
        + tag("ol", id="answers", class_="answers")
        + tag("p", tag("button", text("Show more"), type="button", id="more", hidden=""))
        + (tag("ul", *(tag("li", text(note)) for note in notes), class_="notes") if notes else NOTHING)
    )


def _select(name: str, label: str, options: dict[str, str]) -> Markup:
    inside = (tag("option", text(words), value=value) for value, words in options.items())
    return tag("label", text(label), tag("select", *inside, id=f"by-{name}", data_by=name))
