# SPDX-License-Identifier: Apache-2.0
"""The mean of any generation of a run, from the base model and the journal alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from evoalign.config import Config, ModelConfig, from_dict, outside
from evoalign.config.outside import REPLAY_SKIPS
from evoalign.engines.base import sampled_places
from evoalign.errors import CheckpointError, ConfigError, JournalError, MachineError, ResumeError, RunExistsError
from evoalign.placebos.counterfactual import Counterfactual, parse
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.directory import saved_folders, saving_places
from evoalign.rundir.journal import Header, Log
from evoalign.rundir.method import method_of
from evoalign.setup import Served, serve
from evoalign.training import saving
from evoalign.types import Layout, Summation

Progress = Callable[[int, int], None]
_PROBED = 1 << 16
"""Numbers of the mean that are compared where it cannot be repeated exactly."""
_LAST_BITS = 1e-3
"""Of the distance moved: what sums of another order stay far below, and another update does not."""


def log_of(run: str | Path) -> Log:
    """The journal of a run directory, or a journal file itself. Raises JournalError."""
    path = Path(run)
    if method_of(path) == "grpo":
        raise JournalError(
            f"{path} is a run of GRPO and has no journal: its updates are gradients of the size of the model, not a "
            "few numbers; metrics.jsonl has its steps, and what it saved is for evoalign eval and evoalign export"
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

    `model` takes the place of the base model's name or folder, where that has moved; its weights have to be the same.
    `to` is a new folder: a PEFT adapter or a Hugging Face checkpoint. Returns the weights_hash. Raises JournalError
    for a journal that is damaged before that generation, ResumeError where the weights come out otherwise, and of that
    MachineError where the journal was made in a way whose bits depend on the machine: then it says how far they are.

    `counterfactual` takes other coefficients: `shuffle` (with `seed`), `flip`, `half`, `member K`, `shaping NAME`; see
    `evoalign.placebos.counterfactual`. Its first step is exact, later ones are conditional on the recorded path. What
    is saved then says of itself that it is not the run's own mean. Raises ConfigError for one that cannot be.
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
    """Raise RunExistsError where a folder that is to be made is there, and not empty.

    And ConfigError where it is one of those in which run `of` keeps its own means: a counterfactual is none of them.
    """
    there = None if to is None else Path(to)
    if there is not None and of is not None and there.resolve().parent in map(Path.resolve, saving_places(Path(of))):
        raise ConfigError(f"--to {to} is where the run keeps its own means, not a counterfactual; choose another")
    if there is not None and there.exists() and (there.is_symlink() or not there.is_dir() or any(there.iterdir())):
        raise RunExistsError(f"--to {to} exists and is not empty; choose another folder")


def _deviation(run: Path, log: Log, first: int, count: int, model: str | None) -> tuple[str, float]:
    """How far the mean comes out here from what the run saved, in words and as a share of the distance it moved.

    `first` is the generation that came out otherwise. Where nothing was saved from it on, the share is what the order
    of the sum moves here.
    """
    saved = _saved(run, log, first, count) if run.is_dir() else None
    count = count if saved is None else saved[1]

    def probed(summation: Summation | None = None) -> tuple[torch.Tensor, torch.Tensor, Layout]:
        """Numbers of the mean at the start and after `count` generations, whatever the updates come to here."""
        with rebuilt(log, generation=0, model=model) as (served, _):
            start = served.engine.probe_weights(_PROBED)
            for recorded in log.generations[:count]:
                update = recorded.update
                served.engine.apply(replace(update, summation=summation or update.summation))
            return start, served.engine.probe_weights(_PROBED), served.layout

    start, here, layout = probed()
    if saved is None:
        there, than = probed("ordered")[1], "what the same updates add up to in order"
    else:
        state, _ = checkpoint.load(saved[0], layout)
        there = torch.cat([state[name].float().flatten()[at] for name, at in sampled_places(layout, _PROBED)])
        than = f"those that the run saved in {saved[0].name}"
    apart, moved = (here - there).double(), (here - start).double().norm()
    share = float(apart.norm() / moved) if moved else 0.0
    return (
        f"after {count} generations the weights here are not claimed to be the run's: of {len(here):,} compared, "
        f"{int((apart != 0).sum()):,} differ from {than}, by at most {float(apart.abs().max()):.2g}, in all "
        f"{share:.2g} of the distance moved"
    ), share


def _saved(run: Path, log: Log, first: int, last: int) -> tuple[Path, int] | None:
    """The latest saved mean of these generations that is whole and of this journal, and its generation."""
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
    """An engine whose mean is that of a generation of the journal, and where that stands in it.

    With `other` coefficients the hash is the one that they come to.
    """
    log = log.whole(generation)
    count = log.sealed if generation is None else generation
    if not 0 <= count <= log.sealed:
        raise JournalError(f"{log.path} has {log.sealed} whole generations; generation {generation} is not among them")
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
        yield served, Mark(count, found, place, objective=state, counterfactual=None if other is None else str(other))
    finally:
        served.close()


def _engine(header: Header) -> dict[str, Any]:
    """The engine that repeats updates: any, or the kind of device a library added them on."""
    if header.sums == "ordered" or not header.device.startswith("cpu"):
        return {}
    threads = (header.machine or {}).get("threads", "")
    return {"device": "cpu"} | ({"threads": int(threads)} if threads.isdecimal() else {})


def config_of(log: Log, model: str | ModelConfig | None = None, skip: Sequence[str] = REPLAY_SKIPS) -> Config:
    """Return the config that a journal was made with, as far as it decides the weights.

    A journal may come from anywhere: raises ConfigError for a setting that leads out of it (`evoalign.config.outside`)
    and is in none of the sections `skip`. Raises JournalError for a config that cannot be.
    """
    try:
        tree = from_dict(log.header.config).model_dump()
    except ConfigError as error:
        wrong = "; ".join(str(error).splitlines())
        raise JournalError(f"{log.path}, line 1 holds a config that cannot be: {wrong}") from error
    named = ModelConfig(name=model) if isinstance(model, str) else model
    tree["model"] |= {} if named is None else {"name": named.name, "revision": named.revision, "base": named.base}
    tree["model"] |= {"dtype": log.header.dtype}
    tree["engine"] = _engine(log.header)
    config = from_dict(tree)
    fix = "say where its model is with --model, or resume the run with its own config"
    outside.refuse(config, log.path, fix, skip=skip if named is None else (*skip, "model"))
    return config
