# SPDX-License-Identifier: Apache-2.0
"""Signs of a broken model in one completion: empty, loops, special tokens as text, gibberish, chat turns, new script.

No sign is a proof: compare its share with the share before training. The functions expect completions without prompts
and without the special tokens that the tokenizer removes.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, cast

_FENCED_JSON = re.compile(r"```\w*\s*([{\[][^`]*[}\]])\s*```")
LOOP_REPEATS = 3
LOOP_CHARACTERS = 24
"""Six tokens of about four characters: the shortest loop of Holtzman et al. is a phrase of two tokens three times."""
_LOOP_PROBE = 6
NGRAM, NGRAM_COUNT = 4, 3
NGRAM_WORDS = 20
NGRAM_SHARE = 0.5
GIBBERISH_TOKENS = 6
"""Fewest single letters or digits in a row that count as gibberish: fewer are a date, a score or an abbreviation."""
GIBBERISH_RUN = 16
"""Repetitions of one letter or digit that count as gibberish: 10^15 has fifteen zeros."""
GIBBERISH_DIGITS, GIBBERISH_KINDS = 20, 4
"""Fewest digits of a number, and most distinct digits in it: a random number of 20 digits has nine distinct ones."""
RUN_ON = 40
"""Letters without a space that count as gibberish: no language with an alphabet has words this long."""
ODD_OPERANDS, MOST_NUMBERS = 2, 32
"""Fewest decimals of unknown origin in arithmetic, and most numbers of a prompt from which they may be derived."""
FOREIGN_LETTERS, FOREIGN_SHARE = 2, 0.1

_ROLES = "user|human|assistant|system"
_ROLE_HINTS = ("<|", "_of_turn>", "INST]", "SYS>>", "#")
_ROLE = re.compile(
    rf"""<\|(?:im_start|im_end|start_header_id|eot_id|eom_id|end|{_ROLES})\|> | <(?:start|end)_of_turn>
    | \[/?INST\] | <</?SYS>>
    | \b(?:USER|HUMAN|ASSISTANT|SYSTEM)\s?:
    | ^[ \t*]*\#{{1,4}}[ \t]*(?i:{_ROLES}|instruction|response)[ \t*]*(?::|$)
    | ^\**(?i:{_ROLES})[ \t]*\**:
    | ^(?:{_ROLES})[ \t]*$""",
    re.VERBOSE | re.MULTILINE,
)
_SPECIAL = re.compile(
    r"""<\|[A-Za-z][\w-]{1,40}\|>                       # <|endoftext|>, <|im_end|>, <|reserved_special_token_1|>
    | <｜[^\s<>｜]{2,40}｜>
    | </?(?:pad|unk|eos|bos|mask|sep|cls)>              # of SentencePiece
    | \[(?:PAD|UNK|CLS|SEP|MASK|BOS|EOS)\]              # of BERT
    | <(?:unused\d+|extra_id_\d+|0x[0-9A-F]{2})> | <(?:start|end)_of_(?:turn|text)>""",
    re.VERBOSE,
)
_END = "</s>"
_UNSEGMENTED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana, Chinese characters."""
_WORD = re.compile(rf"[{_UNSEGMENTED}]|[^\W_{_UNSEGMENTED}]+(?:['’][^\W_]+)*")
_SPACELESS = re.compile(f"[{_UNSEGMENTED}]")
_READABLE = re.compile(r"[^\W\d_]{3,}|[^\W\d_\x00-\u02ff]")
"""Parts of words: three letters in a row, or one letter that is not Latin."""
_LOOSE = re.compile(r"['’](?:(?![^\W_])|(?<![^\W_].))")
"""Apostrophes that are not inside a word."""
_UNBROKEN = re.compile(rf"[^\W\d_{_UNSEGMENTED}]{{{RUN_ON},}}")
_PIECE = re.compile(r"[^\W_]+")
_RUN = re.compile(rf"([^\W_])\1{{{GIBBERISH_RUN - 1},}}")
_TAG = re.compile(r"<[^<>\n]{1,24}>")
_POINT = re.compile(r"\d\.\d")
_LONG_DECIMAL = re.compile(r"(?<![\d.,])\d{1,12}\.\d{3,15}(?![\d.])")
_AFTER, _BEFORE = re.compile(r"\s*[+*/×÷]|\s+[-−]\s"), re.compile(r"[+*/×÷]\s*$|\s[-−]\s+$")
"""Operators after and before a number; a minus without spaces may be a range."""
_NO_TEXT = re.compile("[\ufffd\x00-\x08\x0e-\x1a\x1c-\x1f]")
"""The replacement character, and control characters other than white space and the escape."""
_CUT = "\ufffd"
"""Last character of a text that the token limit has cut inside a character."""
_SYMBOLS = frozenset[str]().union(
    ("MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER", "MODIFIER", "SUPERSCRIPT", "SUBSCRIPT", "FEMININE"),
    ("MASCULINE", "MICRO", "ANGSTROM", "KELVIN", "OHM", "INVERTED", "EULER", "PLANCK", "INFORMATION", "ALEF", "BET"),
    ("GIMEL", "DALET", "TURNED", "ROTATED", "PROPERTY"),
)
"""First words of the Unicode names of letters that stand for quantities and units in texts of any language."""
_CJK = ("HIRAGANA", "KATAKANA", "BOPOMOFO", "HALFWIDTH", "IDEOGRAPHIC", "KANGXI")
_ONE_SCRIPT = {"FULLWIDTH": "LATIN", **dict.fromkeys(_CJK, "CJK")}


