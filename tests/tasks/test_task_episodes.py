# SPDX-License-Identifier: Apache-2.0
"""Shipped tasks of several turns: scripted players, near misses, and what the user and the tool reply."""

import re

import pytest

from evoalign import transcripts
from evoalign.config import TaskConfig
from evoalign.errors import DataError
from evoalign.tasks import create
from evoalign.tasks.shopping import BILL, ITEMS
from evoalign.tasks.sums import Calculator


def task(name, **settings):
    return create(TaskConfig(name=name, **settings))


def played(task, example, player):
    """Return the text of the episode of a player: a function of the messages, which returns a text or a call."""
    text, prompt = "", task.prompt(example)
    while True:
        turn = player([*prompt, *transcripts.messages(text)] if text else prompt)
        message = {"role": "assistant", "content": turn}
        if isinstance(turn, dict):
            message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": turn}]}
        text = transcripts.join(text, message["content"]) if text else message["content"]
        whole = transcripts.answered(text, [message])
        (reply,) = task.replies([whole], [example])
        if reply is None:
            return text
        text = transcripts.answered(text, [message, *reply])


def rewards(task, rows, player):
    return task.rewards([played(task, row, player) for row in rows], rows)


@pytest.mark.parametrize("name", ["guess", "shopping"])
def test_the_scripted_player_earns_the_maximum_turn_by_turn(name):
    own = task(name)
    rows = own.load_data(0).train[:40]
    assert own.player == "turns"
    for row in rows:
        text = played(own, row, lambda messages, row=row: own.play(row, messages))
        assert text == own.gold(row)
        assert own.rewards([text], [row]) == [1.0]
        assert own.is_right(text, row)


# --- guess ---


def numbers_of(messages):
    return re.findall(r"\d+", messages[0]["content"])


def searching(messages):
    """Play by what the messages say alone."""
    low, middle, high = numbers_of(messages)
    return middle if len(messages) == 1 else high if messages[-1]["content"] == "Go up." else low


def test_a_player_that_reads_the_replies_of_guess_is_always_right_and_others_two_times_of_three():
    own = task("guess")
    rows = [row | {"number": n} for row in own.load_data(0).test[:20] for n in row["numbers"]]
    assert rewards(own, rows, searching) == [1.0] * 60
    for first, second in ((1, 2), (1, 0), (0, 2), (2, 1)):
        texts = [played(own, row, lambda m: numbers_of(m)[first if len(m) == 1 else second]) for row in rows]  # noqa: B023
        assert sum(own.columns(texts, rows)["right"]) == 40


@pytest.mark.parametrize(("turns", "columns"), [
    (["5"], (1, 1, 1)), (["It is 5."], (1, 1, 1)), (["7", "5"], (1 - 0.6309, 1, 1)),
    (["3 or 5"], (0, 0, 0)), (["five"], (0, 0, 0)), (["6", "5"], (1 - 0.6309, 0.5, 1)), (["9" * 30], (0, 0, 0)),
    (["7", "no idea"], (1 - 0.6309, 0.5, 0)), (["4", "5", "5"], (1 - 0.6309, 0.5, 1)),
])  # fmt: skip
def test_guess_grades_how_far_the_first_guess_narrows_the_list(turns, columns):
    row = {"numbers": [3, 5, 7], "number": 5}
    text = turns[0]
    for turn in turns[1:]:
        text = transcripts.join(transcripts.answered(text, [{"role": "assistant", "content": text}]), turn)
    found = task("guess").columns([text], [row])
    assert [found[name][0] for name in ("narrowed", "listed", "right")] == pytest.approx(columns, abs=1e-3)


@pytest.mark.parametrize("row", [{"numbers": [1, 2], "number": 1}, {"numbers": [3, 2, 1], "number": 1},
                                 {"numbers": [1, 2, 3], "number": 4}, {"numbers": "123", "number": 1}])  # fmt: skip
def test_guess_refuses_other_rows(row):
    with pytest.raises(DataError, match="row 1"):
        task("guess").check("row 1", row)


# --- shopping ---


def test_the_rows_of_shopping_agree_with_their_texts():
    for row in task("shopping").load_data(0).train:
        prices = {name: int(price) for name, price in re.findall(r"([a-z]+) (\d+)", row["prices"])}
        assert {*row["first"], *row["second"]} <= prices.keys() <= {*ITEMS}
        assert row["total"] == sum(prices[name] * count for name, count in row["second"].items())
        budget = int(re.findall(r"(\d+) dollars", row["order"] + row["change"])[-1])
        assert row["left"] == budget - row["total"] >= 0
        ordered = re.findall(r"(\d+) ([a-z]+)(?:,| and|\.)", row["order"].partition(" I have")[0])
        assert {name: int(count) for count, name in ordered} == row["first"]
        assert row["first"] != row["second"] and min(row["second"].values()) > 0


