# SPDX-License-Identifier: Apache-2.0
"""Exact value of an arithmetic expression in model output, in bounded time and without executing it.

`evaluate` accepts `+ - * /`, parentheses, spaces and ASCII decimal integers, and rejects everything else. It checks
every bound before parsing, so that any text takes at most a few milliseconds. (Graders that filter characters and then
call Python's `eval` hang on `9**8**99` and accept `3**4` and `7//2`.)

`evaluate_written` first translates the notation of models: other signs, LaTeX, markdown, a result after `=`. It
replaces or rejects text in a few passes, and never repairs it. Products without a sign, square brackets, words, chains
of equations and signed numbers are rejected.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

MAX_LENGTH = 500
"""Maximum characters. Four numbers with all parentheses take about 25."""
MAX_DEPTH = 50
"""Maximum depth of parentheses."""
MAX_NUMBERS = 60
"""Maximum number of integers."""
MAX_WRITTEN = 2_000
"""Maximum characters for `evaluate_written`: LaTeX takes several times as many."""
MAX_AROUND = 8
"""Maximum number of nested pairs of marks around an expression."""
TOLERANCE = Fraction(1, 100_000)
"""Maximum difference between the value and a result after `=`: 1/3 is 0.33333."""

_CHARACTERS = re.compile(r"^[0-9+\-*/() ]+$")  # `$` lets one trailing newline through, as the published graders do
_POWER = re.compile(r"\*\s*\*|/\s*/")
_JUXTAPOSED = re.compile(r"\) *[0-9(]|[0-9] *\(|[0-9] +[0-9]")
_LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")
_INTEGER = re.compile(r"[0-9]+")
_SIGNS = str.maketrans("×·⋅÷−\t\n\r\u00a0\u2009\u202f", "***/-      ")
_COMMANDS = re.compile(r"\\(?:(times|cdot|div|left|right|quad)(?![A-Za-z])|([,;:! ]))")
_PLAIN = {"times": "*", "cdot": "*", "div": "/", "left": "", "right": "", "quad": " "}
_FRACTION = re.compile(r"\\[dt]?frac *\{")
_AROUND = [
    pair.split()
    for pair in ("``` ```", "` `", "$$ $$", "$ $", r"\( \)", r"\[ \]", r"\boxed{ }", "** **", "__ __", "* *", "_ _")
]
"""Marks before and after an expression."""
_STARRED = re.compile(r"\* *=|= *\*")
_BELOW = re.compile(r" *\{")
_RESULT = re.compile(r"-? ?[0-9]{1,40}(?:\.[0-9]{1,40})?")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ExpressionError(ValueError):
    """The text is not an accepted expression; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Expression:
    """Value of an expression, and its integers in ascending order."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(text: str) -> Expression:
    """Return the exact value of `text`. Raises ExpressionError.

    Spaces around the expression are allowed, and one newline at its end, but none at its start, as in the published
    graders with `^[0-9+\\-*/() ]+$`. Unlike those, signs (`-3 + 5`), `**` and `//` are rejected. Both reject integers
    with leading zeros.
    """
    _refuse_by_bounds(text)
    try:
        tree = ast.parse(text.strip(" \n"), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ExpressionError("it is not a complete expression") from None
    try:
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ExpressionError("it divides by zero") from None
    return Expression(value, tuple(sorted(map(int, _INTEGER.findall(text)))))


def _refuse_by_bounds(text: str) -> None:
    """Raise ExpressionError for whatever one pass over the characters can reject."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"it has {len(text)} characters; at most {MAX_LENGTH} are read")
    if not _CHARACTERS.match(text):
        raise ExpressionError("it has a character other than digits, + - * / ( ) and space")
    if _POWER.search(text):
        raise ExpressionError("** and // are not among + - * /")
    if _JUXTAPOSED.search(text):
        raise ExpressionError("two values stand side by side with no operator between them")
    if _LEADING_ZERO.search(text):
        raise ExpressionError("an integer starts with 0")
    depths = list(accumulate((character == "(") - (character == ")") for character in text))
    if depths[-1] or min(depths) < 0:
        raise ExpressionError("the parentheses do not match")
    if max(depths) > MAX_DEPTH:
        raise ExpressionError(f"parentheses are nested more than {MAX_DEPTH} deep")
    if len(_INTEGER.findall(text)) > MAX_NUMBERS:
        raise ExpressionError(f"it has more than {MAX_NUMBERS} integers")


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ExpressionError("it has something other than integers and binary + - * /, such as a sign")


def evaluate_written(text: str) -> Expression:
    """Return the exact value of an expression in the notation of models. Raises ExpressionError.

    A result after `=` has to be its value; it is not in `numbers`.
    """
    if len(text) > MAX_WRITTEN:
        raise ExpressionError(f"it has {len(text)} characters; at most {MAX_WRITTEN} are read")
    left, equals, right = peeled(text.translate(_SIGNS)).partition("=")
    expression = evaluate(
        _fractions(_COMMANDS.sub(lambda found: _PLAIN[found[1]] if found[1] else " ", peeled(left))).strip()
    )
    if equals:
        result = peeled(right)
        if not _RESULT.fullmatch(result):
            raise ExpressionError("what stands after = is no decimal number")
        if abs(Fraction(result.replace(" ", "")) - expression.value) >= TOLERANCE:
            raise ExpressionError("what stands after = is not its value")
    return expression


def peeled(text: str) -> str:
    """Strip blanks, a final dot and pairs of marks around the text, up to MAX_AROUND times."""
    for _ in range(MAX_AROUND):
        text = text.strip(" ").removesuffix(".")
        text = next((text[len(o) : -len(c)] for o, c in _AROUND if _is_around(text, o, c)), text)
    return text.strip(" ")


def _is_around(text: str, opening: str, closing: str) -> bool:
    """Return whether one pair of marks encloses the whole text, rather than two pairs its beginning and its end."""
    if len(text) < len(opening + closing) or not (text.startswith(opening) and text.endswith(closing)):
        return False
    inner = text[len(opening) : -len(closing)]
    if opening == "*":  # a product sign, which is never at the ends or next to an equals sign
        return not (inner.startswith("*") or inner.endswith("*") or _STARRED.search(inner))
    return opening not in inner and (opening != closing or closing not in inner)


def _fractions(text: str) -> str:
    r"""Replace `\frac{a}{b}`, also nested, by `((a)/(b))`. Raises ExpressionError for an incomplete fraction."""
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