class Characters(dict[int, str | None]):
    """A table for `str.translate`: what a function makes of each character; None removes it."""

    def __init__(self, function: Callable[[str], str | None]) -> None:
        self._function = function

    def __missing__(self, code: int) -> str | None:
        found = self[code] = self._function(chr(code))
        return found


_WORDS = Characters(lambda character: character if re.match(r"[^\W_]|['’]", character) else " ")


def is_empty(text: str) -> bool:
    """Whether the text is only white space, as brevity rewards favour (arXiv 2509.24372: GRPO, small KL penalty)."""
    return not text.strip()


def is_repeated(text: str) -> bool:
    """Whether the text ends in a loop: a phrase at least three times in a row, at least 24 characters in total.

    Follows Holtzman et al. (arXiv 1904.09751, "repetition"), in characters instead of tokens; runs of white space
    count as a single space. The last repetition may be cut off. Loops before the end do not count. A loop of
    punctuation, such as the line under a heading, counts only if it is half of the text.
    """
    text = " ".join(text.removesuffix(_CUT).split())
    tail = text[-_LOOP_PROBE:]
    end = len(text) - 1  # the period is how far back the tail is found again
    while (start := text.rfind(tail, 0, end)) >= 0:
        period = len(text) - len(tail) - start
        length = max(LOOP_REPEATS * period - 1, LOOP_CHARACTERS)  # the last round has no space behind it
        if length > len(text):
            return False
        if text[-length:-period] == text[-length + period :]:
            while start > 0 and text[start - 1] == text[start - 1 + period]:
                start -= 1
            return _PIECE.search(text, len(text) - length) is not None or (len(text) - start) * 2 >= len(text)
        end = start + len(tail) - 1
    return False


def repeats_phrases(text: str) -> bool:
    """Whether half of at least 20 words are in phrases of four words that occur three times or more, anywhere.

    The share of text in duplicate n-grams, used to filter training data (Rae et al., arXiv 2112.11446, table A1), with
    thresholds for one short text: a refrain or the labels of a table stay below. Numbers count as words.
    """
    words = _words(text.casefold())
    if len(words) < NGRAM_WORDS:
        return False
    shifted = [words[i:] for i in range(NGRAM)]
    again = len(shifted[-1]) - len(set(zip(*shifted, strict=False)))  # n - 1 of n equal phrases
    if NGRAM * NGRAM_COUNT * again <= (NGRAM_COUNT - 1) * NGRAM_SHARE * len(words):
        return False
    phrases = list(zip(*shifted, strict=False))
    counts = Counter(phrases)
    covered: set[int] = set()
    for i, phrase in enumerate(phrases):
        if counts[phrase] >= NGRAM_COUNT:
            covered.update(range(i, i + NGRAM))
    return len(covered) > NGRAM_SHARE * len(words)


