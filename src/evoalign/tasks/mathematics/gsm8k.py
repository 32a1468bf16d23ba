# SPDX-License-Identifier: Apache-2.0
r"""GSM8K: grade school questions, each with a number as its answer (Cobbe et al., arXiv 2110.14168).

Rows are {question, answer}, and an answer ends in `#### 72`. The prompts have no examples in them, as those of work on
reinforcement learning: `chat` (default) asks for the answer in `\boxed{}`, by the sentence that the cards of
Qwen2.5-Math and DeepSeek-R1 give and that instruction-tuned models know; `raw`, for base models, asks for it after
`####`, as verl's examples do. Whatever was asked, the last of `\boxed{..}` and `####` in a completion is its answer.

What deviates: published graders compare digits; here `$1,200`, `1200.00` and `\frac{2400}{2}` are 1200, and a unit
after the number is passed over. `6 million` and `6k`, of which they read the 6, are 6,000,000 and 6,000 here.
"""

from __future__ import annotations

import re

from evoalign.tasks.mathematics.answers import MOST_CHARACTERS, last_boxed, written_out
from evoalign.tasks.mathematics.questions import Questions
from evoalign.types import Example

MARK = "####"
_WITH_UNIT = re.compile(
    r"([-+]?\s*\\?[$€£]?\s*[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+))\s*"
    r"(?:\\?%|\\text\{[^{}]*\}|[A-Za-z][A-Za-z ./]*)?\.?"
)
"""A number, and what may stand behind it. No exponent, no operator, no further number."""


_THOUSANDS = re.compile(r"(\d)\s*[kK](?![A-Za-z])")


class Gsm8k(Questions):
    """See the module."""

    name = "gsm8k"
    columns_read = ("question", "answer")
    source = ("hub:openai/gsm8k:main:train", "hub:openai/gsm8k:main:test")
    form = '{"question": .., "answer": "... #### 72"}'
    chat = "{}\nPlease reason step by step, and put your final answer within \\boxed{}."
    raw = 'Question: {}\nLet\'s think step by step and output the final answer after "####".\nAnswer:'

    def right(self, example: Example) -> str | None:
        return _number(_marked(example["answer"]))

    def final(self, text: str) -> str | None:
        boxed, mark = last_boxed(text), text.rfind(MARK)
        return _number(_marked(text) if boxed is None or mark > boxed[0] else boxed[1].strip())

    def gold(self, example: Example) -> str:
        return f"{MARK} {self.right(example)}"


def _number(found: str | None) -> str | None:
    """An answer without what stands around its number, where it is one; None for none."""
    if not found or len(found) > MOST_CHARACTERS:
        return found or None
    found = written_out(_THOUSANDS.sub(r"\1 thousand", found))
    number = _WITH_UNIT.fullmatch(found)
    return found if number is None else re.sub(r"[\s\\$€£+]", "", number[1])


def _marked(text: str) -> str | None:
    """What stands after the last mark, on its line; None where that is nothing."""
    _, mark, after = text.rpartition(MARK)
    line = after.strip().partition("\n")[0].strip() if mark else ""
    return line or None
