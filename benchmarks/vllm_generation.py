# SPDX-License-Identifier: Apache-2.0
"""A generation of ES in vLLM: whole, between the rollouts, in bytes, and two hundred of them.

    python benchmarks/vllm_generation.py --json runs/vllm.jsonl                          one GPU, 7B shape, about 110 s
    python benchmarks/vllm_generation.py --parts memory --json runs/vllm.jsonl           two more engines, about 100 s
    python benchmarks/vllm_generation.py --parts endurance --shape tiny --json runs/vllm.jsonl          about 60 s

Conciseness: 30 members of `lowrank`, rank 1, with its two training questions each, 100 greedy tokens without a stop
token. Parts:

generation  Rollout, update and fingerprint of the population, against one member at a time in the same engine: as an
            adapter, and merged into the weights, as without adapters (perturb, answer, next; the mean put
            back last). `full`, if asked for, is the second of these with dense noise, in a separate engine.
gap         What lies between two rollouts, by phase, the device synchronised around each: members' noise drawn and
            written into their slots, update, fingerprint. Bytes that pass between driver and workers in
            one generation, as the msgpack that vLLM itself sends to its engine (within one process nothing is encoded
            at all), and files opened for writing (Python's audit events) and bytes written (the kernel's count).
memory      Bytes on the device of plain inference (no LoRA slots), against `lowrank` and `lora`, with the same cache.
endurance   200 generations with 16 tokens of the shipped tiny model: host and device memory after the 20th and at most
            since.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vllm_shapes as v
from baseline import check

PARTS = ("generation", "gap", "memory", "endurance", "full")
TOKENS, FLAT = 100, 1.02
WARM = 20
"""Generations of the endurance run before memory is taken as steady."""


def questions(tokens: Any, count: int, length: int) -> list[Any]:
    """Conciseness' training questions, round and round, as requests for `length` greedy tokens."""
    from evoalign import tasks
    from evoalign.config import TaskConfig
    from evoalign.types import Request, Sampling

    task = tasks.create(TaskConfig(name="conciseness"))
    train = task.load_data(0).train
    prompts = [tokens.encode(task.prompt(train[i % len(train)])) for i in range(count)]
    return [Request(i, p, Sampling(length), i) for i, p in enumerate(prompts)]


def merge(worker: Any, plan: Any, member: Any) -> None:
    """In a worker: write mean + s B A of one member over the served weights; None puts the mean back."""
    import torch

    mean = worker._mean
    with torch.inference_mode():
        for part in mean.parts:
            if member is None:
                part.served.copy_(part.master)
                continue
            adapter = mean.space.adapter(mean.layout, part.name, mean.__getitem__, plan, [member])
            rows, columns = part.slices
            product = adapter.b[0, rows].float() @ adapter.a[0, :, columns].float()
            part.served.copy_(product.mul_(adapter.scaling).add_(part.master))


class Run:
    """Generations of random fitness on an engine."""

    def __init__(self, served: v.Served, members: int, prompts: int, length: int) -> None:
        from evoalign.types import population

        self.served, self.engine = served, served.engine
        self.sigma, self.step = served.config.es.sigma, served.config.es.learning_rate
        self.population = population(members)
        self.requests = questions(served.tokens, prompts, length)
        self._draw, self._index = random.Random(0), itertools.count()

    def plan(self, members: Any = None) -> Any:
        """A plan of the present generation, of all members unless some are named."""
        from evoalign.types import Plan

        return Plan(1, self.sigma, self.population if members is None else members)

    def update(self) -> Any:
        """An update with coefficients as of z-scores."""
        from evoalign.types import Update

        coefficients = tuple(self._draw.gauss(0, 1) for _ in self.population)
        return Update(next(self._index), 1, self.population, coefficients, self.sigma, self.step)

    def generation(self) -> Iterator[Any]:
        """One whole generation."""
        yield from self.engine.rollout(self.plan(), self.requests)
        self.engine.apply(self.update())
        self.engine.fingerprint()

    def one_by_one(self) -> Iterator[Any]:
        """The same, an adapter at a time."""
        for member in self.population:
            yield from self.engine.rollout(self.plan((member,)), self.requests)
        self.engine.apply(self.update())
        self.engine.fingerprint()

    def merged(self) -> Iterator[Any]:
        """The same, each member merged into the weights."""
        from evoalign.types import MEAN

        for member in (*self.population, None):
            self.engine.rpc(merge, self.plan(), member)
            if member is not None:
                yield from self.engine._generate([(MEAN, None)], self.requests)
        self.engine.apply(self.update())
        self.engine.fingerprint()


