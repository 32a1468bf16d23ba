# SPDX-License-Identifier: Apache-2.0
"""Models to be served by `evoalign gateway`: a run's mean, a member of it, or any other model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from evoalign.config import Config, from_dict, read
from evoalign.config.outside import SERVING_SKIPS
from evoalign.engines import Engine
from evoalign.errors import ConfigError
from evoalign.gateway.serving import Model
from evoalign.rollouts import sampling_of
from evoalign.rundir.directory import again_if_pruned
from evoalign.rundir.method import method_of
from evoalign.rundir.own import load_own
from evoalign.tokens import Tokens
from evoalign.training.replay import Progress, generation_of, log_of, rebuilt
from evoalign.training.resolve import loaded, resolve_run, resolve_target
from evoalign.types import MEAN, MEAN_PLAN, Member, Plan


@contextmanager
def opened(
    target: str,
    files: Sequence[Path] = (),
    sets: Sequence[str] = (),
    *,
    generation: int | None = None,
    member: int | None = None,
    progress: Progress | None = None,
) -> Generator[Model]:
    """Load a model and yield it.

    It is the latest checkpoint of a run, its mean after `generation` generations, or `member` of that generation,
    counted from 0, with its own sigma; or a model folder, a PEFT adapter or a hub name. The settings of `files` and
    `sets` are added to those of a run, whose task is not read. Raises ConfigError, JournalError, ModelError.
    """
    run = Path(target)
    is_run = (run / "config.yaml").is_file() and method_of(run) is not None
    if generation is None and member is not None:
        raise ConfigError(f"--member {member}: add --generation, the generation that it is a member of")
    if generation is None:
        with _latest(target, files, sets, is_run=is_run) as model:
            yield model
        return
    if not is_run:
        raise ConfigError(f"--generation {generation}: {target} is not a run directory")
    own, given = load_own(run, files, sets, skip=SERVING_SKIPS), read(files, sets)
    if "engine" in given:
        raise ConfigError(
            f"--generation {generation} is rebuilt by engine transformers, with its own settings: remove those of "
            "section engine, or write the weights with evoalign export and serve that folder"
        )
    log, plan, chosen, what = log_of(run), MEAN_PLAN, MEAN, f"{target}, mean after {generation} generations"
    if member is not None:
        update = generation_of(log, generation, member).update
        chosen = update.members[member]
        plan = Plan(update.generation, update.sigma, (chosen,))
        what = f"{target}, member {member} of generation {generation}"
    moved = own.model if "model" in given else None
    with rebuilt(log, generation=generation, model=moved, progress=progress) as (served, _):
        yield _model(what, own, served.engine, served.tokens, plan, chosen)


@contextmanager
def _latest(target: str, files: Sequence[Path], sets: Sequence[str], *, is_run: bool) -> Generator[Model]:
    """Load a run's latest checkpoint, or another model."""
    run, given = Path(target), read(files, sets)

    def resolve() -> tuple[Config, Path | None]:
        if not is_run:
            return resolve_target(target, from_dict(given))
        own = load_own(run, files, sets, skip=SERVING_SKIPS)
        return resolve_run(run, own, own_engine="engine" not in given)

    def load() -> tuple[str, Config, Tokens, Engine]:
        config, adapter = resolve()
        return str(adapter or config.model.name), *loaded(config, adapter)

    what, config, tokens, engine = again_if_pruned(run, load)
    with closing(engine):
        yield _model(what, config, engine, tokens, MEAN_PLAN, MEAN)


def _model(what: str, config: Config, engine: Engine, tokens: Tokens, plan: Plan, member: Member) -> Model:
    settings = config.evaluation
    is_serial = config.deterministic is True
    return Model(what, engine, tokens, plan, member, sampling_of(settings), settings.seeds[0], is_serial)
