# SPDX-License-Identifier: Apache-2.0
"""Whether a text says what a gold answer says, by its words alone: for answers of which there is one."""

from __future__ import annotations

import re

_BETWEEN_DIGITS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DROPPED = re.compile(
    r"\*\*|\*(?=[^\W\d])|(?<=[^\W\d])\*"  # of markdown
    r"|(?<!\d)\.|\.(?!\d)|[^\w\s.+*/<>=%^-]|_|(?<=[^\W\d])-(?=[^\W\d])"
)
_SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def normalized(text: str) -> str:
    """Without case, punctuation and all but single spaces. Signs of arithmetic and decimal points stay; 1,000 is 1000.

    Markdown does not, and `**` is taken for it.
    """
    return " ".join(_DROPPED.sub(" ", _BETWEEN_DIGITS.sub("", text.casefold())).split())


def says(text: str, gold: str) -> bool:
    """Whether the normalised text is the gold answer, or contains it as words of their own.

    No gold is said by no text. Where gold is in a script without spaces between words, it may stand anywhere.
    """
    wanted, said = normalized(gold), normalized(text)
    if not wanted:
        return text.strip() == gold.strip() != ""
    return wanted in said if _SPACELESS.search(wanted) else f" {wanted} " in f" {said} "
