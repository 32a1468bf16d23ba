# SPDX-License-Identifier: Apache-2.0
"""Which answers are scored again by another replica, and what is written down of who scored what.

Each chunk is drawn by itself with probability `share`, after its answer is there, by a keyed hash whose key never
leaves this process: nobody who answers can know. So wrong answers in k chunks are found with 1 - (1 - share)^k, as long
as whoever checks, and where two differ a third, does not side with who was wrong.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from evoalign.engines.ray.deal import Chunk
from evoalign.types import Plan


class _Placed(Protocol):
    place: int


class Audit:
    """Draws by a secret of its own. `secret` is for tests."""

    def __init__(self, share: float, secret: bytes | None = None) -> None:
        self.share = share
        self._secret = secret or secrets.token_bytes(32)
        self._rollouts = 0

    def draws(self, plan: Plan, chunks: Sequence[Chunk[Any]]) -> Callable[[Chunk[Any]], bool]:
        """Whether each of these chunks of one rollout is scored again."""
        self._rollouts += 1
        number = {id(chunk): f"{self._rollouts}/{plan.generation}/{i}" for i, chunk in enumerate(chunks)}
        times = Counter[int]()

        def draw(chunk: Chunk[Any]) -> bool:
            """Anew where a chunk is answered anew, since who answered first was wrong elsewhere."""
            times[id(chunk)] += 1
            return self._uniform(f"{number[id(chunk)]}/{times[id(chunk)]}") < self.share

        return draw

    def shuffled(self, chunks: Sequence[Chunk[Any]]) -> list[Chunk[Any]]:
        """In an order that nobody else knows: what is asked again does not stand out by its place."""
        place = {id(chunk): self._uniform(f"{self._rollouts} order {i}") for i, chunk in enumerate(chunks)}
        return sorted(chunks, key=lambda chunk: place[id(chunk)])

    def _uniform(self, what: str) -> float:
        digest = hashlib.blake2b(what.encode(), key=self._secret, digest_size=7).digest()
        return int.from_bytes(digest, "big") / 2**56

    @staticmethod
    def record(chunks: Sequence[Chunk[Any]], expelled: Mapping[int, str]) -> dict[str, Any]:
        """Of each chunk its members' indices, the replica whose answer was taken, and those that gave the same; and
        who is thrown out so far."""

        def places(workers: Sequence[_Placed]) -> list[int]:
            return [worker.place for worker in workers]

        scored = [{"members": [m.index for m in c.load.members], "by": places(c.by)} for c in chunks]
        return {"chunks": scored, "expelled": {str(place): why for place, why in expelled.items()}}
