# SPDX-License-Identifier: Apache-2.0
"""Shopping: a dialogue of three turns, in which the second changes the order and the third asks for the bill.

    reward = 0.4 list + 0.2 total + 0.2 left + 0.2 exact

The user gives a price list, an order and a budget, then changes the order (and in some rows the budget), then asks for
the final list, the total and the money left. `list` is the mean over the three turns of the share of items that are
listed with the right number: right ones, divided by those ordered or listed. `total` and `left` are 1 if these numbers
of the last turn are right, and `exact` is 1 if the whole last turn is. A line such as `pens: 3` counts, with or without
a bullet point. An item with two different numbers is wrong.

    evoalign train configs/shopping.yaml
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from evoalign import transcripts
from evoalign.errors import DataError
from evoalign.rewards.objective import WeightedSum
from evoalign.tasks.base import Split
from evoalign.tasks.generated import Dialogue, Draw, spoken, texts_of
from evoalign.types import Example, Messages

ITEMS = (
    "apples", "pears", "lemons", "onions", "carrots", "eggs", "rolls", "pies", "candles", "soaps", "pens", "cups",
    "plates", "spoons", "towels", "brushes",
)  # fmt: skip
ORDERS = ("first", "second")
"""Columns with the order before and after the change: items and their numbers."""
PROMPT = """You take orders in a shop. Answer each message with the whole order so far and nothing else: one line for \
each item, such as "pens: 3". When I ask for the bill, add two lines: "total: DOLLARS" and "left: DOLLARS".

Prices in dollars for one: {prices}.

{order}"""
BILL = "That is all. Give me the bill: the final list, the total, and how many of my dollars are left."
_LINE = re.compile(r"\s*(?:[-*•]\s+)?\**([a-z]+)\**\s*:\s*\**\s*\$?([0-9]{1,9})(?![0-9])")


class Shopping(Dialogue):
    """Rows of {prices, order, change, first, second, total, left}: two texts, and what they amount to."""

    name = "shopping"
    names = ("list", "total", "left", "exact")
    weighted = WeightedSum({"list": 0.4, "total": 0.2, "left": 0.2, "exact": 0.2})

    @classmethod
    def draw(cls, draw: Draw, split: Split) -> Example:
        items = draw.some(ITEMS, draw.number(5, 6))
        prices = {item: draw.number(2, 9) for item in items}
        first = {item: draw.number(2, 9) for item in items[: draw.number(2, 4)]}
        change, second = _change(draw, first, items[len(first)])
        total = max(_total(prices, order) for order in (first, second))
        budget, less = total + draw.number(5, 40), draw.number(1, 4)
        order = f"I would like {_listed(first)}. I have {budget} dollars."
        if draw.chance(30):
            budget -= less
            change += f" And I have {budget} dollars, not {budget + less}."
        bill = _total(prices, second)
        columns = {"prices": _listed(prices, "{} {}"), "order": order, "change": change}
        return {**columns, "first": first, "second": second, "total": bill, "left": budget - bill}

    @classmethod
    def key(cls, example: Example) -> str:
        return f"{example['prices']} {example['order']}"

    def text(self, example: Example) -> str:
        return PROMPT.format(prices=example["prices"], order=example["order"])

    def reply(self, example: Example, transcript: Messages) -> str | None:
        """Return the change after the first turn, and the question for the bill after the second."""
        return {1: example["change"], 2: BILL}.get(len(spoken(transcript)))

    def play(self, example: Example, transcript: Messages) -> str:
        done = len(spoken(transcript))
        lines = dict(example["second"] if done else example["first"])
        bill = {"total": example["total"], "left": example["left"]} if done == 2 else {}
        return "\n".join(f"{name}: {number}" for name, number in {**lines, **bill}.items())

    def grade(self, text: str, example: Example) -> dict[str, float]:
        read = [_read(turn) for turn in transcripts.turns(text)[:3]]
        bills = [{name: lines.pop(name, None) for name in ("total", "left")} for lines in read]
        orders = [example["first"], example["second"], example["second"]]
        shares = [_share(lines, order) for lines, order in zip(read, orders, strict=False)]
        bill = bills[2] if len(bills) == 3 else {}
        of_bill = {name: float(bill.get(name) == example[name]) for name in ("total", "left")}
        exact = float(len(shares) == 3 and shares[2] == 1.0 and all(of_bill.values()))
        return {"list": sum(shares) / 3, **of_bill, "exact": exact}

    def check(self, where: str, row: dict[str, Any]) -> Example:
        texts_of(where, row, "prices", "order", "change")
        for name in ORDERS:
            order: Any = row.get(name)
            if not isinstance(order, dict) or not all(type(number) is int for number in order.values()) or not order:
                raise DataError(f"{where}: {name} is {order!r}; expected items and their numbers, such as {{pens: 3}}")
        for name in ("total", "left"):
            if type(row.get(name)) is not int:
                raise DataError(f"{where}: {name} is {row.get(name)!r}; expected a whole number of dollars")
        return row


def _change(draw: Draw, first: Mapping[str, int], other: str) -> tuple[str, dict[str, int]]:
    """Return a change of the order in words, and the order after it."""
    item, more = draw.one([*first]), draw.number(1, 4)
    kind = draw.number(0, 4)
    if kind == 0:
        return f"I need {more} more {item}.", {**first, item: first[item] + more}
    if kind == 1:
        fewer = draw.number(1, first[item] - 1)
        return f"Take off {fewer} of the {item}.", {**first, item: first[item] - fewer}
    if kind == 2:
        return f"Leave out the {item}.", {name: number for name, number in first.items() if name != item}
    if kind == 3:
        return f"Add {more} {other}.", {**first, other: more}
    swapped = {other if name == item else name: number for name, number in first.items()}
    return f"Give me {other} instead of the {item}, the same number.", swapped


def _total(prices: Mapping[str, int], order: Mapping[str, int]) -> int:
    return sum(prices[name] * number for name, number in order.items())


def _listed(numbers: Mapping[str, int], form: str = "{1} {0}") -> str:
    *most, last = [form.format(name, number) for name, number in numbers.items()]
    return f"{', '.join(most)} and {last}"


def _read(turn: str) -> dict[str, int | None]:
    """Return the numbers of a turn's lines by name; None for a name with two different numbers."""
    found: dict[str, int | None] = {}
    for line in turn.lower().splitlines():
        if match := _LINE.match(line):
            number = int(match[2])
            found[match[1]] = number if found.get(match[1], number) == number else None
    return found


def _share(lines: Mapping[str, int | None], order: Mapping[str, int]) -> float:
    """Return the share of right numbers among the items that are ordered or listed. `pens: 0` lists nothing."""
    listed = {name: number for name, number in lines.items() if number != 0}
    return sum(listed.get(name) == number for name, number in order.items()) / len({*order, *listed})
