# SPDX-License-Identifier: Apache-2.0
"""Rows of the landscape: what analyses say of the runs of landscape.py, a unit a seed; see landscape_plan.md.

    python studies/landscape_rows.py conciseness countdown --runs DIR --jobs 16      continues an earlier call
    python studies/landscape_rows.py smollm2 --runs DIR --jobs 4                     on a GPU
    python studies/landscape_rows.py conciseness --runs DIR --parts texts,paths --seeds 0,1
    python studies/landscape_rows.py --runs DIR                                      gathers what is there

Placebos, the ES runs with shuffled coefficients, are made in DIR where they are not there. A part of a seed is a file
in DIR/rows, written when it is whole; all of them together are studies/results/landscape.jsonl, of which
landscape_page.py makes tables and figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import benchmark_path  # noqa: F401
from evoalign.analysis import find
from evoalign.analysis.base import BASE
from evoalign.analysis.connectivity import barrier
from evoalign.analysis.mixer import EvalSettings, ModelMixer, Perturbation
from evoalign.config import Config, load
from evoalign.training.replay import replay
from landscape import COMMON, SEEDS, STUDIES, run_of
from study_runs import integers, names, rounded

ROWS = Path(__file__).resolve().parent / "results" / "landscape.jsonl"
EXAMPLES = {"conciseness": 60, "countdown": 500, "smollm2": 60}
"""Number of test examples for lines and noise. Countdown problems are right or wrong, so they need more."""
ALPHAS_A = np.arange(21) / 20
SIGMAS, TRIALS = (0.005, 0.01, 0.05), 4
KINDS = ("es", "grpo", "placebo")
PROBLEMS, TRIES = 16, {"base": 512, "trained": 128}
"""Problems of a seed's part of the test split: 8 seeds, 128 problems of the base model with 512 tries, as published."""
KEPT = ("hacked", "degenerate", "earned_wrong", "empty", "truncated", "repeated", "gibberish")
Row = dict[str, Any]


def config_of(folder: Path) -> Config:
    """Config of the ES runs of a study, for targets that are no runs."""
    return load([folder / "es.yaml"])


def placebo_of(folder: Path, seed: int, method: str = "es") -> Path:
    """A run of ES with shuffled coefficients, which is made once."""
    found = folder / ("placebo" if method == "es" else f"placebo_{method}") / f"seed_{seed}"
    if not found.is_dir():
        replay(run_of(folder, method, seed), counterfactual="shuffle", seed=0, to=found)
    return found


def targets(folder: Path, seed: int) -> dict[str, str]:
    """A run of each method, and the placebo."""
    runs = {kind: str(run_of(folder, kind, seed)) for kind in ("es", "grpo")}
    return {**runs, "placebo": str(placebo_of(folder, seed))}


def numbers(analysis: str, names: list[str], config: Config | None, **settings: Any) -> dict[str, Any]:
    """Return the JSON of an analysis."""
    found = find(analysis)
    return found.run(names, found.settings(**settings), config).numbers


def lab_of(study: str, folder: Path, seed: int) -> tuple[ModelMixer, dict[str, str]]:
    """All models of a seed, and those of the next one, by name."""
    own, following = targets(folder, seed), targets(folder, (seed + 1) % len(SEEDS[study]))
    names = {BASE: BASE, **own, **{f"next {kind}": name for kind, name in following.items()}}
    return ModelMixer(list(names.values()), config_of(folder), EvalSettings(examples=EXAMPLES[study])), names


def _line(mixer: ModelMixer, names: dict[str, str], a: str, b: str) -> Row:
    mixes = [{names[a]: 1 - float(alpha), names[b]: float(alpha)} for alpha in ALPHAS_A]
    rewards_AE = np.stack([mixer.rewards(mixer.evaluate(mix)) for mix in mixes])
    found = asdict(barrier(ALPHAS_A, rewards_AE[None]))
    return {"what": "line", "a": a, "b": b, "rewards": rewards_AE.mean(1).tolist(), **found}


