# SPDX-License-Identifier: Apache-2.0
"""Whether an answer is the right one, as mathematics: by `math-verify`, inside bounds that no clock has a say in.

What a model writes may take a computer algebra system hours, or all memory: `9^{9^{9^9}}`. So an answer is compared
only where it is short, holds commands that are known to be harmless, and no number in it grows beyond `MOST_BITS`; and
the comparison ends after `MOST_CALLS` calls of functions. An answer beyond these bounds is wrong, as one is that cannot
be read: on every machine alike. The limits of math-verify itself are seconds, and stay off. What hangs all the same is
killed with the process that scores, which is an error and never a score.
"""

from __future__ import annotations

import gc
import logging
import math
import re
import sys
from fractions import Fraction
from functools import cache, lru_cache
from importlib.util import find_spec
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

from evoalign.errors import ConfigError
from evoalign.tasks.mathematics.memory import Memory
from evoalign.version import install

MOST_CHARACTERS = 300
"""Of an answer; the longest of MATH has about 150."""
MOST_BITS = 20_000
"""Of all numbers in an answer together, and of what they come to: some 6,000 digits."""
MOST_CALLS = 3_000_000
"""Calls of functions and returns from them, while an answer is read and compared; usual ones take under a million.

What has been read before would be read with fewer, as the parser learns: `_learn` has it learn what is usual, and
`Memory` nothing else."""
MOST_CHOSEN_FROM = 10_000
"""In an answer with a binomial coefficient, which is computed as it is read: no number is larger."""
MOST_POWERS = 10_000_000
"""The largest exponents of an answer, multiplied: in the worst case they stand on each other."""
_COMMANDS = """
frac dfrac tfrac cfrac sqrt pi cdot times div pm mp left right big Big bigl bigr Bigl Bigr text textbf textit
textrm mathrm mathbf mathbb mbox infty cup cap emptyset varnothing in notin setminus le leq leqslant ge geq
geqslant ne neq lt gt approx circ degree angle log ln exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh
tanh binom dbinom tbinom begin end quad qquad alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau
phi varphi omega overline bar vec hat ldots dots cdots to mid lvert rvert vert prime lfloor rfloor lceil rceil
displaystyle space
"""
COMMANDS = frozenset(_COMMANDS.split())
"""LaTeX that an answer may hold. Sums, products, integrals and limits are none: they are still to be computed."""

