# SPDX-License-Identifier: Apache-2.0
"""Expressions that the arithmetic grader accepts or rejects."""

import warnings
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoalign.rewards.arithmetic import MAX_DEPTH, MAX_LENGTH, MAX_NUMBERS, ExpressionError, evaluate


@pytest.mark.parametrize(("text", "value", "numbers"), [
    ("44 + 19 + 35", 98, (19, 35, 44)), (" (1 + 2) / 3 ", 1, (1, 2, 3)), ("((44 + 19) + 35)\n", 98, (19, 35, 44)),
    ("2+3*4", 14, (2, 3, 4)), ("2-3-4", -5, (2, 3, 4)), ("64/4/2", 8, (2, 4, 64)),
    ("10 / (60 - 57) * 80", Fraction(800, 3), (10, 57, 60, 80)), ("7-7", 0, (7, 7)), ("0", 0, (0,)),
    ("((((5))))", 5, (5,)),
    ("1/3 + 1/3 + 1/3", 1, (1, 1, 1, 3, 3, 3)), ("9" * MAX_LENGTH, 10**MAX_LENGTH - 1, (10**MAX_LENGTH - 1,)),
])  # fmt: skip
def test_value_and_multiset(text, value, numbers):
    expression = evaluate(text)
    assert expression.value == value
    assert expression.numbers == numbers


@pytest.mark.parametrize(("text", "reason"), [
    ("", "character"), ("   ", "not a complete expression"), ("\n1 + 2", "character"), ("1 + 2\n\n", "character"),
    ("1 +\n2", "character"), ("1\t+ 2", "character"), ("= 98", "character"), ("1.5 + 2", "character"),
    ("1e3", "character"), ("1_000", "character"), ("x + 1", "character"), ("__import__('os')", "character"),
    ("5 % 3", "character"), ("1, 2", "character"), ("٣ + ٤", "character"), ("１+２", "character"), ("²", "character"),
    ("1 − 2", "character"), ("3**4", "among"), ("3* *4", "among"), ("7//2", "among"), ("9**9**9", "among"),
    ("-3 + 5", "sign"), ("5 - -3", "sign"), ("5 * (+3)", "sign"), ("(4)(3+2)", "side by side"),
    ("4(3+2)", "side by side"), ("(3+2)4", "side by side"), ("(3+2) (4)", "side by side"), ("4 5", "side by side"),
    ("044 + 1", "starts with 0"), ("1 + 00", "starts with 0"), ("(1 + 2", "match"), ("1 + 2)", "match"),
    (") + (", "match"), ("()", "something other"), ("1 +", "not a complete expression"),
    ("* 1", "not a complete expression"), ("1 / 0", "divides by zero"), ("5 / (3 - 3)", "divides by zero"),
    ("1/0 - 1/0", "divides by zero"),
])  # fmt: skip
def test_evaluate_rejects_with_a_reason(text, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ExpressionError, match=reason):
            evaluate(text)


def test_evaluate_enforces_its_bounds():
    assert evaluate("1" + " " * (MAX_LENGTH - 1)).value == 1
    with pytest.raises(ExpressionError, match="at most"):
        evaluate("1" + " " * MAX_LENGTH)
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH).value == 1
    with pytest.raises(ExpressionError, match="deep"):
        evaluate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))
    assert evaluate("+".join("1" * MAX_NUMBERS)).value == MAX_NUMBERS
    with pytest.raises(ExpressionError, match="integers"):
        evaluate("+".join("1" * (MAX_NUMBERS + 1)))


# A tree's text, value (None: it divides by zero) and numbers, built without the code under test.


def _join(left, symbol, right, pad):
    a, b = left[1], right[1]
    value = None
    if a is not None and b is not None and not (symbol == "/" and b == 0):
        value = {"+": a + b, "-": a - b, "*": a * b}[symbol] if symbol != "/" else a / b
    return f"({left[0]}{pad}{symbol}{pad}{right[0]})", value, left[2] + right[2]


LEAF = st.integers(0, 120).map(lambda n: (str(n), Fraction(n), [n]))
TREES = st.recursive(
    LEAF,
    lambda inner: st.builds(_join, inner, st.sampled_from("+-*/"), inner, st.sampled_from(["", " ", "  "])),
    max_leaves=8,
)


@given(TREES)
def test_agrees_with_a_tree_evaluated_apart(tree):
    text, value, numbers = tree
    if value is None:
        with pytest.raises(ExpressionError, match="zero"):
            evaluate(text)
    else:
        expression = evaluate(text)
        assert (expression.value, expression.numbers) == (value, tuple(sorted(numbers)))


@given(st.text(alphabet="0123456789+-*/() \n", max_size=40))
def test_any_text_of_these_characters_is_valued_or_refused(text):
    try:
        expression = evaluate(text)
    except ExpressionError:
        return
    assert isinstance(expression.value, Fraction)
