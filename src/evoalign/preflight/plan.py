# SPDX-License-Identifier: Apache-2.0
"""Checks of `evoalign doctor` that load no weights, and the findings and loaded parts that all checks share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import torch

from evoalign import optimizer, setup, shaping, spaces, tokens, tracking
from evoalign.baselines import planning, settings
from evoalign.checks import prompts
from evoalign.config import Config
from evoalign.cost import budget, cards, estimate
from evoalign.cost.estimate import gib, share_lines
from evoalign.engines import Engine
from evoalign.engines.gpu import for_tensors
from evoalign.engines.specs import specs_of_config
from evoalign.errors import ConfigError, DataError, EvoalignError, RunExistsError
from evoalign.rollouts import typical
from evoalign.rundir.directory import RunDir
from evoalign.rundir.identity import versions
from evoalign.rundir.method import COMMANDS, Method
from evoalign.spaces import Space
from evoalign.tasks import Data, Task
from evoalign.tokens import Tokens
from evoalign.training import heading, saving
from evoalign.training.session import first_line
from evoalign.types import Facts, Layout, TensorSpec
from evoalign.version import install

PROBE_BYTES = 1 << 20
OPTIMIZER_SLOTS = {"sgd": 0, "momentum": 1, "adam": 2, "sep_cma": 8}
Status = Literal["ok", "warning", "failed", "skipped"]
NEEDS_FLAG = "needs --resume or --overwrite"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `fix` says what to do, unless `detail` does."""

    name: str
    status: Status
    detail: str
    fix: str = ""


class SkippedError(Exception):
    """A check needs the result of an earlier check, named here, which failed."""


class IdleError(Exception):
    """A check does not apply to this config, for the reason given here."""


class Case:
    """A config, by default of the shipped model, and what its checks have loaded so far; None if not reached."""

    def __init__(self, config: Config | None) -> None:
        self.config = config or Config()
        only_grpo = self.config.es_ is None and "grpo" in self.config.model_fields_set
        self.method: Method = "grpo" if only_grpo else "es"
        self.task: Task | None = None
        self.data: Data | None = None
        self.tokens: Tokens | None = None
        self.specs: Sequence[TensorSpec] | None = None
        self.planned: Layout | None = None
        self.engine: Engine | None = None
        self.fits = self.renders = True
        self.served: tuple[Space, Layout, Facts] | None = None

    def close(self) -> None:
        """Free the model and end the task's worker."""
        if self.engine is not None:
            self.engine.close()
        if self.task is not None:
            self.task.close()


T = TypeVar("T")


def need(value: T | None, what: str) -> T:
    """Return the result of the earlier check `what`. Raises SkippedError if there is none."""
    if value is None:
        raise SkippedError(what)
    return value


def run_check(name: str, check: Callable[[], Finding], smaller: str = "end what else uses it") -> Finding:
    """Run a check and turn errors into findings. `smaller` says what to do if memory runs out."""
    try:
        return check()
    except SkippedError as missing:
        return Finding(name, "skipped", f"needs the check {missing}, which failed")
    except IdleError as reason:
        return Finding(name, "skipped", str(reason))
    except torch.OutOfMemoryError as error:
        return Finding(name, "failed", first_line(error), f"{smaller}; or choose space lora or a smaller model")
    except EvoalignError as error:  # its message says how to fix it
        return Finding(name, "failed", str(error))
    except SystemExit as end:
        fix = "the code of the task, space or reward ends the process; take its sys.exit out"
        return Finding(name, "failed", f"SystemExit: {end}", fix)
    except Exception as error:  # of a library, or of a custom task, space or reward
        return Finding(name, "failed", f"{type(error).__name__}: {first_line(error)}")


