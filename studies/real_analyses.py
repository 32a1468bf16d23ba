# SPDX-License-Identifier: Apache-2.0
"""Tables of `coverage`, `alignment` and `hack` of real.py, and of kinds of word problems; used by real_tables.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from evoalign.analysis.coverage.command import BEYOND
from evoalign.tasks.word_problems import WordProblems
from real_rows import NAMES, Row, Study, by_seed, number, points, share, stacked

SHOWN_K = (1, 4, 16, 64, 512)
KLS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""KL from the base, nats per token, at which the runs of `hack` are compared."""
KINDS = {"tank": " empty tank ", "trip": " km to ", "printers": " printers ", "shop": " mugs "}
"""Templates of word problems that training does not have, by words that only they have."""


def coverage(study: Study, task: str) -> Iterator[Sequence[object]]:
    """Yield pass@k by temperature and by weight noise of each model, and the support that it lost and gained."""
    for job in sorted(job for job in study.rows if job.startswith(f"coverage/{task}/")):
        found = study.rows[job]["coverage"]
        for i in range(len(found["targets"][0]["ways"])):
            for target in found["targets"]:
                way, name = target["ways"][i], target["target"]
                kind = "temperature" if "temperature" in way else "sigma"
                passes = {one["k"]: f"{share(one['mean'])}{_ends(one)}" for one in way["pass"]}
                changes = [c for c in found["against_base"] if (c["target"], c.get(kind)) == (name, way[kind])]
                support = [points(c[part]["mean"]) for c in changes for part in BEYOND] or ["-", "-"]
                yield f"{kind} {way[kind]:g}", model_of(name), *(passes.get(k, "-") for k in SHOWN_K), *support


def _ends(tree: Row) -> str:
    return "" if tree["low"] is None else f" ({share(tree['low'])} to {share(tree['high'])})"


def model_of(target: str) -> str:
    """Return the method of a target: base, or the folder of a run of `r`."""
    return next((NAMES[arm] for arm in ("es", "grpo") if Path(target).name.startswith(f"r_{arm}_")), target)


def alignment(study: Study, task: str) -> Iterator[Sequence[object]]:
    """Yield the cosine of the step of ES with the gradient by rank, sigma and members."""
    for target in study.rows.get(f"alignment/{task}", {}).get("alignment", {}).get("targets", []):
        for at in target["rows"]:
            expected, p = f"{1e6 * at['expected']:.0f}", f"{at['placebo']['p']:.2g}"
            cosines = _millionths(at["cosine"]), _millionths(at["corrected"])
            yield at["rank"], f"{at['sigma']:g}", at["members"], *cosines, expected, p


def _millionths(tree: Row | None) -> str:
    """Return a cosine in millionths with its interval; `-` for none, where the gradient is not reliable."""
    if tree is None:
        return "-"
    mean, low, high = (round(1e6 * tree[name]) for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def hack(study: Study) -> Iterator[Sequence[object]]:
    """Yield the runs with brevity as the reward: brevity and exact share before, after and at equal KL."""
    for run in study.find("hack"):
        ends = run.curve()[0], run.curve()[-1]
        brief, exact = [number(end["reward"]) for end in ends], [share(end["exact"]) for end in ends]
        at = (f"{share(run.at_kl(kl))}, {number(run.at_kl(kl, 'reward'))}" for kl in KLS)
        yield run.called, run.seed, len(run.row["generations"]), number(run.kl), *brief, *exact, *at


def hack_contrasts(study: Study) -> Iterator[Sequence[object]]:
    """Yield the mean exact share and brevity of ES and GRPO at each KL that runs of both reach."""
    runs = [study.find("hack", arm) for arm in ("es", "grpo")]
    for kl in KLS:
        exact, brief = (
            [by_seed(own, lambda run, kl=kl, of=of: run.at_kl(kl, of)) for own in runs] for of in ("exact", "reward")
        )
        if all(exact):
            (a, b), means = ([float(np.mean(list(one.values()))) for one in found] for found in (exact, brief))
            at = f"{kl:g}", f"{len(exact[0])} and {len(exact[1])}", share(a), share(b), points(a - b)
            yield *at, *map(number, means)


def kinds(study: Study, task: str) -> Iterator[Sequence[object]]:
    """Yield the exact share of each arm of P by the kind of word problem; of runs, the mean over seeds."""
    arms = study.prompted(task)
    for name, arm in (("ES lora", "lora"), ("ES lowrank", "lowrank"), ("GRPO LoRA", "grpo")):
        if runs := study.find("p", arm, task):
            arms[name] = stacked(runs).mean(0)
    if task != "word_problems" or not arms:
        return
    rows = WordProblems.rows("test", max(map(len, arms.values())))
    places = {kind: [i for i, row in enumerate(rows) if words in row["question"]] for kind, words in KINDS.items()}
    places = {"of training": [i for i, row in enumerate(rows) if not row["unseen"]], **places}
    for name, right in arms.items():
        yield name, *(share(right[where].mean()) for where in places.values())
