# SPDX-License-Identifier: Apache-2.0
"""Sums of large numbers with a calculator: an environment of TRL's form with one tool, `calculate`.

    reward = 1 if the final number of the last message is right, else 0

The numbers have four or five digits, so that a small model needs the tool. The calculator evaluates `+ - * /` and
parentheses exactly, without executing the text, and refuses everything else. The final number is read as in
`word_problems`. Measures: `calls`, the number of calls, and `refused`, the share of them that were refused.

    evoalign train configs/sums.yaml
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from evoalign import transcripts
from evoalign.errors import DataError
from evoalign.rewards.arithmetic import ExpressionError, evaluate_written
from evoalign.rewards.functions import RewardFunction
from evoalign.tasks.base import Data, Split
from evoalign.tasks.environment import Environment
from evoalign.tasks.generated import NAMES, Draw, distinct, generated, texts_of
from evoalign.tasks.word_problems import final_number
from evoalign.types import Example

INSTRUCTION = "Use the calculator. End with a line that says: The answer is NUMBER."
TEMPLATES = (
    ("What is {a} * {b}?", "{a} * {b}"),
    ("What is {a} * {b} + {c}?", "{a} * {b} + {c}"),
    ("What is {c} + {a} * {b}?", "{c} + {a} * {b}"),
    ("{name} packs {a} boxes with {b} screws each. How many screws are that?", "{a} * {b}"),
    ("A plant fills {a} bottles a day for {b} days. {c} bottles break. How many are left?", "{a} * {b} - {c}"),
    ("{name} has {c} stamps and buys {a} sheets of {b} stamps each. How many stamps are that?", "{c} + {a} * {b}"),
)
"""Questions and their expressions."""
MOST_DIGITS = 40
"""Most digits of a value that the calculator writes."""


class Calculator:
    """The environment: a calculator without a state."""

    def reset(self, **columns: Any) -> None:
        """Begin an episode."""

    def calculate(self, expression: str) -> str:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: Whole numbers with + - * / and parentheses, such as (12 + 3) * 4.

        Returns:
            The value.
        """
        try:
            value = evaluate_written(expression).value
        except ExpressionError as error:
            raise ValueError(f"The expression cannot be calculated: {error}.") from None
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_DIGITS * 3:
            raise ValueError(f"The value has more than about {MOST_DIGITS} digits.")
        return str(value) if value.denominator == 1 else f"{float(value):.10g}"


class Sums(Environment):
    """Rows of {question, answer}; `answer` is a number or its text."""

    name = "sums"
    max_reward = 1.0
    environment = Calculator

    @classmethod
    def draw(cls, draw: Draw, split: Split) -> Example:
        """Return one random row."""
        text, expression = draw.one(TEMPLATES)
        numbers = {"a": draw.number(1001, 9999), "b": draw.number(1001, 9999), "c": draw.number(10_001, 99_999)}
        question = text.format(name=draw.one(NAMES), **numbers)
        value = evaluate_written(expression.format(**numbers)).value
        return {"question": question, "answer": str(value), "expression": expression.format(**numbers)}

    @classmethod
    def rows(cls, split: Split, count: int, seed: int = 0) -> list[Example]:
        """Return the first `count` generated rows of a split."""
        return [_asked(row) for row in distinct(cls.draw, lambda row: row["question"], split, count, seed)]

    def loaded_functions(self, rewards: Sequence[Callable[..., Any]] | None) -> list[RewardFunction]:
        """Return the reward, `exact`."""
        return [RewardFunction(exact)]

    def load_data(self, seed: int) -> Data:
        """Return the generated rows, the same for every `seed`, or those of the config's files. Raises DataError."""
        has_files = any(self.config.files) or self.config.columns
        return super().load_data(seed) if has_files else generated(self.config, self.rows)

    def _check(self, where: str, row: dict[str, Any]) -> Example:
        row = row | {"answer": str(row.get("answer", ""))}
        texts_of(where, row, "question", "answer")
        if final_number(row["answer"]) is None:
            raise DataError(f"{where}: answer is {row['answer']!r}; expected a number")
        return super()._check(where, _asked(row))

    def gold(self, example: Example) -> str:
        """Return the text of an episode with one call, or without it for a row of a file without `expression`."""
        answer = {"role": "assistant", "content": f"The answer is {example['answer']}."}
        if "expression" not in example:
            return answer["content"]
        function = {"name": "calculate", "arguments": {"expression": example["expression"]}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        result = {"role": "tool", "name": "calculate", "content": example["answer"]}
        return transcripts.of_messages([call, result, answer])

    def is_right(self, text: str, example: Example) -> bool:
        return exact([transcripts.messages(text)], [example["answer"]]) == [1.0]

    def final_answer(self, text: str, example: Example) -> str | None:
        number = _last_number(transcripts.messages(text))
        return None if number is None else str(Fraction(number))

    def measures(self, text: str, example: Example) -> Mapping[str, float | None]:
        """Return `calls` and `refused`; `refused` is None without a call."""
        results = [message["content"] for message in transcripts.messages(text) if message["role"] == "tool"]
        refused = sum(result.startswith("{'error'") for result in results)
        return {"calls": float(len(results)), "refused": refused / len(results) if results else None}


def exact(completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 for episodes whose last message is the model's and has the right final number, else 0."""
    found = map(_last_number, completions)
    return [float(number == final_number(right)) for number, right in zip(found, answer, strict=True)]


def _last_number(messages: Sequence[Mapping[str, Any]]) -> Decimal | None:
    """Return the final number of the last message if that is the model's, or None."""
    last = messages[-1]
    text = last["content"] if last["role"] == "assistant" and "tool_calls" not in last else ""
    return None if len(text) > 20_000 else final_number(text)


def _asked(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "prompt": [{"role": "user", "content": f"{row['question']}\n\n{INSTRUCTION}"}]}
