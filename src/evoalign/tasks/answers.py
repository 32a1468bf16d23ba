# SPDX-License-Identifier: Apache-2.0
"""Compare answers as mathematics with `math-verify`, within bounds that do not depend on time.

Model output such as `9^{9^{9^9}}` can keep a computer algebra system busy for hours or exhaust memory. So an answer is
compared only if it is short, has only harmless commands, and no number in it exceeds `MOST_BITS`; the comparison stops
after `MOST_CALLS` function calls. An answer beyond these bounds, or one that cannot be parsed, is wrong, on every
machine alike. The time limits of math-verify are disabled. If a comparison hangs anyway, the grading process is killed:
that is an error, never a score.
"""

from __future__ import annotations

import gc
import logging
import math
import re
import sys
from fractions import Fraction
from functools import cache, lru_cache
from inspect import CO_GENERATOR
from itertools import product
from types import FrameType
from typing import Any

from evoalign.tasks import notation

MOST_CHARACTERS = 300
"""Maximum length of an answer; the longest in MATH has about 150."""
MOST_BITS = 20_000
"""Maximum bits of all numbers in an answer and of its value, about 6,000 digits."""
MOST_CALLS = 3_000_000
"""Maximum function calls and returns for one comparison; usual ones take less than a million.

The parser caches, so that it needs fewer calls for text that it has parsed before. `_learn` fills its caches with usual
answers, and `Memory` restores that state before each comparison."""
MOST_CHOSEN_FROM = 10_000
"""Maximum number in an answer with a binomial coefficient, which is evaluated during parsing."""
MOST_POWERS = 10_000_000
"""Maximum product of the exponents in an answer: in the worst case they form a tower."""
_COMMANDS = """
frac dfrac tfrac cfrac sqrt pi cdot times div pm mp left right big Big bigl bigr Bigl Bigr text textbf textit
textrm mathrm mathbf mathbb mbox infty cup cap emptyset varnothing in notin setminus le leq leqslant ge geq
geqslant ne neq lt gt approx circ degree angle log ln exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh
tanh binom dbinom tbinom begin end quad qquad alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau
phi varphi omega overline bar vec hat ldots dots cdots to mid lvert rvert vert prime lfloor rfloor lceil rceil
displaystyle space
"""
COMMANDS = frozenset(_COMMANDS.split())
"""LaTeX commands allowed in an answer. Sums, products, integrals and limits are not: they need evaluation."""

_FIRST = re.split(
    r"\s{3,}",
    r"""\frac{1}{2}x^2+3xy-\sqrt[3]{5}   -\sqrt{2}\cdot(x+1)^{2n}   (-\infty,-2]\cup[3,5)   \{1,-2,\frac{3}{4}\}
    \begin{pmatrix}1&-2\\0&x\end{pmatrix}   2\sin^2(x)\cos x+\ln x   \frac{x^2-1}{x+1}+e^{i\pi/3}   y=-x+4
    \text{Evelyn}   72   \frac{2400}{2}   50\%   90^\circ   (3,\frac{\pi}{2})   5!   \log_2 8   \binom{10}{3}
    3,2,1   2<x   1-i   a_1+b_2   (x+1)^3(x-2)   \frac{-3\pm\sqrt{5}}{2}   [1,2]   \tan(x)   x\in[1,2)   120.5
    \frac{\sqrt{3}}{2}""",
)
"""Usual answers, parsed once per process to fill the caches of the parser."""
_BASE = re.compile(r"[\d)}]\s*_")
"""Number in a base other than ten."""
_BAR = re.compile(r"\||vert")
_FACTORIAL = re.compile(r"(?:(?<!\d)\d{1,3}|[A-Za-z])!(?!!)")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(r"([-+]?)\s*((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)")
_ROUNDED = re.compile(r"(-?\d*\.(\d+))(?:\\(?:cdot|times)10\^\{?(-?\d{1,3})\}?)?")
"""A decimal, perhaps with a power of ten: it is taken as rounded from three significant digits on."""
MOST_DECIMALS = 60
"""Most decimal places of a fraction that a decimal can write exactly."""
SIGNIFICANT = 40
"""Digits of a number that is computed to be rounded; one with fewer is a decimal."""
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORD = re.compile(rf"(?<![A-Za-z\\])({'|'.join(_ZEROS)})s?(?![A-Za-z])\s*", re.IGNORECASE)
_SCALED = re.compile(
    r"(?<![\d./^_])((?:\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
    r"((?:[\s~$]|\\[ ,;:!]|\\(?:text|textrm|textbf|textit|mathrm|mbox)\s*\{)*)"
    rf"((?:{_WORD.pattern})+)",
    re.IGNORECASE,
)
"""A number, separators, and words such as million."""
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
"""White space, except between two digits, where it separates two numbers."""
_INDEX = re.compile(r"_\{(\w+)\}")
_SAME = (
    ("\\left", ""), ("\\right", ""), ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\$", ""), ("$", ""),
    ("\\varnothing", "\\emptyset"),
)  # fmt: skip
"""Equivalent notations."""
_ALGEBRA = frozenset(("antlr4", "latex2sympy2_extended", "math_verify", "mpmath", "sympy"))
"""Packages that parse and compare."""


