# SPDX-License-Identifier: Apache-2.0
"""Guess a number in two turns: the user lists three numbers, and replies "Go up." or "Go down." to a wrong one.

    reward = 0.6 right + 0.3 narrowed + 0.1 listed

`right`: the number is guessed. `narrowed`: how much the first guess narrows the list down, 1 for the middle number and
for the right one. `listed`: the share of the two turns with a number of the list. A message is a guess if it has
exactly one number. A player that does not read the reply guesses at most two of the three numbers: 67 % in the mean.

    evoalign train configs/quickstart_guess.yaml
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from evoalign import transcripts
from evoalign.errors import DataError
from evoalign.rewards.objective import WeightedSum
from evoalign.tasks.base import Split
from evoalign.tasks.generated import Dialogue, Draw, spoken
from evoalign.types import Example, Messages

GUESSES = 2
"""Most guesses of an episode: enough for three numbers."""
UP, DOWN = "Go up.", "Go down."
_NUMBER = re.compile(r"[0-9]+")


class Guess(Dialogue):
    """Rows of {numbers, number}: three numbers in ascending order, and the one to be guessed."""

    name = "guess"
    names = ("narrowed", "listed", "right")
    weighted = WeightedSum({"narrowed": 0.3, "listed": 0.1, "right": 0.6})

    @classmethod
    def draw(cls, draw: Draw, split: Split) -> Example:
        numbers = sorted(draw.some(range(1, 100), 3))
        return {"numbers": numbers, "number": draw.one(numbers)}

    @classmethod
    def key(cls, example: Example) -> str:
        return str(example["numbers"])

    def text(self, example: Example) -> str:
        *most, last = map(str, example["numbers"])
        return f"Which number is it: {', '.join(most)} or {last}?"

    def reply(self, example: Example, transcript: Messages) -> str | None:
        """Return `UP` or `DOWN`; None after the last guess, the right one, and a message that is no guess."""
        said = spoken(transcript)
        guess = guess_of(said[-1])
        if guess in (None, example["number"]) or len(said) >= GUESSES:
            return None
        return UP if guess < example["number"] else DOWN

    def play(self, example: Example, transcript: Messages) -> str:
        low, middle, high = example["numbers"]
        if len(transcript) == 1:
            return str(middle)
        return str(high if transcript[-1]["content"] == UP else low)

    def grade(self, text: str, example: Example) -> dict[str, float]:
        guesses = [guess_of(turn) for turn in transcripts.turns(text)[:GUESSES]]
        numbers, number = example["numbers"], example["number"]
        right = float(number in guesses)
        listed = [float(guess in numbers) for guess in guesses]
        missing = GUESSES - len(listed)
        return {
            "narrowed": narrowed(numbers, number, guesses[0]),
            "listed": (sum(listed) + missing * right) / GUESSES,
            "right": right,
        }

    def check(self, where: str, row: dict[str, Any]) -> Example:
        numbers: Any = row.get("numbers")
        if (
            not isinstance(numbers, list)
            or len(numbers) != 3
            or not all(type(n) is int and n >= 0 for n in numbers)
            or not numbers[0] < numbers[1] < numbers[2]
        ):
            raise DataError(f"{where}: numbers is {numbers!r}; expected three ascending whole numbers")
        if row.get("number") not in numbers:
            raise DataError(f"{where}: number is {row.get('number')!r}; expected one of {numbers}")
        return row


def guess_of(message: str) -> int | None:
    """Return the number of a message that has exactly one, of at most nine digits, else None."""
    found = set(_NUMBER.findall(message[:1000]))
    text = found.pop() if len(found) == 1 else ""
    return int(text) if 0 < len(text) < 10 else None


def narrowed(numbers: Sequence[int], number: int, guess: int | None) -> float:
    """Return the share of the information about the number that the reply to a guess gives, from 0 to 1."""
    if guess is None:
        return 0.0
    left = [n for n in numbers if n == number or (n != guess and (n < guess) == (number < guess))]
    return 1.0 if guess == number else 1 - math.log(len(left)) / math.log(len(numbers))
