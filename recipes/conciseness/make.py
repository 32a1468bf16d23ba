# SPDX-License-Identifier: Apache-2.0
"""Write the Conciseness questions: short facts in three splits that share none of them.

    python recipes/conciseness/make.py [--to data/tasks/conciseness]

Each question asks for one fact, in one phrasing. Hashes of a fact's key decide its split, its phrasing and its place:
there is no seed to choose. What is a trivial variant of something (7 + 6 and 13 - 6, "snow is white" and "snow is
black") has its key, and so one of them stands in one split. No fact of the published questions is in any.

    python recipes/conciseness/make.py --base     which of the questions the tiny base was trained on; writes nothing
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "data" / "tasks" / "conciseness"
sys.path.insert(0, str(ROOT / "recipes" / "tiny_base"))

import questions as tables  # noqa: E402

Fact = tuple[str, str, tuple[str, ...]]
"""Key, target and phrasings; those of a key that comes again stand for the same fact."""
PARTS = (
    "train", "test", "validation", "test", "train", "test", "train", "test",
    "validation", "test", "train", "test", "train", "validation", "test", "train",
)  # fmt: skip
"""Of sixteen facts of a family, six are for training, three for validation and seven for the test."""
MOST = 40
"""Facts of one family, so that no kind of question is most of a split."""
PUBLISHED = ("conciseness_train.json", "conciseness_test.json")


def a(noun: str) -> str:
    """A noun with its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def cap(text: str) -> str:
    """With a capital letter."""
    return text[:1].upper() + text[1:]


def capitals() -> Iterator[Fact]:
    """Capitals."""
    for country, city in tables.CAPITALS.items():
        asked = f"What is the capital of {country}?", f"Which city is the capital of {country}?"
        yield country, city, (*asked, f"Capital city of {country}:", f"Name the capital of {country}.")


def sums() -> Iterator[Fact]:
    """Sums, and the differences that they answer as well."""
    for x, y in combinations_with_replacement(range(1, 13), 2):
        for p, q in ((x, y), (y, x)):
            asked = f"What is {p} + {q}?", f"Compute: {p} + {q} =", f"What is {p} plus {q}?"
            yield f"{x}+{y}", str(p + q), asked
            asked = f"What is {p + q} - {q}?", f"Calculate: {p + q} - {q} =", f"What is {p + q} minus {q}?"
            yield f"{x}+{y}", str(p), asked


def products() -> Iterator[Fact]:
    """Products up to 12 by 12."""
    for x, y in combinations_with_replacement(range(2, 13), 2):
        for p, q in ((x, y), (y, x)):
            asked = f"What is {p} times {q}?", f"Compute: {p} * {q} =", f"What is {p} multiplied by {q}?"
            yield f"{x}*{y}", str(p * q), asked


