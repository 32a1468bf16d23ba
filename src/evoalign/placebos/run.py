# SPDX-License-Identifier: Apache-2.0
"""Placebos and other counterfactuals of a finished run: replay it with other coefficients and evaluate each mean."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoalign import evaluation
from evoalign.config import Config, from_dict
from evoalign.config.outside import EVALUATION_SKIPS
from evoalign.config.reading import MissingError, read_object
from evoalign.errors import ConfigError, DataError, JournalError, ResumeError, StoppedError
from evoalign.evaluation import Evaluation
from evoalign.placebos import file as placebo_file
from evoalign.placebos.counterfactual import Counterfactual, Follower, choice_of, of_evaluations, parse
from evoalign.placebos.estimates import ENOUGH, Distances, Placebos
from evoalign.report import watching
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.checksums import EVALUATION
from evoalign.rundir.directory import MEASURING, RunDir, older_report
from evoalign.rundir.files import refuse_links
from evoalign.rundir.identity import differences
from evoalign.rundir.journal import Log
from evoalign.rundir.method import method_of, random_command
from evoalign.rundir.own import load_own, read_own
from evoalign.setup import ConfigLike, Parts, Rewards, as_config, assemble, task_and_data, with_form
from evoalign.tasks import Data, Task
from evoalign.tasks.joint import Settings
from evoalign.training import resolve, saving
from evoalign.training.inputs import check_inputs, inputs_of
from evoalign.training.replay import config_of, log_of, refuse_taken
from evoalign.training.stopping import interruptible

Progress = Callable[[int, int], None]
logger = logging.getLogger(__name__)


class PlacebosStoppedError(StoppedError):
    """`placebo` was stopped by a signal. `result` has the placebos that were evaluated before, and no flip."""

    def __init__(self, result: Placebos, shuffles: int, signal: int) -> None:
        super().__init__(f"stopped after {len(result.seeds)} of {shuffles} placebos, which are shown", signal)
        self.result = result


@dataclass(frozen=True, slots=True)
class Reached:
    """A mean that was reached: its `distance` from the start, and its evaluations."""

    weights_hash: str
    distance: float
    evaluation: Evaluation
    off_task: Evaluation | None = None


class Counterfactuals:
    """A run that can be replayed with other coefficients, from `open_run`. Each method begins at the run's start.

    `off_task` is another task, with its config and data, on whose test split each mean is evaluated.
    """

    def __init__(self, parts: Parts, log: Log, generations: int, off_task: tuple[Config, Task, Data] | None) -> None:
        self.parts, self.log, self.off_task = parts, log, off_task
        self.follower = Follower(parts, log, generations)

    def start(self) -> Reached:
        """Evaluate the mean before training."""
        self.follower.back()
        self.parts.settings.restore(Settings.of(self.parts.config).state)
        return self._evaluated(self.log.header.weights_hash)

    def reach(self, other: Counterfactual | None) -> Reached:
        """Evaluate the mean that other coefficients reach; None: the run's own, with its hashes checked."""
        if self.follower.generations:
            self.parts.restore(self.follower.generations[-1].objective)
        if other is None:
            engine = self.parts.engine
            return self._evaluated(self.follower.replay(lambda found: saving.apply(engine, self.log, found)))
        return self._evaluated(self.follower.follow(other))

    def save(self, folder: Path, weights_hash: str, other: Counterfactual) -> None:
        """Save the current mean, marked as a counterfactual."""
        last, count = self.follower.generations[-1], len(self.follower.generations)
        mark = Mark(count, weights_hash, last.hash, objective=last.objective, counterfactual=str(other))
        saving.save(self.parts, folder, mark, replace=False)

    def _evaluated(self, weights_hash: str) -> Reached:
        found = None
        if self.off_task is not None:
            config, task, data = self.off_task
            engine, tokens = self.parts.engine, self.parts.tokens
            found = evaluation.evaluate(engine, tokens, task, data.test, config.evaluation)
        return Reached(weights_hash, self.follower.distance(), self.parts.evaluate(), found)


