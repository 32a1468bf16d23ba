# SPDX-License-Identifier: Apache-2.0
"""`train`: a run from its config to what it leaves, and on again from wherever it was left."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evoalign import evolve, spaces, tracking
from evoalign.checks import canary, divergence
from evoalign.checks.distance import distance_of_mean
from evoalign.config import NO_ES, Config, code_of, from_dict
from evoalign.cost import budget, estimate
from evoalign.engines.specs import specs_of_config
from evoalign.errors import (
    ConfigError,
    EvoalignError,
    JournalError,
    ModelError,
    ResumeError,
    RewardError,
    RunExistsError,
    StoppedError,
)
from evoalign.evaluation import Evaluation
from evoalign.report.rows import LATER, is_whole, rebuilt_row
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.directory import RunDir
from evoalign.rundir.identity import differences
from evoalign.rundir.journal import Journal, Log
from evoalign.rundir.manifest import command_line, make_manifest, versions
from evoalign.rundir.method import refuse_other
from evoalign.setup import ConfigLike, Parts, Rewards, as_config, assemble, layout_of, task_and_data
from evoalign.tasks import Task
from evoalign.training import result as outcome
from evoalign.training import saving
from evoalign.training.recorder import Hook, Recorder
from evoalign.training.result import Result
from evoalign.training.stop import Stop
from evoalign.types import Generation


def train(
    config: ConfigLike,
    *,
    task: Task | None = None,
    reward: Rewards | None = None,
    on_generation: Hook | None = None,
    overwrite: bool = False,
    resume: bool = False,
    console: Console | None = None,
) -> Result:
    """Fine-tune by Evolution Strategies and leave a run directory.

    `config` is a Config, a nested mapping or a YAML file. `task` and `reward` (functions of TRL's signature, for the
    custom task) take the place of what the config names. `on_generation` is called after each generation. `resume`
    resumes the run in `output_dir` exactly, or begins it where there is none yet.
    Raises a subclass of EvoalignError: for bad input, before anything is written; StoppedError after a signal.
    """
    config = as_config(config)
    run = _place(config, resume=resume)
    tracking.check(config)
    given = "task" if task is not None else "reward" if reward is not None else None
    if not resume:
        run.refuse(overwrite=overwrite)
    try:
        run.lock()
        log = log_to_resume(run, config, given) if resume else None
        if log is None:
            run.refuse(overwrite=overwrite, resume=resume)
        with Stop() as stop, closing(assemble(config, task, reward)) as parts:
            recorder = Recorder(parts, run, console or Console(), on_generation)
            return _Training(parts, run, recorder, stop, given).run_from(log, overwrite=overwrite, resume=resume)
    except RewardError as error:
        if error.failed is not None:
            error.args = (f"{error}; what it was asked is in {run.keep_failure(error.failed)}",)
        raise
    finally:
        run.release()


def dry_run(config: ConfigLike, *, overwrite: bool = False, resume: bool = False) -> list[str]:
    """What a config would do: eta, effective sigma, memory, rollouts and tokens. Loads no weights, writes nothing."""
    config = as_config(config)
    run = _place(config, resume=resume)
    task, data = task_and_data(config, None, None)
    task.close()
    work = estimate.work_lines(config, len(data.train))
    log = log_to_resume(run, config, None) if resume else None
    if log is None:
        try:
            run.refuse(overwrite=overwrite, resume=resume)
        except RunExistsError as error:
            work.insert(0, f"refused as it stands: {error}")
    else:
        work.insert(0, f"resumes after generation {len(log.generations)} of {config.es.num_generations}")
    dtype = estimate.served_dtype(config)
    try:
        specs = specs_of_config(config)
    except ModelError as error:
        return [*estimate.step_lines(config, None), *work, f"memory: not estimated; {error}"]
    layout = layout_of(spaces.create(config), specs, dtype)
    known = layout if config.es.sigma is not None else None  # mean |W| needs the weights
    return [*estimate.step_lines(config, known), *work, *estimate.memory_lines(config, specs, layout, dtype)]


def _place(config: Config, *, resume: bool) -> RunDir:
    """Where a run of ES goes. Raises ResumeError, ConfigError for what is of GRPO."""
    run = RunDir(Path(config.output_dir))
    if resume:
        refuse_other(run.path, "es")
    if config.es_ is None:
        raise ConfigError(f"{NO_ES}; a config with a section grpo and no es is for: evoalign grpo CONFIG")
    return run


def log_to_resume(run: RunDir, config: Config, given_as: str | None) -> Log | None:
    """The journal to resume; None where nothing was recorded yet. Raises JournalError, ResumeError."""
    if journal.is_blank(run.journal):
        if run.has_progress():
            raise JournalError(
                f"{run.journal} is missing or cut in its first line, though the run has generations; put it back, or "
                "move the run aside with --overwrite"
            )
        return None
    log = journal.read(run.journal).whole()
    odd, _ = differences(config, from_dict(log.header.config))
    if odd:
        raise ResumeError(f"{run.path} cannot be resumed with other settings: {'; '.join(odd)}")
    if log.header.given_as != given_as:
        there = f"a {log.header.given_as} object" if log.header.given_as else "the task of its config"
        raise ResumeError(
            f"{run.path} was trained with {there}; resume in Python with the same task= or reward=, or without one"
        )
    done, wanted = len(log.generations), config.es.num_generations
    if done > wanted:
        raise ResumeError(f"{run.path} has {done} generations already, es.num_generations is {wanted}")
    return log


class _Training:
    """One run in this process."""

    def __init__(self, parts: Parts, run: RunDir, recorder: Recorder, stop: Stop, given: str | None) -> None:
        self.parts, self.config, self.run = parts, parts.config, run
        self.recorder, self.stop, self.given = recorder, stop, given
        self.tell = recorder.tell

    def run_from(self, log: Log | None, *, overwrite: bool, resume: bool) -> Result:
        """All of it: to the end of the journal, the generations that are left, and the comparison."""
        note = [f"engine {self.parts.facts.engine}: {self.parts.facts.note}"] if self.parts.facts.note else []
        for line in [
            *note,
            *outcome.gold_lines(self.parts.task, self.parts.data),
            *estimate.step_lines(self.config, self.parts.layout),
        ]:
            self.tell(line)
        self._canary(len(log.generations) if log else 0)
        with self._explained(fresh=log is None), closing(self.recorder):
            before, book = self._begin(overwrite, resume) if log is None else self._go_on(log)
            with closing(book):
                self.recorder.baseline = before.measures["reward"]
                self._loop(book)
                return self._finish(book, before)

    def _begin(self, overwrite: bool, resume: bool) -> tuple[Evaluation, Journal]:
        facts = {
            "engine": dataclasses.asdict(self.parts.facts),
            "task": {"name": self.parts.task.name, "given_as": self.given},
        }
        manifest = make_manifest(self.config, facts, command_line())
        self.run.create(self.config, manifest, overwrite=overwrite, resume=resume)
        self.recorder.start()
        before = self._evaluate("start")
        if self.stop.asked is not None:
            raise StoppedError("stopped before the first generation; nothing was written", self.stop.asked)
        if self.run.aside is not None:
            self.tell(f"the run that was there is now {self.run.aside}")
        outcome.write_completions(self.run, "before", before)
        return before, Journal(self.run.journal, saving.header(self.parts, self.given))

    def _go_on(self, log: Log) -> tuple[Evaluation, Journal]:
        for line in differences(self.config, from_dict(log.header.config))[1]:
            self.tell(f"warning: {line}: from here on, scores may differ in their last bits from those of one run")
        saving.check_start(self.parts, log.header)
        if log.header.data_hash != saving.data_hash(self.parts.data):
            raise ResumeError(
                f"{self.run.path} was trained on other data than task {self.parts.task.name} has now; "
                "put the files back as they were, or begin another run"
            )
        if log.header.versions != versions():
            self.tell(f"warning: {saving.elsewhere(log.header)}; scores may differ in their last bits from here on")
        self.recorder.evaluations = budget.read_evaluation(self.run.budget)
        before = self._read_before()
        book = Journal.resume(log)
        try:
            self.run.sweep()
            if log.generations:
                self.parts.objective.restore(log.generations[-1].objective)
            saving.restore(self.parts, self.run, log, book.seal, self.tell)
            self.run.go_on(self.config, make_manifest(self.config, {}, command_line()))
            rebuilt = self._restore_rows(log)
            self._save_what_was_due(len(log.generations), book)
            self.recorder.start(rebuilt)
        except BaseException:
            book.close()
            raise
        self.tell(f"resumes after generation {len(log.generations)} of {self.config.es.num_generations}")
        return before, book

    def _save_what_was_due(self, count: int, book: Journal) -> None:
        """The run may have died before, or while, it saved its last generation."""
        if count:
            self._save_if_due(count, self.parts.engine.fingerprint(), book.last_hash)

    def _read_before(self) -> Evaluation:
        """The evaluation of the start, which the engine is at now: as it was written, or else made again."""
        before = outcome.read_completions(self.run, "before", self.parts.task, self.parts.data)
        if before is None:
            before = self._evaluate("start")
            outcome.write_completions(self.run, "before", before)
        return before

    def _restore_rows(self, log: Log) -> list[dict[str, Any]]:
        """metrics.jsonl cut back to the journal; rows that were lost are made from it, as far as it goes: those."""
        kept, rows, rebuilt = self.run.read_metrics(), list[dict[str, Any]](), list[dict[str, Any]]()
        for recorded in log.generations:
            row, again = kept.get(recorded.update.generation), rebuilt_row(recorded)
            whole = row is not None and is_whole(row, again)
            rows.append({**row, **{k: None for k in LATER if k not in row}} if row is not None and whole else again)
            rebuilt += [] if whole else [again]
        if rows and rows[-1]["evaluation"] is None and evolve.is_due(self.config, len(rows) - 1):
            rows[-1]["evaluation"] = self._evaluated().measures
        if rows and rows[-1]["divergence"] is None and divergence.is_due(self.config, len(rows)):
            rows[-1]["divergence"] = dataclasses.asdict(self.recorder.divergence())
        self.run.replace_metrics(rows)
        return rebuilt

    def _loop(self, book: Journal) -> None:
        """The generations that are left; each is recorded and, where it is due, saved and checked as it ends."""
        total, first = self.config.es.num_generations, len(self.run.rows)
        if first < total:
            self._stop_if_asked(first, self._how_to_go_on())
        with self.recorder:
            for generation in self._generations(book, first):
                done = generation.index + 1
                self.recorder.generation(generation)
                self._save_if_due(done, generation.weights_hash, book.last_hash)
                if self.config.checks.canary_every and done % self.config.checks.canary_every == 0:
                    self._canary(generation.index)
                if self.stop.asked is not None and done < total:
                    self._save(done, generation.weights_hash, book.last_hash)
                    self._stop_if_asked(done, self._how_to_go_on())

    def _canary(self, generation: int) -> None:
        """Raise CanaryError where members do not answer with their own weights."""
        parts = self.parts
        canary.check(
            parts.engine,
            parts.space,
            parts.layout,
            parts.tokens.encode(parts.task.prompt(parts.data.train[0])),
            generation=generation,
            width=evolve.sigma_at(self.config, min(generation, self.config.es.num_generations - 1)),
            exact=parts.facts.deterministic,
        )

    def _generations(self, book: Journal, first: int) -> Iterator[Generation]:
        parts = self.parts
        return evolve.evolve(
            self.config,
            parts.task,
            parts.data.train,
            parts.engine,
            parts.tokens,
            book,
            lambda: self._evaluated().measures,
            first,
            parts.objective,
        )

    def _save_if_due(self, count: int, weights_hash: str, place: str) -> None:
        """Save the mean after `count` generations where that is a checkpoint, or the best by its evaluation."""
        every, reward = saving.every(self.config), self._reward(count)
        is_best = False
        if self.config.checkpoint.keep_best and reward is not None:
            best = saving.best_saved(self.run)
            is_best = best is None or reward > (checkpoint.reward_of(best) or 0.0)
        if (every and count % every == 0) or is_best:
            self._save(count, weights_hash, place)

    def _reward(self, count: int) -> float | None:
        """The mean's reward on the test split after so many generations, where it was evaluated."""
        measures = self.run.rows[count - 1].get("evaluation")
        return float(measures["reward"]) if measures else None

    def _save(self, count: int, weights_hash: str, place: str) -> Path:
        """Save the mean, unless it is saved already, and delete what need not stay."""
        folder = self.run.saved(count, adapter=not self.parts.space.evolves_model)
        mark = Mark(count, weights_hash, place, self._reward(count), self.parts.objective.state)
        if not checkpoint.holds(folder, mark):
            saving.save(self.parts, folder, mark)
        saving.retain(self.run, self.config)
        return folder

    def _finish(self, book: Journal, before: Evaluation) -> Result:
        generation, weights_hash = self.config.es.num_generations, self.parts.engine.fingerprint()
        saved = self._save(generation, weights_hash, book.last_hash)
        after = self._evaluate("result")
        mean: dict[str, Any] = {"generation": generation, "weights_hash": weights_hash, **self._moved()}
        outcome.conclude(self.run, self.config.evaluation, mean, before, after, self.recorder.console, self.tell)
        self.recorder.finish({"before": before.measures, "after": after.measures}, mean["divergence"])
        self.tell(f"saved {outcome.shown(saved)}\nrun   {outcome.shown(self.run.path)}")
        return Result(self.run.path, saved, before, after)

    def _moved(self) -> dict[str, Any]:
        """How far the mean is from the base model: by KL, and by its weights; None where not measured, or unknown."""
        kl = self.run.rows[-1]["divergence"] if self.run.rows else None
        if kl is None and self.config.checks.kl_every:
            kl = dataclasses.asdict(self.recorder.divergence())
        try:
            moved = dataclasses.asdict(distance_of_mean(self.parts))
        except EvoalignError as error:
            self.tell(f"distance from the base model: unknown; {error}")
            moved = None
        return {"divergence": kl, "distance": moved}

    def _evaluate(self, which: str) -> Evaluation:
        self.tell(f"evaluating the {which} on {len(self.parts.data.test)} test examples")
        return self._evaluated()

    def _evaluated(self) -> Evaluation:
        """The mean on the test split; what it took goes to the budget."""
        start = time.perf_counter()
        result = self.parts.evaluate_test()
        self.recorder.evaluated(result, time.perf_counter() - start)
        return result

    def _stop_if_asked(self, done: int, next_: str) -> None:
        if self.stop.asked is not None:
            total = self.config.es.num_generations
            raise StoppedError(f"stopped after generation {done} of {total}; {next_}", self.stop.asked)

    def _how_to_go_on(self) -> str:
        """Names the run itself, or, where it names code, the config in it."""
        if self.given is not None:
            return f"resume with train(..., {self.given}=..., resume=True)"
        target = self.run.config if code_of(self.config) else self.run.path
        return f"resume with: evoalign train {shlex.quote(str(target))} --resume"

    @contextmanager
    def _explained(self, *, fresh: bool) -> Generator[None]:
        """A new run that fails in its first generation is taken back; later, the error says that nothing is lost."""
        try:
            yield
        except StoppedError:
            if fresh and not self.run.journal.is_file():
                self.run.undo()
            raise
        except BaseException as error:
            if not self.run.rows:
                if fresh:
                    self.run.undo()
                raise
            if not isinstance(error, EvoalignError | OSError | torch.OutOfMemoryError):
                raise
            kept = f"{len(self.run.rows)} generations are kept; {self._how_to_go_on()}"
            raise _with(error, kept, self.config.engine.smaller(self.config)) from error


def _with(error: EvoalignError | OSError | torch.OutOfMemoryError, more: str, smaller: str) -> EvoalignError:
    """The same error, where it is one of ours, with more to say; `smaller` is what helps where memory ran out."""
    if isinstance(error, EvoalignError):
        error.args = (f"{error}; {more}",)
        return error
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    fix = f"; {smaller}" if isinstance(error, torch.OutOfMemoryError) else ""
    return EvoalignError(f"{line}{fix}; {more}")
