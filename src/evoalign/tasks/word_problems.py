# SPDX-License-Identifier: Apache-2.0
r"""Word problems in two chained steps, with numbers that do not matter. The answer is a whole number.

    reward = 1 if the final number of the completion is right, else 0

The final number is what the last statement says: a `\boxed{..}`, an "answer is", or a correction after it ("no, it is
7"). If there is none, it is the last number of the text. "The answer is 12 * 5 = 60 cups" and "60 = 12 * 5" give 60,
and "not 60" gives no answer. Thousands separators, currency signs, units and markdown do not count: `$1,200.00` equals
1200. Column `answered` says whether there is a number, and has no weight.

Training and validation rows use eight templates, test rows also four others: the measures `seen` and `unseen`.

    evoalign train configs/word_problems.yaml
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any, TypeAlias

from evoalign.errors import DataError
from evoalign.rewards.objective import WeightedSum
from evoalign.tasks.answers import last_boxed
from evoalign.tasks.base import Split
from evoalign.tasks.generated import MAX_RESPONSE, NAMES, Draw, Generated, texts_of
from evoalign.types import Example

INSTRUCTION = "Work it out in a few short steps, and end with a line that says: The answer is NUMBER."
_MARK = re.compile(r"answers?(?: is| are| (?:would|should|must) be|\W{0,3}[:=])")
_CORRECTION = re.compile(
    r"\b(?:no|wait|sorry|actually|correction)(?:[,:;.!-]*\s+(?:it|that|this)(?:['’]s| is| should be)|[,:]\s*(?=[$0-9]))"
)
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_NEGATED = re.compile(rf"(?:\bnot|n['’]t)(?: equal to| be)?[\s$*\\(]*{_NUMBER.pattern}")
_OPERATOR = re.compile(r"(?:\s+(?!x\b)[a-z]+)?\s*(?:[*×·+/÷-]|\bx\b|\\times|\\cdot|\\div|\}\{)\s*[$(\\0-9]|\}\{|x[0-9]")
"""Text after a number within a calculation, also after a unit."""
_SEPARATOR = re.compile(r"(?<=[0-9])(?:,|\{,\}|\\,|[\u2009\u202f\u00a0])(?=[0-9]{3}(?![0-9]))")
_SPACE = re.compile(r"(?<=[0-9]) (?=[0-9]{3}(?![0-9]))")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")

Problem: TypeAlias = tuple[str, str, int]
"""A question, its working in short steps, and its answer."""
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
        story, working, answer = draw.one(UNSEEN if is_unseen else TEMPLATES)(draw, person, other)
        *facts, asked = re.split(r"(?<=[.?]) ", story)
        for aside in draw.some(ASIDES, draw.number(1, 2)):
            facts.insert(draw.number(0, len(facts)), aside.format(name=third, n=draw.number(3, 29)))
        question = " ".join([*facts, asked])
        return {"question": question, "working": working, "answer": str(answer), "unseen": is_unseen}

    @classmethod
    def key(cls, example: Example) -> str:
        return example["question"]

    def text(self, example: Example) -> str:
        return f"{example['question']}\n\n{INSTRUCTION}"

    def gold(self, example: Example) -> str:
        """Return the working, which rows of files may lack, and the line that the prompt demands."""
        return f"{example.get('working') or ''}\nThe answer is {example['answer']}.".strip()

    def final_answer(self, text: str, example: Example) -> str | None:
        number = None if len(text) > MAX_RESPONSE else final_number(text)
        return None if number is None else str(Fraction(number))

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
    text = _NEGATED.sub(" ", _SEPARATOR.sub("", text.lower().replace("−", "-")))
    boxed = last_boxed(text)
    starts = [mark.end() for mark in _MARK.finditer(text)]
    box = [] if boxed is None else [boxed[0] - len(boxed[1])]
    if first := min(starts + box, default=0):
        starts = sorted({*starts, *box, *(mark.end() for mark in _CORRECTION.finditer(text, first))})
    for start, end in reversed([*pairwise([*starts, len(text)])]):
        number = _stated(boxed[1] if boxed and start in box else text[start:end])
        if number is not None:
            return number
    return next(reversed([Decimal(number) for number in _NUMBER.findall(text)]), None)


def _stated(text: str) -> Decimal | None:
    """Return the number that the first sentence of a text gives, or None.

    It is the first number, or, if an operator follows that, the one after the last `=`, or the last number.
    """
    sentence = _SPACE.sub("", _SENTENCE_END.split(text.strip(), 1)[0])
    first = _NUMBER.search(sentence)
    if first is None or not _OPERATOR.match(sentence, first.end()):
        return first and Decimal(first[0])
    _, equals, result = sentence.rpartition("=")
    found = _NUMBER.findall(result)
    return Decimal((found if equals else found[::-1])[0]) if found else None


def _crates(draw: Draw, one: str, two: str) -> Problem:
    crates, each, fewer = draw.number(12, 38), draw.number(13, 29), draw.number(25, 140)
    fruit = draw.one(("apples", "pears", "plums", "lemons"))
    story = f"{one} packs {crates} crates with {each} {fruit} each. {two} packs {fewer} {fruit} fewer than {one}. "
    story += f"How many {fruit} do {one} and {two} pack together?"
    first, both = crates * each, 2 * crates * each - fewer
    working = f"{one} packs {crates} * {each} = {first} {fruit}, and {two} {first} - {fewer} = {first - fewer}. "
    return story, working + f"Together they pack {first} + {first - fewer} = {both}.", both


def _wages(draw: Draw, one: str, two: str) -> Problem:
    wage, hours, days = draw.number(12, 29), draw.number(4, 9), draw.number(3, 6)
    total = wage * hours * days
    spent = draw.number(20, total - 30)
    story = f"{one} earns {wage} dollars an hour and works {hours} hours a day for {days} days. "
    story += f"{one} then gives {spent} dollars to {two}. How many dollars of the wages does {one} keep?"
    working = f"The wages are {wage} * {hours} * {days} = {total} dollars. "
    return story, working + f"{one} keeps {total} - {spent} = {total - spent}.", total - spent


def _theatre(draw: Draw, one: str, two: str) -> Problem:
    rows, seats, parts = draw.number(11, 29), 12 * draw.number(1, 3), draw.one((3, 4, 6))
    price = draw.number(4, 15)
    name = {3: "third", 4: "quarter", 6: "sixth"}[parts]
    story = f"A theatre has {rows} rows of {seats} seats. A {name} of the seats stay empty. "
    story += f"{one} and {two} sold every ticket for {price} dollars. How many dollars did the taken seats bring?"
    every, empty = rows * seats, rows * seats // parts
    working = f"There are {rows} * {seats} = {every} seats, and {every} / {parts} = {empty} stay empty. "
    working += f"{every} - {empty} = {every - empty} are taken, for {every - empty} * {price} = "
    answer = (every - empty) * price
    return story, f"{working}{answer} dollars.", answer


def _bus(draw: Draw, one: str, two: str) -> Problem:
    start, off, more = draw.number(25, 60), draw.number(5, 20), draw.number(2, 3)
    left = draw.number(4, start - off)
    times = {2: "twice", 3: "three times"}[more]
    story = f"{start} people are on a bus. At the stop of {one}, {off} people get off, and {times} as many get on. "
    story += f"At the stop of {two}, {left} people get off and nobody gets on. How many people are on the bus now?"
    on, answer = more * off, start - off + more * off - left
    working = f"At the first stop {more} * {off} = {on} people get on. "
    return story, working + f"In the end there are {start} - {off} + {on} - {left} = {answer} people.", answer


def _book(draw: Draw, one: str, two: str) -> Problem:
    first, days, rest = draw.number(14, 48), draw.number(5, 13), draw.number(4, 12)
    daily = draw.number(11, 45)
    read, left = first * days, daily * rest
    story = f"{one} borrows a book of {read + left} pages from {two}. {one} reads {first} pages a day for {days} days, "
    story += f"and the book is due {rest} days after the last of these. "
    story += f"How many pages a day does {one} have to read from then on to finish in time?"
    working = f"{one} reads {first} * {days} = {read} pages, and {read + left} - {read} = {left} are left. "
    return story, working + f"That is {left} / {rest} = {daily} pages a day.", daily


def _flour(draw: Draw, one: str, two: str) -> Problem:
    loaves, each, wanted = draw.number(3, 8), draw.number(13, 27) * 10, draw.number(11, 29)
    there = draw.number(20, each * wanted // 10 - 10) * 10
    story = f"By the recipe of {one}, {loaves} loaves take {loaves * each} grams of flour. "
    story += f"{two} orders {wanted} loaves from {one}. {one} has {there} grams of flour. "
    story += f"How many more grams of flour does {one} need for the order?"
    working = f"A loaf takes {loaves * each} / {loaves} = {each} grams, and the order {each} * {wanted} = "
    working += f"{each * wanted} grams. {one} needs {each * wanted} - {there} = {each * wanted - there} more."
    return story, working, each * wanted - there


def _ages(draw: Draw, one: str, two: str) -> Problem:
    cat, times, older, years = draw.number(3, 9), draw.number(3, 7), draw.number(5, 30), draw.number(4, 25)
    story = f"The cat of {one} is {cat} years old. {two} is {times} times as old as the cat. "
    story += f"{one} is {older} years older than {two}. How old will {one} be in {years} years?"
    second, first = cat * times, cat * times + older
    working = f"{two} is {cat} * {times} = {second} years old, and {one} {second} + {older} = {first}. "
    return story, working + f"In {years} years {one} will be {first} + {years} = {first + years}.", first + years


def _fence(draw: Draw, one: str, two: str) -> Problem:
    length, width, price, off = draw.number(17, 58), draw.number(11, 39), draw.number(6, 19), draw.number(15, 120)
    story = f"The garden of {one} is {length} metres long and {width} metres wide. "
    story += f"A fence costs {price} dollars a metre, and {two} takes {off} dollars off the price of the whole fence. "
    story += f"How many dollars does {one} pay for a fence all around?"
    around = 2 * (length + width)
    working = f"The fence is 2 * ({length} + {width}) = {around} metres long and costs {around} * {price} = "
    working += f"{around * price} dollars. {one} pays {around * price} - {off} = {around * price - off}."
    return story, working, around * price - off


def _tank(draw: Draw, one: str, two: str) -> Problem:
    rate, minutes, leak = draw.number(14, 45), draw.number(12, 40), draw.number(3, 9)
    after = draw.number(10, min(60, rate * minutes // leak - 1))
    story = f"{one} fills an empty tank with {rate} litres a minute for {minutes} minutes. "
    story += f"Then the tank loses {leak} litres a minute for {after} minutes until {two} stops the leak. "
    story += "How many litres are left in the tank?"
    into, out = rate * minutes, leak * after
    working = f"{rate} * {minutes} = {into} litres are filled in, and {leak} * {after} = {out} are lost. "
    return story, working + f"{into} - {out} = {into - out} are left.", into - out


def _trip(draw: Draw, one: str, two: str) -> Problem:
    fast, hours, slow, more = draw.number(55, 110), draw.number(3, 8), draw.number(12, 28), draw.number(2, 7)
    rest = draw.number(20, 300)
    ride, cycled = fast * hours, slow * more
    story = f"{one} travels {ride + cycled + rest} km to {two}. "
    story += f"The train of {one} goes {fast} km an hour for {hours} hours. "
    story += f"After the train ride {one} cycles {slow} km an hour for {more} hours. How many km are left?"
    working = f"The train goes {fast} * {hours} = {ride} km, and {one} cycles {slow} * {more} = {cycled} km. "
    return story, working + f"{ride + cycled + rest} - {ride} - {cycled} = {rest} km are left.", rest


def _printers(draw: Draw, one: str, two: str) -> Problem:
    box, printers, speed, minutes = draw.one((50, 80, 120)), draw.number(2, 5), draw.number(5, 30), draw.number(6, 40)
    story = f"{one} has {printers} printers that print {speed} pages a minute each. "
    story += f"The printers run for {minutes} minutes. {two} packs the pages in boxes of {box}. "
    story += "How many boxes are needed for all pages?"
    pages = printers * speed * minutes
    full, rest = divmod(pages, box)
    working = f"The printers print {printers} * {speed} * {minutes} = {pages} pages. "
    working += f"{full} boxes hold {full} * {box} = {full * box} pages, so {pages} - {full * box} = {rest} are left. "
    boxes = full + (rest > 0)
    return story, working + f"That makes {boxes} boxes.", boxes


def _shop(draw: Draw, one: str, two: str) -> Problem:
    count, cost, gain = draw.number(24, 75), draw.number(4, 18), draw.number(3, 12)
    broken = draw.number(3, (count * gain - 1) // (cost + gain))  # so that there is a profit
    price, whole = cost + gain, count - broken
    story = f"{one} buys {count} mugs from {two} for {cost} dollars each. {broken} of the mugs break. "
    story += f"{one} sells the other mugs for {price} dollars each. "
    story += f"How many dollars does {one} have more than before?"
    profit = whole * price - count * cost
    working = f"{count} - {broken} = {whole} mugs are sold for {whole} * {price} = {whole * price} dollars. "
    working += f"{one} paid {count} * {cost} = {count * cost} dollars. "
    return story, working + f"{whole * price} - {count * cost} = {profit} more.", profit


TEMPLATES: tuple[Callable[[Draw, str, str], Problem], ...] = (
    _crates, _wages, _theatre, _bus, _book, _flour, _ages, _fence,
)  # fmt: skip
UNSEEN: tuple[Callable[[Draw, str, str], Problem], ...] = (_tank, _trip, _printers, _shop)
"""Templates of test rows alone."""
