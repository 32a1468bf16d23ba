# SPDX-License-Identifier: Apache-2.0
"""Signs in one text that a model is broken: empty, looping, tokens that steer and say nothing, figures without sense,
turns of a conversation that it writes to itself, letters of a script that nobody used.

None of them proves anything; what tells is a share that was lower before training. The definitions are for
completions, without their prompts and without the special tokens that a tokenizer has taken out.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby, pairwise

LOOP_REPEATS = 3
LOOP_CHARACTERS = 24
"""Six tokens of about four characters: the shortest loop of Holtzman et al., a phrase of two tokens three times."""
_LOOP_PROBE = 6
NGRAM, NGRAM_COUNT = 4, 3
NGRAM_WORDS = 20
NGRAM_SHARE = 0.5
"""A text of 20 words or more whose words lie, half of them, in phrases of four that come three times or more."""
GIBBERISH_TOKENS = 6
"""Single letters or digits in a row that can be without sense: fewer are a date, a score, an abbreviation."""
GIBBERISH_RUN = 16
"""Times that one letter or digit comes in a row: 10^15 has fifteen zeros."""
GIBBERISH_DIGITS, GIBBERISH_KINDS = 20, 4
"""A number of so many digits, and so few different ones among them: a random one of 20 digits has nine."""
RUN_ON = 40
"""Letters without a space: no language with an alphabet has words so long."""
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
    | \A\s*<s> | </?(?:pad|unk|eos|bos|mask|sep|cls)>   # of SentencePiece
    | \[(?:PAD|UNK|CLS|SEP|MASK|BOS|EOS)\]              # of BERT
    | <(?:unused\d+|extra_id_\d+|0x[0-9A-F]{2})> | <(?:start|end)_of_(?:turn|text)>""",
    re.VERBOSE,
)
_END = "</s>"
_UNSEGMENTED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana, Chinese characters."""
_WORD = re.compile(rf"[{_UNSEGMENTED}]|[^\W_{_UNSEGMENTED}]+(?:['’][^\W_]+)*")
_READABLE = re.compile(r"[^\W\d_]{3,}|[^\W\d_\x00-\u02ff]")
"""Three letters in a row, or one that is not Latin: what words are made of."""
_UNBROKEN = re.compile(rf"[^\W\d_{_UNSEGMENTED}]{{{RUN_ON},}}")
_PIECE = re.compile(r"[^\W_]+")
_RUN = re.compile(rf"([^\W_])\1{{{GIBBERISH_RUN - 1},}}")
_NO_TEXT = re.compile("[\ufffd\x00-\x08\x0e-\x1a\x1c-\x1f]")
"""What stands for bytes that are no character, and control characters other than white space and the escape."""
_CUT = "\ufffd"
"""At the end: a character that the limit of tokens has cut."""
_SYMBOLS = frozenset({
    "MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER", "MODIFIER", "SUPERSCRIPT", "SUBSCRIPT", "FEMININE",
    "MASCULINE", "MICRO", "ANGSTROM", "KELVIN", "OHM", "INVERTED", "EULER", "PLANCK", "INFORMATION", "ALEF", "BET",
    "GIMEL", "DALET", "TURNED", "ROTATED", "PROPERTY",
})  # fmt: skip
"""How the names of letters begin that stand for quantities and units in texts of any language."""
_ONE_SCRIPT = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "BOPOMOFO": "CJK", "HALFWIDTH": "CJK", "FULLWIDTH": "LATIN",
               "IDEOGRAPHIC": "CJK", "KANGXI": "CJK"}  # fmt: skip


def is_empty(text: str) -> bool:
    """Nothing but white space. Brevity rewards are hacked so (arXiv 2509.24372: GRPO with little KL penalty)."""
    return not text.strip()


def is_repeated(text: str) -> bool:
    """It ends in a loop: a phrase at least three times in a row, 24 characters or more in all.

    Holtzman et al. (arXiv 1904.09751, "repetition"), in characters instead of tokens, any white space as
    one space. The last round may be cut off. A loop that the text leaves again does not count, and a rule of
    punctuation, as under a heading, only where it is half of the text.
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
            return _PIECE.search(text, len(text) - length) is not None or _loop(text, period) * 2 >= len(text)
        end = start + len(tail) - 1
    return False


def _loop(text: str, period: int) -> int:
    """How many characters at the end repeat with this period."""
    end = len(text) - period
    while end > 0 and text[end - 1] == text[end - 1 + period]:
        end -= 1
    return len(text) - end


def repeats_phrases(text: str) -> bool:
    """Half of its words, of 20 or more, lie in phrases of four words that it has three times or more, wherever.

    As the share of text in duplicate n-grams by which training data is filtered (Rae et al., arXiv 2112.11446, table
    A1), with bounds for one short text: a refrain or a table's labels stay under them. Figures are words here.
    """
    words: list[str] = _WORD.findall(text.casefold())
    if len(words) < NGRAM_WORDS:
        return False
    phrases = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    counts = Counter(phrases)
    covered: set[int] = set()
    for i, phrase in enumerate(phrases):
        if counts[phrase] >= NGRAM_COUNT:
            covered.update(range(i, i + NGRAM))
    return len(covered) > NGRAM_SHARE * len(words)


