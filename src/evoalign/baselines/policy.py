# SPDX-License-Identifier: Apache-2.0
"""The model that GRPO trains: how it answers, what it costs, how it is saved."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from evoalign import evaluation
from evoalign.baselines import settings, trainer_state
from evoalign.baselines.rollouts import EngineRollouts, MemberRollouts, Source, answering
from evoalign.baselines.trainer_state import last_state
from evoalign.checks import divergence
from evoalign.checks.distance import Distance, distance_of
from evoalign.checks.divergence import Divergence, Fluency, Reference
from evoalign.config import Config, load
from evoalign.config.reading import read_object
from evoalign.cost import budget, flops
from evoalign.cost.budget import Cost, answers_cost, time_cost
from evoalign.cost.flops import Adapted, ModelShape
from evoalign.engines import weights_hash
from evoalign.engines.specs import specs_of
from evoalign.engines.transformers.engine import TransformersEngine
from evoalign.errors import CheckpointError, DataError, ModelError, ResumeError
from evoalign.evaluation import Evaluation
from evoalign.rollouts import Encoded
from evoalign.rundir import checkpoint
from evoalign.rundir.checkpoint import NO_JOURNAL, Mark
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.rundir.files import filled
from evoalign.rundir.identity import differences
from evoalign.rundir.method import method_of
from evoalign.spaces import create as create_space
from evoalign.tasks import Data, Split, Task
from evoalign.tokens import Tokens
from evoalign.types import Example, text_of

SAVE_EVERY = 50
"""Steps between checkpoints where `checkpoint.every` leaves it open: no journal rebuilds a policy."""


class Policy:
    """Made around a trainer's model, where that lies; `model` is a PEFT model with `grpo.tune: lora`."""

    def __init__(self, config: Config, tokens: Tokens, task: Task, data: Data, model: Any, processes: int = 1) -> None:
        self.config, self.tokens, self.task, self.data, self.model = config, tokens, task, data, model
        self.processes = processes
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.on_cpu = self.device.type == "cpu"
        self.mixed = settings.mixed(config, on_cpu=self.on_cpu)
        """Whether it trains, and answers in training, in bfloat16 on float32 weights."""
        self._forward = model.forward
        """That of before the first step, at which a trainer in mixed precision puts its own in its place."""
        self.tuned = _tuned(model)
        self.engine = self._engine()
        self.longest = settings.longest(config)
        self.lengths = Encoded(task, tokens, data.train)
        self.note = ""
        self.shape = self._shape()
        self.source = self._source()
        self._reference = Reference(config, self.device, self.dtype)

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter is trained, and not the model."""
        return bool(self.tuned)

    def evaluate(self, split: Split = "test") -> tuple[Evaluation, Cost]:
        """The policy on a split, by the engine that answers for members of a population; what it took."""
        start = time.perf_counter()
        with self._as_served():
            examples = self.data.of(split)
            found = evaluation.evaluate(self.engine, self.tokens, self.task, examples, self.config.evaluation)
        return found, self._cost_of_evaluation(found, examples, time.perf_counter() - start)

    def divergence(self) -> Divergence:
        """KL of the policy from the base model, a copy of which is loaded the first time."""
        with self._as_served():
            samples = divergence.draw(self.engine, self.tokens, self.task, self.data.test, self.config)
            return self._reference.divergence(self.model, samples)

    def distance(self) -> Distance:
        """Return the distance of the policy's weights from the base model's. Raises EvoalignError."""
        return distance_of(self.model, self.config)

    def fluency(self, before: Evaluation, after: Evaluation) -> Fluency:
        """How likely the base model finds both evaluations; the same copy."""
        said = (before.completions, after.completions)
        return divergence.fluency(self._reference, self.tokens, self.task, self.data.test, *said)

    def close(self) -> None:
        """Let go of the copy of the base model."""
        self._reference.close()

    def cost_of_round(self, answers: Sequence[tuple[int, int]]) -> Cost:
        """Of generating completions: (row of the training split, tokens) each."""
        prompts = [self.lengths[row] for row, _ in answers]
        generated = [tokens for _, tokens in answers]
        return budget.grpo_generation(
            self.shape,
            list(map(len, prompts)),
            generated,
            prompts=len(answers) // self.config.grpo.num_generations,
            reference=self.config.grpo.beta > 0,
            old_logprobs=settings.misaligned(self.config.grpo),
            adapted=self.adapted,
            all_logits=self.on_cpu,
            generation_flops=self._generation_flops(prompts, generated),
        )

    def cost_of_update(self, answers: Sequence[tuple[int, int]], passes: int) -> Cost:
        """Of one optimizer step of so many passes over `answers`.

        They are a share of all where several steps share a round, and more than all where a step takes each twice.
        """
        grpo = self.config.grpo
        whole = budget.grpo_update(
            self.shape,
            [len(self.lengths[row]) for row, _ in answers],
            [tokens for _, tokens in answers],
            checkpointing=grpo.by_name["gradient_checkpointing"],
            adapted=self.adapted,
            all_logits=self.on_cpu,
        )
        share = passes * grpo.per_device_train_batch_size * self.processes / len(answers)
        if whole.forward_flops is None or whole.backward_flops is None or share == 1:
            return whole
        optimizer = (
            budget.grpo_update(self.shape, [], [], checkpointing=False, adapted=self.adapted).backward_flops or 0.0
        )
        return replace(
            whole,
            forward_flops=share * whole.forward_flops,
            backward_flops=share * (whole.backward_flops - optimizer) + optimizer,
        )

    @property
    def adapted(self) -> Adapted | None:
        """The factors that are trained; None: all weights."""
        return Adapted(self.config.lora.rank, self.tuned) if self.tuned else None

    def shown(self, row: int) -> str:
        """A training prompt as text."""
        return text_of(self.task.prompt(self.data.train[row]))

    def save(self, run: RunDir, done: int, reward: float | None) -> Path:
        """As a PEFT adapter or a Hugging Face checkpoint, unless that is there already."""
        folder = run.saved(done, adapter=self.is_adapter)
        mark = Mark(done, self.fingerprint(), NO_JOURNAL, validation=reward)
        if checkpoint.holds(folder, mark):
            return folder
        with filled(folder, replace=True) as temporary:
            self.model.save_pretrained(temporary)
            if not self.is_adapter:
                self.tokens.tokenizer.save_pretrained(temporary)
            checkpoint.seal(temporary, mark)
        return folder

    def fingerprint(self) -> str:
        """`weights_hash` of what is trained."""
        return weights_hash((name, p.data) for name, p in self.model.named_parameters() if p.requires_grad)

    def mark_state(self, run: RunDir, done: int) -> None:
        """The trainer's state after so many steps is whole on disk. Only now may the others go."""
        trainer_state.mark(run, done)

    @contextmanager
    def _as_served(self) -> Generator[None]:
        """It answers in the arithmetic of its weights, as what is saved of it does, and goes on training as before."""
        trained = vars(self.model).get("forward")
        self.model.forward = self._forward
        try:
            with answering(self.model, mixed=False):
                yield
        finally:
            if trained is None:
                del self.model.forward
            else:
                self.model.forward = trained

    def _engine(self) -> TransformersEngine:
        """It answers with the model as it is at the time."""
        config = self.config.model_copy(update={"engine": self.config.engine.in_process()})
        return TransformersEngine(config, self.tokens, self.model)

    def _source(self) -> Source | None:
        """Whoever draws completions; None: TRL itself."""
        if self.config.grpo.rollouts == "trl":
            return None
        own = (self.config, self.engine, self.tokens, self.model, self.longest, self.mixed)
        if self.config.grpo.rollouts == "engine":
            return EngineRollouts(*own)
        # An engine of its own: the members' hooks stay out of evaluation.
        return MemberRollouts(self.config, self._engine(), *own[2:], create_space(self.config))

    def _shape(self) -> ModelShape | None:
        bare = self.model.get_base_model() if self.is_adapter else self.model
        try:
            specs = [s for s in specs_of(bare, lambda _: 0.0) if ".lora_" not in s.name]
            named = [replace(s, name=s.name.replace(".base_layer.", ".")) for s in specs]
            return flops.shape_of(bare.config, named)
        except ModelError as error:
            self.note = str(error)
            return None

    def _generation_flops(self, prompts: Sequence[tuple[int, ...]], generated: Sequence[int]) -> int | None:
        """Of completions by our own engine; None: by TRL, or not known."""
        if self.shape is None or self.source is None:
            return None
        room = max(map(len, prompts)) + self.longest
        if isinstance(self.source, EngineRollouts):
            return flops.rollout_flops(self.shape, prompts, generated, self.adapted, room)
        assert isinstance(self.source, MemberRollouts)
        layout, group = self.source.layout, self.config.grpo.num_generations
        factors = Adapted(layout.rank, frozenset(t.module for t in layout.tensors))
        noise = 2 * flops.noise_numbers(create_space(self.config), layout) * group
        members = [(prompts[i::group], generated[i::group]) for i in range(group)]
        return noise + sum(flops.rollout_flops(self.shape, p, n, factors, room) for p, n in members)

    def _cost_of_evaluation(self, found: Evaluation, examples: Sequence[Example], seconds: float) -> Cost:
        encoded = {e: self.tokens.encode(self.task.prompt(examples[e])) for e in {s.example for s in found.completions}}
        prompts, generated = [encoded[s.example] for s in found.completions], [s.tokens for s in found.completions]
        answers = answers_cost(self.shape, prompts, generated, self.adapted, self.config.evaluation.max_tokens)
        return answers + time_cost(seconds, 1, budget.peak_memory(str(self.device)))


