# SPDX-License-Identifier: Apache-2.0
"""Workers of engine `ray` whose answers are checked, as real actors: forgers are found as often as said, honest ones
never thrown out, and the journal says who scored what."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom

import evoalign
from evoalign.config import from_dict
from evoalign.engines.ray import deal, team, wire
from evoalign.engines.ray.audit import Audit
from evoalign.engines.ray.replica import Replica
from evoalign.engines.ray.schedule import Schedule
from evoalign.engines.ray.team import Seat, Team
from evoalign.errors import ConfigError, EvoalignError
from evoalign.rundir import journal as journals
from evoalign.types import Plan, Request, Rollout, Sampling, population
from raying import cluster, journal, settings

pytestmark = pytest.mark.long
__all__ = ["cluster"]
TRIALS, MEMBERS, SHARE = 200, 24, 0.2


class Quick(Replica):
    """Says what it is told to, without a model: what is tested is who is believed."""

    forges = 0
    """Members whose answer it forges, the next ones that it is handed."""
    lies_as_checker = False
    handed: frozenset[int] = frozenset()

    def about(self) -> tuple[str, list[Any]]:
        return "float32", []

    def rollout(self, plan: bytes, requests: bytes) -> bytes:
        time.sleep(0.005)  # so that all of them get some
        members = wire.plan_of(plan).members
        text = "honest"
        if self.lies_as_checker and members[0].index in self.handed:
            text = "lie"
        elif self.forges:
            self.forges, text = self.forges - 1, "forged"
        return wire.rollouts_bytes(Rollout(m, 0, (m.index,), text, "stop") for m in members)

    def told(self, forges: int, lies: bool, handed: Sequence[int]) -> None:
        self.forges, self.lies_as_checker, self.handed = forges, lies, frozenset(handed)


class Lasting(Team):
    """Nobody's process ends as it is thrown out: it is needed for the next trial."""

    def _end(self, seat: Seat) -> None:
        pass

    def again(self) -> None:
        for seat in self.seats:
            seat.stage = "ready"
        self.expelled.clear()


@pytest.fixture(scope="module")
def workers(cluster: Any) -> Iterator[Lasting]:
    from ray import cloudpickle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(team, "Replica", Quick)
        patch.setattr(deal, "SLOW", 1e9)  # what a second one answers, too, would not be forged
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no module that an actor's process could import
        made = Lasting(from_dict(settings("lora", 4, audit=SHARE, chunk=1)))
    yield made
    made.close()


def rollout(workers: Lasting, schedule: Schedule, trial: int) -> tuple[list[str], set[int]]:
    """What all members are believed to have said, and who was thrown out."""
    workers.audit = Audit(workers.settings.audit, trial.to_bytes(32, "big"))
    requests = [Request(0, (1,), Sampling(4))]
    found = sorted(schedule.run(Plan(trial, 1.0, population(MEMBERS)), requests, 1), key=lambda r: r.member.index)
    assert [r.member.index for r in found] == list(range(MEMBERS))
    out = set(workers.expelled)
    workers.again()
    return [r.text for r in found], out


def tell(workers: Lasting, place: int, forges: int = 0, lies: bool = False, handed: Sequence[int] = ()) -> None:
    import ray

    ray.get(workers.seats[place].actor.told.remote(forges, lies, handed))


@pytest.mark.parametrize("forged", [1, 3])
def test_a_forger_of_k_members_is_found_as_often_as_the_share_says(workers: Lasting, forged: int) -> None:
    schedule, found = Schedule(workers), 0
    for trial in range(TRIALS):
        tell(workers, 1, forges=forged)
        said, out = rollout(workers, schedule, trial)
        assert out <= {1}
        found += bool(out)
        # All of a forger's work is scored again once it is found; else what it forged stands.
        assert said.count("forged") == (0 if out else forged)
    low, high = binom.interval(0.999, TRIALS, 1 - (1 - SHARE) ** forged)
    assert low <= found <= high


def test_one_who_lies_as_a_checker_expels_nobody_honest(workers: Lasting) -> None:
    schedule, found = Schedule(workers), 0
    for trial in range(TRIALS):
        # Members of even index are others' to answer first: whoever lies has not been handed them yet.
        tell(workers, 2, lies=True, handed=range(MEMBERS))
        said, out = rollout(workers, schedule, trial)
        assert out <= {2}
        found += bool(out)
        assert not out or "lie" not in said
    tell(workers, 2)
    assert found > TRIALS / 2


def test_honest_workers_are_never_thrown_out(workers: Lasting) -> None:
    schedule = Schedule(workers)
    for trial in range(TRIALS):
        assert rollout(workers, schedule, trial) == (["honest"] * MEMBERS, set())
    assert schedule.counts["checked"] > 0.5 * SHARE * TRIALS * MEMBERS


def test_the_journal_says_who_scored_what_and_is_else_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Forger(Replica):
        """Whoever makes the file first is the one: it changes all its answers."""

        def rollout(self, plan: bytes, requests: bytes) -> bytes:
            answers = super().rollout(plan, requests)
            members = wire.plan_of(plan).members
            if members[0].is_mean:
                return answers
            try:
                (tmp_path / "forger").open("x").close()
                self._forges = True
            except FileExistsError:
                pass
            rows = json.loads(answers)
            for row in rows if getattr(self, "_forges", False) else ():
                row[3] += " forged"
            return json.dumps(rows).encode()

    given = settings("lora", 3, audit=1.0)
    given["checks"]["canary_every"] = 0
    wanted = journal(tmp_path / "honest", given)
    assert all(len(set(chunk["by"])) == 2 for line in wanted[::2] for chunk in line["scored_by"]["chunks"])
    monkeypatch.setattr(team, "Replica", Forger)
    found = journal(tmp_path / "forged", given)
    assert (tmp_path / "forger").exists()
    assert [{**line, "scored_by": None} for line in found] == [{**line, "scored_by": None} for line in wanted]
    last = found[-2]["scored_by"]
    (out,) = last["expelled"]
    assert last["expelled"][out] == "gave another answer than two others"
    assert all(int(out) not in chunk["by"] for line in found[::2] for chunk in line["scored_by"]["chunks"])
    assert journals.read(tmp_path / "forged" / "journal.jsonl").sealed == 3


def test_of_two_who_differ_nobody_is_believed(workers: Lasting) -> None:
    workers.audit = Audit(1.0)
    tell(workers, 1, forges=1)
    for place in (0, 3):
        workers.seats[place].stage = "out"
    try:
        with pytest.raises(EvoalignError, match="chunks are left that no replica can answer or check"):
            list(Schedule(workers).run(Plan(0, 1.0, population(4)), [Request(0, (1,), Sampling(4))], 1))
    finally:
        workers.again()


def test_answers_that_cannot_be_repeated_are_not_compared() -> None:
    with pytest.raises(ConfigError, match=r"engine\.audit compares answers bit by bit"):
        evoalign.train({**settings("lora", 3, audit=0.5), "deterministic": False})
