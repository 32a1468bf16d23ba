# SPDX-License-Identifier: Apache-2.0
"""Safety alignment of the tiny model: settings chosen on validation prompts, then seeds of ES and GRPO on test prompts.

    python studies/safety.py tune  --to DIR --jobs 16    each cell of ES and GRPO with two seeds, on validation.jsonl
    python studies/safety.py final --to DIR --jobs 16    the chosen cells with five other seeds, on test.jsonl
    python studies/safety.py rows  --to DIR --jobs 16    what they said, by both sets of scorers, and placebos

`tune` ranks the cells of a method by their worse seed. Those come first in which no more harmless prompts, look-alikes
among them, are refused than before and the mean reward did not fall; else it is the safe share, less twice the share of
harmless prompts that are refused, less what the mean reward lost. All three continue after a stop. `--device cuda`
trains on a GPU, or with GPUS=2 in the environment on two in turn. `rows` writes studies/results/safety.jsonl, which
studies/safety_tables.py shows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import benchmark_path  # noqa: F401
from evoalign.config import ScorerConfig
from evoalign.placebos.counterfactual import parse
from evoalign.placebos.run import open_run
from evoalign.rewards.scorer import create
from evoalign.rundir.directory import generation_of, saved_folders
from evoalign.tasks.refusals import kind_of
from study_runs import ROOT, environment

CONFIGS = {"es": ROOT / "configs" / "quickstart_safety.yaml", "grpo": ROOT / "configs" / "quickstart_safety_grpo.yaml"}
DATA = ROOT / "data" / "tasks" / "safety"
ROWS = ROOT / "studies" / "results" / "safety.jsonl"
SCORERS = {"train": DATA / "models", "judge": DATA / "models" / "judge"}
TUNE_SEEDS, SEEDS = (90, 91), (0, 1, 2, 3, 4)
EVERY, PLACEBOS = 10, 20
ROWS_OF = {"mild": {"TT": 400, "FF": 50, "FT": 25, "TF": 25}, "milder": {"TT": 450, "FF": 30, "FT": 10, "TF": 10}}
"""Training rows, by how many of them ask for no harm: about half, and more."""


def cells() -> dict[str, dict[str, dict[str, Any]]]:
    """Settings by method and name. Those that are long, of beta 0.2 or of decay were added after others were seen."""
    plain = {"name": "lagrangian", "safe_first": "product"}
    es = {
        f"{rows}_{rate:g}_{pace:g}": {
            "es.num_generations": 80,
            "es.population_size": 64,
            "es.decay": 0.0,
            "es.learning_rate": rate,
            "task.shares": shares,
            "task.objective": {**plain, "rate": pace},
        }
        for rows, shares in ROWS_OF.items()
        for rate in (0.01, 0.02)
        for pace in (0.02, 0.05)
    }
    longer = {
        f"{rows}_0.02_{pace:g}_long": {**es[f"{rows}_0.02_{pace:g}"], "es.num_generations": 120}
        for rows in ROWS_OF
        for pace in (0.02, 0.05)
    }
    decaying = {
        f"{rows}_{rate:g}_decay_{decay:g}": {**es[f"{rows}_0.02_0.05"], "es.learning_rate": rate, "es.decay": decay}
        for rows in ROWS_OF
        for rate in (0.02, 0.03)
        for decay in (0.01, 0.03)
    }
    decaying["mild_0.03_decay_0.01_long"] = {**decaying["mild_0.03_decay_0.01"], "es.num_generations": 120}
    grpo = {
        f"{rows}_{rate:g}_{beta:g}": {
            "grpo.max_steps": 60,
            "grpo.learning_rate": rate,
            "grpo.beta": beta,
            "task.shares": shares,
        }
        for rows, shares in ROWS_OF.items()
        for rate in (1e-4, 3e-4)
        for beta in (0.0, 0.05, 0.2)
    }
    found = {"es": es | longer | decaying, "grpo": grpo}
    for named in found.values():
        assert len({json.dumps(cell, sort_keys=True) for cell in named.values()}) == len(named), (
            "two cells are the same"
        )
    return found


def measured(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares and means of answers, each with its prompt, its reward and its cost."""
    kinds = {row["prompt"]: row["kind"] for split in ("validation", "test") for row in read(DATA / f"{split}.jsonl")}
    texts = Counter(row["response"] for row in rows)
    refused: dict[str, list[bool]] = {"harmful": [], "look-alike": [], "harmless": []}
    templates, harmless = Counter[str](), list[float]()
    for row in rows:
        kind, group = kind_of(row["response"]), kinds[row["prompt"]]
        refused[group if group in refused else "harmful"].append(kind is not None)
        harmless += [row["reward"]] if group in ("look-alike", "harmless") else []
        templates.update([row["response"]] if kind is not None else [])
    return {
        "prompts": len(rows),
        "safe": mean(row["cost"] <= 0 for row in rows),
        "reward": mean(row["reward"] for row in rows),
        "reward_harmless": mean(harmless),
        "cost": mean(row["cost"] for row in rows),
        "largest_answer": texts.most_common(1)[0][1] / len(rows),
        "largest_refusal": max(templates.values(), default=0) / len(rows),
        "distinct": len(texts) / len(rows),
        "refused_harmful": mean(refused["harmful"]),
        "refused_look_alike": mean(refused["look-alike"]),
        "refused_harmless": mean(refused["harmless"]),
        "refused_needlessly": mean(refused["look-alike"] + refused["harmless"]),
    }


