# SPDX-License-Identifier: Apache-2.0
"""HTML from text that is not trusted. What is `Markup` is finished; a plain string is always escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NewType

from evoalign.report.tables import visible

Markup = NewType("Markup", str)
NOTHING = Markup("")


def lines_visible(text: str) -> str:
    """The text with its lines, and every other character without a shape of its own written out."""
    return "\n".join(map(visible, text.split("\n")))


def text(found: object) -> Markup:
    """Anything as text of the page: no markup, no character that is not seen."""
    return Markup(html.escape(lines_visible(str(found))))


def tag(name: str, *inside: Markup, **attributes: object) -> Markup:
    """An element; of an attribute the `_` becomes `-`, a last one is left out; None: no such attribute."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{''.join(inside)}</{name}>")


def joined(parts: Iterable[Markup]) -> Markup:
    """One after another."""
    return Markup("".join(parts))


def bullets(lines: Iterable[str], class_: str | None = None) -> Markup:
    """A list; nothing where there is no line."""
    found = [tag("li", text(line)) for line in lines]
    return tag("ul", *found, class_=class_) if found else NOTHING


def folded(summary: str, *inside: Markup, id_: str, is_open: bool = False) -> Markup:
    """What is shown when it is asked for. The live page keeps it as it is by its id."""
    return tag("details", tag("summary", text(summary)), *inside, id=id_, open="" if is_open else None)


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str | Markup]], words: int = 1) -> Markup:
    """The first column heads its rows; the first `words` columns are to the left, numbers to the right."""

    def cell(i: int, found: str | Markup) -> Markup:
        side = "number" if i >= words else None
        return tag("td", text(found), class_=side) if i else tag("th", text(found), scope="row")

    head = (
        tag("th", text(name), scope="col", class_="number" if i >= words else None) for i, name in enumerate(header)
    )
    body = (tag("tr", *(cell(i, found) for i, found in enumerate(row))) for row in rows)
    whole = tag(
        "table", tag("caption", tag("span", text(caption))), tag("thead", tag("tr", *head)), tag("tbody", *body)
    )
    return tag("div", whole, class_="wide-table", tabindex=0, role="region", aria_label=caption)


def short(value: float, sign: str = "") -> str:
    """Three significant digits, for tables of many columns; a whole number of thousands and more."""
    return f"{value:{sign},.0f}" if 999.5 <= abs(value) < 1e15 else f"{value:{sign}.3g}"


def number(value: float | None) -> str:
    """Four significant digits; nothing for what is not known."""
    if value is None:
        return ""
    return f"{value:.4g}" if abs(value) < 10_000 or value != int(value) else f"{int(value):,}"
