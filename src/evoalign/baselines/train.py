# SPDX-License-Identifier: Apache-2.0
"""`grpo`: the GRPO baseline from a config to a run directory like that of ES, and on again from where it was left."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evoalign import tokens, tracking
from evoalign.baselines import planning, settings
from evoalign.baselines.policy import Policy, died_early, finished, last_state, refuse_differences, states
from evoalign.baselines.steps import Steps
from evoalign.checks.distance import distance_of
from evoalign.config import Config, code_of
from evoalign.cost import budget
from evoalign.engines.transformers.engine import load_model
from evoalign.errors import ConfigError, EvoalignError, ModelError, ResumeError, RewardError, StoppedError
from evoalign.evaluation import Evaluation
from evoalign.report.tables import visible
from evoalign.rundir.directory import RunDir
from evoalign.rundir.manifest import command_line, make_manifest
from evoalign.rundir.method import method_of
from evoalign.setup import ConfigLike, Rewards, as_config, task_and_data
from evoalign.tasks import Data, Task
from evoalign.training import result as outcome
from evoalign.training import saving
from evoalign.training.result import Result
from evoalign.training.stop import Stop


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
        raise ConfigError("GRPO needs the extra grpo: pip install 'evoalign[grpo]'")
    tracking.check(config)
    given = "task" if task is not None else "reward" if reward is not None else None
    run = RunDir(Path(config.output_dir)) if _is_first() else None
    try:
        if run is not None:
            _enter(run, config, overwrite=overwrite, resume=resume)
        with Stop() as stop:
            chosen, data = task_and_data(config, task, reward)
            with closing(chosen):
                settings.check_objective(chosen.objective())
                work = _Grpo(config, run, chosen, data, stop, console or Console(quiet=run is None), given)
                with warnings.catch_warnings():  # TRL and transformers use a name that transformers 6 will drop
                    warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing` is deprecated", FutureWarning)
                    return work.run_from(overwrite=overwrite, resume=resume)
    except RewardError as error:
        if error.failed is not None and run is not None:
            error.args = (f"{error}; what it was asked is in {run.keep_failure(error.failed)}",)
        raise
    finally:
        if run is not None:
            run.release()


def _is_first() -> bool:
    """Of the processes that `accelerate launch` started, the one that writes."""
    return int(os.environ.get("RANK", "0")) == 0


def _enter(run: RunDir, config: Config, *, overwrite: bool, resume: bool) -> None:
    if not resume:
        run.refuse(overwrite=overwrite)
    elif method_of(run.path) == "es":
        raise ResumeError(
            f"{run.path} holds a run of ES; resume with: evoalign train {shlex.quote(str(run.path))} --resume"
        )
    run.lock()
    if resume and finished(run, config) is None and last_state(run) is None and not died_early(run, config):
        run.refuse(overwrite=overwrite, resume=True)


class _Grpo:
    """One run in this process."""

    def __init__(
        self,
        config: Config,
        run: RunDir | None,
        task: Task,
        data: Data,
        stop: Stop,
        console: Console,
        given: str | None,
    ) -> None:
        self.config, self.run, self.task, self.data = config, run, task, data
        self.stop, self.console, self.given = stop, console, given
        self.tokens = tokens.load(config.model)
        self.steps: Steps | None = None

    def run_from(self, *, overwrite: bool, resume: bool) -> Result:
        """All of it: to where the run stands, the steps that are left, and the comparison."""
        done = self._done() if resume else None
        if done is not None:
            return done
        for line in outcome.gold_lines(self.task, self.data):
            self.tell(line)
        state = self._state() if resume else None
        trainer = self._trainer()
        for line in [*planning.default_lines(self.config), *planning.step_lines(self.config)]:
            self.tell(line)
        policy = Policy(
            self.config, self.tokens, self.task, self.data, trainer.model, trainer.accelerator.num_processes
        )
        steps = Steps(policy, self.run, self.stop, self.console, self.tell)
        self._join(trainer, policy, steps)
        with closing(steps):
            if state is not None:
                before = self._go_on(steps, state[1])
            else:
                before = self._begin(policy, steps, overwrite=overwrite, resume=resume)
            steps.baseline = before.measures["reward"]
            try:
                self._train(trainer, steps, state[0] if state else None)
                return self._finish(policy, steps, before)
            except (StoppedError, ResumeError):
                raise
            except (EvoalignError, OSError, torch.OutOfMemoryError) as error:
                raise self._explained(error) from error

    def tell(self, line: str) -> None:
        """Plain lines on the console."""
        ascii_only = not self.console.encoding.startswith("utf")
        line = "\n".join(visible(part, ascii_only=ascii_only) for part in line.split("\n"))
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _state(self) -> tuple[Path, int] | None:
        """The trainer's state to resume from. Raises ResumeError where the run is another one."""
        path = Path(self.config.output_dir).expanduser().absolute()
        run = self.run or RunDir(path)
        state = last_state(run)
        if state is None:
            return None
        refuse_differences(run, self.config)
        self._refuse_other(run)
        if state[1] > self.config.grpo.max_steps:
            raise ResumeError(
                f"{run.path} has {state[1]} steps already, grpo.max_steps is {self.config.grpo.max_steps}"
            )
        return state

    def _done(self) -> Result | None:
        """What a run that has come to its end came to, told again; None where it has not, or a part of that is lost."""
        run = self.run or RunDir(Path(self.config.output_dir))
        saved = finished(run, self.config)
        if saved is None:
            return None
        self._refuse_other(run)
        before, after = (outcome.read_completions(run, name, self.task, self.data) for name in ("before", "after"))
        if before is None or after is None:
            return None
        self.tell(f"{outcome.shown(run.path)} is done: all {self.config.grpo.max_steps} steps, nothing is left to do")
        outcome.show(before, after, self.console, self.tell)
        self.tell(f"saved {outcome.shown(saved)}\nrun   {outcome.shown(run.path)}")
        return Result(run.path, saved, before, after)

    def _refuse_other(self, run: RunDir) -> None:
        """Raise ResumeError where the run had other data, or was given other objects."""
        made = _manifest(run)
        if made.get("data_hash") != saving.data_hash(self.data):
            raise ResumeError(
                f"{run.path} was trained on other data than task {self.task.name} has now; put the files back as they "
                "were, or begin another run"
            )
        if made.get("given_as") != self.given:
            raise ResumeError(f"{run.path} was begun with {made.get('given_as') or 'no'} object: give the same again")

    def _trainer(self) -> Any:
        """TRL's trainer with our model, tokens and data. Its reward and completions are joined later."""
        from datasets import Dataset
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

        from evoalign.baselines.trainer import GRPOConfig, Trainer, keep_one_gpu

        on_cpu = settings.trains_on_cpu(self.config)
        folder = Path(self.config.output_dir).expanduser().absolute() / "trainer"
        known = settings.fields_of(GRPOConfig)
        try:
            arguments = GRPOConfig(**settings.arguments(self.config, folder, on_cpu=on_cpu, known=known))
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"grpo: {' '.join(str(error).split())}") from error
        keep_one_gpu(arguments)
        settings.check_prompts(self.config, len(self.data.train), arguments.world_size)
        own = self.config.grpo.rollouts != "trl"
        rows = [{"prompt": self.task.prompt(example), "row": i} for i, example in enumerate(self.data.train)]
        model = self._model()
        try:
            with warnings.catch_warnings(), _reference_of(self.config, model):
                warnings.simplefilter("ignore")  # of what it calls experimental, and of names that it will drop
                trainer = Trainer(
                    self.tokens,
                    corrected=self.config.grpo.rollouts == "es" and self.config.grpo.off_policy == "clip",
                    model=model,
                    reward_funcs=[self._reward],
                    args=arguments,
                    train_dataset=Dataset.from_list(rows),
                    processing_class=self.tokens.tokenizer,
                    peft_config=self._peft() if self.config.grpo.tune == "lora" else None,
                    rollout_func=self._rollouts if own else None,
                )
        except (ImportError, ValueError) as error:
            raise ConfigError(f"grpo: TRL refuses it: {' '.join(str(error).split())}") from error
        finally:
            with suppress(OSError):  # the trainer makes its folder at once; nothing is to be left of a refused run
                folder.rmdir()
        if trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled():  # by the launcher
            raise ConfigError(settings.SPLIT)
        return trainer

    def _model(self) -> Any:
        """Weights that train: float32 where the config leaves the dtype open, as mixed precision wants them."""
        name = self.config.model.dtype
        model = load_model(self.config.model, getattr(torch, "float32" if name == "auto" else name))
        return model.requires_grad_(True).train()

    def _peft(self) -> Any:
        from peft import LoraConfig

        lora = self.config.lora
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT accepts a float
            target_modules=lora.target_modules or "all-linear",
            layers_to_transform=lora.target_layers,
        )

    def _reward(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        assert self.steps is not None
        return self.steps.rewards(prompts, completions, **columns)

    def _rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        assert self.steps is not None and self.steps.policy.source is not None
        return self.steps.policy.source(prompts, trainer)

    def _join(self, trainer: Any, policy: Policy, steps: Steps) -> None:
        from transformers.trainer_callback import PrinterCallback

        self.steps, steps.trainer = steps, trainer
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(steps)

    def _begin(self, policy: Policy, steps: Steps, *, overwrite: bool, resume: bool) -> Evaluation:
        facts = {
            "task": {"name": self.task.name, "given_as": self.given},
            "given_as": self.given,
            "data_hash": saving.data_hash(self.data),
            "engine": {
                "engine": "trl",
                "device": str(policy.device),
                "dtype": str(policy.dtype).removeprefix("torch."),
            },
        }
        manifest = make_manifest(self.config, facts, command_line(), "grpo")
        if self.run is not None:
            if resume and died_early(self.run, self.config):
                self.tell(f"{outcome.shown(self.run.path)} ended before a state was saved: it begins again")
                overwrite = True
            self.run.create(self.config, manifest, overwrite=overwrite, resume=resume)
            shutil.rmtree(states(self.run), ignore_errors=True)
            steps.trackers = tracking.create(self.config, self.run.path, None)
        if policy.note:
            self.tell(policy.note)
        try:
            before = self._evaluate(steps, "start")
            steps.measure_start()
        except BaseException:
            if self.run is not None:
                self.run.undo()
            raise
        if self.stop.asked is not None:
            if self.run is not None:
                self.run.undo()
            raise StoppedError("stopped before the first step; nothing was written", self.stop.asked)
        if self.run is not None:
            if self.run.aside is not None:
                self.tell(f"the run that was there is now {self.run.aside}")
            outcome.write_completions(self.run, "before", before)
        return before

    def _go_on(self, steps: Steps, done: int) -> Evaluation:
        run = self.run
        if run is None:
            return steps.evaluate()
        run.sweep()
        rows = run.read_metrics()
        run.replace_metrics([rows[i] for i in range(done) if i in rows])
        if len(run.rows) < done:
            raise ResumeError(f"{run.metrics} lacks rows before step {done}: put it back, or begin another run")
        steps.evaluating = budget.read_evaluation(run.budget)
        run.go_on(self.config, make_manifest(self.config, {}, command_line(), "grpo"))
        steps.trackers = tracking.create(self.config, run.path, done)
        self.tell(f"resumes after step {done} of {self.config.grpo.max_steps}")
        before = outcome.read_completions(run, "before", self.task, self.data)
        if before is None:
            raise ResumeError(f"{run.completions('before')} is missing or damaged: put it back, or begin another run")
        return before

    def _train(self, trainer: Any, steps: Steps, state: Path | None) -> None:
        with steps.display if self.run is not None else nullcontext():
            try:
                trainer.train(resume_from_checkpoint=None if state is None else str(state))
            except (EvoalignError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if state is None or steps.has_begun:
                    raise
                raise ResumeError(
                    f"{state} cannot be read ({_first_sentence(error)}): put it back from a copy, or begin anew with "
                    "--overwrite, which moves the run aside"
                ) from error
        steps.draw()
        done = int(trainer.state.global_step)
        if self.stop.asked is not None and done < self.config.grpo.max_steps:
            steps.write_budget()
            total = self.config.grpo.max_steps
            raise StoppedError(f"stopped after step {done} of {total}; {self._how_to_go_on()}", self.stop.asked)

    def _finish(self, policy: Policy, steps: Steps, before: Evaluation) -> Result:
        done = self.config.grpo.max_steps
        if self.run is None:
            return Result(Path(self.config.output_dir), Path(self.config.output_dir), before, before)
        saved = steps.save(done)
        after = self._evaluate(steps, "result")
        moved = self._moved(policy, steps)
        mean: dict[str, Any] = {"generation": done, "weights_hash": policy.fingerprint(), **moved}
        outcome.conclude(self.run, self.config.evaluation, mean, before, after, self.console, self.tell)
        if moved["divergence"]:
            steps.draw((moved["divergence"]["exact"], after.measures["reward"]))
        steps.write_budget()
        for tracker in steps.trackers:
            tracker.finish({"before": before.measures, "after": after.measures})
        self.tell(f"saved {outcome.shown(saved)}\nrun   {outcome.shown(self.run.path)}")
        return Result(self.run.path, saved, before, after)

    def _moved(self, policy: Policy, steps: Steps) -> dict[str, Any]:
        """How far the policy is from the base model: by KL, and by its weights; None where not measured, or unknown."""
        assert self.run is not None
        kl = self.run.rows[-1]["divergence"] if self.run.rows else None
        if kl is None and self.config.checks.kl_every:
            kl = steps.measure()
        try:
            found = distance_of(policy.model, self.config)
            moved = {"l2": found.l2, "relative": found.relative}
        except ModelError as error:
            self.tell(f"distance from the base model: unknown; {error}")
            moved = None
        return {"divergence": kl, "distance": moved}

    def _evaluate(self, steps: Steps, which: str) -> Evaluation:
        self.tell(f"evaluating the {which} on {len(self.data.test)} test examples")
        return steps.evaluate()

    def _how_to_go_on(self) -> str:
        if self.given is not None:
            return f"resume with grpo(..., {self.given}=..., resume=True)"
        assert self.run is not None
        target = self.run.config if code_of(self.config) else self.run.path
        return f"resume with: evoalign grpo {shlex.quote(str(target))} --resume"

    def _explained(self, error: Exception) -> Exception:
        """A new run that fails before its first step is taken back; later, the error says from where it goes on."""
        if self.run is None:
            return error
        if not self.run.rows:
            self.run.undo()
            return error
        state = last_state(self.run)
        whence = f"it resumes after step {state[1]}" if state else "no state had been saved, so it begins again"
        kept = f"{whence}: {self._how_to_go_on()}"
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        room = "; lower grpo.per_device_train_batch_size and raise grpo.gradient_accumulation_steps"
        more = room if isinstance(error, torch.OutOfMemoryError) else ""
        if isinstance(error, EvoalignError):
            error.args = (f"{error}; {kept}",)
            return error
        return EvoalignError(f"{line}{more}; {kept}")


def _first_sentence(error: Exception) -> str:
    """What torch's readers say goes on with advice to read files as code, which nobody should take."""
    said = (str(error).strip().splitlines() or [""])[0].split(". ")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


@contextmanager
def _reference_of(config: Config, model: Any) -> Generator[None]:
    """TRL loads the reference of `grpo.beta` by the model's name, of whatever revision: here, the very files it has."""
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


def _manifest(run: RunDir) -> Mapping[str, Any]:
    try:
        found: Any = json.loads(run.manifest.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
