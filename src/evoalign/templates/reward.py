"""The reward: what a good answer is worth. Any Python will do; it needs no gradient."""

from typing import Any


def brief_and_right(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for naming the right answer, minus 0.01 for each character more than it needs.

    Called with all completions of a generation at once; `prompts`, `completions` and each column of prompts.jsonl,
    such as `answer`, are lists of the same length. Returns one finite number for each completion, higher is better,
    or None where this reward has nothing to say. This is the form of TRL's reward functions, which can be used as
    they are.

    Give partial credit: where all members of a population score the same, there is nothing to learn from.
    """
    return [_reward(completion.strip(), right) for completion, right in zip(completions, answer, strict=True)]


def _reward(text: str, right: str) -> float:
    found = 1.0 if right.lower() in text.lower() else 0.0
    return found - 0.01 * max(0, len(text) - len(right))
