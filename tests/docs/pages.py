# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ and the documents in the root: their code blocks, with snippets inserted, and inline code."""

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
sys.path.insert(0, str(REPOSITORY / "scripts/docs"))
hooks = importlib.import_module("hooks")
"""The generator of the reference."""
PAGES = sorted([*DOCS.rglob("*.md"), *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))])

_FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SNIPPET = re.compile(r'^( *)--8<-- "([^":]+)(?::(\d+):(\d+))?"$', re.MULTILINE)
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block. `title` is its file name, if it has one."""

    page: Path
    language: str
    title: str | None
    text: str

    @property
    def id(self) -> str:
        """Page and first line, as the name of a test."""
        return f"{self.page.relative_to(REPOSITORY)}: {self.text.strip().splitlines()[0][:40]}"


def text_of(page: Path) -> str:
    """Return a page with its snippets inserted."""
    return _SNIPPET.sub(_snippet, page.read_text(encoding="utf-8"))


def blocks(*languages: str) -> list[Block]:
    """Return all fenced blocks of these languages."""
    found = [
        Block(page, match[2], _title(match[3]), match[4]) for page in PAGES for match in _FENCE.finditer(text_of(page))
    ]
    return [block for block in found if block.language in languages]


def words(page: Path) -> set[str]:
    """Return the inline code of a page."""
    return set(_CODE.findall(_FENCE.sub("", text_of(page))))


def _snippet(match: re.Match[str]) -> str:
    lines = (REPOSITORY / match[2]).read_text(encoding="utf-8").splitlines()
    chosen = lines[int(match[3]) - 1 : int(match[4])] if match[3] else lines
    return "\n".join(match[1] + line for line in chosen)


def _title(rest: str) -> str | None:
    found = re.search(r'title="([^"]+)"', rest)
    return found[1] if found else None
