# SPDX-License-Identifier: Apache-2.0
"""The methods on the same three tasks, with the same completions, prompts a generation and seeds.

    python studies/methods.py --models smollm2=DIR real=DIR --to RUNS --jobs tiny/lowrank/100 tiny/lowrank/{0,1,2}

A job is SETTING/METHOD/SEED and leaves studies/results/methods/SETTING/METHOD/SEED.json: config, versions, device,
costs, the course, and the validation and test splits before and after, with placebos where a method has them. Seed 100
is the probe that chooses the width of the noise, on training rows; the others of its method wait for it. Jobs that have
their rows are skipped. `--limit` begins no job after this many seconds, `--set` changes a setting of every job.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import evoalign
from evoalign.config import Config, load
from evoalign.cost.budget import totals
from evoalign.evaluation import Evaluation
from evoalign.preflight.advice import fault
from evoalign.preflight.probe import probe
from real_runs import REWARDS, WORDS

ROWS = Path(__file__).resolve().parent / "results" / "methods"
PROBE = 100
"""The seed of the job that chooses a width."""
PLACEBOS = 3
ETA = 0.5
"""The step in units of the noise, with z-scores."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, a task, and the completions of a run: generations x members x prompts."""

    tree: Mapping[str, Any]
    generations: int
    members: int
    prompts: int
    measure: str
    """The measure of an example that the table has."""
    widths: float
    """Factor of the widths that are probed."""
    probe: tuple[int, int]
    """Members at each width, and prompts, of the probe."""
    fits: int = 64
    """Completions of a forward and backward pass of TRL, of 64 of a step; if fewer, with gradient checkpointing."""

    @property
    def completions(self) -> int:
        """Completions of a run."""
        return self.generations * self.members * self.prompts


@dataclass(frozen=True, slots=True)
class Method:
    """The sections of a config, and the widths of the noise to probe."""

    tree: Mapping[str, Any]
    widths: tuple[float, ...]
    setting: str = "sigma"
    """The setting of `es` that is the width."""
    es: Mapping[str, Any] = field(default_factory=dict)
    of: str = ""
    """The method whose probe it shares."""
    times: float = 1.0
    """Factor of that probe's width."""
    algorithm: str = ""
    """The algorithm of TRL, whose widths are learning rates; empty for ES."""


SETTINGS = {
    "tiny": Setting(
        {
            "task": {
                "name": "countdown", "train_data": "data/tasks/countdown/countdown.json", "split": "first_last",
                "train_size": 1500, "validation_size": 200, "test_size": 500, "prompt": "short",
            },
            "model": {"name": "tiny"},
            "sampling": {"max_tokens": 40},
        },
        60, 64, 8, "right", 5, (64, 64),
    ),
    "smollm2": Setting(
        {
            "task": {"name": "custom", "prompt": "chat", "rewards": [f"{REWARDS}:both_words"]},
            "sampling": {"max_tokens": 48},
        },
        40, 32, 16, "reward", 2, (32, 32),
    ),
    "real": Setting(
        {"task": {"name": "word_problems", "validation_size": 200, "test_size": 500}, "sampling": {"max_tokens": 320}},
        40, 64, 8, "right", 1, (32, 32),
        16,
    ),
}  # fmt: skip
LINEAR, RELATIVE = (0.0005, 0.001, 0.002, 0.004), (0.01, 0.02, 0.04, 0.08)
LORA_ONLY = {"lora": {"rank": 4, "alpha": 4}}
LORA = {"space": "lora", **LORA_ONLY}
RATES = (3e-5, 1e-4, 3e-4)
RATE_OF_REAL = 2e-6
"""The best of four rates on validation rows for all weights of `real`: rows `r_grpo_*_100` of real.py."""
METHODS = {
    "lowrank": Method({"space": "lowrank"}, LINEAR),
    "lora": Method(LORA, tuple(w / 4 for w in LINEAR)),
    "norms": Method({"space": "norms"}, RELATIVE, "noise_multiplier"),
    "steering": Method({"space": "steering"}, tuple(w * 4 for w in LINEAR)),
    "subspace": Method({"space": {"name": "subspace", "dimension": 1000}, **LORA_ONLY}, tuple(w / 4 for w in LINEAR)),
    "lowrank_x2": Method({"space": "lowrank"}, (), of="lowrank", times=2),
    "lowrank_x4": Method({"space": "lowrank"}, (), of="lowrank", times=4),
    "norms_x2": Method({"space": "norms"}, (), "noise_multiplier", of="norms", times=2),
    "norms_x4": Method({"space": "norms"}, (), "noise_multiplier", of="norms", times=4),
    "truncation": Method({"space": "lowrank"}, (), es={"shaping": "truncation"}, of="lowrank"),
    "adam": Method(LORA, (), es={"optimizer": "adam"}, of="lora"),
    "sep_cma": Method(
        {"space": {"name": "subspace", "dimension": 1000}, **LORA_ONLY}, (), es={"optimizer": "sep_cma"}, of="subspace"
    ),
    "grpo": Method({}, RATES, algorithm="grpo"),
    "ppo": Method({}, RATES, algorithm="ppo"),
    "dpo": Method({}, RATES, algorithm="dpo"),
}
CHOOSING = 4
"""A run of seed 100 that chooses a rate has the completions of a run divided by this."""


