# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/results/real.md, from the rows of real.py; used by result_pages.py. Plan: real_plan.md.

    python studies/real_tables.py                   # prints all tables between the comments that the page needs
    python studies/real_tables.py ROWS FIGURES      # of another folder of rows, and draws the figures in FIGURES

A job without rows has no line, and a table without lines is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import real_figures
from evoalign import statistics
from evoalign.analysis.compare.statistics import Pair, adjust, compare, shared
from evoalign.statistics import Estimate
from real_analyses import KINDS, KLS, SHOWN_K, alignment, coverage, hack, hack_contrasts, kinds
from real_rows import (
    CHOICE,
    NAMES,
    RIGHT,
    ROWS,
    Floats,
    Lines,
    Row,
    Run,
    Study,
    by_seed,
    first_warning,
    number,
    paired,
    points,
    share,
    stacked,
    table,
    unseen,
)  # fmt: skip

GATE = (0.15, 0.7)
"""Exact shares of the base between which a task is used."""
SHARES = (0.5, 0.75)
"""Parts of a run's seconds at which ES and GRPO are compared as well."""
SAMPLED = (1, 4)
"""k of pass@k in R, of 4 samples."""
Line = Sequence[object]
Booleans = NDArray[np.bool_]


def gate(study: Study) -> Iterator[Line]:
    """Yield the base model's exact share on validation rows of each task."""
    for task, found in study.rows.get("gate", {}).get("tasks", {}).items():
        exact = statistics.share(found["right"])
        passed = "yes" if GATE[0] <= exact.mean <= GATE[1] else "no"
        yield task, exact.n, share(exact.mean), f"{share(exact.low)} to {share(exact.high)}", passed


def probes(study: Study) -> Iterator[Line]:
    """Yield what each probe recommends."""
    for job, row in study.rows.items():
        if not job.startswith("probe/") or "probe" not in row:
            continue
        _, space, task, seed = job.split("/")
        found = row["probe"]
        at = next((one for one in found["rungs"] if one["width"] == row["width"]), None)
        gain = "-" if at is None or at["gain"] is None else f"{at['gain']:+.4f}"
        if found["gain_interval"]:
            gain += " ({:+.4f} to {:+.4f})".format(*found["gain_interval"])
        trial = "-" if not found["trial"] else f"{found['trial'][0]:.2g}"
        width = "none" if found["width"] is None else f"{found['width']:.2g}"
        yield f"`{space}`, {task}", seed, width, trial, f"{row['width']:.2g}", gain, f"{row['seconds']:.0f}"


def choices(study: Study) -> Iterator[Line]:
    """Yield the exact share on validation rows of each run that chooses a setting."""
    for run in study.choosing():
        if found := run.row.get("validation"):
            ends = (share(found[end][RIGHT]) for end in ("before", "after"))
            yield (
                f"{run.kind}: {run.called}, {run.task}",
                run.value or "-",
                run.seed,
                *ends,
                f"{run.cost['seconds']:.0f}",
            )


def arms(study: Study, task: str) -> Iterator[Line]:
    """Yield each arm of P: exact share, gain, placebos, the other task and cost."""
    prompted = study.prompted(task)
    base, rows = prompted.get("zero-shot"), study.arms(task)
    for name, right in prompted.items():
        gain = None if base is None or name == "zero-shot" else statistics.paired(base, right, shares=True)
        yield (
            f"base, {name}" if name != "best perturbation" else name,
            "-",
            *_exact(right, task),
            "-",
            _cut_off(rows[name]),
            points(gain),
            *9 * "-",
        )
    for run in study.find("p", task=task):
        yield (
            _called(run),
            run.seed,
            *_exact(run.after, task),
            share(run.row.get("validation", {}).get("after", {}).get(RIGHT)),
            _cut_off(run.row["after"]),
            points(run.gain),
            *_placebos(run),
            *_other(run),
            *_cost(run),
            _memory(run),
        )


def _called(run: Run) -> str:
    return f"{run.called}, rate {run.value}" if run.arm in ("grpo", "random") and run.value else run.called


