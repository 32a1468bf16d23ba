# SPDX-License-Identifier: Apache-2.0
"""Runs followed again with other coefficients, from the start, on one engine: placebos and other counterfactuals."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evoalign import evaluation
from evoalign.checks import placebo_file
from evoalign.checks.distance import moved, start_of
from evoalign.checks.drift import expected_distance
from evoalign.checks.placebo import Distances, Placebos, Whole, split
from evoalign.config import Config, from_dict, load
from evoalign.config.outside import EVALUATION_SKIPS
from evoalign.config.reading import MissingError, read_object
from evoalign.cost.budget import Cost, Meter
from evoalign.cost.estimate import placebos_in_a_tenth
from evoalign.errors import ConfigError, DataError, JournalError, ModelError, ResumeError, StoppedError
from evoalign.evaluation import Evaluation
from evoalign.report import watching
from evoalign.rewards.objective import aim_of
from evoalign.rollouts import lengths_of
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.checksums import EVALUATION
from evoalign.rundir.directory import MEASURING, RunDir, older_report
from evoalign.rundir.identity import differences
from evoalign.rundir.journal import Log, Recorded
from evoalign.rundir.links import refuse_links
from evoalign.rundir.method import load_own
from evoalign.setup import ConfigLike, Parts, Rewards, Served, as_config, assemble, task_and_data
from evoalign.tasks import Data, Task
from evoalign.training import resolve, saving
from evoalign.training.counterfactual import Counterfactual, parse
from evoalign.training.replay import config_of, log_of, refuse_taken
from evoalign.training.stop import Stop

SHUFFLES = 20
"""Of the standard set. One that beats all of them does so with p = 1 / 21."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Reached:
    """Where one way through the generations led: `distance` is that of the mean from the start."""

    weights_hash: str
    distance: float
    evaluation: Evaluation
    off_task: Evaluation | None = None


class Follower:
    """Takes an engine's mean from the start of a journal through its generations, with whatever coefficients.

    Make it while nothing has to be kept of the engine's mean. Raises ModelError where the start cannot be determined.
    """

    def __init__(self, served: Served, log: Log, generations: int) -> None:
        self.served, self.log, self.generations = served, log, log.generations[:generations]
        self.start = start_of(served)

    def back(self) -> None:
        """Put the starting mean back, and the optimizer's state with it. Raises ModelError where it is another."""
        self.served.engine.load(self.start)
        found, wanted = self.served.engine.fingerprint(), self.log.header.weights_hash
        if found != wanted:
            raise ModelError(
                f"the files of model {self.served.config.model.name} do not give the mean that the run started from "
                f"(weights_hash {found[:12]}, and {wanted[:12]} in the journal)"
            )

    def follow(self, other: Counterfactual | None) -> str:
        """Go from the start to the end, with the recorded coefficients (None) or others; the weights_hash there.

        Raises ResumeError where the recorded ones do not come to what the journal has.
        """
        self.back()
        with watching.phase("replaying", len(self.generations)) as work:
            for recorded in self.generations:
                self._step(recorded, other)
                work.done += 1
        return self.served.engine.fingerprint()

    def _step(self, recorded: Recorded, other: Counterfactual | None) -> None:
        if other is None:
            saving.apply(self.served.engine, self.log, recorded)
        else:
            self.served.engine.apply(other.update(recorded))

    def distance(self) -> float:
        """Of the mean from the start."""
        return moved(self.served, self.start)

    def expected_distance(self) -> float | None:
        """That of shuffled coefficients, by formula."""
        return expected_of(self.served, self.log, len(self.generations))


@dataclass(frozen=True, slots=True)
class _OffTask:
    """Another task on whose test split the mean is evaluated, too."""

    config: Config
    task: Task
    data: Data


class Counterfactuals:
    """A run that is there to be followed: `open_run` gives one. Each call starts from the start of the run."""

    def __init__(self, parts: Parts, log: Log, generations: int, off_task: _OffTask | None = None) -> None:
        self.parts, self.log, self.off_task = parts, log, off_task
        self.follower = Follower(parts, log, generations)

    def start(self) -> Reached:
        """The mean before training."""
        self.follower.back()
        return self._here(self.log.header.weights_hash)

    def reach(self, other: Counterfactual | None) -> Reached:
        """The mean that other coefficients come to; None: the run's own, whose hashes are checked on the way."""
        return self._here(self.follower.follow(other))

    def save(self, folder: Path, weights_hash: str, other: Counterfactual) -> None:
        """Save the mean of now, as what it is."""
        last = self.follower.generations[-1]
        count = len(self.follower.generations)
        mark = Mark(count, weights_hash, last.hash, objective=last.objective, counterfactual=str(other))
        saving.save(self.parts, folder, mark, replace=False)

    def _here(self, weights_hash: str) -> Reached:
        off = self.off_task
        found = None if off is None else evaluation.evaluate(
            self.parts.engine, self.parts.tokens, off.task, off.data.test, off.config.evaluation
        )  # fmt: skip
        return Reached(weights_hash, self.follower.distance(), self.parts.evaluate_test(), found)


