# SPDX-License-Identifier: Apache-2.0
"""Estimate the steps, completions and memory of a GRPO run for `--dry-run`. Imports no TRL and loads no weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import torch

from evoalign import tracking
from evoalign.baselines import settings
from evoalign.baselines.policy import died_early, finished, refuse_differences
from evoalign.baselines.served import engine_of
from evoalign.baselines.trainer_state import last_state
from evoalign.config import Config, GrpoConfig, SpaceConfig
from evoalign.cost import estimate
from evoalign.cost.estimate import gib, second_copy_lines
from evoalign.engines.specs import specs_of_config
from evoalign.errors import ConfigError, ModelError, RunExistsError
from evoalign.models import origin
from evoalign.rundir.directory import RunDir
from evoalign.rundir.method import refuse_other
from evoalign.setup import ConfigLike, as_config, check_scorer, layout_of, task_and_data, with_form
from evoalign.spaces import create as create_space
from evoalign.tasks import Task
from evoalign.training import heading
from evoalign.types import TensorSpec
from evoalign.version import install

SLOTS = {"adamw_torch": 2, "adamw_torch_fused": 2, "sgd": 0}
"""Values that an optimizer keeps per trained parameter; other optimizers are not counted."""
FEW = 4
"""Smallest group size without a warning."""
USUAL = (1e-6, 1e-5)
"""Usual learning rates of full models (TRL's default is 1e-6); a rate more than ten times outside gets a note."""
LARGE = 100e6
"""Parameters of a model from which the usual learning rates apply."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a process holds throughout training, without activations.

    `moments` is None for an optimizer that is not counted. `served` is the copy for completions, `critic` that of PPO
    with its gradients and moments.
    """

    weights: int
    adapter: int
    gradients: int
    moments: int | None
    reference: int
    served: int
    critic: int = 0

    @property
    def kept(self) -> int:
        """Sum of all known parts."""
        return sum(filter(None, astuple(self)))


def dry_run(config: ConfigLike, *, overwrite: bool = False, resume: bool = False) -> list[str]:
    """Return lines on what a run would do: steps, completions, tokens, memory. Loads no weights, writes no files.

    Raises a subclass of EvoalignError for an invalid config. Other reasons to refuse a run, such as an existing
    output_dir, are lines.
    """
    config = as_config(config)
    config = with_form(config, Path(config.output_dir) if resume else None)
    config.trained_by("grpo")  # raises ConfigError if missing
    settings.check_stopping(config)
    run = RunDir(Path(config.output_dir))
    starting = _start_lines(config, run, overwrite=overwrite, resume=resume)
    task, data = task_and_data(config, None, None)
    task.close()
    refusals = _refusals(config, len(data.train), task)
    starting += heading.token_lines(config, task, data, settings.longest(config))
    known = [*heading.split_lines(config, task, data), *default_lines(config)]
    lines = [*known, *step_lines(config), *work_lines(config), estimate.TIME]
    dtype = getattr(torch, config.model.trained_dtype)
    try:
        settings.refuse_quantised(config)
        lines = [*origin.lines(config.model), *lines]
        specs = specs_of_config(config)
    except ModelError as error:
        lines += [estimate.memory_by_name(config.model.name, dtype), f"would be refused: {error}"]
        return [*starting, *refusals, *lines]
    head = heading.subject(config, task, data, specs)
    return [*starting, *refusals, head, *lines, *memory_lines(config, specs), *rate_lines(config, parameters(specs))]


def parameters(specs: Sequence[TensorSpec]) -> int:
    """Return the number of parameters of the whole model."""
    return sum(math.prod(s.shape) for s in specs)


def trained(config: Config, specs: Sequence[TensorSpec]) -> int:
    """Return the number of trained parameters. Raises ConfigError for adapter targets that the model does not have."""
    if config.grpo.tune == "full":
        return parameters(specs)
    lora = config.lora.model_copy(update={"evolve": "ab"})
    both = config.model_copy(update={"space": SpaceConfig(name="lora"), "lora": lora, "es_": None})
    return layout_of(create_space(both), specs, torch.float32).parameters


def memory(config: Config, specs: Sequence[TensorSpec]) -> Memory:
    """Estimate the memory of a process. An adapter is float32, and needs no copy of the base model as reference."""
    size = getattr(torch, config.model.trained_dtype).itemsize
    is_adapter = config.grpo.tune == "lora"
    each = 4 if is_adapter else size
    count, slots = trained(config, specs), SLOTS.get(config.grpo.by_name["optim"])
    on_cpu = settings.trains_on_cpu(config)
    own = None if config.grpo.rollouts == "trl" else engine_of(config, on_cpu=on_cpu)
    served = getattr(
        torch, settings.copy_dtype(config, config.model.trained_dtype, is_adapter=is_adapter, on_cpu=on_cpu)
    ).itemsize
    copies = (config.grpo.beta > 0 and not is_adapter) + (config.checks.kl_every > 0)
    return Memory(
        weights=size * parameters(specs),
        adapter=each * count if is_adapter else 0,
        gradients=each * count,
        moments=None if slots is None else slots * each * count,
        reference=copies * size * parameters(specs),
        served=0 if own is None else served * parameters(specs),
        critic=(2 + (slots or 0)) * size * parameters(specs) if config.grpo.algorithm == "ppo" else 0,
    )


def checkpoint_bytes(config: Config, specs: Sequence[TensorSpec]) -> tuple[int, int]:
    """Return the bytes of a saved policy and of a trainer state; 0 if none is saved during training."""
    need = memory(config, specs)
    policy = need.adapter or need.weights
    return policy, policy + (need.moments or 0) if settings.save_every(config.checkpoint.every) else 0


def default_lines(config: Config) -> list[str]:
    """Return a note if the config has no section `grpo`: TRL's defaults hardly change a small model."""
    if "grpo" in config.model_fields_set:
        return []
    grpo = config.grpo
    return [
        f"note: the config has no section grpo, so TRL's defaults apply: learning rate {grpo.learning_rate:g}, "
        f"{grpo.max_steps} steps, groups of {grpo.num_generations}; they suit large models and hardly change small ones"
    ]


def step_lines(config: Config) -> list[str]:
    """Return a line on optimizer, loss and completions, a note on random rewards, and a warning if groups are small."""
    grpo = config.grpo
    tuned = f"LoRA of rank {config.lora.rank}" if grpo.tune == "lora" else "all weights"
    trl = grpo.by_name
    lines = [
        f"{grpo.max_steps} steps of {trl['optim']} on {tuned}, learning rate {grpo.learning_rate:g} "
        f"({trl['lr_scheduler_type']}), {loss_of(grpo)}, beta {grpo.beta:g}, "
        f"completions by {_generator(config)}"
    ]
    if grpo.algorithm == "ppo":
        lines.append("note: PPO is experimental: TRL has no trainer of it any more, see the guide on GRPO")
    if grpo.reward == "random":
        lines.append(
            "note: trains on random rewards, 0 or 1 (grpo.reward: random); evaluations use the rewards of the task"
        )
    if grpo.num_generations < FEW and grpo.algorithm == "grpo":
        lines.append(
            f"warning: grpo.num_generations {grpo.num_generations} is small: advantages are noisy, and a group with "
            "equal rewards has no gradient; usual are 8 to 64"
        )
    return lines


def loss_of(grpo: GrpoConfig) -> str:
    """Return the text on the loss, with the algorithm if that is not GRPO."""
    if grpo.algorithm == "dpo":
        return "DPO on the best and worst of each group"
    return ("PPO, " if grpo.algorithm == "ppo" else "") + f"loss {grpo.by_name['loss_type']}"


def _generator(config: Config) -> str:
    """Return the text on what generates the training completions."""
    if not config.grpo.samples_members or config.es_ is None:
        return config.grpo.rollouts
    es, group = config.es, config.grpo.num_generations
    prompts = settings.round_size(config.grpo) * settings.rounds(config.grpo) // group
    width = "sigma" if es.sigma is not None else "noise_multiplier"
    pairs = "antithetic pairs" if es.antithetic else "no antithetic pairs"
    return (
        f"es: {group} greedy members ({pairs}) of space {config.space.name}, {width} {es.width:g} "
        f"({es.sigma_schedule.name}), {prompts} prompts per step"
    )


def rate_lines(config: Config, count: int) -> list[str]:
    """Return a note if all weights of a large model train with an unusual learning rate."""
    rate, (low, high) = config.grpo.learning_rate, USUAL
    if config.grpo.tune == "lora" or count < LARGE or low / 10 <= rate <= high * 10:
        return []
    return [f"note: grpo.learning_rate {rate:g}; models of this size usually take {low:g} to {high:g}"]


def work_lines(config: Config) -> list[str]:
    """Return lines on the completions and tokens of one process."""
    grpo = config.grpo
    size, lasts = settings.round_size(grpo), settings.cycle(grpo)
    size *= settings.rounds(grpo)
    times = -(-grpo.max_steps // lasts)
    tokens = size * settings.longest(config)
    each = "per step" if lasts == 1 else f"per {lasts} steps"
    return [
        f"completions {size:,} {each} ({size // grpo.num_generations} prompts x {grpo.num_generations}), "
        f"{size * times:,} in total; each further process adds as many",
        f"tokens at most {tokens:,} {each}, {tokens * times:,} in total",
    ]


def memory_lines(config: Config, specs: Sequence[TensorSpec]) -> list[str]:
    """Return lines on parameters and memory."""
    count = trained(config, specs)
    lines = [
        f"model {parameters(specs) / 1e6:,.1f} M parameters, {count / 1e6:,.3f} M trained",
        f"memory {memory_words(config, memory(config, specs))}",
    ]
    if config.checks.kl_every:  # a copy for it is counted
        return lines
    return [*lines, *second_copy_lines(config, parameters(specs), getattr(torch, config.model.trained_dtype))]


def memory_words(config: Config, need: Memory) -> str:
    """Return the text on the memory of a process, by part."""
    dtype, optim = config.model.trained_dtype, config.grpo.by_name["optim"]
    parts = [f"{dtype} weights {gib(need.weights)}"]
    parts += [f"adapter {gib(need.adapter)}"] if need.adapter else []
    parts += [f"gradients {gib(need.gradients)}"]
    if need.moments is None:
        parts += [f"state of {optim} not counted"]
    elif need.moments:
        parts += [f"AdamW's two moments {gib(need.moments)}"]
    causes = ["grpo.beta"] if config.grpo.beta > 0 and config.grpo.tune == "full" else []
    causes += ["checks.kl_every"] if config.checks.kl_every else []
    parts += [f"copies of the base model {gib(need.reference)} ({' and '.join(causes)})"] if need.reference else []
    parts += [f"copy for completions {gib(need.served)}"] if need.served else []
    parts += [f"critic {gib(need.critic)}"] if need.critic else []
    return f"{gib(need.kept)} per process: {', '.join(parts)}; without activations and completions"


def _start_lines(config: Config, run: RunDir, *, overwrite: bool, resume: bool) -> list[str]:
    """Return a line on the step to resume from, or on why the run would not start. Raises ResumeError."""
    if resume:
        refuse_other(run.path, "grpo")
        if finished(run, config) is not None:
            return [f"{run.path} is done: it has all {config.grpo.max_steps} steps"]
        state = last_state(run)
        if state is not None:
            refuse_differences(run, config)
            return [f"resumes after step {state[1]} of {config.grpo.max_steps}"]
        if died_early(run, config):
            return [
                f"{run.path} ended before its first trainer state was saved: it begins again, and the old folder is "
                "moved aside"
            ]
    try:
        run.refuse(overwrite=overwrite)
    except RunExistsError as error:
        return [f"would be refused: {error}"]
    return []


def _refusals(config: Config, examples: int, task: Task) -> list[str]:
    """Return a line for each reason to refuse the run that is known without loading weights."""
    missing = not tracking.is_installed("trl")
    found = [f"would be refused: GRPO needs the extra grpo: {install('grpo')}"] if missing else []
    refusing = (
        partial(settings.check, config),
        partial(settings.trains_on_cpu, config),
        partial(settings.check_prompts, config, examples),
        partial(settings.check_objective, config, task.objective()),
        partial(settings.check_turns, config, task),
        partial(check_scorer, config, task),
    )
    for refuse in refusing:
        try:
            refuse()
        except (ConfigError, ModelError) as error:
            found.append(f"would be refused: {error}")
    return found
