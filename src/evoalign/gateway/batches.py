# SPDX-License-Identifier: Apache-2.0
"""Requests of harnesses, answered by an engine in batches."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from evoalign.engines import Answering
from evoalign.episodes import checked, derive_seed
from evoalign.errors import ModelError, RefusedError
from evoalign.gateway.chat import Answer, Chat
from evoalign.tokens import Tokens
from evoalign.types import Member, Plan, Request, Rollout, Sampling

T = TypeVar("T")
WINDOW = 0.05
"""Seconds without a further request after which a batch begins, while others may come."""
TOO_LONG = "context_length_exceeded"
"""Code of a refusal after which harnesses end an episode and score it."""
LIMIT = "This model's maximum context length"
"""Beginning of its message: some clients go by these words."""
COLDEST = 1e-6
"""Temperatures below this are greedy decoding."""


@dataclass(eq=False, slots=True)
class Asked:
    """One request that waits for the engine. `sampling` and `seed` are what the request leaves open."""

    member: Member
    chat: Chat
    sampling: Sampling
    seed: int
    session: int
    order: tuple[int, ...]
    """Place in a batch, the same whatever arrives first."""
    most: int | None
    """Most tokens of a completion, whatever the request sets; None: those that the engine's context has room for."""
    loop: asyncio.AbstractEventLoop
    reply: asyncio.Future[list[Answer]]
    done: Callable[[int, Sequence[Rollout]], None] = field(default=lambda _, __: None)
    """Called with the number of prompt tokens and the completions, before the harness gets them."""

    def answer(self, found: list[Answer] | Exception) -> None:
        """Send the completions, or an error. Nothing is sent to a client that is gone."""

        def settle() -> None:
            if not self.reply.done():
                self.reply.set_exception(found) if isinstance(found, Exception) else self.reply.set_result(found)

        with suppress(RuntimeError):  # the server has closed
            self.loop.call_soon_threadsafe(settle)


def answered(
    engine: Answering,
    plan: Plan,
    tokens: Tokens,
    events: queue.SimpleQueue[Asked | T],
    *,
    is_serial: bool,
    is_all: Callable[[Sequence[Asked]], bool],
) -> Iterator[T]:
    """Answer requests in batches as they come, and yield the other events, without end. Raises LostError.

    A batch begins where `is_all` says of the waiting requests that no further one will come, or after `WINDOW`.
    """
    waiting = list[Asked]()
    while True:
        try:
            event = events.get(timeout=None if not waiting else 0.0 if is_all(waiting) else WINDOW)
        except queue.Empty:
            answer(engine, plan, tokens, waiting, is_serial=is_serial)
            waiting = []
            continue
        if isinstance(event, Asked):
            waiting.append(event)
        else:
            yield event


def answer(engine: Answering, plan: Plan, tokens: Tokens, waiting: Sequence[Asked], *, is_serial: bool) -> None:
    """Complete all requests in one rollout, or with `is_serial` each completion in its own. Raises LostError.

    A request that the model cannot take is refused. Its error does not reach the others.
    """
    asked = list[tuple[Asked, list[Request]]]()
    for one in sorted(waiting, key=lambda one: one.order):
        if one.reply.done():  # cancelled
            continue
        try:
            first = sum(len(requests) for _, requests in asked)
            asked.append((one, _requests(engine, tokens, one, first)))
        except ModelError as error:
            one.answer(RefusedError(str(error), 400, "invalid_prompt"))
        except RefusedError as error:
            one.answer(error)
    flat = [request for _, requests in asked for request in requests]
    found = dict[int, Rollout]()
    for batch in [[request] for request in flat] if is_serial else [flat] if flat else []:
        members = tuple(dict.fromkeys(r.member for r in batch if r.member is not None))
        part = replace(plan, members=tuple(m for m in plan.members if m in members))
        for rollout in checked(engine.rollout(part, batch), part.members, batch):
            found[rollout.request] = rollout
    for one, requests in asked:
        rollouts = [found[request.index] for request in requests]
        read = len(requests[0].prompt_ids)
        one.done(read, rollouts)
        one.answer([_answer(tokens, one.chat, read, rollout) for rollout in rollouts])


def _requests(engine: Answering, tokens: Tokens, one: Asked, first: int) -> list[Request]:
    """Return a request for each completion. Raises ModelError, RefusedError."""
    chat, ids = one.chat, tokens.encode(one.chat.messages, one.chat.tools)
    context, wanted = engine.context(), chat.max_tokens or one.sampling.max_tokens
    most = min(wanted, one.most or context or one.sampling.max_tokens)
    room = most if context is None else min(most, context - len(ids))
    if room < 1:
        raise RefusedError(
            f"{LIMIT} is {context} tokens, and the messages have {len(ids)}",
            400,
            TOO_LONG,
            field="messages",
        )
    temperature = one.sampling.temperature if chat.temperature is None else chat.temperature
    sampling = replace(
        one.sampling,
        max_tokens=room,
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_p=one.sampling.top_p if chat.top_p is None else chat.top_p,
        stop=(*one.sampling.stop, *chat.stop),
    )
    seeds = [one.seed, *(derive_seed(one.seed, "choice", i) for i in range(1, chat.n))]
    return [
        Request(first + i, ids, sampling, seed, member=one.member, session=one.session) for i, seed in enumerate(seeds)
    ]


def _answer(tokens: Tokens, chat: Chat, prompt_tokens: int, rollout: Rollout) -> Answer:
    content, calls = rollout.text, ()
    if chat.tools:
        turn = tokens.read_turn(rollout.text, chat.tools)
        content, calls = (turn.content, turn.calls) if not turn.error else (rollout.text, ())
    reason = "tool_calls" if calls else rollout.finish_reason
    return Answer(content, calls, reason, prompt_tokens, len(rollout.token_ids))
