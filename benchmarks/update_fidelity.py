# SPDX-License-Identifier: Apache-2.0
"""How much of the intended update arrives: in the float32 master, and in the bfloat16 weights that are served.

1. The cosine between the intended update (float64, from the same noise) and the change of the master, over all
   tensors of a space, for populations of 30, 1024 and 8192.
2. After 200 updates: the cosine between the change of the served bfloat16 weights and the change of the master since
   the start, for each kind of tensor, beside the ratio of their norms and the share of weights that changed. Beside it
   the same without a master: each update rounded and added to the bfloat16 weights in place.

Coefficients are z-scores of random fitness, so that the mean walks at random: a run that learns moves further.
Takes about seven minutes on one core, most of them for `full` with 8192 members.

    python benchmarks/update_fidelity.py [--model tiny] [--sigma 1e-3] [--alpha 5e-4] [--population 30] [--steps 200]
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import transformers

from evoalign import engines, noise, spaces, tokens
from evoalign.config import Config, from_dict
from evoalign.engines import Engine
from evoalign.spaces import Factors, Space
from evoalign.types import Layout, Update, population

POPULATIONS = (30, 1024, 8192)
KINDS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight",
         "down_proj.weight", "bias", "norm.weight", "embed_tokens.weight", "lm_head.weight")  # fmt: skip
BLOCK = 1 << 14
"""Numbers of a tensor for which all members' noise is held at once in float64."""


def started(options: argparse.Namespace, space: str) -> tuple[Engine, Space, Layout]:
    """The engine on the CPU in bfloat16 with a space; `full` evolves the norms too, to show what becomes of them."""
    tree = {
        "model": {"name": options.model, "dtype": "bfloat16"}, "engine": {"device": "cpu"}, "space": space,
        "es": {"sigma": options.sigma, "learning_rate": options.alpha}, "full": {"exclude": ["no tensor"]},
    }  # fmt: skip
    config: Config = from_dict(tree)
    engine = engines.create(config, tokens.load(config.model))
    made = spaces.create(config)
    layout = made.layout(engine.specs(), engine.dtype)
    engine.start(made, layout, None, keep_start=False)
    return engine, made, layout


def update(options: argparse.Namespace, index: int, members: int) -> Update:
    """Z-scores of random fitness."""
    fitness = np.random.default_rng(index).normal(size=members)
    z = (fitness - fitness.mean()) / fitness.std()
    return Update(index, index, population(members), tuple(map(float, z)), options.sigma, options.alpha)


def intended(space: Space, layout: Layout, name: str, up: Update) -> Iterator[torch.Tensor]:
    """step * scale * (1/N) sum_i c_i eps_i in float64, in row blocks."""
    shape, streams = layout[name].shape, [m.noise for m in up.members]
    weights = torch.tensor(up.coefficients, dtype=torch.float64) * (up.step * layout[name].scale / len(streams))
    if layout.rank and layout[name].module == name:
        eps = space.noise(layout, name, up.generation, streams)
        assert isinstance(eps, Factors)
        left = (eps.b.double() * weights[:, None, None]).permute(1, 0, 2).reshape(shape[0], -1)
        yield left @ eps.a.double().reshape(-1, shape[1]) / math.sqrt(layout.rank)
        return
    for part in noise.row_blocks(shape, BLOCK):
        total = torch.zeros([s.stop - s.start for s in part], dtype=torch.float64)
        for i in range(0, len(streams), 256):
            eps = space.noise(layout, name, up.generation, streams[i : i + 256], part)
            assert isinstance(eps, torch.Tensor)
            total += torch.tensordot(weights[i : i + 256], eps.double(), dims=1)
        yield total


def master_cosine(options: argparse.Namespace, space: str, members: int) -> float:
    """Cosine of intended and realised change over all tensors of a space."""
    engine, made, layout = started(options, space)
    up = update(options, 0, members)
    before = dict(engine.state())
    engine.apply(up)
    dot = own = other = 0.0
    for name, after in engine.state():
        if name not in {t.name for t in layout.tensors}:
            continue
        realised = after.double() - before[name].double()
        want = torch.cat([part.reshape(-1) for part in intended(made, layout, name, up)])
        dot += float(realised.reshape(-1) @ want)
        own, other = own + float(realised.square().sum()), other + float(want.square().sum())
    engine.close()
    return dot / math.sqrt(own * other)


def kind_of(name: str) -> str:
    """The kind of a tensor, by the end of its name."""
    return next((kind for kind in KINDS if name.endswith(kind)), "other")


def drift(options: argparse.Namespace) -> Iterator[str]:
    """Rows of the second table: served and in-place change against the master's."""
    engine, made, layout = started(options, "full")
    start = dict(engine.state())
    in_place = {n: t.bfloat16() for n, t in start.items()}
    for index in range(options.steps):
        up = update(options, index, options.population)
        engine.apply(up)
        for name, tensor in in_place.items():
            move = torch.zeros_like(start[name])
            made.accumulate(layout, move, name, tuple(slice(0, n) for n in move.shape), up)
            tensor.add_(move.bfloat16())
    master = dict(engine.state())
    served = {n: t.bfloat16() for n, t in master.items()}
    kinds = sorted({kind_of(n) for n in start}, key=lambda k: KINDS.index(k) if k in KINDS else len(KINDS))
    for kind in kinds:
        names = [n for n in start if kind_of(n) == kind]
        typical = torch.cat([start[n].reshape(-1).abs() for n in names]).median()
        cells = [_compared(now, start, master, names) for now in (served, in_place)]
        yield f"| {kind.removesuffix('.weight')} | {typical:.3f} | {' | '.join(cells)} |"
    engine.close()


def _compared(
    now: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor], master: Mapping[str, torch.Tensor],
    names: list[str],
) -> str:  # fmt: skip
    """Cosine, ratio of norms and share changed of some tensors, as table cells."""
    got = torch.cat([(now[n].double() - start[n].double()).reshape(-1) for n in names])
    want = torch.cat([(master[n].double() - start[n].double()).reshape(-1) for n in names])
    size = float(got.norm())
    cosine = float(got @ want) / (size * float(want.norm())) if size else 0.0
    return f"{cosine:.3f} | {size / float(want.norm()):.2f} | {float((got != 0).double().mean()):.1%}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--sigma", type=float, default=1e-3)
    parser.add_argument("--alpha", type=float, default=5e-4)
    parser.add_argument("--population", type=int, default=30)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--populations", type=int, nargs="*", default=POPULATIONS)
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    print(f"model {options.model}, sigma {options.sigma}, alpha {options.alpha}; {platform.machine()}, "
          f"Python {sys.version.split()[0]}, torch {torch.__version__}\n")  # fmt: skip
    print("| space | members | cosine of intended and realised update on the master | seconds |\n|---|---:|---:|---:|")
    for space in ("lora", "lowrank", "full"):
        for members in options.populations:
            clock = time.perf_counter()
            cosine = master_cosine(options, space, members)
            print(f"| {space} | {members} | {cosine:.7f} | {time.perf_counter() - clock:.1f} |", flush=True)
    print(f"\nafter {options.steps} updates of {options.population} members, against the master's change:\n")
    print("| kind | median abs | served: cosine | norm ratio | changed | in place: cosine | norm ratio | changed |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in drift(options):
        print(row, flush=True)


if __name__ == "__main__":
    main()
