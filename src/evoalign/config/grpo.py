# SPDX-License-Identifier: Apache-2.0
"""The GRPO baseline, and which settings of TRL's GRPOConfig it takes in `grpo.trl`.

Taken are the settings that say how TRL trains. Those that upload, report, resume or name folders are not: evoalign does
that itself, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from evoalign.config.base import Count, Positive, Section, Share
from evoalign.config.outside import Outside
from evoalign.errors import ConfigError, cut, shown

MOST = 1e12
"""Largest absolute value of a number in `grpo.trl`."""
ASKED = frozenset({
    "accelerator_config", "deepspeed", "fsdp", "fsdp_config", "generation_kwargs",
    "parallelism_config", "torch_compile_backend", "vllm_group_port", "vllm_server_base_url", "vllm_server_host",
    "vllm_server_port",
})  # fmt: skip
"""Settings that lead to another machine, a file or code: only the user's config or command line may set them."""
ALLOWED = frozenset({
    # the optimizer and its schedule
    "adafactor", "adam_beta1", "adam_beta2", "adam_epsilon", "label_smoothing_factor", "lr_scheduler_kwargs",
    "lr_scheduler_type", "max_grad_norm", "neftune_noise_alpha", "optim", "optim_args", "optim_target_modules",
    "weight_decay", "average_tokens_across_devices",
    # the loss
    "cast_lm_head_to_fp32", "delta", "disable_dropout", "entropy_coef", "entropy_coef_delta", "entropy_coef_max",
    "entropy_coef_min", "entropy_target", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type",
    "mask_truncated_completions", "multi_objective_aggregation", "off_policy_mask_threshold", "ref_model_mixup_alpha",
    "ref_model_sync_steps", "router_aux_loss_coef", "sapo_temperature_neg", "sapo_temperature_pos", "scale_rewards",
    "sync_ref_model", "top_entropy_quantile", "use_adaptive_entropy", "use_bias_correction_kl", "vespo_k_neg",
    "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    # TRL's own completions
    "cache_implementation", "ds3_gather_for_generation", "max_prompt_length", "max_tool_calling_iterations", "min_p",
    "pad_to_multiple_of", "repetition_penalty", "top_k", "transformers_continuous_batching_config",
    "use_transformers_continuous_batching", "use_vllm", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization",
    "vllm_guided_decoding_regex", "vllm_max_model_length", "vllm_mode", "vllm_model_impl", "vllm_server_timeout",
    "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
    # arithmetic and memory
    "activation_checkpointing", "activation_checkpointing_kwargs", "bf16", "bf16_full_eval", "fp16", "fp16_full_eval",
    "full_determinism", "gradient_checkpointing", "gradient_checkpointing_kwargs", "liger_kernel_config", "tf32",
    "torch_compile", "torch_compile_mode", "torch_empty_cache_steps", "use_cache", "use_liger_kernel",
    # data and processes
    "dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_num_workers",
    "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_backend",
    "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout",
    "eval_accumulation_steps", "group_by_length", "num_generations_eval", "per_device_eval_batch_size",
    "remove_unused_columns", "shuffle_dataset", "train_sampling_strategy",
    # logging
    "debug", "disable_tqdm", "include_num_input_tokens_seen", "log_completions", "log_level", "log_level_replica",
    "log_unique_prompts", "logging_nan_inf_filter", "num_completions_to_print", "skip_memory_metrics",
})  # fmt: skip


