"""The reward: what a good answer is worth. Any Python will do; it needs no gradient.

A reward function is called with all completions of a generation at once. `prompts`, `completions` and each column of
prompts.jsonl, such as `answer`, are lists of the same length. It returns one finite number for each completion, higher
is better, or None where it has nothing to say. This is the form of TRL's reward functions, which work as they are.

Give partial credit: where all members of a population score the same, there is nothing to learn from.
"""

from typing import Any

ENOUGH = 20
"""Characters that a brief answer may have."""


def brief(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Minus 0.01 for each character too many, and minus 1 for no answer at all."""
    lengths = [len(completion.strip()) for completion in completions]
    return [-0.01 * max(0, length - ENOUGH) if length else -1.0 for length in lengths]


def right(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for naming the answer. Not in config.yaml yet: to add it, write rewards: [reward.py:brief, reward.py:right]."""
    pairs = zip(completions, answer, strict=True)
    return [1.0 if wanted.lower() in completion.lower() else 0.0 for completion, wanted in pairs]