class _TooMuchWork(BaseException):
    """More than MOST_CALLS calls. Not an Exception, since the libraries catch those."""


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Return the end and the content of the last complete `\boxed{..}` of a text, or None."""
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
    """Replace `2.5 million` by 2500000: the parser ignores words."""

    def shifted(found: re.Match[str]) -> str:
        zeros = sum(_ZEROS[word.lower()] for word in _WORD.findall(found[3]))
        whole, _, part = re.sub("[,{}]", "", found[1]).partition(".")
        part = part.ljust(zeros, "0")
        return f"{whole}{part[:zeros]}" + (f".{part[zeros:]}" if part[zeros:] else "") + found[2]

    return _SCALED.sub(shifted, text)


def number(text: str) -> Fraction | None:
    """Parse a plain decimal number such as `-1,234.50`, also with a dollar sign; else return None."""
    found = _NUMBER.fullmatch(_tidy(text).removesuffix("."))
    return None if found is None else Fraction(found[1] + found[2].replace(",", ""))


def canonical(answer: str) -> str:
    """Return the same text for answers that are equal as text or as decimal numbers; other equal answers may differ."""
    answer = written_out(notation.plain(answer))
    found = number(answer)
    return _tidy(answer) if found is None else str(found)


@lru_cache(maxsize=4096)
def is_equal(answer: str, gold: str) -> bool:
    """Return whether an answer equals the gold answer: as text, as a number, or by math-verify."""
    if _tidy(answer) == _tidy(gold):
        return True
    if len(answer) > MOST_CHARACTERS or len(gold) > MOST_CHARACTERS:
        return False
    answer, gold = written_out(notation.plain(answer)), written_out(notation.plain(gold))
    if [*map(str.lower, _WORD.findall(answer))] != [*map(str.lower, _WORD.findall(gold))]:
        return False  # the parser ignores words
    (answer, unit), (gold, wanted) = notation.without_unit(answer), notation.without_unit(gold)
    if not notation.same_unit(unit, wanted) or notation.is_juxtaposed(answer) or notation.is_juxtaposed(gold):
        return False
    ours, theirs = number(answer), number(gold)
    if ours is not None and theirs is not None:
        return ours == theirs or _rounds_to(ours, gold)
    forms = notation.brackets(answer), notation.brackets(gold)
    if {*forms} == {"set", "pair"}:
        return False
    if {*forms} == {"list", "pair"}:  # a list without brackets has the order of the pair
        answer, gold = (
            f"({text})" if form == "list" and "," in text else text
            for text, form in zip((answer, gold), forms, strict=True)
        )
    return _tidy(answer) == _tidy(gold) or (_is_readable(answer) and _is_readable(gold) and _is_verified(answer, gold))


def _is_verified(answer: str, gold: str) -> bool:
    from math_verify import verify

    _learn().restore()  # so that the number of calls does not depend on earlier answers
    equal = False
    with _Work() as work:
        ours, theirs = _parsed(answer), _parsed(gold)
        bits = [_bits(part) for part in (*ours, *theirs)]
        if ours and theirs and max(bits) <= MOST_BITS and _repeats(answer, ours[0]) == _repeats(gold, theirs[0]):
            # math-verify takes differences of less than 10^-digits for 0: 1/2^60 would equal 1/2^61 with 15 digits
            digits = 60 + math.ceil(min(sum(bits), 10**5) * math.log10(2))
            equal = verify(theirs, ours, 6, digits, allow_set_relation_comp=True, timeout_seconds=None)
            equal = equal or _have_equal_values(ours[0], theirs[0]) or _rounds_to(ours[0], gold)
    return equal and work.calls <= MOST_CALLS  # also if a library caught _TooMuchWork


def _rounds_to(value: Any, gold: str) -> bool:
    """Return whether a number rounds to a gold answer that is a decimal of three or more significant digits.

    A number that a decimal can write has to be the gold answer itself (12.46 is not 12.5), unless that has a power of
    ten, as measured values do.
    """
    found = _ROUNDED.fullmatch(_tidy(gold))
    if found is None or len(re.sub(r"\D", "", found[1]).lstrip("0")) < 3 or not (found[3] or found[2].strip("0")):
        return False
    if getattr(value, "is_Rational", False):
        value = Fraction(int(value.p), int(value.q))
    if isinstance(value, Fraction):
        if found[3] is None and 10**MOST_DECIMALS % value.denominator == 0:
            return False
    elif (
        not getattr(value, "is_number", False)
        or not (value := value.evalf(SIGNIFICANT)).is_Float
        or (found[3] is None and len(str(value).rstrip("0")) < SIGNIFICANT)  # a decimal, such as 2 * 6.23
    ):
        return False
    power = Fraction(10) ** int(found[3] or 0)
    return abs(Fraction(str(value)) - Fraction(found[1]) * power) * 2 <= power / 10 ** len(found[2])


def _repeats(text: str, expression: Any) -> list[str]:
    """Return the elements of a list without brackets if some occur more than once, else an empty list."""
    parts = [str(part) for part in getattr(expression, "_unsorted_args", ())]
    return sorted(parts) if len({*parts}) < len(parts) and notation.brackets(text) == "list" else []


def _have_equal_values(one: Any, other: Any) -> bool:
    r"""Return whether two algebraic expressions agree at points of every sign: `\sqrt{1/n}` is `1/\sqrt{n}`.

    Points with a negative coordinate where either is not real are left out, as the parser takes variables for real.
    """
    import sympy

    allowed = (sympy.Add, sympy.Mul, sympy.Pow, sympy.Rational, sympy.Symbol, sympy.NumberSymbol)
    if not all(isinstance(part, allowed) for whole in (one, other) for part in sympy.preorder_traversal(whole)):
        return False
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    if not 0 < len(names) <= 3:
        return False
    for signs in product((1, -1), repeat=len(names)):
        at = {
            name: sign * sympy.Rational(7 + 6 * k, 5 + 2 * k)
            for k, (name, sign) in enumerate(zip(names, signs, strict=True))
        }
        values = [whole.evalf(60, subs=at) for whole in (one, other)]
        if -1 in signs and not all(value.is_real for value in values):
            continue
        if not all(value.is_number and value.is_finite for value in values):
            return False
        if abs(values[0] - values[1]) > sympy.Float(10, 60) ** -50 * (abs(values[0]) + abs(values[1])):
            return False
    return True


def _tidy(text: str) -> str:
    for written, meant in _SAME:
        text = text.replace(written, meant)
    return _INDEX.sub(r"_\1", _SPACE.sub("", text.strip()))


def _is_readable(text: str) -> bool:
    """Return whether the text has only `COMMANDS` and nothing whose evaluation during parsing could take long.

    The parser evaluates interval ends, determinants, binomials, roots and substitutions (`|_{x=..}`).
    """
    if not COMMANDS.issuperset(_COMMAND.findall(text)) or (_BAR.search(text) and "_" in text):
        return False
    if _BASE.search(text):  # math-verify ignores the base: 11 in base 2 would equal 11 in base 3
        return False
    if "binom" in text and ("^" in text or "!" in text or _largest_in(text) > MOST_CHOSEN_FROM):
        return False
    return len(_FACTORIAL.findall(text)) == text.replace("\\!", "").count("!") and _has_small_powers(text)


def _has_small_powers(text: str) -> bool:
    """Return whether there is no tower of powers, except one like `e^{x^2}`, and the product of exponents is small."""
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
    """Return the exponent that starts there: a group, a number, a letter, or all that follows a command."""
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


class Memory:
    """Snapshot of the caches of the parser and sympy.

    Without `restore`, the number of calls of a comparison would depend on earlier answers: ANTLR adds states to
    automata that all parsers of a process share, and sympy keeps results, factors and the state of a random generator.
    """

    def __init__(self) -> None:
        from latex2sympy2_extended.antlr_parser import PSLexer, PSParser

        kinds: list[Any] = [PSLexer, PSParser]
        dfas = [dfa for kind in kinds for dfa in kind.decisionsToDFA]
        self._automata: list[tuple[Any, Any, dict[Any, Any], list[tuple[Any, list[Any] | None]]]] = []
        for dfa in dfas:
            states = [state for state in (dfa.s0, *dfa._states.values()) if state is not None]
            edges = [(state, None if state.edges is None else list(state.edges)) for state in states]
            self._automata.append((dfa, dfa.s0, dict(dfa._states), edges))
        self._followed = [(state, state.nextTokenWithinRule) for kind in kinds for state in kind.atn.states if state]
        self._contexts = dict(kinds[1].sharedContextCache.cache)
        self._cache: dict[Any, Any] = kinds[1].sharedContextCache.cache

    def restore(self) -> None:
        """Restore the caches."""
        from math_verify import parser
        from sympy.core.cache import clear_cache
        from sympy.core.random import seed
        from sympy.ntheory.factor_ import factor_cache

        for dfa, start, states, edges in self._automata:
            dfa.s0 = start
            if len(dfa._states) > len(states):
                dfa._states = dict(states)
            for state, out in edges:
                state.edges = None if out is None else list(out)
        for state, tokens in self._followed:
            state.nextTokenWithinRule = tokens
        self._cache.clear()
        self._cache.update(self._contexts)
        parser.parse_latex_cached.cache_clear()
        clear_cache()
        factor_cache.cache_clear()
        seed(0)


@cache
def _learn() -> Memory:
    """Import the libraries and fill their caches, once per process.

    Otherwise the first comparison of a process would exceed MOST_CALLS.
    """
    from math_verify import verify

    read = [_parsed(text) for text in _FIRST]
    verify(read[0], read[1], timeout_seconds=None)
    return Memory()


def _parsed(text: str) -> list[Any]:
    """Parse LaTeX to unevaluated expressions. Plain expressions are off: sympy would execute model output."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # silences its warning about the missing time limit
    text = notation.exact(text.replace("\\$", "").replace("$", ""))
    form = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all")
    )
    return parse(f"\\boxed{{{text}}}", [form], "no_fallback", parsing_timeout=0)


class _Work:
    """Context that ends after MOST_CALLS function calls.

    It disables garbage collection, which would call finalisers at times that depend on the process."""

    def __init__(self) -> None:
        self.calls = 0
        self._collects = gc.isenabled()

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
        self.calls += 1
        if self.calls <= MOST_CALLS:
            return
        # Raise only when a function of these packages begins: logging would keep its lock, and an exception in a
        # discarded generator is lost together with this profile function.
        is_plain = event == "call" and not frame.f_code.co_flags & CO_GENERATOR
        if is_plain and frame.f_globals.get("__name__", "").partition(".")[0] in _ALGEBRA:
            raise _TooMuchWork


def _bits(expression: Any) -> float:
    """Return an upper bound of the bits of all numbers in an expression and of its value; may be infinite."""
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
    """Return an upper bound of the absolute value of an expression with this many bits, at least 1."""
    if bits >= 64:
        return math.inf
    return max(1.0, abs(float(expression)) if expression.is_Rational else 2.0**bits)
