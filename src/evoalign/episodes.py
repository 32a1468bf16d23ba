# SPDX-License-Identifier: Apache-2.0
"""Completions of an engine, checked to be those requested, and episodes of several turns made of them.

All episodes take their turns together: one rollout for the first turns, one call for all replies, one rollout for the
second turns, and so on. So a turn's batch depends only on the members, the rows and the turns before.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from evoalign import transcripts
from evoalign.engines import Answering
from evoalign.engines.base import pairs_of
from evoalign.errors import EvoalignError
from evoalign.tasks.base import Task
from evoalign.tasks.likelihood import Likelihood
from evoalign.tokens import Tokens
from evoalign.types import Example, Member, Messages, Plan, Request, Rollout, Sampling

_sessions = itertools.count(1)


def new_session() -> int:
    """Return a number for `Request.session`."""
    return next(_sessions)


class LostError(EvoalignError):
    """An engine returned no completion for a (member, request), or one that was not requested."""

    def __init__(self, message: str, member: Member) -> None:
        super().__init__(message)
        self.member = member


def checked(rollouts: Iterator[Rollout], members: Sequence[Member], requests: Sequence[Request]) -> Iterator[Rollout]:
    """Yield rollouts as they come. Raises LostError for one that is missing, or was not requested."""
    left = {(m.index, r.index): m for m, r in pairs_of(members, requests)}
    for rollout in rollouts:
        key = (rollout.member.index, rollout.request)
        if left.pop(key, None) is None:
            raise LostError(f"the engine returned (member, request) {key}, which was not requested", rollout.member)
        yield rollout
    for key, member in left.items():
        raise LostError(f"the engine returned no completion for (member, request) {key}; nothing was scored", member)


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed as a hash of its parts, such as run seed, prompt and sample."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(slots=True)
class _Course:
    """The course of one episode."""

    member: Member
    first: Request
    example: Example
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    lengths: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Prompt tokens and generated tokens of each turn."""
    last: Rollout | None = None

    def take(self, rollout: Rollout, prompt_tokens: int) -> None:
        """Add a turn of the model."""
        self.last = rollout
        self.text = transcripts.join(self.text, rollout.text) if self.lengths else transcripts.clean(rollout.text)
        self.token_ids += rollout.token_ids
        self.lengths.append((prompt_tokens, len(rollout.token_ids)))

    def ended(self, *, at_limit: bool) -> Rollout:
        """Return the rollout of the whole episode."""
        assert self.last is not None
        return replace(
            self.last,
            request=self.first.index,
            token_ids=tuple(self.token_ids),
            text=self.text,
            finish_reason="length" if at_limit else self.last.finish_reason,
            logprobs=None,
            later=tuple(self.lengths[1:]),
        )


