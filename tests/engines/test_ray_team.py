# SPDX-License-Identifier: Apache-2.0
"""Who may join the replicas of engine `ray` and how long that may take, without Ray."""

from __future__ import annotations

import dataclasses
import time
from typing import Any
from unittest.mock import MagicMock

import pytest

from evoalign.config import from_dict
from evoalign.engines.ray.audit import Audit
from evoalign.engines.ray.calls import FaultError, line_of
from evoalign.engines.ray.team import LOADS, Seat, Team
from evoalign.engines.ray.wire import GarbageError, stand_of
from evoalign.errors import ModelError
from evoalign.types import Facts

FACTS = Facts("transformers", "cpu", "float32", True, "a" * 64, 0)


class Somewhere:
    """A cluster of which the host of some replicas is away."""

    def __init__(self, *there: int) -> None:
        self.there = list(there)

    def placed(self) -> list[int]:
        return self.there

    def node(self, place: int) -> str:
        return f"host {place}"


def team(*there: int, audit: float = 0.0) -> Any:
    made: Any = Team.__new__(Team)
    made.settings = from_dict({"engine": {"name": "ray", "replicas": 3, "patience": 10}, "es": {"sigma": 0.1}}).engine
    made.cluster, made.audit = Somewhere(*there), Audit(audit) if audit else None
    made.seats, made.facts, made.load_seconds, made.updates = [Seat(place) for place in range(3)], None, 0.0, []
    return made


def test_a_model_may_take_longer_to_load_than_an_answer() -> None:
    made = team()
    assert made.join_limit == 10
    made.load_seconds = 60.0
    assert made.join_limit == LOADS * 60


def test_while_its_host_is_away_a_replica_is_not_late() -> None:
    made, revived = team(), list[str]()
    made.revive = lambda seat, why: revived.append(why)
    seat = made.seats[1]
    seat.since = time.monotonic() - 1000
    made._overdue(seat)
    assert revived == [] and time.monotonic() - seat.since < 10
    made.cluster.there = [1]
    made._overdue(seat)
    assert revived == ["did not join within 10 s"]


def test_who_loaded_another_model_is_none_of_the_run() -> None:
    made = team()
    assert made.seen(made.seats[0], (FACTS, "this CPU")) == ""
    assert made.seen(made.seats[1], (FACTS, "another CPU")) == ""
    other = dataclasses.replace(FACTS, model_hash="b" * 64)
    assert "loaded other weights" in made.seen(made.seats[2], (other, "this CPU"))
    loose = dataclasses.replace(FACTS, deterministic=False)
    assert "repeats no answer" in made.seen(made.seats[2], (loose, "this CPU"))
    with pytest.raises(GarbageError):
        made.seen(made.seats[2], ("facts", 3))


def test_where_answers_are_checked_no_replica_of_another_kind_joins() -> None:
    made = team(audit=0.5)
    for seat in made.seats[:2]:
        assert made.seen(seat, (FACTS, "this CPU")) == ""
        seat.stage = "ready"
    made.seats[2].stage = "loading"
    assert "is of another kind (another CPU)" in made.seen(made.seats[2], (FACTS, "another CPU"))
    assert made.seen(made.seats[2], (FACTS, "this CPU")) == ""


def test_a_copy_of_nothing_tells_no_speed() -> None:
    made = team(0, 1, 2)
    made.known, made.loaded, made.mean_bytes, made._update_seconds, made._copy_rate = {}, [], 100, 1.0, 50.0
    made._stood(made.seats[0], (0, "a" * 64, 0.0, 0, 1.0))
    made.updates = [b""] * 3
    assert made._copying_pays(made.seats[1])


@pytest.mark.parametrize("there, stage", [((1,), "loading"), ((), "waiting")])
def test_who_goes_with_its_host_waits_for_room(there: tuple[int, ...], stage: str) -> None:
    """To start it at once would cost it one more of its restarts."""
    made, seat = team(*there), Seat(1, actor=MagicMock(), stage="ready")
    made.cluster.check, made.cluster.actor, made._ray = MagicMock(), MagicMock(), MagicMock()
    made.begin, made._config = ((), True, False), None
    made.revive(seat, "died")
    assert (seat.stage, seat.restarts) == (stage, 1)
    assert (seat.actor is None) == (stage == "waiting")


def test_a_death_is_told_in_short() -> None:
    told = line_of(
        RuntimeError(
            "The actor died unexpectedly before finishing this task.\n\tclass_name: Replica\n\tpid: 4711\n"
            "\tip: 10.0.0.7\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
            "End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer"
        )
    )
    assert told == (
        "RuntimeError (pid 4711, ip 10.0.0.7): The actor is dead because its worker process has died. "
        "Worker exit type: SYSTEM_ERROR End of file."
    )
    assert line_of(ValueError("no\nmore room")) == "ValueError: more room" and line_of(ValueError()) == "ValueError: "


def ray_lines(members: int, dense: bool = False, **engine: Any) -> list[str]:
    made = from_dict({"engine": {"name": "ray", "replicas": 4, **engine}, "es": {"sigma": 0.1}}).engine
    return made.lines(members, dense)


def test_the_run_says_who_shares_what_and_who_has_nothing_to_do() -> None:
    assert ray_lines(32) == ["engine ray: 4 replicas of transformers on this host share 32 members, 8 at a time"]
    (said,) = ray_lines(4, dense=True, address="10.0.0.1:6379")
    assert "on the cluster 10.0.0.1:6379 share 4 members, 1 at a time" in said
    assert "2 chunks, and 2 of the replicas have nothing to do: lower engine.chunk (to 4 or less)" in ray_lines(16)[1]
    assert ray_lines(2)[1].endswith("lower engine.replicas")
    assert ray_lines(2, dense=True)[1].endswith("lower engine.replicas")


def test_a_refusal_is_fetched_from_every_replica() -> None:
    """Ray prints an error that nobody fetched as one that nobody saw."""
    made, fetched = team(0, 1, 2), list[int]()

    def get(seat: Seat, ref: object) -> object:
        fetched.append(seat.place)
        raise ModelError("it does not fit") if seat.place else FaultError("died")

    made.get, made.revive = get, MagicMock()
    for seat in made.seats:
        seat.stage, seat.actor = "ready", MagicMock()
    with pytest.raises(ModelError, match="it does not fit"):
        made.ask_all("load", False)
    assert fetched == [0, 1, 2]


@pytest.mark.parametrize(
    "said",
    [
        (1, "a" * 64, 0.0, 0, float("inf")),
        (1, "a" * 64, 0.0, 10**400, 1.0),
        (-1, "a" * 64, 0.0, 0, 0.0),
        (True, "a" * 64, 0.0, 0, 0.0),
        (1, "A" * 64, 0.0, 0, 0.0),
        (1, "a" * 64, 0.0, 0),
        "no tuple",
    ],
)
def test_what_is_no_hash_of_a_mean_is_garbage(said: object) -> None:
    with pytest.raises(GarbageError):
        stand_of(said)
