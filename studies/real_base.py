# SPDX-License-Identifier: Apache-2.0
"""Rows and configs of the jobs of real.py, and its jobs that train nothing."""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from evoalign.config import Config, load
from evoalign.evaluation import RIGHT, Evaluation, evaluate
from evoalign.preflight.advice import fault
from evoalign.preflight.probe import probe
from evoalign.rollouts import collect, sampling_of
from evoalign.rundir.identity import versions
from evoalign.rundir.method import Method
from evoalign.setup import Parts, assemble
from evoalign.tasks import Task
from evoalign.tasks.word_problems import final_number
from evoalign.types import Example, Plan, Request, population

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results" / "real"
MAX_TOKENS = {"tool_calls": 192, "word_problems": 320, "constraints": 256, "countdown": 512}
COUNTDOWN = {
    "train_data": "data/tasks/countdown/countdown.json", "split": "first_last", "train_size": 1500, "test_size": 500,
    "prompt": "chat_opened",
}  # fmt: skip
CHOICE = 100
"""The first seed of runs that choose a setting."""
CHOICES = {
    ("p", "grpo"): ("1e-5", "3e-5", "1e-4"), ("r", "es"): ("0.25", "0.5", "1"),
    ("r", "grpo"): ("1e-6", "2e-6", "5e-6", "1e-5"),
}  # fmt: skip
"""Rates of GRPO and etas of ES to choose from."""
ADAPTER: dict[str, dict[str, Any]] = {"lora": {"lora": {"rank": 4, "alpha": 4}}}
PROXIED, PROXY = "word_problems", f"{HERE / 'real_proxy.py'}:BriefProblems"
"""The task of `hack`, and the same rows with its proxy reward."""
WIDTHS = (0.0005, 0.001, 0.002)
SHOTS, SHOTS_FROM, DRAWS, TEXTS = 3, 24, 16, 12


class Study:
    """Paths of the model, of the runs and of the rows, and the settings that all jobs share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model, self.to, self.seconds = options.model, options.to, options.seconds
        self.sets: list[str] = options.sets
        self.rows: Path = options.rows
        self.wait: float = options.wait
        self.waited = 0.0
        """Seconds spent in `found`."""

    def config(self, of: str, output: str = "run", /, **sections: Any) -> Config:
        """Return the config of a job; `sections` replace the study's own settings."""
        tree: dict[str, Any] = {
            "output_dir": str(self.to / output),
            "task": {"name": of, "batch_size": 16, "validation_size": 200, **(COUNTDOWN if of == "countdown" else {})},
            "model": {"name": str(self.model)},
            "space": "lowrank",
            "es": {"num_generations": 100, "population_size": 64, "sigma": 0.002, "learning_rate": 0.001},
            "sampling": {"max_tokens": MAX_TOKENS[of]},
            "evaluation": {"max_tokens": MAX_TOKENS[of], "temperature": 0.0, "every": 0},
            "checkpoint": {"every": 0, "keep_best": False},
            "checks": {"placebo": 0, "perplexity": False},
            "report": False,
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section} if isinstance(section, Mapping) else section
        return load([write(self.to / f"config_{os.getpid()}.yaml", tree)], self.sets)

    def file(self, job: str) -> Path:
        return self.rows / f"{job.replace('/', '_')}.json"

    def known(self, job: str) -> dict[str, Any]:
        """Return the rows of a job; none if they are not there."""
        file = self.file(job)
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def found(self, job: str) -> dict[str, Any]:
        """Return the rows of an earlier job, once they are there. Raises SystemExit if they do not come."""
        began = time.perf_counter()
        while not self.file(job).is_file() and time.perf_counter() < began + self.wait:
            time.sleep(1)
        self.waited += time.perf_counter() - began
        if not self.file(job).is_file():
            raise SystemExit(f"{self.file(job)} is missing: run the job {job} first")
        return self.known(job)

    def chosen(self, job: str) -> str:
        """Return the job with `best` replaced by the value whose run of seed `CHOICE` is best on validation rows.

        `hack` has the rate that is best for word problems in `r`.
        """
        if "best" not in job.split("/"):
            return job
        kind, name, _, *rest = f"r/grpo/best/{PROXIED}/0".split("/") if job.startswith("hack/") else job.split("/")
        method = "grpo" if name == "random" else name
        runs = {v: self.found(f"{kind}/{method}/{v}/{rest[0]}/{CHOICE}") for v in CHOICES[kind, method]}
        return job.replace("best", max(runs, key=lambda v: runs[v]["validation"]["after"][RIGHT]))

    def keep(self, job: str, rows: Mapping[str, Any], *, whole: bool = True) -> None:
        """Write the rows of a job. Those of one that goes on count only once they are `whole`."""
        method: Method = "grpo" if {"grpo", "random", "time"} & {*job.split("/")} else "es"
        tree = {"job": job, "device": device(), "versions": versions(method), **rows}
        cut = self.file(job).with_suffix(".cut")
        cut.parent.mkdir(parents=True, exist_ok=True)
        cut.write_text(json.dumps(tree, allow_nan=False) + "\n", encoding="utf-8")
        if whole:
            cut.replace(self.file(job))

    def width(self, space: str, task: str) -> float:
        """Return the width that the probe of seed 100 recommends, or the one that it would try."""
        return float(self.found(f"probe/{space}/{task}/{CHOICE}")["width"])


