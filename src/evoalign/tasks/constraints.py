# SPDX-License-Identifier: Apache-2.0
"""Verifiable constraints: write a text on a topic that keeps one to three rules, after IFEval (arXiv 2311.07911).

    reward = 0.5 share + 0.5 all

`share` is the share of the constraints that the text meets, and `all` is 1 if it meets all. There are eight kinds, see
`KINDS`. A text of fewer than ten words meets none: the prompt demands them, since otherwise an empty text would keep
many rules. Deviations from IFEval: 8 of its 25 kinds, its strict grading alone, and bounds on lengths near to what is
usual. Whether the text is about its topic is not graded; read some texts before you use a model.

    evoalign train configs/constraints.yaml
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from evoalign.errors import DataError
from evoalign.rewards.objective import WeightedSum
from evoalign.tasks.base import Split
from evoalign.tasks.generated import Draw, Generated, texts_of
from evoalign.types import Example

Constraint: TypeAlias = dict[str, Any]
"""`kind`, a key of `KINDS`, and `value`, its number or text."""
FEWEST = 10
"""Words that every text must have."""
MOST = 3
"""Constraints of a row."""
TOPICS = (
    "a walk by the sea", "a rainy day in a city", "how bread is made", "why people keep cats", "a train at night",
    "the first day at a new school", "growing tomatoes", "a broken bicycle", "the moon", "a visit to the dentist",
    "cooking for friends", "a small bakery", "learning to swim", "the sound of the wind", "a lost umbrella",
    "an old library", "painting a room", "bees in a garden", "a long bus ride", "winter in the mountains",
)  # fmt: skip
FORMS = ("Write a short text about {}.", "Describe {}.", "Tell me something about {}.", "Write a post about {}.")
WORDS = ("river", "window", "market", "silver", "letter", "garden", "summer", "coffee", "bridge", "morning")
"""Words that a text must include."""
COMMON = ("the", "and", "is", "of", "it", "in", "with")
"""Words that a text must avoid."""
ENDINGS = ("That is all for now", "Thank you for reading", "See you next time", "And so it goes")
EXCLUDE = {"bullets": {"paragraphs", "quoted"}, "ending": {"quoted", "forbidden"}}
"""Kinds that are not combined, since one would break the other or leave open where its text has to be."""
CHOICES: Mapping[str, Sequence[object]] = {"words": ("most", "least"), "case": ("lower", "upper")}
"""Allowed values of kinds that have few, or of the first item of their value."""
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_PART = re.compile(r"[^\W_]+(?:-[^\W_]+)*")
_BULLET = re.compile(r"^[ \t]*[-*•](?:[ \t].*)?$", re.MULTILINE)
_QUOTES = ('""', "“”")


class Constraints(Generated):
    """Rows of {request, constraints}: a text and a list of objects with `kind` and `value`."""

    name = "constraints"
    names = ("share", "all")
    correctness = "all"
    weighted = WeightedSum({"share": 0.5, "all": 0.5})

    @classmethod
    def draw(cls, draw: Draw, split: Split) -> Example:
        kinds = list[str]()
        for kind in draw.some(list(KINDS), len(KINDS)):
            if not any(kind in EXCLUDE.get(other, ()) or other in EXCLUDE.get(kind, ()) for other in kinds):
                kinds.append(kind)
        constraints = [{"kind": kind, "value": KINDS[kind][0](draw)} for kind in kinds[: draw.number(1, MOST)]]
        return {"request": draw.one(FORMS).format(draw.one(TOPICS)), "constraints": constraints}

    @classmethod
    def key(cls, example: Example) -> str:
        return " ".join([example["request"], *map(rule, example["constraints"])])

    def text(self, example: Example) -> str:
        rules = "\n".join(f"- {rule(constraint)}" for constraint in example["constraints"])
        return f"{example['request']} Keep to these rules:\n{rules}\nWrite only the text, of {FEWEST} words or more."

    def gold(self, example: Example) -> str:
        """Return a text without sense that keeps the rules."""
        return written({constraint["kind"]: constraint["value"] for constraint in example["constraints"]})

    def grade(self, text: str, example: Example) -> dict[str, float]:
        constraints = cast("list[Constraint]", example["constraints"])
        is_text = len(_WORD.findall(text)) >= FEWEST
        met = [is_text and KINDS[one["kind"]][2](text.strip(), one["value"]) for one in constraints]
        return {"share": sum(met) / len(met), "all": float(all(met))}

    def check(self, where: str, row: dict[str, Any]) -> Example:
        texts_of(where, row, "request")
        constraints = row.get("constraints")
        if not isinstance(constraints, list) or not constraints:
            raise DataError(f"{where}: constraints is {constraints!r}; expected a list of {{kind, value}}")
        for one in cast("list[object]", constraints):
            if not isinstance(one, dict) or one.keys() != {"kind", "value"} or one["kind"] not in [*KINDS]:
                raise DataError(f"{where}: {one!r} is no constraint; expected kind ({', '.join(KINDS)}) and value")
            example, first = KINDS[one["kind"]][0](Draw(0)), _items(one["value"])[:1]
            wrong = first[0] not in CHOICES.get(one["kind"], first) if first else True
            if wrong or [*map(type, _items(one["value"]))] != [*map(type, _items(example))]:
                raise DataError(
                    f"{where}: the value of {one['kind']} is {one['value']!r}; expected one like {example!r}"
                )
        return row


def _items(value: object) -> list[object]:
    """Return the items of a list, or a list of another value."""
    return cast("list[object]", value) if isinstance(value, list) else [value]


def rule(constraint: Constraint) -> str:
    """Return the sentence of a constraint."""
    return KINDS[constraint["kind"]][1](constraint["value"])


def words_in(text: str) -> list[str]:
    """Return the words of a text in lower case: letters and digits, also with a hyphen inside.

    An apostrophe ends a word: "it's" has the word "it", and "river's" the word "river"; "riverside" and "river-bed" do
    not have it.
    """
    return [word.lower() for word in _PART.findall(text)]


def bulleted(text: str, count: int) -> bool:
    """Return whether a text has this many bullet points, all on lines that begin with "- ", with text after it."""
    found = _BULLET.findall(text)
    return len(found) == count and all(line.startswith("- ") and line[2:].strip() for line in found)


def ends_with(text: str, words: str) -> bool:
    """Return whether a text ends with these words, in any case. Punctuation, markdown and emojis may follow."""
    return re.search(rf"(?<![^\W_]){re.escape(words)}[\W_]*\Z", text, re.IGNORECASE) is not None


def blocks(text: str) -> int:
    """Return the number of paragraphs: lines with text, without blank lines between them."""
    lines = [bool(line.strip()) for line in text.splitlines()]
    return sum(line and not before for line, before in zip(lines, [False, *lines], strict=False))


def _length(draw: Draw) -> list[Any]:
    is_most = draw.chance(50)
    return ["most", draw.number(20, 45, 5)] if is_most else ["least", draw.number(60, 120, 10)]


def _keeps_length(text: str, value: Sequence[Any]) -> bool:
    count = len(_WORD.findall(text))
    return count <= value[1] if value[0] == "most" else count >= value[1]


def _no_case(value: str) -> str:
    return f"Write everything in {value} case, without any {'capital' if value == 'lower' else 'small'} letter."


KINDS: Mapping[str, tuple[Callable[[Draw], Any], Callable[[Any], str], Callable[[str, Any], bool]]] = {
    "words": (_length, lambda value: f"Use at {value[0]} {value[1]} words.", _keeps_length),
    "bullets": (
        lambda draw: draw.number(2, 6),
        lambda value: f'Include exactly {value} bullet points, each on a line that begins with "- ".',
        bulleted,
    ),
    "keyword": (
        lambda draw: [draw.one(WORDS), draw.number(1, 3)],
        lambda value: f'Include the word "{value[0]}" at least {value[1]} time{"" if value[1] == 1 else "s"}.',
        lambda text, value: words_in(text).count(value[0].lower()) >= value[1],
    ),
    "forbidden": (
        lambda draw: draw.one(COMMON),
        lambda value: f'Do not use the word "{value}".',
        lambda text, value: value.lower() not in words_in(text),
    ),
    "case": (
        lambda draw: draw.one(("lower", "upper")),
        _no_case,
        lambda text, value: text == (text.lower() if value == "lower" else text.upper()),
    ),
    "ending": (
        lambda draw: draw.one(ENDINGS),
        lambda value: f'End with the words "{value}", with no other words after them.',
        ends_with,
    ),
    "quoted": (
        lambda draw: True,
        lambda value: "Put the whole text in double quotes.",
        lambda text, value: len(text) > 2 and text[0] + text[-1] in _QUOTES,
    ),
    "paragraphs": (
        lambda draw: draw.number(2, 5),
        lambda value: f"Write exactly {value} paragraphs, with a blank line between them.",
        lambda text, value: blocks(text) == value,
    ),
}
"""Kinds of constraints: a random value, the sentence in the prompt, and whether a text meets it."""


def written(values: Mapping[str, Any]) -> str:
    """Return a text that meets constraints, at most one of each kind."""
    words = ["so"] * FEWEST
    keyword, times = values.get("keyword", ("", 0))
    words += [keyword] * times
    relation, count = values.get("words", ("least", 0))
    words += ["so"] * (count - len(words) if relation == "least" else 0)
    parts = int(values.get("bullets") or values.get("paragraphs") or 1)
    pieces = [" ".join(words[i::parts]) for i in range(parts)]
    text = "\n".join(f"- {piece}" for piece in pieces) if "bullets" in values else "\n\n".join(pieces)
    text += f" {values['ending']}" if "ending" in values else ""
    case = values.get("case")
    text = text.lower() if case == "lower" else text.upper() if case == "upper" else text
    return f'"{text}"' if "quoted" in values else text
