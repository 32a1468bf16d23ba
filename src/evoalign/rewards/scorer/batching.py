# SPDX-License-Identifier: Apache-2.0
"""Dynamic batching of requests: a bounded queue, one thread that scores, and the service's metrics.

A batch starts when it is full, or when the oldest pair has waited long enough. It contains the oldest pair and the
earliest pairs of similar length, so that there is little padding and no pair waits indefinitely.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from evoalign.rewards.scorer import Scorer

WINDOW = 8
"""Number of batches of pairs to search for similar lengths."""
LONGEST_WAIT = 60
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class Histogram:
    """Prometheus histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterator[tuple[str, object]]:
        """Yield suffixes of the name, with values, in Prometheus' text format."""
        total = 0
        for bound, count in zip((*(f"{b:g}" for b in self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'_bucket{{le="{bound}"}}', total
        yield "_sum", f"{self._sum:g}"
        yield "_count", total


class Meter:
    """Prometheus metrics of one service, without text of pairs."""

    def __init__(self) -> None:
        self.statuses = Counter[int]()
        self.items = self.refused = self.queued = 0
        self.cut: Mapping[str, int] = {}
        self.batches, self.seconds = Histogram(SIZES), Histogram(SECONDS)

    def text(self) -> str:
        """Return the Prometheus text format 0.0.4."""
        statuses = [(f'{{status="{status}"}}', n) for status, n in sorted(self.statuses.items())]
        cut = [(f'{{part="{part}"}}', n) for part, n in sorted(self.cut.items())]
        families: tuple[tuple[str, str, str, Iterable[tuple[str, object]]], ...] = (
            ("requests_total", "counter", "Requests for scores, by status.", statuses),
            ("items_total", "counter", "Pairs scored.", [("", self.items)]),
            ("refused_total", "counter", "Requests rejected because the queue was full.", [("", self.refused)]),
            ("queue_length", "gauge", "Pairs waiting for a batch.", [("", self.queued)]),
            ("cut_total", "counter", "Pairs that were too long, by the part cut.", cut),
            ("batch_size", "histogram", "Pairs in a batch.", self.batches.samples()),
            ("seconds", "histogram", "Seconds from request to response.", self.seconds.samples()),
        )
        lines = list[str]()
        for name, kind, text, samples in families:
            lines += [f"# HELP evoalign_scorer_{name} {text}", f"# TYPE evoalign_scorer_{name} {kind}"]
            lines += [f"evoalign_scorer_{name}{suffix} {value}" for suffix, value in samples]
        return "\n".join(lines) + "\n"


class FullError(Exception):
    """The queue has no room for a request; retry after `seconds`."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"the queue is full; retry in {seconds} s")
        self.seconds = seconds


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    prompt: str
    response: str
    done: asyncio.Future[dict[str, float]]
    since: float


class Batcher:
    """Scores pairs in batches. At most `capacity` pairs wait; `max_wait` is in seconds."""

    def __init__(self, scorer: Scorer, meter: Meter, *, batch_size: int, max_wait: float, capacity: int) -> None:
        self._scorer, self._meter = scorer, meter
        self._size, self._wait, self.capacity = batch_size, max_wait, capacity
        self._pending: list[_Item] = []
        self._changed = asyncio.Event()
        self._hurries = self._ends = False
        self._pace = 0.0
        self._thread = ThreadPoolExecutor(1, "evoalign-scorer")

    async def score(self, prompts: Sequence[str], responses: Sequence[str]) -> dict[str, list[float]]:
        """Return the scores of one request by column. Raises FullError, or the scorer's exception."""
        if len(self._pending) + len(prompts) > self.capacity:
            self._meter.refused += 1
            raise FullError(min(max(math.ceil(self._pace * len(self._pending)), 1), LONGEST_WAIT))
        loop = asyncio.get_running_loop()
        items = [_Item(p, r, loop.create_future(), loop.time()) for p, r in zip(prompts, responses, strict=True)]
        self._pending += items
        self._note()
        try:
            found = await asyncio.gather(*(item.done for item in items), return_exceptions=True)
        finally:  # also for a cancelled request
            self._drop(items)
        for scores in found:
            if isinstance(scores, BaseException):
                raise scores
        return {column: [item.done.result()[column] for item in items] for column in self._scorer.columns}

    def hurry(self) -> None:
        """Start batches without waiting from now on."""
        self._hurries = True
        self._changed.set()

    def end(self) -> None:
        """Stop once the queue is empty."""
        self._ends = True
        self.hurry()

    async def run(self) -> None:
        """Score until `end`, concurrently with calls of `score`."""
        while not (self._ends and not self._pending):
            loop = asyncio.get_running_loop()
            due = self._hurries or len(self._pending) >= self._size
            if self._pending and (due or loop.time() - self._pending[0].since >= self._wait):
                await self._score(self._next_batch())
            else:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._pending[0].since + self._wait if self._pending else None):
                        await self._changed.wait()
        self._thread.shutdown()

    def _next_batch(self) -> list[_Item]:
        """Remove and return the oldest pair and pairs of similar length."""
        oldest = self._pending[0]

        def length(item: _Item) -> int:
            return len(item.prompt) + len(item.response)

        order = sorted(self._pending[: WINDOW * self._size], key=length)
        size, at = min(self._size, len(order)), order.index(oldest)
        starts = range(max(at - size + 1, 0), min(at, len(order) - size) + 1)
        start = min(starts, key=lambda start: length(order[start + size - 1]) - length(order[start]))
        batch = order[start : start + size]
        self._drop(batch)
        return batch

    def _drop(self, items: Sequence[_Item]) -> None:
        gone = {id(item) for item in items}
        self._pending = [item for item in self._pending if id(item) not in gone]
        self._note()

    async def _score(self, batch: Sequence[_Item]) -> None:
        loop = asyncio.get_running_loop()
        begun, prompts, responses = loop.time(), [item.prompt for item in batch], [item.response for item in batch]
        try:
            found = await loop.run_in_executor(self._thread, self._scorer.score, prompts, responses)
        except Exception as error:  # only the request that causes it gets the exception
            if len(batch) > 1:
                for item in batch:
                    await self._score([item])
            elif not batch[0].done.done():
                batch[0].done.set_exception(error)
            return
        pace = (loop.time() - begun) / len(batch)
        self._pace = pace if not self._pace else 0.8 * self._pace + 0.2 * pace
        self._meter.batches.add(len(batch))
        self._meter.items += len(batch)
        for at, item in enumerate(batch):
            if not item.done.done():
                item.done.set_result({column: scores[at] for column, scores in found.items()})

    def _note(self) -> None:
        self._meter.queued = len(self._pending)
        self._changed.set()
