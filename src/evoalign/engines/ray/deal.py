# SPDX-License-Identifier: Apache-2.0
"""Who is dealt which chunk, and which answers are believed: rules alone, without Ray, clock or chance of their own.

A worker that is free takes the next chunk. Where none is left, it scores again what somebody else has answered and is
to be checked, and then what takes another much longer than is usual. A chunk that is checked is believed once two
workers gave the same answer; who gave another one was wrong.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

SLOW = 1.5
"""Times the usual after which a chunk is dealt to a second worker that has nothing to do."""

W = TypeVar("W")


@dataclass(eq=False)
class Chunk(Generic[W]):
    """What is answered by one worker at once. `load` says what it is; `holders` have it now, since when."""

    load: Any
    holders: dict[W, float] = field(default_factory=dict)
    answers: list[tuple[W, Any]] = field(default_factory=list)
    wanted: int = 1
    """Equal answers, of as many workers, that it takes to believe one."""
    believed: Any = None

    @property
    def is_done(self) -> bool:
        """Whether an answer is believed."""
        return self.believed is not None

    @property
    def by(self) -> list[W]:
        """Whose answers are the one that is believed, in the order in which they came."""
        return [worker for worker, answer in self.answers if self.is_done and answer == self.believed]


class Deal(Generic[W]):
    """The chunks of one rollout.

    `is_checked` is asked of each chunk after its first answer is there. `may_check(worker, others)` says whether a
    worker can check what others answered; None: any can.
    """

    def __init__(
        self,
        chunks: Iterable[Chunk[W]],
        is_checked: Callable[[Chunk[W]], bool] | None = None,
        may_check: Callable[[W, Sequence[W]], bool] | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self._todo = deque(self.chunks)
        self._is_checked, self._may_check = is_checked, may_check
        self._spent: list[float] = []
        self.open = len(self.chunks)
        """Chunks without an answer that is believed."""
        self.copies = 0
        """Chunks that were dealt to one more worker because another was slow."""

    def next(self, worker: W, now: float) -> Chunk[W] | None:
        """What a free worker is to answer, noted as its own from `now` on; None: nothing for now."""
        chunk = self._todo.popleft() if self._todo else self._to_check(worker) or self._slow(worker, now)
        if chunk is not None:
            chunk.holders[worker] = now
        return chunk

    def answered(self, worker: W, chunk: Chunk[W], answer: Any, now: float) -> list[W]:
        """An answer came. Those who turn out to have been wrong by it."""
        began = chunk.holders.pop(worker, now)
        if chunk.is_done:
            return []
        self._spent.append(now - began)
        chunk.answers.append((worker, answer))
        if len(chunk.answers) == 1 and self._is_checked is not None and self._is_checked(chunk):
            chunk.wanted = 2
        if sum(said == answer for _, said in chunk.answers) < chunk.wanted:
            return []
        chunk.believed = answer
        self.open -= 1
        return [other for other, said in chunk.answers if said != answer]

    def lost(self, worker: W, chunk: Chunk[W]) -> None:
        """A worker will not answer what it has."""
        chunk.holders.pop(worker, None)
        if not chunk.answers and not chunk.holders and chunk not in self._todo:
            self._todo.appendleft(chunk)

    def disown(self, worker: W) -> None:
        """Nothing that this worker alone has answered is believed any more."""
        for chunk in self.chunks:
            if chunk.is_done and chunk.by == [worker]:
                chunk.believed, chunk.wanted = None, 1
                self.open += 1
            chunk.answers = [(other, answer) for other, answer in chunk.answers if other != worker]
            if not chunk.is_done:
                chunk.wanted = min(chunk.wanted, 1 + bool(chunk.answers))
                self.lost(worker, chunk)

    def _to_check(self, worker: W) -> Chunk[W] | None:
        """A chunk that waits for one more answer, of which this worker has given none."""
        if self._is_checked is None:
            return None
        for chunk in self.chunks:
            if chunk.is_done or not chunk.answers or chunk.holders:
                continue
            others = [other for other, _ in chunk.answers]
            if worker not in others and (self._may_check is None or self._may_check(worker, others)):
                return chunk
        return None

    def _slow(self, worker: W, now: float) -> Chunk[W] | None:
        """The chunk that one other worker has had longest, where that is longer than is usual."""
        if not self._spent:
            return None
        late = now - SLOW * statistics.median(self._spent)
        held = [c for c in self.chunks if not c.is_done and not c.answers and len(c.holders) == 1]
        held = [c for c in held if worker not in c.holders and min(c.holders.values()) < late]
        if not held:
            return None
        self.copies += 1
        return min(held, key=lambda c: min(c.holders.values()))