def has_role_marker(text: str) -> bool:
    """The model writes turns of its own: `<|im_start|>`, `[INST]`, `### Response`, or `User:` at a line's beginning.

    Seen under GRPO on safety prompts ("multi-turn hallucination") and in 63 to 70 % of what Alpaca-7B and an early ES
    checkpoint answer. A role's name in lower case, alone on a line, counts too: it is what `<|im_start|>user` leaves
    behind when special tokens are dropped. A point of a list is none.
    """
    lower = text.lower()
    hinted = any(h in text for h in _ROLE_HINTS) or any(role in lower for role in _ROLES.split("|"))
    return hinted and _ROLE.search(text) is not None  # the hints are ten times faster


def has_special_token(text: str) -> bool:
    """A token that steers, written out as text: `<|endoftext|>`, `</s>`, `<pad>`, `[PAD]`.

    `</s>` after `<s>` is HTML's strike-through.
    """
    if "<" not in text and "[" not in text:
        return False
    end = text.find(_END)
    return (end >= 0 and text.find("<s>", 0, end) < 0) or _SPECIAL.search(text) is not None


def is_gibberish(text: str) -> bool:
    """Letters and figures in a row that make neither words nor numbers.

    There are bytes that make no character, or control characters. Or most of the text is one letter or digit 16 times
    in a row, or letters 40 times in a row without a space. Or, where at most a fifth of the characters are in words of
    three letters or more: at least six single letters and digits, with one kind of separator between them, have at most
    half as many different ones (`1 0 0 1 7 7`, `A.B.B.C.A.B`); 24 numbers and shreds of words of any length have at
    most a quarter; or a number has 20 digits and at most four different ones.
    """
    if _NO_TEXT.search(text.removesuffix(_CUT)):
        return True
    solid = sum(map(len, text.split()))
    if any(2 * len(run.group()) > solid for run in _RUN.finditer(text)) or 2 * _run_on(text) > solid:
        return True
    if solid < GIBBERISH_TOKENS or 5 * sum(map(len, _READABLE.findall(text))) > solid:
        return False
    pieces = _PIECE.findall(text.casefold())
    return _is_shredded(text, pieces) or any(map(_is_long_number, pieces))


def _run_on(text: str) -> int:
    return sum(len(run) for run in _UNBROKEN.findall(text))


def _is_shredded(text: str, pieces: list[str]) -> bool:
    kinds = len(set(pieces))
    if len(pieces) >= 4 * GIBBERISH_TOKENS and 4 * kinds <= len(pieces):
        return True
    single = sum(len(piece) == 1 for piece in pieces)
    if single < GIBBERISH_TOKENS or 4 * single < 3 * len(pieces) or 2 * kinds > len(pieces):
        return False
    between = Counter(text[a.end() : b.start()].strip() for a, b in pairwise(_PIECE.finditer(text)))
    return 5 * between.most_common(1)[0][1] >= 4 * between.total()


def _is_long_number(piece: str) -> bool:
    return len(piece) >= GIBBERISH_DIGITS and piece.isdecimal() and len(set(piece)) <= GIBBERISH_KINDS


def scripts(texts: Iterable[str]) -> frozenset[str]:
    """The scripts of the texts' letters, by their Unicode names: LATIN, HEBREW, CJK, with kana, and so on."""
    return frozenset(name for letter in set("".join(texts)) if (name := _script(letter)) is not None)


def is_foreign(text: str, known: frozenset[str]) -> bool:
    """Two letters or more, and one in ten, are of scripts that are not `known`; nothing is where none is known.

    A letter that stands alone, as Greek ones do in formulas, does not count; but a Chinese character is a word. Where
    they are stuck into a word of a known script, as in samples that are too hot, any share is enough, but of Greek.
    """
    if not known or text.isascii():
        return False
    names = [_script(c) for c in text]
    odd = [name is not None and name not in known for name in names]
    joined = sum(
        o and (names[i] == "CJK" or any(names[j] == names[i] for j in (i - 1, i + 1) if 0 <= j < len(names)))
        for i, o in enumerate(odd)
    )
    letters = sum(name is not None for name in names)
    return (joined >= FOREIGN_LETTERS and joined >= FOREIGN_SHARE * letters) or _is_stuck(names, known)


def _is_stuck(names: list[str | None], known: frozenset[str]) -> bool:
    """Letters of another script right beside one of a known script: "Sprayогoat". One that is alone may be a unit."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    odd = [n not in (None, "GREEK", *known) and (n == "CJK" or size >= FOREIGN_LETTERS) for n, size in runs]
    usual = [name in known for name, _ in runs]
    return any((odd[i] and usual[i + 1]) or (usual[i] and odd[i + 1]) for i in range(len(runs) - 1))


@lru_cache(maxsize=4096)
def _script(character: str) -> str | None:
    """None of what is no letter, or a letter that is a symbol in any language."""
    if character.isascii():
        return "LATIN" if character.isalpha() else None
    if unicodedata.category(character)[0] != "L":
        return None
    first = unicodedata.name(character, "UNKNOWN").split()[0]
    return None if first in _SYMBOLS else _ONE_SCRIPT.get(first, first)
