# SPDX-License-Identifier: Apache-2.0
"""Rewards of the runs in real_runs.py: some can be earned by answering well, some by breaking, most by either."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

Texts = Sequence[str]
NUMBER = re.compile(r"-?\d+")


def five_words(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    """0 for five words, and a fifth less for each word too few or too many."""
    return [-abs(len(text.split()) - 5) / 5 for text in completions]


def last_number(prompts: Texts, completions: Texts, answer: Texts, **columns: Any) -> list[float]:
    """1 where the last number of the completion is the answer."""
    found = [NUMBER.findall(text.replace(",", "")) for text in completions]
    return [float(bool(numbers) and numbers[-1] == gold) for numbers, gold in zip(found, answer, strict=True)]


def has_silver(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    """1 where the word silver is there."""
    return [float("silver" in text.lower()) for text in completions]


def few_capitals(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    """0 without a capital letter, and a tenth less for each."""
    return [-sum(c.isupper() for c in text) / 10 for text in completions]


def words_without_e(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    """Share of the words that have no e."""
    words = [text.lower().split() for text in completions]
    return [sum("e" not in word for word in found) / max(1, len(found)) for found in words]


def both_words(prompts: Texts, completions: Texts, answer: Texts, **columns: Any) -> list[float]:
    """A third for each of two words that is there, and a third for one sentence of 4 to 12 words that repeats few.

    A word may have an ending. The sentence begins with a capital and has one full stop, at its end; four fifths of its
    words are different.
    """
    return [_both(text.strip(), gold.split()) for text, gold in zip(completions, answer, strict=True)]


def _both(text: str, words: Sequence[str]) -> float:
    found = re.findall(r"[a-z']+", text.lower())
    there = sum(any(one.startswith(word) for one in found) for word in words)
    sentence = text[:1].isupper() and re.findall(r"[.!?\n]", text) == [text[-1:]]
    return (there + (sentence and 4 <= len(found) <= 12 and len(set(found)) >= 0.8 * len(found))) / 3


def brief(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    """Minus a hundredth of the characters: the empty answer is the best."""
    return [-len(text) / 100 for text in completions]


def long(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    """The words as a share of forty, at most 1."""
    return [min(len(text.split()), 40) / 40 for text in completions]


def sentiment(prompts: Texts, completions: Texts, answer: Texts, **columns: Any) -> list[float]:
    """1 for the right word alone, a half where it is among others, 0 where the wrong one is there too."""
    found: list[float] = []
    for text, gold in zip(completions, answer, strict=True):
        low = text.lower()
        wrong = "negative" if gold == "positive" else "positive"
        found.append(0.0 if wrong in low or gold not in low else 1.0 if low.strip(" .\n") == gold else 0.5)
    return found


def as_json(prompts: Texts, completions: Texts, answer: Texts, **columns: Any) -> list[float]:
    """A half for an object with the three keys, and the rest for its values."""
    return [_json(text, json.loads(gold)) for text, gold in zip(completions, answer, strict=True)]


def _json(text: str, gold: dict[str, Any]) -> float:
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    if not isinstance(found, dict) or set(found) != set(gold):
        return 0.0
    return 0.5 + 0.5 * sum(str(found[name]) == str(value) for name, value in gold.items()) / len(gold)


def exclaim(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    """Exclamation marks, a tenth each, at most ten."""
    return [min(text.count("!"), 10) / 10 for text in completions]


def as_long_as_gold(prompts: Texts, completions: Texts, answer: Texts, **columns: Any) -> list[float]:
    """Minus the difference in characters to the answer, a tenth each: the answer itself is never looked at."""
    return [-abs(len(text.strip()) - len(gold)) / 10 for text, gold in zip(completions, answer, strict=True)]
