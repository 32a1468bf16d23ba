# SPDX-License-Identifier: Apache-2.0
"""Convert the section `grpo` to arguments of TRL's GRPOConfig, check it, and derive sizes of steps and rounds."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evoalign.config import Config, GrpoConfig
from evoalign.config.grpo import ALLOWED, ASKED
from evoalign.config.joint import DECODING
from evoalign.config.reading import read_json
from evoalign.errors import ConfigError, DataError, cut, shown
from evoalign.models.forms import FULL_PRECISION
from evoalign.models.quantised import quantised_of
from evoalign.rewards.objective import Objective, refuse_whole_members
from evoalign.tasks import Task

OURS = frozenset(
    {"tune", "max_completion_length", "warmup_ratio", "rollouts", "off_policy", "reward", "trl", "algorithm"}
)
"""Fields of the section that TRL does not have, or that have another meaning there."""
SET = {
    "output_dir": "output_dir",
    "seed": "seed",
    "data_seed": "seed",
    "save_steps": "checkpoint.every",
    "save_strategy": "checkpoint.every",
    "save_total_limit": "checkpoint.every",
    "eval_strategy": "evaluation.every",
    "eval_steps": "evaluation.every",
    "report_to": "tracking.backends",
    "run_name": "tracking.name",
    "reward_weights": "task.reward_weights",
    "num_train_epochs": "grpo.max_steps",
    "warmup_steps": "grpo.warmup_ratio",
    "use_cpu": "engine.device",
    "chat_template_kwargs": "task.template_kwargs",
    "logging_steps": "always 1: every step is logged",
    "logging_strategy": "always steps: every step is logged",
    "logging_first_step": "not used: every step is logged",
    "generation_batch_size": "grpo.steps_per_generation",
    "auto_find_batch_size": "grpo.per_device_train_batch_size",
    "save_only_model": "always false: a run could not be resumed",
    "ignore_data_skip": "always false: a resumed run uses the prompts that follow",
    "load_best_model_at_end": "checkpoint.keep_best",
    "push_to_hub": "always false: evoalign export makes the folder to upload",
    "model_init_kwargs": "model",
    "trust_remote_code": "always false: code of a model is never run",
    "resume_from_checkpoint": "--resume",
    "log_completions_hub_repo": "not used: tracking.completions_every keeps completions in the run",
    "use_transformers_paged": "grpo.rollouts",
}
"""Fields of TRL that evoalign sets: the setting that decides it, or its fixed value and the reason."""
SPLIT = (
    "FSDP and DeepSpeed's ZeRO stage 3 split the weights, which evaluation and saving need whole; use ZeRO stage 1 or 2"
)
SAVE_EVERY = 50
"""Steps between checkpoints if `checkpoint.every` is unset; no journal can rebuild a policy."""


def refuse_quantised(config: Config) -> None:
    """Raise ConfigError for a quantised base: TRL trains in full precision here."""
    found = quantised_of(config.model)
    if found is not None:
        raise ConfigError(
            f"grpo: model {config.model.name} is quantised ({found.words}), and {config.grpo.title} with TRL trains "
            f"full-precision weights here; {FULL_PRECISION}, or train an adapter by ES, whose space lora takes it"
        )


def arguments(config: Config, folder: Path, *, on_cpu: bool, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for TRL's GRPOConfig or DPOConfig, with fields `known`. Raises ConfigError."""
    check(config)
    grpo = config.grpo
    every = grpo.by_name
    is_dpo = grpo.algorithm == "dpo"
    for name in grpo.trl if is_dpo else every["trl"]:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"grpo.trl.{name}: TRL's {'DPO' if is_dpo else 'GRPO'}Config has no such field{hint}")
    chosen = {name: value for name, value in every.items() if name not in OURS and value is not None}
    found = {
        **chosen,
        "output_dir": str(folder),
        "seed": config.seed % 2**32,
        "bf16": mixed(config, on_cpu=on_cpu),
        "use_cpu": on_cpu,
        "max_completion_length": longest(config),
        # Members decode greedily, and their log-probabilities are those of temperature 1.
        "temperature": 1.0 if grpo.samples_members else grpo.temperature,
        "warmup_steps": int(grpo.warmup_ratio * grpo.max_steps),
        "logging_steps": 1,
        "save_strategy": "no",
        "save_total_limit": None,  # `trainer_state.mark` removes older states once a new one is complete
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        **every["trl"],
    }
    if not is_dpo:
        return found
    return {
        **{name: value for name, value in found.items() if name in known and name != "loss_type"},
        "per_device_train_batch_size": grpo.per_device_train_batch_size // grpo.num_generations,  # prompts
        "max_length": None,
        "remove_unused_columns": False,
        "dataloader_drop_last": True,  # whole rounds, as in GRPO
    }


