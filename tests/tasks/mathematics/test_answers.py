# SPDX-License-Identifier: Apache-2.0
"""Equality of answers, and the bounds of a comparison."""

import builtins
import gc
import itertools
import logging
import re
import subprocess
import sys
import threading
import time
from fractions import Fraction
from types import CellType, FunctionType

import pytest

from evoalign.tasks import answers

SAME = [
    ("72", "72"), ("72.00", "72"), ("1,200", "1200"), ("\\$1{,}200", "1200"), ("\\frac{2400}{2}", "1200"), ("x=5", "5"),
    ("\\dfrac{1}{2}", "\\frac12"), ("0.5", "\\frac{1}{2}"), ("50\\%", "0.5"), ("\\text{Evelyn}", "Evelyn"),
    ("(x+1)^2", "x^2+2x+1"), ("\\sqrt{3}+2", "2 + \\sqrt{3}"), ("(3,\\pi/2)", "(3, \\frac{\\pi}{2})"),
    ("(3,\\infty)\\cup(-\\infty,2)", "(-\\infty,2)\\cup(3,\\infty)"), ("3,2,1", "1,2,3"), ("2<x", "x>2"),
    ("1-i", "1 - i"), ("e^{x^2}+1", "1+e^{x^2}"), ("(x^2+1)^{10}", "(1+x^2)^{10}"),
    ("\\frac{1}{\\sqrt{x+1}+\\sqrt{x}}", "\\sqrt{x+1}-\\sqrt{x}"), ("90^\\circ", "90"), ("2^{2004}", "4^{1002}"),
    ("\\begin{pmatrix} 1 \\\\ \\frac{4}{2} \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("\\binom{10}{3}", "120"), ("5!", "120"), ("\\sum_{k=1}^{n} k^k", "\\sum_{k=1}^{n}k^k"),
    ("1101_{2}", "1101_2"), ("\\log_{2} 8", "3"),
]  # fmt: skip
OTHER = [
    ("73", "72"), ("72.01", "72"), ("-72", "72"), ("1,200", "1,300"), ("\\frac{1}{3}", "0.5"), ("7 2", "72"),
    ("Evelyn", "\\text{Bob}"),
    ("x^2+2x+2", "(x+1)^2"), ("(1,3)", "(1,2)"), ("[1,2]", "(1,2)"), ("1,2", "1,2,3"), ("", "72"), ("}{", "72"),
    ("\\frac{", "72"), ("72 or 73", "72"), ("11_3", "11_2"), ("1101", "1101_2"),
    ("(11)_3", "11"), ("\\sum_{k=1}^{3} k", "6"),
]  # fmt: skip
WORDS = [
    ("6 million", "6000000"), ("6\\text{ million}", "6,000,000"), ("\\$6\\,\\text{million dollars}", "6000000"),
    ("$6$ million", "6000000"), ("\\text{6 million}", "6000000"), ("2.5 Hundred Thousand", "250{,}000"),
    ("1,200.5 thousand", "1200500"), ("-.0025 billions", "-2500000"), ("6\\mathrm{trillion}", "6\\cdot 10^{12}"),
    ("6000000", "6\\text{ million}"), ("3.25 hundred", "325"),
]  # fmt: skip
"""The same number with a word and without."""
BOMBS = {
    "a tower": "9^{9^{9^9}}", "a large power": "10^{10^{10}}", "a negative power": "(\\frac{1}{7})^{-10^{12}}",
    "a factorial": "99999999!", "factorials of factorials": "9!!!!!", "in a floor": "\\lfloor 9^{9^9} \\rfloor",
    "in logarithms": "\\log(\\log(\\log(9^{9^9})))", "a binomial": "\\binom{1000000000}{500000000}",
    "a sum": "\\sum_{k=1}^{100000000} k^k", "a product": "\\prod_{k=1}^{100000000} k", "a matrix' power":
    "\\begin{pmatrix}1&1\\\\1&0\\end{pmatrix}^{100000000}", "an expansion": "(x+y+z)^{40}(x-y)^{30}",
    "a divisor": "\\gcd(9^{9^9},3)", "a chain of powers": "x^" * 20 + "2", "exponentials": "e^{e^{e^{e^{99}}}}",
    "nested fractions": "\\frac{1}{x+" * 20 + "2" + "}" * 20, "nested brackets": "(" * 60 + "1" + ")" * 60,
    "nested braces": "{" * 60 + "1" + "}" * 60, "nested roots": "\\sqrt{x+" * 30 + "2" + "}" * 30,
    "a long text": "1+" * 500_000 + "1", "many digits": "9" * 5_000, "roots of powers": "\\sqrt[99999]{2^{99999999}}",
    "at a place": "x^{x}|_{x=9^{9^9}}",
    "trigonometry": "(\\sin^{60}(x)+\\cos^{60}(x)+3x)^{9}\\tan^{37}(x)", "minus": "-" * 250 + "1",
}  # fmt: skip

READ_AT_ONCE = (
    "\\begin{vmatrix}%s&1\\\\1&%s\\end{vmatrix}", "(%s,1)", "[1,%s]", "\\sqrt[%s]{2}", "(-\\infty,%s)\\cup(1,2)",
    "\\binom{x}{%s}", "x \\in [1,%s]", "\\begin{pmatrix}%s\\\\1\\end{pmatrix}", "\\{%s,1\\}", "\\log_{%s} 2", "%s,2,3",
)  # fmt: skip
"""Where a number is computed as it is read."""
TOWERS = (
    "9^{9^{9^9}}",
    "9^{9^99}",
    "9^{9999999}",
    "(9^{9999})^{9999}",
    "9^(9^9)",
    "9^\\frac{9^9}{1}",
    "(99!)!",
    "9999!",
)


@pytest.mark.parametrize(
    ("answer", "gold", "equal"), [*((*p, True) for p in SAME + WORDS), *((*p, False) for p in OTHER)]
)
def test_is_equal_accepts_other_notation_and_rejects_other_answers(answer, gold, equal):
    assert answers.is_equal(answer, gold) == equal


@pytest.mark.parametrize("word", ["hundred", "thousand", "million", "billion", "trillion"])
@pytest.mark.parametrize("answer", [
    "6 %s", "6\\text{ %s}", "6\\ \\text{%ss}", "6 \\mathrm{%s}", "6 \\text{ %s dollars}", "\\frac{12}{2}\\text{ %s}",
    "6\\text{-%s}", "6\\text{ and a half %s}", "{6} \\mbox{%s}", "12/2\\text{ %s}",
])  # fmt: skip
def test_million_differs_from_units(answer, word):
    """Also without a parse as a number: math-verify ignores words."""
    assert not answers.is_equal(answer % word, "6") and not answers.is_equal("6", answer % word)


def test_expression_bombs_are_wrong_and_harmless(monkeypatch):
    """With a tenth of the work that is allowed, since each would take all of it."""
    answers.is_equal("x+x", "2x")  # what is learnt at the first use is learnt
    assert not answers.is_equal("9^{9^{9^9}}", "x^2+1")
    monkeypatch.setattr(answers, "MOST_CALLS", answers.MOST_CALLS // 10)
    all_wrong_within(2, BOMBS.values(), "2")


def test_parsing_evaluates_nothing_large():
    all_wrong_within(2, (place.replace("%s", tower) for place in READ_AT_ONCE for tower in TOWERS), "2")


@pytest.mark.long
def test_expression_bombs_take_a_fraction_of_the_timeout():
    all_wrong_within(6, BOMBS.values(), "2", "x^2+1", "(1,2)")


def all_wrong_within(seconds, texts, *golds):
    for answer, gold in itertools.product(texts, golds):
        start = time.process_time()
        assert not answers.is_equal(answer, gold), answer[:40]
        assert time.process_time() - start < seconds, answer[:40]


def test_comparison_is_bounded_by_calls_not_by_time(monkeypatch):
    answers.is_equal("x+x", "2x")  # what is learnt at the first use is learnt
    monkeypatch.setattr(answers, "MOST_CALLS", 1_000)
    before = sys.getprofile()
    assert not answers.is_equal("(x+2)^2", "x^2+4x+4") and sys.getprofile() is before
    monkeypatch.undo()
    answers.is_equal.cache_clear()
    assert answers.is_equal("(x+2)^2", "x^2+4x+4")


@pytest.mark.parametrize(("text", "found"), [
    ("so \\boxed{72}.", "72"), ("\\boxed{\\frac{1}{2}} and \\fbox{ 3 }", " 3 "), ("\\boxed{1} \\boxed{2", None),
    ("\\boxed {a\\}b}", "a\\}b"), ("nothing", None), ("\\boxed{" + "1" * 301 + "}", None), ("\\boxed{}", ""),
])  # fmt: skip
def test_last_boxed_returns_the_last_complete_box(text, found):
    box = answers.last_boxed(text)
    assert (None if box is None else box[1]) == found


def test_number_parses_plain_decimals():
    texts = ["-1,234.50", "$ .5", "007", "1,23", "1e5", "1/2", "12,345.", "--1"]
    assert [answers.number(text) for text in texts] == [
        Fraction(-12345, 10), Fraction(1, 2), Fraction(7), None, None, None, Fraction(12345), None,
    ]  # fmt: skip


def test_model_output_is_never_evaluated(monkeypatch):
    """Sympy makes a number of its digits that way, and would make of a plain expression whatever it says."""
    reached = []
    evaluate = builtins.eval
    monkeypatch.setattr(builtins, "eval", lambda *given: (reached.append(str(given[0])), evaluate(*given))[1])
    assert answers.is_equal("2(x+1.50)", "2x+3")
    assert not answers.is_equal("__import__('os').getcwd()", "2") and not answers.is_equal("3+4*(5)", "2")
    assert not answers.is_equal("\\variable{__import__('os')}", "2") and not answers.is_equal("\\text{exit()}", "2")
    assert reached and all(re.fullmatch(r"(Integer|Float) \(['\d. ]+\)", code) for code in reached), reached


def test_math_verify_is_imported_lazily():
    code = (
        "import sys; from evoalign import tasks; from evoalign.config import TaskConfig; "
        "task = tasks.create(TaskConfig(name='gsm8k')); row = {'question': 'q', 'answer': '#### 72'}; "
        "assert task.compute_reward('so \\\\boxed{72}', row) == 1.0; "
        "print('math_verify' in sys.modules)"
    )
    assert printed_by(code) == "False\n"


def printed_by(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def calls_of(answer, gold, monkeypatch):
    """How much of the bound a comparison takes."""
    made = []

    class Seen(answers._Work):
        def __init__(self):
            super().__init__()
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(answers, "_Work", Seen)
        answers._is_verified(answer, gold)
    return made[0].calls


def test_number_of_calls_does_not_depend_on_earlier_comparisons(monkeypatch):
    """To the call. What the libraries import at their first use is what the first round is for."""
    pairs = [("\\frac{x+7}{5}", "x"), ("\\lfloor x+\\frac{2}{3}\\rfloor", "x"), ("\\cot(x)+\\sec(y)", "1"),
             ("[4,7)", "(4,7)"), ("360360", "x"), ("\\overline{AB}", "x"),
             ("\\sqrt{7+4\\sqrt{3}}", "2+\\sqrt{3}")]  # fmt: skip
    for pair in pairs:
        calls_of(*pair, monkeypatch)
    back = [calls_of(*pair, monkeypatch) for pair in reversed(pairs)]
    twice = [[calls_of(*pair, monkeypatch) for _ in range(2)] for pair in pairs]
    assert twice == [[calls, calls] for calls in reversed(back)]
    assert min(back) > 1_000


def test_garbage_collection_is_not_counted(monkeypatch):
    """Libraries have it call them, as hypothesis does, and when it comes depends on all that a process has done."""
    pair, usual = ("\\frac{x+7}{5}", "x"), gc.get_threshold()
    calls_of(*pair, monkeypatch)
    alone = calls_of(*pair, monkeypatch)
    gc.callbacks.append(lambda phase, info: None)
    gc.set_threshold(50)
    try:
        assert calls_of(*pair, monkeypatch) == alone
        assert gc.isenabled()
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.pop()


def test_bound_holds_after_similar_answers(monkeypatch):
    pair = "\\csc(3x)+\\lvert y\\rvert", "\\lvert y\\rvert+\\csc(3x)"
    first = calls_of(*pair, monkeypatch)
    assert answers._is_verified(*pair)
    monkeypatch.setattr(answers, "MOST_CALLS", first * 9 // 10)
    assert not answers._is_verified(*pair)


def test_exceeding_the_bound_releases_locks(monkeypatch):
    """Wherever in the libraries' logging the bound is met: another thread could never log again."""
    free = []

    def ask():
        free.append(logging._lock.acquire(timeout=5))
        logging._lock.release()

    for most in range(60):
        monkeypatch.setattr(answers, "MOST_CALLS", most)
        with answers._Work():
            logging.getLogger("math_verify").setLevel(logging.ERROR)
            logging.getLogger(f"math_verify.{most}").debug("read")
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert free == [True]


@pytest.mark.slow
def test_first_comparison_of_a_process_is_within_the_bound():
    code = (
        "from evoalign.tasks.answers import is_equal; "
        "print(is_equal('(x+1)^3', 'x^3+3x^2+3x+1'), is_equal('(x+1)^3', 'x^3+3x^2+3x+2'))"
    )
    assert printed_by(code) == "True False\n"


def test_exceeding_the_bound_survives_a_discarded_generator(monkeypatch):
    """Like antlr: `next` of a generator without references."""

    def rows():
        yield 1

    def turn():
        next(rows())

    place = {"__name__": "sympy.made"}
    rows = FunctionType(rows.__code__, place)
    turn = FunctionType(turn.__code__, place, closure=(CellType(rows),))
    ended = []
    for most in range(20):
        monkeypatch.setattr(answers, "MOST_CALLS", most)
        with answers._Work():
            for _ in range(50):
                turn()
            ended.append(most)
    assert not ended
