# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from evoalign.analysis.base import Finding
from evoalign.report.tables import Sample, before_after, questions, shorten, tell, visible, weighed

BEFORE = {"reward": -131.25, "accuracy": 0.125, "empty_share": 0.0, "truncated_share": 0.25, "only_before": 1.0}
AFTER = {"reward": -5.25, "accuracy": 0.25, "empty_share": 0.0125, "truncated_share": 0.0}


def shown(*samples: Sample, width: int = 100, terminal: bool = False, before: Any = BEFORE, after: Any = AFTER,
          **columns: Any) -> str:  # fmt: skip
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=terminal or None)
    before_after(before, after, console, samples, **columns)
    return output.getvalue()


def cells(text: str, row: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if row in line]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_measures_with_their_change_and_its_interval() -> None:
    intervals = {"reward": (126.0, 90.5, 150.25), "accuracy": (0.125, -0.01, 0.2),
                 "truncated_share": (-0.25, -0.25, -0.25)}  # fmt: skip
    text, without = shown(intervals=intervals), shown()
    for row in (
        ["reward", "-131.2", "-5.25", "+126", "+90.5 to +150.2"],
        ["accuracy", "12.5%", "25.0%", "+12.5 points", "-1.0 to +20.0"],
        ["empty", "0.0%", "1.2%", "+1.2 points", ""],
        ["truncated", "25.0%", "0.0%", "-25.0 points", "-"],  # an interval without width is none
    ):
        assert cells(text, row[0]) == row and cells(without, row[0]) == row[:-1]
    assert "only" not in without and "sample" not in without


def test_a_name_stays_whole_where_80_columns_are_enough() -> None:
    """The width without a terminal. The numbers wrap instead, and no column is cut off."""

    def drawn(name: str) -> str:
        measures = {"reward": -0.08024, name: -0.6007}
        intervals = dict.fromkeys(measures, (0.5259, 0.4948, 0.557))
        return shown(width=80, before=measures, after=measures, intervals=intervals, placebo=measures)

    text = drawn("reward/brief_ones")
    found = cells(text, "reward/brief ones")
    assert found == ["reward/brief ones", "-0.6007", "-0.6007", "+0", "+0.4948 to", "-0.6007"]
    assert all(line.endswith(("┓", "┃", "┩", "│", "┘")) for line in text.splitlines()[1:])
    long = drawn("reward/which_is_far_longer_than_any_column")
    assert "column" in long and long.splitlines()[-1].endswith("┘")


ONE = [{"role": "user", "content": "Capital of France?"}]
TWO = [{"role": "system", "content": "Be brief."}, *ONE]


@pytest.mark.parametrize(
    ("samples", "row"),
    [
        ([Sample("3 + 5", None, "a", "b"), Sample("3 + 4", "7", "c", "d")], ["3 + 5", "-", "a", "b"]),
        ([Sample("3 + 5", None, "a", "b")], ["3 + 5", "a", "b"]),
        ([Sample("3 + 5", "8", "The answer is 8.", "8")], ["3 + 5", "8", "The answer is 8.", "8"]),
        ([Sample("3 + 5", "8", "The answer is 8.", "")], ["3 + 5", "8", "The answer is 8.", "(empty)"]),
        ([Sample(ONE, "Paris", "a", "b")], ["Capital of France?", "Paris", "a", "b"]),
        ([Sample(TWO, "Paris", "a", "b")], [r"system: Be brief.\nuser: Capital of France?", "Paris", "a", "b"]),
    ],
)
def test_samples_side_by_side(samples: list[Sample], row: list[str]) -> None:
    text = shown(*samples, width=300)
    assert cells(text, row[0]) == row and ("target" in text) == (len(row) == 4)


@pytest.mark.parametrize("markup", ["[red]x[/red]", "[/]", "[link=x]y[/link]", "a [ b", ":smile:", "[bold"])
def test_model_output_is_never_markup(markup: str) -> None:
    text = shown(Sample(markup, markup, markup, markup), width=200, terminal=True)
    assert text.count(markup) == 4


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\r\x00\x9b", r"\r\x00\x9b"),
        ("left\u202eright\u2066", r"left\u202eright\u2066"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("line\u2028paragraph\u2029", r"line\u2028paragraph\u2029"),
        ("half \ud83d of a pair", r"half \ud83d of a pair"),
        ("é 漢 😀", "é 漢 😀"),
    ],
)
def test_control_characters_are_made_visible(raw: str, safe: str) -> None:
    assert visible(raw) == safe
    assert safe in shown(Sample("p", "t", raw, "x"), width=200)


def test_a_line_break_in_a_sentence_forges_no_line() -> None:
    told = io.StringIO()
    console = Console(file=told, width=80)
    Finding({}, ["run\nLIKELY FINE"]).show(console)
    tell(console, "a\nb", "c")
    assert told.getvalue() == "run\\nLIKELY FINE\na\\nb\nc\n"


@pytest.mark.parametrize("width", [20, 200])
def test_an_ascii_terminal_gets_ascii(width: int) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    before_after(BEFORE, AFTER, Console(file=output, width=width), [Sample("p", "t", "é 漢", "x" * 5000)])
    output.flush()
    text = output.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert width == 20 or r"\xe9 \u6f22" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_long_completions_are_cut_to_a_few_lines(width: int) -> None:
    text = shown(Sample("p " * 5000, "t" * 5000, "b " * 5000, "漢" * 5000), width=width)
    assert "..." in text
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize(
    ("prompts", "length", "expected"),
    [
        (["Be brief.\nWhat is 2 + 2?", "Be brief.\nName a city."], 40, None),
        (["Be brief.\nWhat is 2 + 2?", "Be brief.\nName a city."], 20, ["...What is 2 + 2?", "...Name a city."]),
        (["Add, and say 12 + 34", "Add, and say 56 + 78"], 12, ["...12 + 34", "...56 + 78"]),
        (["Be brief.\nWhat is 2 + 2?"] * 2, 16, ["...hat is 2 + 2?"] * 2),
        (["Be brief.\nWhat is 2 + 2?"], 16, ["...hat is 2 + 2?"]),
        (["What is 2 + 2?", "Be brief, and name a city."], 10, ["What is...", "Be brie..."]),
        ([], 10, []),
    ],
)
def test_questions_leave_out_what_all_prompts_begin_with(prompts, length, expected) -> None:
    assert questions(prompts, length) == (prompts if expected is None else expected)


def test_shorten() -> None:
    assert [shorten(text, 6) for text in ("abcdef", "abcdefg")] == ["abcdef", "abc..."]


def test_a_reward_that_is_taken_off_is_said_in_words() -> None:
    names = [weighed("cost", weight) for weight in (1.0, -1.0, -0.5, 2.0)]
    assert names == ["cost", "cost (lower is better)", "cost (x -0.5)", "cost (x 2)"]