def from_base(study: str, folder: Path, seed: int) -> Iterator[Row]:
    """Lines from the base model."""
    mixer, names = lab_of(study, folder, seed)
    with mixer:
        yield from (_line(mixer, names, BASE, kind) for kind in KINDS)


def between(study: str, folder: Path, seed: int) -> Iterator[Row]:
    """Lines between ES and GRPO, and to the next seed of a method; of two seeds that line is one."""
    mixer, names = lab_of(study, folder, seed)
    pairs = [("es", "grpo")]
    if len(SEEDS[study]) > 2 or seed == 0:
        pairs += [(kind, f"next {kind}") for kind in KINDS]
    with mixer:
        yield from (_line(mixer, names, a, b) for a, b in pairs)


def noise(study: str, folder: Path, seed: int) -> Iterator[Row]:
    """Reward under noise on the weights, each model under the same draws."""
    mixer, names = lab_of(study, folder, seed)
    with mixer:
        for model in (BASE, *KINDS):
            yield from _noisy(mixer, names[model], model, ["all"] if mixer.tied else ["all", "unembedding"], SIGMAS)


def hacked(study: str, folder: Path, seed: int) -> Iterator[Row]:
    """Reward under noise on all weights of further runs of ES, which hack: Conciseness alone has them all."""
    if study != "conciseness":
        return
    names = {method: str(run_of(folder, method, seed)) for method in ("es", "es_eta4", "es_wide")}
    with ModelMixer([BASE, *names.values()], config_of(folder), EvalSettings(examples=EXAMPLES[study])) as mixer:
        for method in ("es_eta4", "es_wide"):
            yield from _noisy(mixer, names[method], method, ["all"], SIGMAS)


def _noisy(mixer: ModelMixer, name: str, model: str, parts: list[str], sigmas: Sequence[float]) -> Iterator[Row]:
    still = mixer.evaluate({name: 1.0})
    share = float(mixer.hacked(still).mean())
    for part, sigma in product(parts, sigmas):
        draws = [Perturbation(sigma, trial, part) for trial in range(TRIALS)]
        noisy = [float(mixer.rewards(mixer.evaluate({name: 1.0}, draw)).mean()) for draw in draws]
        yield {
            "what": "noise", "model": model, "part": part, "sigma": sigma, "rewards": noisy,
            "reward": float(mixer.rewards(still).mean()), "hacked": share,
        }  # fmt: skip


def texts(study: str, folder: Path, seed: int) -> Iterator[Row]:
    """Yield test reward and signs of hacking of every finished run and of the placebos of ES."""
    asked = {method: run_of(folder, method, seed) for method in STUDIES[study]}
    ended = Path("results", "completions", "after.parquet")
    runs = {method: run for method, run in asked.items() if (run / ended).is_file()}
    found = numbers("hacking", [str(run) for run in runs.values()], None)["targets"]
    for (method, run), target in zip(runs.items(), found, strict=True):
        result = json.loads((run / "results" / "evaluation.json").read_text(encoding="utf-8"))
        rewards = {end: result[end]["reward"] for end in ("before", "after")}
        yield {"what": "end", "model": method, "rewards": rewards, **_kept(target)}
    placebos = {method: str(placebo_of(folder, seed, method)) for method in runs if method != "grpo"}
    config = config_of(folder)
    found = numbers("hacking", list(placebos.values()), config)["targets"]
    with ModelMixer([BASE, *placebos.values()], config, EvalSettings()) as mixer:
        earned = {name: float(mixer.rewards(mixer.evaluate({name: 1.0})).mean()) for name in mixer.names}
    for (method, name), target in zip(placebos.items(), found, strict=True):
        rewards = {"before": earned[BASE], "after": earned[name]}
        yield {"what": "end", "model": f"placebo of {method}", "rewards": rewards, **_kept(target)}


def _kept(target: Row) -> Row:
    """Return the row of a target of the analysis of hacking."""
    rates = {kind: target["rates"][kind]["after"]["mean"] for kind in KEPT}
    return {"rates": rates, "verdict": target["verdict"]}


