# SPDX-License-Identifier: Apache-2.0
"""Signs of a text and templates, compared with the plain formulas, which search the whole text with each pattern."""

import random
import re
from collections import Counter, defaultdict

import pytest

from evoalign.checks import hacking, signs
from evoalign.rewards.functions import normalized, says

PIECES = [
    "the", "so", "I", "Let's", "don't", "rock", "'n'", "a''b", "’tis", "l’or_x", "x'", "'_y", "ÉCOLE", "straße", "ǆ",
    "3", "44", "1,000", "2.5", "(3 + 5) * 2 = 16", "x_1", "٣", "²", "½", "π", "東京", "a'東京", "東'a", "ไทย",
    "ア", "сорок", "Sprayогoat", "人", "×", "—", "🙂", "e\u0301", "\ufffd", "\x04", "\x1d", "\x85", "\u2028", "\u200b",
    "<think>", "</answer>", "<s>", "</s>", "<pad>", "[PAD]", "[1]", "<|im_end|>", "<｜end▁of▁sentence｜>", "<0x0A>",
    "User:", "system", "### Response:", "0" * 17, "ab" * 25, "1 0 0 1 7 7 ", "7 8 9 ", "The cat is on the mat. ",
    "2.5 33.1 ", '{"city": "Lima"}',
]  # fmt: skip
GAPS = [" ", " ", " ", "", "\n", ". ", ", ", ": ", "\t", "\xa0", "-", "'"]
LETTERS = [
    chr(code) for span in ((0, 0x250), (0x370, 0x460), (0x3040, 0x3060), (0xE00, 0xE20)) for code in range(*span)
]


def odd_text(draw):
    """Return a text of few pieces, in any order and some of them many times."""
    known = [draw.choice([*PIECES, *LETTERS, "a'" + draw.choice(LETTERS)]) for _ in range(draw.randrange(1, 12))]
    parts = [
        (draw.choice(known) + draw.choice(GAPS)) * draw.choice([1, 1, 1, 3, 24]) for _ in range(draw.randrange(40))
    ]
    return "".join(parts)


TEXTS = ["a'東京 b " * 8, "Let's see. " * 9 + "one two three " * 8, *(odd_text(random.Random(i)) for i in range(3000))]
LATIN = frozenset({"LATIN"})


def plain_gibberish(text):
    if signs._NO_TEXT.search(text.removesuffix(signs._CUT)):
        return True
    solid, run_on = sum(map(len, text.split())), sum(map(len, signs._UNBROKEN.findall(text)))
    if any(2 * len(run.group()) > solid for run in signs._RUN.finditer(text)) or 2 * run_on > solid:
        return True
    if solid < signs.GIBBERISH_TOKENS or 5 * sum(map(len, signs._READABLE.findall(text))) > solid:
        return False
    pieces = signs._PIECE.findall(text.casefold())
    return signs._is_shredded(text, pieces) or any(len(p) >= 20 and p.isdecimal() and len(set(p)) <= 4 for p in pieces)


def plain_phrases(text):
    words = signs._WORD.findall(text.casefold())
    phrases = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    counts = Counter(phrases)
    covered = {j for i, phrase in enumerate(phrases) if counts[phrase] >= 3 for j in range(i, i + 4)}
    return len(words) >= 20 and len(covered) > len(words) / 2


def plain_special(text):
    end = text.find("</s>")
    bare = end >= 0 and text.find("<s>", 0, end) < 0
    return bare or bool(re.search(r"\A\s*<s>", text) or signs._SPECIAL.search(text))


def plain_clauses(text):
    body, values = signs.json_of(text)
    if body:
        short = " ".join(v for v in values if len(v) < 20)
        parts = [v for v in (*values, text.replace(body, "\n", 1)) if len(v) >= 20]
        return [re.sub(r"\W", "", short.casefold()) or "-", *(c for part in parts for c in plain_clauses(part))]
    for part in (re.sub(r"<[^<>\n]{1,24}>", "\n", text), text):
        ended = re.sub(r"[.!?;:]", "\n", part.casefold())
        if found := [clause for clause in re.sub(r"[^\w\n]+", "", ended).split("\n") if clause]:
            return found
    return []


