# SPDX-License-Identifier: Apache-2.0
"""The life of a run, whatever its method: lock, begin or resume, record, save, stop, finish.

A method is an `Algorithm`: how its mean moves, answers, is saved and brought back to where a run left it. All else,
the run directory, messages, figures, trackers, budget and errors, is here, once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console

from evoalign.checks import divergence
from evoalign.checks.distance import Distance
from evoalign.checks.divergence import Divergence, Fluency
from evoalign.checks.hacking import judge
from evoalign.config import Config
from evoalign.cost import budget
from evoalign.cost.budget import Cost
from evoalign.errors import (
    DataError,
    EvoalignError,
    ResumeError,
    RunGoneError,
    ScorerAwayError,
    StoppedError,
)
from evoalign.evaluation import Evaluation, with_resampled
from evoalign.placebos.estimates import Placebos
from evoalign.report.progress import Bar
from evoalign.report.rows import Row
from evoalign.rewards.objective import aim
from evoalign.rundir import checksums
from evoalign.rundir.directory import AFTER_VALIDATION, BEFORE_VALIDATION, MEASURING, RunDir
from evoalign.rundir.journal import Ending
from evoalign.rundir.manifest import command_line, make_manifest
from evoalign.rundir.method import COMMANDS, resume_command
from evoalign.tasks import Data, Split, Task
from evoalign.training import ending, heading, saving, stopping
from evoalign.training.recorder import Labels, Recorder
from evoalign.training.result import (
    Result,
    conclude,
    read_completions,
    validation_line,
    validation_of,
    write_completions,
    write_results,
)
from evoalign.training.stop import Stop

Found = TypeVar("Found")


class Algorithm(Protocol):
    """What ES and GRPO each supply. `done` counts generations of ES, steps of GRPO."""

    config: Config
    task: Task
    data: Data
    labels: Labels

    def open(self, session: Session) -> None:
        """Say what is going to run, and refuse what cannot. Nothing is written yet."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the manifest says of a new run."""
        ...

    def begin(self, session: Session) -> None:
        """The directory is made and the start is evaluated: from here on, the run can be resumed."""
        ...

    def check_resume(self, session: Session) -> None:
        """Raise ResumeError where the run cannot be resumed with what is here. Nothing has been changed yet."""
        ...

    def resume(self, session: Session) -> list[Row]:
        """Bring the mean, and the rows of metrics.jsonl, to where the run stands; the rows that trackers missed."""
        ...

    def advance(self, session: Session) -> None:
        """Train to the end, or until the session is asked to stop and all of it is saved."""
        ...

    def evaluate(self, split: Split = "test") -> tuple[Evaluation, Cost]:
        """The mean on a split, and what that took."""
        ...

    def divergence(self) -> Divergence:
        """KL of the mean from the base model."""
        ...

    def fluency(self, before: Evaluation, after: Evaluation) -> Fluency:
        """Nats a token of both evaluations under the base model. Raises ModelError where it does not fit once more."""
        ...

    def distance(self) -> Distance:
        """How far the weights are from those of the base model. Raises EvoalignError where that is unknown."""
        ...

    def placebos(self, session: Session, before: Evaluation, after: Evaluation) -> Placebos | None:
        """The finished run against the noise alone; None where that is not asked for. The mean is lost by it.

        Raises StoppedError where the session is asked to stop.
        """
        ...

    def save(self, run: RunDir, done: int, reward: float | None) -> Path:
        """Save the mean, unless it is saved already; `reward` is its own on the validation split, if known."""
        ...

    def fingerprint(self) -> str:
        """`weights_hash` of the mean."""
        ...

    def kept(self, session: Session) -> str:
        """After a failure: from where the run will be resumed, with the words between that and the command."""
        ...

    def smaller(self) -> str:
        """After running out of memory: the settings that help."""
        ...

    def summary(self, alarm: str | None) -> list[str]:
        """What the finished run was like. `alarm`: what its completions say of it, where that is bad."""
        ...

    def close(self) -> None:
        """Let go of what the algorithm opened."""
        ...


