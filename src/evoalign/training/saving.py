# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: when the mean is saved, which checkpoints are kept, and how the mean is restored."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from evoalign import noise, spaces
from evoalign.config import Config
from evoalign.engines import Engine, weights_hash
from evoalign.errors import CheckpointError, MachineError, ResumeError, ScorerAwayError, shown
from evoalign.models.files import WholeModel
from evoalign.models.origin import model_path
from evoalign.rollouts import prompts_hash
from evoalign.rundir import checkpoint
from evoalign.rundir.checkpoint import Mark, State
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.rundir.files import remove_whole
from evoalign.rundir.identity import config_hash, identity, versions
from evoalign.rundir.journal import Header, Log, Recorded
from evoalign.setup import Parts, Served
from evoalign.spaces.lora import bias_name, factor_name, factors_of
from evoalign.tasks import Data, Task
from evoalign.tokens import Tokens
from evoalign.training.inputs import inputs_of
from evoalign.types import Summation

_WAYS = {"library": "by a library's matrix product", "own": "in its space's or its optimizer's own way"}


def header(parts: Parts, given_as: str | None) -> dict[str, Any]:
    """Return the first line of a run's journal. `given_as`: what was passed as a Python object."""
    return {
        **_facts(parts),
        "config": identity(parts.config),
        "config_hash": config_hash(parts.config),
        "data_hash": data_hash(parts.data),
        "given_as": given_as,
        "space": parts.space.name,
        "evolved_parameters": parts.layout.parameters,
        "inputs": inputs_of(parts.config, parts.tokens),
        "machine": machine() | ({"library": parts.facts.library} if parts.facts.library else {}),
        "summation": parts.space.summation,
        **rendered_as(parts.task, parts.data, parts.tokens),
        **scored_by(parts.task),
    }


def rendered_as(task: Task, data: Data, tokens: Tokens) -> dict[str, str]:
    """Return the hash of the prompts as the model reads them, if there are prompts of messages."""
    found = prompts_hash(task, data, tokens)
    return {} if found is None else {"prompts_hash": found}


def scored_by(task: Task) -> dict[str, str]:
    """Return the digest of the models that score, if there are any."""
    try:
        digest = task.scorer_digest()
    except ScorerAwayError as error:
        error.add_note("nothing was begun: then give the same command again")
        raise
    return {} if digest is None else {"scorer_digest": digest}


def machine() -> dict[str, str]:
    """Return what the last bits of a library's results may depend on, apart from its version."""
    return {"capability": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads())}


def _facts(served: Served) -> dict[str, Any]:
    """Return what the weights depend on, apart from the config: the GPU model, or the kind of CPU, among others."""
    device = served.facts.device
    return {
        "versions": versions() | ({"cmaes": version("cmaes")} if served.config.es.optimizer.adapts_noise else {}),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu {platform.machine()}",
        "dtype": served.layout.dtype,
        "noise_table": noise.TABLE_SHA256,
        "tokenizer_hash": served.tokens.fingerprint(),
        "model_hash": served.facts.model_hash,
        "weights_hash": served.engine.fingerprint(),
    }


def data_hash(data: Data) -> str:
    """Return the SHA-256 of the rows of the training, test and, if there is one, validation split."""
    digest = hashlib.sha256()
    for split in (data.train, data.test, *([data.validation] if data.validation else [])):
        for row in split:
            digest.update(json.dumps(dict(row), sort_keys=True, default=repr).encode() + b"\n")
        digest.update(b"\0")
    return digest.hexdigest()


def machine_differs(recorded: Header) -> bool:
    """Return whether a journal records a machine on which a library may sum in another order than here."""
    here = machine()
    return any((recorded.machine or here).get(name, value) != value for name, value in here.items())


def every(config: Config, summation: Summation = "ordered") -> int:
    """Return the generations between checkpoints; 0: none. Default 10 if the journal replays on this machine only."""
    set_ = config.checkpoint.every
    if set_ is not None:
        return set_
    return spaces.create(config).default_save_every or (0 if summation == "ordered" else 10)


def save(
    served: Served, folder: Path, mark: Mark, *, replace: bool = True, state: Callable[[], State] | None = None
) -> Path:
    """Save the engine's mean, or another `state` of the same tensors, in the format of the space."""
    optimizer = () if state is not None else served.engine.optimizer_state()
    write(served, folder, mark, state or served.engine.state, optimizer, whole_of(served), replace=replace)
    return folder


