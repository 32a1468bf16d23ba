# SPDX-License-Identifier: Apache-2.0
"""The judge is asked for each judgment of a plan that is not there yet, several at a time, and each is written down."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoalign.analysis.judge.answers import Answers
from evoalign.analysis.judge.base import Judge, NoReplyError, NoRoomError
from evoalign.analysis.judge.rubrics import draw_mark, prompt_of, verdict
from evoalign.analysis.judge.transcript import Item, Transcript
from evoalign.errors import JudgeError, cut, plain

IN_A_ROW = 20
"""So many judgments without a reply, one after another: the judge is gone, and the rest is not asked in vain."""
NO_REPLY = "no reply"
"""Why a judgment has no scores of which the judge said nothing."""
CUT, NO_VERDICT = "the reply was cut off", "its last line is no verdict"
"""Why it has none of which the judge said something."""
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
    why = None if read else CUT if reply.is_cut else NO_VERDICT
    scores = read if read is None or item.order_ab else (read[1], read[0])
    transcript.add(item, scores, judge.hidden(reply.text), why)
    return None


def unanswered(transcript: Transcript) -> str | None:
    """How many judgments of a transcript have no reply, and why the last of them has none; None where all have one."""
    silent = [row for row in transcript.rows if row.get("why") == NO_REPLY]
    if not silent:
        return None
    return f"{len(silent):,} of {len(transcript.rows):,} judgments got no reply; the last: {_raw(silent[-1])}"


def _raw(row: Mapping[str, Any]) -> str:
    return plain(cut(str(row.get("raw")), MOST_WORDS))


def check_any(transcript: Transcript) -> None:
    """Raise JudgeError where no judgment of a transcript has scores."""
    if any(row["scores"] is not None for row in transcript.rows):
        return
    last = {str(row.get("why")): row for row in transcript.rows}
    more = {CUT: " (raise --max-tokens)", NO_VERDICT: " in the form asked for"}
    if NO_REPLY in last:
        more[NO_REPLY] = f", the last: {_raw(last[NO_REPLY])}"
    counts = Counter(str(row.get("why")) for row in transcript.rows).most_common()
    whys = "; ".join(f"{count:,}: {why}{more.get(why, '')}" for why, count in counts)
    raise JudgeError(
        f"no judgment has scores; {whys}. They are kept in {transcript.path}; put that right, and the same command "
        "with --again asks them once more"
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