def _exact(right: Floats, task: str) -> tuple[str, str]:
    """Return the exact share, and that of rows of unseen kinds."""
    kept = unseen(task, len(right))
    return share(right.mean()), share(right[kept].mean()) if kept.any() else "-"


def _cut_off(row: Row) -> str:
    """Return the share of completions that end at the limit of tokens."""
    return share(row.get("measures", {}).get("truncated_share"))


def _placebos(run: Run) -> tuple[str, str, str]:
    """Return the placebos' mean and best gain, how many reach the run, and the run less their mean."""
    found = run.split
    if found is None:
        return "-", "-", "-"
    best = float(run.placebos.mean(1).max() - run.before.mean())
    gains = f"{points(found.drift.mean)}, {points(best)}"
    return gains, f"{found.reached} of {len(found.placebos)}", points(found.beside)


def _other(run: Run) -> tuple[str, str]:
    """Return the exact share of the other task of the base, and of the run."""
    return share(run.other("base")), share(run.other("run"))


def _cost(run: Run) -> tuple[str, str, str]:
    cost = run.cost
    return (
        f"{cost['seconds']:.0f}",
        f"{cost['completions']:,.0f}",
        f"{cost['tokens'] / max(1, cost['completions']):.0f}",
    )


def _memory(run: Run) -> str:
    """Return the peak of allocated memory in GiB."""
    peak = run.row.get("cost", {}).get("peak_memory_bytes")
    return f"{peak / 2**30:.0f}" if peak else "-"


def contrasts(study: Study, task: str) -> Iterator[Line]:
    """Yield the contrasts of P, each trained arm with each other arm; Holm is over the two endpoints."""
    prompted = study.prompted(task)
    trained = {arm: found for arm in ("lora", "lowrank", "grpo") if (found := study.find("p", arm, task))}
    tested: dict[str, Pair] = {}
    for space in trained.keys() & {"lora", "lowrank"} if "3-shot" in prompted else ():
        gaps, n = stacked(trained[space]) - prompted["3-shot"], len(trained[space])
        tested[space] = Pair(space, "3-shot", n, n, True, float(gaps.mean()), p=statistics.crossed_p(gaps))
    adjusted = dict(zip(tested, adjust(list(tested.values())), strict=True))
    for arm, runs in trained.items():
        called, kept = "GRPO LoRA" if arm == "grpo" else NAMES[arm], unseen(task, len(runs[0].after))
        others: dict[str, Floats | list[Run]] = {**prompted}
        if arm != "grpo" and "grpo" in trained:
            others["GRPO LoRA"] = trained["grpo"]
        for name, other in others.items():
            pair = adjusted.get(arm) if name == "3-shot" else None
            yield f"{called} less {name}", len(runs), points(_less(runs, other)), *_p(pair)
        for name in ("3-shot", "self-consistency", "zero-shot, 640 tokens", "best perturbation", "GRPO LoRA"):
            for kind, rows in (("kinds of training", ~kept), ("unseen kinds", kept)):
                if name in others and kept.any():
                    gap = _less(runs, others[name], rows)
                    yield f"{called} less {name}, {kind}", len(runs), points(gap), "-", "-"
        if with_placebos := [run for run in runs if len(run.placebos)]:
            of = f"mean placebo's gain over the gain of {called}"
            yield of, len(with_placebos), drift_share(with_placebos), "-", "-"


def _less(runs: Sequence[Run], other: Floats | Sequence[Run], rows: slice | Booleans = slice(None)) -> Estimate:
    """Return the exact share of runs less that of other runs, or of an arm without seeds, on some rows."""
    if isinstance(other, np.ndarray):
        return statistics.crossed((stacked(runs) - other)[:, rows])
    a, b, is_paired = paired(runs, other)
    return statistics.crossed_difference(a[:, rows], b[:, rows], paired=is_paired)


def _p(pair: Pair | None) -> tuple[str, str]:
    found = (None, None) if pair is None else (pair.p, pair.p_adjusted)
    return ("-" if found[0] is None else f"{found[0]:.2g}"), ("-" if found[1] is None else f"{found[1]:.2g}")