def check_config(case: Case) -> Finding:
    """Report the step size that follows from the settings, and settings that are unlikely to be intended."""
    config = case.config
    if case.method == "grpo":
        if config.grpo.samples_members:
            _ = config.es  # raises ConfigError if missing: members come from the sections es and space
        lines = planning.step_lines(config)
        what = f"{config.grpo.title}, task {config.task.name}, model {config.model.name}"
    else:
        shaping.load(config.es.shaping)
        lines = estimate.step_lines(config, None)
        what = (
            f"space {config.space.name}, task {config.task.name}, model {config.model.name}, engine "
            f"{config.engine.name}, {config.es.num_generations} generations of {config.es.population_size} members"
        )
    warnings = [line.removeprefix("warning: ") for line in lines if line.startswith("warning")]
    return Finding("config", "warning" if warnings else "ok", f"{what}; {lines[0]}", " ".join(warnings))


def check_trl(case: Case) -> Finding:
    """Check that TRL is installed and knows the settings that are passed to it."""
    if not tracking.is_installed("trl"):
        return Finding("trl", "failed", "GRPO needs the extra grpo", install("grpo"))
    from evoalign.baselines.train import trainer_of
    from evoalign.baselines.trainer import check_release

    check_release()
    known = settings.fields_of(trainer_of(case.config).arguments_class)
    on_cpu = not estimate.on_gpu(case.config)
    settings.arguments(case.config, Path("trainer"), on_cpu=on_cpu, known=known)
    return Finding("trl", "ok", f"TRL {versions('grpo')['trl']} knows all its settings and has what evoalign uses")


def check_round(case: Case) -> Finding:
    """Check that prompts and completions per step divide evenly, and that the objective suits GRPO."""
    data, grpo = need(case.data, "task"), case.config.grpo
    settings.check_objective(case.config, need(case.task, "task").objective())
    settings.check_prompts(case.config, len(data.train))
    size = settings.round_size(grpo)
    return Finding("round", "ok", f"{size} completions of {size // grpo.num_generations} of {len(data.train)} prompts")


def check_trackers(case: Case) -> Finding:
    """Check that the trackers are installed and ready."""
    wanted = case.config.tracking.backends
    if lacking := tracking.missing(case.config):
        fix = f"{install(*lacking)}, or take them out of tracking.backends"
        return Finding("trackers", "failed", f"not installed: {', '.join(lacking)}", fix)
    found = [tracking.load(name).ready() for name in wanted]
    worst = max(found, key=lambda r: ("ok", "warning", "failed").index(r.status), default=tracking.Ready())
    shown = "; ".join([", ".join(wanted) or "none but metrics.jsonl", *(r.detail for r in found if r.detail)])
    return Finding("trackers", worst.status, shown, worst.fix)


def check_output(case: Case) -> Finding:
    """Write a file, since permissions do not show a full disk or a quota."""
    path = Path(case.config.output_dir)
    folder = _existing(path)
    if not folder.is_dir():
        return Finding("output", "failed", f"output_dir {path}: {folder} is a file", "choose another output_dir")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".evoalign-doctor-") as file:
            write_probe(file)
    except OSError as error:
        detail = f"output_dir {path}: {gib(PROBE_BYTES)} cannot be written into {folder}: {error.strerror}"
        return Finding("output", "failed", detail, "free space, raise the quota, or choose another output_dir")
    for overwrite in (True, False):  # a run needs a flag, anything else is refused
        try:
            RunDir(path).refuse(overwrite=overwrite)
        except RunExistsError as error:
            flag = "" if overwrite else f"{COMMANDS[case.method]} {NEEDS_FLAG}"
            return Finding("output", "failed" if overwrite else "warning", str(error), flag)
    return Finding("output", "ok", f"{path} can be written")


