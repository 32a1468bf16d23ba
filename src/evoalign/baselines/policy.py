# SPDX-License-Identifier: Apache-2.0
"""The model that GRPO trains: its completions, their cost, and its checkpoints.

Completions come from TRL or from evoalign's own engine. The engine samples from the policy, or decodes greedily from ES
members around it. With members' completions GRPO explores as ES does and updates by backpropagation.

A member's completions are not drawn from the policy. Greedy decoding is a point mass, so no probability ratio exists;
the member's distribution before the argmax is used instead. `old` in PPO's clipped ratio (Schulman et al.,
arXiv 1707.06347, eq. 7) is the probability that the member gave each token. A token of positive advantage gets no
gradient where the policy rates it more than 1 + epsilon times as likely as the member did, and one of negative
advantage where it is less than 1 - epsilon times as likely. The clip bounds the step; it does not make the gradient
unbiased.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evoalign import evaluation, evolve
from evoalign.baselines import settings
from evoalign.baselines.served import Served, served
from evoalign.baselines.trainer_state import last_state
from evoalign.checks import divergence
from evoalign.checks.distance import Distance, distance_of
from evoalign.checks.divergence import Divergence, Fluency, Reference
from evoalign.config import Config
from evoalign.config.reading import read_object
from evoalign.cost import budget, flops
from evoalign.cost.budget import Cost, answers_cost, time_cost
from evoalign.cost.flops import Adapted, Matrix, ModelShape
from evoalign.engines import Engine, weights_hash
from evoalign.engines.specs import specs_of
from evoalign.engines.transformers.engine import TransformersEngine
from evoalign.errors import CheckpointError, ConfigError, DataError, ModelError, ResumeError
from evoalign.evaluation import Evaluation
from evoalign.models.files import without_bar
from evoalign.rollouts import Encoded, collect, derive_seed
from evoalign.rundir import checkpoint
from evoalign.rundir.checkpoint import NO_JOURNAL, Mark
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.rundir.files import filled
from evoalign.rundir.identity import differences
from evoalign.rundir.method import method_of
from evoalign.rundir.own import read_own
from evoalign.setup import layout_of
from evoalign.spaces import Space
from evoalign.spaces import create as create_space
from evoalign.tasks import Data, Split, Task
from evoalign.tokens import Tokens
from evoalign.types import MEAN_PLAN, Layout, Plan, Request, Sampling, population

Source = Callable[[Sequence[Any], Any], dict[str, Any]]
"""A function that TRL calls as `rollout_func`: prompts and the trainer to token ids and log-probabilities."""


@contextmanager
def generating(model: Any, *, mixed: bool) -> Generator[None]:
    """Put a model in evaluation mode to generate, with a KV cache, and restore its mode.

    With `mixed`, autocast float32 weights to bfloat16, as in training. Otherwise compute in the dtype of the weights,
    unless the model's `forward` is wrapped in autocast.
    """
    training = model.training
    model.eval()
    try:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=mixed):
            yield
    finally:
        model.train(training)


@contextmanager
def rounded(model: Any) -> Generator[None]:
    """Round the weights to bfloat16, with which training in mixed precision computes, and restore them after.

    From weights in bfloat16, steps of 1e-6 hardly show after rounding: unrounded ones are of a policy that neither
    completes nor gives gradients. Memory: the weights once more.
    """
    kept = {parameter: parameter.data for parameter in model.parameters()}
    for parameter, data in kept.items():
        parameter.data = data.bfloat16().to(data.dtype)
    try:
        yield
    finally:
        for parameter, data in kept.items():
            parameter.data = data


class EngineRollouts:
    """Groups of completions sampled from the policy at `grpo.temperature`.

    Each completion of a step has its own seed. A step may request several rounds, whose seeds continue the numbering.
    """

    def __init__(
        self, config: Config, engine: Engine, tokens: Tokens, model: Any, longest: int, mixed: bool, copy: Served | None
    ) -> None:
        self.config, self.tokens, self.model, self.mixed, self.copy = config, tokens, model, mixed, copy
        self.engine = engine if copy is None else copy.engine
        self.sampling = Sampling(longest, config.grpo.temperature, config.grpo.top_p)
        self._step, self._requested = -1, 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return the output of TRL's `rollout_func`; `prompts` has a prompt once for each completion."""
        step, process = int(trainer.state.global_step), int(trainer.accelerator.process_index)
        first = self._requested if step == self._step else 0
        self._step, self._requested = step, first + len(prompts)
        encoded = [self.tokens.encode(prompt) for prompt in prompts]
        seeds = [derive_seed(self.config.seed, "grpo", step, process, first + i) for i in range(len(prompts))]
        requests = [Request(i, ids, self.sampling, seeds[i]) for i, ids in enumerate(encoded)]
        return self.output(encoded, MEAN_PLAN, requests)

    def output(self, encoded: Sequence[tuple[int, ...]], plan: Plan, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the completions in the form of TRL, by request and member."""
        if self.copy is not None:
            self.copy.refresh()
        with generating(self.model, mixed=self.mixed) if self.copy is None else nullcontext():
            found = sorted(collect(self.engine, plan, requests), key=lambda r: (r.request, r.member.index))
        logprobs = None if any(r.logprobs is None for r in found) else [list(r.logprobs or ()) for r in found]
        ids = [list(r.token_ids) for r in found]
        return {"prompt_ids": list(map(list, encoded)), "completion_ids": ids, "logprobs": logprobs}


class MemberRollouts(EngineRollouts):
    """Groups with one greedy completion of each member; all prompts of a step use the same members."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        tokens: Tokens,
        model: Any,
        longest: int,
        mixed: bool,
        copy: Served | None,
        space: Space,
    ) -> None:
        if space.carrier != "adapter":
            raise ConfigError(
                f"grpo.rollouts: es needs members that share a batch: set space: lora or lowrank, not {space.name}"
            )
        super().__init__(config, engine, tokens, model, longest, mixed, copy)
        self.members = population(config.grpo.num_generations, antithetic=config.es.antithetic)
        self.sampling = Sampling(longest)
        with torch.no_grad():
            self.layout: Layout = layout_of(space, self.engine.specs(), self.engine.dtype)
            self.engine.start(space, self.layout, None, False)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return the output of TRL's `rollout_func`, with each token's log-probability under its member.

        The schedule of sigma spans `es.num_generations` steps and then stays at its last value.
        """
        group, step = self.config.grpo.num_generations, int(trainer.state.global_step)
        encoded = [self.tokens.encode(prompt) for prompt in prompts]
        requests = [Request(i, ids, self.sampling, logprobs=True) for i, ids in enumerate(encoded[::group])]
        sigma = evolve.sigma_at(self.config, min(step, self.config.es.num_generations - 1))
        return self.output(encoded, Plan(step, sigma, self.members), requests)


class Policy:
    """The trainer's model, on the trainer's device; a PEFT model with `grpo.tune: lora`."""

    def __init__(self, config: Config, tokens: Tokens, task: Task, data: Data, model: Any, processes: int = 1) -> None:
        self.config, self.tokens, self.task, self.data, self.model = config, tokens, task, data, model
        self.processes = processes
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.on_cpu = self.device.type == "cpu"
        self.mixed = settings.mixed(config, on_cpu=self.on_cpu)
        """Whether training and its completions compute in bfloat16 on float32 weights."""
        self._forward = model.forward
        """The model's own `forward`; a trainer in mixed precision replaces it at the first step."""
        prefix, modules = "base_model.model.", model.named_modules()
        self.tuned = frozenset(f"{n.removeprefix(prefix)}.weight" for n, m in modules if hasattr(m, "lora_A"))
        """Names of the weights with a trained adapter; empty if all weights are trained."""
        self.is_adapter = bool(self.tuned)
        self._result = partial(rounded, model) if self.mixed and not self.is_adapter else nullcontext
        """A context in which the model has the weights that are evaluated and saved: see `rounded`."""
        self.engine = self._engine()
        self.longest = settings.longest(config)
        self.lengths = Encoded(task, tokens, data.train)
        self.note = ""
        self.shape: ModelShape | None = None
        bare = model.get_base_model() if self.is_adapter else model
        try:
            specs = [s for s in specs_of(bare, lambda _: 0.0) if ".lora_" not in s.name]
            named = [replace(s, name=s.name.replace(".base_layer.", ".")) for s in specs]
            self.shape = flops.shape_of(bare.config, named)
        except ModelError as error:
            self.note = str(error)
        self.copy = None if config.grpo.rollouts == "trl" else self._copy()
        self._evaluator: Served | None = None
        self.source = self._source()
        self._reference = Reference(config, self.device, self.dtype)

    def evaluate(self, split: Split = "test") -> tuple[Evaluation, Cost]:
        """Evaluate the policy on a split with evoalign's own engine, and return the result with its cost."""
        start = time.perf_counter()
        examples = self.data.of(split)
        with self._completing() as engine:
            found = evaluation.evaluate(engine, self.tokens, self.task, examples, self.config.evaluation)
        seconds = time.perf_counter() - start
        encoded = {
            e: self.tokens.encode(self.task.prompt(examples[e]), self.task.tools)
            for e in {s.example for s in found.completions}
        }
        prompts, generated = [encoded[s.example] for s in found.completions], [s.tokens for s in found.completions]
        cost = answers_cost(self.shape, prompts, generated, self.adapted, self.config.evaluation.max_tokens)
        return found, cost + time_cost(seconds, 1, budget.peak_memory(str(self.device)))

    def check_mean(self) -> None:
        """Raise ModelError if the engine does not compute the model as transformers does; see `Engine.check_mean`."""
        with self._as_served():
            self.engine.check_mean()
        if self.copy is not None:
            self.copy.refresh()
            self.copy.engine.check_mean()

    def divergence(self) -> Divergence:
        """Return the KL of the policy from the base model; the first call loads a copy of the base model."""
        with self._completing() as engine:
            samples = divergence.draw(engine, self.tokens, self.task, self.data.test, self.config)
        with self._as_served():
            return self._reference.divergence(self.model, samples)

    def distance(self) -> Distance:
        """Return the distance of the policy's weights from the base model's. Raises EvoalignError."""
        with self._result():
            return distance_of(self.model, self.config)

    def fluency(self, before: Evaluation, after: Evaluation) -> Fluency:
        """Return the likelihood of both evaluations' completions under the base model."""
        both = (before.completions, after.completions)
        return divergence.fluency(self._reference, self.tokens, self.task, (self.data.test, self.data.test), *both)

    def close(self) -> None:
        """Free the copies of the base model and of the policy, and close the engine of the policy."""
        self._reference.close()
        self.before_step()
        for held in filter(None, (self.copy, self.engine)):
            held.close()
        self.source = self.copy = None

    def cost_of_round(self, answers: Sequence[tuple[int, int]]) -> Cost:
        """Return the cost of generating `answers`, each (row of the training split, number of tokens)."""
        prompts = [self.lengths[row] for row, _ in answers]
        generated = [tokens for _, tokens in answers]
        cost = budget.grpo_generation(
            self.shape,
            list(map(len, prompts)),
            generated,
            prompts=len(answers) // self.config.grpo.num_generations,
            reference=self.config.grpo.beta > 0 and self.config.grpo.algorithm != "dpo",  # there of its pairs alone
            old_logprobs=settings.misaligned(self.config.grpo),
            adapted=self.adapted,
            all_logits=self.on_cpu,
            generation_flops=self._generation_flops(prompts, generated),
        )
        if self.config.grpo.algorithm == "ppo":
            cost += replace(self._critic_cost(answers), backward_flops=0.0)
        return cost

    def cost_of_update(self, answers: Sequence[tuple[int, int]], passes: int) -> Cost:
        """Return the cost of one optimizer step of `passes` micro-batches over the completions of a round, `answers`.

        The step may use a part of them, where several steps share a round, or use each of them more than once. A step
        of DPO uses each of its pairs once, and `answers` are these.
        """
        grpo = self.config.grpo
        whole = self._update_cost(self.shape, answers, self.adapted)
        if grpo.algorithm == "dpo":
            return whole + replace(self._update_cost(self.shape, answers, None), backward_flops=0.0)  # the reference
        idle = self._update_cost(self.shape, [], self.adapted)
        if grpo.algorithm == "ppo":
            whole, idle = whole + self._critic_cost(answers), idle + self._critic_cost([])
        share = passes * grpo.per_device_train_batch_size * self.processes / len(answers)
        if whole.forward_flops is None or whole.backward_flops is None or share == 1:
            return whole
        optimizer = idle.backward_flops or 0.0
        backward = share * (whole.backward_flops - optimizer) + optimizer
        return replace(whole, forward_flops=share * whole.forward_flops, backward_flops=backward)

    def _update_cost(self, shape: ModelShape | None, answers: Sequence[tuple[int, int]], more: Adapted | None) -> Cost:
        """Return the cost of a model's forward and backward passes over `answers`, and of its optimizer."""
        lengths, generated = [len(self.lengths[row]) for row, _ in answers], [tokens for _, tokens in answers]
        grpo, every = self.config.grpo, self.on_cpu and self.config.grpo.algorithm != "dpo"
        checkpointing = grpo.by_name["gradient_checkpointing"]
        return budget.grpo_update(
            shape, lengths, generated, checkpointing=checkpointing, adapted=more, all_logits=every
        )

    def _critic_cost(self, answers: Sequence[tuple[int, int]]) -> Cost:
        """Return `_update_cost` of PPO's critic, which has one output in place of the head."""
        shape = self.shape and replace(self.shape, head=Matrix("head", 1, self.shape.head.columns, None))
        return self._update_cost(shape, answers, None)

    @property
    def adapted(self) -> Adapted | None:
        """Rank and weights of the trained adapter; None if all weights are trained."""
        return Adapted(self.config.lora.rank, self.tuned) if self.tuned else None

    def save(self, run: RunDir, done: int, reward: float | None, then: Callable[[], None]) -> Path:
        """Save a PEFT adapter or a Hugging Face checkpoint, unless the same one is there, and return its folder."""
        folder = run.saved(done, adapter=self.is_adapter)
        mark = Mark(done, self.fingerprint(), NO_JOURNAL, validation=reward)
        if not checkpoint.holds(folder, mark):
            with filled(folder, replace=True) as temporary, without_bar(), self._result():
                self.model.save_pretrained(temporary)
                if not self.is_adapter:
                    self.tokens.tokenizer.save_pretrained(temporary)
                checkpoint.seal(temporary, mark)
        then()
        return folder

    def settle(self) -> None:
        """Return at once: `save` has written everything."""

    def fingerprint(self) -> str:
        """Return the `weights_hash` of the trained parameters, as they are saved."""
        with self._result():
            return weights_hash((name, p.data) for name, p in self.model.named_parameters() if p.requires_grad)

    @contextmanager
    def _completing(self) -> Generator[Engine]:
        """Return an engine with the weights as they are saved, in their own dtype.

        If completions come from a copy, so do these. A copy of another dtype is not used: one more is made, which
        `before_step` frees.
        """
        if self.copy is None:
            with self._as_served():
                yield self.engine
            return
        if self._evaluator is None:
            self._evaluator = self.copy if self.copy.engine.dtype == self.dtype else self._copy(self.dtype)
        assert self._evaluator is not None
        with self._result():
            self._evaluator.refresh()
        yield self._evaluator.engine

    def before_step(self) -> None:
        """Free the memory of evaluations, which the gradients of a step take."""
        if self._evaluator is self.copy and self.copy is not None:
            self.copy.engine.release()
        elif self._evaluator is not None:
            self._evaluator.close()
        self._evaluator = None

    @contextmanager
    def _as_served(self) -> Generator[None]:
        """Compute in the dtype of the weights, as the saved model will, and restore the trainer's `forward` after."""
        trained = vars(self.model).get("forward")
        self.model.forward = self._forward
        try:
            with self._result(), generating(self.model, mixed=False):
                yield
        finally:
            if trained is None:
                del self.model.forward
            else:
                self.model.forward = trained

    def _engine(self) -> TransformersEngine:
        """Return an engine that shares the model, and so uses the current weights."""
        config = self.config.model_copy(update={"engine": self.config.engine.in_process()})
        return TransformersEngine(config, self.tokens, self.model)

    def _copy(self, dtype: torch.dtype | None = None) -> Served | None:
        return served(self.config, self.tokens, self.model, dtype)

    def _source(self) -> Source | None:
        """Return the function that generates completions; None if TRL does."""
        if self.config.grpo.rollouts == "trl":
            return None
        own = (self.tokens, self.model, self.longest, self.mixed, self.copy)
        if self.config.grpo.rollouts == "engine":
            return EngineRollouts(self.config, self.engine, *own)
        # A second engine, so that the members' hooks do not affect evaluation.
        return MemberRollouts(self.config, self._engine(), *own, create_space(self.config))

    def _generation_flops(self, prompts: Sequence[tuple[int, ...]], generated: Sequence[int]) -> int | None:
        """Return the FLOPs of completions by evoalign's engine; None if TRL generates or the model is unknown."""
        if self.shape is None or self.source is None:
            return None
        room = max(map(len, prompts)) + self.longest
        if not isinstance(self.source, MemberRollouts):
            return flops.rollout_flops(self.shape, prompts, generated, self.adapted, room)
        layout, group = self.source.layout, self.config.grpo.num_generations
        factors = Adapted(layout.rank, frozenset(layout.modules))
        noise = 2 * flops.noise_numbers(create_space(self.config), layout) * group
        members = [(prompts[i::group], generated[i::group]) for i in range(group)]
        return noise + sum(flops.rollout_flops(self.shape, p, n, factors, room) for p, n in members)