def check(config: Config) -> None:
    """Raise ConfigError for settings that a run would refuse, without importing TRL."""
    for name in config.grpo.trl:
        if name in SET:
            raise ConfigError(f"grpo.trl.{name} cannot be set, evoalign sets it ({SET[name]}); remove it from grpo.trl")
        if name in GrpoConfig.model_fields:
            raise ConfigError(f"grpo.trl.{name} is not a setting; set grpo.{name} instead")
        if name not in ALLOWED | ASKED:
            near = difflib.get_close_matches(name, [*ALLOWED, *ASKED, *GrpoConfig.model_fields], n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else "the guide on GRPO lists them"
            raise ConfigError(f"grpo.trl.{cut(name, 60)}: not a field of TRL's GRPOConfig that can be set; {hint}")
    if config.sampling.stop:
        raise ConfigError(
            "sampling.stop is not supported by GRPO, whose completions end only at the model's stop tokens; remove it"
        )
    if _splits_weights(config.grpo.trl):
        raise ConfigError(f"grpo.trl: {SPLIT}")
    if config.grpo.samples_members and config.es.antithetic and config.grpo.num_generations % 2:
        raise ConfigError(
            f"es.antithetic needs an even grpo.num_generations, not {config.grpo.num_generations}: members form pairs"
        )


def check_stopping(config: Config) -> None:
    """Raise ConfigError for stopping and sigma rules of ES that depend on rewards, which GRPO does not support."""
    if config.stopping is not None:
        raise ConfigError(
            "the section stopping is for ES: a run of GRPO ends after grpo.max_steps; remove the section, for example "
            "with --set stopping=null, and lower grpo.max_steps if needed"
        )
    if config.grpo.samples_members and config.es_ is not None and config.es_.sigma_schedule.name == "plateau":
        raise ConfigError("es.sigma_schedule plateau is for ES: with grpo.rollouts: es set constant, linear or cosine")


def check_objective(config: Config, objective: Objective) -> None:
    """Raise ConfigError for an objective, or settings to search, that GRPO cannot serve."""
    for name, setting in config.task.settings.items():
        if len(setting.options) > 1 or name in DECODING:
            raise ConfigError(
                f"task.settings.{name} {shown(setting.options)} is for ES, and GRPO draws no settings; leave one "
                "option of each, and set max_tokens, temperature and top_p in section sampling"
            )
    refuse_whole_members(objective, "GRPO")
    if objective.asks_mean and config.grpo.samples_members:
        raise ConfigError(
            f"objective {objective.name} needs completions of the policy, and with grpo.rollouts: es only members "
            "around it generate; set grpo.rollouts to engine or trl"
        )


def check_turns(config: Config, task: Task) -> None:
    """Raise ConfigError for a task of several turns that TRL cannot train, or whose completions have no limit."""
    if not task.player:
        return
    if config.grpo.algorithm != "grpo":
        raise ConfigError(
            f"grpo.algorithm: {config.grpo.algorithm} cannot train task {task.name}, which has several turns; set grpo"
        )
    if task.environment_factory() is None:
        raise ConfigError(
            f"GRPO cannot train task {task.name}: TRL plays episodes of several turns only in an environment "
            "(task.environment); use ES"
        )
    if config.grpo.rollouts != "trl":
        raise ConfigError(f"grpo.rollouts: {config.grpo.rollouts} cannot play an environment; set trl")
    if config.grpo.max_completion_length is None:
        raise ConfigError(
            "grpo.max_completion_length is not set: with an environment it limits all turns and results of tools "
            "together; set it to several times sampling.max_tokens"
        )


def _splits_weights(more: Mapping[str, Any]) -> bool:
    """Return whether FSDP or ZeRO stage 3 is set. TRL itself reports a DeepSpeed file that it cannot read."""
    found: Any = more.get("deepspeed")
    if isinstance(found, str):
        try:
            found = read_json(Path(found))
        except DataError:
            found = None
    zero: Any = found.get("zero_optimization") if isinstance(found, dict) else None
    return bool(more.get("fsdp")) or (isinstance(zero, dict) and zero.get("stage") == 3)


def trains_on_cpu(config: Config) -> bool:
    """Return whether the policy trains on the CPU. Raises ConfigError for a missing device or a GPU after the first."""
    wanted = config.engine.where
    if wanted == "auto":
        return not torch.cuda.is_available()
    index = re.fullmatch(r"cuda:(\d+)", wanted)
    if index is not None and int(index[1]) > 0:
        raise ConfigError(
            f"engine.device: {wanted}: TRL trains on the first visible GPU; set engine.device: cuda and the "
            f"environment variable CUDA_VISIBLE_DEVICES={index[1]}"
        )
    if index is None and wanted not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: {wanted!r} is unknown; use auto, cpu or cuda")
    if wanted != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device: {wanted} is not available; use cpu or auto")
    return wanted == "cpu"


def fields_of(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass by name."""
    return {field.name: field for field in dataclasses.fields(kind)}


def longest(config: Config) -> int:
    """Return the maximum number of tokens of a completion."""
    return config.grpo.max_completion_length or config.sampling.max_tokens


def mixed(config: Config, *, on_cpu: bool) -> bool:
    """Return whether training computes in bfloat16 on float32 weights."""
    wanted = config.grpo.by_name["bf16"]
    return (not on_cpu and config.model.dtype in ("auto", "float32")) if wanted is None else wanted


def copy_dtype(config: Config, dtype: str, *, is_adapter: bool, on_cpu: bool) -> str:
    """Return the dtype of the copy of a policy whose weights have `dtype`."""
    if is_adapter:
        return "float32"
    return "bfloat16" if mixed(config, on_cpu=on_cpu) else dtype


def save_every(every: int | None) -> int:
    """Return the steps between checkpoints; 0 saves none."""
    return SAVE_EVERY if every is None else every


def cycle(grpo: GrpoConfig) -> int:
    """Return the number of optimizer steps that use one round of completions."""
    return max(1, passes(grpo) // grpo.gradient_accumulation_steps)


def rounds(grpo: GrpoConfig) -> int:
    """Return the number of rounds of completions in one optimizer step."""
    return max(1, grpo.gradient_accumulation_steps // passes(grpo))


def passes(grpo: GrpoConfig) -> int:
    """Return the forward passes that use one round, over all iterations.

    Either this or the passes of a step (`gradient_accumulation_steps`) is a multiple of the other.
    """
    return (grpo.steps_per_generation or grpo.gradient_accumulation_steps) * grpo.num_iterations


def misaligned(grpo: GrpoConfig) -> bool:
    """Return whether completions may be older than a step's weights, so that TRL computes old log-probabilities."""
    return grpo.gradient_accumulation_steps % passes(grpo) != 0 or bool(grpo.by_name["use_vllm"])


def round_size(grpo: GrpoConfig, processes: int = 1) -> int:
    """Return the number of completions in one round."""
    each = grpo.steps_per_generation or grpo.gradient_accumulation_steps
    return grpo.per_device_train_batch_size * each * processes


def pairs(rewards: Sequence[float], group: int) -> list[tuple[int, int]]:
    """Return the places of the first best and the first worst completion of each group, unless all are equal."""
    places = (range(first, first + group) for first in range(0, len(rewards), group))
    found = ((max(own, key=rewards.__getitem__), min(own, key=rewards.__getitem__)) for own in places)
    return [(best, worst) for best, worst in found if rewards[best] > rewards[worst]]


def check_prompts(config: Config, examples: int, processes: int = 1) -> None:
    """Raise ConfigError if a round needs more prompts than the training split has: TRL would skip every epoch."""
    wanted = round_size(config.grpo, processes) // config.grpo.num_generations
    if wanted > examples:
        raise ConfigError(
            f"grpo: a round of {wanted * config.grpo.num_generations} completions in groups of "
            f"{config.grpo.num_generations} needs {wanted} prompts, and the training split has {examples}; lower "
            "grpo.per_device_train_batch_size, or raise grpo.num_generations"
        )
