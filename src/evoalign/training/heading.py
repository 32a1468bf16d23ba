# SPDX-License-Identifier: Apache-2.0
"""The first lines of a run and the last ones: what it is, and where what it made is and what can be done with that."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from evoalign import spaces, tokens
from evoalign.config import Config, outside
from evoalign.cost import estimate, rounding
from evoalign.cost.share import share_lines
from evoalign.errors import EvoalignError
from evoalign.models import origin
from evoalign.placebos.estimates import Placebos
from evoalign.rollouts import lengths_of
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import RunDir
from evoalign.rundir.method import Method, method_of, own_option, placebo_command
from evoalign.setup import Parts
from evoalign.tasks import Data, Task
from evoalign.tasks.grading import kept_here
from evoalign.training import saving, splits, stopping
from evoalign.training.result import gold_lines, shown
from evoalign.types import Layout, TensorSpec


def subject(config: Config, task: Task, data: Data, specs: Sequence[TensorSpec]) -> str:
    """Model and task, for whoever reads nothing else."""
    parameters = sum(math.prod(spec.shape) for spec in specs)
    splits = {"training": data.train, "validation": data.validation, "test": data.test}
    counts = [f"{len(examples):,} {name}" for name, examples in splits.items() if examples]
    return (
        f"model {config.model.name} of {parameters / 1e6:,.1f} M parameters; task {task.name}: "
        f"{', '.join(counts[:-1])} and {counts[-1]} examples"
    )


def of_es(config: Config, task: Task, data: Data, specs: Sequence[TensorSpec], layout: Layout) -> list[str]:
    """What a run of ES is: model and task, what evolves, how much it asks."""
    es, asked, samples = config.es, config.task.asked(len(data.train)), config.task.samples or 1
    share, *warnings = share_lines(config, specs, layout)
    members, each = es.population_size, f" x {samples} samples" if samples > 1 else ""
    asks_mean = task.objective().asks_mean
    return [
        subject(config, task, data, specs),
        f"space {config.space.name}: {layout.parameters:,} numbers; {share}",
        f"{es.num_generations:,} generations of {(members + asks_mean) * asked:,} completions ({members} members"
        f"{estimate.and_mean(asks_mean)} x {asked // samples} prompts{each}) of at most "
        f"{config.sampling.max_tokens:,} tokens; the first one shows how long they take",
        *_batch_lines(config, len(data.train)),
        *config.engine.lines(members, spaces.create(config).carrier == "dense"),
        *warnings,
    ]


def _batch_lines(config: Config, rows: int) -> list[str]:
    """A note where a generation has fewer prompts than were asked for."""
    wanted = config.task.batch_size
    if wanted is None or wanted <= rows:
        return []
    return [f"note: task.batch_size {wanted:,} is more than there are training rows: each generation asks all {rows:,}"]


def most_asked(config: Config, task: Task, data: Data) -> tuple[int, int] | None:
    """The most completions that a generation or an evaluation asks for, and the tokens of the longest prompt.

    None where the tokenizer cannot be loaded, or not make text of the prompts.
    """
    drawn = config.evaluation
    tested = len(data.test) * (len(drawn.seeds) * drawn.samples if drawn.temperature > 0 else 1)
    try:
        lengths = lengths_of(task, tokens.load(config.model), [*data.train, *data.test])
    except EvoalignError:  # which the run itself says best
        return None
    return max(config.es.population_size * config.task.asked(len(data.train)), tested), max(lengths)


def opening(parts: Parts) -> list[str]:
    """The same of a run whose model is loaded, with its step and what is to be known of engine and data."""
    config, layout = parts.config, parts.layout
    weights = rounding.weights_of_engine(parts.engine, layout)
    return [
        *origin.lines(config.model),
        *of_es(config, parts.task, parts.data, parts.engine.specs(), layout),
        *estimate.step_lines(config, layout),
        *rounding.rounding_lines(config, layout, parts.engine.dtype, weights),
        *([f"engine {parts.facts.engine}: {parts.facts.note}"] if parts.facts.note else []),
        *_graders_lines(parts),
        *gold_lines(parts.task, parts.data),
        *splits.lines(config, parts.task, parts.data),
        *stopping.lines(config),
    ]


def _graders_lines(parts: Parts) -> list[str]:
    """Who scores completions, where processes are asked for that."""
    count = parts.config.engine.scored_by
    if not count:
        return []
    why = kept_here(parts.task)
    if why is not None:
        return [f"note: completions are scored in the run's own process and not by {count} graders: {why}"]
    return [f"completions are scored by {count} graders, {parts.task.per_call} at a time, while others are decoded"]


def last_lines(
    run: RunDir, saved: Path, config: Config, task: Task, given: str | None, placebos: Placebos | None = None
) -> list[str]:
    """Where what a run made is, and commands that go on from there, which need nothing but the run.

    `given`: what it was handed as a Python object, which no command has; `placebos`: those that were measured.
    """
    figures = ", ".join(sorted(file.stem for file in run.figures.glob("*.png")))
    where = {
        "results": run.results / "evaluation.json",
        "completions": run.results / "completions",
        "figures": f"{shown(run.figures)} ({figures})" if figures else run.figures,
        "adapter" if (saved / "adapter_config.json").is_file() else "model": saved,
        **_best(run, saved, config),
        **{name: run.path / "logs" / name for name in config.tracking.backends if (run.path / "logs" / name).is_dir()},
        "run": run.path,
    }
    lines = [f"{name:<12} {shown(place) if isinstance(place, Path) else place}" for name, place in where.items()]
    done, method = 0 if placebos is None else len(placebos.seeds), method_of(run.path) or "es"
    return [*lines, "to go on:", *(f"  {command}" for command in commands(run, config, task, method, given, done))]


def _best(run: RunDir, saved: Path, config: Config) -> dict[str, str]:
    """The saved mean that was best on the validation split, where that is not the last one."""
    best = saving.best_saved(run) if config.checkpoint.keep_best else None
    mark = None if best is None or best == saved else checkpoint.mark_of(best)
    if best is None or mark is None or mark.validation is None:
        return {}
    return {"best": f"{shown(best)} (of the saved ones, on the validation split: reward {mark.validation:.4g})"}


def commands(run: RunDir, config: Config, task: Task, method: Method, given: str | None, placebos: int) -> list[str]:
    """Three, and those of the task whose files are there, each with what it is for."""
    path = shlex.quote(str(shown(run.path)))
    own = own_option(shown(run.path), config, outside.EVALUATION_SKIPS)
    sampled = " --samples 4 --temperature 0.7" if config.evaluation.temperature == 0 else " --split train"
    placebo = placebo_command(shown(run.path), config).removeprefix("evoalign ")
    signal = {placebo: "how much of the gain is signal: the same noise, shuffled coefficients"}
    asked = {f"eval {path}{own}{sampled}": "the test split, sampled" if "samples" in sampled else "the training split"}
    handed = {
        f"export {path} --to {shlex.quote(f'{run.path.resolve().name}_export')}": "to hand it on, with a model card"
    }
    looked = {f"journal {path}": "each generation as a row"} if method == "es" else {}
    moved = {f"analyze distance {path}": "how far the weights went, by layer"}
    wanted = {} if given is not None else {**(signal if method == "es" and placebos < 20 else {}), **asked}
    found = list({**wanted, **handed, **looked, **moved}.items())[:3]
    found += [
        (command.replace("{run}", path), why)
        for command, why in task.commands.items()
        if all((run.path / file).exists() for file in re.findall(r"{run}/(\S+)", command))
    ]
    width = max(len(command) for command, _ in found)
    return [f"evoalign {command:<{width}}  # {why}" for command, why in found]
