# SPDX-License-Identifier: Apache-2.0
"""The GRPO baseline."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from evoalign.config.base import PositiveFloat, Section, Share


def _group(value: object) -> object:
    if isinstance(value, int) and value < 2:
        raise ValueError("a group is compared within itself, so it takes 2 completions or more")
    return value


class GrpoConfig(Section):
    """The GRPO baseline (Shao et al., arXiv 2402.03300) on TRL's GRPOTrainer, under TRL's own names.

    Prompts, test split, longest completion and rewards are those of the sections `task` and `evaluation`, so that ES
    and GRPO do the same work. A setting of TRL that is not listed goes into `trl`.
    """

    tune: Literal["full", "lora"] = "full"
    """All weights, or an adapter as the section `lora` says (rank, alpha, target_layers, target_modules)."""
    max_steps: PositiveInt = 100
    """Optimizer steps."""
    num_generations: Annotated[int, Field(ge=2), BeforeValidator(_group)] = 8
    """Completions of each prompt: the group that advantages are taken over."""
    per_device_train_batch_size: PositiveInt = 8
    """Completions in one forward and backward pass."""
    gradient_accumulation_steps: PositiveInt = 1
    """Passes to an optimizer step. A step has this times the batch size (times the processes) completions."""
    steps_per_generation: PositiveInt | None = None
    """Passes that one round of completions lasts for; None: one optimizer step."""
    num_iterations: PositiveInt = 1
    """How often each completion is trained on."""
    learning_rate: PositiveFloat = 1e-6
    lr_scheduler_type: Literal[
        "constant", "linear", "cosine", "constant_with_warmup", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
    ] = "linear"
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    warmup_ratio: Share = 0.0
    optim: str = "adamw_torch"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the base model in the loss. 0 keeps no reference model."""
    epsilon: PositiveFloat = 0.2
    epsilon_high: PositiveFloat | None = None
    delta: PositiveFloat | None = None
    scale_rewards: Literal["group", "batch", "none"] = "group"
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    mask_truncated_completions: bool = False
    temperature: PositiveFloat = 1.0
    """Of the completions to train on; those of the evaluation are drawn as `evaluation` says."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_completion_length: PositiveInt | None = None
    """None: `sampling.max_tokens`."""
    gradient_checkpointing: bool = False
    bf16: bool | None = None
    """Mixed precision: float32 weights, bfloat16 arithmetic. None: on a GPU."""
    rollouts: Literal["trl", "engine", "es"] = "trl"
    """Where completions come from. `trl`: TRL's own generation, on transformers or vLLM. `engine`: the batched engine
    in this process, as in ES, at `temperature` and `top_p`. `es`: the group of a prompt are the greedy completions of
    as many members of a population, drawn around the present weights as the sections `space` and `es` say."""
    off_policy: Literal["clip", "none"] = "clip"
    """With `rollouts: es`: `clip` takes the member's own probabilities for the old ones of PPO's clipped ratio, `none`
    takes the completions for the policy's own."""
    use_vllm: bool = False
    """Completions come from vLLM through TRL's own integration (`rollouts: trl`); needs the extra `vllm`."""
    trl: dict[str, Any] = Field(default_factory=dict)
    """Any other field of TRL's GRPOConfig, by its name there, such as `vllm_mode` or `deepspeed`."""

    @model_validator(mode="after")
    def _whole_groups(self) -> GrpoConfig:
        passes = self.steps_per_generation or self.gradient_accumulation_steps
        if self.per_device_train_batch_size * passes % self.num_generations:
            raise ValueError(
                f"grpo.per_device_train_batch_size {self.per_device_train_batch_size} x {passes} passes is no multiple "
                f"of grpo.num_generations {self.num_generations}: a round of completions holds whole groups"
            )
        whole, step = passes * self.num_iterations, self.gradient_accumulation_steps
        if whole % step and step % whole:
            raise ValueError(
                f"a round of completions lasts for {whole} passes (grpo.steps_per_generation x grpo.num_iterations) "
                f"and a step for {step} (grpo.gradient_accumulation_steps): one must be a multiple of the other"
            )
        if self.rollouts == "es" and self.tune != "full":
            raise ValueError("grpo.rollouts es perturbs the model's own weights: it needs grpo.tune full")
        if self.rollouts != "trl" and self.use_vllm:
            raise ValueError(f"grpo.use_vllm draws completions itself: it needs grpo.rollouts trl, not {self.rollouts}")
        of_trl = ["grpo.top_k"] if self.top_k else []
        of_trl += [f"grpo.trl.{n}" for n in ("min_p", "repetition_penalty", "generation_kwargs") if n in self.trl]
        if self.rollouts != "trl" and of_trl:
            raise ValueError(
                f"{of_trl[0]} is for TRL's own generation alone: take it out, or set grpo.rollouts trl (it is "
                f"{self.rollouts})"
            )
        return self
