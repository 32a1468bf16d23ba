# SPDX-License-Identifier: Apache-2.0
"""Replicas of engine `ray` that join in mid-run, by replay and by a copy, checked by hash; and the canary of each."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from evoalign.checks import canary
from evoalign.config import Config, from_dict
from evoalign.engines.ray import copying, team
from evoalign.engines.ray.engine import RayEngine
from evoalign.engines.ray.replica import Replica
from evoalign.errors import CanaryError
from evoalign.testing import engines as contract
from evoalign.types import Rollout, population
from raying import CORES, all_hashes, call, cluster, engine_of, settings

pytestmark = pytest.mark.long
__all__ = ["cluster"]
SPACES: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, adam": {"es": {"optimizer": {"name": "adam"}, "num_generations": 3, "sigma": 0.01, "learning_rate": 0.01}},
    "lowrank": {},
    "full": {"es": {"decay": 0.1, "num_generations": 3, "sigma": 0.01, "learning_rate": 0.01}},
}


def config_of(variant: str, replicas: int = 2, **ray: Any) -> Config:
    given = settings(variant.partition(",")[0], replicas, **ray)
    return from_dict(given | {"es": given["es"] | SPACES[variant].get("es", {})})


@pytest.mark.parametrize("how", ["replay", "copy"])
@pytest.mark.parametrize("variant", SPACES)
def test_who_joins_stands_where_the_others_do(variant: str, how: str) -> None:
    with contract.started(RayEngine, config_of(variant, catch_up=how)) as bench:
        of = engine_of(bench).team
        for index in range(3):
            bench.engine.apply(dataclasses.replace(bench.update(), index=index))
        wanted = bench.engine.fingerprint()
        of.revive(of.seats[1], "is started again by a test")
        assert len(of.ready) == 1 and of.seats[1].stage == "loading"
        assert all_hashes(bench) == [wanted] * 2
        assert of.seats[1].copies == (how == "copy")
        # Also what the mean is moved by later: slots of the optimizer, the start that decay leads to.
        bench.engine.apply(dataclasses.replace(bench.update(), index=3))
        assert len(set(all_hashes(bench))) == 1 and bench.engine.fingerprint() != wanted


def test_updates_reach_who_is_still_joining() -> None:
    with contract.started(RayEngine, config_of("lora")) as bench:
        of = engine_of(bench).team
        bench.engine.apply(bench.update())
        of.revive(of.seats[0], "is started again by a test")
        for index in range(1, 5):
            bench.engine.apply(dataclasses.replace(bench.update(), index=index))
            list(bench.engine.rollout(bench.plan(population(2)), bench.requests))
            bench.engine.fingerprint()
        assert len(set(all_hashes(bench))) == 1 and len(of.ready) == 2


def test_a_copy_that_is_not_what_it_should_be_is_made_good_by_replay(caplog: pytest.LogCaptureFixture) -> None:
    with contract.started(RayEngine, config_of("lora", catch_up="copy")) as bench:
        of = engine_of(bench).team
        bench.engine.apply(bench.update())
        wanted = bench.engine.fingerprint()

        def spoil(replica: Any) -> None:
            whole = replica._engine.state
            replica._engine.state = lambda: ((name, tensor + 1) for name, tensor in whole())

        call(of.seats[0], spoil)
        of.revive(of.seats[1], "is started again by a test")
        assert all_hashes(bench) == [wanted] * 2
        assert "came to another mean" in caplog.text and not of.seats[1].copies


def test_nobody_waits_long_for_a_copy_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with contract.started(RayEngine, config_of("lora", catch_up="copy")) as bench:
        of = engine_of(bench).team
        bench.engine.apply(bench.update())

        def impatient(replica: Any) -> bool:
            from datetime import timedelta

            copying.PATIENCE = timedelta(seconds=1)
            replica.listen("gloo", "127.0.0.1")
            return replica.give()

        assert call(of.seats[0], impatient) is False
        assert len(set(all_hashes(bench))) == 1  # who gave is none the worse for it


def test_replicas_join_once_there_is_room_for_them(cluster: Any) -> None:
    room = cluster.util.placement_group([{"CPU": CORES - 2}])
    assert room.wait(60)
    with contract.started(RayEngine, config_of("lora", 4, at_least=1)) as bench:
        of, plan = engine_of(bench).team, bench.plan(population(8))
        assert {seat.stage for seat in of.seats} == {"ready", "waiting"} and len(of.ready) <= 2
        bench.engine.apply(bench.update())
        wanted, alone = bench.engine.fingerprint(), list(bench.engine.rollout(plan, bench.requests))
        cluster.util.remove_placement_group(room)
        until, found = time.monotonic() + 300, alone
        while len(of.ready) < 4 and time.monotonic() < until:
            found = list(bench.engine.rollout(plan, bench.requests))
        assert sorted(found, key=_place) == sorted(alone, key=_place)
        assert all_hashes(bench) == [wanted] * 4
        assert bench.engine.metrics()["replicas"] == 4


def _place(rollout: Rollout) -> tuple[int, int]:
    return rollout.member.index, rollout.request


def test_the_canary_asks_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(Replica):
        """The second of them ignores the members' adapters."""

        def rollout(self, members: bytes, asked: bytes) -> bytes:
            def nothing(*_: Any) -> None:
                """In place of members' adapters."""

            if self._deaf:
                self._engine._put_adapters = nothing
            return super().rollout(members, asked)

        _deaf = False

    monkeypatch.setattr(team, "Replica", Deaf)
    config = config_of("lora")
    with contract.started(RayEngine, config) as bench:
        call(engine_of(bench).team.seats[1], lambda replica: setattr(replica, "_deaf", True))
        parts = bench.engine.parts()
        assert len(parts) == 2
        prompt = bench.requests[0].prompt_ids

        def check(engine: Any) -> None:
            canary.check(engine, bench.space, bench.layout, prompt, generation=0, width=0.01, exact=True)

        check(parts[0])
        with pytest.raises(CanaryError, match="completion of the unperturbed model"):
            check(parts[1])
        assert not hasattr(parts[0], "apply"), "one replica alone is moved by nobody"
