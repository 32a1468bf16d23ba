# SPDX-License-Identifier: Apache-2.0
"""Docstrings and messages are plain English, in the words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST = 0.005
"""Largest share of sentences with one of the habits below."""
OPENING = re.compile(r"(of|what|whose|those|its|who) ", re.IGNORECASE)
"""A docstring begins with a verb, or with a noun of the field, not with one of these."""
HABITS = re.compile(
    r"""\b(
    told | gone\ on\ with | go(es)?\ on\ (with|from) | (came|comes)\ to\ (its|an|the)?\ ?(end|what) | what\ it\ came\ to
    | any ?body | no ?body | who(so)?ever | so\ (many|much)\ (of|tokens|rows|steps|times|prompts|members|bytes)
    | held\ against | told\ apart | (of\ )?one's\ own | (is|are|was|were)\ (said|asked)\ (of|by|for|to|with)
    | (lies|lay|stands)\ beside | beside\ (it|them|its|the) | to\ be\ had | nothing\ else\ of | nats\ a\ token
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)


def sentences(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a docstring, for each docstring and string of four or more words."""
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        for part in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            value = part.value if isinstance(part, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.add(id(value))
                yield part.lineno, " ".join(value.value.split()), True
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = " ".join(node.value.split())
            if text.count(" ") > 2:
                yield node.lineno, text, False


def habits(source: str) -> tuple[list[str], int]:
    """Return the sentences with one of the habits, and the number of all sentences."""
    found, count = list[str](), 0
    for line, text, is_docstring in sentences(source):
        count += 1
        if (is_docstring and OPENING.match(text)) or HABITS.search(text):
            found.append(f"{line}: {text[:100]}")
    return found, count


def test_docstrings_and_messages_are_plain_english() -> None:
    found, count = list[str](), 0
    for path in sorted((ROOT / "src" / "evoalign").rglob("*.py")):
        odd, seen = habits(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(ROOT)}:{each}" for each in odd]
        count += seen
    assert count > 1000 and len(found) <= MOST * count, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('def f():\n    """What a run came to."""', 1),
        ('x = "the model is told of each step"', 1),
        ('x = "answers held against plain transformers"', 1),
        ('"""Of the latest so many steps."""', 1),
        ('x = "an engine of one\'s own needs this method"', 1),
        ('def f():\n    """Return the rewards of a run."""', 0),
        ('x = "set task.validation_size: the split has no rows"', 0),
        ('"""Offset of a tensor in its file."""', 0),
    ],
)
def test_habits_finds_the_private_phrasing_alone(source: str, count: int) -> None:
    assert len(habits(source)[0]) == count