def whole_of(served: Served) -> WholeModel | None:
    """Return what writes the model of a space that evolves it; None for an adapter."""
    if not served.space.evolves_model:
        return None
    model = served.config.model
    return WholeModel(model_path(model), model.revision, served.layout.torch_dtype)


def write(
    served: Served,
    folder: Path,
    mark: Mark,
    state: Callable[[], State],
    optimizer: State,
    whole: WholeModel | None,
    *,
    replace: bool = True,
) -> None:
    """Write a mean and the optimizer's state. The engine is not used, so that a thread may write copies of them."""
    base, layout = model_path(served.config.model), served.layout
    own = {t.name for t in (*layout.tensors, *layout.frozen)}
    of_peft = {factor_name(m, f) for m in layout.modules for f in "AB"}
    is_adapter = own == of_peft | {bias_name(m) for m in layout.modules if served.space.has_bias}
    factors = None if whole is not None or is_adapter else partial(factors_of, served.space, layout)
    checkpoint.save(
        folder, mark, served.config, layout, base, state, optimizer, whole=whole, factors=factors, replace=replace
    )


def retain(run: RunDir, config: Config) -> None:
    """Delete checkpoints except the latest `keep_last` and the best one."""
    best = set[Path | None]()
    if config.checkpoint.keep_best:  # an earlier release kept the best on the test split, which is never deleted
        best = {best_saved(run), _highest(run, lambda mark: mark.reward)}
    for folder in saved_folders(run.path)[: -config.checkpoint.keep_last]:
        if folder not in best:
            remove_whole(folder)


def best_saved(run: RunDir) -> Path | None:
    """Return the earliest checkpoint with the best validation reward; None if none was evaluated."""
    return _highest(run, lambda mark: mark.validation)


def _highest(run: RunDir, value: Callable[[Mark], float | None]) -> Path | None:
    marks = [(folder, checkpoint.mark_of(folder)) for folder in saved_folders(run.path)]
    known = [(folder, found) for folder, mark in marks if mark is not None and (found := value(mark)) is not None]
    return max(known, key=lambda pair: pair[1])[0] if known else None


def check_start(served: Served, recorded: Header) -> None:
    """Raise ResumeError if the model, tokenizer or noise differs from those in a journal's header."""
    ours = _facts(served)
    causes = {
        "noise_table": "another noise table: another release of evoalign",
        "dtype": f"the model is served in {ours['dtype']}: set model.dtype: {recorded.dtype}",
        "model_hash": f"other base weights: model.name {served.config.model.name} is not the model of the run",
        "tokenizer_hash": "the tokenizer or chat template differs from the run's",
        "weights_hash": "another starting mean: the settings of the space differ",
    }
    if any(s.kind == "expert" for s in served.engine.specs()):
        causes["model_hash"] += ", or engine vllm or a server served it, whose runs of mixtures are not rebuilt"
        causes["weights_hash"] += ", or an earlier release began the run, in which experts did not evolve separately"
    if any(".experts." in s.name for s in served.engine.specs()):
        causes["weights_hash"] += ", or engine.population, which decides on vllm whether experts evolve"
    for name, cause in causes.items():
        if getattr(recorded, name) != ours[name]:
            raise ResumeError(f"{cause} ({name} is {ours[name][:12]} here and {getattr(recorded, name)[:12]} there)")


def check_data(run: RunDir, task: Task, data: Data, recorded: str | None) -> None:
    """Raise ResumeError if the rows of the splits differ from those that a run began with."""
    if recorded != data_hash(data):
        raise ResumeError(
            f"{run.path} was trained on other data than task {task.name} has now; put the files back as they were, or "
            "begin another run"
        )


def check_prompts(run: RunDir, task: Task, data: Data, tokens: Tokens, recorded: str | None) -> None:
    """Raise ResumeError if prompts are rendered otherwise than when a run began. `recorded` None: it is not known."""
    found = None if recorded is None else prompts_hash(task, data, tokens)
    if found != recorded:
        now = found[:12] if found else "none, as they are text"
        raise ResumeError(
            f"{run.path} was trained on other prompts than its task and chat template make now (prompts_hash "
            f"{shown(recorded)[1:13]}, and now {now}); put the task's code back, use the release of transformers of "
            "the run (manifest.json), set what the template reads in task.template_kwargs, or begin another run; a "
            "checkpoint can be evaluated with --config nevertheless"
        )