def too_large(value: object) -> object:
    """Return the first number beyond `MOST` in a setting; None where there is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return None if -MOST <= value <= MOST else value
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, Any]", value).values())
    found = map(too_large, cast("list[object]", value)) if isinstance(value, list) else iter(())
    return next((number for number in found if number is not None), None)


OF_TRL: dict[str, Any] = {
    "lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}, "optim": "adamw_torch", "weight_decay": 0.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 1.0, "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "scale_rewards": "group", "loss_type": "dapo", "importance_sampling_level": "token",
    "mask_truncated_completions": False, "top_k": 0, "gradient_checkpointing": False, "bf16": None, "use_vllm": False,
}  # fmt: skip
"""Fields of TRL with a fixed default, which a later TRL cannot change. Different from TRL's are those of `optim`
(adamw_torch_fused there), `gradient_checkpointing` (true there) and `bf16` (None: true on a GPU). A config may also
have these fields directly in the section `grpo`, as in earlier releases."""
LATE = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
}
"""Choices that TRL checks only at the first step."""


OF_OTHERS = Outside("another machine, a file or code of others", keys=ASKED)


def in_place(grpo: Mapping[str, Any]) -> dict[str, Any]:
    """Move fields of TRL to `trl`. Raises ConfigError for a field that is in both places."""
    old = {name: value for name, value in grpo.items() if name in OF_TRL}
    trl = grpo.get("trl", {})
    if not old or not isinstance(trl, Mapping):
        return dict(grpo)
    for name in old:
        if name in trl:
            raise ConfigError(f"grpo.{name} and grpo.trl.{name} are the same setting: take grpo.{name} out")
    return {name: value for name, value in grpo.items() if name not in old} | {"trl": {**old, **trl}}


def place_of(setting: str) -> str:
    """Return the place of a dotted setting: `grpo.loss_type` is `grpo.trl.loss_type`."""
    section, _, name = setting.partition(".")
    return f"grpo.trl.{name}" if section == "grpo" and name in OF_TRL else setting


def _of_trl(name: str, value: object) -> object:
    """Check a value of `OF_TRL`, and convert numbers written as text. Raises ValueError."""
    default = OF_TRL[name]
    if name in LATE and value not in LATE[name]:
        raise ValueError(f"{name} is one of {', '.join(LATE[name])}, not {shown(value)}")
    if value is None or isinstance(value, bool) or isinstance(default, bool | str | dict):
        return value
    try:
        number = (float if default is None else type(default))(cast("Any", value))
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name} is a number of 0 or more, not {shown(value)}")
    return number


def _group(value: object) -> object:
    if isinstance(value, int) and value < 2:
        raise ValueError("advantages are taken within a group, so it needs 2 completions or more")
    return value


class GrpoConfig(Section):
    """The GRPO baseline (Shao et al., arXiv 2402.03300) on TRL's GRPOTrainer, under TRL's own names.

    Prompts, test split, longest completion and rewards come from the sections `task` and `evaluation`, so that ES and
    GRPO solve the same problem. All other settings of TRL go into `trl`.
    """

    algorithm: Annotated[Literal["grpo", "ppo", "dpo"], Field(exclude_if=lambda value: value == "grpo")] = "grpo"
    """`ppo` (experimental): PPO (Schulman et al., arXiv 1707.06347), whose advantages come from a critic, with
    `num_iterations` epochs per round of completions. `dpo`: online DPO (Rafailov et al., arXiv 2305.18290, eq. 7; Guo
    et al., arXiv 2402.04792) on TRL's DPOTrainer with the completions of highest and lowest reward of each group."""
    tune: Literal["full", "lora"] = "full"
    """`full` trains all weights, `lora` an adapter with rank, alpha, target_layers and target_modules of section
    `lora`."""
    max_steps: Count = 100
    """Optimizer steps."""
    num_generations: Annotated[int, Field(ge=2, le=10**7), BeforeValidator(_group)] = 8
    """Completions per prompt: the group within which advantages are computed."""
    per_device_train_batch_size: Count = 8
    """Completions in one forward and backward pass."""
    gradient_accumulation_steps: Count = 1
    """Passes per optimizer step. A step uses this times the batch size (times the processes) completions."""
    steps_per_generation: Count | None = None
    """Passes for which one round of completions is used. None: one optimizer step."""
    num_iterations: Count = 1
    """Number of times that each completion is trained on."""
    learning_rate: Positive = 1e-6
    """Learning rate of the optimizer. Full models usually take 1e-6 to 1e-5, adapters ten times that."""
    warmup_ratio: Share = 0.0
    """Share of the steps over which the learning rate rises from 0."""
    beta: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """Weight of the KL divergence from the base model in the loss. 0 keeps no reference model."""
    temperature: Positive = 1.0
    """Sampling temperature of the completions to train on. The evaluation samples as `evaluation` says."""
    top_p: Annotated[float, Field(ge=1e-9, le=1)] = 1.0
    """Nucleus sampling of the completions to train on; 1 keeps all tokens."""
    max_completion_length: Count | None = None
    """Longest completion to train on, in tokens. None: `sampling.max_tokens`."""
    rollouts: Literal["trl", "engine", "es"] = "trl"
    """Where completions come from. `trl`: TRL's generation, with transformers or (`trl: {use_vllm: true}`) vLLM.
    `engine`: the batched engine of ES in this process, at `temperature` and `top_p`. `es`: the greedy completions of
    members of a population around the present weights, as sections `space` and `es` say, one per completion of the
    group."""
    reward: Annotated[Literal["task", "random"], Field(exclude_if=lambda value: value == "task")] = "task"
    """Rewards to train on. `random`: 0 or 1 with equal chance, drawn from the seed, the step, the prompt and the place
    of the completion. Such a run is what the method does without signal, as a placebo is for ES (arXiv 2506.10947).
    Evaluations, and the columns in metrics.jsonl, keep the task's rewards."""
    off_policy: Literal["clip", "none"] = "clip"
    """With `rollouts: es`: `clip` uses the member's probabilities as the old ones in PPO's clipped ratio; `none` treats
    the completions as the policy's own."""
    trl: Annotated[dict[str, Any], OF_OTHERS] = Field(default_factory=dict)
    """Other fields of TRL's GRPOConfig that say how it trains, such as `lr_scheduler_type`, `loss_type`, `use_vllm` or
    `deepspeed`; `evoalign.config.grpo` lists them. Three defaults differ from TRL's: `optim: adamw_torch`,
    `gradient_checkpointing: false`, and `bf16`, which is true on a GPU with float32 weights."""

    @model_validator(mode="before")
    @classmethod
    def _in_place(cls, tree: object) -> object:
        return in_place(cast("Mapping[str, Any]", tree)) if isinstance(tree, Mapping) else tree

    @field_validator("trl")
    @classmethod
    def _read(cls, trl: dict[str, Any]) -> dict[str, Any]:
        read = {name: _of_trl(name, value) if name in OF_TRL else value for name, value in trl.items()}
        for name, value in read.items():
            number = too_large(value)
            if number is not None:
                raise ValueError(f"{cut(name, 60)} has a number beyond {MOST:g}: {shown(number)}")
        return read

    @property
    def steps(self) -> int:
        """Length of a whole run: its optimizer steps."""
        return self.max_steps

    @property
    def samples_members(self) -> bool:
        """Whether the completions are those of members of a population, which the sections `es` and `space` set."""
        return self.rollouts == "es"

    @property
    def by_name(self) -> dict[str, Any]:
        """All settings by name, those of `OF_TRL` with their defaults; the other fields of TRL under `trl`."""
        others = {name: value for name, value in self.trl.items() if name not in OF_TRL}
        chosen = {name: value for name, value in self.trl.items() if name in OF_TRL}
        return {**self.model_dump(mode="json"), **OF_TRL, **chosen, "trl": others}

    if not TYPE_CHECKING:  # type checkers see the fields only

        def __getattr__(self, name: str) -> Any:
            """Return a field of TRL that earlier releases had as an attribute."""
            return self.by_name[name] if name in OF_TRL else super().__getattr__(name)

    @property
    def title(self) -> str:
        """The algorithm's name in text and tables."""
        return self.algorithm.upper()

    @model_validator(mode="after")
    def _of_algorithm(self) -> GrpoConfig:
        if self.algorithm == "ppo" and self.samples_members:
            raise ValueError("grpo.rollouts es is for grpo.algorithm grpo, not ppo: set rollouts engine")
        if self.algorithm != "dpo":
            return self
        trains_once = self.num_iterations == 1 and self.steps_per_generation in (None, self.gradient_accumulation_steps)
        rules = (
            (self.rollouts == "engine",
             "grpo.algorithm dpo takes its completions from evoalign's engine: set grpo.rollouts engine, not "
             f"{self.rollouts}"),
            (self.beta > 0, "grpo.beta 0 leaves DPO without a loss; set it above 0, such as 0.1"),
            (self.per_device_train_batch_size % self.num_generations == 0,
             f"grpo.per_device_train_batch_size {self.per_device_train_batch_size} is not a multiple of "
             f"grpo.num_generations {self.num_generations}: each pass of DPO makes its pairs from whole groups"),
            (trains_once,
             "DPO trains once on each pair: remove grpo.num_iterations and grpo.steps_per_generation"),
            ("loss_type" not in self.trl,
             "grpo.trl.loss_type is not for grpo.algorithm dpo, whose loss is sigmoid: remove it"),
        )  # fmt: skip
        if broken := "; ".join(message for holds, message in rules if not holds):
            raise ValueError(broken)
        return self

    @model_validator(mode="after")
    def _whole_groups(self) -> GrpoConfig:
        passes = self.steps_per_generation or self.gradient_accumulation_steps
        if self.per_device_train_batch_size * passes % self.num_generations:
            raise ValueError(
                f"grpo.per_device_train_batch_size {self.per_device_train_batch_size} x {passes} passes is not a "
                f"multiple of grpo.num_generations {self.num_generations}: a round of completions holds whole groups"
            )
        whole, step = passes * self.num_iterations, self.gradient_accumulation_steps
        if whole % step and step % whole:
            raise ValueError(
                f"a round of completions lasts for {whole} passes (grpo.steps_per_generation x grpo.num_iterations) "
                f"and a step for {step} (grpo.gradient_accumulation_steps): one must be a multiple of the other"
            )
        if self.samples_members and self.tune != "full":
            raise ValueError("grpo.rollouts es perturbs the model's own weights: it needs grpo.tune full")
        if self.rollouts != "trl" and self.by_name["use_vllm"]:
            raise ValueError(f"grpo.trl.use_vllm draws completions itself: set grpo.rollouts trl, not {self.rollouts}")
        of_trl = ["grpo.trl.top_k"] if self.by_name["top_k"] else []
        of_trl += [f"grpo.trl.{n}" for n in ("min_p", "repetition_penalty", "generation_kwargs") if n in self.trl]
        if self.rollouts != "trl" and of_trl:
            raise ValueError(
                f"{of_trl[0]} is only for TRL's generation: remove it, or set grpo.rollouts trl (it is {self.rollouts})"
            )
        return self
