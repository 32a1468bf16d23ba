# SPDX-License-Identifier: Apache-2.0
"""Lines of Markdown: tables, lists, and text that a page shows as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from evoalign.report.tables import visible


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """The first `words` columns to the left, numbers to the right; an empty line ends it."""
    rule = "|" + "---|" * words + "---:|" * (len(header) - words)
    return [_row(header), rule, *map(_row, rows), ""]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell or " " for cell in cells) + " |"


def bullets(lines: Iterable[str]) -> list[str]:
    """A list and an empty line; nothing where it has no line."""
    found = [f"- {line}" for line in lines]
    return [*found, ""] if found else []


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line: no link, picture, markup or mention."""
    return re.sub(r"([\\`*_\[\]<>|#!~$&@])", r"\\\1", visible(text))
