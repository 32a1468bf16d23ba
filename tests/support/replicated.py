# SPDX-License-Identifier: Apache-2.0
"""Checks that two replicas give what one engine without Ray gives for the same chunks. Linux only."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from evoalign import engines
from evoalign.config import Config
from evoalign.engines.ray.engine import RayEngine
from evoalign.engines.ray.replicas import Replica, checked_rollouts
from evoalign.engines.ray.schedule import chunks_of
from evoalign.engines.ray.settings import RayConfig
from evoalign.engines.server.adapters import MARK, OURS
from evoalign.rundir.files import locked
from evoalign.testing.engines import Bench, started
from evoalign.types import MEAN, Plan, Rollout, population

MEMBERS, CHUNK = 6, 3
SHELVES = Path("/dev/shm")
ENDING = 10.0
"""Seconds that processes may take to end after the one that started them."""

Answers = dict[tuple[int, int], Rollout]
Same = Callable[[Bench, Rollout, Rollout], None]


def equal(_: Bench, one: Rollout, other: Rollout) -> None:
    """Raise AssertionError if two rollouts differ in anything, log-probabilities included."""
    assert one == other


def two_of(alone: Config) -> Config:
    """Return a config with two replicas of its engine."""
    engine = RayConfig(name="ray", replicas=2, chunk=CHUNK, compare_every=1, replica=alone.engine)
    return alone.model_copy(update={"engine": engine})


def check_life(alone: Config, same: Same, lose: bool) -> None:
    """Run two generations with updates on one engine, then on two replicas; `lose` kills one in between.

    Raises AssertionError if rollouts or hashes differ, or processes are left behind.
    """
    with started(engines.create, alone) as bench:
        wanted = list(_life(bench, _in_chunks, lambda: None))
    shelves, before = unlocked_shelves(), set(below(os.getpid()))
    with started(RayEngine, two_of(alone)) as bench:
        replica = _engine(bench).pool.replicas[0]
        found = _life(bench, _at_once, lambda: _kill(replica) if lose else None)
        for (answers, weights), (theirs, their_weights) in zip(found, wanted, strict=True):
            assert answers.keys() == theirs.keys() and len(answers) == (MEMBERS + 1) * len(bench.requests)
            for key, answer in answers.items():
                same(bench, answer, theirs[key])
            assert weights == {their_weights}, "the replicas have another mean than one engine without Ray"
        assert bench.engine.metrics()["restarts"] == lose  # type: ignore[attr-defined]
        _check_alike(bench, same)
        processes = set(below(os.getpid())) - before
        assert len(processes) > 2
    check_gone(processes)
    assert unlocked_shelves() <= shelves, "adapters were left in memory"


def _life(
    bench: Bench, ask: Callable[[Bench, Plan], Sequence[Rollout]], between: Callable[[], None]
) -> Iterator[tuple[Answers, Any]]:
    for index in (0, 1):
        answers = ask(bench, bench.plan((*population(MEMBERS), MEAN), generation=index + 1))
        bench.engine.apply(dataclasses.replace(bench.update(), index=index))
        found: Any = bench.engine.fingerprint()
        if isinstance(bench.engine, RayEngine):
            pool = bench.engine.pool
            while any(replica.joining for replica in pool.replicas):
                pool.poll(())
            hashes = pool.fingerprints()
            assert len(hashes) == len(pool.replicas), "a replica failed"
            found = set(hashes.values())
        yield {(r.member.index, r.request): r for r in answers}, found
        if index == 0:
            between()


def _at_once(bench: Bench, plan: Plan) -> list[Rollout]:
    return list(bench.engine.rollout(plan, bench.requests))


def _in_chunks(bench: Bench, plan: Plan) -> list[Rollout]:
    parts = chunks_of(plan, bench.requests, CHUNK)
    return [rollout for part, asked in parts for rollout in bench.engine.rollout(part, asked)]


def _check_alike(bench: Bench, same: Same) -> None:
    """Raise AssertionError if replicas return different rollouts for one chunk."""
    plan = bench.plan(population(CHUNK), generation=3)
    pairs = [(member, request) for member in plan.members for request in bench.requests]
    returned = _engine(bench).pool.ask_all("rollout", plan, bench.requests)
    first, *others = [checked_rollouts(rollouts, pairs) for rollouts in returned.values()]
    assert len(others) == 1
    for one, other in zip(first, others[0], strict=True):
        same(bench, one, other)


def _kill(replica: Replica) -> None:
    """Kill a replica, and check that the processes which it started end."""
    import ray

    pid = ray.get(replica.actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    processes = below(pid)
    os.kill(pid, signal.SIGKILL)
    check_gone(processes)


def _engine(bench: Bench) -> RayEngine:
    assert isinstance(bench.engine, RayEngine)
    return bench.engine


def unlocked_shelves() -> set[Path]:
    """Return the folders of adapters in memory that no process has locked; other tests may run at the same time."""
    found = set[Path]()
    for mark in SHELVES.glob(f"{OURS}*/{MARK}"):
        with suppress(FileNotFoundError), mark.open("r+b") as file:
            if locked(file.fileno()):
                found.add(mark.parent)
    return found


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def check_gone(processes: Sequence[psutil.Process] | set[psutil.Process]) -> None:
    """Raise AssertionError if one of them is still running."""
    _, alive = psutil.wait_procs(list(processes), timeout=ENDING)
    assert not alive, f"left behind: {[process.as_dict(['pid', 'name', 'cmdline']) for process in alive]}"