def placebo(
    run: str | Path,
    *,
    shuffles: int = SHUFFLES,
    config: ConfigLike | None = None,
    task: Task | None = None,
    reward: Rewards | None = None,
    off_task: ConfigLike | None = None,
    model: str | None = None,
    generation: int | None = None,
    progress: Progress | None = None,
) -> Placebos:
    """How much of a finished run's change on its test split is signal, and how much is drift.

    Replays the journal with its own coefficients, with those of each generation shuffled over the members (seeds 0 to
    `shuffles` - 1), and with all signs flipped, and evaluates each as the run itself did. `off_task` is a config whose
    task's test split is evaluated likewise. `config`, `task` and `reward` are needed where the run names code of its
    own or was given Python objects; `model` where the base model has moved; `generation`: after so many. `progress` is
    called with the number of means evaluated and of all. Nothing is written.

    Shuffled coefficients need no scores, so that a placebo is what the noise alone does; of its flip, and of the
    run's own scores, only the first step was measured where it starts: see `evoalign.training.counterfactual`.
    Raises a subclass of EvoalignError: ConfigError, JournalError, ResumeError where the run does not come out again.
    """
    if not 1 <= shuffles <= 10**6:
        raise ConfigError(f"{shuffles} shuffles: at least one is needed, and at most a million")
    with open_run(
        run, config=config, task=task, reward=reward, off_task=off_task, model=model, generation=generation
    ) as found:
        return measured(found, shuffles, progress)


def keep(run: Path, found: Placebos) -> str:
    """Write results/placebo.json, which cards and comparisons read, of a run that is done; in words, what was done."""
    if not run.is_dir():
        return f"not kept: {run} is a journal by itself, no run directory"
    refuse_links(run)
    log = log_of(run)
    try:
        done = read_object(run / EVALUATION)
    except MissingError:
        done = {}
    end = log.generations[-1].weights_hash
    if found.generation != log.sealed or done.get("weights_hash") != end or done.get(MEASURING):
        return f"not kept: results are of the end of a run, and this is of {found.generation} generations of {run}"
    config, file = load([run / "config.yaml"]), run / placebo_file.PLACEBO
    try:
        before = placebo_file.read(run, config)
    except DataError:
        before = None
    if before is not None and len(before.reward.placebos) > len(found.seeds):
        return f"not kept: {file} has {len(before.reward.placebos)} placebos; delete it to keep these"
    placebo_file.write(run, config, found)
    return f"kept in {file}: `evoalign export`, `compare` and `report` read it there{older_report(run)}"


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
    """Evaluates the start of a run, the run itself and a counterfactual of it with each seed; yields name and result.

    `to` saves a counterfactual, which then has to be one alone. Raises as `placebo` does, and RunExistsError.
    """
    refuse_taken(to, of=run)
    log = log_of(run)
    others = list(dict.fromkeys(parse(name, log, seed) for seed in seeds))
    if not others:
        raise ConfigError("give one seed at least")
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


def measured(found: Counterfactuals, shuffles: int, progress: Progress | None = None) -> Placebos:
    """The standard set: the start, the run, its shuffles and its flip."""
    others = [None, *(parse("shuffle", found.log, seed) for seed in range(shuffles)), parse("flip", found.log)]
    done, total = 0, 1 + len(others)

    def told(reached: Reached) -> Reached:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)
        return reached

    def reached(number: int, other: Counterfactual | None) -> Reached:
        watching.stage("mean", number, total)
        return told(found.reach(other))

    watching.stage("mean", 1, total)
    before, real, *placebos, flip = [told(found.start()), *(reached(2 + i, other) for i, other in enumerate(others))]
    off = [r.off_task for r in (before, real, *placebos, flip) if r.off_task is not None]
    return of_evaluations(
        before.evaluation,
        real.evaluation,
        [p.evaluation for p in placebos],
        Distances(
            real.distance, found.follower.expected_distance(), tuple(p.distance for p in placebos), flip.distance
        ),
        len(found.follower.generations),
        flip.evaluation,
        off,
    )


def expected_of(served: Served, log: Log, generations: int | None = None) -> float | None:
    """How far the coefficients of a journal take the mean where they know nothing; see `checks.drift`."""
    updates = [recorded.update for recorded in log.generations[:generations]]
    return expected_distance(updates, served.layout, served.config.es)


def count_of(parts: Parts, log: Log) -> int:
    """How many placebos belong to the end of a training: none of a run that never moved, as they would not either."""
    wanted = parts.config.checks.placebo
    if not any(any(recorded.update.coefficients) for recorded in log.generations):
        return 0
    if wanted is not None:
        return wanted
    lengths = (lengths_of(parts.task, parts.tokens, split) for split in (parts.data.train, parts.data.test))
    return placebos_in_a_tenth(parts.config, parts.engine.specs(), parts.layout, *lengths)


