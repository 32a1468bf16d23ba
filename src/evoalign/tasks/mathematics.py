# SPDX-License-Identifier: Apache-2.0
r"""GSM8K (Cobbe et al., arXiv 2110.14168) and MATH (Hendrycks et al., arXiv 2103.03874).

GSM8K rows are {question, answer}, and an answer ends in `#### 72`. MATH rows are {problem, solution, ...}, with the
answer in the last `\boxed{..}` of the solution, or {problem, answer, ...} as in MATH-500. Prompts contain no examples.
`chat` (default) asks for the answer in `\boxed{}` with the sentence of the model cards of Qwen2.5-Math and DeepSeek-R1;
`raw`, for base models, is the prompt of verl's examples, which for GSM8K asks for the answer after `####`. The answer
of a completion is its last `\boxed{..}`, and for GSM8K also `####` if that comes later.

Deviations: for GSM8K, published graders compare digits; here `$1,200`, `1200.00` and `\frac{2400}{2}` equal 1200, a
unit after the number is ignored, and `6 million` and `6k` are 6,000,000 and 6,000 instead of 6. For MATH, the paper
compares normalised text; here math-verify compares mathematics. A decimal is exactly the number that it writes (0.333
is not 1/3), but a gold answer of three or more significant digits is taken as rounded, as Minerva's are, for numbers
that no decimal writes (1/12 is right for 0.0833, and 12.46 is not 12.5). Units are compared if both answers have one, a
list without brackets has no order but has repetitions, and a numeral in another base equals only itself. `answer` may
be a number (142.0, AMC) or a list of texts (["9.6"], OlympiadBench).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, DataError
from evoalign.tasks import answers, data
from evoalign.tasks.answers import MOST_CHARACTERS, last_boxed, written_out
from evoalign.tasks.base import Data, Task
from evoalign.types import Example, Prompt
from evoalign.version import install

MARK = "####"
CHAT = "{}\nPlease reason step by step, and put your final answer within \\boxed{}."
_WITH_UNIT = re.compile(
    r"([-+]?\s*\\?[$€£]?\s*[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+))\s*"
    r"(?:\\?%|\\text\{[^{}]*\}|[A-Za-z][A-Za-z ./]*)?\.?"
)
"""A number and its unit, without exponents, operators or further numbers."""
_THOUSANDS = re.compile(r"(\d)\s*[kK](?![A-Za-z])")
_BARE = re.compile(r"\\boxed\s+([^\s$.,]+)")
"""`\\boxed 2`, as in a few solutions."""


class Questions(Task):
    """Questions with one right answer: reward 1.0 if the final answer equals it as mathematics, else 0.0."""

    max_reward = 1.0
    correctness = "reward"
    isolated = True
    per_call = 8  # a comparison may take seconds
    takes_system_prompt = True
    forms = ("chat", "raw")
    columns_read: ClassVar[tuple[str, ...]]
    """Required columns; the first one is the question."""
    source: ClassVar[tuple[str, str]]
    """Default training and test data."""
    form: ClassVar[str]
    """Published form of a row, for error messages."""
    raw: ClassVar[str]
    """Prompt for `task.prompt: raw`, with {} for the question."""

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        if find_spec("math_verify") is None:
            raise ConfigError(f"task {self.name} compares answers by math-verify: {install('math')}")

    @abstractmethod
    def right(self, example: Example) -> str | None:
        """Return the right answer of a row, or None."""

    @abstractmethod
    def final(self, text: str) -> str | None:
        """Return the final answer of a completion, or None."""

    def as_text(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with its answer as text."""
        return row

    def load_data(self, seed: int) -> Data:
        """Load the files of the config, or the published splits of the hub. Raises DataError."""
        return data.load(self.config, seed, self._check, self.source, f"rows of {self.form}")

    def prompt(self, example: Example) -> Prompt:
        question = example[self.columns_read[0]]
        if self.config.prompt == "raw":
            return self.raw.replace("{}", question, 1)
        return self.with_system([{"role": "user", "content": CHAT.replace("{}", question, 1)}])

    def compute_reward(self, text: str, example: Example) -> float:
        answer, right = self.final(text), self.right(example)
        return float(answer is not None and right is not None and answers.is_equal(answer, right))

    def is_right(self, text: str, example: Example) -> bool:
        return self.compute_reward(text, example) == 1.0

    def final_answer(self, text: str, example: Example) -> str | None:
        answer = self.final(text)
        return None if answer is None or len(answer) > MOST_CHARACTERS else answers.canonical(answer)

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """Return `accuracy` and `answered`: whether the completion has a final answer."""
        return {"accuracy": self.compute_reward(text, example), "answered": float(self.final(text) is not None)}

    def _check(self, where: str, row: dict[str, Any]) -> Example:
        if not row.keys() >= set(self.columns_read):
            raise data.lacking(where, row, self.config, f"expected {self.form}", *self.columns_read)
        row = self.as_text(row)
        for column in self.columns_read:
            if not isinstance(row[column], str) or not row[column].strip():
                raise DataError(f"{where}: no text in {column}; expected {self.form}")
        if self.right(row) is None:
            raise DataError(f"{where}: it has no final answer; expected {self.form}")
        return row


