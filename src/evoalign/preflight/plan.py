# SPDX-License-Identifier: Apache-2.0
"""Checks of a config that load no weights, from its settings to the room on the disk."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from heapq import nlargest
from pathlib import Path
from typing import Any, BinaryIO

import torch

from evoalign import setup, spaces, tokens, tracking
from evoalign.baselines import settings
from evoalign.config import Config
from evoalign.cost import estimate
from evoalign.cost.estimate import gib
from evoalign.cost.share import share_lines
from evoalign.engines.specs import specs_of_config
from evoalign.errors import DataError, RunExistsError, shown
from evoalign.models.origin import model_config
from evoalign.preflight.case import NEEDS_FLAG, Case, Finding, need
from evoalign.rollouts import EARLY
from evoalign.rundir.directory import RunDir
from evoalign.rundir.method import COMMANDS, Method
from evoalign.tasks import Task
from evoalign.tokens import Tokens
from evoalign.training import heading, saving
from evoalign.types import Example, Messages, Prompt, text_of
from evoalign.version import install

PROBE_BYTES = 1 << 20
LONGEST = 1000
"""Prompts, of many, that are encoded to find the one with the most tokens: those with the most characters."""
OPTIMIZER_SLOTS = {"sgd": 0, "momentum": 1, "adam": 2}


def check_config(case: Case) -> Finding:
    """The step that the settings come to, and what of them is unlikely to be meant."""
    config, es = case.config, case.config.es
    lines = estimate.step_lines(config, None)
    detail = (
        f"space {config.space.name}, task {config.task.name}, model {config.model.name}, engine {config.engine.name}, "
        f"{es.num_generations} generations of {es.population_size} members; {lines[0]}"
    )
    warnings = [line.removeprefix("warning: ") for line in lines if line.startswith("warning")]
    return Finding("config", "warning" if warnings else "ok", detail, " ".join(warnings))


def check_trackers(case: Case) -> Finding:
    """Whether the trackers are there and would start."""
    wanted = case.config.tracking.backends
    if lacking := tracking.missing(case.config):
        fix = f"{install(*lacking)}, or take them out of tracking.backends"
        return Finding("trackers", "failed", f"not installed: {', '.join(lacking)}", fix)
    said = [tracking.load(name).ready() for name in wanted]
    worst = max(said, key=lambda r: ("ok", "warning", "failed").index(r.status), default=tracking.Ready())
    shown = "; ".join([", ".join(wanted) or "none but metrics.jsonl", *(r.detail for r in said if r.detail)])
    return Finding("trackers", worst.status, shown, worst.fix)


def check_output(case: Case) -> Finding:
    """Really write, for permissions do not tell of a full disk or a quota."""
    path = Path(case.config.output_dir)
    there = _existing(path)
    if not there.is_dir():
        return Finding("output", "failed", f"output_dir {path}: {there} is a file", "choose another output_dir")
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".evoalign-doctor-") as file:
            write_probe(file)
    except OSError as error:
        detail = f"output_dir {path}: {gib(PROBE_BYTES)} cannot be written into {there}: {error.strerror}"
        return Finding("output", "failed", detail, "free space, raise the quota, or choose another output_dir")
    return _taken(RunDir(path), case.method) or Finding("output", "ok", f"{path} can be written")


def _taken(run: RunDir, method: Method) -> Finding | None:
    """What `train` or `grpo` says to what is there: a run needs a flag, and all else is refused."""
    try:
        run.refuse(overwrite=True)
    except RunExistsError as error:
        return Finding("output", "failed", str(error))
    try:
        run.refuse(overwrite=False)
    except RunExistsError as error:
        return Finding("output", "warning", str(error), f"{COMMANDS[method]} {NEEDS_FLAG}")
    return None


def write_probe(file: BinaryIO | Any) -> None:
    """Write as much as a small checkpoint and wait until it is on the disk. Raises OSError."""
    file.write(os.urandom(PROBE_BYTES))  # random, for a file system may compress
    file.flush()
    os.fsync(file.fileno())


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def check_task(case: Case) -> Finding:
    """The task and its rows; a warning where splits share prompts."""
    case.task, case.data = setup.task_and_data(case.config, None, None)
    train, test, batch = len(case.data.train), len(case.data.test), case.config.task.batch_size
    validation = f", {len(case.data.validation)} validation" if case.data.validation else ""
    detail = f"{case.task.name}: {train} training{validation} and {test} test examples"
    detail += f", {min(batch or train, train)} a generation" if case.method == "es" else ""
    shared = [line.removeprefix("warning: ") for line in heading.shared_lines(case.task, case.data)]
    return Finding("task", "warning" if shared else "ok", detail, ". ".join(shared))


def check_gold(case: Case) -> Finding:
    """A warning, as in training: published data has rows whose gold answer falls short."""
    task, examples = need(case.task, "task"), _examples(case)
    missing = sum(task.gold(task.handed(example)) is None for example in examples)
    told = f"{missing} of {len(examples)} examples have no gold answer" if missing else f"all {len(examples)} have one"
    try:
        task.self_check(examples)
    except DataError as error:
        return Finding("gold answers", "warning", str(error))
    return Finding("gold answers", "ok", told)


def _examples(case: Case) -> Sequence[Example]:
    return need(case.data, "task").all


def check_tokenizer(case: Case) -> Finding:
    """The tokenizer, and what it stops at."""
    case.tokens = tokens.load(case.config.model)
    tokenizer, stops = case.tokens.tokenizer, case.tokens.stop_ids
    named = [repr(str(tokenizer.convert_ids_to_tokens(i))) for i in stops]
    detail = f"{len(tokenizer):,} tokens, stops at {', '.join(named) or 'none'}"
    if not stops:
        fix = "completions always run to max_tokens; set eos_token in the model's tokenizer_config.json"
        return Finding("tokenizer", "warning", detail, fix)
    return Finding("tokenizer", "ok", detail)


def check_chat_template(case: Case) -> Finding:
    """Whether prompts of messages can be turned into text."""
    task, tokens_ = need(case.task, "task"), need(case.tokens, "tokenizer")
    first, count = None, 0
    for prompt in map(task.prompt, _examples(case)):
        if not isinstance(prompt, str):
            first, count = first or prompt, count + 1
    if first is None:
        return Finding("chat template", "ok", f"not needed: the prompts are {task.text_form}")
    if not tokens_.tokenizer.chat_template:
        told = f"{count} prompts are messages and the tokenizer has no chat template"
        detail = f"{told}: the model would read the bare text {text_of(first)[:60]!r}"
        fix = "set task.prompt: raw, or choose a model that was trained to chat"
        return Finding("chat template", "failed", detail, fix)
    tokens_.encode(first)
    between = _between(tokens_, first)
    if between:
        detail = f"the template puts {shown(between)} between the assistant's turn and the answer that the task begins"
        fix = "the model would go on with another text than the task's; set task.prompt: chat, or take another model"
        return Finding("chat template", "warning", detail, fix)
    return Finding("chat template", "ok", f"turns {count} prompts of messages into text")


def _between(tokens_: Tokens, chat: Messages) -> str:
    """What a template writes between the beginning of the assistant's turn and a last message that begins its answer.

    Templates of models that think, such as Qwen3's, put an empty block of thoughts there.
    """
    if chat[-1]["role"] != "assistant":
        return ""
    turn, opened = (str(tokens_.tokenizer.decode(list(tokens_.encode(c)))) for c in (chat[:-1], chat))
    inside = opened.removeprefix(turn)
    return inside.removesuffix(chat[-1]["content"]) if inside != chat[-1]["content"] else ""


def check_lengths(case: Case) -> Finding:
    """Whether the longest prompt and a whole completion fit the model."""
    task, tokens_ = need(case.task, "task"), need(case.tokens, "tokenizer")
    longest = max(len(tokens_.encode(prompt)) for prompt in _longest(task, _examples(case)))
    most, setting = case.config.evaluation.max_tokens, "evaluation.max_tokens"
    if case.config.sampling.max_tokens > most:
        most, setting = case.config.sampling.max_tokens, "sampling.max_tokens"
    if case.method == "grpo" and settings.longest(case.config) > most:
        most, setting = settings.longest(case.config), "grpo.max_completion_length"
    limit, whose = _limit(case.config)
    detail = f"longest prompt {longest} tokens and {setting} {most}"
    if limit is not None and longest + most > limit:
        fix = f"lower {setting}, or shorten the prompts"
        return Finding("prompt length", "failed", f"{detail} exceed {whose}", fix)
    return Finding("prompt length", "ok", f"{detail} fit {whose}")


def _longest(task: Task, examples: Sequence[Example]) -> Iterable[Prompt]:
    """All prompts, or of many those with the most characters: to encode a million takes minutes."""
    prompts = map(task.prompt, examples)
    if len(examples) <= EARLY:
        return prompts
    return nlargest(LONGEST, prompts, key=lambda prompt: len(text_of(prompt)))


def _limit(config: Config) -> tuple[int | None, str]:
    """How long a prompt and its completion may be together, and what says so."""
    text = model_config(config.model).get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    own = config.engine.limit()
    if own is not None and (limit is None or own[1] < limit):
        return own[1], f"{own[0]} {own[1]}"
    return limit, f"the model's {limit or 'unbounded'} positions"


def check_targets(case: Case) -> Finding:
    """What evolves; an unknown layer or module is an error that names those of the model."""
    config = case.config
    specs = specs_of_config(config)
    space = spaces.create(config)
    case.planned = setup.layout_of(space, specs, estimate.served_dtype(config))
    case.specs = specs
    modules = sorted({t.module.removesuffix(".weight").rsplit(".", 1)[-1] for t in case.planned.tensors})
    shown = ", ".join(modules[:8]) + (" ..." if len(modules) > 8 else "")
    share, *warnings = share_lines(config, specs, case.planned)
    detail = f"{case.planned.parameters:,} numbers in {len(case.planned.tensors)} tensors evolve: {shown}"
    detail = f"{detail}; {share.partition(':')[0]}"
    if warnings:
        said, _, fix = warnings[0].removeprefix("warning: ").rpartition("; ")
        return Finding("targets", "warning", f"{detail}; {said}", fix)
    return Finding("targets", "ok", detail)


def check_memory(case: Case) -> Finding:
    """Weights, mean and the cache of a chunk against what is free."""
    config, specs, layout = case.config, need(case.specs, "targets"), need(case.planned, "targets")
    wanted = estimate.memory(config, specs, layout, estimate.served_dtype(config))
    free = free_memory(config)
    own, spare = wanted.own, None if free is None else free - wanted.kept
    detail = f"{gib(wanted.kept)} for weights and mean, {own.bound} {gib(own.cache)} for the cache and logits"
    if free is None or spare is None:
        return Finding("memory", "ok", f"{detail}; how much is free is not known")
    detail = f"{detail}; {gib(free)} free"
    if spare < 0:
        case.fits = False  # to load it may have the whole process killed, and the verdict with it
        fix = "choose space lora, model.dtype bfloat16 or a smaller model"
        return Finding("memory", "failed", detail, ", ".join(filter(None, (config.engine.lighter, fix))))
    if own.cache > spare:
        most = f"set {own.setting} to at most {0.8 * spare / 2**30:.2g}"
        return Finding("memory", "warning", detail, most if own.setting else config.engine.smaller(config))
    return Finding("memory", "ok", detail)


def free_memory(config: Config) -> int | None:
    """Bytes free where the engine will serve, on all GPUs that it splits the model over."""
    if not estimate.on_gpu(config):
        return _free_on_host()
    if not torch.cuda.is_available():
        return None
    engine = config.engine
    if engine.devices > 1:
        used = min(engine.devices, torch.cuda.device_count())
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(used))
    return torch.cuda.mem_get_info("cuda" if engine.where == "auto" else engine.where)[0]


def _free_on_host() -> int | None:
    """What Linux calls available, or less where a control group allows less. None elsewhere."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    free = int(found[1]) * 1024 if found else None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["active_file"]) - int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # no limit, which is written "max", or no such group
        return free
    return limit - used if free is None else min(free, limit - used)


def check_disk(case: Case) -> Finding:
    """Room for the checkpoints that a run keeps at once, and one more while it is written."""
    config, specs, layout = case.config, need(case.specs, "targets"), need(case.planned, "targets")
    slots, dtype = OPTIMIZER_SLOTS[config.es.optimizer.name], estimate.served_dtype(config)
    size = spaces.create(config).checkpoint_bytes(specs, layout, dtype, slots)
    kept = config.checkpoint.keep_last + heading.keeps_best(config, case.data) if saving.every(config) else 1
    wanted = size * (kept + 1)
    return room_on_disk(config, wanted, f"{kept + 1} checkpoints of {gib(size)}")


def room_on_disk(config: Config, wanted: int, what: str) -> Finding:
    """Whether so many bytes are free where output_dir is or will be."""
    there = _existing(Path(config.output_dir))
    free = shutil.disk_usage(there).free
    detail = f"{gib(wanted)} for {what}; {gib(free)} free in {there}"
    if wanted > free:
        fix = "free space, lower checkpoint.keep_last, or choose another output_dir"
        return Finding("disk", "failed", detail, fix)
    return Finding("disk", "ok", detail)
