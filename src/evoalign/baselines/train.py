# SPDX-License-Identifier: Apache-2.0
"""`grpo`: train a config by GRPO, with TRL, into a run directory like that of ES, and resume such a run."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch.nn.attention import sdpa_kernel

from evoalign import tokens, tracking
from evoalign.baselines import planning, settings
from evoalign.baselines.policy import Policy, died_early, finished, refuse_differences
from evoalign.baselines.steps import Steps
from evoalign.baselines.trainer_state import MEND, last_state, objective_of, sound_state, states
from evoalign.checks import prompts
from evoalign.config import Config, LoraConfig
from evoalign.config.reading import object_of
from evoalign.engines.specs import specs_of_config
from evoalign.engines.transformers.engine import load_model
from evoalign.engines.transformers.prefill import ATTENTION
from evoalign.errors import ConfigError, EvoalignError, ResumeError, StoppedError
from evoalign.models import origin
from evoalign.models.files import without_bar
from evoalign.report.figures import GRPO_WORDS
from evoalign.report.rows import Row
from evoalign.report.tables import tell
from evoalign.rundir.directory import RunDir
from evoalign.rundir.files import as_os_errors
from evoalign.setup import ConfigLike, Rewards, as_config, object_given, task_and_data, with_form
from evoalign.tasks import Data, Task
from evoalign.tokens import Tokens
from evoalign.training import heading, saving
from evoalign.training.inputs import check_inputs, inputs_of
from evoalign.training.recorder import Labels
from evoalign.training.result import Result, gold_lines, judged_again, read_completions, show, shown
from evoalign.training.session import Measurement, Session, locked, place
from evoalign.training.stopping import Stop
from evoalign.version import install

TRAINERS = {
    "grpo": "evoalign.baselines.trainer:Trainer",
    "ppo": "evoalign.baselines.ppo:PpoTrainer",
    "dpo": "evoalign.baselines.dpo:DpoTrainer",
}
"""Subclasses of TRL's trainers by `grpo.algorithm`."""


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

    `grpo.algorithm` chooses PPO or DPO instead.
    Takes the same config as `train`, with the same task, prompts, longest completion, rewards and evaluation. The run
    directory is the same except that it has no journal. `task`, `reward`, `overwrite` and `resume` are as in `train`.
    Raises a subclass of EvoalignError.
    """
    config = as_config(config)
    config = with_form(config, Path(config.output_dir) if resume else None) if task is None else config
    config.trained_by("grpo")  # raises ConfigError if missing
    if not tracking.is_installed("trl"):
        raise ConfigError(f"GRPO needs the extra grpo: {install('grpo')}")
    tracking.check(config)
    settings.check_stopping(config)
    settings.refuse_quantised(config)
    given = object_given(task, reward)
    run = place(config, "grpo", resume=resume)
    writes = int(os.environ.get("RANK", "0")) == 0  # of the processes that `accelerate launch` started
    with locked(run, overwrite=overwrite, resume=resume) if writes else nullcontext():
        if writes and resume and not (finished(run, config) or last_state(run) or died_early(run, config)):
            run.refuse(overwrite=overwrite)
        with Stop() as stop, warnings.catch_warnings():
            # about a name that TRL and transformers use and transformers 6 removes
            warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing` is deprecated", FutureWarning)
            chosen, data = task_and_data(config, task, reward)
            with closing(chosen):
                settings.check_objective(config, chosen.objective())
                settings.check_turns(config, chosen)
                console = console or Console(quiet=not writes)
                earlier = _EarlierRun(run, config, chosen, data, given)
                done = earlier.result(console) if resume else None
                if done is not None:
                    return done
                state = earlier.state(console) if resume else None
                algorithm = _Grpo(config, chosen, data, state, stop, given)
                if not writes:
                    return algorithm.follow()
                session = Session(algorithm, run, stop, console, given, algorithm.resumed_at)
                again = resume and session.is_new and died_early(run, config)
                if again:
                    session.tell(f"{shown(run.path)} ended before its first trainer state was saved: it begins again")
                return session.live(overwrite=overwrite or again)


class _EarlierRun:
    """The run to resume, compared with the config, the data and the objects that were passed."""

    def __init__(self, run: RunDir, config: Config, task: Task, data: Data, given: str | None) -> None:
        self.run, self.config, self.task, self.data, self.given = run, config, task, data, given

    def result(self, console: Console) -> Result | None:
        """Print and return the result of a finished run; None if it is unfinished or its completions are lost."""
        run = self.run
        saved = finished(run, self.config)
        if saved is None:
            return None
        self._refuse_other(console)
        before, after = (read_completions(run, name, self.task, self.data) for name in ("before", "after"))
        if before is None or after is None:
            return None
        tell(console, f"{shown(run.path)} is done: it has all {self.config.grpo.max_steps} steps")
        verdict = judged_again(run, before, after)
        show(before, after, verdict, console, lambda line: tell(console, line))
        tell(console, *heading.last_lines(run, saved, self.config, self.task, self.given))
        return Result(run.path, saved, before, after, verdict)

    def state(self, console: Console) -> tuple[Path, int] | None:
        """Return the latest intact trainer state and its step; None without a state.

        Raises ResumeError if the run has other settings, data, inputs or objects, or if every state is damaged.
        """
        if last_state(self.run) is None:
            return None
        refuse_differences(self.run, self.config)
        self._refuse_other(console)
        state = sound_state(self.run, lambda line: tell(console, line))
        if state is not None and state[1] > self.config.grpo.max_steps:
            raise ResumeError(
                f"{self.run.path} already has {state[1]} steps, more than grpo.max_steps {self.config.grpo.max_steps}"
            )
        return state

    def _refuse_other(self, console: Console) -> None:
        """Raise ResumeError if what decides scores changed, as a run of ES does; print what is only warned about."""
        made = object_of(self.run.manifest) or {}
        known = tokens.load(self.config.model, self.config.task.template_kwargs)
        saving.check_data(self.run, self.task, self.data, made.get("data_hash"))
        if made.get("given_as") != self.given:
            raise ResumeError(
                f"{self.run.path} was started with {made.get('given_as') or 'no'} object and is resumed with "
                f"{self.given or 'no'} object; pass the same one"
            )
        saving.check_prompts(self.run, self.task, self.data, known, made.get("prompts_hash"))
        saving.check_scorer(self.run, self.task, made.get("scorer_digest"))
        for line in check_inputs(self.run.path, made.get("inputs"), inputs_of(self.config, known)):
            tell(console, f"warning: {line}")


class _Grpo:
    """GRPO as a `Session` runs it; `state` is the trainer state to resume from, and its step."""

    def __init__(
        self, config: Config, task: Task, data: Data, state: tuple[Path, int] | None, stop: Stop, given: str | None
    ) -> None:
        self.config, self.task, self.data, self.rows, self.given = config, task, data, data.of, given
        self.state, self.resumed_at = state or (None, None)
        tokens_ = tokens.load(config.model, config.task.template_kwargs)
        prompts.check(config, tokens_, task, data, settings.longest(config))
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
            f"{task.name}, {grpo.title} ({grpo.tune}), {grpo.num_generations} completions per prompt",
            # Not "no update": rounding leaves advantages of up to 1e-4, which Adam scales up.
            still="steps with equal rewards",
            words=GRPO_WORDS,
            devices=processes,
            note=self.policy.note,
            smaller="lower grpo.per_device_train_batch_size and raise grpo.gradient_accumulation_steps",
        )

    def follow(self) -> Result:
        """Train in a process other than the first; only the first has a session and writes files."""
        before, _ = self.policy.evaluate()
        if self.state is None and self.steps.stop.asked is not None:
            raise StoppedError("stopped before the first step; no files were written", self.steps.stop.asked)
        self._train()
        done = int(self.trainer.state.global_step)
        total = self.config.grpo.max_steps
        if self.steps.stop.asked is not None and (done < total or self.steps.saved == done):
            raise StoppedError(f"stopped after step {done} of {total}", self.steps.stop.asked)
        return Result(Path(self.config.output_dir), Path(self.config.output_dir), before, before)

    def open(self, session: Session) -> Mapping[str, Any]:
        note = [self.policy.note] if self.policy.note and session.is_new else []
        known = heading.split_lines(self.config, self.task, self.data, self.policy.tokens)
        head = [
            heading.subject(self.config, self.task, self.data, specs_of_config(self.config)),
            *planning.step_lines(self.config),
            *planning.work_lines(self.config)[:1],
        ]
        lines = [
            *heading.stop_lines(self.policy.tokens),
            *gold_lines(self.task, self.data),
            *known,
            *planning.default_lines(self.config),
        ]
        for line in [*origin.lines(self.config.model), *head, *note, *lines]:
            session.tell(line)
        self.policy.check_mean()
        if not session.is_new:
            self._check_resume(session.run, session.done)
        dtype = str(self.policy.dtype).removeprefix("torch.")
        return {  # with the data's hash, as there is no journal to record it
            "task": {"name": self.task.name, "given_as": self.given},
            "task_notes": list(self.task.notes),
            "given_as": self.given,
            "data_hash": saving.data_hash(self.data),
            **saving.rendered_as(self.task, self.data, self.policy.tokens),
            "inputs": inputs_of(self.config, self.policy.tokens),
            "engine": {"engine": "trl", "device": str(self.policy.device), "dtype": dtype},
            **origin.record(self.config.model),
            **saving.scored_by(self.task),
        }

    def begin(self, session: Session) -> None:
        """Remove trainer states that an earlier run may have left."""
        shutil.rmtree(states(session.run), ignore_errors=True)

    def _check_resume(self, run: RunDir, done: int) -> None:
        """Raise ResumeError if rows or the first evaluation are lost."""
        if not run.read_metrics().keys() >= set(range(done)):
            raise ResumeError(f"{run.metrics} lacks rows before step {done}; restore the file, or start another run")
        if read_completions(run, "before", self.task, self.data) is None:
            raise ResumeError(f"{run.completions('before')} is missing or damaged; restore it, or start another run")

    def resume(self, session: Session) -> list[Row]:
        """Cut the rows to the resumed step; the trainer itself restores the weights when it starts."""
        rows = session.run.read_metrics()
        session.run.replace_metrics([rows[step] for step in range(session.done)])
        return []

    def advance(self, session: Session) -> None:
        """Train the remaining steps; TRL calls `Steps` at each."""
        self.steps.session = session
        self._train()

    def close(self) -> None:
        """Free the copies of the model."""
        self.policy.close()

    def _train(self) -> None:
        folder = Path(self.trainer.args.output_dir)
        try:
            # Saving the trainer's state raises other errors on a full disk. cuDNN's backward pass gives NaN for padded
            # batches of some lengths on H100 and H200 (torch 2.11, github.com/pytorch/pytorch/issues/196678).
            with as_os_errors(folder), sdpa_kernel(ATTENTION):
                self.trainer.train(resume_from_checkpoint=None if self.state is None else str(self.state))
        except (EvoalignError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.state is None or self.steps.has_begun:
                raise
            # without torch's advice to set weights_only=False, which would run code from the file
            sentence = (str(error).strip().splitlines() or [""])[0].split(". ")[0]
            why = ": ".join(filter(None, (type(error).__name__, sentence)))
            raise ResumeError(f"{self.state} cannot be read ({why}): {MEND}") from error

    def _rewards(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        return self.steps.rewards(prompts, completions, **columns)

    def _rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        assert self.policy.source is not None
        return self.policy.source(prompts, trainer)


def make_trainer(
    config: Config,
    tokens: Tokens,
    task: Task,
    data: Data,
    reward: Callable[..., list[float]],
    rollouts: Callable[..., dict[str, Any]],
) -> Any:
    """Return TRL's trainer with the model loaded. `rollouts` generates unless TRL does. Raises ConfigError."""
    from datasets import Dataset
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.trainer_callback import PrinterCallback

    folder = RunDir(Path(config.output_dir)).path / "trainer"
    trainer_class = trainer_of(config)
    arguments = _arguments(config, folder, trainer_class.arguments_class)
    settings.check_prompts(config, len(data.train), arguments.world_size)
    model = load_model(config.model, getattr(torch, config.model.trained_dtype)).requires_grad_(True).train()
    try:
        with warnings.catch_warnings(), without_bar(), _reference_of(config, model):
            warnings.simplefilter("ignore")  # about experimental features and deprecated names
            trainer = trainer_class(
                config,
                tokens,
                model=model,
                reward_funcs=[reward],
                args=arguments,
                train_dataset=Dataset.from_dict({"row": range(len(data.train))}),
                processing_class=tokens.tokenizer,
                peft_config=_peft(config.lora) if config.grpo.tune == "lora" else None,
                rollout_func=rollouts if config.grpo.rollouts != "trl" else None,
                environment_factory=task.environment_factory(),
                tools_of_prompts=task.tools,
            )
            trainer.max_tool_calling_iterations = max(1, config.task.limits.turns - 1)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"grpo: TRL rejects these settings: {' '.join(str(error).split())}") from error
    finally:
        with suppress(OSError):  # the trainer makes its folder at once; a refused run leaves no folder
            folder.rmdir()
    if trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled():  # by the launcher
        raise ConfigError(settings.SPLIT)
    trainer.remove_callback(PrinterCallback)

    trainer.data_collator = cast(Any, partial(_collate, task, data))  # TRL's own returns the list, too
    return trainer


