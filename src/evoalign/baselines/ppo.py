# SPDX-License-Identifier: Apache-2.0
"""PPO (Schulman et al., arXiv 1707.06347): TRL's GRPOTrainer with the advantages of a critic. Experimental.

TRL has no PPO trainer since release 1.13 (huggingface/trl, pull request 7020). The loss of its GRPOTrainer is PPO's
clipped one (eq. 7) and takes an advantage per token. Here these are generalised advantage estimates (Schulman et al.,
arXiv 1506.02438, eq. 16) with gamma 1, whitened over a round. The reward comes with the last token.

Deviations from the paper and from TRL's former trainer: `grpo.beta` weights the KL in the loss, not in the reward; the
values are not clipped, and `max_grad_norm` clips the gradients of the policy alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from evoalign.baselines.trainer import Trainer
from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.tokens import Tokens

LAMBDA = 0.95
"""Decay of the advantage estimates; TRL's former default."""
CRITIC = "critic.safetensors"
"""File with the critic's weights in a trainer state; its optimizer is a group of the policy's."""


class Critic(nn.Module):
    """Value of each prefix: a copy of the policy's layers with one linear output, which is 0 at the start."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.body = copy.deepcopy(policy.base_model)
        self.head = nn.Linear(policy.config.get_text_config().hidden_size, 1, dtype=policy.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return float32 values [sequences, tokens]."""
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return self.head(hidden).squeeze(-1).float()


def advantages_of(values_BT: Tensor, scores_B: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return whitened advantages and the critic's targets, 0 at masked positions.

    A value is that before its token is generated; `scores_B` come with the last token of each completion.
    """
    values_BT = values_BT * mask_BT
    rewards_BT = torch.zeros_like(values_BT)
    last_B = (mask_BT.sum(1) - 1).clamp(min=0).long()
    rewards_BT[torch.arange(len(last_B)), last_B] = scores_B
    found, ahead_B, next_B = torch.zeros_like(values_BT), torch.zeros_like(scores_B), torch.zeros_like(scores_B)
    for t in reversed(range(values_BT.size(1))):
        ahead_B = (rewards_BT[:, t] + next_B - values_BT[:, t] + LAMBDA * ahead_B) * mask_BT[:, t]
        next_B, found[:, t] = values_BT[:, t], ahead_B
    count = mask_BT.sum().clamp(min=1)
    mean = found.sum() / count
    variance = (((found - mean) * mask_BT) ** 2).sum() / count
    return (found - mean) * mask_BT * (variance + 1e-8).rsqrt(), found + values_BT


class PpoTrainer(Trainer):
    """GRPO's trainer with a critic, which trains next to the policy with the same optimizer and learning rate."""

    def __init__(
        self, config: Config, tokens: Tokens, *, reward_funcs: Sequence[Callable[..., list[float]]], **arguments: Any
    ) -> None:
        critic, (reward,) = Critic(arguments["model"]), reward_funcs
        self._scores: list[float] = []

        def scored(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
            self._scores = reward(prompts, completions, **columns)
            return self._scores

        super().__init__(config, tokens, reward_funcs=[scored], **arguments)
        if self.accelerator.num_processes > 1 or self.is_deepspeed_enabled:
            raise ConfigError("grpo.algorithm: ppo trains its critic in one process, without DeepSpeed")
        self.critic = critic.to(self.accelerator.device)
        self.add_callback(_CriticState(self.critic))

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the policy's optimizer, and add the critic's parameters."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            optimizer.add_param_group({"params": [*self.critic.parameters()], "weight_decay": self.args.weight_decay})
        return optimizer

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        """Train, with the critic of the state to resume from."""
        if resume_from_checkpoint is not None:
            self.critic.load_state_dict(load_file(Path(resume_from_checkpoint) / CRITIC))
        return super().train(resume_from_checkpoint, *arguments, **named)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        found = super()._generate_and_score_completions(inputs)
        each = self.args.per_device_train_batch_size
        with torch.no_grad():
            rows = range(0, len(found["completion_ids"]), each)
            parts = [self._values({k: v[i : i + each] for k, v in found.items() if v.dim() > 1}) for i in rows]
        scores = torch.tensor(self._scores, dtype=torch.float32, device=self.accelerator.device)
        found["advantages"], found["returns"] = advantages_of(torch.cat(parts), scores, found["completion_mask"])
        return found

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return PPO's clipped loss plus half the mean squared error of the critic (the paper's eq. 9)."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        mask = inputs["completion_mask"]
        squares = (self._values(inputs) - inputs["returns"]) ** 2 * mask
        return loss + squares.sum() / mask.sum().clamp(min=1) / 2 / self.current_gradient_accumulation_steps

    def _values(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the value before each token of the completions."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with self.accelerator.autocast():
            return self.critic(ids, mask)[:, batch["prompt_ids"].size(1) - 1 : -1]


class _CriticState(TrainerCallback):
    """Callback that saves the critic with the trainer's state and clears its gradients as the trainer does those of
    the policy."""

    def __init__(self, critic: Critic) -> None:
        self.critic = critic

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.critic.zero_grad()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        save_file(self.critic.state_dict(), Path(args.output_dir) / f"checkpoint-{state.global_step}" / CRITIC)