_FIRST = (
    "\\frac{1}{2}x^2+3xy-\\sqrt[3]{5}", "-\\sqrt{2}\\cdot(x+1)^{2n}", "(-\\infty,-2]\\cup[3,5)",
    "\\{1,-2,\\frac{3}{4}\\}", "\\begin{pmatrix}1&-2\\\\0&x\\end{pmatrix}", "2\\sin^2(x)\\cos x+\\ln x",
    "\\frac{x^2-1}{x+1}+e^{i\\pi/3}", "y=-x+4", "\\text{Evelyn}", "72", "\\frac{2400}{2}", "50\\%", "90^\\circ",
    "(3,\\frac{\\pi}{2})", "5!", "\\log_2 8", "\\binom{10}{3}", "3,2,1", "2<x", "1-i", "a_1+b_2", "(x+1)^3(x-2)",
    "\\frac{-3\\pm\\sqrt{5}}{2}", "[1,2]", "\\tan(x)", "x\\in[1,2)", "120.5", "\\frac{\\sqrt{3}}{2}",
)  # fmt: skip
"""Read before anything is counted: what is usual, since nothing that is read later is learnt."""
_BASE = re.compile(r"[\d)}]\s*_")
"""Of a number in another base than ten."""
_BAR = re.compile(r"\||vert")
_FACTORIAL = re.compile(r"(?:(?<!\d)\d{1,3}|[A-Za-z])!(?!!)")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(r"([-+]?)\s*((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)")
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORD = re.compile(rf"(?<![A-Za-z\\])({'|'.join(_ZEROS)})s?(?![A-Za-z])\s*", re.IGNORECASE)
_SCALED = re.compile(
    r"(?<![\d./^_])((?:\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
    r"((?:[\s~$]|\\[ ,;:!]|\\(?:text|textrm|textbf|textit|mathrm|mbox)\s*\{)*)"
    rf"((?:{_WORD.pattern})+)",
    re.IGNORECASE,
)
"""A number, what may stand between, and words that make it larger."""
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
"""But between two digits, which are two numbers then."""
_INDEX = re.compile(r"_\{(\w+)\}")
_SAME = (("\\left", ""), ("\\right", ""), ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\$", ""), ("$", ""))
"""Ways to write the same."""
_ALGEBRA = frozenset(("antlr4", "latex2sympy2_extended", "math_verify", "mpmath", "sympy"))
"""The packages that read and compare."""


class _TooMuchWork(BaseException):
    """Not an Exception: the libraries go on after those."""


def require(task: str) -> None:
    """Raise ConfigError where math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise ConfigError(f"task {task} compares answers by math-verify: {install('math')}")


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""What stands in the last `\boxed{..}` of a text, and where that ends; None where there is none or it is cut."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    found = boxes[-1]
    depth = 1
    for end in range(found.end(), min(len(text), found.end() + MOST_CHARACTERS + 1)):
        if text[end - 1] == "\\":
            continue
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return end, text[found.end() : end]
    return None


def written_out(text: str) -> str:
    """The text with `2.5 million` as 2500000, since a number of millions is none of units: what is read drops words."""
    return _SCALED.sub(lambda found: _shifted(found[1], found[3]) + found[2], text)


def _shifted(digits: str, words: str) -> str:
    zeros = sum(_ZEROS[word.lower()] for word in _WORD.findall(words))
    whole, _, part = re.sub("[,{}]", "", digits).partition(".")
    part = part.ljust(zeros, "0")
    return f"{whole}{part[:zeros]}" + (f".{part[zeros:]}" if part[zeros:] else "")


def number(text: str) -> Fraction | None:
    """A plain decimal number, such as `-1,234.50`, with or without a dollar sign; None for all else."""
    found = _NUMBER.fullmatch(_tidy(text).removesuffix("."))
    return None if found is None else Fraction(found[1] + found[2].replace(",", ""))


@lru_cache(maxsize=4096)
def is_equal(answer: str, gold: str) -> bool:
    """Whether an answer is what gold says: word for word, as a number, or by math-verify."""
    if _tidy(answer) == _tidy(gold):
        return True
    if len(answer) > MOST_CHARACTERS or len(gold) > MOST_CHARACTERS:
        return False
    answer, gold = written_out(answer), written_out(gold)
    if [*map(str.lower, _WORD.findall(answer))] != [*map(str.lower, _WORD.findall(gold))]:
        return False  # what is read drops the others
    ours, theirs = number(answer), number(gold)
    if ours is not None and theirs is not None:
        return ours == theirs
    return _is_readable(answer) and _is_readable(gold) and _is_verified(answer, gold)


def _tidy(text: str) -> str:
    for written, meant in _SAME:
        text = text.replace(written, meant)
    return _INDEX.sub(r"_\1", _SPACE.sub("", text.strip()))


def _is_readable(text: str) -> bool:
    """Whether it holds no more than `COMMANDS`, and nothing is computed as it is read that could take long.

    Ends of intervals, determinants, binomials and roots are, and what stands at a place (`|_{x=..}`).
    """
    if not COMMANDS.issuperset(_COMMAND.findall(text)) or (_BAR.search(text) and "_" in text):
        return False
    if _BASE.search(text):  # math-verify drops it, and 11 in base 2 would be 11 in base 3
        return False
    if "binom" in text and ("^" in text or "!" in text or _largest_in(text) > MOST_CHOSEN_FROM):
        return False
    return len(_FACTORIAL.findall(text)) == text.replace("\\!", "").count("!") and _has_small_powers(text)


def _has_small_powers(text: str) -> bool:
    """Whether no tower of powers stands there, but for one like `e^{x^2}`, and all powers together stay small."""
    product = 1
    for found in re.finditer(r"\^", text):
        exponent = _exponent(text, found.end())
        towers = exponent.count("^") + exponent.count("!")
        digits = sum(map(str.isdigit, exponent))
        if towers > 1 or digits > (2 if towers else 5) or (towers and _largest_in(text) > 3):
            return False
        product *= max(2, _largest_in(exponent))
    return product <= MOST_POWERS


def _exponent(text: str, start: int) -> str:
    """What stands in the exponent that begins there: a group, a number, a letter; after a command, all that follows."""
    rest = text[start:].lstrip()
    if rest[:1] not in ("{", "("):
        found = re.match(r"\\circ|\d+|[^\\]", rest)
        return rest if found is None else found[0]
    depth = 0
    for end, letter in enumerate(rest):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(letter, 0)
        if not depth:
            return rest[:end]
    return rest


def _largest_in(text: str) -> int:
    return max(map(int, re.findall(r"\d+", text)), default=0)


@cache
def _learn() -> Memory:
    """Have the libraries do what they do once in a process: import, and learn their grammar as they read.

    That takes up to MOST_CALLS, so that the first answer of a process would be wrong which is right later on.
    """
    from math_verify import verify

    read = [_parsed(text) for text in _FIRST]
    verify(read[0], read[1], timeout_seconds=None)
    return Memory()


def _is_verified(answer: str, gold: str) -> bool:
    from math_verify import verify

    _learn().restore()  # or what is counted would depend on the answers before this one
    equal = False
    with _Work() as work:
        ours, theirs = _parsed(answer), _parsed(gold)
        if ours and theirs and all(_bits(part) <= MOST_BITS for part in (*ours, *theirs)):
            equal = verify(theirs, ours, timeout_seconds=None)
    return equal and not work.is_spent


def _parsed(text: str) -> list[Any]:
    """What math-verify reads: expressions that are not evaluated yet. It takes no more than LaTeX: with plain
    expressions, sympy would run what the model wrote."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit, which is meant
    text = text.replace("\\$", "").replace("$", "")
    return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], "no_fallback", parsing_timeout=0)


