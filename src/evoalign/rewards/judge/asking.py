# SPDX-License-Identifier: Apache-2.0
"""The judge is asked for each judgment of a plan that is not there yet, several at a time, and each is written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evoalign.errors import JudgeError, cut, plain
from evoalign.rewards.judge.answers import Answers
from evoalign.rewards.judge.base import Judge, NoReplyError, NoRoomError
from evoalign.rewards.judge.rubrics import draw_mark, prompt_of, verdict
from evoalign.rewards.judge.transcript import Item, Transcript

IN_A_ROW = 20
"""So many judgments without a reply, one after another: the judge is gone, and the rest is not asked in vain."""
NO_REPLY = "no reply"
"""Why a judgment has no scores of which the judge said nothing."""
MOST_WORDS = 300
"""Characters of the reason that a message says again."""
LETTERS = 4
"""Of a token, about, in English."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What is still to be asked: requests, and tokens by their letters, which another tokenizer counts otherwise."""

    requests: int
    done: int
    asked_tokens: int
    most_said_tokens: int

    def __str__(self) -> str:
        there = f", {self.done:,} are there" if self.done else ""
        return (
            f"{self.requests:,} requests{there}: about {self.asked_tokens:,} tokens to read ({LETTERS} letters each) "
            f"and at most {self.most_said_tokens:,} to write"
        )


def cost_of(items: Sequence[Item], done: int, max_tokens: int) -> Cost:
    """Before retries."""
    letters = sum(len(prompt_of(i.dimension, i.question, *i.shown, "0" * 8)) for i in items)
    return Cost(len(items), done, letters // LETTERS, len(items) * max_tokens)


def ask(judge: Judge, transcript: Transcript, told: Callable[[], None]) -> None:
    """Until nothing is left; `told` is called after each. Raises JudgeError, with all that came before written down."""
    with transcript.opened():
        try:
            asyncio.run(_all(judge, transcript, told))
        except ExceptionGroup as failed:  # the first of those that work side by side says it
            raise failed.exceptions[0] from None


async def _all(judge: Judge, transcript: Transcript, told: Callable[[], None]) -> None:
    items, silent = iter(transcript.left()), 0

    async def work(items: Iterator[Item]) -> None:
        nonlocal silent
        for item in items:
            why = await _one(judge, item, transcript)
            silent = silent + 1 if why else 0
            told()
            if silent >= IN_A_ROW:
                raise JudgeError(
                    f"the judge gave no reply to {silent} questions in a row; the last time: {why}. They are written "
                    "down without scores: the same command goes on after them, and with --again asks them once more"
                )

    async with judge.opened(), asyncio.TaskGroup() as tasks:
        for _ in range(judge.concurrency):
            tasks.create_task(work(items))


async def _one(judge: Judge, item: Item, transcript: Transcript) -> str | None:
    """Ask, read and write down one judgment; why the judge gave no reply, where it may be gone."""
    first, second = item.shown
    mark = draw_mark(item.question, first, second)
    try:
        reply = await judge.ask(prompt_of(item.dimension, item.question, first, second, mark))
    except NoReplyError as error:
        transcript.add(item, None, str(error), NO_REPLY)
        return None if isinstance(error, NoRoomError) else str(error)
    read = None if reply.is_cut else verdict(reply.text, mark)
    why = None if read else "the reply was cut off" if reply.is_cut else "its last line is no verdict"
    scores = read if read is None or item.order_ab else (read[1], read[0])
    transcript.add(item, scores, judge.hidden(reply.text), why)
    return None


def unanswered(transcript: Transcript) -> str | None:
    """How many judgments of a transcript have no reply, and why the last of them has none; None where all have one."""
    silent = [row for row in transcript.rows if row.get("why") == NO_REPLY]
    if not silent:
        return None
    last = plain(cut(str(silent[-1].get("raw")), MOST_WORDS))
    return f"{len(silent):,} of {len(transcript.rows):,} judgments got no reply; the last: {last}"


def check_any(transcript: Transcript) -> None:
    """Raise JudgeError where no judgment of a transcript has scores."""
    if any(row["scores"] is not None for row in transcript.rows):
        return
    why = unanswered(transcript) or "the judge replied, and no reply ends with a verdict in the form asked for"
    raise JudgeError(
        f"no judgment has scores: {why}. They are kept in {transcript.path}; put right what is wrong with the judge, "
        "and the same command with --again asks them once more"
    )


def same_as_scorer(judge: str, models: Sequence[Answers]) -> list[str]:
    """A warning for each model that was trained by the judge's own scores, by the names in the runs' configs."""
    return [
        f"{model.name} was trained by the scores of {scorer}, which is the judge: it was trained to please it; "
        "ask another judge"
        for model in models
        for scorer in model.scorers
        if _is_same(scorer, judge)
    ]


def _is_same(one: str, other: str) -> bool:
    if Path(one).is_dir() and Path(other).is_dir():
        return Path(one).samefile(other)
    return one.rstrip("/").lower() == other.rstrip("/").lower()