def train(number: int, to: Path, method: str, sets: Mapping[str, Any]) -> float:
    """Run or resume one run in a separate process; return its seconds."""
    began = time.monotonic()
    words = [sys.executable, "-m", "evoalign.cli", "train" if method == "es" else "grpo", str(CONFIGS[method])]
    for key, value in {"output_dir": str(to), "engine.threads": 1, **sets}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    if to.exists():
        words.append("--resume")
    to.parent.mkdir(parents=True, exist_ok=True)
    env = environment(gpu=sets["engine.device"] != "cpu")
    if "GPUS" in os.environ:  # so many, taken in turn
        env["CUDA_VISIBLE_DEVICES"] = str(number % int(os.environ["GPUS"]))
    with to.with_name(f"{to.name}.log").open("ab") as log:
        subprocess.run(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    return time.monotonic() - began


def all_of(runs: Mapping[Path, tuple[str, Mapping[str, Any]]], jobs: int) -> None:
    """Train all, this many at once."""
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda n, one: train(n, one[0], *one[1]), range(len(runs)), runs.items())
        for to, seconds in zip(runs, found, strict=True):
            print(f"{to.name}: {seconds:.0f} s", flush=True)


def tune(to: Path, jobs: int, device: Mapping[str, Any], begin: str) -> None:
    """See the module."""
    common = {"task.test_data": str(DATA / "validation.jsonl"), "evaluation.every": 0, **device}
    runs = {
        to / "tune" / f"{method}_{name}_{seed}": (method, {**common, **only(method), "seed": seed, **cell})
        for seed in TUNE_SEEDS
        for method, named in cells().items()
        for name, cell in named.items()
        if f"{method}_{name}".startswith(begin)
    }
    all_of(runs, jobs)
    ranked: dict[str, list[dict[str, Any]]] = {}
    for method, named in cells().items():
        for name, cell in named.items():
            found = [ends(to / "tune" / f"{method}_{name}_{seed}") for seed in TUNE_SEEDS]
            if all(found):
                ranked.setdefault(method, []).append({"cell": name, "settings": cell, "seeds": found})
        ranked.get(method, []).sort(key=rank, reverse=True)
    (to / "tune.json").write_text(json.dumps(ranked, indent=1) + "\n")
    for method, rows in ranked.items():
        for row in rows:
            for before, after in row["seeds"]:
                print(method, row["cell"], {k: f"{before[k]:.2f}->{after[k]:.2f}" for k in after}, flush=True)


def only(method: str) -> dict[str, Any]:
    """Settings that one of the methods has alone."""
    return {"checks.placebo": 0} if method == "es" else {}


def ends(run: Path) -> tuple[dict[str, float], dict[str, float]] | None:
    """Return a run's measures before and after; None if it did not end."""
    files = [run / "results" / f"{name}.jsonl" for name in ("points_before", "points")]
    if not all(file.is_file() for file in files):
        return None
    before, after = (measured(read(file)) for file in files)
    return before, after


def rank(row: Mapping[str, Any]) -> tuple[bool, float]:
    """See the module."""
    seeds = row["seeds"]
    needless = [after["refused_needlessly"] for _, after in seeds]
    lost = [before["reward"] - after["reward"] for before, after in seeds]
    held = all(now <= before["refused_needlessly"] for now, (before, _) in zip(needless, seeds, strict=True))
    worth = (a["safe"] - 2 * n - max(0.0, less) for (_, a), n, less in zip(seeds, needless, lost, strict=True))
    return held and max(lost) <= 0, min(worth)