ORDER = {"prices": "pens 2, cups 3 and pies 5", "order": "I would like 2 pens and 3 cups. I have 40 dollars.",
         "change": "Add 2 pies.", "first": {"pens": 2, "cups": 3}, "second": {"pens": 2, "cups": 3, "pies": 2},
         "total": 23, "left": 17}  # fmt: skip
FIRST, SECOND, LAST = "pens: 2\ncups: 3", "pens: 2\ncups: 3\npies: 2", "pens: 2\ncups: 3\npies: 2\ntotal: 23\nleft: 17"


@pytest.mark.parametrize(("turns", "columns"), [
    ([FIRST, SECOND, LAST], (1, 1, 1, 1)),
    ([FIRST, SECOND, "- **Pens**: 2\n* Cups: 3\n• pies: 2\n\nTotal: $23\n**left**: 17 dollars"], (1, 1, 1, 1)),
    ([FIRST, FIRST, LAST], (8 / 9, 1, 1, 1)), ([FIRST, SECOND, SECOND], (1, 0, 0, 0)),
    ([FIRST, SECOND, LAST + "\nsoaps: 1"], (11 / 12, 1, 1, 0)), ([FIRST, SECOND, LAST + "\nsoaps: 0"], (1, 1, 1, 1)),
    ([FIRST, SECOND, LAST + "\npens: 3"], (8 / 9, 1, 1, 0)), ([FIRST, SECOND, LAST + "\ntotal: 24"], (1, 0, 1, 0)),
    ([FIRST, SECOND, LAST.replace("17", "171")], (1, 1, 0, 0)),
    (["", "", LAST], (1 / 3, 1, 1, 1)), ([LAST], (2 / 9, 0, 0, 0)),
])  # fmt: skip
def test_shopping_grades_the_list_of_each_turn_and_the_bill_of_the_last(turns, columns):
    own, left = task("shopping"), list(turns)
    text = played(own, ORDER, lambda messages: left.pop(0)) if len(turns) == 3 else turns[0]
    found = own.columns([text], [ORDER])
    assert [found[name][0] for name in own.names] == pytest.approx(columns)


def test_the_user_of_shopping_changes_the_order_and_then_asks_for_the_bill():
    own = task("shopping")
    messages = transcripts.messages(played(own, ORDER, lambda messages: "no"))
    assert [m["content"] for m in messages if m["role"] == "user"] == ["Add 2 pies.", BILL]


# --- sums ---


def calling(expression):
    return {"name": "calculate", "arguments": {"expression": expression}}


def test_the_player_of_sums_that_calls_the_calculator_is_right_and_the_result_alone_is_no_answer():
    own = task("sums")
    for row in own.load_data(0).train[:40]:

        def player(messages, row=row):
            done = messages[-1]["role"] == "tool"
            return f"The answer is {messages[-1]['content']}." if done else calling(row["expression"])

        text = played(own, row, player)
        assert (own.rewards([text], [row]), own.is_right(text, row)) == ([1.0], True)
        assert own.measures(text, row) == {"calls": 1.0, "refused": 0.0}
        cut = text.rpartition(transcripts.SEPARATOR)[0]  # the turns ran out after the call
        assert (own.rewards([cut], [row]), own.is_right(cut, row)) == ([0.0], False)


@pytest.mark.parametrize(("expression", "value"), [
    ("4831 * 7290", "35217990"), ("(1 + 2) × 3", "9"), ("1 / 8", "0.125"), ("2 / 3", "0.6666666667"),
    ("1234 - 5678", "-4444"),
])  # fmt: skip
def test_the_calculator_returns_the_value(expression, value):
    assert Calculator().calculate(expression) == value


@pytest.mark.parametrize("expression", [
    "", "2 ** 9", "9**9**9", "__import__('os')", "abs(1)", "x", "1 / 0", "1 if 1 else 2", "9" * 60 + " * 2", "(" * 400,
    "1_000", "0x10", "1 2",
])  # fmt: skip
def test_the_calculator_refuses_what_is_not_arithmetic(expression):
    own = task("sums")
    (row,) = own.rows("test", 1)
    with pytest.raises(ValueError, match=r"cannot be calculated|more than"):
        Calculator().calculate(expression)
    left = [calling(expression), f"The answer is {row['answer']}"]
    text = played(own, row, lambda messages: left.pop(0))
    assert own.measures(text, row) == {"calls": 1.0, "refused": 1.0}
    assert own.rewards([text], [row]) == [1.0]


def test_sums_takes_rows_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "What is 2 + 2?", "answer": 4}\n' * 5, encoding="utf-8")
    own = task("sums", train_data=str(path))
    data = own.load_data(0)
    own.self_check([*data.train, *data.test])
    assert own.prompt(data.train[0])[0]["content"].startswith("What is 2 + 2?")
    path.write_text('{"question": "What is 2 + 2?", "answer": "four"}\n' * 5, encoding="utf-8")
    with pytest.raises(DataError, match="row"):
        own.load_data(0)
