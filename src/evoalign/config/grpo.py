# SPDX-License-Identifier: Apache-2.0
"""The GRPO baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from evoalign.config.base import Count, Positive, Section, Share
from evoalign.config.outside import Outside
from evoalign.config.trl import ASKED, MOST, too_large
from evoalign.errors import ConfigError, cut, shown

OF_TRL: dict[str, Any] = {
    "lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}, "optim": "adamw_torch", "weight_decay": 0.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 1.0, "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "scale_rewards": "group", "loss_type": "dapo", "importance_sampling_level": "token",
    "mask_truncated_completions": False, "top_k": 0, "gradient_checkpointing": False, "bf16": None, "use_vllm": False,
}  # fmt: skip
"""Fields of TRL with a default here, which a later TRL cannot change. Not TRL's own are those of `optim`
(adamw_torch_fused there), `gradient_checkpointing` (true there) and `bf16` (None here: on a GPU). A config may also
have the fields in the section `grpo` itself, where they stood before."""
LATE = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
}
"""Values that TRL itself would check at the first step only."""


OF_OTHERS = Outside("another machine, a file or code of others", keys=ASKED)


def in_place(grpo: Mapping[str, Any]) -> dict[str, Any]:
    """The section with the fields of TRL under `trl`. Raises ConfigError for one that is given in both places."""
    old = {name: value for name, value in grpo.items() if name in OF_TRL}
    trl = grpo.get("trl", {})
    if not old or not isinstance(trl, Mapping):
        return dict(grpo)
    for name in old:
        if name in trl:
            raise ConfigError(f"grpo.{name} and grpo.trl.{name} are the same setting: take grpo.{name} out")
    return {name: value for name, value in grpo.items() if name not in old} | {"trl": {**old, **trl}}


def place_of(setting: str) -> str:
    """Where the config has a dotted setting: `grpo.loss_type` is `grpo.trl.loss_type`."""
    section, _, name = setting.partition(".")
    return f"grpo.trl.{name}" if section == "grpo" and name in OF_TRL else setting


def _of_trl(name: str, value: object) -> object:
    """A value of `OF_TRL`, numbers written as text read as such. Raises ValueError."""
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
        raise ValueError("a group is compared within itself, so it takes 2 completions or more")
    return value


class GrpoConfig(Section):
    """The GRPO baseline (Shao et al., arXiv 2402.03300) on TRL's GRPOTrainer, under TRL's own names.

    Prompts, test split, longest completion and rewards are those of the sections `task` and `evaluation`, so that ES
    and GRPO do the same work. Every other setting of TRL goes into `trl`.
    """

    tune: Literal["full", "lora"] = "full"
    """All weights, or an adapter as the section `lora` says (rank, alpha, target_layers, target_modules)."""
    max_steps: Count = 100
    """Optimizer steps."""
    num_generations: Annotated[int, Field(ge=2, le=10**7), BeforeValidator(_group)] = 8
    """Completions of each prompt: the group that advantages are taken over."""
    per_device_train_batch_size: Count = 8
    """Completions in one forward and backward pass."""
    gradient_accumulation_steps: Count = 1
    """Passes to an optimizer step. A step has this times the batch size (times the processes) completions."""
    steps_per_generation: Count | None = None
    """Passes that one round of completions lasts for; None: one optimizer step."""
    num_iterations: Count = 1
    """How often each completion is trained on."""
    learning_rate: Positive = 1e-6
    warmup_ratio: Share = 0.0
    beta: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """Weight of the KL divergence from the base model in the loss. 0 keeps no reference model."""
    temperature: Positive = 1.0
    """Of the completions to train on; those of the evaluation are drawn as `evaluation` says."""
    top_p: Annotated[float, Field(ge=1e-9, le=1)] = 1.0
    max_completion_length: Count | None = None
    """None: `sampling.max_tokens`."""
    rollouts: Literal["trl", "engine", "es"] = "trl"
    """Where completions come from. `trl`: TRL's own generation, on transformers or (`trl: {use_vllm: true}`) vLLM.
    `engine`: the batched engine in this process, as in ES, at `temperature` and `top_p`. `es`: the group of a prompt
    are the greedy completions of as many members of a population, drawn around the present weights as the sections
    `space` and `es` say."""
    off_policy: Literal["clip", "none"] = "clip"
    """With `rollouts: es`: `clip` takes the member's own probabilities for the old ones of PPO's clipped ratio, `none`
    takes the completions for the policy's own."""
    trl: Annotated[dict[str, Any], OF_OTHERS] = Field(default_factory=dict)
    """Any other field of TRL's GRPOConfig that says how it trains, by its name there, such as `lr_scheduler_type`,
    `loss_type`, `use_vllm` or `deepspeed`; `evoalign.config.trl` has them all. Three have another default than TRL's:
    `optim: adamw_torch`, `gradient_checkpointing: false`, and `bf16`, which is true on a GPU with float32 weights."""

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
    def by_name(self) -> dict[str, Any]:
        """Every setting by its own name, those of `OF_TRL` with their defaults; what is left of `trl` under `trl`."""
        others = {name: value for name, value in self.trl.items() if name not in OF_TRL}
        chosen = {name: value for name, value in self.trl.items() if name in OF_TRL}
        return {**self.model_dump(mode="json"), **OF_TRL, **chosen, "trl": others}

    if not TYPE_CHECKING:  # which sees the fields alone

        def __getattr__(self, name: str) -> Any:
            """A field of TRL, as an attribute where it was one."""
            return self.by_name[name] if name in OF_TRL else super().__getattr__(name)

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
        if self.rollouts != "trl" and self.by_name["use_vllm"]:
            raise ValueError(
                f"grpo.trl.use_vllm draws completions itself: it needs grpo.rollouts trl, not {self.rollouts}"
            )
        of_trl = ["grpo.trl.top_k"] if self.by_name["top_k"] else []
        of_trl += [f"grpo.trl.{n}" for n in ("min_p", "repetition_penalty", "generation_kwargs") if n in self.trl]
        if self.rollouts != "trl" and of_trl:
            raise ValueError(
                f"{of_trl[0]} is for TRL's own generation alone: take it out, or set grpo.rollouts trl (it is "
                f"{self.rollouts})"
            )
        return self
