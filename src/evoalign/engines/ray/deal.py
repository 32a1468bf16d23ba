# SPDX-License-Identifier: Apache-2.0
"""Who is dealt which chunk, and which answers are believed: rules alone, without Ray, clock or chance of their own.

A worker that is free takes the next chunk, unless it is slow and the others will have done all that is left before it
has done one. Where none is left, it scores again what somebody else has answered and is to be checked, and then what
takes another much longer than is usual. A chunk that is checked is believed once two workers gave the same answer; who
gave another one was wrong.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

SLOW = 1.5
"""Times the usual after which a chunk is dealt to a second worker that has nothing to do, and a worker is slow."""

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
        self.todo = deque(self.chunks)
        """Chunks that nobody has or has answered."""
        self._is_checked, self._may_check = is_checked, may_check
        self._begun: dict[Chunk[W], None] = {}
        """Those that are neither to be dealt nor believed; whatever was dealt last is last."""
        self._spent: list[float] = []
        """Seconds of all answers, in order of size."""
        self._pace: dict[W, float] = {}
        """Seconds that a worker's last answer took."""
        self.open = len(self.chunks)
        """Chunks without an answer that is believed."""
        self.copies = 0
        """Chunks that were dealt to one more worker because another was slow."""

    def next(self, worker: W, now: float) -> Chunk[W] | None:
        """What a free worker is to answer, noted as its own from `now` on; None: nothing for now."""
        if self.todo:
            chunk = None if self._is_late(worker, now) else self.todo.popleft()
        else:
            chunk = self._to_check(worker) or self._slow(worker, now)
        if chunk is not None:
            chunk.holders[worker] = now
            self._begun.pop(chunk, None)
            self._begun[chunk] = None
        return chunk

    def answered(self, worker: W, chunk: Chunk[W], answer: Any, now: float) -> list[W]:
        """An answer came. Those who turn out to have been wrong by it."""
        began = chunk.holders.pop(worker, now)
        self._pace[worker] = now - began
        if chunk.is_done:
            return []
        insort(self._spent, now - began)
        chunk.answers.append((worker, answer))
        if len(chunk.answers) == 1 and self._is_checked is not None and self._is_checked(chunk):
            chunk.wanted = 2
        if sum(said == answer for _, said in chunk.answers) < chunk.wanted:
            return []
        chunk.believed = answer
        self._begun.pop(chunk, None)
        self.open -= 1
        return [other for other, said in chunk.answers if said != answer]

    def lost(self, worker: W, chunk: Chunk[W]) -> None:
        """A worker will not answer what it has."""
        chunk.holders.pop(worker, None)
        self._pace.pop(worker, None)  # it is started anew, or gone
        if not chunk.answers and not chunk.holders and chunk not in self.todo:
            self._begun.pop(chunk, None)
            self.todo.appendleft(chunk)

    def disown(self, worker: W) -> None:
        """Nothing that this worker alone has answered is believed any more."""
        for chunk in self.chunks:
            if chunk.is_done and chunk.by == [worker]:
                chunk.believed, chunk.wanted = None, 1
                self._begun[chunk] = None
                self.open += 1
            chunk.answers = [(other, answer) for other, answer in chunk.answers if other != worker]
            if not chunk.is_done:
                chunk.wanted = min(chunk.wanted, 1 + bool(chunk.answers))
                self.lost(worker, chunk)

    def _to_check(self, worker: W) -> Chunk[W] | None:
        """A chunk that waits for one more answer, of which this worker has given none."""
        if self._is_checked is None:
            return None
        for chunk in self._begun:
            if not chunk.answers or chunk.holders:
                continue
            others = [other for other, _ in chunk.answers]
            if worker not in others and (self._may_check is None or self._may_check(worker, others)):
                return chunk
        return None

    def _patience(self) -> float:
        """Seconds after which an answer takes much longer than is usual, of which there was one."""
        return SLOW * self._spent[len(self._spent) // 2]

    def _is_late(self, worker: W, now: float) -> bool:
        """Whether a slow worker would end its next chunk after the others have done all that are left. Of the others
        those count that are at work, and no longer at it than is usual for them."""
        mine = self._pace.get(worker, 0.0)
        if not mine or mine <= self._patience():
            return False
        others = 0
        for chunk in self._begun:
            for other, began in chunk.holders.items():
                pace = self._pace.get(other)
                if pace and now - began <= SLOW * pace:
                    others += max(0, int((now + mine - max(now, began + pace)) / pace))
        return others >= len(self.todo)

    def _slow(self, worker: W, now: float) -> Chunk[W] | None:
        """The chunk that one other worker has had longest, where that is longer than is usual."""
        if not self._spent:
            return None
        late = now - self._patience()
        for chunk in self._begun:
            if len(chunk.holders) != 1:
                continue
            (began,) = chunk.holders.values()
            if began >= late:
                return None
            others = [other for other, _ in chunk.answers]
            can = not others or (worker not in others and (self._may_check is None or self._may_check(worker, others)))
            if can and worker not in chunk.holders:
                self.copies += 1
                return chunk
        return None