def percentages() -> Iterator[Fact]:
    """Round percentages of round numbers."""
    for percent in (10, 15, 20, 25, 50):
        for base in range(20, 201, 20):
            asked = f"What is {percent}% of {base}?", f"Calculate {percent}% of {base}:"
            yield f"{percent}%{base}", str(percent * base // 100), asked


def sequences() -> Iterator[Fact]:
    """Arithmetic sequences."""
    for step in range(1, 7):
        for start in range(1, 7):
            *shown, last = (start + step * i for i in range(5))
            terms = ", ".join(map(str, shown))
            asked = f"What comes next in the sequence: {terms}, ?", f"Next number in the sequence: {terms}, ?"
            yield terms, str(last), (*asked, f"Complete the sequence: {terms}, ...")


def comparisons() -> Iterator[Fact]:
    """The larger or smaller of two numbers."""
    for x, y in combinations(range(3, 100, 7), 2):
        yield f"{x}<{y}", str(y), (f"Which number is larger, {x} or {y}?",)
        yield f"{x}<{y}", str(x), (f"Which number is smaller, {x} or {y}?",)


def parities() -> Iterator[Fact]:
    """Even or odd."""
    for n in range(1, 100):
        yield str(n), "Odd" if n % 2 else "Even", (f"Is {n} even or odd?",)


TOPICS = (
    "cats", "dogs", "the sun", "ice", "fish", "the earth", "snow", "roses", "a triangle", "a square", "whales", "bees",
    "the moon", "gold", "wood", "apples", "squares",
)  # fmt: skip


def true_or_false() -> Iterator[Fact]:
    """Statements to judge; those about one topic are one fact."""
    for fact, truth in tables.FACTS:
        topic = next(topic for topic in TOPICS if topic in fact)
        asked = f"True or false: {fact}.", f'Is the statement "{cap(fact)}" true or false?'
        yield topic, str(truth), (*asked, f"Is it true or false that {fact}?")


def syllogisms() -> Iterator[Fact]:
    """Kinds of animals, and what they can or can not do."""
    for kind, instances, _ in tables.KINDS:
        for verb in sorted({verb for _, _, verb in tables.KINDS}):
            asked = f"{kind} can {verb} and {instances} are {kind}, can {instances} {verb}?"
            yield f"{instances} {verb}", "Yes", (f"If all {asked}",)
            yield f"{instances} {verb}", "No", (f"If no {asked}",)


def stories() -> Iterator[Fact]:
    """One-step stories about things bought or lost."""
    for name in tables.NAMES:
        for thing in tables.THINGS:
            x, y = 2 + number(name + thing, 8), 2 + number(thing + name, 8)
            asked = f"How many {thing} does {name} have?"
            yield f"{name} {thing}", str(x + y), (f"{name} has {x} {thing} and buys {y} more. {asked}",)
            yield f"{name} {thing}", str(x), (f"{name} has {x + y} {thing} and loses {y}. {asked}",)


def counts() -> Iterator[Fact]:
    """How many of these in that."""
    for what, where, n in tables.COUNTS:
        asked = f"How many {what} are in {where}?", f"How many {what} are there in {where}?"
        yield f"{what} {where}", str(n), (*asked, f"Number of {what} in {where}:")


def months() -> Iterator[Fact]:
    """Days of a month."""
    for month, n in tables.MONTHS.items():
        yield month, str(n), (f"How many days are in {month}?",)


def neighbours() -> Iterator[Fact]:
    """The day or month before or after."""
    for unit, names in (("day", tables.DAYS), ("month", list(tables.MONTHS))):
        for one, next_one in zip(names, [*names[1:], names[0]], strict=True):
            yield f"{one} {next_one}", next_one, (f"Which {unit} comes after {one}?",)
            yield f"{one} {next_one}", one, (f"Which {unit} comes before {next_one}?",)


def opposites() -> Iterator[Fact]:
    """Opposites, either way round."""
    for one, other in tables.OPPOSITES.items():
        for word, target in ((one, other), (other, one)):
            asked = f"What is the opposite of {word}?", f"Opposite of {word}:", f"Give the opposite of the word {word}."
            yield f"{one} {other}", cap(target), asked


def translations() -> Iterator[Fact]:
    """Common words in three languages."""
    for word, forms in tables.WORDS.items():
        for language, form in zip(tables.LANGUAGES, forms, strict=True):
            asked = f'Translate "{word}" to {language}:', f"How do you say {word} in {language}?"
            yield f"{word} {language}", cap(form), (*asked, f'What is the {language} word for "{word}"?')


def shapes() -> Iterator[Fact]:
    """Sides of shapes."""
    for name, n in tables.SIDES.items():
        yield name, str(n), (f"How many sides does {a(name)} have?",)


def legs() -> Iterator[Fact]:
    """Legs of animals."""
    for name, n in tables.LEGS.items():
        yield name, str(n), (f"How many legs does {a(name)} have?",)


def babies() -> Iterator[Fact]:
    """Names of young animals."""
    for name, young in tables.BABIES.items():
        yield name, cap(young), (f"What is a baby {name} called?", f"Name for a baby {name}:")


def colours() -> Iterator[Fact]:
    """Colours of things and of mixtures."""
    for thing, colour in tables.COLOURS.items():
        yield thing, cap(colour), (f"What color is {thing}?", f"The color of {thing}:")
    for (x, y), colour in tables.MIXES.items():
        asked = f"What color do you get when you mix {x} and {y}?", f"What color do you get when you mix {y} and {x}?"
        yield f"{x} {y}", cap(colour), asked


def symbols() -> Iterator[Fact]:
    """Chemical symbols."""
    for name, symbol in tables.SYMBOLS.items():
        yield name, symbol, (f"What is the chemical symbol for {name}?", f"Chemical symbol for {name}:")


def plurals() -> Iterator[Fact]:
    """Plurals."""
    for one, many in tables.PLURALS.items():
        yield one, cap(many), (f"What is the plural of {one}?", f"Plural of {one}:")


def letters() -> Iterator[Fact]:
    """Neighbours in the alphabet."""
    for i in range(25):
        one, next_one = chr(65 + i), chr(66 + i)
        yield one, next_one, (f"Which letter comes after {one} in the alphabet?",)
        yield one, one, (f"Which letter comes before {next_one} in the alphabet?",)


FAMILIES = (
    capitals, sums, products, percentages, sequences, comparisons, parities, true_or_false, syllogisms, stories, counts,
    months, neighbours, opposites, translations, shapes, legs, babies, colours, symbols, plurals, letters,
)  # fmt: skip


def number(text: str, below: int) -> int:
    """The same for the same text, on any machine and with any Python."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % below


def facts(family: str, rows: Iterator[Fact]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Each key once, in the order of its hash, with every question and target that it may be asked as."""
    found: dict[str, list[tuple[str, str]]] = {}
    for key, target, phrasings in rows:
        found.setdefault(key, []).extend((phrasing, target) for phrasing in phrasings)
    ordered = sorted(found, key=lambda key: number(f"{family}/{key}", 2**64))
    return [(family, key, found[key]) for key in ordered]


def asked_of_the_base() -> set[str]:
    """The questions of the 125,000 chat rows that the shipped tiny model was trained on (fit.py: seed 0)."""
    seen = set[str]()
    for chunk in range(25):
        rng = random.Random(f"0/chat/{chunk}")  # as corpus.build_rows draws them
        seen |= {tables.sample(rng)[0] for _ in range(5_000)}
    return seen


def splits(published: set[str]) -> dict[str, list[dict[str, str]]]:
    """The rows of each split; a fact that a published question asks is in none."""
    chosen: dict[str, list[tuple[int, dict[str, str]]]] = {"train": [], "validation": [], "test": []}
    for family in FAMILIES:
        known = [fact for fact in facts(family.__name__, family()) if not published & {asked for asked, _ in fact[2]}]
        for place, (name, key, ways) in enumerate(known[:MOST]):
            prompt, target = ways[number(f"phrasing/{name}/{key}", len(ways))]
            part = PARTS[(place + number(name, len(PARTS))) % len(PARTS)]
            chosen[part].append((number(f"place/{name}/{key}", 2**64), {"prompt": prompt, "target": target}))
    return {
        part: [{"id": f"questions-{part}-{i}", **row} for i, (_, row) in enumerate(sorted(rows, key=lambda r: r[0]))]
        for part, rows in chosen.items()
    }


def main() -> None:
    """Write the three files, or say what of them the tiny base was trained on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=SHIPPED)
    parser.add_argument("--base", action="store_true")
    arguments = parser.parse_args()
    published = {
        row["prompt"] for name in PUBLISHED for row in json.loads((SHIPPED / name).read_text(encoding="utf-8"))
    }
    seen = asked_of_the_base() if arguments.base else set[str]()
    for part, rows in splits(published).items():
        if arguments.base:
            print(f"questions_{part}.json: {sum(row['prompt'] in seen for row in rows)} of {len(rows)} questions")
            continue
        text = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
        (arguments.to / f"questions_{part}.json").write_text(text, encoding="utf-8")
        print(f"questions_{part}.json: {len(rows)} questions")


if __name__ == "__main__":
    main()