def device() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def write(file: Path, tree: Mapping[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return file


def seen(found: Evaluation, texts: int = TEXTS) -> dict[str, Any]:
    """Return what is kept of an evaluation: measures, two of them by example, and the first texts."""
    by_example = {
        name: [round(value, 4) if value % 1 else int(value) for value in found.measures_E[of]]
        for name, of in (("right", RIGHT), ("truncated", "truncated_share"))
    }
    return {
        "measures": {name: round(value, 6) for name, value in found.measures.items()},
        **by_example,
        "texts": [one.text for one in found.completions[:texts]],
    }


def gate(study: Study, job: str) -> None:
    """Evaluate the base model on the validation split of every task."""
    rows: dict[str, Any] = {}
    for task in MAX_TOKENS:
        parts = assemble(study.config(task))
        began = time.perf_counter()
        found = parts.evaluate("validation")
        asked = [{"prompt": one.prompt, "target": one.target} for one in found.completions[:TEXTS]]
        rows[task] = {**seen(found), "asked": asked, "seconds": time.perf_counter() - began}
        parts.close()
        print(task, {name: round(value, 3) for name, value in rows[task]["measures"].items()}, flush=True)
    study.keep(job, {"tasks": rows})


def probing(study: Study, job: str, space: str, task: str, seed: int) -> None:
    """Probe on training rows."""
    config = study.config(task, seed=seed, space=space, **ADAPTER.get(space, {}))
    began = time.perf_counter()
    found = probe(config, tell=print)
    sound = [one for one in found.rungs if one.gain is not None and fault(one, found) is None]
    best = max(sound, key=lambda one: one.gain or 0.0).width if sound else found.own_width
    tried = found.trial[0] if found.trial else best
    rows = {name: value for name, value in asdict(found).items() if not name.endswith("text")}
    width = tried if found.width is None else found.width
    study.keep(job, {"seconds": time.perf_counter() - began, "probe": rows, "width": width})
    print(found.reason, width, flush=True)


def prompting(study: Study, job: str, task: str) -> None:
    """Evaluate the base model with other prompts and with more samples."""
    parts = assemble(study.config(task))
    try:
        how = parts.config.evaluation
        rows = {"zero-shot": seen(parts.evaluate())}
        rows["3-shot"] = seen(evaluate(parts.engine, parts.tokens, with_shots(parts), parts.data.test, how))
        many = how.model_copy(update={"temperature": 0.7, "samples": DRAWS, "seeds": (0,)})
        drawn = evaluate(parts.engine, parts.tokens, parts.task, parts.data.test, many)
        rows["samples"] = {"measures": drawn.measures}
        rows["self-consistency"] = {"right": majority(parts, drawn)}
    finally:
        parts.close()
    study.keep(job, {"arms": rows})
    for name, row in rows.items():
        print(name, row.get("measures", {}).get(RIGHT), flush=True)


def longer(study: Study, job: str, task: str) -> None:
    """Evaluate the base model with twice the tokens: how much of a gain is that answers end in time?"""
    most = {"max_tokens": 2 * MAX_TOKENS[task]}
    parts = assemble(study.config(task, sampling=most, evaluation=most))
    try:
        how = parts.config.evaluation
        rows = {"zero-shot": seen(parts.evaluate())}
        shown = with_shots(parts)
        rows["3-shot"] = seen(evaluate(parts.engine, parts.tokens, shown, parts.data.test, how))
    finally:
        parts.close()
    study.keep(job, {**most, "arms": rows, "turns": shown.turns})


def with_shots(parts: Parts) -> Any:
    """Return the task with three training rows and right answers as earlier turns of every prompt.

    An answer is the base model's own completion where one of `DRAWS` samples is right, so that it has the form that
    the prompt asks for; the first three such rows are taken.
    """
    rows = parts.data.train[:SHOTS_FROM]
    own = {"temperature": 0.7, "samples": DRAWS, "seeds": (0,), "max_tokens": MAX_TOKENS[parts.task.name]}
    how = parts.config.evaluation.model_copy(update=own)
    drawn = evaluate(parts.engine, parts.tokens, parts.task, rows, how)
    found = {one.example: one.text for one in drawn.completions if one.right}
    task, own = copy.copy(parts.task), parts.task.prompt
    turns: list[dict[str, Any]] = []
    for example in sorted(found)[:SHOTS]:
        turns += [*messages(own(rows[example])), {"role": "assistant", "content": parts.task.clean(found[example])}]
    task.turns = turns  # type: ignore[attr-defined]
    task.prompt = lambda example: (*turns, *messages(own(example)))  # type: ignore[method-assign]
    return task


def messages(prompt: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def majority(parts: Parts, drawn: Evaluation) -> list[float]:
    """Return by example whether the most frequent answer is right; the first drawn of equally frequent ones counts."""
    right: list[float] = []
    for example in range(len(parts.data.test)):
        of = [one for one in drawn.completions if one.example == example]
        answers = [answer_of(parts.task, one.text) for one in of]
        votes = Counter(answers)
        right.append(float(bool(of[max(range(len(of)), key=lambda i: votes[answers[i]])].right)))
    return right


def answer_of(task: Task, text: str) -> str:
    """Return a completion's answer in one form: the number of a word problem, canonical JSON, else the text."""
    text = task.clean(text)
    if task.name == "word_problems":
        return str(final_number(text))
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return " ".join(text.split())


def perturbing(study: Study, job: str, task: str) -> None:
    """Draw as many single perturbations as ES had completions for, and evaluate the best of the validation split."""
    budget = study.found(f"p/lora/{task}/0")["cost"]["completions"]
    parts = assemble(study.config(task))
    try:
        rows = parts.data.of("validation")
        scores = [
            (value, plan.sigma, plan.generation, m)
            for plan in perturbations(budget / len(rows))
            for m, value in enumerate(exactness(parts, plan, rows))
        ]
        best, width, chunk, member = max(scores)
        plan = Plan(chunk, width, population(64)[member : member + 1])
        right = exactness(parts, plan, parts.data.test, by_example=True)
        own = exactness(parts, Plan(0, 0.0, population(1)), rows)[0]
    finally:
        parts.close()
    study.keep(
        job,
        {
            "width": width, "perturbations": len(scores), "validation": best, "base_validation": own, "right": right,
            "by_width": {f"{w:g}": fmean(s[0] for s in scores if s[1] == w) for w in WIDTHS},
        },
    )  # fmt: skip


def perturbations(number: float) -> list[Plan]:
    """Return plans of at most 64 members for this number of perturbations, in equal parts of each width."""
    each = max(1, round(number / len(WIDTHS)))
    return [
        Plan(chunk, width, population(64)[: each - 64 * chunk]) for width in WIDTHS for chunk in range(-(-each // 64))
    ]


def exactness(parts: Parts, plan: Plan, examples: Sequence[Example], *, by_example: bool = False) -> list[float]:
    """Return the exact share of each member of a plan, or of each example of its only member."""
    task = parts.task
    sampling = sampling_of(parts.config.evaluation)
    prompts = [parts.tokens.encode(task.prompt(example)) for example in examples]
    requests = [Request(i, prompt, sampling, 0) for i, prompt in enumerate(prompts)]
    rollouts = collect(parts.engine, plan, requests)
    right = [
        float(bool(task.is_right(task.clean(r.text), task.handed(examples[i % len(examples)]))))
        for i, r in enumerate(rollouts)
    ]
    if by_example:
        return right
    size = len(examples)
    return [sum(right[m * size : (m + 1) * size]) / size for m in range(len(plan.members))]
