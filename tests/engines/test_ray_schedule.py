# SPDX-License-Identifier: Apache-2.0
"""How chunks of a rollout are made and which replica gets which, without Ray; durations are in virtual time."""

import random
import runpy
from pathlib import Path

import pytest

from evoalign.engines.ray.schedule import REQUESTS, Chunk, Scheduler, chunks_of
from evoalign.types import MEAN, Plan, Request, Sampling, population


def scheduler_of(count):
    return Scheduler([Chunk[str](load) for load in range(count)])


def take(scheduler, replica, now):
    chunk = scheduler.next(replica, now)
    assert chunk is not None
    return chunk


def test_chunks_cover_each_member_and_request_once():
    members = population(5)
    shared = [Request(i, (1,), Sampling(4)) for i in range(2)]
    named = [Request(10 + i, (1,), Sampling(4), member=members[i % 5]) for i in range(REQUESTS + 1)]
    parts = list(chunks_of(Plan(3, 0.5, members), [*shared, *named], 2))
    assert [[m.index for m in plan.members] for plan, _ in parts[:3]] == [[0, 1], [2, 3], [4]]
    assert all(requests == shared for _, requests in parts[:3])
    assert [len(requests) for _, requests in parts[3:]] == [REQUESTS, 1]
    assert parts[-1][0].members == (members[REQUESTS % 5],)
    assert {(plan.generation, plan.sigma) for plan, _ in parts} == {(3, 0.5)}
    requests = [Request(i, (1,), Sampling(4)) for i in range(REQUESTS + 1)]
    parts = list(chunks_of(Plan(0, 0.0, (MEAN,)), requests, 8))
    assert [len(part) for _, part in parts] == [REQUESTS, 1], "chunks of one member are made of requests"


def test_lost_chunk_goes_to_another_replica():
    scheduler = scheduler_of(3)
    chunks = [take(scheduler, replica, 0.0) for replica in "abc"]
    assert [chunk.load for chunk in chunks] == [0, 1, 2]
    assert scheduler.next("d", 0.0) is None  # no duration is known yet
    scheduler.lost("b", chunks[1])
    assert scheduler.next("d", 1.0) is chunks[1]
    assert all(scheduler.finished(*pair, 2.0) for pair in zip("adc", chunks, strict=True))
    assert scheduler.open == 0


def test_slow_chunk_is_handed_out_again_and_the_first_result_counts():
    scheduler = scheduler_of(3)
    first, slow = take(scheduler, "a", 0.0), take(scheduler, "b", 0.0)
    assert scheduler.finished("a", first, 1.0)
    third = take(scheduler, "a", 1.0)
    assert scheduler.finished("a", third, 2.0)
    assert scheduler.next("a", 2.0) is slow and scheduler.copies == 1
    assert scheduler.next("c", 9.0) is None  # two replicas have it
    assert scheduler.finished("a", slow, 3.0) and scheduler.open == 0
    assert not scheduler.finished("b", slow, 30.0)


def test_chunk_whose_second_replica_is_lost_stays_with_the_first():
    scheduler = scheduler_of(2)
    first, slow = take(scheduler, "a", 0.0), take(scheduler, "b", 0.0)
    scheduler.finished("a", first, 1.0)
    assert scheduler.next("a", 2.0) is slow
    scheduler.lost("a", slow)
    assert not scheduler.todo and scheduler.open == 1
    scheduler.lost("b", slow)
    assert list(scheduler.todo) == [slow]


def paced(count):
    """Return a scheduler at 4 s, and the chunk that `fast` has: it takes 1 s and `slow` 4 s, and `count` are left."""
    scheduler = scheduler_of(6 + count)
    held = take(scheduler, "slow", 0.0)
    for second in range(4):
        scheduler.finished("fast", take(scheduler, "fast", second), second + 1.0)
    current = take(scheduler, "fast", 4.0)
    scheduler.finished("slow", held, 4.0)
    return scheduler, current