def finished(run: RunDir, config: Config) -> Path | None:
    """Return the final checkpoint of a finished GRPO run, or None if the run is not finished.

    A finished run has `grpo.max_steps` steps, the final evaluation, and an intact checkpoint of the last step. Raises
    ResumeError if the run has other settings.
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
    """Return whether the folder has a GRPO run that ended before its first trainer state, and must start over.

    Raises ResumeError if the run has other settings, or is finished.
    """
    if method_of(run.path) != "grpo" or run.is_unstarted() or last_state(run) is not None:
        return False
    if (run.results / "evaluation.json").is_file():
        every = read_own(run.path).checkpoint.every
        saved = f"{every}" if every is not None else f"unset, which means {settings.SAVE_EVERY}"
        raise ResumeError(
            f"{run.path} is done and has no trainer state to continue from (its checkpoint.every is {saved}: no step "
            "was saved); --overwrite moves it aside and begins again"
        )
    refuse_differences(run, config)
    return True


def refuse_differences(run: RunDir, config: Config) -> None:
    """Raise ResumeError naming the settings that differ from those of the run."""
    odd, _ = differences(config, read_own(run.path), "grpo")
    if odd:
        raise ResumeError(f"{run.path} cannot be resumed with other settings: {'; '.join(odd)}")
