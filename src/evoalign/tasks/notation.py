# SPDX-License-Identifier: Apache-2.0
r"""Rewrite answers to plain LaTeX before they are parsed: Unicode, markdown, thousands, exact decimals, units.

The parser of math-verify drops trailing letters as units (`2t` would be 2, and 10 cm would be 10 m), multiplies
numbers with a space between them (`10 000` would be 0) and rounds decimals. So these forms are handled here.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from itertools import accumulate
from math import gcd
from typing import NamedTuple

from evoalign.rewards.arithmetic import peeled

_UNITS = """
mm millimeter millimetre | cm centimeter centimetre | m meter metre | km kilometer kilometre | in inch inche
ft foot feet | yd yard | mi mile | g gram | kg kilogram | mg milligram | lb pound | oz ounce | L l liter litre
ml mL milliliter millilitre | s sec second | min minute | h hr hour | day | week | month | yr year | degree deg
rad radian | C celsius | F fahrenheit | dollar usd | cent ¢ | euro € | sterling £ | percent pct % | mi/h mph
km/hour kmh kph | acre | gallon gal | N newton | J joule | W watt | Hz hertz | Pa | K kelvin | V volt
"""
UNITS = {name: names.split()[0] for line in _UNITS.split("\n") for names in line.split("|") for name in names.split()}
"""Names of a unit (plural without s) to the first of them. Other words after a number are ignored."""
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3", "squared": "2", "cubed": "3"}
_WORDS = """
or and not if more less least most than to when for is about approximately between
sin cos tan cot csc log exp sqrt inf infinity alpha beta gamma theta lambda
"""
_NO_UNIT = frozenset(_WORDS.split())
"""Words that change what a number says: text with one of them is kept."""
_SIGNS = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "π": "\\pi ", "∞": "\\infty ",
    "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ",
    "°": "^\\circ ", "±": "\\pm ", "∓": "\\mp ", "\u2044": "/", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
}  # fmt: skip
_TABLE = str.maketrans(_SIGNS)
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_RAISED = re.compile("[⁰¹²³⁴-⁹⁻]+")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[A-Za-z]))")
_FRAC = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)")
_GAP = r"(?:\{?,\}?\\!|\{\\?,\}|\\[ ,;:]|~| )"
_THOUSANDS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_GAP}\d{{3}})+(?![\d]|\s*/)")
_ELEMENT_OF = re.compile(r"[A-Za-z]\s*\\in\s*(?=[(\[\\])")
_IMAGINARY = re.compile(r"([\d}])i(?![A-Za-z])")
"""The parser knows i only as a word."""
_COMMAS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_ZERO_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,0\d\d)+(?![\d,])")
_LISTED = re.compile(r"(?:\\\{|[(\[])[^()\[\]]*,")
_MIXED = re.compile(r"(-?\d+)\s+(\d+)\s*/\s*(\d+)")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})")
_SIDE_BY_SIDE = re.compile(r"(?<![_\d])\d+(?:\s|~|\\[ ,;:!])+[\d.]")
_LABEL = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*\([A-J]\)\s*\}(?:\s|~|\\[ ,;:])*(?=\S)")
_DECIMAL = re.compile(r"(\^|_|\\sqrt)?(\d*)\.(?=[\d\\])(\d*)(?:\\(?:overline|bar)\s*\{(\d+)\})?")
_TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mbox|rm)\s*\{([^{}]*)\}"
_WHOLE = re.compile(_TEXT)
_POWER = r"(?:\s*\^\s*\{?\s*(\d)\s*\}?)?"
_SPACES = r"(?:\s|~|\\[ ,;:!])*"
_LAST_TEXT = re.compile(rf"{_SPACES}(/)?{_SPACES}{_TEXT}{_POWER}\s*\.?$")
_LAST_WORDS = re.compile(rf"(?<=[\d}})%])\s*([A-Za-z][A-Za-z ./]*){_POWER}\s*$")
_NUMBER_AND_WORDS = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?)\s+([A-Za-z]{3,}(?:[ -][A-Za-z]+)*)\.?")
_CIRCLE = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*([CF]?)\s*$")
_PERCENT = re.compile(r"\s*\\?%$")


class Written(NamedTuple):
    """An answer in plain LaTeX and its unit, empty if none is known."""

    text: str
    unit: tuple[str, ...]


def plain(text: str) -> str:
    """Return the text in LaTeX: without markdown and choice labels, Unicode signs as commands, joined thousands."""
    text = _RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", peeled(text.strip()))
    text = _VULGAR.sub(_fraction_sign, text)
    text = _ROOT.sub(_radical, text.translate(_TABLE).strip())
    text = _FRAC.sub(r"\\frac{\1}{\2}", _LABEL.sub("", text, count=1) if _LABEL.match(text) else text)
    text = _IMAGINARY.sub(r"\1 i", _ELEMENT_OF.sub("", text, count=1) if _ELEMENT_OF.match(text) else text)
    text = _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    joined = _ZERO_GROUPS if _LISTED.search(text) else _COMMAS
    text = joined.sub(lambda found: found[0].replace(",", ""), text)
    if text.count(":") > 1:  # the parser would divide, so that 1:2:3 would equal 1:3:2
        parts = [part.strip() for part in text.rpartition("=")[2].split(":")]
        divisor = gcd(*map(int, parts)) if all(map(str.isdecimal, parts)) else 0
        return f"({','.join(str(int(part) // divisor) if divisor else part for part in parts)})"
    if found := _MIXED.fullmatch(text):
        return f"{found[1]}\\frac{{{found[2]}}}{{{found[3]}}}"
    if found := _SCIENTIFIC.fullmatch(text):
        return f"{found[1]}\\cdot 10^{{{int(found[2])}}}"
    return text


def _fraction_sign(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found[0]).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}"


def _radical(found: re.Match[str]) -> str:
    order = "[3]" if found[1] == "∛" else ""
    return f"\\sqrt{order}{{{found[2] or found[3] or found[4] or ''}}}"


def without_unit(text: str) -> Written:
    r"""Split the unit from an answer: currency signs, `\text{..}` at the end, and plain words that are units."""
    unit: list[str] = []
    if "\\$" in text or text.count("$") == 1:
        text, unit = text.replace("\\$", "").replace("$", ""), ["dollar"]
    for sign in "€£¢":
        if sign in text:
            text, unit = text.replace(sign, ""), [UNITS[sign]]
    if (whole := _WHOLE.fullmatch(text)) and re.search(r"[\d,]", whole[1]):
        text = whole[1].strip()
    for _ in range(4):
        rest, words = _split(text)
        if not rest.strip():
            break
        text, unit = rest, [*words, *unit]
    if "percent" in unit:
        text, unit = _PERCENT.sub("", text) + "\\%", [name for name in unit if name != "percent"]
    return Written(text.strip(), _folded(unit))


def _split(text: str) -> tuple[str, list[str]]:
    """Return the text before its last unit, and the unit's names and powers in order; an empty text without a unit."""
    if found := _CIRCLE.search(text):
        return text[: found.start()], ["degree", *_known([found[1]])]
    if found := _LAST_TEXT.search(text):
        words = _words(found[2])
        if _NO_UNIT.isdisjoint(words):
            return text[: found.start()], [*_known(["per"] * bool(found[1]) + words), *filter(None, [found[3]])]
    elif found := _NUMBER_AND_WORDS.fullmatch(text):
        words = _words(found[2])
        if _NO_UNIT.isdisjoint(words):
            return found[1], _known(words)
    elif found := _LAST_WORDS.search(text):
        words = _words(found[1])
        if all(len(word) > 1 and word != "in" for word in words) and len(_known(words)) == len(words):
            return text[: found.start()], [*_known(words), *filter(None, [found[2]])]
    return "", []