def placebo(
    run: str | Path,
    *,
    shuffles: int = ENOUGH,
    config: ConfigLike | None = None,
    task: Task | None = None,
    reward: Rewards | None = None,
    off_task: ConfigLike | None = None,
    model: str | None = None,
    generation: int | None = None,
    progress: Progress | None = None,
) -> Placebos:
    """Measure how much of a finished run's change on its test split is signal, and how much is drift.

    Replays the journal with its own coefficients, with those of each generation shuffled over the noises (seeds 0 to
    `shuffles` - 1), and with all signs flipped, and evaluates each as the run did. `off_task` is a config whose task's
    test split is evaluated as well. `config`, `task` and `reward` are needed if the run names user code or was given
    Python objects; `model` if the base model has moved; `generation`: use only this many generations. `progress` is
    called with the number of means evaluated and their total. Nothing is written.

    Shuffled coefficients need no scores, so a placebo is exact. Of the flip only the first step is; see
    `evoalign.placebos.counterfactual`. Raises a subclass of EvoalignError: ConfigError, JournalError, or ResumeError if
    the run cannot be reproduced. Ctrl-C or SIGTERM raises PlacebosStoppedError with the placebos evaluated so far.
    """
    if not 1 <= shuffles <= 10**6:
        raise ConfigError(f"{shuffles} shuffles: use 1 to 1,000,000")
    with open_run(
        run, config=config, task=task, reward=reward, off_task=off_task, model=model, generation=generation
    ) as found:
        others = [None, *(parse("shuffle", found.log, seed) for seed in range(shuffles)), parse("flip", found.log)]
        reached, total, stopped = list[Reached](), 1 + len(others), None
        try:
            with interruptible():
                for number in range(total):
                    watching.stage("mean", number + 1, total)
                    reached.append(found.reach(others[number - 1]) if number else found.start())
                    if progress is not None:
                        progress(number + 1, total)
        except KeyboardInterrupt as interrupt:
            stopped = signal.SIGTERM if interrupt.args else signal.SIGINT
            if len(reached) < 3:
                raise StoppedError("stopped before the first placebo was evaluated", stopped) from None
        expected = found.follower.expected_distance()
        note = choice_of(found.parts, found.follower.log, validates=bool(found.parts.data.validation))
    before, real, *placebos = reached[: 2 + shuffles]
    flip = reached[-1] if len(reached) == total else None
    combined = of_evaluations(
        before.evaluation,
        real.evaluation,
        [p.evaluation for p in placebos],
        Distances(real.distance, expected, tuple(p.distance for p in placebos), flip and flip.distance),
        len(found.follower.generations),
        flip and flip.evaluation,
        [r.off_task for r in reached if r.off_task is not None],
        note,
    )
    if stopped is not None:
        raise PlacebosStoppedError(combined, shuffles, stopped)
    return combined


def keep(run: Path, found: Placebos) -> str:
    """Write results/placebo.json of a finished run, unless it has more placebos; return what was done in words."""
    if not run.is_dir():
        return f"not saved: {run} is a journal, not a run directory"
    refuse_links(run)
    log = log_of(run)
    try:
        done = read_object(run / EVALUATION)
    except MissingError:
        done = {}
    end = log.generations[-1].weights_hash
    if found.generation != log.sealed or done.get("weights_hash") != end or done.get(MEASURING):
        return f"not saved: {run} is not finished, or {found.generation} generations are not all of it"
    config, file = read_own(run), run / placebo_file.PLACEBO
    try:
        before = placebo_file.read(run, config)
    except DataError:
        before = None
    if before is not None and len(before.reward.placebos) > len(found.seeds):
        return f"not saved: {file} has {len(before.reward.placebos)} placebos; delete it to save these"
    placebo_file.write(run, config, found)
    return f"saved in {file}, for `evoalign export`, `compare` and `report`{older_report(run)}"