def drift_share(runs: Sequence[Run]) -> str:
    """Return the mean gain of the placebos over the runs' gain, over seeds and items."""
    start = np.stack([run.before for run in runs])
    drift = np.stack([run.placebos.mean(0) for run in runs]) - start
    gain = stacked(runs) - start
    if gain.mean() <= 0:
        return "no gain"
    found = statistics.ratio(drift, gain)
    return f"{found.mean:.2f}" + ("" if found.low is None else f" ({found.low:.2f} to {found.high:.2f})")


def against_grpo(study: Study, task: str) -> Iterator[Line]:
    """Yield each run of R at equal seconds."""
    runs = study.find("r", task=task)
    for called in dict.fromkeys(run.called for run in runs if run.arm != "random"):
        own = [run for run in runs if run.called == called]
        bases = ([v for run in own if (v := run.pass_at(k, of_base=True)) is not None] for k in SAMPLED)
        sampled = (share(np.mean(found)) if found else "-" for found in bases)
        yield f"base of {called}", "-", share(own[0].before.mean()), "-", "-", *sampled, *8 * "-"
    for run in runs:
        kl = number(run.kl)
        value = f"{_called(run)}" if run.arm != "es" else f"{run.called}, eta {run.value}"
        exact = share(run.after.mean()), points(run.gain), points(run.gain_of_whole)
        sampled = (share(run.pass_at(k)) for k in SAMPLED)
        yield value, run.seed, *exact, *sampled, kl, *_placebos(run), *_other(run), *_cost(run)[:2]


def es_less_grpo(study: Study, task: str) -> Iterator[Line]:
    """Yield ES less GRPO: the endpoint, by kind too, pass@k, and shares at parts of the seconds and equal completions.

    The shares at parts are between evaluations, see `Run.within`.
    """
    es, grpo = study.find("r", "es", task), study.find("r", "grpo", task)
    if not es or not grpo:
        return
    new = unseen(task, len(es[0].after))
    for called, items in ((" at equal seconds", new | True), (", kinds of training", ~new), (", unseen kinds", new)):
        if new.any() or "equal" in called:
            found = _both(es, grpo, lambda run, items=items: run.after[items].mean())
            yield _gap(f"exact share{called}", *found, _less(es, grpo, items))
    for k in SAMPLED:
        both = _both(es, grpo, lambda run, k=k: run.pass_at(k))
        if all(both):
            yield _gap(f"pass@{k} at temperature 0.6", *both)
    for part in SHARES:
        found = _both(es, grpo, lambda run, part=part: run.within("seconds", part * run.cost["seconds"]))
        yield _gap(f"exact share at {part:g} of the seconds", *found)
    most = min(run.cost["completions"] for run in (*es, *grpo))
    found = _both(es, grpo, lambda run: run.within("completions", most))
    yield _gap(f"exact share within {most:,.0f} completions", *found)


