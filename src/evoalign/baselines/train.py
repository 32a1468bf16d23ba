# SPDX-License-Identifier: Apache-2.0
"""`grpo`: the GRPO baseline from a config to a run directory like that of ES, and resumed from where it was left."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evoalign import tokens, tracking
from evoalign.baselines import planning, settings
from evoalign.baselines.assembling import make_trainer
from evoalign.baselines.policy import Policy, died_early, finished, refuse_differences
from evoalign.baselines.steps import Steps
from evoalign.baselines.trainer_state import MEND, last_state, objective_of, sound_state, states
from evoalign.config import Config
from evoalign.config.reading import read_object
from evoalign.engines.specs import specs_of_config
from evoalign.errors import ConfigError, DataError, EvoalignError, ResumeError, StoppedError
from evoalign.models import origin
from evoalign.report.figures import GRPO_WORDS
from evoalign.report.rows import Row
from evoalign.rundir.directory import RunDir
from evoalign.rundir.files import as_os_errors
from evoalign.setup import ConfigLike, Rewards, as_config, task_and_data
from evoalign.tasks import Data, Task
from evoalign.training import heading, saving
from evoalign.training.recorder import Labels, tell
from evoalign.training.result import Result, gold_lines, judged_again, read_completions, show, shown
from evoalign.training.session import Measurement, Session, locked, object_given, place
from evoalign.training.stop import Stop
from evoalign.version import install


def grpo(
    config: ConfigLike,
    *,
    task: Task | None = None,
    reward: Rewards | None = None,
    overwrite: bool = False,
    resume: bool = False,
    console: Console | None = None,
) -> Result:
    """Fine-tune by GRPO (Shao et al., arXiv 2402.03300) with TRL's GRPOTrainer; needs the extra `grpo`.

    Takes the same config as `train`, with the same task, prompts, longest completion, rewards and evaluation, and
    leaves the same run directory, but for a journal. `task`, `reward`, `overwrite` and `resume` are as in `train`.
    Raises a subclass of EvoalignError.
    """
    config = as_config(config)
    if not tracking.is_installed("trl"):
        raise ConfigError(f"GRPO needs the extra grpo: {install('grpo')}")
    tracking.check(config)
    settings.check_stopping(config)
    given = object_given(task, reward)
    run, writes = place(config, "grpo", resume=resume), _is_first()
    with locked(run, overwrite=overwrite, resume=resume) if writes else nullcontext():
        if writes and resume and not _is_resumable(run, config):
            run.refuse(overwrite=overwrite)
        with Stop() as stop, _without_deprecations():
            chosen, data = task_and_data(config, task, reward)
            with closing(chosen):
                settings.check_objective(config, chosen.objective())
                console = console or Console(quiet=not writes)
                past = _Past(run, config, chosen, data, given)
                done = past.result(console) if resume else None
                if done is not None:
                    return done
                algorithm = _Grpo(config, chosen, data, past.state(console) if resume else None, stop, given)
                if not writes:
                    return algorithm.follow()
                session = Session(algorithm, run, stop, console, given, algorithm.resumed_at)
                again = resume and session.is_new and died_early(run, config)
                if again:
                    session.tell(f"{shown(run.path)} ended before a state was saved: it begins again")
                return session.live(overwrite=overwrite or again)


def _is_first() -> bool:
    """Of the processes that `accelerate launch` started, the one that writes."""
    return int(os.environ.get("RANK", "0")) == 0


def _is_resumable(run: RunDir, config: Config) -> bool:
    return finished(run, config) is not None or last_state(run) is not None or died_early(run, config)


@contextmanager
def _without_deprecations() -> Generator[None]:
    """TRL and transformers use a name that transformers 6 will drop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing` is deprecated", FutureWarning)
        yield


class _Past:
    """What a run directory says of the run to resume, held against what is here."""

    def __init__(self, run: RunDir, config: Config, task: Task, data: Data, given: str | None) -> None:
        self.run, self.config, self.task, self.data, self.given = run, config, task, data, given

    def result(self, console: Console) -> Result | None:
        """What a run that is at its end came to, shown again; None where it is not, or a part of that is lost."""
        run = self.run
        saved = finished(run, self.config)
        if saved is None:
            return None
        self._refuse_other()
        before, after = (read_completions(run, name, self.task, self.data) for name in ("before", "after"))
        if before is None or after is None:
            return None
        tell(console, f"{shown(run.path)} is done: all {self.config.grpo.max_steps} steps, nothing is left to do")
        verdict = judged_again(run, before, after)
        show(before, after, verdict, console, lambda line: tell(console, line))
        tell(console, "\n".join(heading.last_lines(run, saved, self.config, self.task, self.given)))
        return Result(run.path, saved, before, after, verdict)

    def state(self, console: Console) -> tuple[Path, int] | None:
        """The trainer's state to resume, and its step. Raises ResumeError for another run, or where none is whole."""
        if last_state(self.run) is None:
            return None
        refuse_differences(self.run, self.config)
        self._refuse_other()
        state = sound_state(self.run, lambda line: tell(console, line))
        if state is None:
            return None
        if state[1] > self.config.grpo.max_steps:
            raise ResumeError(
                f"{self.run.path} has {state[1]} steps already, grpo.max_steps is {self.config.grpo.max_steps}"
            )
        return state

    def _refuse_other(self) -> None:
        """Raise ResumeError where the run had other data, or was given other objects."""
        made = _manifest(self.run)
        saving.check_data(self.run, self.task, self.data, made.get("data_hash"))
        if made.get("given_as") != self.given:
            raise ResumeError(
                f"{self.run.path} was begun with {made.get('given_as') or 'no'} object: give the same again"
            )


class _Grpo:
    """What a session asks of GRPO. `state`: the trainer's, to resume."""

    def __init__(
        self, config: Config, task: Task, data: Data, state: tuple[Path, int] | None, stop: Stop, given: str | None
    ) -> None:
        self.config, self.task, self.data, self.given = config, task, data, given
        self.state, self.resumed_at = state or (None, None)
        tokens_ = tokens.load(config.model)
        self.trainer = make_trainer(config, tokens_, task, data, self._rewards, self._rollouts)
        processes = self.trainer.accelerator.num_processes
        self.policy = self.mean = Policy(config, tokens_, task, data, self.trainer.model, processes)
        self.measurements: Mapping[str, Measurement] = {}
        self.steps = Steps(self.policy, self.trainer, stop)
        if self.state is not None:
            self.steps.objective.restore(objective_of(self.state))
        self.trainer.add_callback(self.steps)
        grpo = config.grpo
        self.labels = Labels(
            "grpo",
            grpo.max_steps,
            f"{task.name}, GRPO ({grpo.tune}), {grpo.num_generations} completions a prompt",
            # Not "no update": what float32 leaves of a mean is an advantage of up to 1e-4, which Adam scales up.
            still="steps with equal rewards",
            words=GRPO_WORDS,
            devices=processes,
            note=self.policy.note,
            smaller="lower grpo.per_device_train_batch_size and raise grpo.gradient_accumulation_steps",
        )

    def follow(self) -> Result:
        """In a process that trains beside the first one, which alone has a session."""
        before, _ = self.policy.evaluate()
        if self.state is None and self.steps.stop.asked is not None:
            raise StoppedError("stopped before the first step; nothing was written", self.steps.stop.asked)
        self._train()
        done = int(self.trainer.state.global_step)
        if self.steps.stop.asked is not None and done < self.config.grpo.max_steps:
            raise StoppedError(f"stopped after step {done} of {self.config.grpo.max_steps}", self.steps.stop.asked)
        return Result(Path(self.config.output_dir), Path(self.config.output_dir), before, before)

    def open(self, session: Session) -> Mapping[str, Any]:
        note = [self.policy.note] if self.policy.note and session.is_new else []
        known = heading.split_lines(self.config, self.task, self.data)
        head = [
            heading.subject(self.config, self.task, self.data, specs_of_config(self.config)),
            *planning.step_lines(self.config),
            *planning.work_lines(self.config)[:1],
        ]
        lines = [*gold_lines(self.task, self.data), *known, *planning.default_lines(self.config)]
        for line in [*origin.lines(self.config.model), *head, *note, *lines]:
            session.tell(line)
        if not session.is_new:
            self._check_resume(session.run, session.done)
        dtype = str(self.policy.dtype).removeprefix("torch.")
        return {  # the data too: there is no journal that records it
            "task": {"name": self.task.name, "given_as": self.given},
            "given_as": self.given,
            "data_hash": saving.data_hash(self.data),
            "engine": {"engine": "trl", "device": str(self.policy.device), "dtype": dtype},
            **origin.record(self.config.model),
            **saving.scored_by(self.task),
        }

    def begin(self, session: Session) -> None:
        """Remove what an earlier run may have left of its trainer."""
        shutil.rmtree(states(session.run), ignore_errors=True)

    def _check_resume(self, run: RunDir, done: int) -> None:
        """Raise ResumeError if rows or the evaluation of the start are lost, or if other models score."""
        saving.check_scorer(run, self.task, _manifest(run).get("scorer_digest"))
        if not run.read_metrics().keys() >= set(range(done)):
            raise ResumeError(f"{run.metrics} lacks rows before step {done}: put it back, or begin another run")
        if read_completions(run, "before", self.task, self.data) is None:
            raise ResumeError(f"{run.completions('before')} is missing or damaged: put it back, or begin another run")

    def resume(self, session: Session) -> list[Row]:
        """The rows; the weights are brought back by the trainer, as it begins to train."""
        rows = session.run.read_metrics()
        session.run.replace_metrics([rows[step] for step in range(session.done)])
        return []

    def advance(self, session: Session) -> None:
        """The steps that are left; `Steps` is called at each."""
        self.steps.session = session
        self._train()

    def close(self) -> None:
        """The copy of the base model."""
        self.policy.close()

    def _train(self) -> None:
        folder = Path(self.trainer.args.output_dir)
        try:
            with as_os_errors(folder):  # which a disk that is full is not, in what saves the trainer's state
                self.trainer.train(resume_from_checkpoint=None if self.state is None else str(self.state))
        except (EvoalignError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.state is None or self.steps.has_begun:
                raise
            raise ResumeError(f"{self.state} cannot be read ({_first_sentence(error)}): {MEND}") from error

    def _rewards(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        return self.steps.rewards(prompts, completions, **columns)

    def _rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        assert self.policy.source is not None
        return self.policy.source(prompts, trainer)


def _first_sentence(error: Exception) -> str:
    """What torch's readers say goes on with advice to read files as code, which nobody should take."""
    said = (str(error).strip().splitlines() or [""])[0].split(". ")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _manifest(run: RunDir) -> Mapping[str, Any]:
    try:
        return read_object(run.manifest)
    except DataError:
        return {}
