# SPDX-License-Identifier: Apache-2.0
"""What a run of GRPO will do and need, told before it starts. Imports no TRL, loads no weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from evoalign import tracking
from evoalign.baselines import settings
from evoalign.baselines.policy import died_early, finished, refuse_differences
from evoalign.baselines.steps import save_every
from evoalign.baselines.trainer_state import last_state
from evoalign.config import Config, SpaceConfig
from evoalign.cost.estimate import gib, second_copy_lines
from evoalign.engines.specs import specs_of_config
from evoalign.errors import ConfigError, ModelError, RunExistsError
from evoalign.models import origin
from evoalign.rundir.directory import RunDir
from evoalign.rundir.method import refuse_other
from evoalign.setup import ConfigLike, as_config, check_scorer, layout_of, task_and_data
from evoalign.spaces import create as create_space
from evoalign.tasks import Task
from evoalign.training import heading
from evoalign.types import TensorSpec
from evoalign.version import install

SLOTS = {"adamw_torch": 2, "adamw_torch_fused": 2, "sgd": 0}
"""Numbers that an optimizer keeps of each that is trained; others are not counted."""
FEW = 4
"""A group of fewer completions says little of which one is better than the others."""
USUAL = (1e-6, 1e-5)
"""Learning rates that full models usually take (TRL's default is 1e-6); information only, beyond ten times that."""
LARGE = 100e6
"""Parameters of a model for which that holds."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes a process holds through training; activations come on top. `moments` None: of an optimizer not counted."""

    weights: int
    adapter: int
    gradients: int
    moments: int | None
    reference: int

    @property
    def kept(self) -> int:
        """All of it that is known."""
        return self.weights + self.adapter + self.gradients + (self.moments or 0) + self.reference


def dry_run(config: ConfigLike, *, overwrite: bool = False, resume: bool = False) -> list[str]:
    """What a config would do: steps, completions, tokens, memory. Loads no weights, writes nothing.

    Raises a subclass of EvoalignError for what cannot be; what a run would refuse as things stand is a line.
    """
    config = as_config(config)
    settings.check_stopping(config)
    run = RunDir(Path(config.output_dir))
    standing = _standing(config, run, overwrite=overwrite, resume=resume)
    task, data = task_and_data(config, None, None)
    task.close()
    refusals = _refusals(config, len(data.train), task)
    known = [*heading.split_lines(config, task, data), *default_lines(config)]
    lines = [*known, *step_lines(config), *work_lines(config)]
    try:
        lines = [*origin.lines(config.model), *lines]
        specs = specs_of_config(config)
    except ModelError as error:
        return [*standing, *refusals, *lines, "memory: not estimated", f"would be refused: {error}"]
    head = heading.subject(config, task, data, specs)
    return [*standing, *refusals, head, *lines, *memory_lines(config, specs), *rate_lines(config, parameters(specs))]


def parameters(specs: Sequence[TensorSpec]) -> int:
    """Of the whole model."""
    return sum(math.prod(s.shape) for s in specs)


def trained(config: Config, specs: Sequence[TensorSpec]) -> int:
    """Numbers that are trained: all, or an adapter's factors. Raises ConfigError for targets that are not there."""
    if config.grpo.tune == "full":
        return parameters(specs)
    lora = config.lora.model_copy(update={"evolve": "ab"})
    both = config.model_copy(update={"space": SpaceConfig(name="lora"), "lora": lora, "es_": None})
    return layout_of(create_space(both), specs, torch.float32).parameters


def memory(config: Config, specs: Sequence[TensorSpec]) -> Memory:
    """What a process holds; an adapter is float32, and needs no copy of the base as its reference."""
    size = getattr(torch, config.model.trained_dtype).itemsize
    is_adapter = config.grpo.tune == "lora"
    each = 4 if is_adapter else size
    count, slots = trained(config, specs), SLOTS.get(config.grpo.by_name["optim"])
    copies = (config.grpo.beta > 0 and not is_adapter) + (config.checks.kl_every > 0)
    return Memory(
        weights=size * parameters(specs),
        adapter=each * count if is_adapter else 0,
        gradients=each * count,
        moments=None if slots is None else slots * each * count,
        reference=copies * size * parameters(specs),
    )


def checkpoint_bytes(config: Config, specs: Sequence[TensorSpec]) -> tuple[int, int]:
    """Of a saved policy, and of the trainer's state; 0 where none is saved on the way."""
    need = memory(config, specs)
    policy = need.adapter or need.weights
    return policy, policy + (need.moments or 0) if save_every(config.checkpoint.every) else 0


def default_lines(config: Config) -> list[str]:
    """A note where the config has no section `grpo`: steps that suit large models change a small one not at all."""
    if "grpo" in config.model_fields_set:
        return []
    grpo = config.grpo
    return [
        f"note: the config has no section grpo, so TRL's defaults hold: learning rate {grpo.learning_rate:g}, "
        f"{grpo.max_steps} steps, groups of {grpo.num_generations}; they suit large models, and move small ones hardly"
    ]


def step_lines(config: Config) -> list[str]:
    """How the policy moves; a warning where groups are small."""
    grpo = config.grpo
    tuned = f"LoRA of rank {config.lora.rank}" if grpo.tune == "lora" else "all weights"
    trl = grpo.by_name
    lines = [
        f"{grpo.max_steps} steps of {trl['optim']} on {tuned}, learning rate {grpo.learning_rate:g} "
        f"({trl['lr_scheduler_type']}), loss {trl['loss_type']}, beta {grpo.beta:g}, completions by {_source(config)}"
    ]
    if grpo.num_generations < FEW:
        lines.append(
            f"warning: grpo.num_generations {grpo.num_generations}: a group of so few says little of which completion "
            "is better, and where its rewards are equal nothing is learnt; usual are 8 to 64"
        )
    return lines


def _source(config: Config) -> str:
    """Who answers the training prompts."""
    if config.grpo.rollouts != "es" or config.es_ is None:
        return config.grpo.rollouts
    es, group = config.es, config.grpo.num_generations
    prompts = settings.round_size(config.grpo) * settings.rounds(config.grpo) // group
    width = "sigma" if es.sigma is not None else "noise_multiplier"
    pairs = "antithetic pairs" if es.antithetic else "no antithetic pairs"
    return (
        f"es: {group} greedy members ({pairs}) of space {config.space.name}, {width} {es.width:g} "
        f"({es.sigma_schedule.name}), {prompts} prompts each"
    )


def rate_lines(config: Config, count: int) -> list[str]:
    """A note where a large model, all of it trained, gets a learning rate far from the usual ones."""
    rate, (low, high) = config.grpo.learning_rate, USUAL
    if config.grpo.tune == "lora" or count < LARGE or low / 10 <= rate <= high * 10:
        return []
    return [f"note: grpo.learning_rate {rate:g}; models of this size usually take {low:g} to {high:g}"]


def work_lines(config: Config) -> list[str]:
    """Completions and tokens of one process, in words."""
    grpo = config.grpo
    size, lasts = settings.round_size(grpo), settings.cycle(grpo)
    size *= settings.rounds(grpo)
    times = -(-grpo.max_steps // lasts)
    tokens = size * settings.longest(config)
    each = "a step" if lasts == 1 else f"each {lasts} steps"
    return [
        f"completions {size:,} {each} ({size // grpo.num_generations} prompts x {grpo.num_generations}), "
        f"{size * times:,} in all; as many again for each further process",
        f"tokens at most {tokens:,} {each}, {tokens * times:,} in all",
    ]


def memory_lines(config: Config, specs: Sequence[TensorSpec]) -> list[str]:
    """Bytes in words."""
    count = trained(config, specs)
    return [
        f"model {parameters(specs) / 1e6:,.1f} M parameters, {count / 1e6:,.3f} M are trained",
        f"memory {memory_words(config, memory(config, specs))}",
        *(
            []
            if config.checks.kl_every  # a copy for it is counted
            else second_copy_lines(config, parameters(specs), getattr(torch, config.model.trained_dtype))
        ),
    ]


def memory_words(config: Config, need: Memory) -> str:
    """Bytes by what they hold."""
    dtype, optim = config.model.trained_dtype, config.grpo.by_name["optim"]
    parts = [f"{dtype} weights {gib(need.weights)}"]
    parts += [f"adapter {gib(need.adapter)}"] if need.adapter else []
    parts += [f"gradients {gib(need.gradients)}"]
    if need.moments is None:
        parts += [f"state of {optim} not counted"]
    elif need.moments:
        parts += [f"AdamW's two moments {gib(need.moments)}"]
    parts += [f"copies of the base model {gib(need.reference)} ({_copies(config)})"] if need.reference else []
    return f"{gib(need.kept)} a process: {', '.join(parts)}; activations and completions come on top"


def _copies(config: Config) -> str:
    causes = ["grpo.beta"] if config.grpo.beta > 0 and config.grpo.tune == "full" else []
    return " and ".join([*causes, *(["checks.kl_every"] if config.checks.kl_every else [])])


def _standing(config: Config, run: RunDir, *, overwrite: bool, resume: bool) -> list[str]:
    """From where it would go on, or why it would not begin. Raises ResumeError."""
    if resume:
        refuse_other(run.path, "grpo")
        if finished(run, config) is not None:
            return [f"{run.path} is done: all {config.grpo.max_steps} steps, nothing is left to do"]
        state = last_state(run)
        if state is not None:
            refuse_differences(run, config)
            return [f"resumes after step {state[1]} of {config.grpo.max_steps}"]
        if died_early(run, config):
            return [f"{run.path} ended before a state was saved: it begins again, and what is there is moved aside"]
    try:
        run.refuse(overwrite=overwrite)
    except RunExistsError as error:
        return [f"would be refused: {error}"]
    return []


def _refusals(config: Config, examples: int, task: Task) -> list[str]:
    """What a run would refuse before it loads a weight."""
    found: list[str] = []
    if not tracking.is_installed("trl"):
        found.append(f"would be refused: GRPO needs the extra grpo: {install('grpo')}")
    refusing = (
        partial(settings.check, config),
        partial(settings.trains_on_cpu, config),
        partial(settings.check_prompts, config, examples),
        partial(settings.check_objective, config, task.objective()),
        partial(check_scorer, config, task),
    )
    for refuse in refusing:
        try:
            refuse()
        except (ConfigError, ModelError) as error:
            found.append(f"would be refused: {error}")
    return found
