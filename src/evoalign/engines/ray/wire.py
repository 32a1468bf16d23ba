# SPDX-License-Identifier: Apache-2.0
"""What travels between driver and replicas: who is to answer what, answers, and how the mean moves. Numbers and texts.

Members are nine bytes each, in an update seventeen; no tensor travels. What a replica sends back is data: it is parsed
as JSON and checked, and what is not as it should be is a fault of the replica.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, cast

from evoalign.errors import EvoalignError
from evoalign.types import Member, Plan, Request, Rollout, Sampling, Update

_PLAN = struct.Struct("<QdI")
_MEMBER = struct.Struct("<iIb")
_UPDATE = struct.Struct("<QQdddBI")
_COEFFICIENT = struct.Struct("<d")
_SUMMATIONS = ("ordered", "library", "own")
_TOKENS = 2**31


class GarbageError(EvoalignError):
    """A replica's answer is not one."""


def plan_bytes(plan: Plan) -> bytes:
    """A plan in 20 bytes, and 9 a member."""
    head = _PLAN.pack(plan.generation, plan.sigma, len(plan.members))
    return head + _members_bytes(plan.members)


def plan_of(data: bytes) -> Plan:
    """What `plan_bytes` wrote."""
    generation, sigma, count = _PLAN.unpack_from(data)
    return Plan(generation, sigma, _members_of(data, _PLAN.size, count))


def update_bytes(update: Update) -> bytes:
    """An update in 45 bytes, and 17 a member."""
    summation = _SUMMATIONS.index(update.summation)
    head = _UPDATE.pack(
        update.index, update.generation, update.sigma, update.step, update.decay, summation, len(update.members)
    )
    return head + _members_bytes(update.members) + b"".join(map(_COEFFICIENT.pack, update.coefficients))


def update_of(data: bytes) -> Update:
    """What `update_bytes` wrote."""
    index, generation, sigma, step, decay, summation, count = _UPDATE.unpack_from(data)
    members = _members_of(data, _UPDATE.size, count)
    first = _UPDATE.size + count * _MEMBER.size
    coefficients = tuple(c for (c,) in _COEFFICIENT.iter_unpack(data[first:]))
    return Update(index, generation, members, coefficients, sigma, step, decay, _SUMMATIONS[summation])


def _members_bytes(members: Iterable[Member]) -> bytes:
    return b"".join(_MEMBER.pack(m.index, m.noise, m.sign) for m in members)


def _members_of(data: bytes, first: int, count: int) -> tuple[Member, ...]:
    return tuple(Member(*_MEMBER.unpack_from(data, first + i * _MEMBER.size)) for i in range(count))


def requests_bytes(requests: Sequence[Request]) -> bytes:
    """Requests as JSON."""
    return json.dumps([asdict(request) for request in requests]).encode()


def requests_of(data: bytes) -> list[Request]:
    """What `requests_bytes` wrote."""
    found: list[Request] = []
    for row in json.loads(data):
        sampling = row["sampling"] | {"stop": tuple(row["sampling"]["stop"])}
        member = None if row["member"] is None else Member(**row["member"])
        more = {"prompt_ids": tuple(row["prompt_ids"]), "sampling": Sampling(**sampling), "member": member}
        found.append(Request(**(row | more)))
    return found


def rollouts_bytes(rollouts: Iterable[Rollout]) -> bytes:
    """Completions as JSON: whose, of which request, tokens, text, why it ended, log-probabilities."""
    return json.dumps(
        [(r.member.index, r.request, r.token_ids, r.text, r.finish_reason, r.logprobs) for r in rollouts]
    ).encode()


def rollouts_of(data: object, asked: Sequence[tuple[Member, Request]]) -> list[Rollout]:
    """What `rollouts_bytes` wrote: one completion of each pair that was asked. Raises GarbageError for all else."""
    wanted = {(member.index, request.index): (member, request) for member, request in asked}
    try:
        rows = cast(list[Any], json.loads(cast(bytes, data)))
        found = {(row[0], row[1]): _rollout(row, wanted) for row in rows}
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        raise GarbageError(f"answered what is no list of completions ({type(error).__name__})") from error
    if len(found) != len(rows) or found.keys() != wanted.keys():
        raise GarbageError(f"answered {len(rows)} completions, not the {len(wanted)} that were asked for")
    return [found[key] for key in wanted]


def _rollout(row: Any, wanted: dict[tuple[int, int], tuple[Member, Request]]) -> Rollout:
    index, number, ids, text, reason, logprobs = row
    member, request = wanted[index, number]
    if type(index) is not int or type(number) is not int:  # True is 1
        raise ValueError
    if not isinstance(text, str) or reason not in ("stop", "length") or (logprobs is None) == request.logprobs:
        raise ValueError
    tokens = tuple(ids)
    if not all(type(i) is int and 0 <= i < _TOKENS for i in tokens) or len(tokens) > request.sampling.max_tokens:
        raise ValueError
    said = None if logprobs is None else tuple(map(float, logprobs))
    if said is not None and len(said) != len(tokens):
        raise ValueError
    return Rollout(member, number, tokens, text, reason, said)
