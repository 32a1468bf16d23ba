# SPDX-License-Identifier: Apache-2.0
"""Plays the episodes of a population through harnesses: one process each, one server for all.

The key of a request names an attempt at an episode, and so its member. Threads wait for the harnesses, the server's
thread for their requests, and the caller's thread alone uses the engine: it answers all requests that wait in one
batch, while others arrive. What arrives late waits for the next batch.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from evoalign.engines import Answering
from evoalign.engines.base import pairs_of
from evoalign.episodes import derive_seed, new_session
from evoalign.errors import RefusedError, RewardError, plain, shown
from evoalign.gateway import open_server
from evoalign.gateway.batches import LIMIT, TOO_LONG, Asked, answered
from evoalign.gateway.chat import Answer, Chat
from evoalign.gateway.kept import Kept
from evoalign.gateway.process import FailedError, NotStartedError, Processes, reported
from evoalign.tasks.harness import Harness, finished
from evoalign.tokens import Tokens
from evoalign.transcripts import REWARD, Message
from evoalign.types import Example, Member, Plan, Request, Rollout

SETTLED = 20
"""Rounds of the event loop that a request waits before it takes its turn, so that an earlier one whose client is gone
is cancelled first, also where a busy server learns of both at once. Five were enough after a body of 3 MB."""
Drive: TypeAlias = Callable[[str, str, Example, float], str | None]
"""Runs a harness, given the address, the key, the row and the seconds: returns its output, or None after that time."""


@dataclass(frozen=True, slots=True)
class _Job:
    """The episode of one member and request."""

    member: Member
    request: Request
    example: Example


@dataclass(frozen=True, slots=True)
class _Call:
    """A completion, the messages before it and their number of tokens."""

    messages: Sequence[Message]
    prompt_tokens: int
    made: Rollout


@dataclass(eq=False, slots=True)
class _Attempt:
    """One attempt at an episode."""

    job: _Job
    begun: int = 0
    """Completions requested so far."""
    calls: dict[int, _Call] = field(default_factory=dict[int, _Call])
    """Completions by their place."""
    limit: str = ""
    """The limit that it reached, in words."""
    scores: Mapping[str, float] | None = None
    """The scores that were posted."""

    def take(self, place: int, chat: Chat, prompt_tokens: int, rollouts: Sequence[Rollout]) -> None:
        """Record the completions of a request. One that was cancelled has lost its place to the one that follows."""
        for i, rollout in enumerate(rollouts):
            self.calls[place + i] = _Call(chat.messages, prompt_tokens, rollout)

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(call.made.token_ids) for call in self.calls.values())

    def ended(self, scores: Mapping[str, float]) -> Rollout:
        """Return the rollout of the whole episode; all of its calls are `later` ones."""
        calls = [self.calls[place] for place in sorted(self.calls)]
        text = finished([(call.messages, call.made.text) for call in calls], scores)
        reason = "length" if self.limit or (calls and calls[-1].made.finish_reason == "length") else "stop"
        ids = tuple(i for call in calls for i in call.made.token_ids)
        lengths = tuple((call.prompt_tokens, len(call.made.token_ids)) for call in calls)
        return Rollout(self.job.member, self.job.request.index, ids, text, reason, later=lengths)


@dataclass(frozen=True, slots=True)
class _Failed:
    """An episode that keeps failing: what happened, and the last attempt's error."""

    what: str
    error: FailedError


Event: TypeAlias = "Asked | Rollout | _Failed"


class _Backend:
    """Takes the requests of harnesses to `events`; see `evoalign.gateway.chat.Backend`."""

    def __init__(self, task: Harness) -> None:
        self._limits, self._by = task.config.limits, task.config.score
        self._session = new_session()
        self.events = queue.SimpleQueue[Event]()
        self.attempts = dict[str, _Attempt]()

    def begin(self, job: _Job) -> tuple[str, _Attempt]:
        """Return the key of a new attempt."""
        key, attempt = f"sk-{secrets.token_urlsafe(24)}", _Attempt(job)
        self.attempts[key] = attempt
        return key, attempt

    def end(self, key: str) -> None:
        """Refuse further requests with this key."""
        self.attempts.pop(key, None)

    def knows(self, key: str) -> bool:
        return key in self.attempts

    def _attempt(self, key: str) -> _Attempt:
        if (attempt := self.attempts.get(key)) is None:
            raise RefusedError("the episode of this key has ended", 401, "invalid_api_key")
        return attempt

    async def complete(self, key: str, chat: Chat) -> list[Answer]:
        for _ in range(SETTLED):
            await asyncio.sleep(0)
        attempt, limits = self._attempt(key), self._limits
        sampling = attempt.job.request.sampling
        most = limits.tokens or limits.turns * sampling.max_tokens
        left = limits.turns - attempt.begun
        if 0 < left < chat.n:
            raise RefusedError(f"n is {chat.n}, and the episode has {left} turns left", 400, field="n")
        if not left:
            attempt.limit = f"{limits.turns} turns (task.episode.turns)"
        elif attempt.tokens >= most:
            attempt.limit = f"{most} tokens (task.episode.tokens)"
        if attempt.limit:
            raise RefusedError(f"{LIMIT} reached: the episode has had its {attempt.limit}", 400, TOO_LONG)
        place, first = attempt.begun, attempt.job.request
        attempt.begun += chat.n
        loop = asyncio.get_running_loop()
        asked = Asked(
            member=attempt.job.member,
            chat=chat,
            sampling=sampling,
            most=sampling.max_tokens,
            seed=derive_seed(first.seed, "turn", place) if place else first.seed,
            session=self._session,
            order=(attempt.job.member.index, first.index, place),
            loop=loop,
            reply=loop.create_future(),
            done=lambda read, rollouts: attempt.take(place, chat, read, rollouts),
        )
        self.events.put(asked)
        try:
            return await asked.reply
        except asyncio.CancelledError:  # the client is gone; when it asks again, it gets the same completion
            if attempt.begun == place + chat.n:
                attempt.begun = place
            raise

    async def score(self, key: str, scores: Mapping[str, float]) -> None:
        if self._by != "post":
            raise RefusedError("scores are not read from here; set task.score: post", 403, "forbidden")
        if REWARD not in scores:
            raise RefusedError(f'the scores have no "{REWARD}"', 400)
        self._attempt(key).scores = scores


