# SPDX-License-Identifier: Apache-2.0
"""Who is dealt which chunk, and which answers are believed, without Ray."""

from __future__ import annotations

import random
from typing import Any

import pytest
from scipy.stats import binom

from evoalign.engines.ray.audit import Audit
from evoalign.engines.ray.deal import Chunk, Deal
from evoalign.errors import ConfigError
from evoalign.types import Plan, population


def chunks(count: int) -> list[Chunk[str]]:
    return [Chunk[str](load) for load in range(count)]


def test_each_chunk_is_answered_once_and_a_lost_one_by_another() -> None:
    deal = Deal(chunks(3))
    first = [deal.next(w, 0.0) for w in "abc"]
    assert [c.load for c in first if c] == [0, 1, 2]
    assert deal.next("d", 0.0) is None  # nobody knows yet what is slow
    assert first[1] is not None
    deal.lost("b", first[1])
    again = deal.next("d", 1.0)
    assert again is first[1]
    for worker, chunk in zip("adc", first, strict=True):
        assert chunk is not None
        assert deal.answered(worker, chunk, "x", 2.0) == []
    assert deal.open == 0 and [c.by for c in deal.chunks] == [["a"], ["d"], ["c"]]


def test_what_is_slow_is_dealt_once_more_and_the_first_answer_counts() -> None:
    deal = Deal(chunks(3))
    held = [deal.next(w, 0.0) for w in "ab"]
    assert held[0] is not None and held[1] is not None
    deal.answered("a", held[0], 1, 1.0)
    third = deal.next("a", 1.0)
    assert third is not None and third.load == 2
    deal.answered("a", third, 1, 2.0)
    copy = deal.next("a", 2.0)
    assert copy is not None and copy is held[1] and deal.copies == 1
    assert deal.next("c", 9.0) is None  # two have it
    deal.answered("a", copy, "fast", 3.0)
    assert deal.answered("b", copy, "late", 30.0) == [] and copy.believed == "fast" and deal.open == 0


def paced(count: int) -> tuple[Deal[str], list[Chunk[str] | None]]:
    """A rollout in which `a` took 1 s for a chunk, and `slow` 4 s. At 4 s so many are left, and `a` has one since."""
    deal = Deal(chunks(6 + count))
    held = [deal.next("slow", 0.0)]
    for second in range(4):
        chunk = deal.next("a", second)
        assert chunk is not None
        deal.answered("a", chunk, "x", second + 1.0)
    held.append(deal.next("a", 4.0))
    assert held[0] is not None
    deal.answered("slow", held[0], "x", 4.0)
    return deal, held


def test_a_slow_worker_leaves_to_others_what_they_will_have_done_before_it() -> None:
    """It would end at 8 s, by when `a` will have ended the one that it has and three more."""
    assert paced(3)[0].next("slow", 4.0) is None
    assert paced(4)[0].next("slow", 4.0) is not None
    deal, held = paced(2)
    assert deal.next("b", 4.0) is not None  # of whom nothing is known
    assert held[1] is not None
    deal.answered("a", held[1], "x", 5.0)
    assert deal.next("a", 5.0) is not None and deal.next("slow", 5.0) is None


def test_a_slow_worker_waits_for_nobody_who_is_gone_or_late() -> None:
    deal, held = paced(2)
    assert deal.next("slow", 5.4) is None
    assert deal.next("slow", 5.6) is not None  # `a` has had its own for more than 1.5 times its second
    deal, held = paced(1)
    assert deal.next("slow", 4.0) is None and held[1] is not None
    deal.lost("a", held[1])
    assert deal.next("slow", 4.0) is held[1]


def test_one_who_was_started_again_is_not_slow_for_what_it_was() -> None:
    deal, held = paced(4)
    chunk = deal.next("slow", 4.0)
    assert chunk is not None and held[1] is not None
    deal.answered("a", held[1], "x", 5.0)
    assert deal.next("a", 5.0) is not None
    deal.lost("slow", chunk)
    assert deal.next("slow", 5.0) is chunk  # of the three that are left: `a` would have done them by 9 s


def test_all_are_dealt_whoever_declines() -> None:
    """Workers of random and changing paces, who are asked in any order: somebody always takes what is left."""
    for seed in range(300):
        draw = random.Random(seed)
        deal, now = Deal(chunks(draw.randint(1, 30))), 0.0
        busy: dict[str, tuple[float, Chunk[str]]] = {}
        workers = "abcdef"[: draw.randint(1, 6)]
        while deal.open:
            for worker in draw.sample(workers, len(workers)):
                chunk = None if worker in busy else deal.next(worker, now)
                if chunk is not None:
                    busy[worker] = now + draw.choice([1.0, 1.1, 4.0, 20.0]), chunk
            assert busy, "chunks are left, and nobody has one"
            worker = min(busy, key=lambda w: busy[w][0])
            now, chunk = busy.pop(worker)
            if draw.random() < 0.1:
                deal.lost(worker, chunk)
            else:
                deal.answered(worker, chunk, "x", now)
        assert all(chunk.believed == "x" for chunk in deal.chunks)


def checked(deal_chunks: list[Chunk[str]]) -> Deal[str]:
    return Deal(deal_chunks, lambda _: True)


def test_a_checked_chunk_takes_two_equal_answers_of_two_workers() -> None:
    deal = checked(chunks(1))
    chunk = deal.next("a", 0.0)
    assert chunk is not None
    deal.answered("a", chunk, "yes", 1.0)
    assert deal.open == 1 and deal.next("a", 1.0) is None  # not by itself
    assert deal.next("b", 1.0) is chunk
    assert deal.answered("b", chunk, "yes", 2.0) == [] and chunk.by == ["a", "b"] and deal.open == 0


