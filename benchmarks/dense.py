# SPDX-License-Identifier: Apache-2.0
"""The cost of changing weights: noise, members, restoring, updates and the hash on the tensors of a Qwen2.5-7B.

The weights are random, served in bfloat16 from a float32 master; no model is loaded. Each time is the median of
`--repeats` calls after two that warm up, by CUDA events on a GPU. Bytes are what an operation has to move at least; the
share is its bytes a second over those of a plain copy measured in the same run.

    python benchmarks/dense.py [--device cuda] [--layers 28] [--width 3584] [--only full|lowrank] [--json FILE]

`--variants` measures layouts of the kernels on one matrix, to choose `TUNING` by.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from evoalign import kernels, noise, spaces
from evoalign.config import from_dict
from evoalign.engines.hash import weights_hash
from evoalign.spaces import LowRank, MeanPart, Slots, Space
from evoalign.types import Layout, Plan, Slices, TensorSpec, Update, population

HIDDEN = 3584
SHAPES = {
    "self_attn.q_proj": (3584, 3584),
    "self_attn.k_proj": (512, 3584),
    "self_attn.v_proj": (512, 3584),
    "self_attn.o_proj": (3584, 3584),
    "mlp.gate_proj": (18944, 3584),
    "mlp.up_proj": (18944, 3584),
    "mlp.down_proj": (3584, 18944),
}
"""Rows and columns of a layer's matrices; q, k and v have biases."""
VOCABULARY = 152_064
SIGMA, STEP = 1e-3, 5e-4


@dataclass
class Row:
    """One line of the table. `numbers` are normals for noise, weights otherwise."""

    name: str
    seconds: float
    numbers: int
    bytes: int
    share_of_copy: float = 0.0