def finished(run: RunDir, config: Config) -> Path | None:
    """The saved policy of a run of GRPO that is done: after all steps that the config asks for, evaluated and whole.

    Raises ResumeError where it was made with other settings.
    """
    steps, state = config.grpo.max_steps, last_state(run)
    if method_of(run.path) != "grpo" or (state is not None and state[1] > steps):
        return None
    try:
        if read_object(run.results / "evaluation.json")["generation"] != steps:
            return None
    except (DataError, KeyError):
        return None
    refuse_differences(run, config)
    for folder in reversed(saved_folders(run.path)):
        try:
            if checkpoint.verify(folder).generation == steps:
                return folder
        except CheckpointError:
            continue
    return None


def died_early(run: RunDir, config: Config) -> bool:
    """Whether a run of GRPO that ended before it had a state to resume from is here: it can only begin again.

    Raises ResumeError where that would be another run, or where it had come to its end.
    """
    if method_of(run.path) != "grpo" or run.is_unstarted() or last_state(run) is not None:
        return False
    if (run.results / "evaluation.json").is_file():
        raise ResumeError(
            f"{run.path} is done, and kept no state to train on from ({_why_stateless(load([run.config]))}); "
            "--overwrite moves it aside and begins again"
        )
    refuse_differences(run, config)
    return True


def _why_stateless(made: Config) -> str:
    every = made.checkpoint.every
    if every == 0:
        return "checkpoint.every 0 keeps none"
    says = f"checkpoint.every unset means {SAVE_EVERY}" if every is None else f"checkpoint.every {every}"
    return f"{says}, and it ended before the first one"


def refuse_differences(run: RunDir, config: Config) -> None:
    """Raise ResumeError where the run was made with other settings."""
    odd, _ = differences(config, load([run.config]), "grpo")
    if odd:
        raise ResumeError(f"{run.path} cannot be resumed with other settings: {'; '.join(odd)}")


def _tuned(model: Any) -> frozenset[str]:
    """The weights that have trained factors beside them; none where all weights are trained."""
    prefix = "base_model.model."
    return frozenset(f"{n.removeprefix(prefix)}.weight" for n, m in model.named_modules() if hasattr(m, "lora_A"))
