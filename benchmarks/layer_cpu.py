# SPDX-License-Identifier: Apache-2.0
"""Microseconds of what members add to a layer on a CPU, by three forms in turn: plain torch, torch.compile, compiled C.

    OMP_NUM_THREADS=1 python benchmarks/layer_cpu.py --json benchmarks/results/layer_cpu.jsonl

The shape of the model `tiny`, float32, rank 1, 16 members with 8 rows each: the norm before gate and up, and the gate,
with members' terms (population) and without (base). Medians of rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evoalign.kernels import compiled, population, reference

HIDDEN, INNER, MEMBERS, ROWS = 96, 288, 16, 8


def calls() -> dict[str, Callable[[Any, torch.Tensor], object]]:
    """Each function, by a form and the rows' members."""
    total = MEMBERS * ROWS
    x, residual, weight = torch.randn(total, HIDDEN), torch.zeros(total, HIDDEN), torch.ones(HIDDEN)
    a, b, inner = (0.01 * torch.randn(MEMBERS, 1, *shape) for shape in ((1, HIDDEN), (HIDDEN, 1), (INNER, 1)))
    gate_up, dots, down = torch.randn(total, 2 * INNER), torch.randn(total, 2, 1), torch.randn(MEMBERS, 1, 1, INNER)
    source = reference.Partial(torch.zeros(total, 1, 1), b)
    return {
        "norm": lambda form, members: form.norm(x, residual, weight, 1e-6, reference.Terms(members, 1), [a, a], source),
        "gate": lambda form, members: form.gate(gate_up, dots, [inner, inner], down, reference.Terms(members, 1)),
    }


class Compiled:
    """Plain torch through torch.compile."""

    norm = staticmethod(torch.compile(reference.norm))
    gate = staticmethod(torch.compile(reference.gate))


def microseconds(work: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not compiled.here():
        raise SystemExit("evoalign was installed without a C compiler")
    forms: dict[str, Any] = {"torch": reference, "torch.compile": Compiled, "C": population}
    owners = torch.arange(MEMBERS, dtype=torch.int32).repeat_interleave(ROWS)
    sides = {"population": owners, "base": torch.full_like(owners, -1)}
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, call in calls().items():
            for side, members in sides.items():
                found: dict[str, list[float]] = {form: [] for form in forms}
                for round_ in range(options.rounds + 1):
                    for form, module in forms.items():
                        spent = microseconds(lambda m=module, who=members, f=call: f(m, who), options.times)
                        if round_:  # in the first, torch compiles
                            found[form].append(spent)
                said = "; ".join(
                    f"{form} {statistics.median(us):.1f} ({min(us):.1f} to {max(us):.1f})" for form, us in found.items()
                )
                print(f"{name}, {side}: {said}", flush=True)
                rows.append({
                    "benchmark": "layer_cpu", "function": name, "side": side, "microseconds": found,
                    "threads": torch.get_num_threads(), "torch": torch.__version__, "load": os.getloadavg()[0],
                })  # fmt: skip
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
