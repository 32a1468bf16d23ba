# SPDX-License-Identifier: Apache-2.0
"""Generations of `engine: ray` on 1 to 4,096 replicas, simulated: `Scheduler` hands out chunks in virtual time.

    python studies/ray_simulation.py                       [--rows FILE] [--straggler FILE ...] [--to FILE]

Taken from measured rows: what a chunk takes and how it spreads (rows of ray_scaling.py), updates, scoring, replicas
that join, and what the driver does by itself (ray_costs.py, on this machine). First come predictions of points that
were measured and to which nothing was fitted: generations on one replica from those without Ray, on two from these and
from one replica, and generations with a slow replica from chunks of a usual one alone. Then all rows give what the
curves are of. Not simulated: a network that is slow or lost, hosts that differ, completions of different lengths, and
evaluations and checkpoints between generations.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import ray_costs
from evoalign.engines.ray.schedule import Scheduler
from ray_events import Cluster, Costs, Undeclined, Worker, sizes_of

RESULTS = Path(__file__).parent / "results"
MEASURED = RESULTS.parents[1] / "benchmarks" / "results" / "ray_h100.jsonl"
LATER = MEASURED.with_name("ray_h200.jsonl")
"""Rows of other engines, shapes and cards: predicted, but not part of the curves."""
PROMPTS, MEMBERS, DENSE, STRONG = 8, 128, 32, 4096
GPUS = (1, 2, 4, 8)
REPLICAS = tuple(2**i for i in range(13))
HOURS = 3600.0
LONGER = 8
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """Durations in seconds. `chunk` has the seconds of a chunk by its members; `spread` what chunks took
    over their median, of which one is drawn for each chunk."""

    chunk: tuple[tuple[float, float], ...]
    spread: tuple[float, ...]
    costs: Costs
    update: float
    update_member: float
    score: float
    send_byte: float = 0.0
    """Seconds per byte of an update and replica."""

    def seconds(self, members: int) -> float:
        """Return the seconds of a chunk on a usual replica: interpolated, and in proportion beyond the largest."""
        known, took = zip(*self.chunk, strict=True)
        if members > known[-1] or len(known) == 1:
            return took[-1] * members / known[-1]
        return float(np.interp(members, known, took))


@dataclass(frozen=True)
class Took:
    """A generation: its phases, of the rollout what the driver was busy with, and chunks that were dealt twice."""

    rollout: float
    score: float
    update: float
    busy: float
    copies: int = 0
    failures: int = 0

    @property
    def total(self) -> float:
        """Seconds."""
        return self.rollout + self.score + self.update


def generations(
    model: Model,
    replicas: int,
    members: int,
    chunk: int,
    count: int = 3,
    slow: Mapping[int, float] | None = None,
    lasts: float | None = None,
    comes_back: float = 0.0,
    rules: type[Scheduler[Worker]] = Scheduler,
) -> list[Took]:
    """Simulated, one after the other. `slow` says how many times as long a replica takes; `lasts` is the mean time
    between failures of one."""
    draw = random.Random(replicas * 1_000_003 + chunk)

    def lives() -> float:
        return draw.expovariate(1 / lasts) if lasts else float("inf")

    def seconds(worker: Worker, size: int) -> float:
        return model.seconds(size) * worker.slowness * draw.choice(model.spread)

    workers = [Worker(i, (slow or {}).get(i, 1.0), lives()) for i in range(replicas)]
    cluster = Cluster(workers, seconds, model.costs, PROMPTS, lambda: (comes_back, lives()), rules)
    found: list[Took] = []
    for _ in range(count):
        before = cluster.busy, cluster.copies, cluster.failures
        rollout = cluster.rollout(sizes_of(members, chunk))
        score = model.score * members * PROMPTS
        sent = replicas * (model.costs.dispatch + model.send_byte * ray_costs.update_bytes(members))
        update = sent + model.update + model.update_member * members
        cluster.clock += score + update
        found.append(Took(
            rollout, score, update, cluster.busy - before[0], cluster.copies - before[1], cluster.failures - before[2]
        ))  # fmt: skip
    return found


# Measured points


def rows_of(path: Path) -> list[Row]:
    """The rows of ray_scaling.py."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def phases(rows: Iterable[Row], name: str, case: str, replicas: int) -> list[float]:
    """Return the seconds of all generations of a case; empty if not measured."""
    found = [r for r in rows if r.get("case") == case and r.get("replicas") == replicas and "took" in r]
    return [took[name] for row in found for took in row["took"]]