@dataclass(frozen=True)
class Harnesses:
    """Plays the episodes of a task `harness`; see `evoalign.types.Player`. `drive` runs a harness; None: a process."""

    task: Harness
    tokens: Tokens
    drive: Drive | None = None

    def play(self, engine: Answering, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Play the episodes of requests with all members of a plan, or with those that they name.

        Episodes that `task.record` has are not played again. Raises RewardError for a harness that keeps failing.
        """
        with Kept(self.task.record, self.task.config.command or "", plan) as kept, ExitStack() as stack:
            jobs = list[_Job]()
            for member, request in pairs_of(plan.members, requests):
                assert request.episode is not None
                if (rollout := kept.find(member, request)) is not None:
                    yield rollout
                else:
                    jobs.append(_Job(member, request, request.episode.example))
            if not jobs:
                return
            backend, closing = _Backend(self.task), threading.Event()
            server = stack.enter_context(open_server(backend, "task harness"))
            threads = ThreadPoolExecutor(self.task.config.limits.concurrency, "evoalign-harness")
            stack.callback(threads.shutdown, cancel_futures=True)
            drive = self.drive or self._process(stack.enter_context(Processes()))
            stack.callback(closing.set)
            for job in jobs:
                threads.submit(self._episode, backend, job, drive, server.url, closing)
            for rollout in self._answered(engine, plan, backend, len(jobs)):
                kept.add(rollout)
                yield rollout

    def _process(self, processes: Processes) -> Drive:
        return lambda url, key, example, seconds: processes.run(
            self.task.command, url, key, example, seconds, by_file=self.task.config.score == "file"
        )

    def _answered(self, engine: Answering, plan: Plan, backend: _Backend, count: int) -> Iterator[Rollout]:
        """Answer the requests of harnesses until this many episodes have ended; yield them as they end."""

        def is_all(waiting: Sequence[Asked]) -> bool:
            return len({one.order[:2] for one in waiting}) >= len(backend.attempts) > 0

        events = answered(engine, plan, self.tokens, backend.events, is_serial=self.task.is_serial, is_all=is_all)
        for event in islice(events, count):
            if isinstance(event, _Failed):
                raise RewardError(f"{event.what}{_written(event.error.output)}); {event.error.mend}")
            yield event

    def _episode(self, backend: _Backend, job: _Job, drive: Drive, url: str, closing: threading.Event) -> None:
        """Play one episode in a thread, and again after a failure."""
        began, problem, attempt = time.monotonic(), FailedError("was not started"), 0
        for attempt in range(self.task.retries + 1):
            if closing.wait(min(2.0 ** (attempt - 1), 30.0) if attempt else 0.0):
                return
            try:
                backend.events.put(self._attempt(backend, job, drive, url))
                return
            except FailedError as error:
                problem = error
                if isinstance(error, NotStartedError):
                    break
            except Exception as error:  # of this code: the caller's thread must not wait for ever
                problem = FailedError(f"failed: {type(error).__name__}: {error}")
                break
        seconds, member = time.monotonic() - began, job.member
        who = "the unperturbed model" if member.is_mean else f"member {member.index}"
        tries, row = f"{attempt + 1} attempts, {seconds:.0f} s", shown(dict(job.example))
        backend.events.put(_Failed(f"the harness of {who} on the row {row} {problem} ({tries}", problem))

    def _attempt(self, backend: _Backend, job: _Job, drive: Drive, url: str) -> Rollout:
        """Return the episode of one attempt. Raises FailedError."""
        limits = self.task.config.limits
        key, attempt = backend.begin(job)
        try:
            output = drive(url, key, job.example, limits.seconds)
            if output is None:
                attempt.limit = f"{limits.seconds:g} seconds (task.episode.seconds)"
            if self.task.config.score != "post":
                if output is None:
                    raise FailedError("was killed")
                return attempt.ended(reported(output))
            if attempt.scores is None:
                raise FailedError("ended without a score: POST it to BASE_URL/score (task.score: post)")
            return attempt.ended(attempt.scores)
        except FailedError as error:
            if not attempt.limit:
                raise
            if limits.at_limit is None:
                raise FailedError(
                    f"reached the limit of {attempt.limit} and then {error}",
                    error.output,
                    "raise that limit, or set task.episode.at_limit to the reward of such an episode",
                ) from error
            return attempt.ended({REWARD: limits.at_limit})
        finally:
            backend.end(key)


def _written(output: str) -> str:
    """Write what a failed harness wrote to stderr to a file, which stays, and return words that say where."""
    if not output.strip():
        return ""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="evoalign_harness_", suffix=".txt", delete=False
    ) as file:
        file.writelines(f"{plain(line)}\n" for line in output.splitlines())
    return f"; its stderr is in {file.name}"