class Gsm8k(Questions):
    """GSM8K; see the module."""

    name = "gsm8k"
    columns_read = ("question", "answer")
    source = ("hub:openai/gsm8k:main:train", "hub:openai/gsm8k:main:test")
    form = '{"question": .., "answer": "... #### 72"}'
    raw = 'Question: {}\nLet\'s think step by step and output the final answer after "####".\nAnswer:'

    def right(self, example: Example) -> str | None:
        return _number(_marked(example["answer"]))

    def final(self, text: str) -> str | None:
        boxed, mark = last_boxed(text), text.rfind(MARK)
        return _number(_marked(text) if boxed is None or mark > boxed[0] else boxed[1].strip())

    def gold(self, example: Example) -> str:
        return f"{MARK} {self.right(example)}"


def _number(found: str | None) -> str | None:
    """Return an answer without the unit and signs around its number; None for an empty one."""
    if not found or len(found) > MOST_CHARACTERS:
        return found or None
    found = written_out(_THOUSANDS.sub(r"\1 thousand", found))
    number = _WITH_UNIT.fullmatch(found)
    return found if number is None else re.sub(r"[\s\\$€£+]", "", number[1])


def _marked(text: str) -> str | None:
    """Return the rest of the line after the last mark, or None."""
    _, mark, after = text.rpartition(MARK)
    line = after.strip().partition("\n")[0].strip() if mark else ""
    return line or None


class Math(Questions):
    """MATH; see the module."""

    name = "math"
    columns_read = ("problem",)
    source = ("hub:DigitalLearningGmbH/MATH-lighteval:default:train", "hub:HuggingFaceH4/MATH-500:default:test")
    form = '{"problem": .., "solution": "... \\\\boxed{..}"} or {"problem": .., "answer": .. (text, number or list)}'
    raw = "Problem: {}\nLet's think step by step and output the final answer within \\boxed{}.\nSolution:"

    def as_text(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with `answer` as text: the number 142.0 of AMC is 142, a list of OlympiadBench is joined."""
        given: Any = row.get("answer")
        parts: list[Any] = given if isinstance(given, list) else [given]
        kinds = (str, int, float)
        if not parts or any(type(part) not in kinds or part != part for part in parts):  # NaN is not itself
            return row
        whole = (int(p) if isinstance(p, float) and p.is_integer() else p for p in parts)
        return row | {"answer": ", ".join(str(part).strip() for part in whole)}

    def right(self, example: Example) -> str | None:
        answer, solution = example.get("answer"), example.get("solution")
        if isinstance(answer, str) and answer.strip():
            return answer.strip()
        if not isinstance(solution, str):
            return None
        bare = _BARE.findall(solution)
        return self.final(solution) or (bare[-1] if bare else None)

    def final(self, text: str) -> str | None:
        found = last_boxed(text)
        return (found[1].strip() or None) if found is not None else None

    def gold(self, example: Example) -> str:
        return f"\\boxed{{{self.right(example)}}}"