def test_slow_replica_declines_what_others_finish_before_it():
    """`slow` would finish at 8 s, when `fast` has finished its current chunk and three more."""
    assert paced(3)[0].next("slow", 4.0) is None
    assert paced(4)[0].next("slow", 4.0) is not None
    scheduler, current = paced(2)
    assert scheduler.next("new", 4.0) is not None  # no duration is known
    scheduler.finished("fast", current, 5.0)
    assert scheduler.next("fast", 5.0) is not None and scheduler.next("slow", 5.0) is None


def test_slow_replica_does_not_wait_for_lost_or_late_ones_and_is_not_slow_after_a_restart():
    scheduler, current = paced(2)
    assert scheduler.next("slow", 5.4) is None
    assert scheduler.next("slow", 5.6) is not None  # `fast` has had its chunk for more than 1.5 times its 1 s
    scheduler, current = paced(1)
    assert scheduler.next("slow", 4.0) is None
    scheduler.lost("fast", current)
    assert scheduler.next("slow", 4.0) is current
    scheduler, current = paced(4)
    chunk = take(scheduler, "slow", 4.0)
    scheduler.finished("fast", current, 5.0)
    assert scheduler.next("fast", 5.0) is not None
    scheduler.lost("slow", chunk)
    assert scheduler.next("slow", 5.0) is chunk  # before, it would have declined the three that are left


def test_all_chunks_are_finished_for_any_order_and_speed():
    for seed in range(300):
        draw = random.Random(seed)
        count, now = draw.randint(1, 30), 0.0
        scheduler, finished = scheduler_of(count), 0
        busy = {}
        names = "abcdef"[: draw.randint(1, 6)]
        while scheduler.open:
            for name in draw.sample(names, len(names)):
                chunk = None if name in busy else scheduler.next(name, now)
                if chunk is not None:
                    busy[name] = now + draw.choice([1.0, 1.1, 4.0, 20.0]), chunk
            assert busy, "chunks are left, and no replica has one"
            name = min(busy, key=lambda w: busy[w][0])
            now, chunk = busy.pop(name)
            if draw.random() < 0.1:
                scheduler.lost(name, chunk)
            else:
                finished += scheduler.finished(name, chunk, now)
        assert finished == count


# --- four replicas of which one is four times as slow; studies/ray_straggler.py measures real seconds ---

EVENTS = runpy.run_path(str(Path(__file__).parents[2] / "studies" / "ray_events.py"))
MEMBERS, MEMBER, SLOWNESS, GENERATIONS, JITTER = 256, 0.020, 4.0, 20, 0.1


def ratios(chunk, slow, seed, rules="Scheduler"):
    """Return each generation's seconds over work / (sum of speeds). Each chunk takes up to a tenth more or less."""
    draw = random.Random(seed)
    workers = [EVENTS["Worker"](place, SLOWNESS if place == slow else 1.0) for place in range(4)]

    def seconds(worker, members):
        return members * MEMBER * worker.slowness * draw.uniform(1 - JITTER, 1 + JITTER)

    cluster = EVENTS["Cluster"](workers, seconds, EVENTS["Costs"](), rules=EVENTS[rules])
    least = MEMBERS * MEMBER / sum(1 / worker.slowness for worker in workers)
    return [cluster.rollout(EVENTS["sizes_of"](MEMBERS, chunk)) / least for _ in range(GENERATIONS)]


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16])
def test_slow_replica_costs_at_most_15_percent(chunk):
    found = [max(ratios(chunk, slow, seed)) for slow in (0, 3) for seed in range(10)]
    assert max(found) <= 1.15
    assert min(found) >= 1 - JITTER  # less would mean that the virtual clock is wrong


@pytest.mark.parametrize("chunk", [4, 8, 16])
def test_slow_replica_costs_more_if_it_never_declines(chunk):
    assert max(max(ratios(chunk, 0, seed, "Undeclined")) for seed in range(10)) > 1.15
