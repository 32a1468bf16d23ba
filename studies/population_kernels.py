# SPDX-License-Identifier: Apache-2.0
"""Cost of members in the kernels of one layer of Qwen2.5-7B, in microseconds, without the matrix products.

    python studies/population_kernels.py [--rows 60 240 960] [--members 30 128] [--ranks 1 8] [--json FILE]
    python studies/population_kernels.py --tune [--rows 60 240 960] [--ranks 1]

Each figure is the median of 20 replays of a CUDA graph with 28 layers, divided by 28. Every layer has factors of its
own, so that they come from memory as in a model and not from a cache. The columns:

    plain      vLLM's own RMSNorm (twice), rotation and SwiGLU, where vLLM is installed
    base       evoalign's kernels for the same, no row with a member
    deep       the same kernels, row i with member i modulo members
    generic    `add` on all four linear layers; comes on top of plain

`--tune` tries tiles and numbers of warps for each kernel instead and prints the best three for each number of rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evoalign.kernels import available, population
from evoalign.kernels.population import Dot, Heads, Partial, Terms

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS = 3584, 18944, 28, 4, 128, 28
Q, KV = HEADS * HEAD, KV_HEADS * HEAD
DTYPE = torch.bfloat16
LINEAR = {"qkv": (HIDDEN, (Q, KV, KV)), "o": (Q, (HIDDEN,)), "up": (HIDDEN, (INNER, INNER)), "down": (INNER, (HIDDEN,))}

Factors = dict[str, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]


@dataclass
class Case:
    """One number of rows, members and rank, with what the kernels read and write."""

    rows: int
    rank: int
    layers: list[Factors]
    members: torch.Tensor

    def __post_init__(self) -> None:
        rows, self.terms = self.rows, Terms(self.members, self.rank)
        self.x, self.residual, self.attended = noise(rows, HIDDEN), noise(rows, HIDDEN), noise(rows, Q)
        self.qkv, self.gate_up, self.inner = noise(rows, Q + 2 * KV), noise(rows, 2 * INNER), noise(rows, INNER)
        self.out = torch.empty_like(self.inner)
        self.weight, self.table = noise(HIDDEN), noise(4096, HEAD)
        self.positions = torch.arange(rows, device="cuda")
        self.dots = torch.zeros(rows, 3, self.rank, device="cuda")
        self.two_dots = torch.zeros(rows, 2, self.rank, device="cuda")
        self.parts = self.gate(self.layers[0])[1]

    def norm(self, factors: Factors, kind: str, call: Callable[..., Any] = population.norm, **tiles: Any) -> None:
        """The norm before the attention ("down": it adds what down_proj owes), or the one after it ("o")."""
        a, b = factors[kind]
        source = Dot(self.attended, a[0], b[0]) if kind == "o" else Partial(self.parts, b[0])
        into_a = factors["up" if kind == "o" else "qkv"][0]
        call(self.x, self.residual, self.weight, 1e-6, self.terms, into_a, source, **tiles)

    def rotate(self, factors: Factors, call: Callable[..., Any] = population.rotate, **tiles: Any) -> None:
        """The rotation of q and k."""
        heads = Heads(HEADS, KV_HEADS, HEAD)
        call(self.qkv, self.positions, self.table, self.dots, factors["qkv"][1], self.terms, heads, **tiles)

    def gate(self, factors: Factors, call: Callable[..., Any] = population.gate, **tiles: Any) -> Any:
        """SwiGLU."""
        return call(self.gate_up, self.two_dots, factors["up"][1], factors["down"][0][0], self.terms, **tiles)

    def add(self, factors: Factors, name: str, call: Callable[..., Any] = population.add, **tiles: Any) -> None:
        """The terms of one linear layer."""
        y = {"qkv": self.qkv, "o": self.x, "up": self.gate_up, "down": self.x}[name]
        x = {"qkv": self.x, "o": self.attended, "up": self.x, "down": self.inner}[name]
        call(y, x, *factors[name], self.terms, **tiles)

    def deep(self, factors: Factors) -> None:
        """All that a layer needs."""
        self.norm(factors, "down")
        self.rotate(factors)
        self.norm(factors, "o")
        self.gate(factors)

    def generic(self, factors: Factors) -> None:
        """One launch for each linear layer."""
        for name in LINEAR:
            self.add(factors, name)

    def plain(self, factors: Factors) -> None:
        """vLLM's kernels."""
        ops = torch.ops._C
        ops.fused_add_rms_norm(self.x, self.residual, self.weight, 1e-6)
        q, k = self.qkv[:, :Q], self.qkv[:, Q : Q + KV]
        ops.rotary_embedding(self.positions, q, k, HEAD, self.table, True)
        ops.fused_add_rms_norm(self.x, self.residual, self.weight, 1e-6)
        ops.silu_and_mul(self.out, self.gate_up)