def _words(text: str) -> list[str]:
    return ["per" if word == "/" else _singular(word) for word in re.findall(r"[A-Za-z]+|/|%", text)]


def _singular(word: str) -> str:
    """Return the spelling in UNITS, or the word in lower case."""
    lower = word.lower()
    single = lower.removesuffix("s") if len(lower) > 2 else lower
    return next((name for name in (word, lower, single) if name in UNITS), lower)


def _known(words: list[str]) -> list[str]:
    """Return the units, powers and `per` among words."""
    named = UNITS | _POWERS | {"per": "per"}
    return [named[word] for word in words if word in named]


def _folded(words: list[str]) -> tuple[str, ...]:
    """Return units with their powers: `square cm` and `cm 2` are cm2, `miles per hour` is mi/h."""
    units: list[str] = []
    power, per = "", False
    for word in words:
        if word == "per":
            per = bool(units)
        elif word.isdigit() and units and not per:
            units[-1] += word
        elif word.isdigit():
            power = word
        elif per:
            units[-1], per, power = f"{units[-1]}/{word}{power}", False, ""
        else:
            units.append(word + power)
            power = ""
    return tuple(units)


def same_unit(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether two units agree; an omitted one does, and degrees agree with degrees Celsius."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def is_juxtaposed(text: str) -> bool:
    """Return whether two numbers have only space between them: the parser would multiply them."""
    return _SIDE_BY_SIDE.search(text) is not None


def exact(text: str) -> str:
    r"""Replace decimals by fractions, also repeating ones such as `0.\overline{3}`: 0.333 is not 1/3."""
    return _DECIMAL.sub(_fraction, text)


def _fraction(found: re.Match[str]) -> str:
    before, whole, fixed, repeating = found[1] or "", found[2] or "0", found[3], found[4]
    value = Fraction(int(whole + fixed), shift := 10 ** len(fixed))
    if repeating:
        value += Fraction(int(repeating), (10 ** len(repeating) - 1) * shift)
    if value.denominator == 1:
        return f"{before}{value.numerator}"
    fraction = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return f"{before}{{{fraction}}}" if before else fraction


def brackets(text: str) -> str:
    r"""Return "set" for `\{..\}`, "pair" for a list in ( ) or [ ], else "list"."""
    bare = text.replace("\\left", "").replace("\\right", "").strip()
    if bare.startswith("\\{"):
        return "set"
    depths = list(accumulate((letter in "([") - (letter in ")]") for letter in bare))
    return "pair" if bare[:1] in ("(", "[") and "," in bare and 0 not in depths[:-1] else "list"