def serve(space: str, options: argparse.Namespace, folder: Path, rank: int | None = None, **engine: Any) -> v.Served:
    rows = options.members * options.prompts
    v.only_graphs({options.prompts, rows})
    config = v.config_of(
        v.model_folder(options.shape, folder),
        options.shape,
        rows=rows,
        length=512,
        members=options.members,
        space=space,
        rank=rank or options.rank,
        dtype="auto" if v.has_gpu() else "bfloat16",  # a float32 adapter's mean is the served weight itself
        engine={"attention_backend": options.attention} | engine,
    )
    served = v.Served(config, space=space != "plain")
    v.say(f"{space}: started in {served.start_seconds:.1f} s; {served.about()}")
    return served


def adapters(options: argparse.Namespace, folder: Path) -> None:
    """Parts `generation`, `gap` and `memory` of lowrank, on one engine."""
    served = serve("lowrank", options, folder)
    run = Run(served, options.members, options.prompts, options.tokens)
    served.took(run.generation)  # warm up
    if "memory" in options.parts:
        used("lowrank", served, run.generation, options)
    if "generation" in options.parts:
        ways = {"population": run.generation, "adapter by adapter": run.one_by_one, "merged": run.merged}
        speed(ways, served, options)
    if "gap" in options.parts:
        gap(run, options)
        traffic(run, options)


def dense(options: argparse.Namespace, folder: Path) -> None:
    """Part `full`: an engine without adapters."""
    served = serve("full", options, folder)
    run = Run(served, options.members, options.prompts, options.tokens)
    served.took(lambda: served.engine.rollout(run.plan(run.population[:1]), run.requests))  # warm up
    speed({"full, in place": run.generation}, served, options)


def speed(ways: dict[str, Callable[[], Iterator[Any]]], served: v.Served, options: argparse.Namespace) -> None:
    for name, work in ways.items():
        repeats = options.repeats if name == "population" else options.loops
        took = [served.took(work) for _ in range(repeats)]
        expected = options.members * options.prompts * options.tokens
        assert all(t.tokens == expected for t in took), [t.tokens for t in took]
        v.emit(options.file, benchmark="generation", shape=options.shape, way=name, took=[asdict(t) for t in took])
        v.say(f"{name}: {v.median(t.seconds for t in took):.3f} s a generation")


def gap(run: Run, options: argparse.Namespace) -> None:
    """Seconds of each phase between two rollouts."""
    engine, served = run.engine, run.served

    def put() -> object:
        return engine.rpc("es_put", run.plan(), run.population)

    def move() -> object:
        return engine.rpc("es_apply", run.update())

    phases: dict[str, Callable[[], object]] = {
        "noise drawn and written to the slots": put,
        "update": move,
        "fingerprint": engine.fingerprint,
        "noise, writing and update": lambda: (put(), move()),
    }
    for name, work in phases.items():
        work()
        seconds = [served.seconds(work) for _ in range(options.repeats)]
        v.emit(options.file, benchmark="gap", shape=options.shape, phase=name, seconds=seconds, members=options.members)
        v.say(f"{name}: {1000 * v.median(seconds):.2f} ms")