class _Work:
    """A context in which no more than MOST_CALLS functions are called; what is more ends it.

    Python's collector of cycles rests: it finalises what others left, at a moment that depends on the process, and that
    would be counted."""

    def __init__(self) -> None:
        self._calls = 0
        self._collects = gc.isenabled()

    @property
    def is_spent(self) -> bool:
        """Also where a library caught what is raised then."""
        return self._calls > MOST_CALLS

    def __enter__(self) -> _Work:
        gc.disable()
        self._before = sys.getprofile()
        sys.setprofile(self._count)
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> bool:
        sys.setprofile(self._before)
        if self._collects:
            gc.enable()
        return kind is _TooMuchWork

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self._calls += 1
        # Raised as a function of theirs begins, and nowhere else: logging, which they use, would keep its lock. What
        # is raised in a generator that is thrown away is lost, and with it this function: the work would never end.
        is_plain = event == "call" and not frame.f_code.co_flags & CO_GENERATOR
        if self._calls > MOST_CALLS and is_plain and _package(frame) in _ALGEBRA:
            raise _TooMuchWork


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _bits(expression: Any) -> float:
    """An upper bound of the bits of all numbers that an expression is made of or comes to; infinite where too many."""
    import sympy

    if isinstance(expression, sympy.MatrixBase):
        return sum(map(_bits, expression.flat()))
    if isinstance(expression, sympy.Rational):
        return int(expression.p).bit_length() + int(expression.q - 1).bit_length()
    if isinstance(expression, sympy.Float):
        return 64 + abs(math.frexp(float(expression))[1]) if math.isfinite(float(expression)) else math.inf
    parts = [_bits(part) for part in expression.args]
    if isinstance(expression, sympy.Pow | sympy.MatPow):
        return (parts[0] + 1) * _largest(expression.args[1], parts[1])
    if isinstance(expression, sympy.exp):
        return 2 * _largest(expression.args[0], parts[0])
    if isinstance(expression, sympy.factorial | sympy.factorial2):
        return (parts[0] + 1) * _largest(expression.args[0], parts[0])
    return sum(parts) + 2


def _largest(expression: Any, bits: float) -> float:
    """An upper bound of the absolute value of an expression of so many bits, at least 1."""
    if bits >= 64:
        return math.inf
    return max(1.0, abs(float(expression)) if expression.is_Rational else 2.0**bits)
