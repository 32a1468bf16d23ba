# SPDX-License-Identifier: Apache-2.0
"""Countdown data in the published form, every row solvable and its solution verified.

A problem is made from a random expression over random numbers, so it has a solution; the solution is then graded by
the same exact evaluator that grades models. The stream is numpy's RandomState, frozen for good: one seed, one file.

The shipped `data/tasks/countdown/countdown.json` is `write_countdown(path, 2200, "mixed", seed=0)`. All of its
rows are `held_out`: the shipped tiny base model was trained on none of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from evoalign.errors import DataError
from evoalign.rewards.arithmetic import evaluate
from evoalign.tasks.countdown.task import SYSTEM, THINK, USER
from evoalign.tasks.data import random_state

Numbers: TypeAlias = Literal[3, 4, "mixed"]

Problem: TypeAlias = tuple[tuple[int, ...], int]
"""Ascending numbers and the target."""

MIN_NUMBER, MAX_NUMBER = 1, 99
MIN_TARGET, MAX_TARGET = 10, 100
MAX_MISSES = 100_000
"""Draws for one row before the search is given up."""


@dataclass(frozen=True, slots=True)
class Term:
    """A number or an expression over numbers, and its exact value."""

    text: str
    value: Fraction


def held_out(numbers: Sequence[int], target: int) -> bool:
    """Whether a problem is in the tenth that the tiny base model is never trained on.

    The key is the ascending numbers joined by commas, a colon and the target (`19,35,44:98`); its 8-byte BLAKE2b
    digest, read big-endian, is 0 modulo 10.
    """
    key = f"{','.join(map(str, sorted(numbers)))}:{target}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 10 == 0


def generate(
    count: int,
    numbers: Numbers = "mixed",
    seed: int = 0,
    *,
    targets: tuple[int, int] = (MIN_TARGET, MAX_TARGET),
    keep: Callable[[tuple[int, ...], int], bool] | None = held_out,
) -> list[dict[str, Any]]:
    """`count` rows of {id, context, numbers, target, solution}, no two with the same numbers and target.

    `numbers` is how many each row has; `mixed` is 3 or 4 with equal chance. `targets` are the least and the greatest
    integer target; `keep` picks the problems (None keeps all). Raises DataError where there are not that many.
    """
    random = random_state(seed)
    seen: set[Problem] = set()

    def is_wanted(problem: Problem) -> bool:
        new = targets[0] <= problem[1] <= targets[1] and problem not in seen
        return new and (keep is None or keep(*problem))

    rows: list[dict[str, Any]] = []
    for index in range(count):
        size: int = random.randint(3, 5) if numbers == "mixed" else numbers
        drawn = _draw_wanted(random, size, is_wanted)
        if drawn is None:
            raise DataError(f"found only {index} of {count} problems with targets {targets}; ask for fewer rows")
        rows.append(_row(index, *drawn))
        seen.add((tuple(sorted(drawn[0])), int(drawn[1].value)))
    return rows


def write_countdown(path: str | Path, count: int, numbers: Numbers = "mixed", seed: int = 0) -> None:
    """Write `generate(count, numbers, seed)` as a JSON list with one row a line."""
    lines = ",\n".join(json.dumps(row) for row in generate(count, numbers, seed))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def solve(numbers: Sequence[int], target: int | Fraction) -> str | None:
    """An expression over all the numbers that comes to the target exactly, or None: every one is tried."""
    return _search([Term(str(n), Fraction(n)) for n in numbers], Fraction(target))


def context(numbers: Sequence[int], target: int | str) -> str:
    """The published prompt, numbers printed as numpy prints an integer array: `[83 78  1 39]`."""
    width = max(len(str(n)) for n in numbers)
    shown = f"[{' '.join(str(n).rjust(width) for n in numbers)}]"
    return f"{SYSTEM}{USER.format(numbers=shown, target=target)}Let me solve this step by step.\n{THINK}"


def _row(index: int, numbers: list[int], solution: Term) -> dict[str, Any]:
    expression, target = evaluate(solution.text), int(solution.value)
    if expression.value != target or expression.numbers != tuple(sorted(numbers)):
        raise AssertionError(f"{solution.text} over {numbers} does not make {target}")
    return {
        "id": index,
        "context": context(numbers, target),
        "numbers": numbers,
        "target": str(target),
        "solution": solution.text,
    }


def _draw_wanted(
    random: np.random.RandomState, size: int, is_wanted: Callable[[Problem], bool]
) -> tuple[list[int], Term] | None:
    """Draws until a problem is wanted; None after `MAX_MISSES` draws."""
    for _ in range(MAX_MISSES):
        numbers, solution = _draw(random, size)
        if solution is None or solution.value.denominator != 1:
            continue
        if is_wanted((tuple(sorted(numbers)), int(solution.value))):
            return numbers, solution
    return None


def _draw(random: np.random.RandomState, size: int) -> tuple[list[int], Term | None]:
    """Random numbers and a random expression over all of them, None where that divides by zero."""
    numbers: list[int] = random.randint(MIN_NUMBER, MAX_NUMBER + 1, size=size).tolist()
    terms = [Term(str(n), Fraction(n)) for n in numbers]
    while len(terms) > 1:
        left, right = (terms.pop(random.randint(len(terms))) for _ in range(2))
        joined = _join(left, "+-*/"[random.randint(4)], right)
        if joined is None:
            return numbers, None
        terms.append(joined)
    return numbers, terms[0]


def _search(terms: list[Term], target: Fraction) -> str | None:
    if len(terms) == 1:
        return terms[0].text if terms[0].value == target else None
    for rest, joined in _joins(terms):
        found = _search([*rest, joined], target)
        if found is not None:
            return found
    return None


def _joins(terms: list[Term]) -> Iterator[tuple[list[Term], Term]]:
    """Every way to join two of the terms, with those that are left."""
    for i, left in enumerate(terms):
        for j, right in enumerate(terms):
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for symbol in "+-*/" if i < j else "-/" if i > j else "":
                joined = _join(left, symbol, right)
                if joined is not None:
                    yield rest, joined


def _join(left: Term, symbol: str, right: Term) -> Term | None:
    """`(left symbol right)`, or None for a division by zero."""
    text = f"({left.text} {symbol} {right.text})"
    if symbol == "+":
        return Term(text, left.value + right.value)
    if symbol == "-":
        return Term(text, left.value - right.value)
    if symbol == "*":
        return Term(text, left.value * right.value)
    return Term(text, left.value / right.value) if right.value else None