def specs(layers: int, width: int) -> list[TensorSpec]:
    """The tensors of the model, `width` wide. Norm weights do not evolve in bfloat16."""

    def size(n: int) -> int:
        return max(1, n * width // HIDDEN)

    found = [TensorSpec("model.embed_tokens.weight", (size(VOCABULARY), width), "embedding", None, 0.02)]
    for layer in range(layers):
        for name, (rows, columns) in SHAPES.items():
            path = f"model.layers.{layer}.{name}"
            found.append(TensorSpec(f"{path}.weight", (size(rows), size(columns)), "linear", layer, 0.02))
            if name[10:11] in "qkv" and name.startswith("self_attn"):
                found.append(TensorSpec(f"{path}.bias", (size(rows),), "bias", layer, 0.02))
    return [*found, TensorSpec("lm_head.weight", (size(VOCABULARY), width), "linear", None, 0.02)]


class Bench:
    """The weights, and how long things take."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.specs = specs(options.layers, options.width)
        generator = torch.Generator(self.device).manual_seed(0)
        self.master = {
            s.name: torch.empty(s.shape, device=self.device).normal_(std=0.02, generator=generator) for s in self.specs
        }
        self.served = {name: tensor.bfloat16() for name, tensor in self.master.items()}
        self.rows: list[Row] = []
        self.copied = 0.0  # bytes a second
        self.cycles: dict[str, Any] = {}

    def space(self, name: str) -> tuple[Space, Layout]:
        """A space and what evolves in it."""
        made = spaces.create(from_dict({"seed": 5, "space": name, "es": {"sigma": SIGMA}, "lowrank": {"rank": 1}}))
        return made, made.layout(self.specs, torch.bfloat16)

    def seconds(self, call: Callable[[], object], repeats: int | None = None) -> float:
        """Median of one call."""
        times: list[float] = []
        for _ in range(2):
            call()
        for _ in range(repeats or self.options.repeats):
            times.append(self._once(call))
        return statistics.median(times)

    def _once(self, call: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1e3

    def add(self, name: str, call: Callable[[], object], numbers: int, moved: int, repeats: int | None = None) -> None:
        """Measure, and keep the row."""
        seconds = self.seconds(call, repeats)
        self.rows.append(Row(name, seconds, numbers, moved, moved / seconds / self.copied if self.copied else 1.0))
        print(f"  {name}: {seconds * 1e3:.2f} ms", flush=True)

    def copy(self) -> None:
        """A plain copy: what memory can do."""
        source = torch.empty(self.options.copy_mib << 18, device=self.device).normal_()
        target = torch.empty_like(source)
        moved = 8 * source.numel()
        self.add("plain copy", lambda: target.copy_(source), source.numel(), moved)
        self.copied = moved / self.rows[-1].seconds

    def dense(self) -> None:
        """Members over the served weights, restoring, and the update: 6, 6 and 10 bytes a weight."""
        space, layout = self.space("full")
        members = population(self.options.members)
        plan, count = Plan(1, SIGMA, members), layout.parameters
        turn = iter(range(1 << 30))

        def perturb() -> None:
            member = members[next(turn) % len(members)]
            for t in layout.tensors:
                space.perturbed(layout, t.name, self.master[t.name], plan, member, None, self.served[t.name])

        def restore() -> None:
            for t in layout.tensors:
                self.served[t.name].copy_(self.master[t.name])

        self.add("perturb (one member)", perturb, count, 6 * count)
        self.add("restore", restore, count, 6 * count)
        self.add(f"update full, N = {len(members)}", lambda: self.update(space, layout), count, 10 * count)
        self.add("fingerprint", lambda: weights_hash(self.master.items()), count, 4 * count)
        restore()
        before, served = weights_hash(self.master.items()), weights_hash(self.served.items())
        perturb()
        moved = weights_hash(self.served.items())
        started = time.perf_counter()
        for _ in range(self.options.cycles):
            perturb()
        restore()
        after = weights_hash(self.served.items())
        took = time.perf_counter() - started
        exact = after == served and weights_hash(self.master.items()) == before and (moved != served)
        print(f"  {self.options.cycles} members one after the other and a restore: {took:.2f} s, hash "
              f"{'equal' if exact else 'DIFFERS'}", flush=True)  # fmt: skip
        self.cycles = {"cycles": self.options.cycles, "seconds": took, "hash_equal": exact}

    def update(self, space: Space, layout: Layout) -> None:
        """One update of all tensors, as an engine does it."""
        members = population(self.options.members)
        coefficients = tuple(math.sin(7 * m.index + 1) for m in members)
        update = Update(0, 1, members, coefficients, SIGMA, STEP)
        for t in layout.tensors:
            for part in self._parts(space, t.shape):
                master, served = self.master[t.name][part], self.served[t.name][part]
                space.accumulate(layout, master, t.name, part, update, None, None, served)

    def _parts(self, space: Space, shape: tuple[int, ...]) -> Iterator[Slices]:
        return iter([tuple(slice(0, n) for n in shape)]) if space.fused(self.device) else noise.row_blocks(shape)

    def lowrank(self) -> None:
        """Members' factors into slots, and the update from them: 10 bytes a weight."""
        space, layout = self.space("lowrank")
        members, count = population(self.options.members), layout.parameters
        plan = Plan(1, SIGMA, members)
        factors = sum(sum(t.shape) for t in layout.tensors) * len(members)
        slots = [
            Slots(
                t.name,
                tuple(slice(0, n) for n in t.shape),
                torch.zeros(len(members), 1, t.shape[1], dtype=torch.bfloat16, device=self.device),
                torch.zeros(len(members), t.shape[0], 1, dtype=torch.bfloat16, device=self.device),
            )
            for t in layout.tensors
        ]
        write, size = space.writer(layout, self.master.__getitem__, slots), f"N = {len(members)}, rank 1"
        self.add(f"lowrank factors, {size}", lambda: write(plan, members), factors, 2 * factors)
        if kernels.available(self.device):
            self._together(size, factors, count)
            available, kernels.available = kernels.available, lambda device: False
            try:
                self.add("  the same by the library's product", lambda: self.update(space, layout), count, 10 * count,
                         3)  # fmt: skip
            finally:
                kernels.available = available
        else:
            self.add(f"update lowrank, {size}", lambda: self.update(space, layout), count, 10 * count)
        self.add("fingerprint of these weights", lambda: weights_hash((t.name, self.master[t.name])
                 for t in layout.tensors), count, 4 * count)  # fmt: skip

    def _together(self, size: str, factors: int, count: int) -> None:
        """The update of all matrices by a few launches, and its two phases."""
        from evoalign.kernels import update as kernel

        space, layout = self.space("lowrank")
        assert isinstance(space, LowRank)
        parts = [
            MeanPart(t.name, tuple(slice(0, n) for n in t.shape), self.master[t.name], None, self.served[t.name])
            for t in layout.tensors
        ]
        members = population(self.options.members)
        coefficients = tuple(math.sin(7 * m.index + 1) for m in members)
        update, table = Update(0, 1, members, coefficients, SIGMA, STEP), noise.table(self.device)
        move = space.mover(layout, parts)
        assert move is not None
        self.add(f"update lowrank, {size}", lambda: move(update), count, 10 * count)
        as_set = kernel._ROWS, kernel._WIDE, kernel._LANES
        for tile in (as_set, *(TILES if self.options.variants else ())):
            kernel._ROWS, kernel._WIDE, kernel._LANES = tile
            batches = space._batches(layout, parts, len(members))
            ones = [torch.ones(2 * len(b.names), len(members), dtype=torch.float64) for b in batches]

            def draw(batches: list[Any] = batches, ones: list[torch.Tensor] = ones) -> None:
                for batch, one in zip(batches, ones, strict=True):
                    batch.factors.draw(table, 1, range(len(members)), one, one, torch.bfloat16)

            def multiply(batches: list[Any] = batches) -> None:
                for batch in batches:
                    batch.products.move(len(members), len(members), [1e-9] * len(batch.names), 0.0)

            if tile == as_set:
                self.add("  its factors", draw, factors, 4 * factors)
            self.add(f"  its products, {tile[0]} rows of {tile[1]} x {tile[2]}", multiply, count, 10 * count)
        kernel._ROWS, kernel._WIDE, kernel._LANES = as_set

    def rates(self, variants: bool) -> None:
        """Normals a second: written as bfloat16, and summed over members in registers."""
        if not kernels.available(self.device):
            return
        from evoalign.kernels import noise as draw
        from evoalign.kernels import update as move

        name = "model.layers.0.mlp.gate_proj.weight"
        master, served = self.master[name], self.served[name]
        shape, bounds, table = tuple(master.shape), [(0, n) for n in master.shape], noise.table(self.device)
        key, members = noise.key(5, "noise", name), self.options.members
        weights = {m: math.sin(m + 1) for m in range(members)}
        tunings = [draw.Tuning(block, warps, half, keep) for block, warps, half, keep in VARIANTS] if variants else []

        for tuning in (draw.TUNING, *tunings):
            text = "as set" if tuning is draw.TUNING else ", ".join(f"{k} {v}" for k, v in asdict(tuning).items())
            self.add(
                f"noise to bfloat16 ({text})",
                lambda t=tuning: draw.scaled(key, table, shape, bounds, 1, [3], [SIGMA], None, served[None], t),
                master.numel(), 2 * master.numel(),
            )  # fmt: skip
        for tuning in (move.TUNING, *tunings):
            text = "as set" if tuning is move.TUNING else ", ".join(f"{k} {v}" for k, v in asdict(tuning).items())
            self.add(
                f"noise in an update, N = {members} ({text})",
                lambda t=tuning: move.dense(
                    master, served, None, key, table, shape, bounds, 1, weights, members, 1e-9, 0.0, t
                ),
                members * master.numel(), 10 * master.numel(),
            )  # fmt: skip


VARIANTS = (
    (128, 4, True, False), (128, 4, True, True), (128, 4, False, False), (256, 4, True, False), (256, 4, True, True),
    (256, 4, False, True), (256, 8, True, False), (512, 4, True, False), (512, 8, True, False), (1024, 8, True, False),
)  # fmt: skip
"""Philox calls a program, warps, half the table or all of it, evict last."""
TILES = ((16, 4, 128), (8, 4, 64), (16, 4, 64), (8, 4, 256), (4, 4, 128))
"""Rows a program of the product moves, columns a thread, threads."""


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=HIDDEN)
    parser.add_argument("--members", type=int, default=30)
    parser.add_argument("--cycles", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--copy-mib", type=int, default=4096)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--only", choices=("full", "lowrank"), help="measure this space alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    bench = Bench(options)
    bench.copy()
    if options.only != "lowrank":
        bench.rates(options.variants)
        bench.dense()
    if options.only != "full":
        bench.lowrank()
    hardware = torch.cuda.get_device_name() if bench.device.type == "cuda" else platform.processor() or "CPU"
    weights = sum(t.numel() for t in bench.master.values())
    print(f"\n{hardware}, torch {torch.__version__}; {weights:,} weights; median of {options.repeats}\n")
    print("| operation | ms | billion numbers/s | GB | GB/s | share of copy |\n|---|---:|---:|---:|---:|---:|")
    for row in bench.rows:
        print(f"| {row.name} | {row.seconds * 1e3:.2f} | {row.numbers / row.seconds / 1e9:.1f} | {row.bytes / 1e9:.2f} "
              f"| {row.bytes / row.seconds / 1e9:.0f} | {100 * row.share_of_copy:.0f} % |")  # fmt: skip
    total = time.perf_counter() - started
    print(f"\ncycles: {bench.cycles or 'none'}; all of it took {total:.1f} s")
    if options.json:
        found = {"hardware": hardware, "torch": torch.__version__, "weights": weights, "seconds": total,
                 "rows": [asdict(r) for r in bench.rows], **bench.cycles}  # fmt: skip
        options.json.write_text(json.dumps(found, indent=1))
    if not bench.cycles.get("hash_equal", True):
        raise SystemExit("the served weights are not what they were: see above")


if __name__ == "__main__":
    main()
