# SPDX-License-Identifier: Apache-2.0
"""Arithmetic as models write it, brought into the plain form that `arithmetic` reads: signs, LaTeX, markdown, `= 24`.

Text is only ever replaced or refused, in a few passes over bounded text: what comes out is read by
`arithmetic.evaluate`, with all of its bounds, and is neither repaired nor guessed at. A product without a sign, square
brackets, words, a chain of equations and a sign before a number stay refused.
"""

from __future__ import annotations

import re
from fractions import Fraction

from evoalign.rewards.arithmetic import Expression, ExpressionError, evaluate

MAX_WRITTEN = 2_000
"""Characters. LaTeX takes a few times as many as the plain form."""
MAX_AROUND = 8
"""Pairs of marks around each other."""
TOLERANCE = Fraction(1, 100_000)
"""How far what is written after `=` may be from the value, as for targets: 1/3 is 0.33333 to five places."""

_SIGNS = str.maketrans({
    "×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-",
    "\t": " ", "\n": " ", "\r": " ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
})  # fmt: skip
_COMMANDS = re.compile(r"\\(?:(times|cdot|div|left|right|quad)(?![A-Za-z])|([,;:! ]))")
_PLAIN = {"times": "*", "cdot": "*", "div": "/", "left": "", "right": "", "quad": " "}
_FRACTION = re.compile(r"\\[dt]?frac *\{")
_AROUND = (
    ("```", "```"), ("`", "`"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"),
    ("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"),
)  # fmt: skip
_STARRED = re.compile(r"\* *=|= *\*")
_BELOW = re.compile(r" *\{")
_RESULT = re.compile(r"-? ?[0-9]{1,40}(?:\.[0-9]{1,40})?")


def evaluate_written(text: str) -> Expression:
    """The exact value of an expression as a model writes it, and the integers in it.

    Where a result is written after it, it has to be its value; its digits are none of the expression's integers.
    Raises ExpressionError.
    """
    if len(text) > MAX_WRITTEN:
        raise ExpressionError(f"it has {len(text)} characters; at most {MAX_WRITTEN} are read")
    left, equals, right = _peeled(text.translate(_SIGNS)).partition("=")
    expression = evaluate(_fractions(_COMMANDS.sub(_command, _peeled(left))).strip())
    if equals:
        result = _peeled(right)
        if not _RESULT.fullmatch(result):
            raise ExpressionError("what stands after = is no decimal number")
        if abs(Fraction(result.replace(" ", "")) - expression.value) >= TOLERANCE:
            raise ExpressionError("what stands after = is not its value")
    return expression


def _peeled(text: str) -> str:
    """Without the blanks, the final dot and the pairs of marks around it, whichever comes first, some times over."""
    for _ in range(MAX_AROUND):
        text = text.strip(" ").removesuffix(".")
        text = next((text[len(o) : -len(c)] for o, c in _AROUND if _is_around(text, o, c)), text)
    return text.strip(" ")


def _is_around(text: str, opening: str, closing: str) -> bool:
    """Whether one pair of marks holds all of the text, and not its beginning and its end each a pair of their own."""
    if len(text) < len(opening + closing) or not (text.startswith(opening) and text.endswith(closing)):
        return False
    inner = text[len(opening) : -len(closing)]
    if opening == "*":  # which stands in an expression, and never at its ends or beside a sign of equality
        return not (inner.startswith("*") or inner.endswith("*") or _STARRED.search(inner))
    return opening not in inner and (opening != closing or closing not in inner)


def _command(found: re.Match[str]) -> str:
    return _PLAIN[found[1]] if found[1] else " "


def _fractions(text: str) -> str:
    r"""`\frac{a}{b}` as `((a)/(b))`, inside each other too. Raises ExpressionError for braces of anything else."""
    parts: list[str] = []
    closing: list[str] = []
    at = 0
    while at < len(text):
        if found := _FRACTION.match(text, at):
            parts.append("((")
            closing.append(")/(")
            at = found.end()
        elif text[at] == "}" and closing:
            parts.append(closing.pop())
            at += 1
            if parts[-1] == ")/(":
                below = _BELOW.match(text, at)
                if below is None:
                    raise ExpressionError("a fraction has nothing below it")
                closing.append("))")
                at = below.end()
        else:
            parts.append(text[at])
            at += 1
    if closing:
        raise ExpressionError("a fraction does not end")
    return "".join(parts)
