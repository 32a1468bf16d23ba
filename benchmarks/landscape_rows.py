# SPDX-License-Identifier: Apache-2.0
"""Rows of the landscape: lines between models, and noise on them, a unit for each seed; see landscape_plan.md.

    python benchmarks/landscape_rows.py --runs DIR                 the runs of landscape.py; goes on where it was
    python benchmarks/landscape_rows.py --table                    what the plan asks, from the rows alone

Placebos, the ES runs with shuffled coefficients, are made in DIR where they are not there. Rows go to
benchmarks/results/landscape.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from evoalign import statistics
from evoalign.analysis.connectivity.barrier import barrier
from evoalign.analysis.estimates import told
from evoalign.analysis.lab import BASE, Asked, Lab, Perturbation
from evoalign.analysis.similarity.command import Command, Settings
from evoalign.config import load
from evoalign.statistics import Estimate
from evoalign.training.replay import replay

ROWS = Path(__file__).resolve().parent / "results" / "landscape.jsonl"
EXAMPLES = 60
ALPHAS_A = np.arange(21) / 20
SIGMAS, PARTS, TRIALS = (0.005, 0.01, 0.05), ("all", "unembedding"), 4
SEEDS = range(8)
KINDS = ("es", "grpo", "placebo")
Row = dict[str, Any]


def targets(runs: Path, seed: int) -> dict[str, str]:
    """A run of each method, and the placebo, which is made once."""
    placebo = runs / f"placebo_{seed}"
    if not placebo.is_dir():
        replay(runs / f"es_{seed}", counterfactual="shuffle", seed=0, to=placebo)
    return {kind: str(runs / f"{kind}_{seed}") for kind in KINDS}


def unit(runs: Path, seed: int) -> Iterator[Row]:
    """All rows of a seed; a line between two seeds of a method is to the next seed."""
    own, following = targets(runs, seed), targets(runs, (seed + 1) % len(SEEDS))
    names = {BASE: BASE, **own, **{f"next {kind}": name for kind, name in following.items()}}
    config = runs / f"es_{seed}" / "config.yaml"
    with Lab(list(names.values()), load([config]), Asked(examples=EXAMPLES)) as lab:
        pairs = [*((BASE, kind) for kind in KINDS), ("es", "grpo"), *((kind, f"next {kind}") for kind in KINDS)]
        for a, b in pairs:
            mixes = [{names[a]: 1 - float(alpha), names[b]: float(alpha)} for alpha in ALPHAS_A]
            rewards_AE = np.stack([lab.rewards(lab.answer(mix)) for mix in mixes])
            found = asdict(barrier(ALPHAS_A, rewards_AE[None]))
            yield {"what": "line", "seed": seed, "a": a, "b": b, "rewards": rewards_AE.mean(1).tolist(), **found}
        for model in (BASE, *KINDS):
            still = lab.answer({names[model]: 1.0})
            hacked = float(lab.hacked(still).mean())
            for part, sigma in product(PARTS, SIGMAS):
                draws = [Perturbation(sigma, trial, part) for trial in range(TRIALS)]
                noisy = [float(lab.rewards(lab.answer({names[model]: 1.0}, draw)).mean()) for draw in draws]
                yield {
                    "what": "noise", "seed": seed, "model": model, "part": part, "sigma": sigma, "rewards": noisy,
                    "reward": float(lab.rewards(still).mean()), "hacked": hacked,
                }  # fmt: skip


def cosines(runs: Path) -> list[Row]:
    """Of the changes of all weights, and of the unembedding: of neighbouring seeds, and of ES with GRPO."""
    names = {(kind, seed): targets(runs, seed)[kind] for seed in SEEDS for kind in KINDS}
    config = load([runs / "es_0" / "config.yaml"])
    found = Command().run(list(names.values()), Settings(spectrum=False), config).numbers
    of = {frozenset((pair["a"], pair["b"])): pair["cosines"] for pair in found["pairs"]}
    pairs = [(kind, kind, 1) for kind in KINDS] + [("es", "grpo", 0)]
    return [
        {"what": "cosine", "seed": s, "a": a, "b": b, "part": part, "cosine": value[part]["value"]}
        for a, b, step in pairs
        for s in SEEDS
        for value in [of[frozenset((names[a, s], names[b, (s + step) % len(SEEDS)]))]]
        for part in PARTS
    ]


# --- the table --------------------------------------------------------------------------------------------------------


def said(found: Estimate, limit: float, *, above: bool) -> str:
    """Held, not held or not known, by the side of the threshold on which the interval lies."""
    if found.low is None or found.high is None:
        return "not known"
    over, under = found.low > limit, found.high < limit
    return ("held" if above else "not held") if over else ("not held" if above else "held") if under else "not known"


def lines_of(rows: Sequence[Row], a: str, b: str) -> list[Row]:
    return [row for row in rows if row["what"] == "line" and (row["a"], row["b"]) == (a, b)]


def over(rows: Sequence[Row], number: Callable[[Row], float]) -> Estimate:
    return statistics.mean([number(row) for row in rows])


def largest_step(row: Row) -> float:
    """Between neighbours of the line, as a share of what its ends differ by."""
    rewards = np.array(row["rewards"])
    return float(np.abs(np.diff(rewards)).max() / abs(rewards[-1] - rewards[0]))


def change(rows: Sequence[Row], model: str, part: str, sigma: float) -> dict[int, float]:
    """Of each seed: what the noise does to the reward."""
    return {
        row["seed"]: float(np.mean(row["rewards"])) - row["reward"]
        for row in rows
        if row["what"] == "noise" and (row["model"], row["part"], row["sigma"]) == (model, part, sigma)
    }


def spans(rows: Sequence[Row]) -> Mapping[int, float]:
    """What ES gained, by seed."""
    return {row["seed"]: abs(row["rewards"][-1] - row["rewards"][0]) for row in lines_of(rows, BASE, "es")}


def table(rows: Sequence[Row]) -> None:
    """A line for each claim of the plan that these rows say something of, with its placebo where it is about ES."""
    span, seeds = spans(rows), sorted(spans(rows))
    print("| claim | number | over | found |\n|---|---|---|---|")

    def line(claim: str, number: str, found: Estimate, verdict: str) -> None:
        print(f"| {claim} | {number} | {found.n} | {told(found)}: {verdict} |")

    def by_span(a: str, b: str, of: str) -> Estimate:
        return over(
            lines_of(rows, a, b), lambda row: (row[of] if row[of] is not None else row["height"]) / span[row["seed"]]
        )

    for claim, kind, above in (("1", "es", False), ("1, placebo", "placebo", False), ("2", "grpo", True)):
        moved = [row for row in lines_of(rows, BASE, kind) if row["rewards"][0] != row["rewards"][-1]]
        found = over(moved, largest_step)
        line(claim, f"largest step from base to {kind}", found, said(found, 0.25, above=above))
    for of, words in (("low", "a barrier"), ("high", "none")):
        found = by_span("es", "grpo", of)
        line(f"3, {words}", f"ES to GRPO, {of}er end of the barrier / s", found, said(found, 0.05, above=of == "low"))
    for kind in KINDS:
        found = by_span(kind, f"next {kind}", "high")
        line("4", f"{kind} to {kind}, upper end of the barrier / s", found, said(found, 0.05, above=False))
    cosine = {(row["a"], row["b"], row["part"], row["seed"]): row["cosine"] for row in rows if row["what"] == "cosine"}
    for a, b in (("es", "grpo"), *((kind, kind) for kind in KINDS)):
        found = statistics.mean([cosine[a, b, "all", s] for s in seeds])
        line("5", f"cosine of the changes, {a} and {b}", found, said(found, 0.05, above=False))
    apart = [cosine["grpo", "grpo", "unembedding", s] - cosine["es", "es", "unembedding", s] for s in seeds]
    found = statistics.mean(apart)
    line("6", "cosine of the unembedding's changes, GRPO less ES", found, said(found, 0.0, above=True))
    for part in PARTS:
        pairs = [change(rows, kind, part, 0.005) for kind in ("grpo", "es")]
        found = statistics.mean([(pairs[0][s] - pairs[1][s]) / span[s] for s in seeds])
        line("7", f"noise of 0.005, {part}: GRPO less ES, / s", found, said(found, 0.0, above=True))
    for kind in ("es", "placebo"):
        noisy = {
            model: {
                row["seed"]: float(np.mean(row["rewards"]))
                for row in rows
                if row["what"] == "noise" and (row["model"], row["part"], row["sigma"]) == (model, "all", 0.05)
            }
            for model in (BASE, kind)
        }
        found = statistics.mean([noisy[kind][s] - noisy[BASE][s] for s in seeds])
        name = "8" if kind == "es" else "8, placebo"
        line(name, f"reward under noise of 0.05, {kind} less base", found, said(found, 0.0, above=True))
    hacked = {(row["model"], row["seed"]): row["hacked"] for row in rows if row["what"] == "noise"}
    changed = {(kind, s): value for kind in ("es", "grpo") for s, value in change(rows, kind, "all", 0.01).items()}
    shares = [hacked[key] for key in changed]
    if len(set(shares)) > 1:
        rank = float(np.corrcoef(stats.rankdata(shares), stats.rankdata(list(changed.values())))[0, 1])
        half = 1.96 / max(len(shares) - 3, 1) ** 0.5
        low, high = np.tanh(np.arctanh(rank) - half), np.tanh(np.arctanh(rank) + half)
        found = Estimate(rank, len(shares), float(low), float(high))
        line("9", "rank correlation of hacked share and change at 0.01", found, said(found, 0.0, above=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    rows = [json.loads(text) for text in ROWS.read_text().splitlines()] if ROWS.exists() else list[Row]()
    if given.runs is not None:
        there = {row["seed"] for row in rows if row["what"] != "cosine"}
        for seed in (s for s in SEEDS if s not in there):
            done = list(unit(given.runs, seed))
            rows += done
            with ROWS.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in done)
        if not any(row["what"] == "cosine" for row in rows):
            rows += (done := cosines(given.runs))
            with ROWS.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in done)
    if given.table:
        table(rows)


if __name__ == "__main__":
    main()
