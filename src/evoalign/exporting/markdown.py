# SPDX-License-Identifier: Apache-2.0
"""Texts of anywhere as a part of Markdown."""

from __future__ import annotations

import re


def plain(text: str) -> str:
    """On one line, and without what Markdown and HTML would read."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]#])", r"\\\1", line)


def code(text: str) -> str:
    """On one line, and without the end of a code span."""
    return " ".join(text.split()).replace("`", "'").replace("|", "/")
