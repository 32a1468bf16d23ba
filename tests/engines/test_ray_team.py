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
from evoalign.engines.ray.team import LOADS, FaultError, Seat, Team
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
