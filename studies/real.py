# SPDX-License-Identifier: Apache-2.0
"""Runs of a real model for the study in real_plan.md: each job is one process's work and leaves one file of rows.

    python studies/real.py MODEL --to DIR --jobs gate probe/tool_calls/100 p/lora/tool_calls/0 ...

Jobs that have their rows already are skipped, so that a stopped command is repeated as it is; `--limit` begins no job
after this many seconds. Rows go to studies/results/real/JOB.json: config, versions, device, costs, generations, and the
completions' exactness, tokens and first texts for each evaluation. `--set` changes a setting of every job (a look on a
CPU: `--set task.test_size=8 --seconds 5`).

| job | arms |
|---|---|
| `gate` | the base on the validation split of each task |
| `probe/SPACE/TASK/SEED` | `evoalign probe` |
| `prompting/TASK` | zero-shot, 3-shot, self-consistency on the test split |
| `longer/TASK` | zero-shot and 3-shot with twice the tokens |
| `perturb/TASK` | the best single perturbation on the validation split, on the test split |
| `p/SPACE/TASK/SEED` | ES `lora` or `lowrank`, with placebos and another task |
| `r/es/ETA/TASK/SEED`, `step/ETA/TASK/SEED` | ES `lowrank` |
| `r/grpo/RATE/TASK/SEED`, `p/grpo/RATE/TASK/SEED` | GRPO of all weights, and of an adapter |
| `r/random/RATE/TASK/SEED` | GRPO with random rewards |
| `population/MEMBERS/TASK/SEED` | ES `lowrank` with the completions and the walk of `step/0.5/TASK/SEED` |
| `long/MAX_TOKENS/WEIGHTS/SEED` | Countdown, ES `lowrank`, 128 x 16, 480 s; weights: format,accuracy |
| `time/p/TASK`, `time/r/TASK` | four steps of GRPO, for the steps that choosing runs have time for |
| `mix/es/TEMPERATURE/TASK/SEED` | ES `lowrank` with decayed steps; members sample at this temperature (0: greedy) |
| `mix/grpo/ROLLOUTS/TASK/SEED` | GRPO with decayed rates; completions by `engine` (temperature 1) or members (`es`) |
| `hack/es/SEED`, `hack/grpo/RATE/SEED` | ES `lowrank`, and GRPO of all weights, with the reward of real_proxy.py |
| `coverage/TASK/WAY` | `evoalign analyze coverage` of seed 3 of `r`; way: a temperature, or `noise` |
| `alignment/TASK` | `evoalign analyze alignment` of the base |

A seed of 100 or more is of a choice, made on the validation split; such a run has no placebos. `best` in the place of a
rate or eta is the one that was best there. `--wait` is for several commands at once, a GPU each: rows that another
command is to write are waited for. This runs them from a list, four at a time:

    xargs --process-slot-var=CUDA_VISIBLE_DEVICES -n 1 -P 4 python studies/real.py MODEL --to DIR --wait 900 \\
        --jobs <LIST
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import evoalign
from evoalign.analysis.alignment import Alignment
from evoalign.analysis.alignment import Settings as Members
from evoalign.analysis.base import BASE
from evoalign.analysis.coverage.command import Coverage
from evoalign.analysis.coverage.command import Settings as Ways
from evoalign.analysis.mixer import ModelMixer
from evoalign.config import Config
from evoalign.cost.budget import totals
from evoalign.errors import NotFiniteError
from evoalign.evaluation import RIGHT
from evoalign.placebos.counterfactual import parse
from evoalign.placebos.run import open_run
from evoalign.setup import assemble
from real_base import (
    ADAPTER,
    CHOICE,
    PROXIED,
    PROXY,
    ROWS,
    Study,
    device,
    gate,
    longer,
    perturbing,
    probing,
    prompting,
    seen,
)  # fmt: skip

OTHER = {"tool_calls": "word_problems"}
"""The task on which forgetting is measured; for others `tool_calls`."""
SECONDS = {"p": 300, "r": 150, "step": 90, "mix": 90, "long": 480, "hack": 90}
CHOOSING = {"p": 60, "r": 90, "mix": 20}
COVERED = "3"
"""The seed whose weights `coverage` reads."""
PARTS = {
    "diagnosis": ("reliability", "control", "noise_floor", "distance_sigmas", "truncated_share", "axes"),
    "budget": ("completions", "generated_tokens", "wall_seconds"),
}
"""What is kept of parts of a generation's row."""
SEEN_EVERY = {("r", "es"): (5, 20), ("r", "grpo"): (10, 10), ("hack", "es"): (6, 6), ("hack", "grpo"): (2, 2)}
"""Generations between evaluations, and between measurements of the KL. GRPO has the completions of few generations of
ES in all."""
PLACEBOS = {"p": 5, "r": 5, "step": 3, "population": 3, "long": 5}
"""Placebos of a run of ES; a kind that is missing has none, and no other task."""
HACKED = {"test_size": 200, "validation_size": 8}
"""Rows of `hack`, which evaluates often."""


