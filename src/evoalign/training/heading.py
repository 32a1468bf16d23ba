# SPDX-License-Identifier: Apache-2.0
"""Lines that a run, and a dry run, print before the first generation, and a run after its last one."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from evoalign import spaces, tokens
from evoalign.checks import prompts
from evoalign.checks.rules import cut_off
from evoalign.config import Config, outside
from evoalign.cost import cards, estimate, rounding
from evoalign.errors import EvoalignError
from evoalign.evaluation import Evaluation
from evoalign.models import origin
from evoalign.placebos.estimates import Placebos
from evoalign.rollouts import lengths_of, typical
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import RunDir
from evoalign.rundir.method import Method, method_of, own_option, placebo_command
from evoalign.setup import Parts
from evoalign.tasks import Data, Split, Task, takes_any_form
from evoalign.tokens import Tokens
from evoalign.training import saving, stopping
from evoalign.training.result import gold_lines, shown
from evoalign.types import Example, Layout, TensorSpec

WORDS: dict[Split, str] = {"train": "training", "validation": "validation", "test": "test"}
SHARING: tuple[tuple[Split, Split, str], ...] = (
    ("test", "train", "test rewards then say little about new prompts"),
    ("validation", "train", "selecting by them favours memorised prompts"),
    ("test", "validation", "the test split then takes part in selection, and its reward is optimistic"),
)
"""Pairs of splits whose shared prompts are counted, and what sharing means."""
NO_VALIDATION = (
    "validation none: checkpoint.keep_best has no effect and the last mean is kept, since the test split selects "
    "nothing; task.validation_size sets rows aside for it"
)


def subject(config: Config, task: Task, data: Data, specs: Sequence[TensorSpec]) -> str:
    """Return one line with the model, the task and the sizes of its splits."""
    parameters = sum(math.prod(spec.shape) for spec in specs)
    splits = {"training": data.train, "validation": data.validation, "test": data.test}
    counts = [f"{len(examples):,} {name}" for name, examples in splits.items() if examples]
    return (
        f"model {config.model.name} of {parameters / 1e6:,.1f} M parameters; task {task.name}: "
        f"{', '.join(counts[:-1])} and {counts[-1]} examples"
    )


def of_es(config: Config, task: Task, data: Data, specs: Sequence[TensorSpec], layout: Layout) -> list[str]:
    """Return what a run of ES consists of: model, task, evolved numbers, completions."""
    es, asked, samples = config.es, config.task.asked(len(data.train)), config.task.samples or 1
    share, *warnings = estimate.share_lines(config, specs, layout)
    members, each = es.population_size, f" x {samples} samples" if samples > 1 else ""
    asks_mean, wanted, rows = task.objective().asks_mean, config.task.batch_size or 0, len(data.train)
    small = f"note: task.batch_size {wanted:,} is more than there are training rows: each generation asks all {rows:,}"
    turns = f"{config.task.limits.turns:,} turns and " if task.scored == "episodes" else ""
    limit = f" of at most {turns}{most:,} tokens" if (most := most_tokens(config, task)) else ""
    return [
        subject(config, task, data, specs),
        f"space {config.space.name}: {layout.parameters:,} numbers; {share}",
        f"{es.num_generations:,} generations of {(members + asks_mean) * asked:,} {task.scored} ({members} members"
        f"{estimate.and_mean(asks_mean)} x {asked // samples} prompts{each}){limit}; the first one shows how long they "
        "take",
        *([small] if wanted > rows else []),
        *config.engine.lines(members, spaces.create(config).carrier == "dense"),
        *warnings,
    ]


def most_tokens(config: Config, task: Task) -> int:
    """Return the most tokens that are generated for one score; 0 for a task that gives its completions."""
    each, limits = config.sampling.max_tokens, config.task.limits
    if task.scored == "episodes":  # no turn begins after `limits.tokens`
        return min(limits.turns * each, (limits.tokens or limits.turns * each) - 1 + each)
    return each if task.scored == "completions" else 0


def largest_batch(config: Config, task: Task, data: Data) -> tuple[int, int] | None:
    """Return the most completions of a generation or an evaluation, and the longest prompt's tokens.

    None if the tokenizer cannot be loaded or cannot render the prompts.
    """
    drawn = config.evaluation
    tested = len(data.test) * (len(drawn.seeds) * drawn.samples if drawn.temperature > 0 else 1)
    try:
        lengths = lengths_of(task, tokens.load(config.model, config.task.template_kwargs), [*data.train, *data.test])
    except EvoalignError:  # the run itself reports it
        return None
    return max(config.es.population_size * config.task.asked(len(data.train)), tested), max(lengths)


def work_of(config: Config, task: Task, data: Data, largest: tuple[int, int] | None) -> cards.Work:
    """Return the completions of a generation and their length, from the `largest_batch`."""
    length = None if largest is None else largest[1] + (most_tokens(config, task) or config.sampling.max_tokens)
    return cards.Work(config.es.population_size * config.task.asked(len(data.train)), length)


def memory_lines(config: Config, task: Task, data: Data, specs: Sequence[TensorSpec], layout: Layout) -> list[str]:
    """Return the memory of a run on this machine, and on GPUs of usual sizes if its engine serves from one."""
    largest = largest_batch(config, task, data)
    planned = cards.lines(config, specs, layout, work_of(config, task, data, largest))
    dtype = getattr(torch, config.model.served_dtype(on_gpu=True)) if planned else estimate.served_dtype(config)
    return [*estimate.memory_lines(config, specs, layout, dtype, largest), *planned]


def opening(parts: Parts) -> list[str]:
    """Return the opening lines of a run whose model is loaded, with its step size, engine and data."""
    config, layout = parts.config, parts.layout
    weights = rounding.weights_of_engine(parts.engine, layout)
    return [
        *origin.lines(config.model),
        *of_es(config, parts.task, parts.data, parts.engine.specs(), layout),
        *estimate.step_lines(config, layout),
        *rounding.rounding_lines(config, layout, parts.engine.dtype, weights),
        *([f"engine {parts.facts.engine}: {parts.facts.note}"] if parts.facts.note else []),
        *stop_lines(parts.tokens),
        *parts.settings.lines(),
        *gold_lines(parts.task, parts.data),
        *split_lines(config, parts.task, parts.data, parts.tokens),
        *stopping.lines(config),
    ]


def split_lines(config: Config, task: Task, data: Data, known: Tokens | None = None) -> list[str]:
    """Return the form of the prompts, the prompts that splits share, and what the validation split selects.

    `known` is the tokenizer; None: it is loaded, and what it would say is left out where that fails.
    """
    lines = [form_line(config, task, data.train), *task.notes]
    stop = config.sampling.stop
    lines += known.remarks(typical(task, data), stop) if known is not None else _remarks(config, task, data)
    lines += shared_lines(task, data)
    every, count = config.evaluation.every, len(data.validation)
    if not count:
        return [*lines, NO_VALIDATION] if config.checkpoint.keep_best else lines
    when = f", and after every {every}" if every else ""
    kept = "; the best mean by them is also kept" if every and config.checkpoint.keep_best else ""
    return [*lines, f"validation {count:,} examples, evaluated at the start and at the end{when}{kept}"]


def measuring_line(config: Config, task: Task, data: Data) -> str:
    """Return the numbers of evaluations, their completions, and checkpoints, for a dry run."""
    every, last, drawn = config.evaluation.every, config.es.num_generations - 1, config.evaluation
    times = 2 + (last // every if every else 0)
    draws = len(drawn.seeds) * drawn.samples if drawn.temperature > 0 else 1
    each, saved = (len(data.test) + len(data.validation)) * draws, saving.every(config)
    count = config.checks.placebo
    placebos = "; those of placebos come on top (checks.placebo)" if count is None else ""
    if count:
        placebos = f"; {count} placebos at the end, {count * len(data.test) * draws:,} more"
    return (
        f"evaluations {times:,} of {each:,} {task.scored}, {times * each:,} in all{placebos}; checkpoints "
        f"{1 + (last // saved if saved else 0):,}{', and the best ones' if every and keeps_best(config, data) else ''}"
    )


def _remarks(config: Config, task: Task, data: Data) -> list[str]:
    """Return what the chat template makes of the prompts; nothing where `token_lines` says why it cannot be known."""
    try:
        found = tokens.load(config.model, config.task.template_kwargs)
        return found.remarks(typical(task, data), config.sampling.stop)
    except EvoalignError:
        return []


def form_line(config: Config, task: Task, examples: Sequence[Example]) -> str:
    """Return the form of the prompts, and the setting that decides it."""
    raw, count = sum(isinstance(task.prompt(example), str) for example in examples), len(examples)
    form = config.task.prompt
    setting = "task.prompt is not set: the task's own form" if form is None else f"task.prompt: {form}"
    if form == "chat" and takes_any_form(config.task) and raw < count:
        setting += ", the default where the tokenizer has a chat template; raw gives the model the text alone"
    if raw == count:
        return f"prompts are {task.text_form}, without the model's chat template ({setting})"
    some = f"; {raw:,} of {count:,} are {task.text_form}" if raw else ""
    return f"prompts are messages for the model's chat template{some} ({setting})"


def token_lines(config: Config, task: Task, data: Data, longest: int | None = None) -> list[str]:
    """Return what is wrong with the tokens before the model is loaded: prompts that do not fit, or no stop token."""
    try:
        found = tokens.load(config.model, config.task.template_kwargs)
        prompts.check(config, found, task, data, longest)
    except EvoalignError as error:
        return [f"would be refused: {error}"]
    return stop_lines(found)


def stop_lines(found: Tokens) -> list[str]:
    """Return a warning if the model has no stop token."""
    if found.stop_ids:
        return []
    return [
        "warning: the model's files name no stop token, so every completion takes all max_tokens; set eos_token_id in "
        "its generation_config.json"
    ]


def shared_lines(task: Task, data: Data) -> list[str]:
    """Return a warning for each pair of splits that share prompts, with their number."""
    prompts = {split: _prompts(task, data.of(split)) for split in WORDS}
    found: list[str] = []
    for split, other, means in SHARING:
        count = int(np.isin(prompts[split], prompts[other]).sum())
        if count:
            total = len(prompts[split])
            found.append(
                f"warning: {count:,} of {total:,} {WORDS[split]} prompts are {WORDS[other]} prompts too; {means}"
            )
    return found


def cut_off_lines(before: Evaluation, config: Config) -> list[str]:
    """Return a warning if most completions of the start are cut off."""
    share, most = before.measures.get("truncated_share", 0.0), config.evaluation.max_tokens
    line = cut_off(share, most, "the start's test completions", "evaluation.max_tokens")
    return [] if line is None else [f"warning: {line}"]


def keeps_best(config: Config, data: Data | None) -> bool:
    """Return whether the best mean on the validation split is kept. `data` None: its splits are not known."""
    return config.checkpoint.keep_best and (data is None or bool(data.validation))


def _prompts(task: Task, examples: Sequence[Example]) -> npt.NDArray[np.int64]:
    """Return Python's 64-bit hash of each prompt: the texts of many rows would fill the memory.

    Two of a million prompts share a hash by chance once in tens of millions of runs.
    """
    return np.fromiter((hash(json.dumps(task.prompt(example))) for example in examples), np.int64, len(examples))


def last_lines(
    run: RunDir, saved: Path, config: Config, task: Task, given: str | None, placebos: Placebos | None = None
) -> list[str]:
    """Return the paths of a run's files, and commands to continue with, which need only the run.

    `given`: what was passed as a Python object, which no command has; `placebos`: those that were measured.
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
    return [*lines, "next steps:", *(f"  {command}" for command in commands(run, config, task, method, given, done))]


