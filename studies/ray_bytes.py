# SPDX-License-Identifier: Apache-2.0
"""Bytes between hosts in a generation of `engine: ray`, against the number of members.

    OMP_NUM_THREADS=1 python studies/ray_bytes.py        as root, on Linux: it makes two network namespaces

Driver and head of the cluster are in one namespace, both replicas in the other. `wire` is what the counters of the only
link between them count, both ways, headers and acknowledgements included, less the traffic of as many idle seconds. A
line is fitted over the number of members. A member answers one prompt with at most four tokens.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evoalign import optimizer, spaces, tokens
from evoalign.config import from_dict
from evoalign.engines.ray.engine import RayEngine
from evoalign.types import Plan, Request, Sampling, Update, population

RESULTS = Path(__file__).parent / "results" / "ray_bytes.json"
HERE, THERE = "evoalign-driver", "evoalign-replicas"
LINK, OTHER = "evo0", "evo1"
ADDRESSES = {HERE: "10.213.77.1", THERE: "10.213.77.2"}
REPLICAS, TOKENS, IDLE = 2, 4, 8.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def namespaces() -> Generator[None]:
    """Create two network namespaces with one link between them."""
    try:
        for name in (HERE, THERE):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", LINK, "netns", HERE, "type", "veth", "peer", "name", OTHER, "netns", THERE)
        for name, link in ((HERE, LINK), (THERE, OTHER)):
            ip("-n", name, "address", "add", f"{ADDRESSES[name]}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
        yield
    finally:
        for name in (HERE, THERE):
            found = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
            for pid in map(int, found.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextmanager
def node(address: str) -> Generator[None]:
    """A node of the cluster in the other namespace, until the end."""
    words = ["ip", "netns", "exec", THERE, str(Path(sys.executable).with_name("ray")), "start", "--block"]
    words += [f"--address={address}", f"--node-ip-address={ADDRESSES[THERE]}", f"--num-cpus={REPLICAS}"]
    words += ["--num-gpus=0", f"--object-store-memory={2**27}", "--disable-usage-stats"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)  # it ends what it started
        try:
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def on_the_link() -> tuple[int, int]:
    """Bytes that left for the replicas so far, and that came from them."""
    folder = Path("/sys/class/net") / LINK / "statistics"
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def measured(do: Callable[[], object]) -> dict[str, Any]:
    """Return the bytes on the link, and the seconds, that something takes."""
    before, began = on_the_link(), time.monotonic()
    do()
    seconds, after = time.monotonic() - began, on_the_link()
    there, back = (a - b for a, b in zip(after, before, strict=True))
    return {"seconds": seconds, "there": there, "back": back}


def settings(space: str) -> dict[str, Any]:
    replica = {"name": "transformers", "device": "cpu", "threads": 1}
    return {
        "space": space, "model": {"name": "tiny"}, "deterministic": True, "es": {"sigma": 0.01, "learning_rate": 0.005},
        "engine": {"name": "ray", "replicas": REPLICAS, "cpus": 1, "chunk": 8, "replica": replica, "restarts": 1000},
    }  # fmt: skip


def line(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """Least squares."""
    slope, intercept = statistics.linear_regression(xs, ys)
    return {"a_member": round(slope, 1), "a_generation": round(intercept)}


def rows_of(space: str, members: Sequence[int], times: int) -> Iterator[dict[str, Any]]:
    """Run generations of this many members, a joining replica, and hashes."""
    config = from_dict(settings(space))
    tokens_ = tokens.load(config.model)
    engine = RayEngine(config, tokens_)
    try:
        space_ = spaces.create(config)
        layout = space_.layout(engine.specs(), engine.dtype)
        made = optimizer.create(config.es.optimizer)
        engine.start(space_, layout, made, keep_start=False)
        request = Request(0, tokens_.encode("Name a colour of the sky, in one word."), Sampling(TOKENS), seed=1)
        weights = sum(tensor.numel() * 4 for _, tensor in engine.state())
        count = 0

        def generation(n: int) -> None:
            nonlocal count
            count += 1
            plan = Plan(count, config.es.width, population(n))
            assert len(list(engine.rollout(plan, [request]))) == n
            coefficients = tuple((-1.0) ** i / n for i in range(n))
            step = config.es.eta * config.es.width
            engine.apply(Update(count - 1, count, plan.members, coefficients, config.es.width, step))
            engine.fingerprint()

        generation(members[0])  # what is looked up once
        idle = measured(lambda: time.sleep(IDLE))
        yield {"space": space, "what": "idle", "weights": weights, **idle}
        for n in members:
            for _ in range(times):
                row = measured(lambda n=n: generation(n))
                yield {"space": space, "what": "generation", "members": n, "weights": weights, **row}
        nothing = measured(lambda: [engine.pool.ask("fingerprint") for _ in range(200)])
        yield {"space": space, "what": "200 hashes", **nothing}
        yield {"space": space, "what": "a replica joins", "weights": weights, **measured(lambda: joined(engine))}
        state, slots = dict(engine.state()), dict(engine.optimizer_state()) or None
        yield {"space": space, "what": "weights are loaded", **measured(lambda: engine.load(state, slots))}
        row = measured(lambda: joined(engine))
        yield {"space": space, "what": "a replica joins, of a run that was resumed", "weights": weights, **row}
        idle = measured(lambda: time.sleep(IDLE))
        yield {"space": space, "what": "idle", "weights": weights, **idle}
    finally:
        engine.close()


def _pid(_: Any) -> int:
    return os.getpid()


def joined(engine: RayEngine) -> None:
    """Kill a replica, and wait until another is in its place and has the mean of the first."""
    import ray

    before = engine.pool.fingerprint()
    pid: Any = ray.get(engine.pool.replicas[1].actor.__ray_call__.remote(_pid))
    os.kill(pid, signal.SIGKILL)
    while len(engine.pool.fingerprints()) == REPLICAS:  # until it is missed
        time.sleep(0.1)
    while len(engine.pool.ready) < REPLICAS:
        engine.pool.poll(())
    found = engine.pool.fingerprints()
    assert len(found) == REPLICAS and set(found.values()) == {before}


def inside(members: Sequence[int], space_names: Sequence[str], times: int, file: Path) -> None:
    """All of it, in the namespace of the driver."""
    import ray

    rows = list[dict[str, Any]]()
    context: Any = ray.init(
        address="local", num_cpus=0, num_gpus=0, include_dashboard=False, object_store_memory=2**28,
        log_to_driver=False, logging_level=logging.CRITICAL, _node_ip_address=ADDRESSES[HERE],
    )  # fmt: skip
    try:
        with node(context.address_info["address"]):
            for space in space_names:
                for row in rows_of(space, members, times):
                    print(json.dumps(row), flush=True)
                    rows.append(row)
    finally:
        ray.shutdown()
    file.write_text(json.dumps(rows))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per space: idle bytes a second, lines over the members, and the single figures."""
    found: dict[str, Any] = {}
    for space in dict.fromkeys(row["space"] for row in rows):
        of = [row for row in rows if row["space"] == space]
        still = [row for row in of if row["what"] == "idle"]
        idle = {way: sum(r[way] for r in still) / sum(r["seconds"] for r in still) for way in ("there", "back")}
        done = [row for row in of if row["what"] == "generation"]

        def less(row: dict[str, Any], idle: dict[str, float] = idle) -> float:
            return sum(row[way] - idle[way] * row["seconds"] for way in ("there", "back"))

        xs = [float(row["members"]) for row in done]
        lines = {"wire": line(xs, [less(row) for row in done])}
        lines |= {
            f"wire {name}": line(xs, [row[way] - idle[way] * row["seconds"] for row in done])
            for way, name in (("there", "to replicas"), ("back", "from replicas"))
        }
        single = {row["what"]: round(less(row)) for row in of if row["what"] not in ("idle", "generation")}
        if "200 hashes" in single:
            single["a hash"] = round(single.pop("200 hashes") / 200)
        single["float32 weights that evolve"] = still[0]["weights"]
        each = {str(n): round(statistics.median(less(r) for r in done if r["members"] == n)) for n in sorted(set(xs))}
        idle_all = round(sum(idle.values()))
        found[space] = {"idle, bytes a second": idle_all, "lines": lines, "bytes": single, "a generation of": each}
    return found


