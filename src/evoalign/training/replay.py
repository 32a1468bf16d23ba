# SPDX-License-Identifier: Apache-2.0
"""The mean of any generation of a run, from the base model and the journal alone."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from evoalign.config import Config, from_dict
from evoalign.errors import ConfigError, JournalError, RunExistsError
from evoalign.rundir import journal
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.journal import Log
from evoalign.rundir.method import method_of
from evoalign.setup import Served, serve
from evoalign.training import saving

Progress = Callable[[int, int], None]


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
) -> str:
    """Rebuild the mean after `generation` generations (None: all), check each hash on the way, and save it.

    `model` takes the place of the base model's name or folder, where that has moved; its weights have to be the same.
    `to` is a new folder: a PEFT adapter or a Hugging Face checkpoint. Returns the weights_hash. Raises JournalError
    for a journal that is damaged before that generation, ResumeError where the weights come out otherwise.
    """
    if (
        to is not None
        and Path(to).exists()
        and (Path(to).is_symlink() or not Path(to).is_dir() or any(Path(to).iterdir()))
    ):
        raise RunExistsError(f"--to {to} exists and is not empty; choose another folder")
    log = log_of(run)
    with rebuilt(log, generation=generation, model=model, progress=progress) as (served, mark):
        if to is not None:
            saving.save(served, Path(to), mark, replace=False)
        return mark.weights_hash


@contextmanager
def rebuilt(
    log: Log, *, generation: int | None = None, model: str | None = None, progress: Progress | None = None
) -> Generator[tuple[Served, Mark]]:
    """An engine whose mean is that of a generation of the journal, and where that stands in it."""
    log = log.whole(generation)
    count = log.sealed if generation is None else generation
    if not 0 <= count <= log.sealed:
        raise JournalError(f"{log.path} has {log.sealed} whole generations; generation {generation} is not among them")
    served = serve(config_of(log, model))
    try:
        saving.check_start(served, log.header)
        found, place, state = log.header.weights_hash, journal.GENESIS, dict[str, float]()
        for done, recorded in enumerate(log.generations[:count], 1):
            found, place = saving.apply(served.engine, log, recorded), recorded.hash
            state = dict(recorded.objective)
            if progress is not None:
                progress(done, count)
        yield served, Mark(count, found, place, objective=state)
    finally:
        served.close()


def config_of(log: Log, model: str | None = None) -> Config:
    """The config that a journal was made with, as far as it decides the weights. Raises ConfigError, JournalError.

    A journal may come from anywhere, so it does not say what is imported.
    """
    try:
        tree = from_dict(log.header.config).model_dump()
    except ConfigError as error:
        wrong = "; ".join(str(error).splitlines())
        raise JournalError(f"{log.path}, line 1 holds a config that cannot be: {wrong}") from error
    tree["model"] |= {"dtype": log.header.dtype} | ({} if model is None else {"name": model, "revision": None})
    tree["engine"] = {}  # updates have the same bits whatever it says
    config = from_dict(tree)
    if ":" in config.space.name:
        raise ConfigError(
            f"{log.path} names code of its own (space.name {config.space.name}), which is not run unasked; resume with "
            "the run itself: evoalign train CONFIG --resume"
        )
    return config
