# SPDX-License-Identifier: Apache-2.0
"""`train`: a run of Evolution Strategies from its config to its run directory, new or resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from evoalign import evolve, optimizer, shaping, spaces, tracking
from evoalign.checks import axes, canary, control, gateway, prompts
from evoalign.checks.control import Control
from evoalign.checks.diagnosis import SAMPLE, Diagnosis, summary
from evoalign.checks.signs import scripts
from evoalign.config import Config, from_record
from evoalign.cost import estimate, rounding
from evoalign.engines.specs import specs_of_config
from evoalign.errors import ConfigError, JournalError, ModelError, ResumeError, RunExistsError
from evoalign.models import origin
from evoalign.placebos import counterfactual
from evoalign.placebos.estimates import Distances, Placebos, distance_line, expected_distance
from evoalign.report import figures, rows
from evoalign.report.rows import LATER, Row, is_whole, metrics_row, rebuilt_row
from evoalign.rewards.objective import aim
from evoalign.rollouts import collect
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.directory import RunDir
from evoalign.rundir.identity import differences
from evoalign.rundir.journal import Journal, Log, Recorded
from evoalign.setup import (
    ConfigLike,
    Parts,
    Rewards,
    as_config,
    assemble,
    check_scorer,
    layout_of,
    object_given,
    task_and_data,
    with_form,
)
from evoalign.tasks import Split, Task
from evoalign.training import heading, saving, stopping
from evoalign.training.inputs import check_inputs, inputs_of
from evoalign.training.mean import Mean
from evoalign.training.recorder import Labels
from evoalign.training.result import Result
from evoalign.training.session import PLACEBOS, SUMMARY, Finish, Measurement, Session, locked, place
from evoalign.training.stopping import Stop
from evoalign.types import MEAN_PLAN, Example, Generation, text_of

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
    custom task) replace those of the config. `on_generation` is called after each generation. `resume` resumes the run
    in `output_dir` exactly, or begins it if there is none. Raises a subclass of EvoalignError: for bad input, before
    anything is written; StoppedError after a signal.
    """
    config = as_config(config)
    config = with_form(config, Path(config.output_dir) if resume else None) if task is None else config
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
    """Return what a config would do, as lines: eta, effective sigma, memory, rollouts and tokens.

    Writes nothing and loads no model. If members are rounded, it reads a few weights of each tensor from local files.
    """
    config = as_config(config)
    config = with_form(config, Path(config.output_dir) if resume else None)
    run = _place(config, resume=resume)
    task, data = task_and_data(config, None, None)
    task.close()
    asks_mean, tokens = task.objective().asks_mean, heading.most_tokens(config, task)
    standing, work = [], [*heading.split_lines(config, task, data), *stopping.lines(config)]
    work += estimate.work_lines(config, len(data.train), tokens, asks_mean=asks_mean)
    work.insert(-1, heading.measuring_line(config, task, data))  # before the line on time
    log = log_to_resume(run, config, None) if resume else None
    if log is None:
        try:
            run.refuse(overwrite=overwrite)
        except RunExistsError as error:
            standing = [f"would be refused: {error}"]
    else:
        standing = [f"resumes after generation {len(log.generations)} of {config.es.num_generations}"]
    try:
        check_scorer(config, task)
    except (ConfigError, ModelError) as error:
        standing.append(f"would be refused: {error}")
    standing += heading.token_lines(config, task, data)
    dtype = estimate.served_dtype(config)
    try:
        work, specs = [*origin.lines(config.model), *work], specs_of_config(config)
    except ModelError as error:
        work += [estimate.memory_by_name(config.model.name, dtype), f"would be refused: {error}"]
        return [*standing, *estimate.step_lines(config, None), *work]
    layout = layout_of(spaces.create(config), specs, dtype)
    optimizer.create(config.es, layout)  # raises ConfigError if it cannot evolve this layout
    if refused := estimate.refusal(config, specs, layout, dtype):
        standing.append(f"warning: this machine is too small: {refused}")  # the run may be for another one
    known = layout if config.es.sigma is not None else None  # mean |W| needs the weights
    weights = () if known is None else rounding.weights_of_files(config.model, layout)
    step = [*estimate.step_lines(config, known), *rounding.rounding_lines(config, layout, dtype, weights)]
    head = heading.of_es(config, task, data, specs, layout)
    return [*standing, *head, *step, *work, *heading.memory_lines(config, task, data, specs, layout)]


def _place(config: Config, *, resume: bool) -> RunDir:
    """Return the run directory of ES. Raises ResumeError, ConfigError for a run or a config of GRPO."""
    run = place(config, "es", resume=resume)
    shaping.load(config.es.shaping)  # raises ConfigError if it, or the section, is missing
    return run


