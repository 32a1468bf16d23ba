# SPDX-License-Identifier: Apache-2.0
"""Check during a run that the gateway answers each key by its own member.

At the start and every `checks.canary_every` generations, members with wide noise send one message each through the
gateway, all at the same time, and the engine answers the same message of each directly. No completion may be lost, or
be that of another member.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import cast

from evoalign.checks import canary
from evoalign.checks.canary import MEMBERS, address, widths
from evoalign.engines import Answering
from evoalign.errors import CanaryError, NotFiniteError, shown
from evoalign.gateway.player import Harnesses
from evoalign.gateway.process import FailedError
from evoalign.http import HttpClient, LoopThread
from evoalign.rollouts import collect
from evoalign.setup import Parts
from evoalign.tasks.harness import Harness
from evoalign.tokens import Tokens
from evoalign.types import MEAN_PLAN, Episode, Example, Layout, Messages, Plan, Request, Sampling

LONGEST = 8
"""Tokens of a completion."""
MOST_BYTES = 1 << 20


def check_all(parts: Parts, *, generation: int, width: float) -> None:
    """Raise CanaryError if members do not answer with their own weights: in any replica, and through the gateway."""
    task, messages, exact = parts.task, parts.task.prompt(parts.data.train[0]), parts.facts.deterministic
    prompt = parts.tokens.encode(messages, task.tools)
    for engine in parts.engine.parts():
        canary.check(engine, parts.space, parts.layout, prompt, generation=generation, width=width, exact=exact)
    if task.player == "program":
        harness, chat = cast(Harness, task.inside), cast(Messages, messages)
        check(
            parts.engine, harness, parts.tokens, parts.layout, chat, generation=generation, width=width, exact=exact
        )  # fmt: skip


def check(
    engine: Answering,
    task: Harness,
    tokens: Tokens,
    layout: Layout,
    messages: Messages,
    *,
    generation: int,
    width: float,
    exact: bool,
) -> None:
    """Raise CanaryError if a member's request is answered by another one, or by the base model.

    `width` is the sigma of this generation. `exact` (`Facts.deterministic`) requires each completion to be the same as
    without the gateway. Members whose noise changes no text are no test: `checks.canary` compares log-probabilities.
    """
    request = Request(0, tokens.encode(messages), Sampling(LONGEST))
    mean = collect(engine, MEAN_PLAN, [request])[0].text
    for wide in widths(layout, width):
        plan = Plan(address(generation), wide, MEMBERS)
        try:
            direct = {rollout.member.index: rollout.text for rollout in collect(engine, plan, [request])}
        except NotFiniteError:  # noise this wide gives no finite logits
            return
        if len({mean, *direct.values()}) > len(MEMBERS):
            _compare(_asked(engine, task, tokens, plan, messages), direct, mean, exact=exact)
            return


def _asked(engine: Answering, task: Harness, tokens: Tokens, plan: Plan, messages: Messages) -> dict[int, str]:
    """Return what the gateway answers to each member's key."""
    body, found = json.dumps({"model": "canary", "messages": messages}).encode(), dict[int, str]()

    def drive(url: str, key: str, example: Example, seconds: float) -> str:
        loop, client = LoopThread("evoalign-gateway-canary"), HttpClient(url, key, MOST_BYTES)
        try:
            reply = loop.call(client.send("POST", "/chat/completions", body, seconds=seconds))
        finally:
            loop.close(client)
        if reply.status != 200:
            raise FailedError(f"got status {reply.status}: {shown(reply.body)}")
        found[example["member"]] = json.loads(reply.body)["choices"][0]["message"]["content"]
        return '{"reward": 0}'

    own = copy.copy(task)
    own.config, own.record = task.config.model_copy(update={"score": "stdout"}), None
    player = Harnesses(own, tokens, drive)
    requests = [
        Request(m.index, (), Sampling(LONGEST), member=m, episode=Episode(player, {"member": m.index}))
        for m in plan.members
    ]
    for _ in player.play(engine, plan, requests):
        pass
    return found


def _compare(through: Mapping[int, str], direct: Mapping[int, str], mean: str, *, exact: bool) -> None:
    for index, text in through.items():
        if text == direct[index]:
            continue
        others = [f"member {other}" for other, theirs in direct.items() if theirs == text]
        others += ["the unperturbed model"] * (text == mean)
        if others or exact:
            raise CanaryError(
                f"canary: through the gateway member {index} gives {text!r}, the completion of "
                f"{' and '.join(others) or 'no member'}, and directly {direct[index]!r}; the gateway mixes up members, "
                "so no score of this run can be trusted: report this as a bug"
            )
