# SPDX-License-Identifier: Apache-2.0
"""What travels between driver, replicas and graders: who is to answer what, answers, and how the mean moves; what is to
be scored, and rewards. Numbers and texts.

Members are nine bytes each, in an update seventeen; no tensor travels. What a replica or grader sends back is data: it
is parsed as JSON and checked, and what is not as it should be is its fault.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from base64 import b64encode
from binascii import a2b_base64
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, cast

import numpy as np

from evoalign import errors
from evoalign.errors import EvoalignError, RewardError
from evoalign.rewards.objective import Columns
from evoalign.types import Example, Member, Plan, Request, Rollout, Sampling, Update

_PLAN = struct.Struct("<Qd")
_MEMBER = struct.Struct("<iIb")
_UPDATE = struct.Struct("<QQdddBI")
_COEFFICIENT = struct.Struct("<d")
_HASH = re.compile("[0-9a-f]{64}")
_SUMMATIONS = ("ordered", "library", "own")
_TOKEN = np.dtype("<i4")


class GarbageError(EvoalignError):
    """The answer of a replica, or of a grader, is not one."""


class Stand(NamedTuple):
    """Where a replica is: updates made, the mean's hash, and what it took: seconds for an update with its hash, and
    bytes and seconds of the last copy of a mean that it got."""

    updates: int
    weights_hash: str
    update_seconds: float
    copied_bytes: int
    copied_seconds: float


def stand_of(said: object) -> Stand:
    """What a replica says of where it is. Raises GarbageError for all else."""
    fields = cast(tuple[Any, ...], said if isinstance(said, tuple) else ())
    kinds = (int, str, float, int, float)
    if len(fields) != len(kinds) or not all(type(f) is k for f, k in zip(fields, kinds, strict=True)):
        raise GarbageError("answered what is no hash of its mean")
    stand = Stand(*fields)
    if not _HASH.fullmatch(stand.weights_hash) or not all(0 <= n < 2**63 for n in (stand[0], *stand[2:])):
        raise GarbageError("answered what is no hash of its mean")
    return stand


def members_bytes(members: Iterable[Member]) -> bytes:
    """Members in 9 bytes each."""
    return b"".join(_MEMBER.pack(m.index, m.noise, m.sign) for m in members)


def members_of(data: bytes) -> tuple[Member, ...]:
    """What `members_bytes` wrote."""
    return tuple(Member(*fields) for fields in _MEMBER.iter_unpack(data))


def update_bytes(update: Update) -> bytes:
    """An update in 45 bytes, and 17 a member."""
    summation = _SUMMATIONS.index(update.summation)
    head = _UPDATE.pack(
        update.index, update.generation, update.sigma, update.step, update.decay, summation, len(update.members)
    )
    return head + members_bytes(update.members) + b"".join(map(_COEFFICIENT.pack, update.coefficients))


def update_of(data: bytes) -> Update:
    """What `update_bytes` wrote."""
    index, generation, sigma, step, decay, summation, count = _UPDATE.unpack_from(data)
    first = _UPDATE.size + count * _MEMBER.size
    members = members_of(data[_UPDATE.size : first])
    coefficients = tuple(c for (c,) in _COEFFICIENT.iter_unpack(data[first:]))
    return Update(index, generation, members, coefficients, sigma, step, decay, _SUMMATIONS[summation])


def asked_bytes(plan: Plan, requests: Sequence[Request]) -> bytes:
    """What all chunks of a rollout have in common: generation and sigma in 16 bytes, and the requests as JSON."""
    head = _PLAN.pack(plan.generation, plan.sigma)
    return head + json.dumps([asdict(request) for request in requests]).encode()


def asked_of(data: bytes, members: bytes) -> tuple[Plan, list[Request]]:
    """What `asked_bytes` wrote, for the members that `members_bytes` wrote."""
    found: list[Request] = []
    for row in json.loads(data[_PLAN.size :]):
        sampling = row["sampling"] | {"stop": tuple(row["sampling"]["stop"])}
        member = None if row["member"] is None else Member(**row["member"])
        more = {"prompt_ids": tuple(row["prompt_ids"]), "sampling": Sampling(**sampling), "member": member}
        found.append(Request(**(row | more)))
    generation, sigma = _PLAN.unpack_from(data)
    return Plan(generation, sigma, members_of(members)), found


def rollouts_bytes(rollouts: Iterable[Rollout]) -> bytes:
    """Completions as JSON: whose, of which request, tokens, text, why it ended, log-probabilities."""
    return json.dumps(
        [(r.member.index, r.request, tokens_text(r.token_ids), r.text, r.finish_reason, r.logprobs) for r in rollouts]
    ).encode()


def tokens_text(ids: Iterable[int]) -> str:
    """Base64 of the tokens, int32 each: JSON takes three times as long for a list of them as for the text."""
    return b64encode(np.fromiter(ids, _TOKEN).tobytes()).decode()


def _tokens(text: str, most: int) -> tuple[int, ...]:
    """What `tokens_text` wrote. Raises ValueError where it is not, or of more than `most`."""
    found = tuple(np.frombuffer(a2b_base64(text, strict_mode=True), _TOKEN).tolist())
    if len(found) > most or min(found, default=0) < 0:
        raise ValueError
    return found


def rollouts_of(data: object, asked: Sequence[tuple[Member, Request]]) -> list[Rollout]:
    """What `rollouts_bytes` wrote: one completion of each pair that was asked. Raises GarbageError for all else."""
    wanted = {(member.index, request.index): (member, request) for member, request in asked}
    try:
        rows = cast(list[Any], json.loads(cast(bytes, data)))
        found = {(row[0], row[1]): _rollout(row, wanted) for row in rows}
    except (TypeError, ValueError, LookupError, RecursionError, ArithmeticError) as error:
        raise GarbageError(f"answered what is no list of completions ({type(error).__name__})") from error
    if len(found) != len(rows) or found.keys() != wanted.keys():
        raise GarbageError(f"answered {len(rows)} completions, not the {len(wanted)} that were asked for")
    return [found[key] for key in wanted]


def piece_bytes(split: str, rows: Sequence[int], texts: Sequence[str], examples: Sequence[Example]) -> bytes:
    """Completions to score as JSON: texts, and where their rows are, with a digest of what is there."""
    return json.dumps([split, list(rows), list(texts), digest_of(examples)]).encode()


def piece_of(data: bytes) -> tuple[str, list[int], list[str], str]:
    """What `piece_bytes` wrote: split, rows, texts and digest."""
    split, rows, texts, digest = json.loads(data)
    return split, rows, texts, digest


def digest_of(examples: Sequence[Example]) -> str:
    """Of rows, by which two hosts see that they have the same ones; of what no JSON holds the type alone."""
    text = json.dumps(list(examples), default=lambda value: type(value).__name__, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def columns_bytes(columns: Columns) -> bytes:
    """Columns as JSON."""
    return json.dumps({"columns": {name: list(values) for name, values in columns.items()}}).encode()


def error_bytes(error: EvoalignError) -> bytes:
    """What a task raised, as JSON: its words, its kind and what a RewardError keeps."""
    failed = error.failed if isinstance(error, RewardError) else None
    return json.dumps({"error": str(error), "kind": type(error).__name__, "failed": failed}).encode()


def columns_of(data: object, count: int) -> Columns:
    """What `columns_bytes` wrote of so many completions. Raises what `error_bytes` wrote, GarbageError for all else."""
    try:
        found = cast(dict[str, Any], json.loads(cast(bytes, data), parse_constant=_no_constant))
        if found.keys() == {"columns"}:
            return {name: _column(name, values, count) for name, values in found["columns"].items()}
        error = _error(**found)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise GarbageError(f"answered what are no columns of {count} rewards ({type(error).__name__})") from error
    raise error


def _no_constant(word: str) -> float:
    raise ValueError(word)


def _column(name: str, values: object, count: int) -> list[float | None]:
    column = cast("list[float | None]", values)
    if not name.isprintable() or type(values) is not list or len(column) != count:
        raise ValueError
    if not all(value is None or (type(value) is float and math.isfinite(value)) for value in column):
        raise ValueError
    return column


def _error(error: object, kind: str, failed: object) -> EvoalignError:
    cls: Any = getattr(errors, kind)
    if not (isinstance(cls, type) and issubclass(cls, EvoalignError) and isinstance(error, str)):
        raise TypeError
    if not issubclass(cls, RewardError):
        return cls(error)
    if failed is not None and type(failed) is not dict:
        raise TypeError
    return cls(error, failed)


def _rollout(row: Any, wanted: dict[tuple[int, int], tuple[Member, Request]]) -> Rollout:
    index, number, ids, text, reason, logprobs = row
    member, request = wanted[index, number]
    if type(index) is not int or type(number) is not int:  # True is 1
        raise ValueError
    if not isinstance(text, str) or reason not in ("stop", "length") or (logprobs is None) == request.logprobs:
        raise ValueError
    tokens = _tokens(ids, request.sampling.max_tokens)
    said = None if logprobs is None else tuple(map(float, logprobs))
    if said is not None and len(said) != len(tokens):
        raise ValueError
    return Rollout(member, number, tokens, text, reason, said)