@dataclass(frozen=True)
class Turns:
    """Plays the episodes of a task whose replies are computed here; see `evoalign.types.Player`."""

    task: Task
    tokens: Tokens

    def play(self, engine: Answering, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Play the episodes of requests with all members of a plan, or with those that they name.

        An episode ends without a reply to its last turn, or with finish reason `length` at a limit of `task.episode` or
        of the engine's context. Raises LostError, RewardError.
        """
        limits, live, session = self.task.config.limits, dict[tuple[int, int], _Course](), new_session()
        for member, request in pairs_of(plan.members, requests):
            assert request.episode is not None
            live[member.index, request.index] = _Course(member, request, request.episode.example)
        asked = [replace(request, episode=None, session=session) for request in requests]
        while asked:
            lengths = {(r.member.index if r.member else None, r.index): len(r.prompt_ids) for r in asked}
            taken = list[_Course]()
            for rollout in checked(engine.rollout(plan, asked), plan.members, asked):
                course = live[rollout.member.index, rollout.request]
                course.take(
                    rollout, lengths.get((rollout.member.index, rollout.request)) or lengths[None, rollout.request]
                )
                taken.append(course)
            taken.sort(key=lambda course: (course.member.index, course.first.index))
            going = list[_Course]()
            for course, reply in zip(taken, self._replies(taken), strict=True):
                most = limits.tokens or limits.turns * course.first.sampling.max_tokens
                if reply:
                    course.text = transcripts.answered(course.text, reply)
                if reply and len(course.lengths) < limits.turns and len(course.token_ids) < most:
                    going.append(course)
                else:
                    yield course.ended(at_limit=bool(reply))
            asked, room = [], engine.context()
            for course, request in zip(going, self._requests(going, session), strict=True):
                if room is not None and len(request.prompt_ids) + request.sampling.max_tokens > room:
                    yield course.ended(at_limit=True)
                else:
                    asked.append(request)

    def _replies(self, taken: Sequence[_Course]) -> list[list[transcripts.Message]]:
        """Return the messages after each episode's last turn, with that turn; empty where the episode ends."""
        turns = [self._turn(transcripts.turns(course.text)[-1]) for course in taken]
        open_ = [i for i, (_, error) in enumerate(turns) if not error]
        texts = [transcripts.answered(taken[i].text, [turns[i][0]]) for i in open_]
        found = iter(self.task.replies(texts, [taken[i].example for i in open_])) if open_ else iter(())
        replies = list[list[transcripts.Message]]()
        for turn, error in turns:
            if error:
                replies.append([turn, {"role": "user", "content": error}])  # a tool's needs a call in some templates
            else:
                reply = next(found)
                replies.append([] if reply is None else [turn, *reply])
        return replies

    def _turn(self, text: str) -> tuple[transcripts.Message, str]:
        """Return a turn of the model as a message, and why its tool call cannot be read, or an empty string."""
        if not self.task.tools:
            return {"role": "assistant", "content": text}, ""
        turn = self.tokens.read_turn(text, self.task.tools)
        if turn.error or not turn.calls:
            return {"role": "assistant", "content": text}, turn.error
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in turn.calls]
        return {"role": "assistant", "content": turn.content, "tool_calls": calls}, ""

    def _requests(self, going: Sequence[_Course], session: int) -> list[Request]:
        """Return the requests of the next turns. All members sample one with the same random numbers."""
        chats = dict[tuple[int, str], Messages]()  # many members have said the same
        for course in going:
            key = (id(course.example), course.text)
            if key not in chats:
                prompt = cast(Messages, self.task.prompt(course.example))
                chats[key] = [*prompt, *transcripts.messages(course.text)]
        found = dict(zip(chats, self.tokens.encode_all(list(chats.values()), self.task.tools), strict=True))
        return [
            replace(
                course.first,
                prompt_ids=found[id(course.example), course.text],
                seed=derive_seed(course.first.seed, "turn", len(course.lengths)),
                member=course.member,
                episode=None,
                session=session,
            )
            for course in going
        ]


@dataclass(frozen=True)
class Given:
    """Scores the completions that a task gives, with a stop token at the end; see `evoalign.types.Player`."""

    task: Likelihood
    tokens: Tokens

    def play(self, engine: Answering, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Yield rollouts whose text is the mean log-probability of the given tokens. Raises EvoalignError."""
        given = {r.index: self._ids(r) for r in requests}
        sampling = Sampling(max(map(len, given.values())))
        asked = [replace(r, episode=None, given=given[r.index], logprobs=True, sampling=sampling) for r in requests]
        for rollout in engine.rollout(plan, asked):
            if rollout.token_ids != given[rollout.request] or rollout.logprobs is None:
                raise EvoalignError(
                    f"task {self.task.name}: the engine generated a completion and did not score the given one; set "
                    "engine.name transformers and engine.decoder library"
                )
            yield replace(rollout, text=repr(math.fsum(rollout.logprobs) / len(rollout.logprobs)))

    def _ids(self, request: Request) -> tuple[int, ...]:
        assert request.episode is not None
        ids, end = self.tokens.encode_text(self.task.given(request.episode.example)), self.tokens.tokenizer.eos_token_id
        return ids if end is None else (*ids, end)
