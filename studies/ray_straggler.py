# SPDX-License-Identifier: Apache-2.0
"""Generations on four replicas of which one is four times as slow: real actors, real seconds, known delays.

    python studies/ray_straggler.py --to studies/results/ray_straggler.json
    python studies/ray_straggler.py --to FILE --undeclined      without the rule that a slow replica declines

A replica has no model: it sleeps so long for each member, so that two cores are enough for four. The least that a
generation can take is work / (sum of speeds). What the machine adds to a chunk (Ray, the driver, the processor) is
measured first, by a usual replica that works alone; the table has the worst of all generations against the least by the
delays alone, and against the least with that added to each chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray_events as events
from evoalign.config import from_dict
from evoalign.engines.ray import replicas, schedule
from evoalign.engines.ray.replicas import ReplicaActor
from evoalign.types import Plan, Request, Rollout, Sampling, population

REPLICAS, SLOWNESS, MEMBER = 4, 4.0, 0.020
CHUNKS = (1, 2, 4, 8, 16)
BOUND = 1.15


class Sleeper(ReplicaActor):
    """Engine that sleeps this many seconds per member, without a model."""

    member_seconds = 0.0

    def load_model(self) -> tuple[str, list[Any]]:
        """There is nothing to load."""
        return "float32", []

    def takes(self, seconds: float) -> None:
        """How long it takes for a member."""
        self.member_seconds = seconds

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> list[Rollout]:
        """Return each member's index as its text, after the seconds that the members take."""
        time.sleep(len(plan.members) * self.member_seconds)
        return [Rollout(m, 0, (1,), str(m.index), "stop") for m in plan.members]


class Bench:
    """The replicas, and generations on them."""

    def __init__(self, slow: int) -> None:
        replicas.ReplicaActor = Sleeper
        self.pool = replicas.ReplicaPool(from_dict({
            "space": "lora", "model": {"name": "tiny"}, "es": {"sigma": 0.01},
            "engine": {"name": "ray", "replicas": REPLICAS, "cpus": 0.5,
                       "replica": {"name": "transformers", "device": "cpu", "threads": 1}},
        }))  # fmt: skip
        self.slow = slow
        while len(self.pool.ready) < REPLICAS:
            self.pool.admit()
        get = self.pool.cluster.ray.get
        get([r.actor.takes.remote(MEMBER * self.slowness(r.place)) for r in self.pool.replicas])
        self.dispatcher = schedule.Dispatcher(self.pool)

    def slowness(self, place: int) -> float:
        """How many times as long as a usual one a replica takes."""
        return SLOWNESS if place == self.slow else 1.0

    def chunks(self, members: int, chunk: int) -> Iterator[float]:
        """When each chunk of a generation was there, in seconds."""
        began, found, seen = time.perf_counter(), list[int](), 0
        for rollout in self.dispatcher.run(Plan(0, 1.0, population(members)), [Request(0, (1,), Sampling(4))], chunk):
            found.append(int(rollout.text))
            if len(found) > seen:
                yield time.perf_counter() - began
                seen += chunk
        assert sorted(found) == list(range(members))

    def alone(self, chunk: int, count: int) -> list[float]:
        """Seconds that the machine adds to each chunk of a usual replica that works alone."""
        usual = next(r for r in self.pool.replicas if r.place != self.slow)
        others = [r for r in self.pool.replicas if r is not usual]
        for replica in others:
            replica.stage = "excluded"
        try:
            ends = [0.0, *self.chunks(chunk * count, chunk)]
        finally:
            for replica in others:
                replica.stage = "ready"
        return [ends[i + 1] - ends[i] - chunk * MEMBER for i in range(count)]

    def generations(self, members: int, chunk: int, count: int) -> list[float]:
        """Seconds of each; what a slow replica still has of one is time that it lacks in the next."""
        return [list(self.chunks(members, chunk))[-1] for _ in range(count)]


def least(members: int, chunk: int, slow: int, added: float = 0.0) -> float:
    """Return work / (sum of speeds) with these seconds added to each chunk."""
    speeds = [chunk / (chunk * MEMBER * (SLOWNESS if p == slow else 1.0) + added) for p in range(REPLICAS)]
    return members / sum(speeds)


def measured(bench: Bench, members: int, chunk: int, generations: int) -> dict[str, Any]:
    """One chunk size."""
    bench.generations(members, chunk, 1)
    added = bench.alone(chunk, 32)
    before = bench.dispatcher.copies
    took = bench.generations(members, chunk, generations)
    row = {
        "chunk": chunk, "members": members, "member_seconds": MEMBER, "replicas": REPLICAS, "slow": bench.slow,
        "slowness": SLOWNESS, "added": [round(a, 6) for a in added], "took": [round(t, 6) for t in took],
        "copies": bench.dispatcher.copies - before,
    }  # fmt: skip
    print(line(row), flush=True)
    return row


def against(row: dict[str, Any], calibrated: bool) -> list[float]:
    """Each generation's seconds over the least."""
    added = max(0.0, statistics.median(row["added"])) if calibrated else 0.0
    fewest = least(row["members"], row["chunk"], row["slow"], added)
    return [took / fewest for took in row["took"]]


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    plain, calibrated = against(row, False), against(row, True)
    return (
        f"| {row['chunk']} | {1000 * statistics.median(row['added']):.1f} | {statistics.median(plain):.3f} "
        f"| {max(plain):.3f} | {statistics.median(calibrated):.3f} | {max(calibrated):.3f} | {row['copies']} |"
    )


HEAD = (
    "| members a chunk | ms that the machine adds to a chunk | median over the least | worst | median, machine counted "
    "| worst, machine counted | chunks dealt twice |\n| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="write the rows here")
    parser.add_argument("--chunks", nargs="+", type=int, default=list(CHUNKS))
    parser.add_argument("--members", type=int, default=256)
    parser.add_argument("--generations", type=int, default=20)
    parser.add_argument("--slow", type=int, default=0, help="index of the slow replica")
    parser.add_argument("--undeclined", action="store_true", help="without the rule that a slow replica declines")
    options = parser.parse_args()
    if options.undeclined:
        schedule.Scheduler = events.Undeclined  # pyright: ignore[reportPrivateImportUsage]
    bench = Bench(options.slow)
    print(HEAD, flush=True)
    try:
        rows = [measured(bench, options.members, chunk, options.generations) for chunk in options.chunks]
    finally:
        bench.pool.close()
    if options.to is not None:
        import ray

        where = f"{os.cpu_count()} cores, Python {platform.python_version()}, ray {ray.__version__}"
        found = {"machine": where, "undeclined": options.undeclined, "load": round(os.getloadavg()[1], 1), "rows": rows}
        options.to.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
