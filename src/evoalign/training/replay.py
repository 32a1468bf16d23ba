# SPDX-License-Identifier: Apache-2.0
"""Rebuild the mean of any generation, or a member of it, from the base model and the journal alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from evoalign.config import Config, ModelConfig, from_dict, from_record, outside
from evoalign.config.outside import REPLAY_SKIPS
from evoalign.engines import weights_hash
from evoalign.engines.base import sampled_places
from evoalign.errors import CheckpointError, ConfigError, JournalError, MachineError, ResumeError, RunExistsError
from evoalign.placebos.counterfactual import Counterfactual, parse
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.directory import saved_folders, saving_places
from evoalign.rundir.journal import Log, Recorded
from evoalign.rundir.method import method_of
from evoalign.setup import Served, serve
from evoalign.training import saving
from evoalign.types import Layout, Member, Plan, Summation

Progress = Callable[[int, int], None]
_PROBED = 1 << 16
"""Number of weights that are compared if the mean cannot be repeated exactly."""
_LAST_BITS = 1e-3
"""Share of the distance moved. Another order of summation differs by far less, another update by more."""


def log_of(run: str | Path) -> Log:
    """Read the journal of a run directory, or a journal file. Raises JournalError."""
    path = Path(run)
    if not path.exists():
        raise JournalError(f"{path} does not exist; give a run directory, or a journal.jsonl")
    if method_of(path) == "grpo":
        raise JournalError(
            f"{path} is a run of GRPO and has no journal: its updates are gradients of the size of the model, not a "
            "few numbers; metrics.jsonl has its steps, and evoalign eval and evoalign export read its checkpoints"
        )
    return journal.read(path / "journal.jsonl" if path.is_dir() else path)


def replay(
    run: str | Path,
    *,
    generation: int | None = None,
    to: str | Path | None = None,
    model: str | None = None,
    progress: Progress | None = None,
    counterfactual: str | None = None,
    seed: int = 0,
) -> str:
    """Rebuild the mean after `generation` generations (None: all), check each hash on the way, and save it.

    `model` replaces the base model's name or folder if that has moved; its weights must be the same. `to` is a new
    folder: a PEFT adapter or a Hugging Face checkpoint. Returns the weights_hash. Raises JournalError for a journal
    that is damaged before that generation, ResumeError if the weights differ, and its subclass MachineError if they
    differ because the journal's bits depend on the machine; that error states the difference.

    `counterfactual` replaces the coefficients: `shuffle` (with `seed`), `flip`, `half`, `member K`, `shaping NAME`; see
    `evoalign.placebos.counterfactual`. Its first step is exact, later ones are conditional on the recorded path. The
    saved weights are marked as counterfactual. Raises ConfigError for an unknown one.
    """
    refuse_taken(to, of=None if counterfactual is None else run)
    log = log_of(run)
    other = None if counterfactual is None else parse(counterfactual, log, seed)
    try:
        with rebuilt(log, generation=generation, model=model, progress=progress, other=other) as (served, mark):
            if to is not None:
                saving.save(served, Path(to), mark, replace=False)
            return mark.weights_hash
    except MachineError as error:
        count = log.sealed if generation is None else generation
        words, share = _deviation(Path(run), log, error.generations, count, model)
        if not 0 < share < _LAST_BITS:
            raise ResumeError(f"{error}; but that is not why: {words}") from error
        raise MachineError(f"{error}; {words}", error.generations) from error


def refuse_taken(to: str | Path | None, *, of: str | Path | None = None) -> None:
    """Raise RunExistsError if the folder to be made exists and is not empty.

    Raises ConfigError if it would be among the checkpoints of run `of`, to which a counterfactual does not belong.
    """
    there = None if to is None else Path(to)
    if there is not None and of is not None and there.resolve().parent in map(Path.resolve, saving_places(Path(of))):
        raise ConfigError(
            f"--to {to} is among the run's checkpoints, where a counterfactual does not belong; choose another folder"
        )
    if there is not None and there.exists() and (there.is_symlink() or not there.is_dir() or any(there.iterdir())):
        raise RunExistsError(f"--to {to} exists and is not empty; choose another folder")


def _deviation(run: Path, log: Log, first: int, count: int, model: str | None) -> tuple[str, float]:
    """Return how far the rebuilt mean is from a checkpoint, in words and as a share of the distance it moved.

    `first` is the first generation that differs. Without a checkpoint from there on, the mean is compared with the
    same updates summed in order.
    """
    saved = _saved(run, log, first, count) if run.is_dir() else None
    count = count if saved is None else saved[1]

    def probed(summation: Summation | None = None) -> tuple[torch.Tensor, torch.Tensor, Layout]:
        """Return weights of the mean at the start and after `count` generations, without checking hashes."""
        with rebuilt(log, generation=0, model=model) as (served, _):
            start = served.engine.probe_weights(_PROBED)
            for recorded in log.generations[:count]:
                update = recorded.update
                served.engine.apply(replace(update, summation=summation or update.summation))
            return start, served.engine.probe_weights(_PROBED), served.layout

    start, here, layout = probed()
    if saved is None:
        there, than = probed("ordered")[1], "the same updates summed in order"
    else:
        state, _ = checkpoint.load(saved[0], layout)
        there = torch.cat([state[name].float().flatten()[at] for name, at in sampled_places(layout, _PROBED)])
        than = f"checkpoint {saved[0].name}"
    apart, moved = (here - there).double(), (here - start).double().norm()
    share = float(apart.norm() / moved) if moved else 0.0
    return (
        f"after {count} generations the weights here are not the run's: of {len(here):,} compared, "
        f"{int((apart != 0).sum()):,} differ from {than}, by at most {float(apart.abs().max()):.2g}; the "
        f"difference is {share:.2g} of the distance moved"
    ), share


def _saved(run: Path, log: Log, first: int, last: int) -> tuple[Path, int] | None:
    """Return the latest intact checkpoint between two generations that belongs to the journal, and its generation."""
    for folder in reversed(saved_folders(run)):
        with suppress(CheckpointError):
            generation = saving.checked(folder, log).generation
            if first <= generation <= last:
                return folder, generation
    return None


@contextmanager
def rebuilt(
    log: Log,
    *,
    generation: int | None = None,
    model: str | ModelConfig | None = None,
    progress: Progress | None = None,
    other: Counterfactual | None = None,
) -> Generator[tuple[Served, Mark]]:
    """Yield an engine at the mean of a generation of the journal, and its mark.

    With `other` coefficients the mark has the hash of the resulting weights.
    """
    log = log.whole(generation)
    count = log.sealed if generation is None else generation
    if not 0 <= count <= log.sealed:
        raise JournalError(f"{log.path} has {log.sealed} whole generations; there is no generation {generation}")
    served = serve(config_of(log, model))
    try:
        saving.check_start(served, log.header)
        found, place, state = log.header.weights_hash, journal.GENESIS, dict[str, float]()
        for done, recorded in enumerate(log.generations[:count], 1):
            if other is None:
                found = saving.apply(served.engine, log, recorded)
            else:
                served.engine.apply(other.update(recorded))
            place, state = recorded.hash, dict(recorded.objective)
            if progress is not None:
                progress(done, count)
        if other is not None:
            found = served.engine.fingerprint()
        shuffled = None if other is None else str(other)
        yield served, Mark(int(count), found, place, objective=state, counterfactual=shuffled)
    finally:
        served.close()


def config_of(log: Log, model: str | ModelConfig | None = None, skip: Sequence[str] = REPLAY_SKIPS) -> Config:
    """Return the config that a journal was made with, as far as it decides the weights.

    Raises ConfigError for a setting outside the sections `skip` that names code or a file (`evoalign.config.outside`):
    the journal may come from an untrusted source. Raises JournalError for an invalid config.
    """
    try:
        recorded = from_record(log.header.config)
        _ = recorded.es  # raises ConfigError if missing
        tree = recorded.model_dump()
    except ConfigError as error:
        wrong = "; ".join(str(error).splitlines())
        raise JournalError(f"{log.path}, line 1 holds an invalid config: {wrong}") from error
    named = ModelConfig(name=model) if isinstance(model, str) else model
    tree["model"] |= {} if named is None else {"name": named.name, "revision": named.revision, "base": named.base}
    tree["model"] |= {"dtype": log.header.dtype}
    tree["engine"] = {}
    if log.header.sums != "ordered" and log.header.device.startswith("cpu"):  # there a library summed the updates
        threads = (log.header.machine or {}).get("threads", "")
        tree["engine"] = {"device": "cpu"} | ({"threads": int(threads)} if threads.isdecimal() else {})
    config = from_dict(tree)
    fix = "say where its model is with --model, or resume the run with its own config"
    outside.refuse(config, log.path, fix, skip=skip if named is None else (*skip, "model"))
    return config


def member_state(served: Served, recorded: Recorded, member: Member) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the member's float32 tensors by the names of the mean, on the CPU.

    The engine's mean must be the one that the generation was drawn around.
    """
    update, layout = recorded.update, served.layout
    plan = Plan(update.generation, update.sigma, update.members)
    moving = {t.name for t in layout.tensors}
    for name, mean in served.engine.state():
        yield name, served.space.perturbed(layout, name, mean, plan, member) if name in moving else mean


