# SPDX-License-Identifier: Apache-2.0
"""Countdown: make a target from given numbers, each used exactly once (Qiu et al., arXiv 2509.24372, section 4.1).

    reward = 0.1 * format + answer, from 0 to 1.1 (`task.reward_weights` sets other weights)

The rules are those of the published graders, without backtracking regular expressions and without executing model
output. Deviations: `**`, `//` and signs are rejected (the published graders accept `3**4` and `7//2`), and negative or
fractional targets are graded like others. `task.grading: lenient` also accepts other notations; see
`rewards.arithmetic.evaluate_written`.

`generate` makes data in the published form: `evoalign data countdown`.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, DataError
from evoalign.rewards.arithmetic import MAX_WRITTEN, ExpressionError, evaluate, evaluate_written
from evoalign.rewards.objective import Columns
from evoalign.tasks import data
from evoalign.tasks.base import Data, Task
from evoalign.tasks.data import random_state
from evoalign.types import Example, Prompt

MAX_RESPONSE = 500_000
"""Maximum characters of a cleaned response, about 100,000 tokens; a longer one earns 0."""
TOLERANCE = Fraction(1, 100_000)
"""Targets of the published data are decimal strings such as 266.6666666666667."""
FORMAT_WEIGHT = 0.1
DATA = "data/tasks/countdown/countdown.json"

THINK, END_THINK = "<think>", "</think>"
ANSWER, END_ANSWER = "<answer>", "</answer>"
BRIDGE = f"{END_THINK}\n{ANSWER}"

SYSTEM = (
    "You are a helpful assistant. You first think about the reasoning process in your mind and then provide the user "
    "with the answer."
)
USER = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And return the final "
    "answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)
OPENING = f"Let me solve this step by step.\n{THINK}"
"""Beginning of the assistant message of `chat_opened`, as in the replications."""
_TARGET = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")


class Countdown(Task):
    """Rows of {id, context, numbers, target, solution}.

    Values of `task.prompt`:

    - `raw` (default): the row's `context`, which ends in "<think>";
    - `short`: `Use [44 19 35] to make 98. <think>`;
    - `chat`: a system message (or `task.system_prompt`) and a user message, numbers as a Python list;
    - `chat_opened`: the same with the beginning of the assistant message, `OPENING`, which the model continues.

    If the prompt ends in "<think>", the model's text continues that block, so the format is graded on "<think>" +
    response. With `chat` the response has to open the block itself.
    """

    name = "countdown"
    shipped = (DATA, None)
    per_call = 16
    gradings = ("strict", "lenient")
    graded_text = END_ANSWER
    correctness = "accuracy"
    takes_weights = True
    earlier_weights = (FORMAT_WEIGHT, 1.0)
    takes_system_prompt = True
    forms = ("raw", "short", "chat", "chat_opened")

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        weights = [FORMAT_WEIGHT, 1.0] if config.reward_weights is None else config.reward_weights
        if len(weights) != 2 or min(weights) < 0 or max(weights) == 0:
            raise ConfigError(
                f"task.reward_weights is {weights}; countdown has two parts, format and accuracy: set two numbers from "
                "0 on, such as [0, 1] for accuracy alone"
            )
        self.weights = weights
        self._has_own_reward = type(self).compute_reward is not Countdown.compute_reward
        if not self._has_own_reward:
            self.max_reward = self._reward(1.0, 1.0)

    def load_data(self, seed: int) -> Data:
        return data.load(self.config, seed, self._check, self.shipped)

    def prompt(self, example: Example) -> Prompt:
        numbers, target = cast("list[int]", example["numbers"]), str(example["target"])
        if self.config.prompt == "short":
            return f"Use [{' '.join(map(str, numbers))}] to make {target}. {THINK}"
        if self.config.prompt in ("chat", "chat_opened"):
            question = USER.format(numbers=list(numbers), target=target)
            system = self.config.system_prompt or SYSTEM
            chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            opened = self.config.prompt == "chat_opened"
            return [*chat, {"role": "assistant", "content": OPENING}] if opened else chat
        return cast(str, example["context"])

    def compute_reward(self, text: str, example: Example) -> float:
        return self._reward(*self._parts(text, example))

    def _reward(self, form: float, answer: float) -> float:
        return self.weights[0] * form + self.weights[1] * answer

    def gold(self, example: Example) -> str | None:
        """Return the stored solution in the shortest full format."""
        solution = example.get("solution")
        if not isinstance(solution, str):
            return None
        return f"{'' if self._opened(example) else THINK}{BRIDGE}{solution}{END_ANSWER}"

    def is_right(self, text: str, example: Example) -> bool:
        """Return whether the answer has the target's value; the stored solution is one of many."""
        return self._parts(text, example)[1] > 0

    def final_answer(self, text: str, example: Example) -> str | None:
        """Return the value of the answer; None unless it uses each number exactly once, as in arXiv 2603.12228."""
        numbers, lenient = cast("list[int]", example["numbers"]), self.config.grading == "lenient"
        value = None if len(text) > MAX_RESPONSE else answer_value(text, numbers, lenient=lenient)
        return None if value is None else str(value)

    def parts(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """Return `format` and `accuracy`, in the order of the weights; none if a subclass has its own reward."""
        if self._has_own_reward:
            return {}
        found = [self._parts(self.clean(text), example) for text, example in zip(texts, examples, strict=True)]
        return {"format": [form for form, _ in found], "accuracy": [answer for _, answer in found]}

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """Return the measures. `accuracy` ignores the format; `high_reward` is a reward of at least 1."""
        form, answer = self._parts(text, example)
        return {
            "accuracy": float(answer > 0),
            "format": form,
            "answer_reward": answer,
            "high_reward": float(self._reward(form, answer) >= 1.0),
        }

    def _parts(self, text: str, example: Example) -> tuple[float, float]:
        if len(text) > MAX_RESPONSE:
            return 0.0, 0.0
        opening = THINK if self._opened(example) else ""
        numbers, lenient = tuple(cast("list[int]", example["numbers"])), self.config.grading == "lenient"
        return format_reward(opening + text), answer_reward(text, numbers, example["target"], lenient=lenient)

    def _opened(self, example: Example) -> bool:
        """Return whether the prompt opens the think block."""
        if self.config.prompt == "chat":
            return False
        return self.config.prompt in ("short", "chat_opened") or cast(str, example["context"]).rstrip().endswith(THINK)

    def _check(self, where: str, row: dict[str, Any]) -> Example:
        wanted = ("numbers", "target", *(("context",) if "context" in self.config.columns else ()))
        if missing := [name for name in wanted if name not in row]:
            raise data.lacking(where, row, self.config, f"no {' and no '.join(missing)}", *wanted)
        check_row(where, row)
        context = row.get("context")
        if self.config.prompt in (None, "raw") and not (isinstance(context, str) and context):
            raise DataError(
                f"{where}: context is {context!r}; expected the prompt, or task.prompt: short, chat, chat_opened"
            )
        return row


def format_reward(response: str) -> float:
    """Return 1.0 for exactly `<think>..</think>`, a newline and `<answer>..</answer>`; else 0.1 and 0.5 for each block.

    Equals the regular expressions of the published graders, `^<think>.*?</think>\\n<answer>.*?</answer>$` and
    `<tag>.*?</tag>` (DOTALL), in linear time. One newline may follow, and blocks may contain text or further tags.
    """
    bridge = response.find(BRIDGE, len(THINK))
    end = len(response) - response.endswith("\n") - len(END_ANSWER)
    whole = response.startswith(THINK) and 0 <= bridge <= end - len(BRIDGE)
    if whole and response.startswith(END_ANSWER, end):
        return 1.0
    has_block = [
        close in response.partition(opening)[2] for opening, close in ((THINK, END_THINK), (ANSWER, END_ANSWER))
    ]
    return 0.1 * has_block[0] + 0.5 * has_block[1]


def answer_reward(response: str, numbers: Sequence[int], target: str | int | float, *, lenient: bool = False) -> float:
    """Return 1.0 if the last answer block uses each number exactly once and has the target's value, else 0.0.

    `lenient` also accepts the notations of `rewards.arithmetic.evaluate_written`.
    """
    answer = _short(last_answer(response))
    return 0.0 if answer is None else _reaches(answer, tuple(sorted(numbers)), str(target), lenient)


def answer_value(response: str, numbers: Sequence[int], *, lenient: bool = False) -> Fraction | None:
    """Return the value of the last answer block, or None unless it uses each number exactly once."""
    answer = _short(last_answer(response))
    return None if answer is None else _value(answer, tuple(sorted(numbers)), lenient)


def _short(answer: str | None) -> str | None:
    """Return an answer, or None for one that `_value` would refuse: those must not fill the cache."""
    return None if answer is None or len(answer) > MAX_WRITTEN else answer


@lru_cache(2**14)  # members often give the same answer, and the axis report reads each again after grading
def _reaches(answer: str, numbers: tuple[int, ...], target: str, lenient: bool) -> float:
    value = _value(answer, numbers, lenient)
    return float(value is not None and abs(value - Fraction(target)) < TOLERANCE)


@lru_cache(2**14)
def _value(answer: str, numbers: tuple[int, ...], lenient: bool) -> Fraction | None:
    try:
        expression = (evaluate_written if lenient else evaluate)(answer)
    except ExpressionError:
        return None
    return expression.value if expression.numbers == numbers else None


def last_answer(response: str) -> str | None:
    """Return the content of the last match of `<answer>(.*?)</answer>`, or None.

    A match ends at the first closing tag after an opening tag, and begins at the first opening tag after the previous
    closing tag, so five searches find it in any text.
    """
    last_close = response.rfind(END_ANSWER)
    last_open = response.rfind(ANSWER, 0, max(last_close, 0))
    if last_open < 0:
        return None
    end = response.find(END_ANSWER, last_open)
    close_before = response.rfind(END_ANSWER, 0, last_open)
    start = response.find(ANSWER, max(close_before, 0))
    return response[start + len(ANSWER) : end]


def check_row(where: str, row: Mapping[str, Any]) -> None:
    """Raise DataError, naming `where`, for wrong numbers or a wrong target."""
    numbers: object = row.get("numbers")
    if (
        not isinstance(numbers, list)
        or not numbers
        or not all(type(n) is int and n >= 0 for n in cast("list[object]", numbers))
    ):
        raise DataError(f"{where}: numbers is {numbers!r}; expected a list of integers from 0 up")
    target: object = row.get("target")
    if isinstance(target, bool) or not isinstance(target, str | int | float) or not _TARGET.fullmatch(str(target)):
        raise DataError(
            f"{where}: target is {target!r}; expected a decimal number as a string, such as '98' or '-27.4'"
        )
    if not isinstance(row.get("solution", ""), str | None):
        raise DataError(f"{where}: solution is {row['solution']!r}; expected a string such as '((44 + 19) + 35)'")


Numbers: TypeAlias = Literal[3, 4, "mixed"]

Problem: TypeAlias = tuple[tuple[int, ...], int]
"""Ascending numbers, target."""

MIN_NUMBER, MAX_NUMBER = 1, 99
MIN_TARGET, MAX_TARGET = 10, 100
MAX_MISSES = 100_000
"""Maximum number of draws for one row."""


class Term(NamedTuple):
    """An expression and its exact value."""

    text: str
    value: Fraction


_OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = dict(
    zip("+-*/", (operator.add, operator.sub, operator.mul, operator.truediv), strict=True)
)


def held_out(numbers: Sequence[int], target: int) -> bool:
    """Return whether a problem is in the tenth that the tiny base model was not trained on.

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
    """Return `count` rows of {id, context, numbers, target, solution}, no two with the same numbers and target.

    Every row is solvable, and the evaluator that grades models verifies its solution. The stream is numpy's frozen
    RandomState: one seed, one file. The shipped `data/tasks/countdown/countdown.json` is
    `write_countdown(path, 2200, "mixed", seed=0)`; all its rows are `held_out`.

    `numbers` is the count of numbers in a row; `mixed` draws 3 or 4 with equal probability. `targets` are the smallest
    and the largest target; `keep` selects problems (None: all). Raises DataError if it does not find enough.
    """
    random = random_state(seed)
    seen: set[Problem] = set()
    rows: list[dict[str, Any]] = []
    for index in range(count):
        size: int = random.randint(3, 5) if numbers == "mixed" else numbers
        for _ in range(MAX_MISSES):
            drawn, solution = _draw(random, size)
            if solution is not None and solution.value.denominator == 1:
                problem = tuple(sorted(drawn)), int(solution.value)
                is_new = targets[0] <= problem[1] <= targets[1] and problem not in seen
                if is_new and (keep is None or keep(*problem)):
                    break
        else:
            raise DataError(f"found only {index} of {count} problems with targets {targets}; ask for fewer rows")
        text, (ascending, target) = solution.text, problem
        expression = evaluate(text)
        if expression.value != target or expression.numbers != ascending:
            raise AssertionError(f"{text} over {drawn} does not make {target}")
        row = {"id": index, "context": context(drawn, target), "numbers": drawn, "target": str(target)}
        rows.append(row | {"solution": text})
        seen.add(problem)
    return rows


def write_countdown(path: str | Path, count: int, numbers: Numbers = "mixed", seed: int = 0) -> None:
    """Write `generate(count, numbers, seed)` as a JSON list, one row per line."""
    lines = ",\n".join(json.dumps(row) for row in generate(count, numbers, seed))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def solve(numbers: Sequence[int], target: int | Fraction) -> str | None:
    """Return an expression over all numbers with exactly this value, or None, by exhaustive search."""
    return _search([Term(str(n), Fraction(n)) for n in numbers], Fraction(target))


def context(numbers: Sequence[int], target: int | str) -> str:
    """Return the published prompt, with numbers as numpy prints them: `[83 78  1 39]`."""
    width = max(len(str(n)) for n in numbers)
    shown = f"[{' '.join(str(n).rjust(width) for n in numbers)}]"
    return f"{SYSTEM}{USER.format(numbers=shown, target=target)}Let me solve this step by step.\n{THINK}"


def _draw(random: np.random.RandomState, size: int) -> tuple[list[int], Term | None]:
    """Return random numbers and a random expression over all of them, or None if it divides by zero."""
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
    for i, left in enumerate(terms):
        for j, right in enumerate(terms):
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for symbol in "+-*/" if i < j else "-/" if i > j else "":
                joined = _join(left, symbol, right)
                found = None if joined is None else _search([*rest, joined], target)
                if found is not None:
                    return found
    return None


def _join(left: Term, symbol: str, right: Term) -> Term | None:
    """Return `(left symbol right)`, or None for a division by zero."""
    if symbol == "/" and not right.value:
        return None
    return Term(f"({left.text} {symbol} {right.text})", _OPERATIONS[symbol](left.value, right.value))