def after_training(
    parts: Parts,
    log: Log,
    before: Evaluation,
    after: Evaluation,
    count: int,
    stop: Stop,
    evaluate: Callable[[], tuple[Evaluation, Cost]],
    meter: Meter,
    spend: Callable[[Cost], None],
) -> Placebos:
    """Placebos with the seeds 0, 1, ... of a run whose last mean is in the engine; the mean is lost by it.

    `evaluate` does so on the test split; what all of it takes is given to `spend`. Raises StoppedError as soon as one
    has ended after `stop` was asked: some of them alone would not be those that the config asks for.
    """
    follower = Follower(parts, log, log.sealed)
    real, distances, found = follower.distance(), list[float](), list[Evaluation]()
    for seed in range(count):
        if stop.asked is not None:
            raise StoppedError("stopped", stop.asked)
        start = time.perf_counter()
        watching.stage("placebo", seed + 1, count)
        follower.follow(parse("shuffle", log, seed))
        distances.append(follower.distance())
        spend(meter.followed([recorded.update for recorded in follower.generations], time.perf_counter() - start))
        reached, cost = evaluate()
        spend(cost)
        found.append(reached)
    went = Distances(real, follower.expected_distance(), tuple(distances))
    return of_evaluations(before, after, found, went, len(follower.generations))


def of_evaluations(
    before: Evaluation,
    real: Evaluation,
    placebos: Sequence[Evaluation],
    distances: Distances,
    generation: int,
    flip: Evaluation | None = None,
    off_task: Sequence[Evaluation] = (),
) -> Placebos:
    """From all that was evaluated; `off_task` in the order before, real, placebos, flip, or nothing."""
    known = [name for name in real.measures if all(name in p.measures for p in placebos)]
    each = {name: tuple(p.measures[name] for p in placebos) for name in known}
    rewards, trained = [e.measures_E["reward"] for e in off_task], aim_of(real.measures)
    whole = [e.measures[trained] for e in (before, real, *placebos)]
    return Placebos(
        generation=generation,
        seeds=tuple(range(len(placebos))),
        reward=split(
            before.measures_E["reward"],
            real.measures_E["reward"],
            [p.measures_E["reward"] for p in placebos],
            None if flip is None else flip.measures_E["reward"],
        ),
        distance=distances,
        measures={name: float(np.mean(values)) for name, values in each.items()},
        off_task=split(rewards[0], rewards[1], rewards[2:-1], rewards[-1]) if rewards else None,
        fitness=None if trained == "reward" else Whole(whole[0], whole[1], tuple(whole[2:]), trained),
        each=each,
    )


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
    """A run, its data and an engine at its start, checked to be those that it was made with; see `placebo`."""
    path = Path(run)
    log = log_of(path).whole(generation)
    count = log.sealed if generation is None else generation
    if not 0 < count <= log.sealed:
        raise JournalError(f"{log.path} has {log.sealed} whole generations; there is no run of {count} to follow")
    chosen = _config(path, log, config, model, given=task is not None or reward is not None)
    with ExitStack() as stack:
        off = None if off_task is None else stack.enter_context(_off_task(off_task))
        parts = stack.enter_context(closing(assemble(chosen, task, reward)))
        saving.check_start(parts, log.header)
        folder = RunDir(path if path.is_dir() else path.parent)
        saving.check_data(folder, parts.task, parts.data, log.header.data_hash)
        saving.check_scorer(folder, parts.task, log.header.scorer_digest)
        yield Counterfactuals(parts, log, count, off)


@contextmanager
def _off_task(config: ConfigLike) -> Generator[_OffTask]:
    off = as_config(config, needs_es=False)
    task, data = task_and_data(off, None, None)
    with closing(task):
        yield _OffTask(off, task, data)


def _config(path: Path, log: Log, config: ConfigLike | None, model: str | None, *, given: bool) -> Config:
    """What a run was made with, and evaluated by: the engine among it. Raises ConfigError, ResumeError."""
    if config is None and not path.is_dir():
        return config_of(log, model, EVALUATION_SKIPS)
    if not given:
        resolve.refuse_lost_task(path)
    skip = EVALUATION_SKIPS if model is None else (*EVALUATION_SKIPS, "model")
    found = load_own(path, skip=skip) if config is None else as_config(config)
    odd, _ = differences(found, from_dict(log.header.config))
    if odd:
        raise ResumeError(f"{path} was made with other settings: {'; '.join(odd)}")
    section: dict[str, Any] = {"dtype": log.header.dtype}
    section |= {} if model is None else {"name": model, "revision": None, "base": None}
    return found.model_copy(update={"model": found.model.model_copy(update=section)})