def _best(run: RunDir, saved: Path, config: Config) -> dict[str, str]:
    """Return the checkpoint that is best on the validation split, if it is not the last one."""
    best = saving.best_saved(run) if config.checkpoint.keep_best else None
    mark = None if best is None or best == saved else checkpoint.mark_of(best)
    if best is None or mark is None or mark.validation is None:
        return {}
    return {"best": f"{shown(best)} (best checkpoint on the validation split: reward {mark.validation:.4g})"}


def commands(run: RunDir, config: Config, task: Task, method: Method, given: str | None, placebos: int) -> list[str]:
    """Return three commands, and those of the task whose files exist, each with its purpose."""
    path = shlex.quote(str(shown(run.path)))
    own = own_option(shown(run.path), config, outside.EVALUATION_SKIPS)
    samples = config.evaluation.temperature == 0 and task.player != "given"
    sampled = " --samples 4 --temperature 0.7" if samples else " --split train"
    placebo = placebo_command(shown(run.path), config).removeprefix("evoalign ")
    signal = {placebo: "share of the gain that is signal: same noise, shuffled coefficients"}
    asked = {f"eval {path}{own}{sampled}": "the test split, sampled" if "samples" in sampled else "the training split"}
    handed = {f"export {path} --to {shlex.quote(f'{run.path.resolve().name}_export')}": "weights and a model card"}
    looked = {f"journal {path}": "one row per generation"} if method == "es" else {}
    moved = {f"analyze distance {path}": "distance of the weights from the start, by layer"}
    wanted = {} if given is not None else {**(signal if method == "es" and placebos < 20 else {}), **asked}
    found = list({**wanted, **handed, **looked, **moved}.items())[:3]
    found += [
        (command.replace("{run}", path), why)
        for command, why in task.commands.items()
        if all((run.path / file).exists() for file in re.findall(r"{run}/(\S+)", command))
    ]
    width = max(len(command) for command, _ in found)
    return [f"evoalign {command:<{width}}  # {why}" for command, why in found]