def traffic(run: Run, options: argparse.Namespace) -> None:
    """Measure the bytes between driver and workers in one generation, and the bytes written to disk."""
    import msgspec

    sent: dict[str, int] = {}
    plain = run.engine.llm.collective_rpc

    def counted(method: Any, **rest: Any) -> Any:
        answers = plain(method, **rest)
        if str(method).startswith("es_") and method != "es_synchronize":
            sent[method] = len(msgspec.msgpack.encode((method, rest.get("args", ()))))
            sent[f"{method}, answer"] = len(msgspec.msgpack.encode(answers))
        return answers

    opened: list[str] = []
    watching = True

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
            opened.append(str(arguments[0]))

    sys.addaudithook(audit)
    run.engine.llm.collective_rpc = counted
    before = bytes_written()
    for _ in run.generation():
        pass
    written, watching = bytes_written() - before, False
    del run.engine.llm.collective_rpc
    from evoalign.engines.vllm.engine import FILE

    row = {
        "messages": sent, "opened": opened, "written": written,
        "adapter_file": Path(FILE).exists(),
    }  # fmt: skip
    v.emit(options.file, benchmark="traffic", shape=options.shape, members=options.members, **row)
    v.say(f"traffic of a generation: {row}")


def bytes_written() -> int:
    """Bytes that this process has sent to storage."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split("write_bytes:")[1].split()[0])


def used(name: str, served: v.Served, work: Callable[[], Iterator[Any]], options: argparse.Namespace) -> None:
    """Memory after the start and the most of a generation."""
    served.engine.rpc(v.memory, True)
    for _ in work():
        pass
    found = served.engine.rpc(v.memory)[0]
    cache = int(served.config.engine.kv_cache_gib * 2**30)
    facts = {"cache": cache, "master": served.facts.master_bytes if served.space else 0}
    v.emit(options.file, benchmark="memory", shape=options.shape, space=name, **found, **facts)
    v.say(f"memory of {name}: " + ", ".join(f"{k} {n / 2**30:.2f} GiB" for k, n in (found | facts).items()))


def bytes_of(space: str, options: argparse.Namespace, folder: Path) -> None:
    """Part `memory` of one more engine."""
    plain = space == "plain"
    served = serve_plain(options, folder) if plain else serve(space, options, folder)
    run = Run(served, options.members, options.prompts, options.tokens)
    many = questions(served.tokens, options.members * options.prompts, options.tokens)
    work = (lambda: served.engine._generate([(mean(), None)], many)) if plain else run.generation
    served.took(work)
    used(space, served, work, options)


def serve_plain(options: argparse.Namespace, folder: Path) -> v.Served:
    """An engine without LoRA slots and without a space."""
    rows = options.members * options.prompts
    v.only_graphs({options.prompts, rows})
    config = v.config_of(
        v.model_folder(options.shape, folder), options.shape, rows=rows, length=512, members=2, space="full",
        dtype="auto" if v.has_gpu() else "bfloat16", engine={"master": "host", "attention_backend": options.attention},
    )  # fmt: skip
    served = v.Served(config, space=False)
    v.say(f"plain: started in {served.start_seconds:.1f} s")
    return served


def mean() -> Any:
    from evoalign.types import MEAN

    return MEAN


def endurance(options: argparse.Namespace, folder: Path) -> None:
    """Part `endurance`: memory of many generations."""
    served = serve("lowrank", options, folder)
    run = Run(served, options.members, options.prompts, options.short)
    seen: list[dict[str, int]] = []
    seconds: list[float] = []
    for number in range(options.generations):
        seconds.append(served.took(run.generation).seconds)
        seen.append(served.engine.rpc(v.memory)[0])
        if number % 50 == 49:
            v.say(f"generation {number + 1}: {seen[-1]}")
    warm = min(WARM, options.generations // 2)
    for kind in seen[0]:
        first, most = seen[warm][kind], max(row[kind] for row in seen[warm:])
        v.emit(
            options.file, benchmark="endurance", shape=options.shape, kind=kind, generations=options.generations,
            first=first, most=most, last=seen[-1][kind], flat=most <= FLAT * first, seconds=sum(seconds),
        )  # fmt: skip


def report(options: argparse.Namespace) -> None:
    """Tables of all results in the file."""
    rows = v.rows_of(options.file, benchmark="generation", shape=options.shape)
    best = [v.median(t["seconds"] for t in r["took"]) for r in rows if r["way"] == "population"]
    lines = []
    figures: dict[str, float] = {}
    for r in rows:
        seconds = [t["seconds"] for t in r["took"]]
        inside = v.median(t["generate"] for t in r["took"])
        times = f"{v.median(seconds) / best[-1]:.2f} x" if best else ""
        if best and r["way"] != "population":
            figures[f"vllm_generation {options.shape}, {r['way']} over population"] = v.median(seconds) / best[-1]
        tokens = r["took"][0]["tokens"] / v.median(seconds)
        lines.append((r["way"], len(seconds), f"{v.median(seconds):.3f} s", f"{inside:.3f} s", f"{tokens:,.0f}", times))
    if lines:
        v.table(("way", "runs", "a generation", "in generate", "tokens/s", "of the population's"), lines)
    rows = v.rows_of(options.file, benchmark="gap", shape=options.shape)
    if rows:
        v.table(
            ("phase", "median", "least", "most"),
            [(r["phase"], *(f"{1000 * f(r['seconds']):.2f} ms" for f in (v.median, min, max))) for r in rows],
        )
    for r in v.rows_of(options.file, benchmark="traffic", shape=options.shape):
        lines = [(name, size, f"{size / r['members']:.1f}") for name, size in r["messages"].items()]
        v.table(("message", "bytes", "a member"), lines)
        print(f"files opened for writing: {r['opened'] or 'none'}; bytes written to storage: {r['written']}; "
              f"a file where an adapter would lie: {r['adapter_file']}")  # fmt: skip
    rows = v.rows_of(options.file, benchmark="memory", shape=options.shape)
    if rows:
        kinds = [k for k in ("tensors", "peak", "device", "cache", "master", "host") if k in rows[0]]
        lines = [(r["space"], *(f"{r[k] / 2**30:.2f} GiB" for k in kinds)) for r in rows]
        v.table(("engine", *kinds), lines)
    rows = v.rows_of(options.file, benchmark="endurance", shape=options.shape)
    if rows:
        v.table(
            ("memory", f"after generation {WARM}", "most since", "last", "within 2 %"),
            [(r["kind"], *(f"{r[k] / 2**20:.1f} MiB" for k in ("first", "most", "last")), r["flat"]) for r in rows],
        )
        print(f"{rows[-1]['generations']} generations in {rows[-1]['seconds']:.0f} s")
    check(figures)


def main() -> None:
    parser = v.parser(__doc__, "7b")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["generation", "gap"])
    parser.add_argument("--members", type=int, default=30 if v.has_gpu() else 4)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loops", type=int, default=1, help="runs of the loops over members")
    parser.add_argument("--generations", type=int, default=200, help="of the endurance run")
    parser.add_argument("--short", type=int, default=16, help="tokens of the endurance run's completions")
    options = parser.parse_args()
    jobs: list[tuple[Any, ...]] = []
    if {"generation", "gap", "memory"} & set(options.parts):
        jobs.append((adapters, options))
    if "memory" in options.parts:
        jobs += [(bytes_of, space, options) for space in ("plain", "lora")]
    jobs += [(work, options) for work, part in ((dense, "full"), (endurance, "endurance")) if part in options.parts]
    with v.running(options) as folder:
        v.preload()
        for function, *arguments in jobs:
            if not v.apart(function, *arguments, folder, limit=options.limit):
                v.say(f"{function.__name__} did not end well: see above")
        report(options)


if __name__ == "__main__":
    main()