def sentences(folder: Path) -> dict[str, str]:
    """Write the splits of the task of SmolLM2, a sentence with two words each, and return their settings."""
    topics, found = WORDS["topics"], dict[str, str]()
    pairs = [(a, topics[(i * 7 + step) % len(topics)]) for step in range(1, 9) for i, a in enumerate(topics)]
    pairs = [(a, b) for a, b in pairs if a != b]
    for split, part in (("train", pairs[:250]), ("validation", pairs[250:350]), ("test", pairs[350:550])):
        file = folder / f"sentences_{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        words = [(a.split()[-1], b.split()[-1]) for a, b in part]
        rows = [
            {"prompt": f'Write one sentence of at most 12 words with the words "{a}" and "{b}".', "answer": f"{a} {b}"}
            for a, b in words
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        found[f"{split}_data"] = str(file)
    return found


class Study:
    """Paths, and the settings of all jobs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.models = dict(pair.split("=", 1) for pair in options.models)
        self.to: Path = options.to
        self.sets: list[str] = options.set
        self.rows: Path = options.rows

    def config(self, job: str, width: float, share: int = 1) -> Config:
        """Return the config of a job with this width or rate, with its share of the completions."""
        where, name, seed = job.split("/")
        setting, method = SETTINGS[where], METHODS[name]
        task = {"batch_size": setting.prompts, **setting.tree["task"]}
        task |= sentences(self.to / "data") if where == "smollm2" else {}
        tree = {
            **setting.tree,
            **method.tree,
            "output_dir": str(self.to / job.replace("/", "_")),
            "seed": int(seed),
            "task": task,
            "model": setting.tree.get("model", {"name": self.models.get(where, "")})
            | ({"dtype": "float32"} if method.algorithm else {}),
            **(_trl(setting, method, width, share) if method.algorithm else _es(setting, method, width)),
            "evaluation": {**setting.tree["sampling"], "temperature": 0.0, "every": 0},
            "checkpoint": {"every": 0, "keep_best": False},
            "checks": {"placebo": 0 if method.algorithm else PLACEBOS, "perplexity": where == "smollm2"},
            "report": False,
        }
        return load([written(self.to / f"{job.replace('/', '_')}.yaml", tree)], self.sets)

    def file(self, job: str) -> Path:
        """Return the file of a job's rows."""
        return self.rows / f"{job}.json"

    def width(self, job: str) -> float:
        """Return the width of a job's method, from its probe. Raises SystemExit if it has no rows."""
        where, name, _ = job.split("/")
        if where == "real" and METHODS[name].algorithm:
            return RATE_OF_REAL
        probe = f"{where}/{METHODS[name].of or name}/{PROBE}.json"
        file = next((folder / probe for folder in (self.rows, ROWS) if (folder / probe).is_file()), None)
        if file is None:
            raise SystemExit(f"{self.rows / probe} is missing: run the job of seed {PROBE} first")
        return float(json.loads(file.read_text(encoding="utf-8"))["width"]) * METHODS[name].times

    def keep(self, job: str, rows: Mapping[str, Any]) -> None:
        """Write the rows of a job."""
        file = self.file(job)
        file.parent.mkdir(parents=True, exist_ok=True)
        versions = {"evoalign": evoalign.__version__, "torch": torch.__version__}
        tree = {"job": job, "device": device(), "versions": versions, **rows}
        text, where = json.dumps(tree, allow_nan=False), job.split("/")[0]
        for path, name in ((f'"{self.to}/', '"'), (f'"{self.models.get(where)}"', f'"{where}"')):
            text = text.replace(path, name)  # folders of the machine say nothing
        file.write_text(text + "\n", encoding="utf-8")


def device() -> str:
    """Return the name of the device that rows come from."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _es(setting: Setting, method: Method, width: float) -> dict[str, Any]:
    rate = ETA * (1 if method.setting == "noise_multiplier" else width)
    if method.es.get("optimizer") == "adam":
        rate /= math.sqrt(setting.members)  # its steps are that much longer: `evoalign.optimizer.reach`
    own = {} if method.es.get("optimizer") == "sep_cma" else {"learning_rate": rate}
    sizes = {"num_generations": setting.generations, "population_size": setting.members}
    return {"es": {**sizes, method.setting: width, **own, **method.es}}


def _trl(setting: Setting, method: Method, rate: float, share: int) -> dict[str, Any]:
    fits = 64 if method.algorithm == "dpo" else setting.fits  # it trains on two completions of eight
    section = {
        "algorithm": method.algorithm, "max_steps": setting.completions // share // 64, "num_generations": 8,
        "per_device_train_batch_size": fits, "gradient_accumulation_steps": 64 // fits, "learning_rate": rate,
        "rollouts": "engine", "trl": {"gradient_checkpointing": setting.fits < 64},
    }  # fmt: skip
    return {"grpo": section | ({"beta": 0.1} if method.algorithm == "dpo" else {})}


def written(file: Path, tree: Mapping[str, Any]) -> Path:
    """Write a config, and return its file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return file


def measured(found: Evaluation, measure: str) -> dict[str, Any]:
    """Return the measures of an evaluation, the table's by example, and the first texts."""
    first = [{"prompt": c.prompt, "text": c.text, "reward": c.reward} for c in found.completions[:3]]
    each = [round(value, 4) for value in found.measures_E[measure]]
    return {"measures": {k: round(v, 5) for k, v in found.measures.items()}, "each": each, "first": first}


def probing(study: Study, job: str) -> None:
    """Choose the width: the probe's recommendation, else the trial it advises, else the best that breaks nothing."""
    where, name, _ = job.split("/")
    setting, (members, examples) = SETTINGS[where], SETTINGS[where].probe
    widths = [setting.widths * width for width in METHODS[name].widths]
    if METHODS[name].algorithm:
        study.keep(job, _best_rate(study, job, widths))
        return
    config = study.config(job, widths[-2])
    found = probe(config, sigmas=widths, members=members, examples=examples, tell=print)
    sound = [one for one in found.rungs if one.gain is not None and fault(one, found) is None]
    best = max(sound, key=lambda one: one.gain or 0.0).width if sound else min(widths)
    width = found.width if found.width is not None else found.trial[0] if found.trial else best
    tried = [{"width": one.width, "gain": one.gain} for one in found.rungs]
    study.keep(job, {"reason": found.reason, "tried": tried, "width": width})
    print(found.reason, width, flush=True)


def _best_rate(study: Study, job: str, rates: Sequence[float]) -> dict[str, Any]:
    """Train shortly with each rate, and choose the best on the validation split."""
    measure, tried = SETTINGS[job.split("/")[0]].measure, list[dict[str, float]]()
    for rate in rates:
        config = study.config(job, rate, CHOOSING)
        with (study.to / "rates.log").open("a", encoding="utf-8") as log:
            evoalign.grpo(config, overwrite=True, console=Console(file=log, width=160))
        ended = json.loads((Path(config.output_dir) / "results" / "evaluation.json").read_text(encoding="utf-8"))
        before, after = (ended["validation"][when][measure] for when in ("before", "after"))
        tried.append({"width": rate, "gain": after - before})
    return {"reason": "best on validation rows", "tried": tried, "width": max(tried, key=lambda t: t["gain"])["width"]}


def training(study: Study, job: str) -> None:
    """Train, and evaluate the run and its placebos."""
    measure = SETTINGS[job.split("/")[0]].measure
    config = study.config(job, study.width(job))
    folder = Path(config.output_dir)
    with folder.with_suffix(".log").open("a", encoding="utf-8") as log:
        train = evoalign.grpo if METHODS[job.split("/")[1]].algorithm else evoalign.train
        result = train(config, resume=folder.exists(), console=Console(file=log, width=160))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ended = json.loads((folder / "results" / "evaluation.json").read_text(encoding="utf-8"))
    study.keep(
        job,
        {
            "config": config.model_dump(mode="json"),
            "before": measured(result.before, measure),
            "after": measured(result.after, measure),
            "validation": ended.get("validation"),
            "nats": ended.get("alarms", {}).get("nats_a_token"),
            "placebos": ended["placebo"]["each"][measure] if "placebo" in ended else [],
            "cost": totals(metrics)[0].as_dict(),
            "course": [
                {"mean": row["mean"], "distance": (row.get("diagnosis") or {}).get("distance_sigmas")}
                for row in metrics
            ],
        },
    )
    print(job, result.before.measures[measure], result.after.measures[measure], flush=True)


def main() -> None:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[], metavar="SETTING=FOLDER")
    parser.add_argument("--to", type=Path, default=Path("runs/methods"))
    parser.add_argument(
        "--rows", type=Path, default=ROWS, help="where rows are; probes that it lacks are those of the study"
    )
    parser.add_argument("--jobs", nargs="*", default=[])
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    for job in options.jobs:
        where, name, seed = [*job.split("/"), "", ""][:3]
        if where not in SETTINGS or name not in METHODS or not seed.isdigit():
            parser.error(f"{job}: give {'|'.join(SETTINGS)}, {'|'.join(METHODS)} and a seed, as in tiny/lowrank/0")
    study, began = Study(options), time.perf_counter()
    for job in options.jobs:
        if study.file(job).is_file():
            print(f"{job}: {study.file(job)} has its rows; --rows FOLDER leaves new ones", flush=True)
            continue
        if time.perf_counter() - began > options.limit:
            print(f"left for the next command: {job} and what follows", flush=True)
            break
        start = time.perf_counter()
        (probing if int(job.split("/")[2]) == PROBE else training)(study, job)
        print(f"{job}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
