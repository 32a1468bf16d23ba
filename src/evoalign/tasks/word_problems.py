# SPDX-License-Identifier: Apache-2.0
r"""Word problems in two chained steps, with numbers that do not matter. The answer is a whole number.

    reward = 1 if the final number of the completion is right, else 0

The final number is that of the last `\boxed{..}`, else the one after the last word "answer" (in its line, after the
last `=` of it), else the last number of the text. Thousands separators, currency signs, units and markdown do not
count: `$1,200.00` equals 1200. Column `answered` says whether there is a number, and has no weight.

Training and validation rows use eight templates, test rows also four others: the measures `seen` and `unseen`.

    evoalign train configs/word_problems.yaml
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeAlias

from evoalign.errors import DataError
from evoalign.rewards.objective import WeightedSum
from evoalign.tasks.answers import last_boxed
from evoalign.tasks.base import Split
from evoalign.tasks.generated import NAMES, Draw, Generated, texts_of
from evoalign.types import Example

INSTRUCTION = "Work it out in a few short steps, and end with a line that says: The answer is NUMBER."
_MARK = re.compile(r"answer(?: is|\W{0,3}[:=])")
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_SEPARATOR = re.compile(r"(?<=[0-9])(?:,|\{,\}|\\,|[\u2009\u202f\u00a0])(?=[0-9]{3}(?![0-9]))")

Problem: TypeAlias = tuple[str, int]
"""A question and its answer."""
ASIDES = (
    "{name} is {n} years old.", "It is {n} degrees outside.", "{name} lives in house number {n}.",
    "The radio has been on for {n} minutes.", "{name} has {n} postcards on the wall.", "It is day {n} of the month.",
)  # fmt: skip
"""Sentences whose number does not matter."""


class WordProblems(Generated):
    """Rows of {question, answer}; `answer` is a number or its text."""

    name = "word_problems"
    names = ("answered", "exact")
    weighted = WeightedSum({"exact": 1.0})

    @classmethod
    def draw(cls, draw: Draw, split: Split) -> Example:
        is_unseen = split == "test" and draw.chance(50)
        person, other, third = draw.some(NAMES, 3)
        story, answer = draw.one(UNSEEN if is_unseen else TEMPLATES)(draw, person, other)
        *facts, asked = re.split(r"(?<=[.?]) ", story)
        for aside in draw.some(ASIDES, draw.number(1, 2)):
            facts.insert(draw.number(0, len(facts)), aside.format(name=third, n=draw.number(3, 29)))
        return {"question": " ".join([*facts, asked]), "answer": str(answer), "unseen": is_unseen}

    @classmethod
    def key(cls, example: Example) -> str:
        return example["question"]

    def text(self, example: Example) -> str:
        return f"{example['question']}\n\n{INSTRUCTION}"

    def gold(self, example: Example) -> str:
        return f"The answer is {example['answer']}."

    def grade(self, text: str, example: Example) -> dict[str, float]:
        number = final_number(text)
        return {"answered": float(number is not None), "exact": float(number == final_number(example["answer"]))}

    def check(self, where: str, row: dict[str, Any]) -> Example:
        row = row | {"answer": str(row.get("answer", ""))}
        texts_of(where, row, "question", "answer")
        if final_number(row["answer"]) is None:
            raise DataError(f"{where}: answer is {row['answer']!r}; expected a number")
        return row


def final_number(text: str) -> Decimal | None:
    """Return the final number of a completion, or None."""
    boxed = last_boxed(text)
    if boxed is not None and (numbers := _numbers(boxed[1])):
        return numbers[0]
    lower = text.lower()
    marks = [mark.end() for mark in _MARK.finditer(lower)]
    if marks:
        line = lower[marks[-1] :].strip().partition("\n")[0]
        if numbers := _numbers(line.rpartition("=")[2]):
            return numbers[0]
    return next(reversed(_numbers(lower)), None)


def _numbers(text: str) -> list[Decimal]:
    """Return the numbers of a text."""
    return [Decimal(number) for number in _NUMBER.findall(_SEPARATOR.sub("", text.replace("−", "-")))]


def _crates(draw: Draw, one: str, two: str) -> Problem:
    crates, each, fewer = draw.number(12, 38), draw.number(13, 29), draw.number(25, 140)
    fruit = draw.one(("apples", "pears", "plums", "lemons"))
    story = f"{one} packs {crates} crates with {each} {fruit} each. {two} packs {fewer} {fruit} fewer than {one}."
    return f"{story} How many {fruit} do they pack together?", 2 * crates * each - fewer


def _wages(draw: Draw, one: str, two: str) -> Problem:
    wage, hours, days = draw.number(12, 29), draw.number(4, 9), draw.number(3, 6)
    spent = draw.number(20, wage * hours * days - 30)
    story = f"{one} earns {wage} dollars an hour and works {hours} hours a day for {days} days. "
    story += f"{one} then gives {spent} dollars to {two}."
    return f"{story} How many dollars of these wages does {one} keep?", wage * hours * days - spent


def _theatre(draw: Draw, one: str, two: str) -> Problem:
    rows, seats, parts = draw.number(11, 29), 12 * draw.number(1, 3), draw.one((3, 4, 6))
    price = draw.number(4, 15)
    name = {3: "third", 4: "quarter", 6: "sixth"}[parts]
    story = f"A theatre has {rows} rows of {seats} seats. A {name} of the seats stay empty. "
    story += f"{one} and {two} sold every ticket for {price} dollars."
    return f"{story} How many dollars did the taken seats bring?", rows * seats * (parts - 1) // parts * price


def _bus(draw: Draw, one: str, two: str) -> Problem:
    start, off, more = draw.number(25, 60), draw.number(5, 20), draw.number(2, 3)
    left = draw.number(4, start - off)
    times = {2: "Twice", 3: "Three times"}[more]
    story = f"{start} people are on a bus. At the stop of {one}, {off} get off. "
    story += f"{times} as many as got off get on. At the stop of {two}, {left} get off and nobody gets on."
    return f"{story} How many people are on the bus now?", start - off + more * off - left


def _book(draw: Draw, one: str, two: str) -> Problem:
    first, days, rest = draw.number(14, 48), draw.number(5, 13), draw.number(4, 12)
    daily = draw.number(11, 45)
    pages = first * days + daily * rest
    story = f"{one} borrows a book of {pages} pages from {two}. {one} reads {first} pages a day for {days} days. "
    story += f"The book is due {rest} days after that."
    return f"{story} How many pages a day does {one} have to read from then on to finish in time?", daily


def _flour(draw: Draw, one: str, two: str) -> Problem:
    loaves, each, wanted = draw.number(3, 8), draw.number(13, 27) * 10, draw.number(11, 29)
    there = draw.number(20, each * wanted // 10 - 10) * 10
    story = f"{one} needs {loaves * each} grams of flour for {loaves} loaves. {two} orders {wanted} such loaves. "
    story += f"{one} has {there} grams of flour."
    return f"{story} How many more grams of flour does {one} need?", each * wanted - there


def _ages(draw: Draw, one: str, two: str) -> Problem:
    cat, times, older, years = draw.number(3, 9), draw.number(3, 7), draw.number(5, 30), draw.number(4, 25)
    story = f"The cat of {one} is {cat} years old. {two} is {times} times as old as the cat. "
    story += f"{one} is {older} years older than {two}."
    return f"{story} How old will {one} be in {years} years?", cat * times + older + years


def _fence(draw: Draw, one: str, two: str) -> Problem:
    length, width, price, off = draw.number(17, 58), draw.number(11, 39), draw.number(6, 19), draw.number(15, 120)
    story = f"The garden of {one} is {length} metres long and {width} metres wide. "
    story += f"A fence costs {price} dollars a metre. {two} sells it {off} dollars cheaper in all."
    return f"{story} How many dollars does {one} pay for a fence all around?", 2 * (length + width) * price - off


def _tank(draw: Draw, one: str, two: str) -> Problem:
    rate, minutes, leak = draw.number(14, 45), draw.number(12, 40), draw.number(3, 9)
    after = draw.number(10, min(60, rate * minutes // leak - 1))
    story = f"{one} fills an empty tank with {rate} litres a minute for {minutes} minutes. "
    story += f"Then it loses {leak} litres a minute for {after} minutes until {two} stops the leak."
    return f"{story} How many litres are left in the tank?", rate * minutes - leak * after


def _trip(draw: Draw, one: str, two: str) -> Problem:
    fast, hours, slow, more = draw.number(55, 110), draw.number(3, 8), draw.number(12, 28), draw.number(2, 7)
    rest = draw.number(20, 300)
    story = f"{one} travels {fast * hours + slow * more + rest} km to {two}. "
    story += f"The train goes {fast} km an hour for {hours} hours. "
    story += f"After that {one} cycles {slow} km an hour for {more} hours."
    return f"{story} How many km are left?", rest


def _printers(draw: Draw, one: str, two: str) -> Problem:
    box, printers, speed, minutes = draw.one((50, 80, 120)), draw.number(2, 5), draw.number(5, 30), draw.number(6, 40)
    story = f"{one} has {printers} printers that print {speed} pages a minute each. They run for {minutes} minutes. "
    story += f"{two} packs the pages in boxes of {box}."
    return f"{story} How many boxes are needed for all pages?", -(-speed * printers * minutes // box)


def _shop(draw: Draw, one: str, two: str) -> Problem:
    count, cost, gain = draw.number(24, 75), draw.number(4, 18), draw.number(3, 12)
    broken = draw.number(3, (count * gain - 1) // (cost + gain))  # so that there is a profit
    story = f"{one} buys {count} mugs from {two} for {cost} dollars each. {broken} of them break. "
    story += f"{one} sells the others for {cost + gain} dollars each."
    profit = (count - broken) * (cost + gain) - count * cost
    return f"{story} How many dollars does {one} have more than before?", profit


TEMPLATES: tuple[Callable[[Draw, str, str], Problem], ...] = (
    _crates, _wages, _theatre, _bus, _book, _flour, _ages, _fence,
)  # fmt: skip
UNSEEN: tuple[Callable[[Draw, str, str], Problem], ...] = (_tank, _trip, _printers, _shop)
"""Templates of test rows alone."""