def final(to: Path, jobs: int, device: Mapping[str, Any]) -> None:
    """See the module."""
    ranked = json.loads((to / "tune.json").read_text())
    common = {"evaluation.every": 0, "checks.kl_every": EVERY, "checkpoint.every": EVERY, **device}
    common["checkpoint.keep_last"] = 1000
    all_of(
        {
            to / "final" / f"{method}_{seed}": (
                method, {**common, **only(method), "seed": seed, **ranked[method][0]["settings"]}
            )
            for seed in SEEDS
            for method in CONFIGS
            if method in ranked
        },
        jobs,
    )  # fmt: skip


def rows(to: Path, jobs: int) -> None:
    """See the module. Placebos are made where the run was: with its engine, device and dtype."""
    runs = sorted(path for path in (to / "final").iterdir() if (path / "results" / "points.jsonl").is_file())
    with ProcessPoolExecutor(jobs) as pool:
        told = [row for found in pool.map(of_run, runs) for row in found]
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in told))
    print(f"{len(told)} rows of {len(runs)} runs in {ROWS}", flush=True)


def of_run(run: Path) -> list[dict[str, Any]]:
    """Rows of a run: its start, the means that it saved, its placebos, and the path of lambda."""
    method, _, seed = run.name.partition("_")
    kept = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kl = {row["generation"] + 1: row["divergence"] for row in kept if row.get("divergence")}
    said = {"run": run.name, "method": method, "seed": int(seed)}
    found = [{**said, "lambda": [row["objective"]["lambda"] for row in kept if "objective" in row]}]
    found.append({**said, "generation": 0, "kl": None, **both(read(run / "results" / "points_before.jsonl"))})
    for folder, answers in zip(saved_folders(run), answered(run), strict=True):
        at = generation_of(folder)
        found.append({**said, "generation": at, "kl": kl.get(at), **both(answers)})
    if method == "es":
        found += [{**said, "method": "placebo", "placebo": k, **both(one)} for k, one in enumerate(placebos(run))]
    return found


def answered(run: Path) -> list[list[dict[str, Any]]]:
    """Return the greedy completions of each saved mean on the test prompts."""
    folders, to = saved_folders(run), run / "eval.json"
    words = [sys.executable, "-m", "evoalign.cli", "eval", *map(str, folders), "--config", str(run / "config.yaml")]
    subprocess.run([*words, "--output", str(to)], cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
    several = [to.with_name(f"eval_points_{i}.jsonl") for i in range(len(folders))]
    return [read(file) for file in (several if len(folders) > 1 else [to.with_name("eval_points.jsonl")])]


def placebos(run: Path) -> list[list[dict[str, Any]]]:
    """Return the completions of placebos: coefficients shuffled over the members of each generation."""
    with open_run(run) as found:
        task, examples = found.parts.task, found.parts.data.test
        reached = [found.reach(parse("shuffle", found.log, seed)).evaluation for seed in range(PLACEBOS)]
        return [
            [dict(task.point(c.text, examples[c.example], c.rewards) or {}) for c in one.completions] for one in reached
        ]


def both(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the measures by the training scorers and by the held-out scorers."""
    prompts, responses = [row["prompt"] for row in answers], [row["response"] for row in answers]
    found: dict[str, Any] = {}
    for name, folder in SCORERS.items():
        scorer = create(
            ScorerConfig(name="local", reward=str(folder / "reward"), cost=str(folder / "cost"), device="cpu")
        )
        scores = scorer.score(prompts, responses)
        scored = zip(prompts, responses, scores["reward"], scores["cost"], strict=True)
        found[name] = measured(
            [dict(zip(("prompt", "response", "reward", "cost"), row, strict=True)) for row in scored]
        )
    return found


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def mean(values: Iterable[float]) -> float:
    """Return the mean of a non-empty sequence."""
    kept = list(values)
    return sum(kept) / len(kept)


def main() -> None:
    """Read the arguments; do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "final", "rows"))
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--begin", default="", help="of `tune`: train the cells alone whose names begin so, as es_long")
    given = parser.parse_args()
    device = {"engine.device": given.device, "scorer.device": given.device}
    device |= {} if given.device == "cpu" else {"scorer.batch_size": 512}
    to = given.to.resolve()
    if given.what == "tune":
        tune(to, given.jobs, device, given.begin)
    elif given.what == "final":
        final(to, given.jobs, device)
    else:
        rows(to, given.jobs)


if __name__ == "__main__":
    main()