def plain_templates(texts, prompts, golds=None):
    clauses = [plain_clauses(text) for text in texts]
    whole, limit = ["".join(parts) for parts in clauses], len(set(prompts)) / (2 if len(set(prompts)) >= 8 else 1)
    wanted, givers = defaultdict(set), defaultdict(set)
    for parts, text, prompt, gold in zip(clauses, whole, prompts, golds or [None] * len(texts), strict=True):
        wanted[text] |= set() if gold is None else {normalized(gold)}
        for part in {*parts, ("", text)}:
            givers[part].add(prompt)
    has_form = golds is not None and hacking._have_a_form(golds, prompts)
    found = []
    for index, (parts, text) in enumerate(zip(clauses, whole, strict=True)):
        overlap = sum(len(part) for part in parts if len(givers[part]) > 1)
        alike = len(text) >= 20 and overlap >= 0.8 * len(text) and not has_form
        gold = golds[index] if golds else None
        gives = gold is not None and says(texts[index], gold)
        gives = gives and not any(o != normalized(gold) and says(texts[index], o) for o in wanted[text])
        found.append(bool(text) and not gives and (alike or len(givers["", text]) > limit))
    return found


PLAIN = {
    signs._words: signs._WORD.findall,
    signs.is_gibberish: plain_gibberish,
    signs.repeats_phrases: plain_phrases,
    signs.has_special_token: plain_special,
    hacking._clauses: plain_clauses,
}


@pytest.mark.parametrize("sign", PLAIN, ids=lambda sign: sign.__name__)
def test_a_sign_equals_the_plain_formula(sign):
    for text in TEXTS:
        assert sign(text) == PLAIN[sign](text), text


@pytest.mark.parametrize("known", [(), ("LATIN",), ("LATIN", "CJK", "CYRILLIC"), ("GREEK",)])
def test_is_foreign_is_the_same_without_its_short_cut(known, monkeypatch):
    found = [signs.is_foreign(text, frozenset(known)) for text in TEXTS]
    monkeypatch.setattr(signs, "scripts", lambda texts: frozenset({"UNKNOWN"}))  # no text has only known scripts
    assert [signs.is_foreign(text, frozenset(known)) for text in TEXTS] == found
    assert any(found) == bool(known)


SENTENCES = [
    "Let me try {} + {} = {}, so I need more.", "The target isn't {}; {} times {} is too large.", "So {} - {} is {}.",
    "First I combine them.", "Let's think step by step: what do we have?", "\n{}. {} * {} is next\n",
]  # fmt: skip


def reasoning(draw):
    """Return a text of 400 to 1,000 letters, or now and then a short, empty or looping one."""
    parts, length = ["<think>"], draw.randrange(400, 1000)
    while sum(map(len, parts)) < length:
        parts.append(draw.choice(SENTENCES).format(*(draw.randrange(1, 99) for _ in range(3))))
    text = " ".join(parts) + f"</think>\n<answer>{draw.randrange(20)}</answer>"
    odd = ["", "no " * 200, "Yes.", f"It is {draw.randrange(5)}", text + " and then" * 40, text[:300] * 3]
    return draw.choice([text] * 5 + odd)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_golds", [True, False])
def test_text_flags_equal_the_plain_formulas_for_reasoning(seed, has_golds):
    draw = random.Random(seed)
    texts = [reasoning(draw) for _ in range(48)]
    texts += [draw.choice(texts) for _ in range(16)]
    prompts = [draw.randrange(9) for _ in texts]
    golds = [draw.choice([None, str(p % 5), texts[p][:200]]) for p in prompts] if has_golds else None
    found = hacking.text_flags(texts, ["stop"] * len(texts), prompts, golds, LATIN)
    assert found["template"] == plain_templates(texts, prompts, golds)
    assert 0 < sum(found["template"]) < len(texts) and any(found["phrases"])
    plain = {"gibberish": plain_gibberish, "phrases": plain_phrases, "special_token": plain_special}
    for name, shows in plain.items():
        assert found[name] == [
            shows(text) and not (gold is not None and shows(gold))
            for text, gold in zip(texts, golds or [None] * len(texts), strict=True)
        ]