def fitted(rows: Sequence[Row], case: str, replicas: int, members: int, chunk: int, costs: Costs) -> Model:
    """Return the parameters from the rows of one case.

    Without Ray nothing is taken off for the driver, and an update is in proportion to its
    members: of another number there is no row.
    """
    rollout, chunks = phases(rows, "rollout", case, replicas), members // chunk
    driver = chunks * (costs.dispatch + costs.answer + costs.look + costs.completion * chunk * PROMPTS)
    of_chunk = [(r - (driver if replicas else 0.0)) / chunks for r in rollout]
    usual = statistics.median(of_chunk)
    update = statistics.median(phases(rows, "update", case, replicas))
    score = statistics.median(phases(rows, "score", case, replicas)) / (members * PROMPTS)
    return Model(((chunk, usual),), tuple(s / usual for s in of_chunk), costs, 0.0, update / members, score)


def predictions(rows: Sequence[Row], costs: Costs) -> Iterable[dict[str, Any]]:
    """Points of GPUs, from other rows of the same session, engine and shape."""
    groups: dict[tuple[int, str, str], list[Row]] = {}
    for row in rows:
        if "session" in row:
            groups.setdefault((row["session"], row.get("replica", "vllm"), row["shape"]), []).append(row)
    for (session, replica, shape), group in sorted(groups.items()):
        for point in _predicted(group, costs):
            yield {**point, "session": session, "replica": replica, "shape": shape}


