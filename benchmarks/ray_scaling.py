# SPDX-License-Identifier: Apache-2.0
"""Generations of ES on one and two GPUs by `engine: ray`, against the engine of its replicas without Ray.

    python benchmarks/ray_scaling.py --parts plain --json runs/ray.jsonl           one GPU, vLLM, 7B shape
    python benchmarks/ray_scaling.py --parts ray --replicas 1 2 --json runs/ray.jsonl
    python benchmarks/ray_scaling.py --replica transformers --spaces lowrank --json runs/ray.jsonl
    python benchmarks/ray_scaling.py --parts ray --replicas 2 --spaces lowrank --joins 30 --json runs/ray.jsonl

A generation is rollout, rewards, update and fingerprint. Conciseness' prompts, greedy, 128 tokens without regard to
what they say, random weights. Cases:

weak     128 members of `lowrank` x 8 prompts (1,024 rows) for each GPU, one chunk of 128 members a replica.
strong   128 members x 8 prompts whatever the GPUs, in chunks that share them out evenly.
dense    32 members of `full` x 8 prompts, one at a time on each replica.
join     A replica is killed after some updates, and it comes back: seconds until it stands where the others are, by
         replaying all updates and by a copy from another replica, and what of it is loading the model.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import vllm_shapes as v
from baseline import check
from decoding import saved

PROMPTS, MEMBERS, DENSE, TOKENS = 8, 128, 32, 128


class Bench:
    """One engine, on its own or on Ray, ready for a space; generations of random fitness, phase by phase."""

    def __init__(self, space: str, replicas: int, options: argparse.Namespace, folder: Path) -> None:
        from evoalign import engines, spaces, tasks, tokens
        from evoalign.config import Config, TaskConfig, from_dict
        from evoalign.types import Request, Sampling

        rows = PROMPTS * (MEMBERS if space != "full" else 1)
        self.space, self.replicas, self.options = space, replicas, options
        own, graphs = options.replica == "vllm", sorted({PROMPTS, rows // 2, rows})
        config = v.config_of(
            v.model_folder(options.shape, folder) if own else saved(options.shape, folder, "bfloat16"), options.shape,
            rows=rows, length=256, members=MEMBERS, space=space, dtype="auto" if own and v.has_gpu() else "bfloat16",
            engine={"attention_backend": options.attention},
        )  # fmt: skip
        if not own:
            wanted = config.model_dump(mode="json", exclude_unset=True)
            config = from_dict({**wanted, "engine": {"name": "transformers", "decoder": "static"}})
        if replicas:
            config = _on_ray(config, replicas, graphs)
        elif own:
            v.only_graphs(graphs)
        assert isinstance(config, Config)
        began = time.perf_counter()
        self.config, self.tokens = config, tokens.load(config.model)
        self.engine: Any = engines.create(config, self.tokens)
        if not replicas and own and config.engine.load_format == "dummy":
            self.engine.rpc(v.redraw, config.seed)
        made = spaces.create(config)
        self.layout = made.layout(self.engine.specs(), self.engine.dtype)
        self.facts = self.engine.start(made, self.layout, None, False)
        self.start_seconds = time.perf_counter() - began
        self.task = tasks.create(TaskConfig(name="conciseness"))
        train = self.task.load_data(0).train
        self.examples = [train[i % len(train)] for i in range(PROMPTS)]
        prompts = [self.tokens.encode(self.task.prompt(example)) for example in self.examples]
        self.requests = [Request(i, p, Sampling(options.tokens), i) for i, p in enumerate(prompts)]
        self._draw, self._index = random.Random(0), itertools.count()
        gc.collect()  # as a run does: a full collection, which visits all objects of the libraries, takes 0.2 s
        gc.freeze()
        v.say(f"{space}, {replicas or 'no'} replicas: started in {self.start_seconds:.1f} s; {self.facts.engine}")

    def generation(self, members: int) -> dict[str, float]:
        """Seconds of each phase, and tokens."""
        from evoalign.types import Plan, population

        who, sigma = population(members), self.config.es.sigma
        clock = [time.perf_counter()]
        found = list(self.engine.rollout(Plan(1, sigma, who), self.requests))
        clock.append(time.perf_counter())
        self.task.columns([r.text for r in found], [self.examples[r.request] for r in found])
        clock.append(time.perf_counter())
        self.move(members)
        clock.append(time.perf_counter())
        phases = dict(zip(("rollout", "score", "update"), (b - a for a, b in itertools.pairwise(clock)), strict=True))
        tokens = sum(len(r.token_ids) for r in found)
        return phases | {"seconds": clock[-1] - clock[0], "tokens": tokens, "rows": len(found)}

    def move(self, members: int) -> None:
        """An update with its hash."""
        from evoalign.types import Update, population

        who, es = population(members), self.config.es
        coefficients = tuple(self._draw.gauss(0, 1) for _ in who)
        self.engine.apply(Update(next(self._index), 1, who, coefficients, es.sigma, es.learning_rate))
        self.engine.fingerprint()

    def case(self, name: str, members: int, chunk: int | None = None) -> None:
        """A case's generations, the first left out; written down."""
        if self.replicas and chunk is not None:
            self.engine._chunk = chunk
        self.generation(members)
        if self.replicas:
            for replica in self.engine.pool.replicas:
                _call(replica, lambda actor: actor.inside.clear())
        took = [self.generation(members) for _ in range(self.options.repeats)]
        inside: list[Any] = []
        if self.replicas:
            inside = [_call(replica, lambda actor: list(actor.inside)) for replica in self.engine.pool.replicas]
        v.emit(
            self.options.file, benchmark="ray", case=name, inside=inside,
            replica=self.options.replica, shape=self.options.shape, space=self.space,
            replicas=self.replicas, members=members, prompts=PROMPTS, chunk=chunk, took=took,
            engine=self.facts.engine, gpu=v.machine(),
        )  # fmt: skip
        speed = v.spread([t["tokens"] / t["seconds"] for t in took])
        phases = ", ".join(f"{p} {v.median(t[p] for t in took):.3f} s" for p in ("rollout", "score", "update"))
        v.say(f"{name}, {self.space}, {self.replicas or 'no'} replicas: {speed} tokens/s; {phases}")
        for place, calls in enumerate(inside):
            both = (f"{v.median(call[i] for call in calls):.3f} s" for i in (0, 1))
            v.say(f"  replica {place}: in the engine and in all of the call, a chunk: {', '.join(both)}")

    def join(self, members: int) -> None:
        """Measure one replica that is restarted after some updates."""
        pool, replica = self.engine.pool, self.engine.pool.replicas[1]
        wanted = self.engine.fingerprint()
        pool.restart(replica, "is restarted to measure how long that takes")
        while replica.stage != "ready":
            pool.poll(())
        assert set(pool.fingerprints().values()) == {wanted}
        row = dict(replica.seconds, updates=len(pool.updates))
        v.emit(
            self.options.file, benchmark="ray", case="join", how="replay", shape=self.options.shape, space=self.space,
            replicas=self.replicas, members=members, gpu=v.machine(), **row,
        )  # fmt: skip
        v.say(f"join after {len(pool.updates)} updates of {members} members, {self.space}: {row}")


