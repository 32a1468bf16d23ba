# SPDX-License-Identifier: Apache-2.0
"""One run of any method from start to end: lock, begin or resume, record, save, stop, finish.

A method is an `Algorithm`. The run directory, messages, figures, trackers, budget and errors are handled here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from rich.console import Console

from evoalign.checks import divergence
from evoalign.checks.distance import Distance
from evoalign.checks.divergence import Divergence, Fluency
from evoalign.checks.hacking import Verdict, judge
from evoalign.config import Config
from evoalign.cost import budget
from evoalign.cost.budget import Cost
from evoalign.errors import (
    DataError,
    EvoalignError,
    ResumeError,
    RewardError,
    RunGoneError,
    ScorerAwayError,
    StoppedError,
    is_out_of_memory,
)
from evoalign.evaluation import Evaluation, with_points, with_resampled
from evoalign.placebos import file as placebo_file
from evoalign.report.progress import Bar
from evoalign.report.rows import WEIGHTS, Row
from evoalign.rewards.objective import aim
from evoalign.rundir import checksums
from evoalign.rundir.directory import AFTER_VALIDATION, BEFORE_VALIDATION, MEASURING, REPORT, RunDir
from evoalign.rundir.files import write_rows
from evoalign.rundir.identity import command_line, make_manifest
from evoalign.rundir.journal import Ending
from evoalign.rundir.method import COMMANDS, Method, refuse_other, resume_command
from evoalign.tasks import Data, Split, Task
from evoalign.training import heading, saving, stopping
from evoalign.training.recorder import Labels, Recorder
from evoalign.training.result import Result, read_completions, show, validation_of, write_completions, write_results
from evoalign.training.stopping import Stop
from evoalign.types import Example


class Mean(Protocol):
    """The trained model of a run: the mean of ES, the policy of GRPO."""

    def evaluate(self, split: Split = "test") -> tuple[Evaluation, Cost]:
        """Evaluate it on a split, and return the cost of that."""
        ...

    def divergence(self) -> Divergence:
        """Return its KL divergence from the base model."""
        ...

    def distance(self) -> Distance:
        """Return the distance of its weights from the base model's. Raises EvoalignError where that is unknown."""
        ...

    def fluency(self, before: Evaluation, after: Evaluation) -> Fluency:
        """Return both evaluations' nats per token under the base model. Raises ModelError if that does not fit."""
        ...

    def save(self, run: RunDir, done: int, reward: float | None, then: Callable[[], None]) -> Path:
        """Save it unless it is saved already, and call `then` once it is; return its folder.

        It may be written after this returns: see `settle`. `reward` is its reward on the validation split, if known.
        """
        ...

    def settle(self) -> None:
        """Wait until all that was saved is written. Raises OSError for a full disk."""
        ...

    def fingerprint(self) -> str:
        """Return its `weights_hash`."""
        ...