def table(found: dict[str, Any]) -> str:
    lines = ["| space | what | bytes a member | bytes a generation |", "|---|---|---:|---:|"]
    for space, of in found.items():
        for what, row in of["lines"].items():
            lines.append(f"| {space} | {what} | {row['a_member']:,} | {row['a_generation']:,} |")
    lines += ["", "| space | what | bytes |", "|---|---|---:|"]
    for space, of in found.items():
        lines.append(f"| {space} | idle, a second | {of['idle, bytes a second']:,} |")
        lines += [f"| {space} | {what} | {value:,} |" for what, value in of["bytes"].items()]
    return "\n".join(lines)


def _ended(*_: object) -> None:
    """The namespaces go in that case, too."""
    sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", type=int, default=[16, 64, 256, 1024])
    parser.add_argument("--spaces", nargs="+", default=["lora", "full"])
    parser.add_argument("--times", type=int, default=3, help="Generations of each size.")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        inside(options.members, options.spaces, options.times, options.inside)
        return
    signal.signal(signal.SIGTERM, _ended)
    rows_file = options.json.with_suffix(".part")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with namespaces():
        words = [sys.executable, __file__, *sys.argv[1:], "--inside", str(rows_file)]
        subprocess.run(["ip", "netns", "exec", HERE, *words], check=True)
    rows = json.loads(rows_file.read_text())
    rows_file.unlink()
    import ray
    import torch

    made = {"command": " ".join(["python", "studies/ray_bytes.py", *sys.argv[1:]]), "ray": ray.__version__}
    made |= {"python": platform.python_version(), "torch": torch.__version__, "replicas": REPLICAS, "chunk": 8}
    found = summary(rows)
    options.json.write_text(json.dumps({"made": made, "summary": found, "rows": rows}, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