class _Timed:
    """Keeps the seconds of an engine's own rollout."""

    def __init__(self, engine: Any, seen: list[float]) -> None:
        self._engine, self._seen = engine, seen

    def rollout(self, *asked: Any) -> list[Any]:
        """All at once."""
        began = time.perf_counter()
        found = list(self._engine.rollout(*asked))
        self._seen.append(time.perf_counter() - began)
        return found


def _on_ray(config: Any, replicas: int, graphs: list[int]) -> Any:
    from evoalign import engines
    from evoalign.config import from_dict
    from evoalign.engines.ray import replicas as module

    engines.read(config)
    here, seed = str(Path(__file__).parent), config.seed
    in_vllm, is_drawn = config.engine.name == "vllm", getattr(config.engine, "load_format", "") == "dummy"

    class Measured(module.ReplicaActor):
        """One with weights of a usual size, and graphs of the batches in use only."""

        def load_model(self) -> Any:
            import sys

            sys.path.insert(0, here)
            import vllm_shapes

            if in_vllm:
                vllm_shapes.only_graphs(graphs)
            found = super().load_model()
            if is_drawn:
                self._engine.rpc(vllm_shapes.redraw, seed)
            return found

        def rollout(self, plan: Any, requests: Any) -> Any:
            began, engine, seen = time.perf_counter(), self._engine, list[float]()
            self.inside = getattr(self, "inside", [])
            self._engine = _Timed(engine, seen)
            try:
                return super().rollout(plan, requests)
            finally:
                self._engine = engine
                self.inside += [[seconds, time.perf_counter() - began] for seconds in seen]

    module.ReplicaActor = Measured
    wanted = config.model_dump(mode="json", exclude_unset=True)
    wanted["engine"] = {
        "name": "ray", "replicas": replicas, "replica": wanted["engine"], "chunk": MEMBERS, "patience": 300,
        "cpus": 4 if v.has_gpu() else 0.5,
    }  # fmt: skip
    return from_dict(wanted)


