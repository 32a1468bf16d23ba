# SPDX-License-Identifier: Apache-2.0
"""Answers as models write them: what is right counts in lenient grading, nothing in strict, nothing wrong in either."""

import itertools
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoalign.config import TaskConfig, from_dict
from evoalign.rewards.arithmetic import MAX_WRITTEN, ExpressionError, evaluate_written
from evoalign.rundir.identity import config_hash, identity
from evoalign.tasks import create
from evoalign.tasks.countdown import answer_reward

NUMBERS = {"A": 8, "B": 6, "C": 3, "D": 4}
WRITTEN = {
    "times": ("(A - B) × C × D", 24), "middle dots": ("(A-B)·C⋅D", 24), "minus": ("(A − B)*C*D", 24),
    "divided": ("A ÷ D + B - C", 5), "result": ("(A-B)*C*D = R", 24), "result, signs": ("(A − B) × C × D = R", 24),
    "negative result": ("(B-A)*C*D = −24", -24), "final dot": ("(A-B)*C*D.", 24),
    "result and dot": ("(A-B)*C*D = R.", 24), "tab before": ("\t(A-B)*C*D", 24),
    "tabs inside": ("(A\t-\tB)\t*\tC*D", 24), "no-break spaces": ("(A\u00a0-\u00a0B) *\u202fC * D", 24),
    "newlines around": ("\n(A-B)*C*D\n", 24), "two newlines": ("(A-B)*C*D\n\n", 24), "bold": ("**(A-B)*C*D**", 24),
    "italics": ("*(A-B)*C*D*", 24), "underscores": ("_(A-B)*C*D_", 24),
    "bold italics, result": ("***(A-B)*C*D = R***", 24), "bold, italic result": ("**(A-B)*C*D** = *R*.", 24),
    "italics and result": ("*(A-B)*C* D* = *R*", 24), "backticks": ("`(A-B)*C*D`", 24), "dollars": ("$(A-B)*C*D$", 24),
    "two dollars, result": ("$$(A-B) \\cdot C \\cdot D = R$$", 24),
    "dollars, plain result": ("$(A-B)*C*D$ = $R$", 24), "LaTeX": ("\\( (A-B) \\times C\\times D \\)", 24),
    "LaTeX display": ("\\[ (A-B) \\times C \\times D = R. \\]", 24),
    "left and right": ("\\left( A - B \\right) \\times C \\times D", 24), "boxed": ("\\boxed{(A-B)*C*D}", 24),
    "boxed in dollars": ("$\\boxed{\\left(A-B\\right) \\times C \\times D = R}$.", 24),
    "div": ("A \\div D + B - C", 5), "fraction": ("\\frac{A}{D} + B - C", 5),
    "fraction of sums": ("\\dfrac{A + D}{B - C}", 4),
    "fraction in a fraction": ("$\\frac{A}{\\frac{D}{B - C}}$", 6),
    "spaces of LaTeX": ("\\tfrac{A}{D}\\, +\\; B\\ -\\! C", 5),
}  # fmt: skip
REFUSED = (
    "(A-B)(C)(D)", "(A-B)CD", "[A-B]*C*D", "(A-B)xCxD", "-(B-A)*C*D", "(A-B)*C*D;", "(A-B)*C*D # ok", "(A-B)*C*0D",
    "A-B=2, 2*C=6, 6*D=24", "A-B=2=2*C*D", "(A.0-B)*C*D", "<b>(A-B)*C*D</b>", "((A-B)*C*D", "{A-B}*C*D",
    "R = (A-B)*C*D",    "(A-B)*C*D = 24 = 24", "(A-B)*C*D == 24", "(A-B)*C*D =", "= 24", "(A-B)*C*D = 48/2",
    "(A-B)*C*D = x", "(A-B)*C**D",
    "(A-B)××C*D", "(A-B)*C·*D", "(A-B)÷÷C*D", "\\frac{A}D+B-C", "\\frac{A}{D", "\\frac{A}", "\\frac A D+B-C",
    "\\frac{}{D}",    "C\\frac{A}{D}", "\\sqrt{A}", "\\boxed{(A-B)*C*D", "(A-B)*C*D}", "\\timesA", "\\text{(A-B)*C*D}",
    "(A-B)*C*D \\quadA",    "１２*2", "٢٤", "(A-B)*C*D\x00", "(A-B)*C*D\ud800", "(A−−B)*C*D", "(A-B)*C*D = ２４",
    "(A-B)*C*D = 2_4", "$(A-B)*C*D",
)  # fmt: skip
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "grader.py"))
BOMBS = [
    *(bomb for name, bomb in BENCHMARK["BOMBS"].items() if name != "Unicode minus"),  # which lenient grading reads
    *(BENCHMARK["answer"](bomb) for bomb in (
        "\\frac{" * 100_000, "\\frac{" * 300 + "1" + "}{1}" * 300, "\\frac{1}{" * 49 + "0" + "}" * 49, "}" * 1000,
        "$" * 1999, "*" * 1999, "* " * 999, "_" * 1999, "." * 1999, "`" * 10_000_000, "\\boxed{" * 280, "=" * 1999,
        "83" + "=83" * 600, "\\times" * 330, "9" * 499 + "=" + "9" * 499, "1/9" + "=" + "0." + "1" * 1900,
        "×" * 1999, "9×" * 900 + "9", "\\left(" * 300, "95 - (87 - 75) = 83.00001", "95 - 87 = 83",
        "83 = 95 - (87 - 75)",        "\\frac{9}{0}", "95 - (87 - 75) = 1e400", "95 - (87 - 75) = nan",
        "−" * 1999 + "1", "9" * 40 + "**" + "9" * 40,
    )),
]  # fmt: skip


