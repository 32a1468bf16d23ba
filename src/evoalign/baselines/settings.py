# SPDX-License-Identifier: Apache-2.0
"""The section `grpo` as TRL's GRPOConfig, and what follows from it."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evoalign.config import Config, GrpoConfig
from evoalign.config.grpo import ALLOWED, ASKED
from evoalign.config.reading import read_json
from evoalign.errors import ConfigError, DataError, cut
from evoalign.rewards.objective import Objective, refuse_whole_members

OURS = frozenset({"tune", "max_completion_length", "warmup_ratio", "rollouts", "off_policy", "trl"})
"""Fields of the section that TRL does not have, or that mean more here."""
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
    "logging_steps": "nothing: every step is logged",
    "logging_strategy": "nothing: every step is logged",
    "logging_first_step": "nothing: every step is logged",
    "generation_batch_size": "grpo.steps_per_generation",
    "auto_find_batch_size": "grpo.per_device_train_batch_size",
    "save_only_model": "nothing: a run could not go on",
    "ignore_data_skip": "nothing: a run that goes on asks what it would have asked",
    "load_best_model_at_end": "checkpoint.keep_best",
    "push_to_hub": "nothing: evoalign export makes the folder to upload",
    "model_init_kwargs": "model",
    "trust_remote_code": "nothing: it is not allowed",
    "resume_from_checkpoint": "--resume",
    "log_completions_hub_repo": "nothing: tracking.completions_every keeps them in the run",
    "use_transformers_paged": "grpo.rollouts",
}
"""Fields of TRL that other settings of evoalign decide."""
SPLIT = (
    "FSDP and DeepSpeed's ZeRO stage 3 split the weights, which evaluation and saving read whole; use ZeRO stage 1 or 2"
)


def arguments(config: Config, folder: Path, *, on_cpu: bool, known: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of TRL's GRPOConfig. `known` has its fields. Raises ConfigError for what cannot be."""
    check(config)
    grpo = config.grpo
    every = grpo.by_name
    chosen = {name: value for name, value in every.items() if name not in OURS and value is not None}
    return {
        **chosen,
        "output_dir": str(folder),
        "seed": config.seed % 2**32,
        "bf16": mixed(config, on_cpu=on_cpu),
        "use_cpu": on_cpu,
        "max_completion_length": longest(config),
        # Members answer greedily, and their probabilities are those without a temperature.
        "temperature": 1.0 if grpo.rollouts == "es" else grpo.temperature,
        "warmup_steps": int(grpo.warmup_ratio * grpo.max_steps),
        "logging_steps": 1,
        "save_strategy": "no",
        "save_total_limit": None,  # the one before is removed once the new one is known to be whole
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        **_known(every["trl"], known),
    }