def noise(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_(std=0.02)


def factors_of(members: int, rank: int) -> list[Factors]:
    """Factors of all layers in slots of `rank`."""

    def linear(inner: int, outer: Sequence[int]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        return tuple(noise(members, 1, rank, inner) for _ in outer), tuple(noise(members, 1, n, rank) for n in outer)

    return [{name: linear(*shape) for name, shape in LINEAR.items()} for _ in range(LAYERS)]


def microseconds(body: Callable[[Factors], None], layers: Sequence[Factors], repeats: int = 20) -> float:
    """Median time of a replay that runs `body` for all layers, divided by their number."""
    body(layers[0])  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for factors in layers:
            body(factors)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats + 3)]
    for before, after in events:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(a) for b, a in events[3:]) * 1000 / len(layers)


def round_robin(rows: int, members: int) -> torch.Tensor:
    """Member of each row."""
    return torch.arange(rows, dtype=torch.int32, device="cuda") % members


def table(rows: Sequence[int], members: Sequence[int], ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The figures, a line for each rank, number of members and number of rows."""
    vllm = has_vllm()
    for rank, count in itertools.product(ranks, members):
        layers = factors_of(count, rank)
        for size in rows:
            case = Case(size, rank, layers, round_robin(size, count))
            line: dict[str, Any] = {"rank": rank, "members": count, "rows": size}
            line["plain"] = microseconds(case.plain, layers) if vllm else None
            line["deep"], line["generic"] = microseconds(case.deep, layers), microseconds(case.generic, layers)
            case.members.fill_(-1)
            line["base"] = microseconds(case.deep, layers)
            yield line
        del layers
        torch.cuda.empty_cache()


def has_vllm() -> bool:
    """Whether vLLM's kernels can be called."""
    try:
        import vllm._custom_ops  # noqa: F401
    except ImportError:
        return False
    return hasattr(torch.ops._C, "fused_add_rms_norm")


def tune(rows: Sequence[int], ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The three best tiles of each kernel, and the present choice."""
    from evoalign.kernels import population_triton as kernels

    def power(value: int) -> int:
        return 1 << (value - 1).bit_length()

    def tried(name: str, rank: int) -> Iterator[kernels.Tiles]:
        """A small grid around what is there."""
        if name in ("norm down", "norm o", "rotate"):
            yield from (kernels.Tiles(0, warps) for warps in (2, 4, 8, 16))
        elif name == "gate":
            yield from (kernels.Tiles(c, w) for c in (1024, 2048, 4096) for w in (2, 4, 8, 16))
        else:
            inner, outer = LINEAR[name.removeprefix("add ")]
            depth = min(power(inner), 4096 // power(rank))
            groups = (1, 2, 5) if max(outer) > 8192 else (1, 2)
            for columns, warps, share in itertools.product((2048, 4096), (4, 8, 16), groups):
                yield kernels.Tiles(columns, warps, depth, share)

    bodies: dict[str, Callable[[Case, Factors, dict[str, Any]], None]] = {
        "norm down": lambda case, f, t: case.norm(f, "down", kernels.norm, **t),
        "norm o": lambda case, f, t: case.norm(f, "o", kernels.norm, **t),
        "rotate": lambda case, f, t: case.rotate(f, kernels.rotate, **t),
        "gate": lambda case, f, t: case.gate(f, kernels.gate, **t),
        **{f"add {n}": lambda case, f, t, n=n: case.add(f, n, kernels.add, **t) for n in LINEAR},
    }
    for rank in ranks:
        layers = factors_of(30, rank)
        for size, (name, body) in itertools.product(rows, bodies.items()):
            case = Case(size, rank, layers, round_robin(size, 30))
            present = microseconds(lambda f, c=case, b=body: b(c, f, {}), layers)
            times: list[tuple[float, tuple[int, int, int]]] = []
            for t in tried(name, rank):
                took = microseconds(lambda f, c=case, b=body, t=t: b(c, f, {"tiles": t}), layers)
                times.append((took, (t.columns, t.warps, t.groups)))
            best = sorted(times)[:3]
            yield {"rank": rank, "rows": size, "kernel": name, "present": present, "best": best}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[60, 240, 960])
    parser.add_argument("--members", type=int, nargs="+", default=[30, 128])
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (torch.cuda.is_available() and available("cuda")):
        sys.exit("needs a CUDA device and Triton")
    ranks = options.ranks or ([1] if options.tune else [1, 8])
    with torch.inference_mode():
        lines = list(tune(options.rows, ranks) if options.tune else table(options.rows, options.members, ranks))
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "lines": lines}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    print(f"{report['device']}, torch {report['torch']}, microseconds a layer")
    if options.tune:
        print("rank rows kernel       present   best: columns, warps, groups")
        for x in lines:
            best = "   ".join(f"{t:7.2f} {c}/{w}/{g}" for t, (c, w, g) in x["best"])
            print(f"{x['rank']:4} {x['rows']:4} {x['kernel']:11} {x['present']:8.2f}   {best}")
        return
    print("rank members rows    plain     base     deep  generic")
    for x in lines:
        figures = "".join(
            " " * 6 + "  -" if x[k] is None else f"{x[k]:9.2f}" for k in ("plain", "base", "deep", "generic")
        )
        print(f"{x['rank']:4} {x['members']:7} {x['rows']:4}{figures}")


if __name__ == "__main__":
    main()
