# SPDX-License-Identifier: Apache-2.0
r"""Tool calls: write the call of a function that does what a sentence asks, in JSON.

    reward = 0.25 json + 0.25 keys + 0.5 exact

`json`: the text is one JSON object, without repeated keys, NaN or Infinity. `keys`: it has exactly `name` and
`arguments`, the right name, and the right names of arguments, also in nested objects. `exact`: all values are right
too. A code fence around the whole text is taken off first; other text before or after the object earns 0. Numbers are
compared exactly (20 equals 20.0, and "20" equals neither), text letter by letter, and lists in order.

Training and validation rows use 8 of the functions in `tool_rows`, test rows all 12: the measures `seen` and `unseen`
are `exact` for either kind. A prompt has the rules, eight schemas, and the request. The schemas are those of the 8
functions; in test rows of unseen functions, those of four of them and of the four unseen ones. So all training prompts
have the same text before the request, as in an assistant with a fixed list of tools.

    evoalign train configs/tool_calls.yaml
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, cast

from evoalign.errors import DataError
from evoalign.rewards.objective import WeightedSum
from evoalign.tasks.base import Split
from evoalign.tasks.generated import Draw, Generated, texts_of
from evoalign.tasks.tool_rows import SCHEMAS, SEEN, UNSEEN
from evoalign.types import Example

_FENCE = re.compile(r"```[ \t]*(?:[A-Za-z][\w+-]*)?(?=[\s{])")
"""Beginning of a fence, with or without the name of a language."""
PROMPT = """Write the call that does what the request at the end asks, as one JSON object and nothing else:
{{"name": "FUNCTION", "arguments": {{...}}}}
Give every argument of the function. An argument that the request does not mention has its default. Dates are \
YYYY-MM-DD and times HH:MM (24 hours). Lists keep the order of the request. Copy text in quotes without the quotes.

You can call these functions:
{functions}

Request: {request}"""


class ToolCalls(Generated):
    """Rows of {request, functions, answer}: JSON texts of the schemas, one per line, and of the right call.

    In files, `functions` may also be a list of objects, and `answer` an object.
    """

    name = "tool_calls"
    names = ("json", "keys", "exact")
    weighted = WeightedSum({"json": 0.25, "keys": 0.25, "exact": 0.5})

    @classmethod
    def draw(cls, draw: Draw, split: Split) -> Example:
        is_unseen = split == "test" and draw.chance(50)
        function = draw.one(UNSEEN if is_unseen else SEEN)
        request, arguments = function.make(draw)
        return {
            "request": request,
            "functions": SCHEMAS[is_unseen],
            "answer": json.dumps({"name": function.name, "arguments": arguments}),
            "unseen": is_unseen,
        }

    @classmethod
    def key(cls, example: Example) -> str:
        return example["answer"]

    def text(self, example: Example) -> str:
        return PROMPT.format(functions=example["functions"], request=example["request"])

    def gold(self, example: Example) -> str:
        return example["answer"]

    def grade(self, text: str, example: Example) -> dict[str, float]:
        call, right = _call(text), _call(example["answer"])
        is_alike = call is not None and right is not None and _is_alike(call, right)
        return {
            "json": float(call is not None),
            "keys": float(is_alike),
            "exact": float(is_alike and _is_equal(call, right)),
        }

    def check(self, where: str, row: dict[str, Any]) -> Example:
        functions, answer = row.get("functions"), row.get("answer")
        if isinstance(functions, list):
            row = row | {"functions": "\n".join(map(json.dumps, cast("list[object]", functions)))}
        if isinstance(answer, dict):
            row = row | {"answer": json.dumps(answer)}
        texts_of(where, row, "request", "functions", "answer")
        call = _call(row["answer"])
        if call is None or call.keys() != {"name", "arguments"} or not isinstance(call["arguments"], dict):
            raise DataError(f'{where}: answer is {answer!r}; expected {{"name": .., "arguments": {{..}}}}')
        return row


def unfenced(text: str) -> str:
    """Return a text without white space around it, and without a code fence around the whole of it, on any line."""
    text = text.strip()
    fence = _FENCE.match(text)
    if fence is not None and text.endswith("```") and len(text) >= fence.end() + 3:
        return text[fence.end() : -3].strip()
    return text


@lru_cache(2048)  # members often give the same completion
def _call(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, with numbers as Decimal, or None."""
    try:
        found: object = json.loads(
            unfenced(text), object_pairs_hook=_object, parse_int=Decimal, parse_float=Decimal, parse_constant=_refuse
        )
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object. Raises ValueError for a repeated key, of which JSON would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is repeated")
    return found


def _refuse(constant: str) -> None:
    """Raise ValueError for NaN, Infinity and -Infinity, which are not JSON."""
    raise ValueError(constant)


def _is_alike(call: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether a call has the right name and the right names of arguments."""
    return (
        call.keys() == right.keys()
        and call["name"] == right["name"]
        and _has_names(call["arguments"], right["arguments"])
    )


def _has_names(value: object, right: object) -> bool:
    """Return whether an object has the right keys, and so have objects in it. True for values that are no objects."""
    if not isinstance(right, dict):
        return True
    if not isinstance(value, dict):
        return False
    mine, theirs = cast("dict[str, object]", value), cast("dict[str, object]", right)
    return mine.keys() == theirs.keys() and all(_has_names(mine[name], theirs[name]) for name in theirs)


def _is_equal(value: object, right: object) -> bool:
    """Return whether two JSON values are equal: true is not 1, and 20 is 20.0."""
    if type(value) is not type(right):
        return False
    if isinstance(right, dict):
        mine, theirs = cast("dict[str, object]", value), cast("dict[str, object]", right)
        return mine.keys() == theirs.keys() and all(_is_equal(mine[name], theirs[name]) for name in theirs)
    if isinstance(right, list):
        ours, wanted = cast("list[object]", value), cast("list[object]", right)
        return len(ours) == len(wanted) and all(map(_is_equal, ours, wanted))
    return value == right