def counterfactuals(
    run: str | Path,
    name: str,
    seeds: Sequence[int] = (0,),
    *,
    to: str | Path | None = None,
    config: ConfigLike | None = None,
    model: str | None = None,
    generation: int | None = None,
) -> Iterator[tuple[str, Reached]]:
    """Evaluate the start of a run, the run itself and a counterfactual with each seed; yield names and results.

    `to` saves the counterfactual, for one seed only. Raises as `placebo` does, and RunExistsError.
    """
    refuse_taken(to, of=run)
    log = log_of(run)
    others = list(dict.fromkeys(parse(name, log, seed) for seed in seeds))
    if not others:
        raise ConfigError("--seeds is empty; give at least one seed")
    if others[0].kind != "shuffle" and list(seeds) != [0]:
        raise ConfigError(f"counterfactual {name} has no seed: only shuffle has")
    if to is not None and len(others) > 1:
        raise ConfigError(f"--to {to} takes one mean, and {len(others)} seeds are given; give one of them")
    with open_run(run, config=config, model=model, generation=generation) as found:
        yield "the start", found.start()
        yield "the run itself", found.reach(None)
        for other in others:
            reached = found.reach(other)
            if to is not None:
                found.save(Path(to), reached.weights_hash, other)
            yield str(other), reached


@contextmanager
def open_run(
    run: str | Path,
    *,
    config: ConfigLike | None = None,
    task: Task | None = None,
    reward: Rewards | None = None,
    off_task: ConfigLike | None = None,
    model: str | None = None,
    generation: int | None = None,
) -> Generator[Counterfactuals]:
    """Open a run with an engine at its start, and check that model and data are the run's; see `placebo`."""
    path = Path(run)
    if method_of(path) == "grpo":
        raise JournalError(
            f"{path} is a run of GRPO and has no journal to shuffle; instead of placebos, compare it with a run of "
            f"random rewards: {random_command(path, read_own(path))}"
        )
    log = log_of(path).whole(generation)
    count = log.sealed if generation is None else generation
    if not 0 < count <= log.sealed:
        raise JournalError(f"{log.path} has {log.sealed} whole generations; {count} cannot be replayed")
    chosen = _config(path, log, config, model, given=task is not None or reward is not None)
    with ExitStack() as stack:
        off = None
        if off_task is not None:
            off_config = as_config(off_task)
            off_config = with_form(off_config.model_copy(update={"model": chosen.model}))
            other, data = task_and_data(off_config, None, None)
            off = off_config, stack.enter_context(closing(other)), data
        parts = stack.enter_context(closing(assemble(chosen, task, reward)))
        saving.check_start(parts, log.header)
        folder = RunDir(path if path.is_dir() else path.parent)
        saving.check_data(folder, parts.task, parts.data, log.header.data_hash)
        saving.check_prompts(folder, parts.task, parts.data, parts.tokens, log.header.prompts_hash)
        saving.check_scorer(folder, parts.task, log.header.scorer_digest)
        for line in check_inputs(path, log.header.inputs, inputs_of(parts.config, parts.tokens)):
            logger.warning("warning: %s", line)
        yield Counterfactuals(parts, log, count, off)


def _config(path: Path, log: Log, config: ConfigLike | None, model: str | None, *, given: bool) -> Config:
    """Return the config that a run was made and evaluated with. Raises ConfigError, ResumeError."""
    if config is None and not path.is_dir():
        return config_of(log, model, EVALUATION_SKIPS)
    if not given:
        resolve.refuse_lost_task(path)
    skip = EVALUATION_SKIPS if model is None else (*EVALUATION_SKIPS, "model")
    found = load_own(path, skip=skip) if config is None else with_form(as_config(config), path)
    odd, _ = differences(found, from_dict(log.header.config))
    if odd:
        raise ResumeError(f"{path} was made with other settings: {'; '.join(odd)}")
    section: dict[str, Any] = {"dtype": log.header.dtype}
    section |= {} if model is None else {"name": model, "revision": None, "base": None}
    return found.model_copy(update={"model": found.model.model_copy(update=section)})
