# SPDX-License-Identifier: Apache-2.0
"""Online DPO on TRL's DPOTrainer: pairs come from the policy's own completions, ranked by the task's reward.

Each pass samples `grpo.num_generations` completions of each prompt with evoalign's engine. The first completion of
highest reward is chosen and the first of lowest is rejected; a group of equal rewards gives no pair. The loss is that
of Rafailov et al. (arXiv 2305.18290, eq. 7). Completions of the current policy instead of a fixed data set are those of
Guo et al. (arXiv 2402.04792), whose pairs come from an annotator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from evoalign.baselines.settings import pairs
from evoalign.baselines.trainer import EpochSampler, check_release
from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.tokens import Tokens
from evoalign.tracking import wandb

with wandb.hidden():  # the trackers of evoalign import it where they need it
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

OVERRIDDEN = ("_prepare_dataset", "_get_train_sampler")
"""Private methods of TRL's trainer that `DpoTrainer` overrides."""


class DpoTrainer(DPOTrainer):
    """TRL's trainer, whose batches are prompts until their loss is computed."""

    arguments_class = DPOConfig

    def __init__(
        self,
        config: Config,
        tokens: Tokens,
        *,
        reward_funcs: Sequence[Callable[..., list[float]]],
        rollout_func: Callable[..., dict[str, Any]],
        environment_factory: None,
        tools_of_prompts: Sequence[Any],
        **arguments: Any,
    ) -> None:
        check_release(DPOTrainer, OVERRIDDEN)
        (self.reward,), self.rollouts, self.group = reward_funcs, rollout_func, config.grpo.num_generations
        self.rollout_seconds = 0.0
        super().__init__(**arguments)
        if self.accelerator.num_processes > 1:
            raise ConfigError("grpo.algorithm: dpo trains in one process: batches without a pair have no gradient")
        self.padded: Any = self.data_collator
        """TRL's own collator of pairs."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """Return the data set of prompts as it is: there are no pairs yet."""
        return dataset

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        """Return the sampler of GRPO's trainer, with each prompt once."""
        prompts = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return EpochSampler(self.train_dataset, 1, prompts, seed=self.args.seed)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return DPO's loss on the pairs that the current policy's completions of these prompts give."""
        start = time.perf_counter()
        rows = [row for row in inputs for _ in range(self.group)]
        with watching.phase("answering"):
            found = self.rollouts([row["prompt"] for row in rows], self)
        self.rollout_seconds += time.perf_counter() - start
        ids = found["completion_ids"]
        rewards = self.reward(None, None, completion_ids=ids, row=[row["row"] for row in rows])
        ranked = [
            {"prompt_ids": found["prompt_ids"][best], "chosen_ids": ids[best], "rejected_ids": ids[worst]}
            for best, worst in pairs(rewards, self.group)
        ]
        if not ranked:  # no parameter gets a gradient, so that no momentum of Adam moves it
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        batch = {name: tensor.to(self.accelerator.device) for name, tensor in self.padded(ranked).items()}
        return super().compute_loss(model, batch, return_outputs, num_items_in_batch)

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        """Write no card; `evoalign export` writes one."""
