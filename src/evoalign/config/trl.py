# SPDX-License-Identifier: Apache-2.0
"""Which settings of TRL's GRPOConfig a run takes in `grpo.trl`: those that say how it trains.

Not those that upload, report, resume or name folders: evoalign does that, or never does it. Those that lead to another
machine, to a file, or into code that others wrote count as code does: a run from elsewhere may not bring them along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

MOST = 1e12
"""A number of TRL's, either way."""
ASKED = frozenset({
    "accelerator_config", "chat_template_kwargs", "deepspeed", "fsdp", "fsdp_config", "generation_kwargs",
    "parallelism_config", "torch_compile_backend", "vllm_group_port", "vllm_server_base_url", "vllm_server_host",
    "vllm_server_port",
})  # fmt: skip
"""What only the user's own config or command line may set."""
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
    # what is said
    "debug", "disable_tqdm", "include_num_input_tokens_seen", "log_completions", "log_level", "log_level_replica",
    "log_unique_prompts", "logging_nan_inf_filter", "num_completions_to_print", "skip_memory_metrics",
})  # fmt: skip


def too_large(value: object) -> object:
    """The first number in a setting that no training has; None where all are within bounds."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return None if -MOST <= value <= MOST else value
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, Any]", value).values())
    found = map(too_large, cast("list[object]", value)) if isinstance(value, list) else iter(())
    return next((number for number in found if number is not None), None)
