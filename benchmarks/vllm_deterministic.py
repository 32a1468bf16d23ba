# SPDX-License-Identifier: Apache-2.0
"""Do a member's texts in vLLM depend on who else is in the batch, and what does it cost that they do not?

    python benchmarks/vllm_deterministic.py --shapes tiny 1.5b --json runs/vllm.jsonl          one GPU, about 200 s

Greedy texts and log-probabilities of three of 30 members (`lowrank`, rank 1, population kernels `deep`) in different
mixes, compared bit by bit with those of the member alone:

    again       the same once more
    together    one prompt after the other becomes all prompts at once
    among 30    in a batch of the whole population
    shuffled    the population in another order, so in other slots
    crowded     in a batch of the whole population with six more prompts

with `deterministic: true`, which turns vLLM's batch-invariant kernels and fixed tiles of ours on, and without. Then the
tokens per second of both, 30 members x 8 prompts, 100 + 128 tokens, as `vllm_population.py` measures them.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vllm_shapes as v

PROMPT, ROWS = 100, 8
ASKED = 2
"""Prompts whose answers are compared."""
MIXES = ("again", "together", "among 30", "shuffled", "crowded")


def measure(shape: str, deterministic: bool, options: argparse.Namespace, folder: Path) -> None:
    """Start an engine, compare its mixes and time it, in a process of their own."""
    rows = options.members * ROWS
    v.only_graphs({1, ASKED, options.members * ASKED, rows})
    config = v.config_of(
        v.model_folder(shape, folder), shape, rows=rows, length=PROMPT + options.tokens, members=options.members,
        sigma=2e-3, deterministic=deterministic,
        engine={"population": options.form, "attention_backend": options.attention},
    )  # fmt: skip
    served = v.Served(config)
    about = served.about()
    v.say(f"{shape}, deterministic {deterministic}: started in {served.start_seconds:.1f} s; {about}")
    common = {"shape": shape, "deterministic": deterministic, "form": about["form"]}
    for mix, found in compared(served, options).items():
        v.emit(options.file, benchmark="mixes", mix=mix, **common, **found)
        v.say(f"{shape}, deterministic {deterministic}, {mix}: {found}")
    base, population = speed(served, options)
    v.emit(
        options.file, benchmark="deterministic", **common,
        base=[asdict(t) for t in base], population=[asdict(t) for t in population],
    )  # fmt: skip
    v.say(f"base {v.spread(speeds(base))}, population {v.spread(speeds(population))} tokens/s")


def compared(served: v.Served, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """For each mix: texts, how many are not the same, of how many some log-probability is not, and by how much."""
    from evoalign.types import population

    everyone = population(options.members)
    chosen = [everyone[i] for i in (0, options.members // 4, options.members - 1)]
    requests = v.requests_of(ROWS, PROMPT, options.tokens, 7, logprobs=True)
    few, shuffled = requests[:ASKED], random.Random(1).sample(everyone, len(everyone))
    alone = _each(served, [([m], [r]) for m in chosen for r in few])
    mixes = {
        "again": [([m], [r]) for m in chosen for r in few],
        "together": [([m], few) for m in chosen],
        "among 30": [(everyone, few)],
        "shuffled": [(shuffled, few)],
        "crowded": [(everyone, requests)],
    }
    return {mix: _difference(alone, _each(served, batches)) for mix, batches in mixes.items()}


def _each(served: v.Served, batches: list[tuple[Any, Any]]) -> dict[tuple[int, int], Any]:
    """Rollouts of the batches, one after the other, by member and request."""
    from evoalign.types import Plan

    return {
        (r.member.index, r.request): r
        for members, requests in batches
        for r in served.engine.rollout(Plan(3, served.config.es.sigma, tuple(members)), requests)
    }


def _difference(alone: dict[Any, Any], mixed: dict[Any, Any]) -> dict[str, Any]:
    """Log-probabilities are compared up to and with the first token that differs: after it the texts are others."""
    texts = logprobs = 0
    most, first = 0.0, None
    for key, a in alone.items():
        b = mixed[key]
        places = [i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y]
        end = places[0] if places else len(a.token_ids)
        first = end if places and (first is None or end < first) else first
        gaps = [abs(x - y) for x, y in zip(a.logprobs[:end], b.logprobs[:end], strict=True)]
        texts += bool(places)
        logprobs += bool(places) or any(gaps)
        most = max([most, *gaps])
    distinct = len({token for a in alone.values() for token in a.token_ids})
    return {
        "texts": len(alone),
        "distinct_tokens": distinct,
        "other_texts": texts,
        "other_bits": logprobs,
        "most": most,
        "first": first,
    }


def speed(served: v.Served, options: argparse.Namespace) -> tuple[list[v.Took], list[v.Took]]:
    """The bare model and the population, in turn, after one of each to warm up."""
    from evoalign.types import Plan, population

    plan = Plan(4, served.config.es.sigma, population(options.members))
    base: list[v.Took] = []
    members: list[v.Took] = []
    for number in range(options.repeats + 1):
        base.append(served.base(v.requests_of(options.members * ROWS, PROMPT, options.tokens, 1000 + number)))
        members.append(served.members(plan, v.requests_of(ROWS, PROMPT, options.tokens, 2000 + number)))
    return base[1:], members[1:]


def speeds(took: list[Any]) -> list[float]:
    return [t["tokens"] / t["generate"] if isinstance(t, dict) else t.tokens / t.generate for t in took]


def report(options: argparse.Namespace) -> None:
    """Tables of all results in the file."""
    rows = v.rows_of(options.file, benchmark="mixes")
    v.table(
        ("shape", "form", "deterministic", "mix", "other texts", "other bits",
         "log-probabilities apart by", "first at"),
        [
            (r["shape"], r["form"], r["deterministic"], r["mix"], f"{r['other_texts']} of {r['texts']}",
             f"{r['other_bits']} of {r['texts']}", f"{r['most']:.2g}", "" if r["first"] is None else r["first"])
            for r in rows
        ],
    )  # fmt: skip
    rows = v.rows_of(options.file, benchmark="deterministic")
    free = {(r["shape"], r["form"]): r for r in rows if not r["deterministic"]}
    lines = []
    for r in rows:
        other = free.get((r["shape"], r["form"]))
        cost = []
        for side in ("base", "population"):
            mine, theirs = v.median(speeds(r[side])), v.median(speeds(other[side])) if other else 0.0
            cost.append(f"{1 - mine / theirs:.1%}" if theirs and r["deterministic"] else "")
        lines.append(
            (r["shape"], r["form"], r["deterministic"], v.spread(speeds(r["base"])), cost[0],
             v.spread(speeds(r["population"])), cost[1])
        )  # fmt: skip
    v.table(("shape", "form", "deterministic", "base, tokens/s", "cost", "population, tokens/s", "cost"), lines)


def main() -> None:
    parser = v.parser(__doc__, "tiny")
    parser.add_argument("--shapes", nargs="+", choices=sorted(v.SHAPES), default=["tiny"])
    parser.add_argument("--form", choices=["deep", "generic", "stock"], default="deep")
    parser.add_argument("--only", choices=["true", "false"], help="one of the two alone")
    parser.add_argument("--members", type=int, default=30 if v.has_gpu() else 5)
    parser.add_argument("--tokens", type=int, default=128 if v.has_gpu() else 16)
    parser.add_argument("--repeats", type=int, default=3 if v.has_gpu() else 1)
    options = parser.parse_args()
    wanted = {"true": [True], "false": [False], None: [True, False]}[options.only]
    with v.running(options) as folder:
        # vLLM is not imported before the fork: it reads what makes it batch-invariant where it is imported.
        for shape in options.shapes:
            for deterministic in wanted:
                if not v.apart(measure, shape, deterministic, options, folder, limit=options.limit):
                    v.say(f"{shape}, deterministic {deterministic} did not end well: see above")
        report(options)


if __name__ == "__main__":
    main()