def paths(study: str, folder: Path, seed: int) -> Iterator[Row]:
    """Distances in weights and in nats, the reward in training, and changes on the other task and held-out text."""
    own = targets(folder, seed)
    if study != "smollm2":
        (path,) = numbers("trajectory", [own["es"]], None)["paths"]
        distances = [path["distance"], *(placebo["distance"] for placebo in path["placebos"][:3])]
        yield {
            "what": "path", "model": "es", "signal_share": path["signal_share"],
            "steps": path["steps"], "distances": distances, "expected": path["expected_distance"],
        }  # fmt: skip
    for method in ("es", "grpo"):
        text = (run_of(folder, method, seed) / "metrics.jsonl").read_text(encoding="utf-8")
        yield {"what": "course", "model": method, "rewards": [json.loads(line)["mean"] for line in text.splitlines()]}
    found = numbers("divergence", list(own.values()), config_of(folder))["targets"]
    for kind, target in zip(own, found, strict=True):
        kept = {name: target[name] for name in ("exact", "low", "high", "completion", "tokens")}
        yield {"what": "divergence", "model": kind, **kept}
    others = [folder.parent / other / "es.yaml" for other in ("conciseness", "countdown")]
    asked = tuple(file for file in others if file.is_file() and file.parent != folder)
    found = numbers("forgetting", [own["es"], own["grpo"]], None, tasks=asked, placebos=3)["courses"]
    for course in found:
        method = next(kind for kind, name in own.items() if name == course["target"])
        kept = {name: course[name] for name in ("probe", "base", "drift", "beyond_drift")}
        yield {"what": "forgetting", "model": method, "end": course["points"][-1], **kept}


def coverage(study: str, folder: Path, seed: int) -> Iterator[Row]:
    """pass@k by temperature and by weight noise, on a separate part of the test split.

    Countdown only: the base model solves every question of Conciseness, if at length.
    """
    if study != "countdown":
        return
    config = config_of(folder)
    shard = folder / "shards" / f"{seed}.json"
    if not shard.is_file():
        from evoalign.setup import task_and_data

        task, data = task_and_data(config, None, None)
        task.close()
        shard.parent.mkdir(exist_ok=True)
        shard.write_text(json.dumps([dict(row) for row in data.test[seed * PROBLEMS : (seed + 1) * PROBLEMS]]))
    task = config.task.model_copy(update={"test_data": str(shard), "test_size": None})
    own = targets(folder, seed)
    asked = config.model_copy(update={"task": task})
    for whom, samples in (([BASE], TRIES["base"]), ([own["es"], own["grpo"]], TRIES["trained"])):
        found = numbers("coverage", whom, asked, samples=samples, examples=PROBLEMS)
        contests = {one.pop("target"): one for one in found["temperature_less_noise"] if one["k"] == samples}
        for target in found["targets"]:
            name = target["target"]
            model = next((kind for kind, run in own.items() if run == name), BASE)
            ways = [
                {k: w[k] for k in ("temperature", "sigma", "solved") if k in w} | _passed(w["pass"])
                for w in target["ways"]
            ]
            yield {"what": "coverage", "model": model, "tries": samples, "ways": ways, "contest": contests[name]}


def _passed(found: list[Row]) -> dict[str, float]:
    """The first and the last pass@k of a way."""
    return {f"pass@{row['k']}": row["mean"] for row in (found[0], found[-1])}


def cosines(study: str, folder: Path) -> Iterator[Row]:
    """Yield cosines of the changes of all weights and of the unembedding: neighbouring seeds, and ES with GRPO."""
    seeds = SEEDS[study]
    names = {(kind, seed): targets(folder, seed)[kind] for seed in seeds for kind in KINDS}
    found = numbers("similarity", list(names.values()), config_of(folder), spectrum=False)
    of = {frozenset((pair["a"], pair["b"])): pair["cosines"] for pair in found["pairs"]}
    for a, b, step in [*((kind, kind, 1) for kind in KINDS), ("es", "grpo", 0)]:
        for s in seeds:
            value = of[frozenset((names[a, s], names[b, (s + step) % len(seeds)]))]
            for part in ("all", "unembedding"):
                if value.get(part) is not None:
                    yield {"what": "cosine", "seed": s, "a": a, "b": b, "part": part, "cosine": value[part]["value"]}