def save_member(log: Log, folder: Path, generation: int, member: int, model: str | None = None) -> Mark:
    """Rebuild a member, save it as a mean is saved, and return its mark, whose `weights_hash` is the member's.

    `model` replaces the base model's name or folder if that has moved. Raises ConfigError for a member that does not
    exist, JournalError and ResumeError if the mean cannot be rebuilt.
    """
    found = generation_of(log, generation, member)
    with rebuilt(log, generation=generation, model=model) as (served, place):
        chosen = found.update.members[member]
        own = Mark(int(generation), weights_hash(member_state(served, found, chosen)), place.journal)
        saving.save(served, folder, own, state=lambda: member_state(served, found, chosen))
        return own


def generation_of(log: Log, generation: int, member: int) -> Recorded:
    """Return the record of a member's generation. Raises ConfigError if the member does not exist."""
    count = len(log.generations)
    if not 0 <= generation < count:
        known = f"its generations are 0 to {count - 1}" if count else "it has no generation yet"
        raise ConfigError(f"{log.path} has no members of generation {generation}: {known}")
    found = log.generations[generation]
    if not 0 <= member < (members := len(found.update.members)):
        known = f"its members are 0 to {members - 1}"
        raise ConfigError(f"{log.path} has no member {member} in generation {generation}: {known}")
    return found
