# SPDX-License-Identifier: Apache-2.0
"""Countdown problems for the tiny base model: generation, prompts, scoring.

A problem is 3 or 4 integers in 1..99 and an integer target in 10..100 that some
expression over the numbers (each used exactly once, ``+ - * /`` and parentheses)
reaches.  Every problem is made from such an expression, so all are solvable.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MIN_NUMBER, MAX_NUMBER = 1, 99
MIN_TARGET, MAX_TARGET = 10, 100
SLOPPY_WEIGHTS = (7, 1, 1, 1)  # of + - * / in an answer that ignores the target

Number = int | Fraction


# --------------------------------------------------------------------------- #
# Split
# --------------------------------------------------------------------------- #


def is_held_out(numbers: Sequence[int], target: int) -> bool:
    """Return whether a problem belongs to the held-out tenth (never trained on).

    The key is the sorted numbers joined by commas, a colon and the target, in
    ASCII, e.g. ``"19,35,44:98"``; the problem is held out when the 8-byte BLAKE2b
    digest of the key, read as a big-endian integer, is 0 modulo 10.
    """
    key = ",".join(str(n) for n in sorted(numbers)) + ":" + str(target)
    digest = hashlib.blake2b(key.encode("ascii"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 10 == 0


# --------------------------------------------------------------------------- #
# Expressions
# --------------------------------------------------------------------------- #
# An expression tree is a leaf ("n", index) or a node (op, left, right).

Tree = tuple


def _apply(op: str, a: Number, b: Number) -> Number | None:
    """Exact arithmetic; None for a division by zero."""
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        return a * b
    if b == 0:
        return None
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    value = Fraction(a) / b
    return value.numerator if value.denominator == 1 else value


def random_tree(rng: random.Random, numbers: Sequence[int]) -> tuple[Tree, Number | None]:
    """Return a random expression tree over all the numbers, and its value."""
    items: list[tuple[Tree, Number | None]] = [(("n", i), n) for i, n in enumerate(numbers)]
    while len(items) > 1:
        tree_a, a = items.pop(rng.randrange(len(items)))
        tree_b, b = items.pop(rng.randrange(len(items)))
        op = "+-*/"[rng.randrange(4)]
        value = None if a is None or b is None else _apply(op, a, b)
        items.append(((op, tree_a, tree_b), value))
    return items[0]


def sloppy_expression(rng: random.Random, numbers: Sequence[int]) -> str:
    """Join the numbers in their order with random operators, mostly ``+``."""
    text = str(numbers[0])
    for number in numbers[1:]:
        text += f" {rng.choices('+-*/', SLOPPY_WEIGHTS)[0]} {number}"
    return text


def canonical(tree: Tree, numbers: Sequence[int]) -> str:
    """Print a tree in one fixed order, so that equal solutions look the same.

    Sums and products are flattened; the added (multiplied) terms come first, then
    the subtracted (dividing) ones, each group in the order of the prompt.
    """

    def first_index(node: Tree) -> int:
        return node[1] if node[0] == "n" else min(first_index(node[1]), first_index(node[2]))

    def collect(node: Tree, ops: str, inverse: bool, out: list[tuple[bool, Tree]]) -> None:
        if node[0] != "n" and node[0] in ops:
            collect(node[1], ops, inverse, out)
            collect(node[2], ops, inverse != (node[0] == ops[1]), out)
        else:
            out.append((inverse, node))

    def go(node: Tree) -> tuple[str, int]:
        if node[0] == "n":
            return str(numbers[node[1]]), 3
        ops = "+-" if node[0] in "+-" else "*/"
        precedence = 1 if ops == "+-" else 2
        terms: list[tuple[bool, Tree]] = []
        collect(node, ops, False, terms)
        terms.sort(key=lambda term: (term[0], first_index(term[1])))
        text = ""
        for position, (inverse, term) in enumerate(terms):
            shown, inner = go(term)
            if inner < precedence:
                shown = f"({shown})"
            text += shown if position == 0 else f" {ops[inverse]} {shown}"
        return text, precedence

    return go(tree)[0]


# --------------------------------------------------------------------------- #
# Problems, prompts, completions
# --------------------------------------------------------------------------- #


@dataclass(frozen=True)
class Problem:
    """Numbers, a target they reach, and one canonical expression that does."""

    numbers: tuple[int, ...]
    target: int
    solution: str


def random_problem(rng: random.Random, *, held_out: bool) -> Problem:
    """Draw one problem from the training or from the held-out side of the split."""
    count = rng.choice((3, 4))
    while True:
        numbers = [rng.randint(MIN_NUMBER, MAX_NUMBER) for _ in range(count)]
        tree, value = random_tree(rng, numbers)
        if not isinstance(value, int) or not MIN_TARGET <= value <= MAX_TARGET:
            continue
        if is_held_out(numbers, value) == held_out:
            return Problem(tuple(numbers), value, canonical(tree, numbers))


def context_prompt(numbers: Sequence[int], target: int) -> str:
    """The long prompt; numbers are printed as NumPy prints an integer array."""
    width = max(len(str(n)) for n in numbers)
    shown = "[" + " ".join(str(n).rjust(width) for n in numbers) + "]"
    return (
        "You are a helpful assistant. You first think about the reasoning process in your "
        "mind and then provide the user with the answer.Using the numbers "
        f"{shown}, create an equation that equals {target}. You can use basic arithmetic "
        "operations (+, -, *, /) and each number can only be used once. Show your work in "
        "<think> </think> tags. And return the final answer in <answer> </answer> tags, for "
        "example <answer> (1 + 2) / 3 </answer>.Let me solve this step by step.\n<think>"
    )


def short_prompt(numbers: Sequence[int], target: int) -> str:
    """The one-line prompt."""
    return f"Use [{' '.join(str(n) for n in numbers)}] to make {target}. <think>"


def completion(expression: str) -> str:
    """What the model is taught to write after either prompt (before <|im_end|>)."""
    return f"</think>\n<answer>{expression}</answer>"


# --------------------------------------------------------------------------- #
# Scoring
# --------------------------------------------------------------------------- #

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FORMAT = re.compile(r"^<think>.*?</think>\n<answer>.*?</answer>$", re.DOTALL)
_TOKEN = re.compile(r"\s*([0-9]{1,6}|[-+*/()])")


class _Parser:
    """Recursive descent over the tokens of an arithmetic expression."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        self.used: list[int] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ValueError("not an expression")
            self.tokens.append(match[1])
            position = match.end()
        self.tokens.reverse()  # the next token is the last of the list

    def take(self, wanted: str) -> str | None:
        """Take the next token if it is one of the wanted characters."""
        return self.tokens.pop() if self.tokens and self.tokens[-1] in wanted else None

    def atom(self, depth: int) -> Fraction:
        if self.take("("):
            value = self.total(depth + 1)
            if not self.take(")"):
                raise ValueError("an open parenthesis")
            return value
        if depth > 20 or not self.tokens or not self.tokens[-1].isdecimal():
            raise ValueError("not an expression")
        self.used.append(int(self.tokens.pop()))
        return Fraction(self.used[-1])

    def product(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while op := self.take("*/"):
            other = self.atom(depth)
            value = value * other if op == "*" else value / other
        return value

    def total(self, depth: int = 0) -> Fraction:
        value = self.product(depth)
        while op := self.take("+-"):
            other = self.product(depth)
            value = value + other if op == "+" else value - other
        return value


def parse_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """Value and numbers of an arithmetic expression, or None if it is not one."""
    if len(text) > 200:
        return None
    try:
        parser = _Parser(text.strip())
        value = parser.total()
    except (ValueError, ZeroDivisionError):
        return None
    return None if parser.tokens else (value, parser.used)


def is_correct(text: str, numbers: Sequence[int], target: int) -> bool:
    """Whether the last <answer> uses exactly the numbers and equals the target."""
    answers = _ANSWER.findall(text)
    parsed = parse_expression(answers[-1]) if answers else None
    return parsed is not None and parsed[0] == target and sorted(parsed[1]) == sorted(numbers)


def has_format(text: str) -> bool:
    """Whether ``<think>`` plus the completion has the asked-for form."""
    return _FORMAT.match("<think>" + text) is not None