def es(study: Study, job: str, task: str, seed: int, /, **sections: Any) -> None:
    """Train by ES for the job's seconds, and evaluate the run, its placebos and the other task."""
    kind = job.partition("/")[0]
    choice = seed >= CHOICE
    seconds = study.seconds or (CHOOSING if choice else SECONDS).get(kind, 0)
    if kind in ("p", "long") or (kind == "r" and choice):
        sections["stopping"] = {"max_hours": seconds / 3600}
    elif kind in ("r", "step", "hack"):  # that limit counts evaluations too
        sections["es"]["num_generations"] = steps_of(study, job, seconds)
    config = study.config(task, job.replace("/", "_"), seed=seed, **watched(job, "es", sections))
    off = study.config(OTHER.get(task, "tool_calls"), task={"test_size": 200})
    rows = trained_twice(evoalign.train, config, study)
    study.keep(job, rows, whole=False)
    if kind in PLACEBOS and not choice and "failed" not in rows:
        with open_run(rows["run"], config=config, off_task=off) as run:
            names = {"base": None, "run": None}
            names |= {f"placebo {k}": parse("shuffle", run.log, k) for k in range(PLACEBOS[kind])}
            rows["reached"] = {}
            for name, other in names.items():
                found = run.start() if name == "base" else run.reach(other)
                rows["reached"][name] = {
                    "distance": found.distance,
                    "test": seen(found.evaluation, 4),
                    "other": None if found.off_task is None else seen(found.off_task, 0),
                }
                print(name, found.evaluation.measures[RIGHT], flush=True)
    study.keep(job, rows if "failed" in rows else rows | ended(study, job, config))


