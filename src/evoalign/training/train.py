# SPDX-License-Identifier: Apache-2.0
"""`train`: a run of Evolution Strategies from its config to what it leaves, and resumed from wherever it was left."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from evoalign import evolve, spaces, tracking
from evoalign.checks import canary, control, divergence
from evoalign.checks.control import Control
from evoalign.checks.diagnosis import SAMPLE, Diagnosis
from evoalign.checks.distance import Distance, distance_of_mean
from evoalign.checks.divergence import Divergence, Fluency, Reference
from evoalign.checks.signs import scripts
from evoalign.config import NO_ES, Config, from_dict
from evoalign.cost import estimate, rounding
from evoalign.cost.budget import Cost, Meter
from evoalign.engines.specs import specs_of_config
from evoalign.errors import ConfigError, ModelError, RunExistsError
from evoalign.evaluation import Evaluation
from evoalign.models import origin
from evoalign.placebos import counterfactual
from evoalign.placebos.estimates import Distances, Placebos, distance_line, expected_distance
from evoalign.report import figures, rows
from evoalign.report.rows import LATER, Row, is_whole, metrics_row, rebuilt_row
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.directory import RunDir
from evoalign.rundir.identity import differences
from evoalign.rundir.journal import Journal, Log
from evoalign.rundir.manifest import versions
from evoalign.setup import ConfigLike, Parts, Rewards, as_config, assemble, check_scorer, layout_of, task_and_data
from evoalign.tasks import Split, Task
from evoalign.training import heading, saving, splits, stopping
from evoalign.training.opening import locked, object_given, place
from evoalign.training.recorder import Labels
from evoalign.training.result import Result
from evoalign.training.resuming import log_to_resume
from evoalign.training.session import Session
from evoalign.training.stop import Stop
from evoalign.types import Generation, text_of

Hook = Callable[[Generation], None]


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
    given = object_given(task, reward)
    with locked(run, overwrite=overwrite, resume=resume):
        log = log_to_resume(run, config, given) if resume else None
        if log is None:
            run.refuse(overwrite=overwrite)
        with Stop() as stop, closing(assemble(config, task, reward)) as parts:
            done = None if log is None else len(log.generations)
            algorithm = _EvolutionStrategies(parts, log, given, on_generation)
            session = Session(algorithm, run, stop, console or Console(), given, done)
            return session.live(overwrite=overwrite)


def dry_run(config: ConfigLike, *, overwrite: bool = False, resume: bool = False) -> list[str]:
    """What a config would do: eta, effective sigma, memory, rollouts and tokens. Writes nothing.

    Loads no weights; where members are rounded, it reads a few of each tensor, if their files lie here.
    """
    config = as_config(config)
    run = _place(config, resume=resume)
    task, data = task_and_data(config, None, None)
    task.close()
    asks_mean = task.objective().asks_mean
    known = [*splits.lines(config, task, data), *stopping.lines(config)]
    standing, work = [], [*known, *estimate.work_lines(config, len(data.train), asks_mean=asks_mean)]
    log = log_to_resume(run, config, None) if resume else None
    if log is None:
        try:
            run.refuse(overwrite=overwrite)
        except RunExistsError as error:
            standing = [f"refused as it stands: {error}"]
    else:
        standing = [f"resumes after generation {len(log.generations)} of {config.es.num_generations}"]
    try:
        check_scorer(config, task)
    except (ConfigError, ModelError) as error:
        standing.append(f"refused as it stands: {error}")
    dtype = estimate.served_dtype(config)
    try:
        work, specs = [*origin.lines(config.model), *work], specs_of_config(config)
    except ModelError as error:
        refused = f"refused as it stands: {error}"
        return [*standing, *estimate.step_lines(config, None), *work, "memory: not estimated", refused]
    layout = layout_of(spaces.create(config), specs, dtype)
    known = layout if config.es.sigma is not None else None  # mean |W| needs the weights
    weights = () if known is None else rounding.weights_of_files(config.model, layout)
    step = [*estimate.step_lines(config, known), *rounding.rounding_lines(config, layout, dtype, weights)]
    head = heading.of_es(config, task, data, specs, layout)
    asked = heading.most_asked(config, task, data)
    return [*standing, *head, *step, *work, *estimate.memory_lines(config, specs, layout, dtype, asked)]


def _place(config: Config, *, resume: bool) -> RunDir:
    """Where a run of ES goes. Raises ResumeError, ConfigError for what is of GRPO."""
    run = place(config, "es", resume=resume)
    if config.es_ is None:
        raise ConfigError(f"{NO_ES}; a config with a section grpo and no es is for: evoalign grpo CONFIG")
    return run


class _EvolutionStrategies:
    """What a session asks of ES. Make it while the engine's mean is the start; `log` is the journal to resume."""

    def __init__(self, parts: Parts, log: Log | None, given: str | None, hook: Hook | None) -> None:
        self.parts, self.config, self.task, self.data = parts, parts.config, parts.task, parts.data
        self.log, self.given, self.hook = log, given, hook
        self._meter = Meter(parts.config, parts.engine.specs(), parts.space, parts.layout, parts.facts.device)
        start = parts.engine.probe_weights(SAMPLE)
        self._diagnosis = Diagnosis(
            parts.config, parts.layout, start, parts.max_score, gold=self._gold, known=self._scripts(),
            deterministic=parts.facts.deterministic, given=given,
        )  # fmt: skip
        self._reference = Reference.of(parts)
        self._journal: Journal | None = None
        self._weights_hash = ""
        self._found: Placebos | None = None
        self._course = stopping.Course(parts.config, log)
        self.labels = Labels(
            "es",
            self.config.es.num_generations,
            f"{parts.task.name}, {parts.space.name}, N {self.config.es.population_size}",
            words=dataclasses.replace(figures.ES_WORDS, aim=parts.objective.measure),
            devices=self._meter.devices,
            note=self._meter.note,
        )

    @property
    def journal(self) -> Journal:
        """Open from `begin` or `resume` on."""
        assert self._journal is not None
        return self._journal

    def _gold(self, row: int) -> str | None:
        return self.task.gold(self.task.handed(self.data.train[row]))

    def _scripts(self) -> frozenset[str]:
        """Of the letters in what is asked; no gold is asked for here, which a task may look for in another process."""
        return scripts(text_of(self.task.prompt(example)) for example in self.data.train)

    def open(self, session: Session) -> None:
        """Say what is going to run, and ask the canary."""
        for line in heading.opening(self.parts):
            session.tell(line)
        self._check_canary(session.done)

    def facts(self) -> dict[str, Any]:
        task = {"name": self.task.name, "given_as": self.given}
        start = origin.record(self.config.model)
        return {"engine": dataclasses.asdict(self.parts.facts), "task": task, **start, **saving.scored_by(self.task)}

    def begin(self, session: Session) -> None:
        self._journal = Journal(session.run.journal, saving.header(self.parts, self.given))

    def check_resume(self, session: Session) -> None:
        """Raise ResumeError for another model, tokenizer, noise or data; warn of what moves last bits."""
        header = self._log().header
        repeats = self.parts.facts.deterministic
        for line in differences(self.config, from_dict(header.config), repeats=repeats)[1]:
            session.tell(f"warning: {line}: from here on, scores may differ in their last bits from those of one run")
        saving.check_start(self.parts, header)
        saving.check_data(session.run, self.task, self.data, header.data_hash)
        saving.check_scorer(session.run, self.task, header.scorer_digest)
        ways = (header.machine or {}).get("library", ""), self.parts.facts.library
        if header.machine is not None and ways[0] != ways[1]:
            before, now = (way or "the usual library" for way in ways)
            session.tell(
                f"warning: {before} answered so far, and {now} does now: scores may differ in their last bits from "
                "here on"
            )
        if header.sums != "ordered" and saving.machine_differs(header):
            session.tell(
                f"warning: {saving.elsewhere(header)}; updates from here on may have other bits than there, and the "
                "journal then brings the weights back on neither machine alone: keep the checkpoints"
            )
        elif header.versions != versions():
            session.tell(f"warning: {saving.elsewhere(header)}; scores may differ in their last bits from here on")

    def resume(self, session: Session) -> list[Row]:
        """The latest checkpoint that is whole, the updates after it, and the rows of all that the journal has."""
        log = self._log()
        self._journal = Journal.resume(log)
        if log.generations:
            self.parts.objective.restore(log.generations[-1].objective)
        saving.restore(self.parts, session.run, log, self.journal.seal, session.tell)
        rebuilt = self._restore_rows(session, log)
        for line in self._course.unrecorded(log, session.run.rows):
            session.tell(line)
        self._end_if_due(session)
        if session.done:  # the run may have died before, or while, it saved its last generation
            self._weights_hash = self.parts.engine.fingerprint()
            self._save_if_due(session)
        self._diagnosis.restore(session.run.rows, self.parts.engine.probe_weights(SAMPLE))
        return rebuilt

    def advance(self, session: Session) -> None:
        """The generations that are left; each is recorded and, where it is due, saved and checked as it ends."""
        if session.done >= session.total:
            return
        noise_floor = self._control(session.done)
        for generation in self._generations(session):
            session.done, self._weights_hash = generation.index + 1, generation.weights_hash
            self._course.gone_on()
            self._record(session, generation, noise_floor)
            self._end_if_due(session)
            self._save_if_due(session)
            if canary.is_due(self.config, session.done):
                self._check_canary(generation.index)
            if session.is_stopping:
                session.save()
            if session.is_stopping or session.ending is not None:
                return
            noise_floor = self._control(session.done)

    def evaluate(self, split: Split = "test") -> tuple[Evaluation, Cost]:
        start = time.perf_counter()
        found = self.parts.evaluate(split)
        return found, self._cost(found, split, time.perf_counter() - start)

    def _cost(self, found: Evaluation, split: Split, seconds: float) -> Cost:
        prompts = [self.parts.tokens.encode(self.task.prompt(example)) for example in self.data.of(split)]
        asked = [prompts[c.example] for c in found.completions]
        return self._meter.evaluation(asked, [c.tokens for c in found.completions], seconds)

    def divergence(self) -> Divergence:
        return divergence.measure(self.parts, self._reference)

    def fluency(self, before: Evaluation, after: Evaluation) -> Fluency:
        parts, said = self.parts, (before.completions, after.completions)
        try:
            return divergence.fluency(self._reference, parts.tokens, parts.task, parts.data.test, *said)
        finally:
            self._reference.close()  # its memory is free for placebos

    def distance(self) -> Distance:
        return distance_of_mean(self.parts)

    def placebos(self, session: Session, before: Evaluation, after: Evaluation) -> Placebos | None:
        """As many as `checks.placebo` says; where it says nothing, those that are cheap."""
        log = journal.read(self.journal.path)
        count = counterfactual.count_of(self.parts, log)
        if count:
            session.tell(f"evaluating {count} placebo{'s' if count > 1 else ''}: the run with shuffled coefficients")
            spend = session.recorder.evaluated
            self._found = counterfactual.after_training(
                self.parts, log, before, after, count, lambda: session.stop.asked, self.evaluate, self._meter, spend
            )
        return self._found

    def save(self, run: RunDir, done: int, reward: float | None) -> Path:
        folder = run.saved(done, adapter=not self.parts.space.evolves_model)
        own, journal_hash = self.parts.objective.state, self.journal.last_hash
        mark = Mark(done, self._weights_hash, journal_hash, objective=own, validation=reward)
        return folder if checkpoint.holds(folder, mark) else saving.save(self.parts, folder, mark)

    def fingerprint(self) -> str:
        return self.parts.engine.fingerprint()

    def kept(self, session: Session) -> str:
        return f"{session.done} generations are kept; "

    def smaller(self) -> str:
        return self.config.engine.smaller(self.config)

    def summary(self, alarm: str | None) -> list[str]:
        beats_noise = alarm is None and self._found is not None and not self._found.reached
        return [*self._diagnosis.summary(alarm, beats_noise=beats_noise), *self._drift()]

    def _drift(self) -> list[str]:
        """How far the mean went beside a random walk, from the sample, where placebos have not told it exactly."""
        rows = self._diagnosis.history.rows
        if self._found is not None or not rows or rows[-1].get("distance") is None:
            return []
        updates = [recorded.update for recorded in journal.read(self.journal.path).generations]
        expected = expected_distance(updates, self.parts.layout, self.config.es)
        return [distance_line(Distances(rows[-1]["distance"], expected, ()))]

    def close(self) -> None:
        self._reference.close()
        if self._journal is not None:
            self._journal.close()

    def _log(self) -> Log:
        assert self.log is not None
        return self.log

    def _generations(self, session: Session) -> Iterator[Generation]:
        run = self.parts.run(self.journal, lambda: session.evaluate().measures, self._course.plateaus)
        return evolve.evolve(run, session.done)

    def _end_if_due(self, session: Session) -> None:
        """Before the last generation, where the settings say so."""
        ending = self._course.ending(session.run.rows) if 0 < session.done < session.total else None
        if ending is not None:
            if not self._course.is_written(ending):
                self.journal.end(session.done - 1, ending)
            session.end(ending)

    def _record(self, session: Session, generation: Generation, noise_floor: Control | None) -> None:
        row = metrics_row(generation, self.task.weighted.by_name(list(generation.rewards)))
        row["diagnosis"] = self._diagnosis.update(generation, self.parts.engine.probe_weights(SAMPLE), noise_floor)
        row["budget"] = self._meter.generation(generation).as_dict()
        row["divergence"] = session.divergence_if_due()
        busy = self.parts.engine.metrics()
        row |= {"engine": dict(busy)} if busy else {}
        row |= session.validation() if generation.evaluation is not None else {}
        self._course.note(self.journal, generation.index, row)
        session.record(row)
        for line in self._diagnosis.warnings():
            session.tell(f"warning, generation {session.done}: {line}")
        if rows.completions_due(self.config.tracking.completions_every, generation):
            examples = [self.data.train[i] for i in generation.rows]
            session.run.check()
            file = session.run.completions(f"generation_{generation.index:04d}")
            rows.write_completions(file, generation, examples, self.task)
        if self.hook is not None:
            self.hook(generation)

    def _restore_rows(self, session: Session, log: Log) -> list[Row]:
        """metrics.jsonl cut back to the journal; rows that were lost are made from it, as far as it goes: those."""
        kept, rows, rebuilt = session.run.read_metrics(), list[Row](), list[Row]()
        for recorded in log.generations:
            row, again = kept.get(recorded.update.generation), rebuilt_row(recorded)
            whole = row is not None and is_whole(row, again)
            rows.append({**row, **{k: None for k in LATER if k not in row}} if row is not None and whole else again)
            rebuilt += [] if whole else [again]
        if rows and rows[-1]["evaluation"] is None and evolve.is_due(self.config, len(rows) - 1):
            rows[-1] |= {"evaluation": session.evaluate().measures, **session.validation()}
        if rows and log.generations[-1].validation is None:
            self._course.note(self.journal, len(rows) - 1, rows[-1])
        if rows and rows[-1]["divergence"] is None:
            rows[-1]["divergence"] = session.divergence_if_due()
        session.run.replace_metrics(rows)
        return rebuilt

    def _save_if_due(self, session: Session) -> None:
        """Save the mean where that is a checkpoint, or the best by its evaluation."""
        every, reward = saving.every(self.config, self.journal.summation), session.reward()
        is_best = False
        if self.config.checkpoint.keep_best and reward is not None:
            best = saving.best_saved(session.run)
            mark = None if best is None else checkpoint.mark_of(best)
            is_best = mark is None or mark.validation is None or reward > mark.validation
        if (every and session.done % every == 0) or is_best:
            session.save()

    def _check_canary(self, generation: int) -> None:
        """Raise CanaryError where members do not answer with their own weights."""
        parts, prompt = self.parts, self.parts.tokens.encode(self.task.prompt(self.data.train[0]))
        width, exact = self._width(min(generation, self.config.es.num_generations - 1)), parts.facts.deterministic
        for engine in parts.engine.parts():
            canary.check(engine, parts.space, parts.layout, prompt, generation=generation, width=width, exact=exact)

    def _width(self, generation: int) -> float:
        return evolve.sigma_at(self.config, generation, self._course.plateaus())

    def _control(self, index: int) -> Control | None:
        """The A/A control of the next generation: the mean is the one that its members are going to be drawn around."""
        parts = self.parts
        if not control.is_due(self.config, index) or not parts.objective.scores_alone:
            return None
        examples = [self.data.train[i] for i in evolve.rows_of(self.config, len(self.data.train), index)]
        return control.control(
            self.config, parts.engine, parts.task, parts.tokens, examples, index, objective=parts.objective
        )
