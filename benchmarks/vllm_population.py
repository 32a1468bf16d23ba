# SPDX-License-Identifier: Apache-2.0
"""Output tokens per second of a whole population in vLLM, against the bare model on as many rows.

    python benchmarks/vllm_population.py --forms deep                                         one GPU, about 160 s
    python benchmarks/vllm_population.py --forms generic stock --cases 30x2,30x8,30x32 --repeats 2 --long-repeats 1
    python benchmarks/vllm_population.py --forms plain compiled --cases 30x2,30x8,30x32 --repeats 3 --long-repeats 2
    python benchmarks/vllm_population.py --forms deep stock --cases 30x8 --ragged
    python benchmarks/vllm_population.py --forms deep generic stock --ranks 8 --cases 30x8 --repeats 3
    python benchmarks/vllm_population.py --shape 32b --quantised w4a16 --cases 30x2,30x8,30x32

A case `30x8` is 30 members with 8 prompts each, 240 rows; prompts have 100 random tokens, completions 128, greedy and
without a stop token. With `--ragged` each row gets 32 to 160 tokens, the same rows on all sides. Forms:

    deep, generic, stock   adapters of `lowrank`: what `engine.population` says
    plain                  an engine without LoRA slots, its graphs as ours: only the bare model
    compiled               the same with vLLM's default of torch.compile: only the bare model

Each form has a separate engine. In each round the bare model answers (no adapter, the same process; each row a
different prompt, the prefix cache empty) and the population, and the ratio of the two is the median over rounds.
With `--quantised` the base has packed weights, and the adapters are those of `lora`. Two clocks: around vLLM's steps,
which is the ratio of the table, and around the whole rollout, factors written and texts made.

Engines of `deep` and `generic` have a slot for each member of the largest population measured; `stock`, whose kernels
cost more with more slots, has an engine for each number of members. CUDA graphs are captured for the batch sizes
measured only.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import vllm_shapes as v
from baseline import check

FORMS = ("deep", "generic", "stock", "plain", "compiled")
BARE = ("plain", "compiled")
PROMPT, TOKENS, RAGGED = 100, 128, (32, 160)
MANY = 256
"""Rows above which a round is long and hardly varies, so that fewer are run and none to warm up."""


@dataclass(frozen=True)
class Case:
    """Number of members and of prompts."""

    members: int
    prompts: int

    @property
    def rows(self) -> int:
        return self.members * self.prompts

    def __str__(self) -> str:
        return f"{self.members}x{self.prompts}"


def cases_of(text: str) -> list[Case]:
    return [Case(*map(int, part.split("x"))) for part in text.split(",")]


def engines_of(options: argparse.Namespace) -> list[tuple[str, int, list[Case]]]:
    """Form, rank and cases of each engine to start."""
    found: list[tuple[str, int, list[Case]]] = []
    for form in options.forms:
        for rank in options.ranks if form not in BARE else [0]:
            if form == "stock":
                counts = dict.fromkeys(case.members for case in options.cases)
                found += [(form, rank, [c for c in options.cases if c.members == n]) for n in counts]
            else:
                found.append((form, rank, options.cases))
    return found


def serve(form: str, rank: int, cases: list[Case], options: argparse.Namespace, folder: Path) -> v.Served:
    """An engine of a form, its graphs those of the cases."""
    rows = max(case.rows for case in cases)
    sizes = {case.rows for case in cases}
    if options.ragged:
        sizes |= set(range(16, max(sizes), 16))
    v.only_graphs(sizes, compiled=form == "compiled")
    bare = form in BARE
    config = v.config_of(
        v.model_folder(options.shape, folder, options.quantised),
        options.shape,
        rows=rows,
        length=options.prompt + max(options.tokens, options.range[1] if options.ragged else 0),
        members=max(case.members for case in cases),
        space="lora" if options.quantised else "full" if bare else "lowrank",
        rank=max(1, rank),
        engine={
            "population": "auto" if bare else form,
            "master": "host" if bare else "device",  # never made where the space does not start
            "attention_backend": options.attention,
        },
    )
    return v.Served(config, space=not bare)


def measure(form: str, rank: int, cases: list[Case], options: argparse.Namespace, folder: Path) -> None:
    """Start an engine and run all its cases, in a separate process."""
    served = serve(form, rank, cases, options, folder)
    about = served.about()
    v.say(f"{form} rank {rank}: started in {served.start_seconds:.1f} s; {about}")
    if form not in BARE and about["form"] != form:
        v.say(f"NOT {form}: {about['form']}, since {about['why']}")
    rounds(served, cases[0], 1, options, form)  # warm up
    for case in cases:
        repeats = options.repeats if case.rows <= MANY else min(options.repeats, options.long_repeats)
        base, population = rounds(served, case, repeats, options, form)
        v.emit(
            options.file,
            benchmark="population", form=form, rank=rank, case=str(case), rows=case.rows, ragged=options.ragged,
            shape=options.shape, quantised=options.quantised, base=[asdict(t) for t in base],
            population=[asdict(t) for t in population], **served_by(about),
        )  # fmt: skip
        v.say(f"{form} rank {rank} {case}: " + told(base, population))
        if options.profile:
            profile(served, case, options, form)


def profile(served: v.Served, case: Case, options: argparse.Namespace, form: str) -> None:
    """Where the time of each side goes: the device's kernels, and then the host's functions."""
    import cProfile
    import pstats

    import torch
    from torch.profiler import ProfilerActivity

    from evoalign.types import Plan, population

    plan = Plan(0, served.config.es.sigma, population(case.members))
    for side in ["base"] if form in BARE else ["base", "population"]:
        count = case.rows if side == "base" else case.prompts
        requests = v.requests_of(count, options.prompt, options.tokens, 3000)

        def run(requests: list[Any] = requests, side: str = side) -> v.Took:
            return served.base(requests) if side == "base" else served.members(plan, requests)

        if torch.cuda.is_available():
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
                took = run()
            events = sorted(seen.key_averages(), key=lambda e: e.self_device_time_total, reverse=True)
            busy = sum(e.self_device_time_total for e in events) / 1e6
            v.say(f"{side} {case}: {took.generate:.3f} s, of which kernels {busy:.3f} s")
            for event in events[:14]:
                print(f"  {event.self_device_time_total / 1e3:9.1f} ms {event.count:7d} x {event.key[:90]}")
        host = cProfile.Profile()
        host.enable()
        run()
        host.disable()
        v.say(f"{side} {case}, the host:")
        pstats.Stats(host).strip_dirs().sort_stats("tottime").print_stats(28)


def served_by(about: dict[str, Any]) -> dict[str, Any]:
    """The same with the form that serves apart from the one asked for."""
    return {key if key != "form" else "served": value for key, value in about.items()}


def rounds(
    served: v.Served, case: Case, repeats: int, options: argparse.Namespace, form: str
) -> tuple[list[v.Took], list[v.Took]]:
    """The bare model and the population, one after the other, in each round; who is first alternates."""
    from evoalign.types import Plan, population

    plan = Plan(0, served.config.es.sigma, population(case.members))
    draw = random.Random(case.rows)
    lengths = [draw.randint(*options.range) for _ in range(case.rows)] if options.ragged else []
    expected = sum(lengths) or case.rows * options.tokens
    took: dict[str, list[v.Took]] = {"base": [], "population": []}
    sides = ["base"] if form in BARE else ["base", "population"]
    for number in range(repeats):
        for side in sides:
            count, seed = (case.rows, 1000) if side == "base" else (case.prompts, 2000)
            requests = v.requests_of(count, options.prompt, options.tokens, seed + number)
            if lengths:
                requests = ragged(requests, lengths, plan.members if side == "population" else (None,))
            took[side].append(served.base(requests) if side == "base" else served.members(plan, requests))
            found = took[side][-1].tokens
            assert found == expected, f"{found} tokens instead of {expected}"
        sides.reverse()
    return took["base"], took["population"]


def ragged(requests: list[Any], lengths: list[int], members: Sequence[Any]) -> list[Any]:
    """Return a request per row, with the number of tokens of its place."""
    rows = [(m, r) for m in members for r in requests]
    return [
        replace(request, index=i, member=member, sampling=replace(request.sampling, max_tokens=length))
        for i, ((member, request), length) in enumerate(zip(rows, lengths, strict=True))
    ]


def speeds(took: list[Any], clock: str = "generate") -> list[float]:
    """Tokens per second of each round."""
    return [t["tokens"] / t[clock] if isinstance(t, dict) else t.tokens / getattr(t, clock) for t in took]


def told(base: list[v.Took], population: list[v.Took]) -> str:
    """One case in words."""
    text = f"base {v.spread(speeds(base))} tokens/s"
    if population:
        ratio = v.median(p / b for p, b in zip(speeds(population), speeds(base), strict=True))
        text += f", population {v.spread(speeds(population))} = {ratio:.1%}, whole rollout "
        text += f"{v.median(speeds(population, 'seconds')):,.0f}"
    return text


def report(options: argparse.Namespace) -> None:
    """The table of all results in the file, with the bare model of the deep engine as common measure."""
    rows = v.rows_of(options.file, benchmark="population", shape=options.shape, quantised=options.quantised)
    common = {(r["case"], r["ragged"]): v.median(speeds(r["base"])) for r in rows if r["form"] == "deep"}
    lines = []
    figures: dict[str, float] = {}
    for r in sorted(rows, key=lambda r: (r["ragged"], r["rows"], r["rank"], FORMS.index(r["form"]))):
        base, members = speeds(r["base"]), speeds(r["population"])
        mine = v.median(members) if members else v.median(base)
        whole = speeds(r["population"] or r["base"], "seconds")
        ratio = v.median(p / b for p, b in zip(members, base, strict=True)) if members else None
        if ratio and not r["ragged"]:
            name = " ".join(filter(None, (options.shape, options.quantised)))
            figures[f"vllm_population {name} {r['case']}, {r['form']} rank {r['rank']} over base"] = ratio
        deep = common.get((r["case"], r["ragged"]))
        lines.append(
            (
                r["case"] + (" ragged" if r["ragged"] else ""), r["form"], r["rank"] or "", len(base), v.spread(base),
                v.spread(members) if members else "", f"{ratio:.1%}" if ratio else "",
                f"{mine / deep:.1%}" if deep else "", f"{v.median(whole):,.0f}", f"{r['start_seconds']:.0f} s",
            )
        )  # fmt: skip
    v.table(
        ("case", "form", "rank", "rounds", "base, tokens/s", "population", "of its base", "of deep's base",
         "whole rollout", "start"),
        lines,
    )  # fmt: skip
    check(figures)


def main() -> None:
    parser = v.parser(__doc__, "7b")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["deep"])
    parser.add_argument("--cases", type=cases_of, default="30x2,30x8,30x32,128x8" if v.has_gpu() else "3x2,4x2")
    parser.add_argument("--quantised", choices=sorted(v.QUANTISED), help="form of the base's weights")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=5 if v.has_gpu() else 2)
    parser.add_argument("--long-repeats", type=int, default=3, help=f"rounds of cases with more than {MANY} rows")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--range", type=int, nargs=2, default=RAGGED, help="tokens of a ragged row")
    parser.add_argument("--profile", action="store_true", help="say where the time goes, after the rounds of a case")
    parser.add_argument("--compiled", action="store_true", help="short for one more form, compiled")
    options = parser.parse_args()
    if options.compiled and "compiled" not in options.forms:
        options.forms.append("compiled")
    with v.running(options) as folder:
        v.preload()
        for form, rank, cases in engines_of(options):
            if not v.apart(measure, form, rank, cases, options, folder, limit=options.limit):
                v.say(f"{form} rank {rank} did not end well: see above")
        report(options)


if __name__ == "__main__":
    main()
