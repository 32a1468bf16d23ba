# SPDX-License-Identifier: Apache-2.0
"""Real actors of which one is four times as slow: what is answered is the same, and only who answers it is another.

How long it takes is held in virtual time by tests/engines/test_ray_straggler.py: here machines would be compared.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from evoalign.config import from_dict
from evoalign.engines.ray import team, wire
from evoalign.engines.ray.replica import Replica
from evoalign.engines.ray.schedule import Schedule
from evoalign.engines.ray.team import Team
from evoalign.types import Plan, Request, Rollout, Sampling, population
from raying import cluster, settings

pytestmark = pytest.mark.long
__all__ = ["cluster"]
MEMBERS, MEMBER, SLOWNESS = 128, 0.02, 4


class Sleeper(Replica):
    """Takes a known time for each member, and counts those whom it answered for."""

    seconds = MEMBER
    answered = 0

    def about(self) -> tuple[str, list[Any]]:
        return "float32", []

    def takes(self, seconds: float) -> None:
        self.seconds = seconds

    def count(self) -> int:
        return self.answered

    def rollout(self, members: bytes, asked: bytes) -> bytes:
        who = wire.members_of(members)
        time.sleep(len(who) * self.seconds)
        self.answered += len(who)
        return wire.rollouts_bytes(Rollout(m, 0, (m.index,), f"member {m.index}", "stop") for m in who)


@pytest.fixture
def workers(cluster: Any) -> Iterator[Team]:
    from ray import cloudpickle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(team, "Replica", Sleeper)
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no module that an actor's process could import
        made = Team(from_dict(settings("lora", 4, chunk=4)))
        while len(made.ready) < 4:
            made.welcome()
    yield made
    made.close()


@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_replica_answers_less_and_changes_nothing(workers: Team, cluster: Any, slow: int) -> None:
    cluster.get(workers.seats[slow].actor.takes.remote(SLOWNESS * MEMBER))
    schedule, plan = Schedule(workers), Plan(0, 1.0, population(MEMBERS))
    for _ in range(3):
        found = Counter(
            (r.member.index, r.text, r.token_ids) for r in schedule.run(plan, [Request(0, (1,), Sampling(4))], 4)
        )
        assert found == Counter((i, f"member {i}", (i,)) for i in range(MEMBERS))
    counts = cluster.get([seat.actor.count.remote() for seat in workers.seats])
    # By their speeds it is 4 of 52; an equal share would be 1 of 4.
    assert 0 < counts[slow] < 0.15 * sum(counts)
    assert all(counts[slow] < count for place, count in enumerate(counts) if place != slow)