class Session:
    """One run in this process. `done` is how far it has come; to begin with, None where it is a new one.

    `given`: what was handed over as a Python object, and has to be again to resume.
    """

    def __init__(
        self, algorithm: Algorithm, run: RunDir, stop: Stop, console: Console, given: str | None, done: int | None
    ) -> None:
        self.algorithm, self.config, self.run, self.stop, self.given = algorithm, algorithm.config, run, stop, given
        self.labels = algorithm.labels
        self.recorder = Recorder(self.config, run, console, self.labels)
        self.tell = self.recorder.tell
        self.done, self.total = done or 0, self.labels.total
        self.is_new, self._has_begun = done is None, False
        self.ending: Ending | None = None
        """Why the run ends before its last step, where it does."""
        self._validated: Evaluation | None = None
        """The start on the validation split, where there is one."""

    def live(self, *, overwrite: bool) -> Result:
        """All of it: begin or resume, the steps that are left, and the comparison. Raises EvoalignError."""
        self.algorithm.open(self)
        with self._explained(), closing(self.recorder), closing(self.algorithm):
            before = self._begin(overwrite=overwrite) if self.is_new else self._resume()
            self._has_begun = True
            self.recorder.measured("test", before)
            if self._validated is not None:
                self.recorder.measured("validation", self._validated)
            self._stop_if_asked()
            with self.recorder:
                self.algorithm.advance(self)
            self._stop_if_asked()
            return self._finish(before)

    # --- for the algorithm, as it advances ---------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """Whether the algorithm is to save its mean and return."""
        return self.stop.asked is not None and self.done < self.total

    def end(self, ending: Ending) -> None:
        """The run ends here, before its last step, and then does what runs do at their end."""
        self.ending, self.total = ending, self.done
        self.tell(f"ends after {self.labels.unit} {self.done} of {self.labels.total}: {stopping.words(ending)}")

    def record(self, row: Row) -> None:
        """Write down one step."""
        self.recorder.record(row)

    def evaluate(self, split: Split = "test") -> Evaluation:
        """The mean on a split; what that took goes to the budget."""
        found, cost = self.algorithm.evaluate(split)
        self.recorder.evaluated(cost)
        return found

    def validation(self) -> Row:
        """What a row that has an evaluation says of the validation split; nothing where there is none."""
        return {"validation": self.evaluate("validation").measures} if self.algorithm.data.validation else {}

    def divergence_if_due(self) -> dict[str, Any] | None:
        """KL of the mean from the base model, every `checks.kl_every` steps."""
        due = divergence.is_due(self.config, self.done)
        return dataclasses.asdict(self.algorithm.divergence()) if due else None

    def save(self) -> Path:
        """Save the mean, and delete what need not stay. Raises RunGoneError."""
        self.run.check()
        folder = self.algorithm.save(self.run, self.done, self.reward())
        saving.retain(self.run, self.config)
        return folder

    def reward(self) -> float | None:
        """The mean's reward, or fitness, on the validation split after this step; the test split chooses nothing."""
        measures = self.run.rows[self.done - 1].get("validation") if 0 < self.done <= len(self.run.rows) else None
        return float(aim(measures)) if measures else None

    # --- a life ------------------------------------------------------------------------------------------------------

    def _begin(self, *, overwrite: bool) -> Evaluation:
        self.run.create(self.config, self._manifest(self.algorithm.facts()), overwrite=overwrite)
        self.recorder.start(None)
        self._measure_start()
        before = self._evaluate("start")
        if self.algorithm.data.validation:
            self._validated = self._evaluate("start", "validation")
        if self.stop.asked is not None:
            raise StoppedError(f"stopped before the first {self.labels.unit}; nothing was written", self.stop.asked)
        if self.run.aside is not None:
            self.tell(f"the run that was there is now {self.run.aside}")
        write_completions(self.run, "before", before)
        if self._validated is not None:
            write_completions(self.run, BEFORE_VALIDATION, self._validated)
        self.recorder.show(0, before)
        self.algorithm.begin(self)
        return before

    def _resume(self) -> Evaluation:
        self.algorithm.check_resume(self)
        self.recorder.evaluations = budget.read_evaluation(self.run.budget)
        before = self._read_before()
        self._forget_checksums()
        self.run.sweep()
        missed = self.algorithm.resume(self)
        if self.done < self.total:
            ending.forget(self.run.path)
        self.run.resume(self.config, self._manifest({}))
        self.recorder.start(self.done, missed)
        self.tell(f"resumes after {self.labels.unit} {self.done} of {self.total}, in {self.run.path}")
        return before

    def _manifest(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        return make_manifest(self.config, facts, command_line(), self.labels.method)

    def _forget_checksums(self) -> None:
        """Warn of results that were altered since the run wrote them, and drop their checksums."""
        try:
            checksums.verify(self.run.path)
        except DataError as error:
            self.tell(f"warning: {error}")
        checksums.forget(self.run.path)

    def _read_before(self) -> Evaluation:
        """The evaluation of the start, where the mean is now: as it was written, or else made again."""
        if self.algorithm.data.validation:
            self._validated = self._written_or_made(BEFORE_VALIDATION, "validation")
        return self._written_or_made("before", "test")

    def _written_or_made(self, name: str, split: Split) -> Evaluation:
        found = read_completions(self.run, name, self.algorithm.task, self.algorithm.data, split)
        if found is None:
            found = self._evaluate("start", split)
            write_completions(self.run, name, found)
        return found

    def _measure_start(self) -> None:
        """What cannot be measured, or does not fit, is reported before the first step."""
        if self.config.checks.kl_every:
            start = time.monotonic()
            kl, seconds = self.algorithm.divergence(), time.monotonic() - start
            self.tell(f"KL of the start from the base model: {kl}; measured in {seconds:.1f} s")

    def _finish(self, before: Evaluation) -> Result:
        saved, task = self.save(), self.algorithm.task
        after = self._evaluate("result")
        validation = None if self._validated is None else (self._validated, self._evaluate("result", "validation"))
        kl = self.algorithm.divergence if self.config.checks.kl_every else None
        moved = ending.moved(self.run.rows, kl, self.algorithm.distance, self.tell)
        self.run.check()
        mean = {"generation": self.done, "weights_hash": self.algorithm.fingerprint(), **moved}
        mean |= {} if self.ending is None else {"ending": dataclasses.asdict(self.ending)}
        if validation is not None:
            write_completions(self.run, AFTER_VALIDATION, validation[1])
            mean["validation"] = validation_of(*validation)
            self.tell(validation_line(*validation))
        mean |= ending.weights_of(task, after)
        before, after = (with_resampled(task, self.algorithm.data.test, e) for e in (before, after))
        mean["alarms"] = judge(before.completions, after.completions).as_dict()
        # Before what may be stopped, or not fit; where the process dies in it, a sweep makes up for it.
        with checksums.recorded(self.run.path):
            write_results(self.run, self.config.evaluation, {**mean, MEASURING: True}, before, after)
            ending.write_points(self.run, task, self.algorithm.data.test, points=after, points_before=before)
        verdict = judge(before.completions, after.completions, self._fluency(before, after))
        mean["alarms"] = verdict.as_dict()
        placebos = self._beside("placebos", lambda: self.algorithm.placebos(self, before, after))
        with checksums.recorded(self.run.path):
            conclude(self.run, self.config.evaluation, mean, before, after, verdict, self.recorder, placebos)
        for line in self.algorithm.summary(verdict.word):
            self.tell(line)
        self.recorder.measured("test", before, after)
        if validation is not None:
            self.recorder.measured("validation", *validation)
        self.recorder.finish(before, after, moved["divergence"])
        self.run.check()
        self.tell("\n".join(heading.last_lines(self.run, saved, self.config, task, self.given, placebos)))
        return Result(self.run.path, saved, before, after, verdict)

    def _fluency(self, before: Evaluation, after: Evaluation) -> Fluency | None:
        """How likely the base model finds what was said, where that is asked for."""
        if not self.config.measures_nats:
            return None
        return self._beside("nats a token", lambda: self.algorithm.fluency(before, after))

    def _beside(self, what: str, measure: Callable[[], Found]) -> Found | None:
        with Bar(what, self.recorder.console):
            return ending.beside(what, measure, self.tell, how_to_resume(self))

    def _evaluate(self, which: str, split: Split = "test") -> Evaluation:
        self.tell(what := f"evaluating the {which} on {len(self.algorithm.data.of(split))} {split} examples")
        with Bar(what, self.recorder.console):
            return self.evaluate(split)

    def _stop_if_asked(self) -> None:
        if self.stop.asked is not None and self.done < self.total:
            at = f"{self.labels.unit} {self.done} of {self.total}"
            raise StoppedError(f"stopped after {at}; {how_to_resume(self)}", self.stop.asked)

    @contextmanager
    def _explained(self) -> Generator[None]:
        """A new run that fails in its first step is taken back; later, the error says from where it resumes."""
        try:
            yield
        except StoppedError:
            if self.is_new and not self._has_begun:
                self.run.undo()
            raise
        except RunGoneError:  # nothing of it is here, neither to take back nor to resume
            raise
        except BaseException as error:
            if isinstance(error, OSError):  # of a file that is not there, where the folder has gone in mid-write
                self.run.check()
            if not self.done:
                self.run.undo()
                if isinstance(error, ScorerAwayError):
                    nothing = "nothing was begun: " if self.is_new else ""
                    error.args = (f"{error}; {nothing}then give the same command again",)
                if isinstance(error, torch.OutOfMemoryError):
                    raise EvoalignError(f"{_first_line(error)}; {self.algorithm.smaller()}") from error
                raise
            explained = isinstance(error, EvoalignError | OSError | torch.OutOfMemoryError)
            if not explained or isinstance(error, ResumeError):  # which says itself what to do
                raise
            kept = f"{self.algorithm.kept(self)}{how_to_resume(self)}"
            if isinstance(error, EvoalignError):
                error.args = (f"{error}; {kept}",)
                raise
            line = _first_line(error)
            fix = f"; {self.algorithm.smaller()}" if isinstance(error, torch.OutOfMemoryError) else ""
            raise EvoalignError(f"{line}{fix}; {kept}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def how_to_resume(session: Session) -> str:
    """What to do to go on with it, as a command or in Python."""
    run, method = session.run, session.labels.method
    if session.given is not None:
        return f"resume with {COMMANDS[method]}(..., {session.given}=..., resume=True)"
    return f"resume with: {resume_command(run.path, method)}"