def _both(
    es: Sequence[Run], grpo: Sequence[Run], of: Callable[[Run], float | None]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return a number of the runs of both methods by seed."""
    return by_seed(es, of), by_seed(grpo, of)


def _gap(called: str, es: Mapping[int, float], grpo: Mapping[int, float], crossed: Estimate | None = None) -> Line:
    """Return a line: both means, the difference over seeds with its test, and over seeds and items."""
    found, both = compare("ES", es, "GRPO", grpo), shared(es, grpo)
    sides = [np.array(list(side.values())) for side in (es, grpo)]
    gap = statistics.mean([es[s] - grpo[s] for s in both]) if both else statistics.difference(*sides)
    p = "-" if found.p is None else f"{found.p:.2g} ({found.test})"
    return called, *(share(float(side.mean())) for side in sides), points(gap), p, points(crossed)


def step_size(study: Study) -> Iterator[Line]:
    """Yield gain, placebos and the loss on the other task by eta, and by the number of members."""
    for run in [*study.find("step"), *study.find("population")]:
        es, made, reached = run.row["config"]["es"], len(run.row["generations"]), _placebos(run)[:2]
        own = f"{es['learning_rate'] / es['sigma']:g}", es["population_size"], run.seed, *_cost(run)[:2]
        yield *own, made, f"{run.walk:.2f}", points(run.gain), *reached, points(run.lost)


MIX = {("es", "1"): "ES, temperature 1", ("es", "0"): "ES, greedy members",
       ("grpo", "engine"): "GRPO, temperature 1", ("grpo", "es"): "GRPO, greedy members"}  # fmt: skip


def cells(study: Study, task: str) -> dict[tuple[str, str], dict[int, float]]:
    """Return the exact share of each cell of the 2 x 2 by seed."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for run in study.find("mix", task=task):
        value = f"{float(run.value):g}" if run.arm == "es" else run.value
        found.setdefault((run.arm, value), {})[run.seed] = float(run.after.mean())
    return found


def mix(study: Study, task: str) -> Iterator[Line]:
    """Yield the four cells of the 2 x 2 by seed, and their means."""
    found = cells(study, task)
    for cell, called in MIX.items():
        if own := found.get(cell):
            mean = share(float(np.mean(list(own.values()))))
            runs = ", ".join(f"{share(value)} (seed {seed})" for seed, value in own.items())
            yield called, mean, runs


def effects(study: Study, task: str) -> Iterator[Line]:
    """Yield the effects of update and completions and the interaction, over the seeds that have all four cells."""
    found = cells(study, task)
    seeds = set.intersection(*({*found.get(cell, {})} for cell in MIX))
    if not seeds:
        return
    sampled_es, greedy_es, sampled_grpo, greedy_grpo = (
        np.array([found[cell][seed] for seed in sorted(seeds)]) for cell in MIX
    )
    update = (sampled_es + greedy_es - sampled_grpo - greedy_grpo) / 2
    kind = (sampled_es + sampled_grpo - greedy_es - greedy_grpo) / 2
    both = (sampled_es - greedy_es) - (sampled_grpo - greedy_grpo)
    for called, values in (
        ("update: ES less GRPO", update), ("completions: temperature 1 less greedy members", kind),
        ("the same, with ES alone", sampled_es - greedy_es), ("the same, with GRPO alone", sampled_grpo - greedy_grpo),
        ("interaction: the effect of completions with ES less that with GRPO", both),
    ):  # fmt: skip
        yield called, len(seeds), points(statistics.mean(values))


def long(study: Study) -> Iterator[Line]:
    """Yield the runs of Countdown."""
    for run in study.find("long"):
        exact = share(run.before.mean()), share(run.after.mean()), points(run.gain)
        warned = first_warning(run.row)
        at = "none" if warned is None else f"{warned} of {len(run.row['generations'])}"
        yield run.value, run.seed, *exact, *_placebos(run), *_other(run), *_cost(run), at


def cost(study: Study) -> Iterator[Line]:
    """Yield the minutes of each experiment: training alone, and whole jobs with loading, evaluations and placebos.

    A job that was cut off after its training counts with that alone.
    """
    spent: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    of_runs = {id(run.row): run for run in study.runs}
    for job, row in study.rows.items():
        run, called = of_runs.get(id(row)), (job.split("/")[0], "all")
        if run is not None:
            called = f"{run.kind}, {run.called}", "choice of a setting" if run.seed >= CHOICE else "final runs"
        own = 0.0 if run is None else run.cost["seconds"]
        spent.setdefault((*called, row.get("device", "-")), []).append((own, row.get("job_seconds", own)))
    whole = [seconds for one in spent.values() for seconds in one]
    for where, seconds in [*spent.items(), (("all", "", ""), whole)] if whole else ():
        trained, jobs = np.sum(seconds, axis=0) / 60
        yield *where, len(seconds), f"{trained:.1f}" if trained else "-", f"{jobs:.1f}"


PLACEBOS = ("placebos: mean, best, points", "placebos that reach it", "less the mean placebo (95 %)")
COST = ("training, s", "completions", "tokens of each")
OTHER = ("other task, base", "other task, run")
HEADS: dict[str, Sequence[str]] = {
    "gate": ("task", "rows", "base, exact", "95 %", "between 15 and 70 %"),
    "probe": ("probe", "seed", "recommended sigma", "offered trial", "used", "predicted gain per generation", "s"),
    "choices": ("choice", "value", "seed", "validation, before", "after", "training, s"),
    "p": ("arm", "seed", "exact", "exact, unseen kinds", "validation", "cut off", "gain, points (95 %)",
          *PLACEBOS, *OTHER, *COST, "peak memory, GiB"),
    "kinds": ("arm", "kinds of training", *KINDS),
    "alignment": ("rank", "sigma", "members", "cosine x 10^6 (95 %)", "corrected for the gradient's noise (95 %)",
                  "linear reward", "p by shuffling"),
    "p_contrasts": ("contrast", "seeds", "points, or ratio (95 %)", "p", "p, Holm over two"),
    "r": ("run", "seed", "exact", "gain, points (95 %)", "of that, base not cut off",
          *(f"pass@{k} at 0.6" for k in SAMPLED), "KL, nats per token", *PLACEBOS, *OTHER, *COST[:2]),
    "r_contrasts": ("ES less GRPO", "ES", "GRPO", "points (95 % over seeds)", "p",
                    "points (95 % over seeds and items)"),
    "step": ("eta", "members", "seed", *COST[:2], "generations", "walk, sigma", "gain, points (95 %)", *PLACEBOS[:2],
             "loss on the other task, points"),
    "mix": ("update, completions", "exact, mean", "runs"),
    "mix_effects": ("effect", "seeds", "points (95 % over paired seeds)"),
    "long": ("weights", "seed", "exact, before", "after", "gain, points (95 %)", *PLACEBOS, *OTHER, *COST,
             "first warning of the axis report, generation"),
    "coverage": ("way", "model", *(f"pass@{k}" for k in SHOWN_K), "support lost beyond chance, points", "gained"),
    "hack": ("arm", "seed", "steps", "KL, nats per token", "brevity, before", "after", "exact, before", "after",
             *(f"exact, brevity at KL {kl:g}" for kl in KLS)),
    "hack_contrasts": ("KL, nats per token", "runs of ES and GRPO", "ES, exact", "GRPO, exact", "ES less GRPO, points",
                       "ES, brevity", "GRPO, brevity"),
    "cost": ("jobs", "part", "card", "number", "minutes of training", "of whole jobs"),
}  # fmt: skip
WHOLE = {
    "gate": gate, "probe": probes, "choices": choices, "step": step_size, "long": long, "hack": hack,
    "hack_contrasts": hack_contrasts, "cost": cost,
}  # fmt: skip
BY_TASK = {
    "p": (arms, ("p", "prompting", "perturb")), "kinds": (kinds, ("p",)), "alignment": (alignment, ("alignment",)),
    "p_contrasts": (contrasts, ("p",)), "r": (against_grpo, ("r",)),
    "r_contrasts": (es_less_grpo, ("r",)), "mix": (mix, ("mix",)), "mix_effects": (effects, ("mix",)),
    "coverage": (coverage, ("coverage",)),
}  # fmt: skip
"""Tables of a task, and the kinds of jobs that have their tasks."""


def tables(folder: Path = ROWS) -> dict[str, Lines]:
    """Return the tables of the page by name, those of a task as NAME_TASK; without those that have no lines."""
    study, found = Study.read(folder), dict[str, Lines]()
    for name, head in HEADS.items():
        if name in WHOLE:
            made = {name: list(WHOLE[name](study))}
        else:
            of, kinds = BY_TASK[name]
            made = {f"{name}_{task}": list(of(study, task)) for task in study.tasks(*kinds)}
        found |= {called: table(head, lines) for called, lines in made.items() if lines}
    return found


def draw(to: Path, folder: Path = ROWS) -> None:
    """Draw the figures of the page that have rows."""
    real_figures.draw(Study.read(folder), to)


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else ROWS
    for name, lines in tables(folder).items():
        print(f"<!-- table {name} -->\n\n" + "\n".join(lines) + f"\n\n<!-- end {name} -->\n")
    if sys.argv[2:]:
        draw(Path(sys.argv[2]), folder)


if __name__ == "__main__":
    main()
