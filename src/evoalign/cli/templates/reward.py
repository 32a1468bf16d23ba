"""The reward: what a good answer is worth. Any Python will do; it needs no gradient.

A reward function is called with all completions of a generation at once. `prompts`, `completions` and each column of
prompts.jsonl, such as `answer`, are lists of the same length. It returns one finite number for each completion, higher
is better, or None where it has nothing to say. This is the form of TRL's reward functions, which work as they are.

Ask for all that you want: a reward for brevity alone is earned by brief nonsense. Give partial credit: where all
members of a population score the same, there is nothing to learn from.
"""

import re
from typing import Any

ENOUGH = 20
"""Characters that a brief answer may have."""


def alone(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the answer alone, 0.5 for the answer among other words, 0 without it."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        is_alone = completion.strip(" .\n").lower() == wanted.lower()
        among = re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", completion, re.IGNORECASE)
        scores.append(1.0 if is_alone else 0.5 if among else 0.0)
    return scores


def brief(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Minus 0.01 for each character too many."""
    return [-0.01 * max(0, len(completion.strip()) - ENOUGH) for completion in completions]