def write_probe(file: BinaryIO | Any) -> None:
    """Write the size of a small checkpoint and flush it to the disk. Raises OSError."""
    file.write(os.urandom(PROBE_BYTES))  # random: a file system may compress
    file.flush()
    os.fsync(file.fileno())


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def check_task(case: Case) -> Finding:
    """Load the task and its rows. Warns if splits share prompts."""
    case.config = setup.with_form(case.config)
    case.task, case.data = setup.task_and_data(case.config, None, None)
    train, test, batch = len(case.data.train), len(case.data.test), case.config.task.batch_size
    validation = f", {len(case.data.validation)} validation" if case.data.validation else ""
    file = f" ({Path(case.config.task.test_data).name})" if case.config.task.test_data else ""
    detail = f"{case.task.name}: {train} training{validation} and {test} test examples{file}"
    detail += f", {min(batch or train, train)} a generation" if case.method == "es" else ""
    shared = [line.removeprefix("warning: ") for line in heading.shared_lines(case.task, case.data)]
    return Finding("task", "warning" if shared else "ok", detail, ". ".join(shared))


def check_gold(case: Case) -> Finding:
    """Check that gold answers earn the maximum. Only a warning: published data has rows where they do not."""
    task, examples = need(case.task, "task"), need(case.data, "task").all
    missing = sum(task.gold(task.handed(example)) is None for example in examples)
    detail = (
        f"{missing} of {len(examples)} examples have no gold answer" if missing else f"all {len(examples)} have one"
    )
    try:
        task.self_check(examples)
    except DataError as error:
        return Finding("gold answers", "warning", str(error))
    return Finding("gold answers", "ok", detail)


def check_tokenizer(case: Case) -> Finding:
    """Load the tokenizer and report its stop tokens."""
    case.tokens = tokens.load(case.config.model, case.config.task.template_kwargs)
    tokenizer, stops = case.tokens.tokenizer, case.tokens.stop_ids
    named = [repr(str(tokenizer.convert_ids_to_tokens(i))) for i in stops]
    detail = f"{len(tokenizer):,} tokens, stops at {', '.join(named) or 'none'}"
    if not stops:
        fix = "completions always reach max_tokens; set eos_token in the model's tokenizer_config.json"
        return Finding("tokenizer", "warning", detail, fix)
    return Finding("tokenizer", "ok", detail)


def check_chat_template(case: Case) -> Finding:
    """Report the form of the prompts, and check what the chat template makes of messages."""
    task, data, tokens_ = need(case.task, "task"), need(case.data, "task"), need(case.tokens, "tokenizer")
    detail = heading.form_line(case.config, task, data.all)
    warnings = list[str]()
    case.renders = False
    lines = tokens_.remarks(typical(task, data), case.config.sampling.stop)
    case.renders = True
    for line in lines:
        kind, _, text = line.partition(": ")
        if kind == "warning":
            warnings.append(text)
        else:
            detail += f"; {text}"
    if warnings:
        problem, _, fix = "; ".join(warnings).rpartition("; ")
        return Finding("chat template", "warning", f"{detail}; {problem}", fix)
    return Finding("chat template", "ok", detail)


def check_lengths(case: Case) -> Finding:
    """Check that the model has all tokens of the prompts, and room for the longest with its completion."""
    task, tokens_, data = need(case.task, "task"), need(case.tokens, "tokenizer"), need(case.data, "task")
    need(case.renders or None, "chat template")
    longest = settings.longest(case.config) if case.method == "grpo" else None
    try:
        return Finding("prompt length", "ok", prompts.check(case.config, tokens_, task, data, longest))
    except ConfigError as error:
        return Finding("prompt length", "failed", str(error))


def check_targets(case: Case) -> Finding:
    """Report what evolves or is trained. An unknown layer or module is an error that names those of the model."""
    config, specs = case.config, specs_of_config(case.config)
    if case.method == "grpo":
        count = planning.trained(config, specs)
        case.specs = specs
        return Finding("targets", "ok", f"model of {planning.parameters(specs):,} numbers, {count:,} are trained")
    case.planned = setup.layout_of(spaces.create(config), specs, estimate.served_dtype(config))
    if config.es_ is not None:
        optimizer.create(config.es, case.planned)  # raises ConfigError if it cannot evolve this layout
    case.specs = specs
    modules = sorted({m.removesuffix(".weight").rsplit(".", 1)[-1] for m in case.planned.modules})
    shown = ", ".join(modules[:8]) + (" ..." if len(modules) > 8 else "")
    share, *warnings = share_lines(config, specs, case.planned)
    detail = f"{case.planned.parameters:,} numbers in {len(case.planned.tensors)} tensors evolve: {shown}"
    detail = f"{detail}; {share.partition(':')[0]}"
    if warnings:
        problem, _, fix = warnings[0].removeprefix("warning: ").rpartition("; ")
        return Finding("targets", "warning", f"{detail}; {problem}", fix)
    return Finding("targets", "ok", detail)