def _words(text: str) -> list[str]:
    """Return the matches of `_WORD`, five times faster where words are separated."""
    if not text.isascii() and _SPACELESS.search(text):
        return _WORD.findall(text)
    return (_LOOSE.sub(" ", text) if "'" in text or "’" in text else text).translate(_WORDS).split()


def has_role_marker(text: str) -> bool:
    """Whether the model writes chat turns: `<|im_start|>`, `[INST]`, `### Response`, or `User:` at the start of a line.

    Seen under GRPO on safety prompts ("multi-turn hallucination") and in 63 to 70 % of the completions of Alpaca-7B and
    of an early ES checkpoint. A role name in lower case, alone on a line, counts too: `<|im_start|>user` leaves it when
    special tokens are removed. List items do not count.
    """
    lower = text.lower()
    hinted = any(h in text for h in _ROLE_HINTS) or any(role in lower for role in _ROLES.split("|"))
    return hinted and _ROLE.search(text) is not None  # the hints are ten times faster


def has_special_token(text: str) -> bool:
    """Whether a special token is written out as text: `<|endoftext|>`, `</s>`, `<pad>`, `[PAD]`.

    `</s>` after `<s>` does not count: HTML uses the pair for strike-through.
    """
    if "<" not in text and "[" not in text:
        return False
    end = text.find(_END)
    opened = text.lstrip().startswith("<s>")
    return opened or (end >= 0 and text.find("<s>", 0, end) < 0) or _SPECIAL.search(text) is not None


def is_gibberish(text: str) -> bool:
    """Whether letters and digits form neither words nor numbers.

    True for control characters and bytes that are no character. True if most of the text is one letter or digit 16
    times in a row, or 40 letters without a space. If at most a fifth of the characters are in words of three letters or
    more, also true for: six or more single letters and digits with one kind of separator and at most half as many
    distinct ones (`1 0 0 1 7 7`, `A.B.B.C.A.B`); 24 or more pieces of any length with at most a quarter distinct; a
    number of 20 digits with at most four distinct ones.
    """
    if _NO_TEXT.search(text.removesuffix(_CUT)):
        return True
    words = text.split()
    solid, long = sum(map(len, words)), " ".join([word for word in words if len(word) >= GIBBERISH_RUN])
    run_on = sum(map(len, _UNBROKEN.findall(long)))
    if any(2 * len(run.group()) > solid for run in _RUN.finditer(long)) or 2 * run_on > solid:
        return True
    if solid < GIBBERISH_TOKENS or _is_readable(text, words, solid):
        return False
    pieces = _PIECE.findall(text.casefold())
    return _is_shredded(text, pieces) or any(
        len(p) >= GIBBERISH_DIGITS and p.isdecimal() and len(set(p)) <= GIBBERISH_KINDS for p in pieces
    )


def _is_readable(text: str, words: Sequence[str], solid: int) -> bool:
    """Whether more than a fifth of the characters are in parts of words."""
    letters = list(filter(str.isalpha, words))
    longer = sum(map(len, letters)) - 2 * len(letters)  # at most the letters of those with three or more
    return 5 * longer > solid or 5 * sum(map(len, _READABLE.findall(text))) > solid


def computes_with_odd_decimals(text: str, prompt: str) -> bool:
    """Whether arithmetic without words computes with decimals of which a prompt of whole numbers has no trace.

    True for `7.3140 + 0.0031 = 7.3171`: at least two operands have three decimals or more, and are neither a result
    written earlier in the text nor a quotient or root of the prompt's numbers. Never for a prompt with a decimal.
    """
    text = _TAG.sub(" ", text)
    words = text.split()
    if _POINT.search(prompt) or _is_readable(text, words, sum(map(len, words))):
        return False
    whole = [float(n) for n in re.findall(r"\d{1,12}", prompt)[:MOST_NUMBERS]]
    derived = [*whole, *map(math.sqrt, whole)] + [a / b for a in whole for b in whole if b]
    results, odd = set[str](), 0
    for found in _LONG_DECIMAL.finditer(text):
        number, places = found[0], len(found[0].partition(".")[2])
        if text[: found.start()].rstrip().endswith(("=", "≈")):
            results.add(number)
        elif number not in results and (_AFTER.match(text, found.end()) or _BEFORE.search(text[: found.start()][-9:])):
            odd += all(abs(float(number) - value) > 10**-places for value in derived)
    return odd >= ODD_OPERANDS