class Algorithm(Protocol):
    """A training method, ES or GRPO, as a session runs it. `rows` returns those that the mean is evaluated on now.

    `measurements` of a finished run come after the common ones, by name; see `Finish`.
    """

    config: Config
    task: Task
    data: Data
    rows: Callable[[Split], Sequence[Example]]
    labels: Labels
    measurements: Mapping[str, Measurement]

    @property
    def mean(self) -> Mean:
        """The trained model."""
        ...

    def open(self, session: Session) -> Mapping[str, Any]:
        """Report what is going to run, and return the manifest's facts. Nothing is written yet.

        Raises ResumeError, EvoalignError for what cannot run or resume here.
        """
        ...

    def begin(self, session: Session) -> None:
        """Start recording a new run. Its directory is made and the start is evaluated: it can be resumed from now."""
        ...

    def resume(self, session: Session) -> list[Row]:
        """Restore the mean and the rows of metrics.jsonl; return the rows that trackers have not seen."""
        ...

    def advance(self, session: Session) -> None:
        """Train to the end, or until the session is stopping and everything is saved."""
        ...

    def close(self) -> None:
        """Release what the algorithm opened."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """A run after its last step: its evaluations, and what was measured so far by name (None where that failed)."""

    session: Session
    before: Evaluation
    after: Evaluation
    found: dict[str, Any]

    def verdict(self) -> Verdict:
        """Return the signs of reward hacking in the completions, by fluency too where that is measured."""
        return judge(self.before.completions, self.after.completions, self.found.get(NATS))


Measurement: TypeAlias = Callable[[Finish], Any]
"""A measurement of a finished run; None: not requested. Where it fails, the run stays complete, with a warning."""
FINISH = "--set stopping.max_hours=1e-6"
"""Option of a resume that ends the run at once."""
KL, DISTANCE, NATS, PLACEBOS, SUMMARY = "KL divergence", "distance", "nats per token", "placebos", "summary"


def _divergence(finish: Finish) -> Mapping[str, Any] | None:
    session, rows = finish.session, finish.session.run.rows
    known = (rows[-1].get("divergence") or {}) if rows else {}
    if "exact" in known:  # a changed file may have anything there
        return known
    return dataclasses.asdict(session.algorithm.mean.divergence()) if session.config.checks.kl_every else None


MEASUREMENTS: Mapping[str, Measurement] = {
    KL: _divergence,
    DISTANCE: lambda finish: dataclasses.asdict(finish.session.algorithm.mean.distance()),
    NATS: lambda finish: (
        finish.session.algorithm.mean.fluency(finish.before, finish.after)
        if finish.session.config.measures_nats
        else None
    ),
}
"""Measurements of every method, in this order."""
RECORDED: Mapping[str, str] = {KL: "divergence", DISTANCE: "distance", "settings": "chosen_settings"}
"""Keys in results/evaluation.json of measurements that are written as soon as they are made."""


class Session:
    """One run in this process.

    `done` counts the steps so far; None for a new run. `given` names what was passed as a Python object (task or
    reward), which has to be passed again to resume. The algorithm sets `done` as it advances, and `resumable` to the
    number of steps that a resumed run would keep.
    """

    def __init__(
        self, algorithm: Algorithm, run: RunDir, stop: Stop, console: Console, given: str | None, done: int | None
    ) -> None:
        self.algorithm, self.config, self.run, self.stop, self.given = algorithm, algorithm.config, run, stop, given
        self.labels = algorithm.labels
        self.recorder = Recorder(self.config, run, console, self.labels)
        self.tell, self.record = self.recorder.tell, self.recorder.record
        self.done, self.resumable, self.total = done or 0, done, self.labels.total
        self.is_new, self._has_begun = done is None, False
        self.ending: Ending | None = None
        """Why the run ends before its last step, if it does."""
        self._validated: Evaluation | None = None
        """The start on the validation split, if there is one."""

    def live(self, *, overwrite: bool) -> Result:
        """Begin or resume, train the steps that are left, and compare start and end. Raises EvoalignError."""
        facts = self.algorithm.open(self)
        with self._explained(), closing(self.recorder), closing(self.algorithm):
            before = self._begin(facts, overwrite=overwrite) if self.is_new else self._resume()
            self._has_begun = True
            self.recorder.measured("test", before)
            if self._validated is not None:
                self.recorder.measured("validation", self._validated)
            for line in heading.cut_off_lines(before, self.config) if self.is_new else ():
                self.tell(line)
            self._stop_if_requested()
            with self.recorder:
                self.algorithm.advance(self)
            self._stop_if_requested()
            return self._finish(before)

    # --- for the algorithm, as it advances ---------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """Whether the algorithm must save its mean and return."""
        return self.stop.asked is not None

    def end(self, ending: Ending) -> None:
        """End the run here, before its last step; it is then finished as usual."""
        self.ending, self.total = ending, self.done
        self.tell(f"ends after {self.labels.unit} {self.done} of {self.labels.total}: {stopping.words(ending)}")

    def evaluate(self, split: Split = "test") -> Evaluation:
        """Evaluate the mean on a split, and add the cost to the budget."""
        found, cost = self.algorithm.mean.evaluate(split)
        self.recorder.evaluated(cost)
        return found

    def validation(self) -> Row:
        """Return a row's measures of the validation split; empty without one."""
        return {"validation": self.evaluate("validation").measures} if self.algorithm.data.validation else {}

    def divergence_if_due(self) -> dict[str, Any] | None:
        """Return the KL divergence from the base model every `checks.kl_every` steps, else None."""
        due = divergence.is_due(self.config, self.done)
        return dataclasses.asdict(self.algorithm.mean.divergence()) if due else None

    def save(self) -> Path:
        """Save the mean, and delete checkpoints beyond those to keep. Raises RunGoneError."""
        self.run.check()
        delete = partial(saving.retain, self.run, self.config)
        return self.algorithm.mean.save(self.run, self.done, self.reward(), delete)

    def reward(self) -> float | None:
        """Return the mean's reward on the validation split after this step, if known. The test split is never used."""
        measures = self.run.rows[self.done - 1].get("validation") if 0 < self.done <= len(self.run.rows) else None
        return float(aim(measures)) if measures else None

    # --- begin, resume, finish ---------------------------------------------------------------------------------------

    def _begin(self, facts: Mapping[str, Any], *, overwrite: bool) -> Evaluation:
        manifest = make_manifest(self.config, facts, command_line(), self.labels.method)
        self.run.create(self.config, manifest, overwrite=overwrite)
        self.recorder.start(None)
        if self.config.checks.kl_every:  # before the first step, so that a model that does not fit is reported early
            start = time.monotonic()
            kl, seconds = self.algorithm.mean.divergence(), time.monotonic() - start
            self.tell(f"KL of the start from the base model: {kl}; measured in {seconds:.1f} s")
        before = self._evaluate("start")
        if self.algorithm.data.validation:
            self._validated = self._evaluate("start", "validation")
        if self.stop.asked is not None:
            raise StoppedError(f"stopped before the first {self.labels.unit}; nothing was written", self.stop.asked)
        if self.run.aside is not None:
            self.tell(f"the previous run is now {self.run.aside}")
        write_completions(self.run, "before", before)
        if self._validated is not None:
            write_completions(self.run, BEFORE_VALIDATION, self._validated)
        self.recorder.show(0, before)
        self.algorithm.begin(self)
        return before

    def _resume(self) -> Evaluation:
        try:
            checksums.verify(self.run.path)
        except DataError as error:
            self.tell(f"warning: {error}")
        self.recorder.evaluations = budget.read_evaluation(self.run.budget)
        if self.algorithm.data.validation:
            self._validated = self._start_of(BEFORE_VALIDATION, "validation")
        before = self._start_of("before", "test")
        checksums.forget(self.run.path)
        self.run.sweep()
        missed = self.algorithm.resume(self)
        if self.done < self.total:  # the results of an earlier end are stale
            placebo_file.remove(self.run.path)
            (self.run.path / REPORT).unlink(missing_ok=True)
        self.run.resume(self.config, make_manifest(self.config, {}, command_line(), self.labels.method))
        self.recorder.start(self.done, missed)
        self.tell(f"resumes after {self.labels.unit} {self.done} of {self.total}, in {self.run.path}")
        return before

    def _start_of(self, name: str, split: Split) -> Evaluation:
        """Return the evaluation of the start: as it was written, or made again while the mean is still there."""
        found = read_completions(self.run, name, self.algorithm.task, self.algorithm.data, split)
        if found is None:
            found = self._evaluate("start", split)
            write_completions(self.run, name, found)
        return found

    def _finish(self, before: Evaluation) -> Result:
        saved, task, tests = self.save(), self.algorithm.task, (self.algorithm.data.test, self.algorithm.rows("test"))
        after = self._evaluate("result")
        self.algorithm.mean.settle()
        results: dict[str, Any] = {"generation": self.done, "weights_hash": self.algorithm.mean.fingerprint()}
        if self.ending is not None:
            results["ending"] = dataclasses.asdict(self.ending)
        if self._validated is not None:
            validation = self._validated, self._evaluate("result", "validation")
            write_completions(self.run, AFTER_VALIDATION, validation[1])
            results["validation"], line = validation_of(*validation)
            self.tell(line)
            self.recorder.measured("validation", *validation)
        weights = task.weighted.by_name(list(after.completions[0].rewards))
        results |= {WEIGHTS: weights} if weights else {}
        before, after = map(partial(with_resampled, task), tests, (before, after))
        finish = Finish(self, before, after, {})
        results["alarms"] = finish.verdict().as_dict()
        self.run.check()
        with checksums.recorded(self.run.path):  # before the measurements, in which the process may be killed
            write_results(self.run, self.config.evaluation, {**results, MEASURING: True}, before, after)
            for name, test, found in zip(("points_before", "points"), tests, (before, after), strict=True):
                write_rows(self.run.results / f"{name}.jsonl", with_points(task, test, found).points)
        for name, measure in {**MEASUREMENTS, **self.algorithm.measurements}.items():
            finish.found[name] = self._measured(name, partial(measure, finish))
            if name in RECORDED:  # before the next measurement, in which the process may be killed
                results[RECORDED[name]] = finish.found[name]
                self.run.check()
                with checksums.recorded(self.run.path):
                    write_results(self.run, self.config.evaluation, {**results, MEASURING: True}, before, after)
        verdict, measured = finish.verdict(), finish.found
        results["alarms"] = verdict.as_dict()
        placebos = measured.get(PLACEBOS)
        with checksums.recorded(self.run.path):
            write_results(self.run, self.config.evaluation, results, before, after, placebos)
            show(before, after, verdict, self.recorder.console, self.tell, placebos, weights, task.scored)
        for line in measured.get(SUMMARY) or ():
            self.tell(line)
        self.recorder.measured("test", before, after)
        self.recorder.finish(before, after, measured[KL])
        self.run.check()
        self.tell("\n".join(heading.last_lines(self.run, saved, self.config, task, self.given, placebos)))
        return Result(self.run.path, saved, before, after, verdict)

    def _measured(self, name: str, measure: partial[Any]) -> Any:
        """Return a measurement, or None after a warning. Mistakes of the code itself are raised."""
        try:
            with Bar(name, self.recorder.console):
                return measure()
        except RunGoneError:
            raise
        except StoppedError:
            why = "stopped"
        except (EvoalignError, OSError, RuntimeError, MemoryError) as error:  # torch's are RuntimeErrors
            why = first_line(error)
        what = f"warning: {name} could not be measured ({why}); the run is complete without it; to measure it, "
        self.tell(what + how_to_resume(self))
        return None

    def _evaluate(self, which: str, split: Split = "test") -> Evaluation:
        self.tell(what := f"evaluating the {which} on {len(self.algorithm.data.of(split))} {split} examples")
        with Bar(what, self.recorder.console):
            return self.evaluate(split)

    def _stop_if_requested(self) -> None:
        # A last step of GRPO inside a round is not saved: stopping there would lose it.
        if self.stop.asked is not None and (self.done < self.total or self.resumable == self.done):
            self.algorithm.mean.settle()
            at = f"{self.labels.unit} {self.done} of {self.total}"
            end = ""
            if 0 < self.done < self.total and self.given is None and self.config.es_ is not None:
                end = f"; add {FINISH} to end it here instead, with its final test"
            raise StoppedError(f"stopped after {at}; {how_to_resume(self)}{end}", self.stop.asked)

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Delete a new run that fails in its first step; after that, add to the error how to resume the run."""
        try:
            yield
        except StoppedError:
            if self.is_new and not self._has_begun:
                self.run.undo()
            raise
        except RunGoneError:  # there is nothing to undo or to resume
            raise
        except BaseException as error:
            if isinstance(error, OSError):  # a missing file, if the folder was removed during a write
                self.run.check()
            smaller = f"; {self.labels.smaller}" if is_out_of_memory(error) else ""
            if not self.done:
                self.run.undo()
                if isinstance(error, ScorerAwayError):
                    nothing = "nothing was begun: " if self.is_new else ""
                    error.add_note(f"{nothing}then give the same command again")
                if smaller:
                    raise EvoalignError(first_line(error) + smaller) from error
            elif isinstance(error, EvoalignError) and not isinstance(error, ResumeError):  # that names its own mend
                error.add_note(self._kept())
            elif smaller or isinstance(error, OSError):
                raise EvoalignError(f"{first_line(error)}{smaller}; {self._kept()}") from error
            raise

    def _kept(self) -> str:
        """After a failure: the steps that are kept, and how to resume."""
        if self.resumable is None:
            return f"no checkpoint was saved, so the run begins again: {how_to_resume(self)}"
        return f"kept up to {self.labels.unit} {self.resumable}; {how_to_resume(self)}"


def how_to_resume(session: Session) -> str:
    """Return the command, or the call in Python, that resumes a session's run."""
    run, method = session.run, session.labels.method
    if session.given is not None:
        return f"resume with {COMMANDS[method]}(..., {session.given}=..., resume=True)"
    return f"resume with: {resume_command(run.path, method)}"


@contextmanager
def locked(run: RunDir, *, overwrite: bool, resume: bool) -> Generator[None]:
    """Hold the lock of a run directory, and keep there what a reward failed on. Raises RunExistsError."""
    if not resume:
        run.refuse(overwrite=overwrite)
    try:
        run.lock()
        yield
    except RewardError as error:
        if error.failed is not None:
            error.add_note(f"its input is in {run.keep_failure(error.failed)}")
        raise
    finally:
        run.release()


def place(config: Config, method: Method, *, resume: bool) -> RunDir:
    """Return the run directory of a config. Raises ResumeError where another method's run is to be resumed."""
    run = RunDir(Path(config.output_dir))
    if resume:
        refuse_other(run.path, method)
    return run


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
