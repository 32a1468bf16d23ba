# SPDX-License-Identifier: Apache-2.0
"""The value of an arithmetic expression that a model wrote: exact, bounded, and never run as code.

What may be written: `+ - * /`, parentheses, spaces and plain ASCII decimal integers. All else is refused, and every
bound is checked before the text reaches a parser, so that no text of any length or shape takes more than a few
milliseconds. Graders of this kind that filter characters and then call Python's own evaluator hang on `9**8**99`
and pay for `3**4` and `7//2`; here powers and floor division do not exist.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 500
"""Characters. Four numbers in full parentheses take about 25."""
MAX_DEPTH = 50
"""Parentheses inside each other."""
MAX_NUMBERS = 60
"""Integers in one expression."""

_CHARACTERS = re.compile(r"^[0-9+\-*/() ]+$")  # `$` lets one trailing newline through, as the published graders do
_POWER = re.compile(r"\*\s*\*|/\s*/")
_JUXTAPOSED = re.compile(r"\) *[0-9(]|[0-9] *\(|[0-9] +[0-9]")
_LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")
_INTEGER = re.compile(r"[0-9]+")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ExpressionError(ValueError):
    """The text is not an expression that may be written here; the message says why."""


@dataclass(frozen=True, slots=True)
class Expression:
    """What an expression comes to. `numbers` is the multiset of integers it uses, in ascending order."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(
    text: str, *, max_length: int = MAX_LENGTH, max_depth: int = MAX_DEPTH, max_numbers: int = MAX_NUMBERS
) -> Expression:
    """The exact value of `text`. Raises ExpressionError.

    Spaces around the expression are allowed, and so is exactly one newline at its end; a newline at its start is
    refused. Both are what the published graders do with `^[0-9+\\-*/() ]+$` (measured). Unlike those, signs
    (`-3 + 5`), `**` and `//` are refused. Integers with leading zeros are refused by both.
    """
    _refuse_by_bounds(text, max_length, max_depth, max_numbers)
    try:
        tree = ast.parse(text.strip(" \n"), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ExpressionError("it is not a complete expression") from None
    try:
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ExpressionError("it divides by zero") from None
    return Expression(value, tuple(sorted(map(int, _INTEGER.findall(text)))))


def _refuse_by_bounds(text: str, max_length: int, max_depth: int, max_numbers: int) -> None:
    """All that can be refused in one pass over the characters, before anything is parsed."""
    if len(text) > max_length:
        raise ExpressionError(f"it has {len(text)} characters; at most {max_length} are read")
    if not _CHARACTERS.match(text):
        raise ExpressionError("it has a character other than digits, + - * / ( ) and space")
    if _POWER.search(text):
        raise ExpressionError("** and // are not among + - * /")
    if _JUXTAPOSED.search(text):
        raise ExpressionError("two values stand side by side with no operator between them")
    if _LEADING_ZERO.search(text):
        raise ExpressionError("an integer starts with 0")
    if _depth(text) > max_depth:
        raise ExpressionError(f"parentheses are nested more than {max_depth} deep")
    if len(_INTEGER.findall(text)) > max_numbers:
        raise ExpressionError(f"it has more than {max_numbers} integers")


def _depth(text: str) -> int:
    """How deep the parentheses go. Raises ExpressionError where they do not match."""
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
        if depth < 0:
            break
    if depth:
        raise ExpressionError("the parentheses do not match")
    return deepest


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp):
        raise ExpressionError("a sign stands where a number should")
    raise ExpressionError("it has something other than integers and + - * /")