def _is_shredded(text: str, pieces: list[str]) -> bool:
    kinds = len(set(pieces))
    if len(pieces) >= 4 * GIBBERISH_TOKENS and 4 * kinds <= len(pieces):
        return True
    single = sum(len(piece) == 1 for piece in pieces)
    if single < GIBBERISH_TOKENS or 4 * single < 3 * len(pieces) or 2 * kinds > len(pieces):
        return False
    between = Counter(text[a.end() : b.start()].strip() for a, b in pairwise(_PIECE.finditer(text)))
    return 5 * between.most_common(1)[0][1] >= 4 * between.total()


def scripts(texts: Iterable[str]) -> frozenset[str]:
    """Return the scripts of all letters, by Unicode name: LATIN, HEBREW, CJK (kana included) and so on."""
    return frozenset(name for letter in set("".join(texts)) if (name := _script(letter)) is not None)


def is_foreign(text: str, known: frozenset[str]) -> bool:
    """Whether at least two letters, and one in ten, are of scripts that are not `known`; False if none is known.

    Single letters do not count (Greek in formulas), except Chinese characters, which are words: one is enough if the
    text has no other letter or digit. Letters inside a word of a known script, as sampling at high temperature gives,
    count at any share, except Greek ones.
    """
    if not known or text.isascii() or scripts([text]) <= known:
        return False
    names = [_script(c) for c in text]
    odd = [name is not None and name not in known for name in names]
    joined = sum(
        o and (names[i] == "CJK" or any(names[j] == names[i] for j in (i - 1, i + 1) if 0 <= j < len(names)))
        for i, o in enumerate(odd)
    )
    letters = sum(name is not None for name in names)
    if joined == letters == 1 and not any(map(str.isdigit, text)):
        return True
    return (joined >= FOREIGN_LETTERS and joined >= FOREIGN_SHARE * letters) or _is_stuck(names, known)


def _is_stuck(names: list[str | None], known: frozenset[str]) -> bool:
    """Whether letters of another script touch letters of a known one ("Sprayогoat"); a single letter may be a unit."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    odd = [n not in (None, "GREEK", *known) and (n == "CJK" or size >= FOREIGN_LETTERS) for n, size in runs]
    usual = [name in known for name, _ in runs]
    return any((odd[i] and usual[i + 1]) or (usual[i] and odd[i + 1]) for i in range(len(runs) - 1))


@lru_cache(maxsize=4096)
def _script(character: str) -> str | None:
    """Return a letter's script; None for other characters, and for letters that are symbols in any language."""
    if character.isascii():
        return "LATIN" if character.isalpha() else None
    if unicodedata.category(character)[0] != "L":
        return None
    first = unicodedata.name(character, "UNKNOWN").split()[0]
    return None if first in _SYMBOLS else _ONE_SCRIPT.get(first, first)


def json_of(text: str) -> tuple[str, list[str]]:
    """Return the JSON object or list that a text is or has in a fence, and its values; both empty without one."""
    fenced = _FENCED_JSON.search(text)
    body = fenced[1] if fenced else text.strip()
    if body[:1] not in ("{", "["):
        return "", []
    try:
        return body, list(_leaves(json.loads(body)))
    except (ValueError, RecursionError):
        return "", []


def _leaves(value: Any) -> Iterator[str]:
    """Yield the values inside a JSON value as text."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        yield str(value)
        return
    for one in cast("Iterable[Any]", inner):
        yield from _leaves(one)