def check_scorer(run: RunDir, task: Task, recorded: str | None) -> None:
    """Raise ResumeError if other models score than when a run began. `recorded` None: an earlier release began it."""
    if recorded is None:
        return
    found = task.scorer_digest()
    if found != recorded:
        now = "none" if found is None else f"{found[:12]}..."
        raise ResumeError(
            f"{run.path} was scored by other models than those of its scorer, or with another template, max_tokens or "
            f"dtype (digest {recorded[:12]}..., and now {now}); put the files back, start the service with the "
            "earlier ones, set scorer.dtype (auto is bfloat16 on a GPU and float32 on a CPU), or begin another run"
        )


def restore(
    served: Served,
    run: RunDir,
    log: Log,
    seal: Callable[[int, str], None],
    tell: Callable[[str], None],
    applied: Callable[[Recorded], None] = lambda recorded: None,
) -> None:
    """Bring the engine from the start to the end of the journal: the latest intact checkpoint, then the updates.

    An update that was recorded but not sealed is applied and sealed. Calls `applied` after each update. Raises
    ResumeError.
    """
    done = _from_checkpoint(served, run, log, tell)
    for recorded in log.generations[done:]:
        found = apply(served.engine, log, recorded)
        if recorded.weights_hash is None:
            seal(recorded.update.index, found)
        applied(recorded)


def apply(engine: Engine, log: Log, recorded: Recorded) -> str:
    """Apply one recorded update and return its weights_hash. Raises ResumeError if that is not the recorded one."""
    engine.apply(recorded.update)
    found = engine.fingerprint()
    if recorded.weights_hash not in (None, found):
        where = f"{log.path}: generation {recorded.update.generation + 1} has weights_hash {found[:12]} here, and "
        where += f"{str(recorded.weights_hash)[:12]} in the journal"
        if log.header.sums == "ordered":
            raise ResumeError(f"{where}, though it should not depend on the machine; {elsewhere(log.header)}")
        raise MachineError(
            f"{where}: its updates were added {_WAYS[log.header.sums]}, whose last bits depend on the machine; "
            f"{elsewhere(log.header)}",
            recorded.update.index + 1,
        )
    return found


def versions_here(recorded: Header) -> dict[str, str]:
    """Return the versions here of the packages that a journal names."""
    return versions() | {name: version(name) for name in recorded.versions.keys() & {"cmaes"}}


def elsewhere(recorded: Header) -> str:
    """Return in words how the machine and versions of a journal differ from those here."""
    ours = versions_here(recorded)
    odd = [f"{k} {v} (here {ours.get(k, 'none')})" for k, v in recorded.versions.items() if ours.get(k) != v]
    there, here = recorded.machine or {}, machine()
    what = [f"{name} {there[name]} (here {value})" for name, value in here.items() if there.get(name, value) != value]
    if recorded.machine is None and recorded.sums != "ordered":
        what = [f"of unknown capability (here {here['capability']}, {here['threads']} threads)"]
    made = f"it was made on {recorded.device}{', '.join(['', *what])}"
    return f"{made} with {', '.join(odd)}; use those versions" if odd else f"{made} with the same versions"


def _from_checkpoint(served: Served, run: RunDir, log: Log, tell: Callable[[str], None]) -> int:
    """Load the latest intact checkpoint that belongs to this journal, and return its generation; 0 if there is none."""
    for folder in reversed(saved_folders(run.path)):
        try:
            mark = checked(folder, log)
            state, optimizer = checkpoint.load(folder, served.layout)
            if weights_hash((name, tensor.float()) for name, tensor in state.items()) != mark.weights_hash:
                raise CheckpointError(f"the weights in {folder} do not have the recorded weights_hash")
            served.engine.load(state, optimizer)
        except CheckpointError as error:
            count = 1
            while (aside := folder.with_name(f"{folder.name}.unusable{count if count > 1 else ''}")).exists():
                count += 1
            folder.rename(aside)  # so that it is not loaded
            tell(f"warning: {error}; set aside as {aside.name}, the journal rebuilds the weights")
            continue
        return mark.generation
    return 0


def checked(folder: Path, log: Log) -> Mark:
    """Return the mark of a checkpoint. Raises CheckpointError if it is damaged or not of this journal."""
    mark = checkpoint.verify(folder)
    if mark.counterfactual:
        raise CheckpointError(f"{folder} holds a counterfactual ({mark.counterfactual}), and not a mean of the run")
    sealed = log.generations[: log.sealed]
    place = sealed[mark.generation - 1] if 0 < mark.generation <= len(sealed) else None
    ours = None if place is None else (place.hash, place.weights_hash, place.objective)
    if ours != (mark.journal, mark.weights_hash, mark.objective):
        raise CheckpointError(f"{folder} is not of this journal")
    return mark