def _predicted(rows: Sequence[Row], costs: Costs) -> Iterable[dict[str, Any]]:
    cases = [
        ("weak, 1 replica", "from no Ray", ("weak", 0, MEMBERS, MEMBERS), ("weak", 1, MEMBERS, MEMBERS)),
    ]
    for n in GPUS[1:]:
        for had, source in ((0, "from no Ray"), (1, "from 1 replica")):
            known, dense = ("weak", had, MEMBERS, MEMBERS), ("dense", had, DENSE, 1)
            cases += [
                (f"weak, {n} replicas", source, known, ("weak", n, n * MEMBERS, MEMBERS)),
                (f"strong, {n} replicas", source, known, ("strong", n, MEMBERS, MEMBERS // n)),
                (f"dense, {n} replicas", source, dense, ("dense", n, DENSE, 1)),
            ]
    for point, source, (case, had, members, chunk), (wanted, replicas, all_members, size) in cases:
        if not phases(rows, "rollout", case, had) or not phases(rows, "rollout", wanted, replicas):
            continue
        model = fitted(rows, case, had, members, chunk, costs)
        found = generations(model, replicas, all_members, size, 50)
        for name in ("rollout", "update", "seconds"):
            took = phases(rows, name, wanted, replicas)
            said = [t.total if name == "seconds" else getattr(t, name) for t in found]
            yield _point(point, source, name, took, statistics.median(said))


def ahead(rows: Sequence[Row], costs: Costs) -> Iterable[dict[str, Any]]:
    """Weak generations on 1 to 8 GPUs of a host, from the last session without Ray of each engine and shape."""
    last: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.get("case") == "weak" and not row["replicas"]:
            which = row.get("replica", "vllm"), row["shape"]
            last[which] = max(row["session"], last.get(which, 0))
    for (replica, shape), session in sorted(last.items()):
        group = [
            r for r in rows
            if (r.get("session"), r.get("replica", "vllm"), r.get("shape")) == (session, replica, shape)
        ]  # fmt: skip
        model = fitted(group, "weak", 0, MEMBERS, MEMBERS, costs)
        alone = statistics.median(phases(group, "seconds", "weak", 0))
        for count in GPUS:
            took = generations(model, count, MEMBERS * count, MEMBERS, 50)
            parts = {w: statistics.median(getattr(t, w) for t in took) for w in ("rollout", "update", "total")}
            measured = phases(group, "seconds", "weak", count)
            yield {
                "replica": replica, "shape": shape, "session": session, "replicas": count, **parts,
                "share": alone / parts["total"], "measured": statistics.median(measured) if measured else None,
                "measured_share": alone / statistics.median(measured) if measured else None,
            }  # fmt: skip


def _point(point: str, source: str, name: str, took: Sequence[float], said: float) -> dict[str, Any]:
    measured = statistics.median(took)
    return {
        "point": point, "source": source, "what": name, "measured": measured, "least": min(took), "most": max(took),
        "simulated": said, "error": said / measured - 1,
    }  # fmt: skip


def stragglers_measured(found: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Generations of ray_straggler.py, from what the machine adds to chunks of a usual replica that works alone."""
    for row in found["rows"]:
        draw = random.Random(row["chunk"])
        workers = [Worker(i, row["slowness"] if i == row["slow"] else 1.0) for i in range(row["replicas"])]

        def seconds(worker: Worker, size: int, row: Any = row, draw: random.Random = draw) -> float:
            return size * row["member_seconds"] * worker.slowness + draw.choice(row["added"])

        dealt = Undeclined if found.get("undeclined") else Scheduler
        cluster = Cluster(workers, seconds, Costs(), rules=dealt)
        said = [cluster.rollout(sizes_of(row["members"], row["chunk"])) for _ in range(200)]
        which = "slow, does not decline" if found.get("undeclined") else "slow"
        point = f"{row['replicas']} replicas, one {which}, chunks of {row['chunk']}"
        yield _point(point, "from chunks alone", "rollout", row["took"], statistics.median(said))


def rules() -> Iterable[dict[str, Any]]:
    """Seconds over work / (sum of speeds), with four replicas of which one is four times as slow, and a driver without
    cost: what the rules alone come to, with and without the one by which a slow replica declines."""
    for chunk in (1, 2, 4, 8, 16, 32):
        row: dict[str, Any] = {"chunk": chunk}
        for name, dealt in (("", Scheduler), ("undeclined_", Undeclined)):
            found = [ratio for slow in (0, 3) for seed in range(20) for ratio in _ratios(chunk, slow, seed, dealt)]
            row |= {f"{name}median": statistics.median(found), f"{name}worst": max(found)}
        yield row


def _ratios(chunk: int, slow: int, seed: int, dealt: Any) -> list[float]:
    draw, workers = random.Random(seed), [Worker(i, 4.0 if i == slow else 1.0) for i in range(4)]
    least = 256 / sum(1 / worker.slowness for worker in workers)
    cluster = Cluster(
        workers, lambda worker, size: size * worker.slowness * draw.uniform(0.9, 1.1) / 50, Costs(), rules=dealt
    )
    return [50 * cluster.rollout(sizes_of(256, chunk)) / least for _ in range(20)]


# Curves


def of_all(rows: Sequence[Row], costs: Costs, put_byte: float) -> Model:
    """`lowrank`, from all rows with Ray. A chunk of one member takes what one of `full` does, with as many texts."""
    whole = [*phases(rows, "rollout", "weak", 1), *phases(rows, "rollout", "weak", 2)]
    known = {1: phases(rows, "rollout", "dense", 2), MEMBERS // 2: phases(rows, "rollout", "strong", 2), MEMBERS: whole}
    of_chunk = {1: statistics.median(known[1]) / (DENSE // 2)}
    for members in (MEMBERS // 2, MEMBERS):
        of_chunk[members] = statistics.median(known[members]) - costs.completion * members * PROMPTS
    few, many = (statistics.median(phases(rows, "update", "weak", n)) for n in (1, 2))
    slope = (many - few) / MEMBERS
    score = [
        s / r for n in (1, 2) for s, r in zip(*(phases(rows, w, "weak", n) for w in ("score", "rows")), strict=True)
    ]
    each = [[t["rollout"] for t in r["took"]] for r in rows if r.get("case") == "weak" and r["replicas"]]
    spread = tuple(t / statistics.median(took) for took in each for t in took)  # not of engines that are others
    return Model(
        tuple(of_chunk.items()), spread, costs, few - slope * MEMBERS, slope,
        statistics.median(score), put_byte,
    )  # fmt: skip


def curve(model: Model, case: str, replicas: Sequence[int]) -> Iterable[dict[str, Any]]:
    """Efficiency: what a replica does in a second against what the only one would. Without the cost of each part in
    turn, the one that gains most is the limit."""
    at_one: dict[str, float] = {}
    parts = {
        "all": model,
        "driver": replace(model, costs=Costs(), send_byte=0.0),
        "update": replace(model, update=0.0, update_member=0.0),
        "scoring": replace(model, score=0.0),
        "spread of chunks": replace(model, spread=(1.0,)),
    }
    for count in replicas:
        members = STRONG if case == "strong" else MEMBERS * count
        chunk = min(MEMBERS, max(1, members // count))
        repeats = 20 if count <= 64 else 4
        total: dict[str, float] = {}
        usual: list[Took] = []
        for name, one in parts.items():
            took = generations(one, count, members, chunk, repeats)
            total[name] = statistics.mean(t.total for t in took)
            if name == "all":
                usual = took
        at_one = at_one or {"all": total["all"] * count / members}
        limit = min((name for name in total if name != "all"), key=lambda name: total[name])
        mean = {
            w: statistics.mean(getattr(t, w) for t in usual) for w in ("rollout", "score", "update", "busy", "copies")
        }
        yield {
            "case": case, "replicas": count, "members": members, "chunk": chunk, "seconds": total["all"], **mean,
            "efficiency": at_one["all"] * members / (count * total["all"]), "limit": limit,
            "without": {name: seconds for name, seconds in total.items() if name != "all"},
        }  # fmt: skip


def longer(model: Model) -> Model:
    """With completions of LONGER times as many tokens, each of which is taken to cost as much as now."""
    chunk = tuple((members, LONGER * seconds) for members, seconds in model.chunk)
    return replace(model, chunk=chunk, costs=replace(model.costs, completion=LONGER * model.costs.completion))


def slow_ones(model: Model) -> Iterable[dict[str, Any]]:
    """Rollouts on 16 replicas of which one takes four times as long, by how many chunks there are for each."""
    for chunk in (128, 64, 32, 16, 8):
        for name, slow in (("none", {}), ("one of 16", {0: 4.0})):
            took = generations(model, 16, 16 * MEMBERS, chunk, 10, slow)
            yield {
                "slow": name, "chunk": chunk, "chunks_a_replica": MEMBERS // chunk,
                "rollout": statistics.mean(t.rollout for t in took), "worst": max(t.rollout for t in took),
                "copies": sum(t.copies for t in took),
            }  # fmt: skip


def failing(model: Model, comes_back: float) -> Iterable[dict[str, Any]]:
    """A hundred generations of a population that grows with the replicas, some of which fail."""
    for replicas in (16, 64):
        for hours in (None, 100.0, 1.0):
            lasts = None if hours is None else hours * HOURS
            took = generations(model, replicas, MEMBERS * replicas, MEMBERS // 4, 100, None, lasts, comes_back)
            yield {
                "replicas": replicas, "hours": hours, "comes_back": comes_back,
                "failures": sum(t.failures for t in took),
                "seconds": statistics.mean(t.total for t in took),
            }  # fmt: skip


def joining(rows: Sequence[Row]) -> list[float]:
    """Seconds of replicas that were started again until they stood where the others were, where that was measured."""
    return [r["loading"] + r["catching up"] for r in rows if r.get("case") == "join"]


def main() -> None:
    """Predict, simulate, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=MEASURED, help="rows of ray_scaling.py")
    parser.add_argument(
        "--straggler", type=Path, nargs="*", default=[RESULTS / "ray_straggler.json", RESULTS / "ray_undeclined.json"]
    )
    parser.add_argument("--to", type=Path, default=RESULTS / "ray_simulation.json")
    parser.add_argument(
        "--comes-back", type=float, default=60.0, help="seconds of a failed replica; none were measured"
    )
    parser.add_argument("--costs", type=Path, help="an earlier result whose costs of the driver are used again")
    options = parser.parse_args()
    rows = rows_of(options.rows)
    if options.costs is not None:
        driver = json.loads(options.costs.read_text(encoding="utf-8"))["driver"]
    else:
        driver = ray_costs.costs()
    costs = Costs(*(driver[name] for name in ("dispatch", "answer", "completion", "look")))
    measured = joining(rows)
    comes_back = statistics.median(measured) if measured else options.comes_back
    points = list(predictions([*rows, *rows_of(LATER)], costs))
    for path in options.straggler:
        points += stragglers_measured(json.loads(path.read_text(encoding="utf-8")))
    model = of_all(rows, costs, driver["put_byte"])
    cases = {"weak": model, "long": longer(model), "strong": model}
    found: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(), "numpy": np.__version__, "ray": importlib.metadata.version("ray"),
            "cores": os.cpu_count(), "gpu": rows[0].get("gpu"),
        },
        "driver": driver,
        "parameters": {
            "chunk": model.chunk, "spread": model.spread, "update": model.update, "update_member": model.update_member,
            "score": model.score, "prompts": PROMPTS, "comes_back": comes_back, "comes_back_measured": bool(measured),
        },
        "points": points,
        "ahead": list(ahead([*rows, *rows_of(LATER)], costs)),
        "rules": list(rules()),
        "curves": [point for case, one in cases.items() for point in curve(one, case, REPLICAS)],
        "slow": list(slow_ones(model)),
        "failing": list(failing(model, comes_back)),
    }  # fmt: skip
    options.to.write_text(json.dumps(_short(found), indent=1) + "\n", encoding="utf-8")
    for point in points:
        where = ", ".join(str(point[key]) for key in ("session", "replica", "shape") if key in point)
        print(f"{where} {point['point']}, {point['source']}, {point['what']}: {point['simulated']:.3f} s simulated, "
              f"{point['measured']:.3f} s measured, {100 * point['error']:+.1f} %")  # fmt: skip
    for point in found["curves"]:
        print(f"{point['case']}, {point['replicas']} replicas: {100 * point['efficiency']:.1f} % simulated, "
              f"limit {point['limit']}, {point['seconds']:.1f} s")  # fmt: skip


def _short(found: Any) -> Any:
    """Five digits of every number."""
    if isinstance(found, float):
        return float(f"{found:.5g}")
    if isinstance(found, dict):
        return {key: _short(value) for key, value in found.items()}
    return [_short(one) for one in found] if isinstance(found, list | tuple) else found


if __name__ == "__main__":
    main()