def watched(job: str, method: str, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, which is also evaluated during training if it is a final one of `r` or `hack`."""
    kind = job.partition("/")[0]
    if kind not in ("r", "hack") or int(job.rpartition("/")[2]) >= CHOICE:
        return dict(sections)
    every, kl_every = SEEN_EVERY[kind, method]
    return {**sections, "evaluation": {"every": every}, "checks": {"kl_every": kl_every}}


def ended(study: Study, job: str, config: Config) -> dict[str, Any]:
    """Return the pass@1 at temperature .6 of a final run of `r`, and remove weights that nothing else reads."""
    folder, found = Path(config.output_dir), dict[str, Any]()
    kind, *_, seed = job.split("/")
    if kind == "r" and int(seed) < CHOICE:
        ways = Ways(temperature=(0.6,), sigma=(), samples=4, k=(1, 2, 4), examples=config.task.test_size or 500)
        own = study.config(config.task.name, model={"dtype": config.model.dtype})
        found["sampled"] = Coverage().run([str(folder)], ways, own).numbers["targets"]
    if (kind, seed) != ("r", COVERED):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return found


def covering(study: Study, job: str, task: str, way: str) -> None:
    """Measure the coverage of a seed of ES and of GRPO at a temperature, or with `noise` on the weights."""
    runs = [study.chosen(f"r/{of}/best/{task}/{COVERED}") for of in ("es", "grpo")]
    folders = [str(study.to / Path(study.found(run)["run"]).name) for run in runs]
    if way == "noise":
        ways = Ways(temperature=(), sigma=(0.001, 0.002, 0.004), samples=8, examples=32)
    else:
        ways = Ways(temperature=(float(way),), sigma=(), samples=512, examples=32)
    found = Coverage().run(folders, ways, study.config(task)).numbers
    study.keep(job, {"coverage": {k: v for k, v in found.items() if k != "problems"}})


def aligning(study: Study, job: str, task: str) -> None:
    """Measure the cosine of the step of ES with the gradient, at the base model."""
    config = study.config(task, es=settings(study, "lowrank", task, 0.5))
    study.keep(job, {"alignment": Alignment().run(["base"], Members(ranks=(1, 4)), config).numbers})


def trained(method: Any, config: Config, study: Study) -> dict[str, Any]:
    """Train, or resume; return the config, costs, generations and the evaluations before and after."""
    folder = Path(config.output_dir)
    with (folder.parent / f"{folder.name}.log").open("a", encoding="utf-8") as log:
        result = method(config, resume=folder.exists(), console=Console(file=log, width=160))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = json.loads((folder / "results" / "evaluation.json").read_text(encoding="utf-8"))
    print(folder.name, result.before.measures[RIGHT], result.after.measures[RIGHT], len(metrics), flush=True)
    return {
        "config": config.model_dump(mode="json"),
        "run": str(folder),
        "cost": totals(metrics)[0].as_dict(),
        "validation": found.get("validation"),
        "alarms": found.get("alarms"),
        "divergence": found.get("divergence"),
        "generations": [kept(row) for row in metrics],
        "before": seen(result.before),
        "after": seen(result.after),
    }


def kept(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a generation."""
    names = ("generation", "step", "mean", "std", "seconds", "tokens", "rewards", "divergence", "evaluation")
    found = {name: row[name] for name in names if row.get(name) is not None}
    for part, names in PARTS.items():
        found[part] = {name: row[part][name] for name in names if row.get(part) and name in row[part]}
    return found


def grpo(study: Study, job: str, task: str, rate: float, seed: int, **own: Any) -> None:
    """Train by GRPO for about the job's seconds: steps come from the seconds per step of the choosing run."""
    kind, choice = job.removeprefix("time/").partition("/")[0], seed >= CHOICE
    seconds = study.seconds or (CHOOSING if choice else SECONDS)[kind]
    steps, lora = 4 if job.startswith("time/") else steps_of(study, job, seconds), kind == "p"
    section = {
        "max_steps": steps, "num_generations": 8 if lora else 16, "learning_rate": rate, "beta": 0.0,
        "per_device_train_batch_size": 16, "gradient_accumulation_steps": 8, "tune": "lora" if lora else "full",
        "rollouts": "engine", "warmup_ratio": 0.0 if lora else min(0.9, 5 / steps),
        "trl": {"lr_scheduler_type": "linear" if kind == "mix" else "constant_with_warmup",
                "gradient_checkpointing": True, "epsilon_high": 0.28},
        **own,
    }  # fmt: skip
    more: dict[str, Any] = {"lora": {"rank": 16, "alpha": 32}} if lora else {}
    more |= {"es": {"sigma": study.width("lowrank", task)}} if own.get("rollouts") == "es" else {}
    more |= {"task": {"name": PROXY, **HACKED}} if kind == "hack" else {}
    model = {"name": str(study.model), "dtype": "float32"}
    own_settings = watched(job, "grpo", {"model": model, "grpo": section, **more})
    config = study.config(task, job.replace("/", "_"), seed=seed, **own_settings)
    rows = trained_twice(evoalign.grpo, config, study)
    study.keep(job, rows, whole=False)
    if lora and not choice and "failed" not in rows:
        rows["reached"] = forgotten(study, Path(config.output_dir), task)
    study.keep(job, rows if "failed" in rows else rows | ended(study, job, config))


def trained_twice(method: Any, config: Config, study: Study) -> dict[str, Any]:
    """Train, once more after logits or weights that are not finite; a run that fails twice counts as the base."""
    failed = ""
    for _ in range(2):
        try:
            return trained(method, config, study)
        except NotFiniteError as error:
            failed = str(error)
            shutil.rmtree(config.output_dir)
    parts = assemble(config)
    base, validation = seen(parts.evaluate()), parts.evaluate("validation").measures
    parts.close()
    both = {"before": base, "after": base, "validation": {"before": validation, "after": validation}}
    return {"failed": failed, "config": config.model_dump(mode="json"), "generations": [], **both}


def forgotten(study: Study, folder: Path, task: str) -> dict[str, Any]:
    """Evaluate the base and a run on the other task."""
    off = study.config(OTHER.get(task, "tool_calls"), task={"test_size": 200}, model={"dtype": "float32"})
    names = {"base": BASE, "run": str(folder)}
    with ModelMixer([*names.values()], off) as mixer:
        return {key: {"other": seen(mixer.evaluate({name: 1.0}), 0)} for key, name in names.items()}


def steps_of(study: Study, job: str, seconds: float) -> int:
    """Return the generations or steps that take these seconds of training, by those of an earlier job.

    Raises SystemExit if that ran on another card; runs of `step` are compared at equal generations.
    """
    if job.startswith("mix/") and job.endswith(f"/{CHOICE}"):
        return max(3, round(seconds / (2 if job.startswith("mix/es/") else 4)))  # a guess
    *first, last = timed_by(job)
    found = next((known for one in first if (known := study.known(one)).get("generations")), None)
    found = found or study.found(study.chosen(last))
    if found["device"] != device() and not job.startswith("step/"):
        raise SystemExit(f"{found['job']} ran on {found['device']}, which says nothing of the seconds on {device()}")
    took = np.array([sum(v for k, v in row["seconds"].items() if k != "other") for row in found["generations"]])
    until, late = took.cumsum(), took[-(len(took) // 4 + 1) :].mean()
    count = np.interp(seconds, [0.0, *until], range(len(took) + 1)) + max(0.0, seconds - until[-1]) / late
    return max(3, round(float(count)))


def timed_by(job: str) -> tuple[str, ...]:
    """Return the jobs whose seconds per generation or step a job has: the first one that has any, or the last."""
    match job.split("/"):
        case ["step", _, task, _]:
            return (f"p/lowrank/{task}/0",)
        case ["hack", "es", _]:
            return (f"r/es/0.5/{PROXIED}/{CHOICE}",)
        case ["hack", "grpo", *_]:
            return (f"mix/grpo/engine/{PROXIED}/{CHOICE}",)
        case ["mix", "es", "0", task, _]:
            return (f"r/es/best/{task}/{CHOICE}",)
        case [("p" | "r") as kind, "grpo" | "random", rate, task, _]:
            return f"{kind}/grpo/{rate}/{task}/{CHOICE}", f"time/{kind}/{task}"
        case _:
            return (f"{job.rpartition('/')[0]}/{CHOICE}",)


def other_members(study: Study, job: str, members: str, task: str, seed: str) -> None:
    """Train with more or fewer members, and the completions and the walk of the run of 64 members with this seed."""
    generations = study.found(f"step/0.5/{task}/{seed}")["generations"]
    asked = sum(row["budget"]["completions"] for row in generations) / 16 / int(members)
    own = {"population_size": int(members), "num_generations": round(asked)}
    es(study, job, task, int(seed), es=settings(study, "lowrank", task, 0.5 * int(members) / 64) | own)


BY_NAME: Mapping[str, Any] = {
    "gate": gate, "prompting": prompting, "longer": longer, "perturb": perturbing, "alignment": aligning,
    "coverage": covering, "population": other_members,
}  # fmt: skip


def do(study: Study, job: str) -> None:
    """Do one job by its name."""
    match job.split("/"):
        case ["probe", space, task, seed]:
            probing(study, job, space, task, int(seed))
        case [name, *parts] if name in BY_NAME:
            BY_NAME[name](study, job, *parts)
        case ["p", ("lora" | "lowrank") as space, task, seed]:
            es(study, job, task, int(seed), space=space, es=settings(study, space, task, 0.5), **ADAPTER.get(space, {}))
        case ["r", "es", eta, task, seed] | ["step", eta, task, seed]:
            prompts = {"task": {"batch_size": 8}} if job.startswith("r") else {}
            es(study, job, task, int(seed), es=settings(study, "lowrank", task, float(eta)), **prompts)
        case ["long", tokens, weights, seed]:
            most = {"max_tokens": int(tokens)}
            own = {"reward_weights": [float(w) for w in weights.split(",")]}
            own_es = settings(study, "lowrank", "countdown", 0.5) | {"population_size": 128}
            es(study, job, "countdown", int(seed), es=own_es, task=own, sampling=most, evaluation=most)
        case ["mix", "es", temperature, task, seed]:
            seconds = study.seconds or (CHOOSING if int(seed) >= CHOICE else SECONDS)["mix"]
            decayed = settings(study, "lowrank", task, twice_best(study, "es", task)) | {
                "num_generations": steps_of(study, job, seconds),
                "learning_rate_schedule": {"name": "linear", "floor": 1e-12},
            }
            sampling = {"temperature": float(temperature)}
            es(study, job, task, int(seed), es=decayed, task={"batch_size": 8}, sampling=sampling)
        case ["hack", "es", seed]:
            own = settings(study, "lowrank", PROXIED, 0.5)
            es(study, job, PROXIED, int(seed), es=own, task={"name": PROXY, "batch_size": 8, **HACKED})
        case ["hack", "grpo", rate, seed]:
            grpo(study, job, PROXIED, float(rate), int(seed))
        case ["time", "p" | "r", task]:
            grpo(study, job, task, 1e-6, CHOICE)
        case ["mix", "grpo", rollouts, task, seed]:
            grpo(study, job, task, twice_best(study, "grpo", task), int(seed), rollouts=rollouts)
        case ["r" | "p", ("grpo" | "random") as rewards, rate, task, seed]:
            own = {"reward": "random"} if rewards == "random" else {}
            grpo(study, job, task, float(rate), int(seed), **own)
        case _:
            raise SystemExit(f"there is no job {job}")


def settings(study: Study, space: str, task: str, eta: float) -> dict[str, Any]:
    sigma = study.width(space, task)
    return {"num_generations": 10_000, "sigma": sigma, "learning_rate": eta * sigma, "shaping": "zscore"}


def twice_best(study: Study, method: str, task: str) -> float:
    """Return the first eta or rate of `mix`, which decays to 0: twice the constant one that is best in `r`."""
    return 2 * float(study.chosen(f"r/{method}/best/{task}/0").split("/")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--jobs", nargs="+", required=True)
    parser.add_argument("--seconds", type=float, help="of training, instead of the plan's")
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--wait", type=float, default=0.0, help="seconds for rows of other commands")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    options = parser.parse_args()
    study, began = Study(options), time.perf_counter()
    for named in options.jobs:
        job = study.chosen(named)
        if study.file(job).is_file():
            print(f"{job} has its rows: {study.file(job)}", flush=True)
            continue
        if time.perf_counter() - began > options.limit:
            print(f"left for the next command: {job} and what follows", flush=True)
            break
        start, study.waited = time.perf_counter(), 0.0
        do(study, job)
        seconds = time.perf_counter() - start - study.waited
        study.keep(job, {**study.known(job), "job_seconds": seconds})
        print(f"{job}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