def written(form, numbers, result):
    return "".join(str(numbers.get(c, result if c == "R" else c)) for c in form)


def reward(text, target, *, lenient):
    return answer_reward(f"</think>\n<answer>{text}</answer>", list(NUMBERS.values()), str(target), lenient=lenient)


@pytest.mark.parametrize("name", WRITTEN)
def test_lenient_grading_accepts_other_notation(name):
    form, target = WRITTEN[name]
    right = written(form, NUMBERS, target)
    assert (reward(right, target, lenient=False), reward(right, target, lenient=True)) == (0.0, 1.0)


@pytest.mark.parametrize("name", WRITTEN)
def test_lenient_grading_rejects_wrong_answers(name):
    """Another number, one twice, one left for another's place, another target, another result after the equals sign."""
    form, target = WRITTEN[name]
    wrong = [written(form, NUMBERS | change, target) for change in (
        {"C": 5}, {"D": 3}, {"A": 4, "D": 4}, {"A": 6, "B": 8}, {"A": 80}, {"C": 0},
    )]  # fmt: skip
    if "R" in form:
        wrong += [written(form, NUMBERS, 25), written(form, NUMBERS, -24), written(form, NUMBERS, 240)]
    for text, lenient in itertools.product(wrong, (False, True)):
        assert reward(text, target, lenient=lenient) == 0.0, text
    assert reward(written(form, NUMBERS, target), target + 1, lenient=True) == 0.0


@pytest.mark.parametrize("form", REFUSED)
def test_ambiguous_notation_is_rejected(form):
    text = written(form, NUMBERS, 24)
    assert [reward(text, target, lenient=True) for target in (24, 5, 2)] == [0.0, 0.0, 0.0]


@given(st.text(alphabet="8634+-*/()= .$_`\\{}×÷−\t", max_size=40))
def test_accepted_expressions_use_their_own_numbers(text):
    """The multiset has the digits before the equals sign, so that no mark hides or creates a number."""
    try:
        found = evaluate_written(text)
    except ExpressionError:
        return
    before = "".join(c if c in "0123456789" else " " for c in text.partition("=")[0])
    assert sorted(map(int, before.split())) == list(found.numbers)


def operations(text):
    """Lines of Python that grading a text runs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    task, row = create(TaskConfig(name="countdown", grading="lenient")), BENCHMARK["ROW"]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert task.measures(text, row)["accuracy"] == 0.0
    finally:
        sys.settrace(before)
    return count


def test_bombs_earn_nothing_in_lenient_grading_and_take_a_bounded_number_of_steps():
    assert max(map(operations, BOMBS)) < 20 * MAX_WRITTEN


def test_grading_is_recorded_only_if_lenient():
    def config(**task):
        return from_dict({"task": {"name": "countdown", **task}, "es": {"sigma": 0.1}})

    plain, said, lenient = config(), config(grading="strict"), config(grading="lenient")
    assert "grading" not in identity(plain)["task"] and config_hash(plain) == config_hash(said) != config_hash(lenient)
    assert config_hash(lenient, "grpo") != config_hash(plain, "grpo")
