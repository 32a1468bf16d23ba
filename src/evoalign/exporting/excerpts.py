# SPDX-License-Identifier: Apache-2.0
"""What a model card shows of a run itself: its figure, and what the model said before and after."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from evoalign.errors import cut
from evoalign.exporting.source import Member
from evoalign.report.tables import visible

FIGURE = "evolution.png"
MOST_SHOWN = 400
"""Characters of a prompt or a completion."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What was asked of the model, and what it said before and after, with the reward of each."""

    prompt: str
    before: str
    reward_before: float
    after: str
    reward_after: float


def excerpts(samples: Sequence[Sample], *, figure: bool) -> list[str]:
    """Lines of Markdown; none where there is neither."""
    lines = ["", f"![Reward over the generations of the whole run]({FIGURE})"] if figure else []
    if samples:
        lines += ["", f"The first {len(samples)} of the test split, whatever they earn; long texts are cut:"]
    for sample in samples:
        parts = {
            "prompt": sample.prompt,
            f"before, reward {sample.reward_before:.4g}": sample.before,
            f"after, reward {sample.reward_after:.4g}": sample.after,
        }
        for title, text in parts.items():
            lines += ["", f"*{title}*", "", *_block(text)]
    return lines


def member_line(member: Member, generation: int) -> str:
    """That these weights are no result of a run, and what the run measured of them."""
    return (
        f"\n**It is one member of a population, not the result of its run**: member {member.index} of the "
        f"{member.size} of generation {generation} (both counted from 0), which is the mean after {generation} "
        f"generations and this member's noise of sigma {member.sigma:g}. On the training examples of that generation "
        f"its fitness was {member.fitness:.4g}, that of the population {member.mean:.4g} in the mean; a member "
        "that is chosen for it is worse on others.\n"
    )


def _block(text: str) -> list[str]:
    """A text as it is, in a fence that it cannot end; nothing in it is read as Markdown or HTML."""
    short = cut(text, MOST_SHOWN)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", short)), default=0))
    return [f"{fence}text", *[visible(line) for line in short.split("\n")], fence]