def check(config: Config) -> None:
    """Raise ConfigError for what a run would refuse, as far as that takes no TRL."""
    for name in config.grpo.trl:
        if name in SET:
            raise ConfigError(f"grpo.trl.{name} is set elsewhere here: by {SET[name]}; take it out of grpo.trl")
        if name in GrpoConfig.model_fields:
            raise ConfigError(f"grpo.trl.{name} has a place of its own: grpo.{name}")
        if name not in ALLOWED | ASKED:
            near = difflib.get_close_matches(name, [*ALLOWED, *ASKED, *GrpoConfig.model_fields], n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else "the guide on GRPO says which it has"
            raise ConfigError(f"grpo.trl.{cut(name, 60)}: TRL has no such field, or none that a run takes; {hint}")
    if config.sampling.stop:
        raise ConfigError("sampling.stop: GRPO's completions end at the model's stop tokens alone; take it out")
    if _splits_weights(config.grpo.trl):
        raise ConfigError(f"grpo.trl: {SPLIT}")
    if config.grpo.rollouts == "es" and config.es.antithetic and config.grpo.num_generations % 2:
        raise ConfigError(
            f"es.antithetic needs an even grpo.num_generations, not {config.grpo.num_generations}: members are pairs"
        )


def check_stopping(config: Config) -> None:
    """Raise ConfigError for what ends a run of ES, or its sigma, by its rewards on the way: GRPO goes through."""
    if config.stopping is not None:
        raise ConfigError(
            "the section stopping is for ES: a run of GRPO ends after grpo.max_steps; leave it out, as with "
            "--set stopping=null, and lower grpo.max_steps where needed"
        )
    if config.grpo.rollouts == "es" and config.es_ is not None and config.es_.sigma_schedule.name == "plateau":
        raise ConfigError("es.sigma_schedule plateau is for ES: with grpo.rollouts: es set constant, linear or cosine")


def check_objective(config: Config, objective: Objective) -> None:
    """Raise ConfigError for an objective that GRPO cannot serve."""
    refuse_whole_members(objective, "GRPO")
    if objective.asks_mean and config.grpo.rollouts == "es":
        raise ConfigError(
            f"objective {objective.name} follows what the policy itself says, and with grpo.rollouts: es only members "
            "around it answer; take grpo.rollouts engine or trl"
        )


def _splits_weights(more: Mapping[str, Any]) -> bool:
    """Whether FSDP or ZeRO stage 3 is asked for. A file that does not read is for TRL to complain of."""
    found: Any = more.get("deepspeed")
    if isinstance(found, str):
        try:
            found = read_json(Path(found))
        except DataError:
            found = None
    zero: Any = found.get("zero_optimization") if isinstance(found, dict) else None
    return bool(more.get("fsdp")) or (isinstance(zero, dict) and zero.get("stage") == 3)


def trains_on_cpu(config: Config) -> bool:
    """Whether the policy trains on the CPU. Raises ConfigError for a device that is not there, or not the first."""
    wanted = config.engine.where
    if wanted == "auto":
        return not torch.cuda.is_available()
    index = re.fullmatch(r"cuda:(\d+)", wanted)
    if index is not None and int(index[1]) > 0:
        raise ConfigError(
            f"engine.device: {wanted}: TRL trains on the first GPU that it sees; set engine.device: cuda and the "
            f"environment's CUDA_VISIBLE_DEVICES={index[1]}"
        )
    if index is None and wanted not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: {wanted!r} is none of auto, cpu and cuda")
    if wanted != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device: {wanted} is not there; use cpu or auto")
    return wanted == "cpu"


def _known(more: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    for name in more:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"grpo.trl.{name}: TRL's GRPOConfig has no such field{(near and f'; {near[0]}?') or ''}")
    return dict(more)


def fields_of(kind: type) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {field.name: field for field in dataclasses.fields(kind)}


def longest(config: Config) -> int:
    """Tokens of a completion at most."""
    return config.grpo.max_completion_length or config.sampling.max_tokens


def mixed(config: Config, *, on_cpu: bool) -> bool:
    """Whether arithmetic is bfloat16 on float32 weights."""
    wanted = config.grpo.by_name["bf16"]
    return (not on_cpu and config.model.dtype in ("auto", "float32")) if wanted is None else wanted


def cycle(grpo: GrpoConfig) -> int:
    """Optimizer steps that one round of completions lasts for."""
    return max(1, passes(grpo) // grpo.gradient_accumulation_steps)


def rounds(grpo: GrpoConfig) -> int:
    """Rounds of completions in the optimizer step that begins with one."""
    return max(1, grpo.gradient_accumulation_steps // passes(grpo))


def passes(grpo: GrpoConfig) -> int:
    """Passes that one round of completions lasts for, all iterations; a multiple of a step's, or a step's of it."""
    return (grpo.steps_per_generation or grpo.gradient_accumulation_steps) * grpo.num_iterations


def misaligned(grpo: GrpoConfig) -> bool:
    """Whether completions may be older than the weights of a step, so that TRL takes their log-probabilities first."""
    return grpo.gradient_accumulation_steps % passes(grpo) != 0 or bool(grpo.by_name["use_vllm"])


def round_size(grpo: GrpoConfig, processes: int = 1) -> int:
    """Completions of one round."""
    each = grpo.steps_per_generation or grpo.gradient_accumulation_steps
    return grpo.per_device_train_batch_size * each * processes


def check_prompts(config: Config, examples: int, processes: int = 1) -> None:
    """Raise ConfigError where a round asks for more prompts than there are: TRL would leave out the whole epoch."""
    wanted = round_size(config.grpo, processes) // config.grpo.num_generations
    if wanted > examples:
        raise ConfigError(
            f"grpo: a round of {wanted * config.grpo.num_generations} completions in groups of "
            f"{config.grpo.num_generations} takes {wanted} prompts, and the training split has {examples}; lower "
            "grpo.per_device_train_batch_size, or raise grpo.num_generations"
        )