def _call(replica: Any, what: Any) -> Any:
    import ray

    return ray.get(replica.actor.__ray_call__.remote(what), timeout=60)


def plain(options: argparse.Namespace, folder: Path) -> None:
    """The engine of the replicas in this process."""
    for space in options.spaces:
        bench = Bench(space, 0, options, folder)
        if space == "full":
            bench.case("dense", options.dense)
        else:
            bench.case("weak", options.members)
        bench.engine.close()
        del bench


def ray(options: argparse.Namespace, folder: Path) -> None:
    """Run the same cases with each number of replicas."""
    for replicas, space in itertools.product(options.replicas, options.spaces):
        bench = Bench(space, replicas, options, folder)
        if space == "full":
            bench.case("dense", options.dense, 1)
        else:
            bench.case("weak", options.members * replicas, options.members)
            if replicas > 1:
                bench.case("strong", options.members, options.members // replicas)
        if replicas > 1 and options.joins:
            while len(bench.engine.pool.updates) < options.joins:
                bench.move(options.members)
            bench.join(options.members)
        bench.engine.close()


def report(options: argparse.Namespace) -> None:
    """Table of all rows of the file: tokens per second, and the share of what as many engines without Ray make."""
    rows = [r for r in v.rows_of(options.file, benchmark="ray", shape=options.shape) if r["case"] != "join"]
    rows = [r for r in rows if r.get("replica", "vllm") == options.replica]

    def speed(row: dict[str, Any]) -> float:
        return v.median(t["tokens"] / t["seconds"] for t in row["took"])

    alone = {row["case"]: speed(row) for row in rows if not row["replicas"]}
    alone["strong"] = alone.get("weak", 0.0)
    lines = []
    figures: dict[str, float] = {}
    for row in rows:
        base, count = alone.get(row["case"], 0.0), row["replicas"] or 1
        share = f"{100 * speed(row) / (base * count):.1f} %" if base else ""
        if base and row["replicas"]:
            which = f"{options.shape}{' in process' * (options.replica == 'transformers')}"
            name = f"ray_scaling {which} {row['case']} {row['replicas']}, share of engines without Ray"
            figures[name] = speed(row) / (base * count)
        phases = (f"{v.median(t[p] for t in row['took']):.3f}" for p in ("rollout", "score", "update", "seconds"))
        spread = v.spread([t["tokens"] / t["seconds"] for t in row["took"]])
        lines.append((row["case"], row["space"], row["replicas"] or "no Ray", row["members"], spread, share, *phases))
    if lines:
        v.table(
            ("case", "space", "replicas", "members", "tokens/s", "of as many without Ray", "rollout s", "score s",
             "update s", "generation s"), lines,
        )  # fmt: skip
    check(figures)


def main() -> None:
    parser = v.parser(__doc__, "7b")
    parser.add_argument("--parts", nargs="+", choices=("plain", "ray"), default=["plain", "ray"])
    parser.add_argument("--spaces", nargs="+", choices=("lowrank", "full"), default=["lowrank", "full"])
    parser.add_argument("--replica", choices=("vllm", "transformers"), default="vllm", help="engine of each replica")
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--members", type=int, default=MEMBERS if v.has_gpu() else 4, help="adapters for each GPU")
    parser.add_argument("--dense", type=int, default=DENSE if v.has_gpu() else 2, help="dense members")
    parser.add_argument("--tokens", type=int, default=TOKENS if v.has_gpu() else 8)
    parser.add_argument("--joins", type=int, default=0, help="updates after which a replica joins; 0: none does")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    with v.running(options) as folder:
        for part in options.parts:
            work = {"plain": plain, "ray": ray}[part]
            for space in options.spaces:
                one = argparse.Namespace(**{**vars(options), "spaces": [space]})
                if not v.apart(work, one, folder, limit=options.limit):
                    v.say(f"{part} {space} did not end well: see above")
        report(options)


if __name__ == "__main__":
    main()