def _collate(task: Task, data: Data, rows: list[dict[str, int]]) -> list[dict[str, Any]]:
    """Return a batch for TRL. Prompts are made here, as those of a large split would fill the memory.

    A function of the module, so that workers of a data loader can be spawned.
    """
    examples = [data.train[row["row"]] for row in rows]
    takes_columns = task.environment_factory() is not None  # TRL calls its `reset`, which adds to the prompt
    return [
        {**(e if takes_columns else {}), "prompt": task.before_reset(e), "row": row["row"]}
        for e, row in zip(examples, rows, strict=True)
    ]


def trainer_of(config: Config) -> Any:
    """Import the trainer class of `grpo.algorithm`; its `arguments_class` is TRL's class of settings."""
    module, _, name = TRAINERS[config.grpo.algorithm].partition(":")
    return getattr(import_module(module), name)


def _arguments(config: Config, folder: Path, kind: type) -> Any:
    on_cpu, known = settings.trains_on_cpu(config), settings.fields_of(kind)
    try:
        arguments: Any = kind(**settings.arguments(config, folder, on_cpu=on_cpu, known=known))
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"grpo: {' '.join(str(error).split())}") from error
    if arguments.n_gpu > 1:  # one GPU per process, without torch's DataParallel; `accelerate launch` starts several
        arguments._n_gpu = 1  # pyright: ignore[reportPrivateUsage]  # no public setter
    return arguments


def _peft(lora: LoraConfig) -> Any:
    from peft import LoraConfig as Peft

    return Peft(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT accepts a float
        target_modules=lora.target_modules or "all-linear",
        layers_to_transform=lora.target_layers,
    )


@contextmanager
def _reference_of(config: Config, model: Any) -> Generator[None]:
    """Set the model's name to the folder of its revision while TRL loads the reference model for `grpo.beta`.

    TRL loads that model by name, without the revision.
    """
    if config.grpo.beta == 0 or config.grpo.tune == "lora":
        yield
        return
    from transformers.utils.hub import cached_file

    name = model.config._name_or_path
    file = cached_file(name, "config.json", revision=config.model.revision, local_files_only=True)
    if file is not None:
        model.config._name_or_path = str(Path(file).parent)
    try:
        yield
    finally:
        model.config._name_or_path = name