def log_to_resume(run: RunDir, config: Config, given_as: str | None) -> Log | None:
    """Return the journal to resume, or None if nothing was recorded yet. Raises JournalError, ResumeError."""
    if journal.is_blank(run.journal):
        if run.has_progress():
            raise JournalError(
                f"{run.journal} is missing or cut in its first line, though the run has generations; put it back, or "
                "move the run aside with --overwrite"
            )
        return None
    log = journal.read(run.journal).whole()
    odd, _ = differences(config, from_record(log.header.config))
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


class _EvolutionStrategies:
    """ES as a session runs it. Make it while the engine's mean is the start; `log` is the journal to resume."""

    def __init__(self, parts: Parts, log: Log | None, given: str | None, hook: Hook | None) -> None:
        self.parts, self.config, self.task, self.data = parts, parts.config, parts.task, parts.data
        self.rows = parts.rows
        self.log, self.given, self.hook = log, given, hook
        self.mean = Mean(parts)
        chosen: dict[str, Measurement] = {"settings": lambda _: dict(parts.settings.chosen(parts.settings.mode()))}
        measured: dict[str, Measurement] = {PLACEBOS: self._placebos, SUMMARY: self._summary}
        self.measurements: Mapping[str, Measurement] = (chosen if parts.settings else {}) | measured
        self._diagnosis = Diagnosis(
            parts.config,
            parts.layout,
            parts.engine.probe_weights(SAMPLE),
            parts.max_score,
            gold=lambda row: self.task.gold(self.task.handed(self.data.train[row])),
            known=scripts(text_of(self.task.prompt(example)) for example in self.data.train),
            columns=axes.reader(self.task, self.data.train, parts.settings),
            generates=self.task.player != "given",
            deterministic=parts.facts.deterministic,
            given=given,
        )
        self._journal: Journal | None = None
        self._validation: Row = {}
        self._next: Control | None = None
        self._course = stopping.Course(parts.config, log)
        self.labels = Labels(
            "es",
            self.config.es.num_generations,
            f"{parts.task.name}, {parts.space.name}, N {self.config.es.population_size}",
            words=dataclasses.replace(figures.ES_WORDS, aim=parts.objective.measure),
            devices=self.mean.meter.devices,
            note=self.mean.meter.note,
            smaller=self.config.engine.smaller(self.config),
        )

    @property
    def journal(self) -> Journal:
        """The open journal, from `begin` or `resume` on."""
        assert self._journal is not None
        return self._journal

    def open(self, session: Session) -> Mapping[str, Any]:
        if self.log is not None and self.log.generations:
            self.parts.restore(self.log.generations[-1].objective)
        for line in heading.opening(self.parts):
            session.tell(line)
        prompts.check(self.config, self.parts.tokens, self.task, self.data)
        self._check_canary(session.done)
        if self.log is not None:
            self._check_resume(session, self.log)
        return {
            "engine": dataclasses.asdict(self.parts.facts),
            "task": {"name": self.task.name, "given_as": self.given},
            "task_notes": list(self.task.notes),
            **origin.record(self.config.model),
            **saving.scored_by(self.task),
        }

    def begin(self, session: Session) -> None:
        self._start_journal(Journal(session.run.journal, saving.header(self.parts, self.given)))

    def resume(self, session: Session) -> list[Row]:
        """Load the latest intact checkpoint, apply the updates after it, and restore the rows the journal has."""
        assert self.log is not None
        log = self.log
        self._start_journal(Journal.resume(log))
        saving.restore(self.parts, session.run, log, self.journal.seal, session.tell, self._best_again(session.run))
        rebuilt = self._restore_rows(session, log)
        session.recorder.tell_lost(len(log.generations) - 1, self.config.es.num_generations)
        for line in self._course.unrecorded(log, session.run.rows):
            session.tell(line)
        self._end_if_due(session)
        if session.done:  # the run may have died before, or while, it saved its last generation
            self.mean.weights_hash = self.parts.engine.fingerprint()
            self._save_if_due(session)
        self._diagnosis.restore(session.run.rows, self.parts.engine.probe_weights(SAMPLE))
        return rebuilt

    def advance(self, session: Session) -> None:
        if session.done >= session.total:
            return
        keeps_best = self.config.checkpoint.keep_best and self.config.evaluation.every and self.data.validation
        if saving.every(self.config, self.journal.summation) or keeps_best:
            self.mean.saver.prepare()
        self.task.keep_episodes(session.run.results / "episodes.jsonl")
        noise_floor = self._control(session.done)
        run = self.parts.run(self.journal, lambda: self._evaluate(session, session.done + 1), self._course.plateaus)
        for generation in evolve.evolve(run, session.done):
            session.done = session.resumable = generation.index + 1
            self.mean.weights_hash = generation.weights_hash
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

    def close(self) -> None:
        self.mean.saver.close()
        self.mean.reference.close()
        if self._journal is not None:
            self._journal.close()

    # --- steps of these ----------------------------------------------------------------------------------------------

    def _start_journal(self, opened: Journal) -> None:
        self._journal = opened
        self.mean.journal_hash = lambda: opened.last_hash

    def _check_resume(self, session: Session, log: Log) -> None:
        """Raise ResumeError for another model, tokenizer, noise or data; warn of what changes last bits."""
        header, tell = log.header, session.tell
        repeats = self.parts.facts.deterministic
        for line in differences(self.config, from_record(header.config), repeats=repeats)[1]:
            tell(f"warning: {line}: from here on, scores may differ in their last bits from an uninterrupted run")
        saving.check_start(self.parts, header)
        saving.check_data(session.run, self.task, self.data, header.data_hash)
        saving.check_prompts(session.run, self.task, self.data, self.parts.tokens, header.prompts_hash)
        saving.check_scorer(session.run, self.task, header.scorer_digest)
        for line in check_inputs(session.run.path, header.inputs, inputs_of(self.config, self.parts.tokens)):
            tell(f"warning: {line}")
        before, now = (header.machine or {}).get("library", ""), self.parts.facts.library
        if header.machine is not None and before != now:
            tell(
                f"warning: completions came from {before or 'the usual library'} so far, and come from "
                f"{now or 'the usual library'} now: scores may differ in their last bits from here on"
            )
        if header.sums != "ordered" and saving.machine_differs(header):
            tell(
                f"warning: {saving.elsewhere(header)}; updates from here on may have other bits than there, and the "
                "journal then restores the weights on neither machine alone: keep the checkpoints"
            )
        elif header.versions != saving.versions_here(header):
            tell(f"warning: {saving.elsewhere(header)}; scores may differ in their last bits from here on")

    def _restore_rows(self, session: Session, log: Log) -> list[Row]:
        """Cut metrics.jsonl back to the journal, rebuild lost rows as far as it has them, and return those."""
        kept, rows, rebuilt = session.run.read_metrics(), list[Row](), list[Row]()
        for recorded in log.generations:
            row, again = kept.get(recorded.update.generation), rebuilt_row(recorded)
            whole = row is not None and is_whole(row, again)
            rows.append({**row, **{k: None for k in LATER if k not in row}} if row is not None and whole else again)
            rebuilt += [] if whole else [again]
        if rows and rows[-1]["evaluation"] is None and evolve.is_due(self.config, len(rows) - 1):
            rows[-1] |= {"evaluation": self._evaluate(session, len(rows)), **self._validation}
        if rows and log.generations[-1].validation is None:
            self._course.note(self.journal, len(rows) - 1, rows[-1])
        if rows and rows[-1]["divergence"] is None:
            rows[-1]["divergence"] = session.divergence_if_due()
        session.run.replace_metrics(rows)
        return rebuilt

    def _record(self, session: Session, generation: Generation, noise_floor: Control | None) -> None:
        row = metrics_row(generation, self.task.weighted.by_name(list(generation.rewards)))
        row["diagnosis"] = self._diagnosis.update(generation, self.parts.engine.probe_weights(SAMPLE), noise_floor)
        row["budget"] = self.mean.meter.generation(generation).as_dict()
        row["divergence"] = session.divergence_if_due()
        busy = self.parts.engine.metrics()
        row |= {"engine": dict(busy)} if busy else {}
        row |= self._validation if generation.evaluation is not None else {}
        self._course.note(self.journal, generation.index, row)
        session.recorder.distribute(generation.index, generation.columns)
        session.record(row)
        for line in self._diagnosis.warnings():
            session.tell(f"warning, generation {session.done}: {line}")
        if rows.completions_due(self.config.tracking.completions_every, generation.index, generation.total):
            examples = self.parts.settings.asked(self.data.train, generation.rows, generation.settings)
            session.run.check()
            file = session.run.completions(f"generation_{generation.index:04d}")
            rows.write_completions(file, generation, examples, self.task, self.parts.tokens)
        if self.hook is not None:
            self.hook(generation)

    def _end_if_due(self, session: Session) -> None:
        """End the run before its last generation if its settings say so."""
        ending = self._course.ending(session.run.rows) if 0 < session.done < session.total else None
        if ending is not None:
            if not self._course.is_written(ending):
                self.journal.end(session.done - 1, ending)
            session.end(ending)

    def _save_if_due(self, session: Session) -> None:
        """Save the mean if a checkpoint is due, or if it is the best so far on the validation split."""
        self.mean.saver.check()
        every, reward = saving.every(self.config, self.journal.summation), session.reward()
        is_best = False
        if self.config.checkpoint.keep_best and reward is not None:
            self.mean.saver.wait()
            best = saving.best_saved(session.run)
            mark = None if best is None else checkpoint.mark_of(best)
            is_best = mark is None or mark.validation is None or reward > mark.validation
        if (every and session.done % every == 0) or is_best:
            session.save()

    def _best_again(self, run: RunDir) -> Callable[[Recorded], None]:
        """Return a function that saves the best mean of the rows once its update has been applied again.

        The process may have ended while a thread wrote it.
        """
        rows = run.read_metrics()
        rewards = {g: float(aim(rows[g]["validation"])) for g in sorted(rows) if rows[g].get("validation")}
        best = max(rewards, key=rewards.__getitem__, default=None) if self.config.checkpoint.keep_best else None

        def applied(recorded: Recorded) -> None:
            if best is not None and recorded.update.generation == best and recorded.weights_hash is not None:
                self.mean.save_recorded(run, recorded, rewards[best])

        return applied

    def _check_canary(self, generation: int) -> None:
        """Raise CanaryError if members do not answer with their own weights."""
        at = min(generation, self.config.es.num_generations - 1)
        width = evolve.sigma_at(self.config, at, self._course.plateaus())
        gateway.check_all(self.parts, generation=generation, width=width)

    def _evaluate(self, session: Session, index: int) -> Mapping[str, float]:
        """Evaluate the mean, with the control of generation `index` in the same rollout; return the test measures.

        Keeps those of the validation split for the row, and the control for `_control`.
        """
        splits: list[Split] = ["test", "validation"] if self.data.validation else ["test"]
        examples = self._controlled(index)
        requests = control.requests_of(self.parts.decoding, self.task, self.parts.tokens, examples, index)
        found, cost, rollouts = self.mean.evaluate_together(splits, requests)
        session.recorder.evaluated(cost)
        self._validation = {split: found[split].measures for split in splits[1:]}
        if examples:
            self._next = control.control(self.parts.objective, self.task, rollouts, examples)
        return found["test"].measures

    def _control(self, index: int) -> Control | None:
        """Return the A/A control of the next generation, whose members are drawn around the present mean."""
        found, self._next = self._next, None
        examples = self._controlled(index)
        if found is not None or not examples:
            return found
        requests = control.requests_of(self.parts.decoding, self.task, self.parts.tokens, examples, index)
        rollouts = collect(self.parts.engine, MEAN_PLAN, requests)
        return control.control(self.parts.objective, self.task, rollouts, examples)

    def _controlled(self, index: int) -> Sequence[Example]:
        """Return the examples of a generation, each as often as it is requested; none without a control."""
        if not control.is_due(self.config, index) or not self.parts.objective.scores_alone:
            return []
        examples = self.parts.rows("train")
        return [examples[i] for i in evolve.rows_of(self.config, len(examples), index)]

    # --- measurements of the finished run ----------------------------------------------------------------------------

    def _placebos(self, finish: Finish) -> Placebos | None:
        """Compare the run with `checks.placebo` placebos; if unset, with those that take little time.

        They overwrite the engine's weights.
        """
        session, log = finish.session, journal.read(self.journal.path)
        count = counterfactual.count_of(self.parts, log)
        if not count:
            return None
        session.tell(f"evaluating {count} placebo{'s' if count > 1 else ''}: the run with shuffled coefficients")
        return counterfactual.after_training(
            self.parts, log, finish.before, finish.after, count, lambda: session.stop.asked, self.mean.evaluate,
            self.mean.meter, session.recorder.evaluated,
        )  # fmt: skip

    def _summary(self, finish: Finish) -> Sequence[str]:
        """Return the diagnosis, and the distance from a random walk's unless placebos have measured it exactly."""
        found: Placebos | None = finish.found[PLACEBOS]
        alarm = finish.verdict().word
        beats_noise = alarm is None and found is not None and not found.reached
        lines = [*self.parts.settings.lines(), *summary(self._diagnosis.history, alarm, beats_noise=beats_noise)]
        rows = self._diagnosis.history.rows
        if found is None and rows and rows[-1].get("distance") is not None:
            updates = [recorded.update for recorded in journal.read(self.journal.path).generations]
            expected = expected_distance(updates, self.parts.layout, self.config.es)
            return [*lines, distance_line(Distances(rows[-1]["distance"], expected, ()))]
        return lines
