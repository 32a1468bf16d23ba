# SPDX-License-Identifier: Apache-2.0
r"""MATH: questions of competitions, with answers in LaTeX (Hendrycks et al., arXiv 2103.03874).

Rows are {problem, solution, ...}, where the answer is in the last `\boxed{..}` of the solution, or {problem, answer,
...}, as those of MATH-500. Both prompts ask for the answer in `\boxed{}` and have no examples in them: `chat` (default)
with the sentence of the cards of Qwen2.5-Math and DeepSeek-R1, `raw` with that of verl's examples, for base models. The
last `\boxed{..}` of a completion is its answer.

What deviates: the paper compares texts after it has made them alike; here math-verify compares mathematics.
"""

from __future__ import annotations

import re

from evoalign.tasks.mathematics.answers import last_boxed
from evoalign.tasks.mathematics.questions import Questions
from evoalign.types import Example

_BARE = re.compile(r"\\boxed\s+([^\s$.,]+)")
"""`\\boxed 2`, as a few solutions have it."""


class Math(Questions):
    """See the module."""

    name = "math"
    columns_read = ("problem",)
    source = ("hub:DigitalLearningGmbH/MATH-lighteval:default:train", "hub:HuggingFaceH4/MATH-500:default:test")
    form = '{"problem": .., "solution": "... \\\\boxed{..}"} or {"problem": .., "answer": ..}'
    chat = "{}\nPlease reason step by step, and put your final answer within \\boxed{}."
    raw = "Problem: {}\nLet's think step by step and output the final answer within \\boxed{}.\nSolution:"

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