@pytest.mark.parametrize("liar", ["a", "b"])
def test_where_two_differ_a_third_decides_whoever_of_them_is_wrong(liar: str) -> None:
    deal = checked(chunks(1))
    chunk = deal.next("a", 0.0)
    assert chunk is not None
    found: list[str] = []
    for worker in "abc":
        assert worker == "a" or deal.next(worker, 1.0) is chunk
        found += deal.answered(worker, chunk, "wrong" if worker == liar else "right", 1.0)
    assert found == [liar] and chunk.believed == "right"


def test_what_a_liar_alone_has_answered_is_answered_anew() -> None:
    drawn = {0}
    deal = Deal(chunks(3), lambda chunk: chunk.load in drawn)
    mine = [deal.next("a", 0.0), deal.next("b", 0.0), deal.next("b", 0.0)]
    for worker, chunk in zip("abb", mine, strict=True):
        assert chunk is not None
        deal.answered(worker, chunk, f"by {worker}", 1.0)
    assert deal.open == 1  # the two of b are believed
    check = deal.next("b", 1.0)
    assert check is mine[0] and check is not None
    deal.answered("b", check, "lie", 2.0)
    assert deal.next("c", 2.0) is check
    assert deal.answered("c", check, "by a", 3.0) == ["b"]
    deal.disown("b")
    assert deal.open == 2 and sorted(c.load for c in deal.chunks if not c.is_done) == [1, 2]
    assert {deal.next("a", 3.0), deal.next("c", 3.0)} == {mine[1], mine[2]}


def play(seed: int, share: float, forged: int, liar: str = "") -> tuple[bool, set[str]]:
    """A rollout of 24 chunks by four workers of whom one forges its first answers, or lies as it checks."""
    draw = random.Random(seed)
    plan, made = Plan(0, 1.0, population(24)), chunks(24)
    deal = Deal(made, Audit(share, seed.to_bytes(32, "big")).draws(plan, made))
    wrong: set[str] = set()
    left, workers = forged, ["a", "b", "c", "d"]
    while deal.open:
        worker = draw.choice(workers)
        chunk = deal.next(worker, 0.0)
        if chunk is None:
            continue
        answer: Any = chunk.load
        if worker == "a" and not chunk.answers and left:
            left, answer = left - 1, "forged"
        elif worker == liar and chunk.answers:
            answer = "lie"
        for other in deal.answered(worker, chunk, answer, 0.0):
            wrong.add(other)
            workers.remove(other)
            deal.disown(other)
    right = all(c.believed == c.load for c in made)
    return right, wrong


@pytest.mark.parametrize(("share", "forged"), [(0.1, 1), (0.1, 5), (0.3, 2)])
def test_a_forger_is_found_as_often_as_the_share_says(share: float, forged: int) -> None:
    trials = 2000
    found = [play(seed, share, forged) for seed in range(trials)]
    assert all(wrong <= {"a"} for _, wrong in found)
    assert all(right for right, wrong in found if wrong)  # all of it is scored again
    low, high = binom.interval(0.999, trials, 1 - (1 - share) ** forged)
    assert low <= sum(bool(wrong) for _, wrong in found) <= high


def test_a_checker_who_lies_expels_nobody_honest() -> None:
    found = [play(seed, 0.3, 0, liar="b") for seed in range(300)]
    assert all(wrong <= {"b"} and right for right, wrong in found) and sum(bool(w) for _, w in found) > 200
    assert all(play(seed, 1.0, 0) == (True, set()) for seed in range(50))


def test_checks_take_three_replicas_and_repeatable_answers() -> None:
    from evoalign.config import from_dict

    with pytest.raises(ConfigError, match="audit takes three replicas"):
        from_dict({"engine": {"name": "ray", "replicas": 2, "audit": 0.1}, "es": {"sigma": 0.1}})
    with pytest.raises(ConfigError, match="at_least 4 is more than replicas 3"):
        from_dict({"engine": {"name": "ray", "replicas": 3, "at_least": 4}, "es": {"sigma": 0.1}})


def test_what_is_answered_anew_is_drawn_anew() -> None:
    made = chunks(400)
    draws = Audit(0.3, b"secret").draws(Plan(0, 1.0, population(400)), made)
    first, second = [draws(c) for c in made], [draws(c) for c in made]
    assert first != second and 80 < sum(b for a, b in zip(first, second, strict=True) if not a) < 130


def test_the_order_in_which_members_are_dealt_is_a_secret_where_answers_are_checked() -> None:
    made, audit = chunks(50), Audit(0.3, b"secret")
    found = audit.shuffled(made)
    assert found != made and set(found) == set(made) and Audit(0.3, b"another").shuffled(made) != found


def test_a_check_that_hangs_is_dealt_to_another() -> None:
    deal = checked(chunks(2))
    one, two = deal.next("a", 0.0), deal.next("b", 0.0)
    assert one is not None and two is not None
    deal.answered("a", one, "x", 1.0)
    deal.answered("b", two, "y", 1.0)
    assert deal.next("a", 1.0) is two and deal.next("b", 1.0) is one
    deal.answered("a", two, "y", 2.0)
    assert deal.next("a", 100.0) is None  # it answered that first
    assert deal.next("c", 100.0) is one
    assert deal.answered("c", one, "x", 101.0) == [] and deal.open == 0