def efficiency(study: str, folder: Path) -> Iterator[Row]:
    """The threshold, and the ratio of the variances between seeds."""
    runs = [str(run_of(folder, method, seed)) for method in ("es", "grpo") for seed in SEEDS[study]]
    found = numbers("efficiency", runs, None)
    for pair in found["pairs"]:
        yield {"what": "efficiency", "threshold": found["threshold"], **pair}


Part = Callable[[str, Path, int], Iterator[Row]]
OF_A_SEED: dict[str, Part] = {
    "from_base": from_base, "between": between, "noise": noise, "texts": texts, "paths": paths, "coverage": coverage,
    "hacked": hacked,
}  # fmt: skip
OF_ALL: dict[str, Callable[[str, Path], Iterator[Row]]] = {"cosines": cosines, "efficiency": efficiency}


def work(study: str, folder: Path, part: str, seed: int | None) -> str:
    """Write the rows of a part, whole or not at all; says how long it took."""
    torch.set_num_threads(2 if torch.cuda.is_available() else 1)
    began = time.perf_counter()
    file = folder / "rows" / (part if seed is None else f"{part}_{seed}")
    file.parent.mkdir(parents=True, exist_ok=True)
    found = OF_ALL[part](study, folder) if seed is None else OF_A_SEED[part](study, folder, seed)
    of_seed = {} if seed is None else {"seed": seed}
    rows = [{"on": study, "asked": part, **of_seed, **rounded(row)} for row in found]
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    unfinished.rename(file.with_suffix(".jsonl"))
    return f"{study} {file.name}: {len(rows)} rows, {time.perf_counter() - began:.0f} s"


def gather(runs: Path) -> None:
    """Put the rows that are there in place of those of the same parts; those of other parts stay."""
    files = sorted(runs.glob("*/rows/*.jsonl"))
    found = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    known = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    renewed = {_part_of(row) for row in found}
    rows = [row for row in known if _part_of(row) not in renewed] + found
    rows.sort(key=lambda row: [str(value) for value in _part_of(row)])
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{ROWS.name}: {len(found)} rows of {len(files)} parts, {len(rows)} in all")


def _part_of(row: Row) -> tuple[str, str, int | None]:
    """Cosines of a seed are a part of all seeds."""
    return row["on"], row["asked"], None if row["asked"] in OF_ALL else row["seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=", ".join(COMMON))
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--parts", type=names, default=[*OF_A_SEED, *OF_ALL])
    parser.add_argument("--seeds", type=integers)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    if unknown := set(given.studies) - set(COMMON):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(COMMON)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    todo: list[tuple[str, Path, str, int | None]] = []
    for part, study in product(given.parts, given.studies):
        folder = (given.runs / study).absolute()
        seeds = [None] if part in OF_ALL else given.seeds or list(SEEDS[study])
        done = {file.stem for file in folder.glob("rows/*.jsonl")}
        todo += [(study, folder, part, s) for s in seeds if (part if s is None else f"{part}_{s}") not in done]
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for future in [pool.submit(placebo_of, given.runs / s, seed) for s in given.studies for seed in SEEDS[s]]:
            future.result()  # before all workers that need them
        failed = 0
        futures = [pool.submit(work, *one) for one in todo]
        for future in as_completed(futures):
            try:
                print(future.result(), flush=True)
            except Exception as error:  # one part's failure is not another's
                failed += 1
                print(f"failed: {type(error).__name__}: {error}", flush=True)
    gather(given.runs)
    if failed:
        raise SystemExit(f"{failed} parts failed; the same command continues with them")


if __name__ == "__main__":
    main()