def check_memory(case: Case) -> Finding:
    """Compare the memory of a run with what is free; GRPO's activations are not included."""
    config, specs, free = case.config, need(case.specs, "targets"), free_memory(case.config)
    own = None
    if case.method == "grpo":
        wanted = planning.memory(config, specs)
        known = "free memory is not known" if free is None else f"{gib(free)} free"
        detail = f"{planning.memory_words(config, wanted)}; {known}"
        fix = "set grpo.tune lora, or choose a smaller model"
    else:
        layout, dtype = need(case.planned, "targets"), estimate.served_dtype(config)
        wanted = estimate.memory(config, specs, layout, dtype)
        own = wanted.own
        detail, fix = estimate.memory_words(wanted, free), estimate.lighter(config, specs, layout, dtype)
        if case.task is not None and case.data is not None:
            work = heading.work_of(config, case.task, case.data, heading.largest_batch(config, case.task, case.data))
            detail += cards.summary(config, specs, layout, work)
    if free is None:
        return Finding("memory", "ok", detail)
    spare = free - wanted.kept
    if spare < 0:
        case.fits = False  # loading may get the whole process killed
        return Finding("memory", "failed", detail, fix)
    if own is not None and own.cache > spare:
        most = f"set {own.setting} to at most {0.8 * spare / 2**30:.2g}"
        return Finding("memory", "warning", detail, most if own.setting else config.engine.smaller(config))
    return Finding("memory", "ok", detail)


def free_memory(config: Config) -> int | None:
    """Return the free bytes where the engine will run, on all GPUs over which it splits the model."""
    if not estimate.on_gpu(config):
        return budget.free_on_host()
    if not torch.cuda.is_available():
        return None
    engine = config.engine
    if engine.devices > 1:
        used = min(engine.devices, torch.cuda.device_count())
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(used))
    free, serving = (
        torch.cuda.mem_get_info("cuda" if engine.where == "auto" else engine.where)[0],
        engine.serving(config),
    )
    return free if serving is None or serving.cap is None else min(free, int(for_tensors(serving.cap)))


def check_disk(case: Case) -> Finding:
    """Check for room for all checkpoints kept at once, and one more while it is written; of GRPO two trainer states."""
    config, specs, state = case.config, need(case.specs, "targets"), 0
    if case.method == "grpo":
        size, state = planning.checkpoint_bytes(config, specs)
        saves = bool(state)
    else:
        layout, dtype = need(case.planned, "targets"), estimate.served_dtype(config)
        slots, saves = (
            OPTIMIZER_SLOTS.get(config.es.optimizer.name, 6 + 2 * layout.parameters),
            bool(saving.every(config)),
        )
        size = spaces.create(config).checkpoint_bytes(specs, layout, dtype, slots)
    kept = config.checkpoint.keep_last + heading.keeps_best(config, case.data) if saves else 1
    wanted, folder = size * (kept + 1) + 2 * state, _existing(Path(config.output_dir))
    free, states = shutil.disk_usage(folder).free, f" and 2 states of the trainer of {gib(state)}" if state else ""
    detail = f"{gib(wanted)} for {kept + 1} checkpoints of {gib(size)}{states}; {gib(free)} free in {folder}"
    if wanted > free:
        fix = "free space, lower checkpoint.keep_last, or choose another output_dir"
        return Finding("disk", "failed", detail, fix)
    return Finding("disk", "ok", detail)
