# SPDX-License-Identifier: Apache-2.0
"""How requests share batches: no clock decides any of this."""

import asyncio
import threading

import pytest

from evoalign.rewards.scorer.batching import Batcher, FullError, Meter


class Lengths:
    """Scores are the texts' lengths. A batch with the response `bad` fails. `open` lets batches through."""

    columns = ("reward", "cost")

    def __init__(self):
        self.open, self.batches = threading.Event(), []
        self.open.set()

    def score(self, prompts, responses):
        self.open.wait(60)
        self.batches.append([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)])
        if "bad" in responses:
            raise ValueError("bad")
        return {"reward": [float(len(r)) for r in responses], "cost": [float(len(p)) for p in prompts]}

    def close(self):
        """Nothing."""


def run(scorer, use, **settings):
    async def whole():
        meter = Meter()
        batcher = Batcher(scorer, meter, **{"batch_size": 4, "max_wait": 600.0, "capacity": 100, **settings})
        worker = asyncio.create_task(batcher.run())
        try:
            return await use(batcher, meter)
        finally:
            batcher.end()
            await worker

    return asyncio.run(asyncio.wait_for(whole(), 120))


async def until(is_so):
    while not is_so():
        await asyncio.sleep(0)


def one(batcher, length):
    return batcher.score(["p"], ["r" * length])


def test_a_batch_is_begun_when_it_is_full_and_answers_find_their_requests():
    scorer = Lengths()
    found = run(scorer, lambda batcher, _: asyncio.gather(*(one(batcher, length) for length in (5, 1, 9, 3))))
    assert [answer["reward"] for answer in found] == [[5.0], [1.0], [9.0], [3.0]]
    assert scorer.batches == [[2, 4, 6, 10]]


def test_a_batch_that_is_not_full_is_begun_after_its_wait_and_at_the_end():
    scorer = Lengths()
    assert run(scorer, lambda batcher, _: one(batcher, 3), max_wait=0.0)["reward"] == [3.0]

    async def ended(batcher, meter):
        asked = asyncio.ensure_future(one(batcher, 7))
        await until(lambda: meter.queued != 0)
        batcher.hurry()
        return await asked

    assert run(scorer, ended)["reward"] == [7.0]


def test_lengths_are_together_and_the_oldest_goes_first():
    scorer = Lengths()
    scorer.open.clear()

    async def use(batcher, meter):
        first = asyncio.ensure_future(batcher.score(["p"] * 4, ["r"] * 4))
        await until(lambda: meter.queued >= 4)
        await until(lambda: meter.queued != 4)
        lengths = [50, 1, 51, 2, 52, 3, 53, 4]
        rest = [asyncio.ensure_future(one(batcher, length)) for length in lengths]
        await until(lambda: meter.queued >= 8)
        scorer.open.set()
        assert [(await asked)["reward"][0] for asked in rest] == lengths
        await first

    run(scorer, use)
    assert scorer.batches == [[2, 2, 2, 2], [51, 52, 53, 54], [2, 3, 4, 5]]


def test_a_queue_that_is_full_refuses_whole_requests_and_keeps_none_of_them():
    async def use(batcher, meter):
        waiting = asyncio.ensure_future(batcher.score(["p"] * 3, ["r"] * 3))
        await until(lambda: meter.queued >= 3)
        with pytest.raises(FullError) as full:
            await batcher.score(["p"] * 8, ["r"] * 8)
        assert full.value.seconds >= 1 and meter.queued == 3 and meter.refused == 1
        assert (await one(batcher, 2))["reward"] == [2.0]  # the fourth, with which a batch is full
        assert (await waiting)["cost"] == [1.0] * 3 and meter.queued == 0

    run(Lengths(), use, capacity=10)


def test_failing_request_does_not_fail_others():
    async def use(batcher, _):
        asked = [one(batcher, 3), batcher.score(["p"], ["bad"]), one(batcher, 5), one(batcher, 6)]
        return await asyncio.gather(*asked, return_exceptions=True)

    found = run(Lengths(), use)
    assert isinstance(found[1], ValueError)
    assert [answer["reward"] for answer in (found[0], *found[2:])] == [[3.0], [5.0], [6.0]]


def test_cancelled_requests_leave_the_queue():
    async def use(batcher, meter):
        gone = asyncio.ensure_future(batcher.score(["p"] * 3, ["r"] * 3))
        await until(lambda: meter.queued >= 3)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert meter.queued == 0
        assert await batcher.score([], []) == {"reward": [], "cost": []}

    run(Lengths(), use)


def test_counts_are_cumulative():
    meter = Meter()
    for size in (1, 3, 300):
        meter.batches.add(size)
    meter.statuses[200] += 2
    text = meter.text()
    for line in ('batch_size_bucket{le="1"} 1', 'batch_size_bucket{le="4"} 2', 'batch_size_bucket{le="256"} 2',
                 'batch_size_bucket{le="+Inf"} 3', "batch_size_sum 304", 'requests_total{status="200"} 2'):  # fmt: skip
        assert f"\nevoalign_scorer_{line}\n" in text
