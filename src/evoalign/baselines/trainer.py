# SPDX-License-Identifier: Apache-2.0
"""Subclass of TRL's GRPOTrainer: evoalign's prompt tokens, resumable prompt order, timing, and old log-probabilities.

The algorithm is TRL's. Only this module, `ppo` and `dpo` import TRL.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.rollouts import derive_seed
from evoalign.tokens import Tokens
from evoalign.tracking import wandb
from evoalign.version import install

with wandb.hidden():  # the trackers of evoalign import it where they need it
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import RepeatSampler

__all__ = ["GRPOConfig", "Trainer"]

OVERRIDDEN = ("_tokenize_prompts", "_generate", "_generate_and_score_completions", "_get_train_sampler")
"""Private methods of TRL's trainer that `Trainer` overrides.

A release without them would silently ignore the overrides, so `check_release` refuses it.
"""


def check_release(trainer: type = GRPOTrainer, names: Sequence[str] = OVERRIDDEN) -> None:
    """Raise ConfigError naming the overridden methods that the installed release of TRL does not have."""
    missing = [f"{trainer.__name__}.{name}" for name in names if not callable(getattr(trainer, name, None))]
    if missing:
        raise ConfigError(
            f"TRL {version('trl')} has no {', '.join(missing)}, which evoalign overrides; "
            f"{install('grpo')} installs a tested release"
        )


class EpochSampler(RepeatSampler):
    """Sampler whose order in an epoch follows from seed and epoch, so that a resumed run has the same prompts.

    The two are hashed together, so that orders of neighbouring seeds are unrelated.
    """

    def set_epoch(self, epoch: int) -> None:
        """Seed the order of an epoch; called before each epoch."""
        if self.shuffle:
            self.generator.manual_seed(derive_seed("order", self.seed, epoch))


class Trainer(GRPOTrainer):
    """TRL's trainer with evoalign's prompts and clock.

    With `grpo.off_policy: clip`, log-probabilities of ES members are the old ones of PPO's ratio.
    """

    arguments_class = GRPOConfig

    def __init__(
        self, config: Config, tokens: Tokens, *, tools_of_prompts: Sequence[Any] = (), **arguments: Any
    ) -> None:
        check_release()
        self.evoalign_tokens, self.tools_of_prompts = tokens, tools_of_prompts
        self.corrected = config.grpo.samples_members and config.grpo.off_policy == "clip"
        self.rollout_seconds = 0.0
        super().__init__(**arguments)

    def _tokenize_prompts(self, prompts: Sequence[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Encode prompts as evoalign's engines do; TRL differs without a chat template or with a prefilled answer."""
        return [list(self.evoalign_tokens.encode(p, self.tools_of_prompts)) for p in prompts], None, {}

    def _generate(self, prompts: list[Any]) -> Any:
        start = time.perf_counter()
        with watching.phase("answering"):
            found = super()._generate(prompts)
        self.rollout_seconds += time.perf_counter() - start
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        found = super()._generate_and_score_completions(inputs)
        if self.corrected:
            found["old_per_token_logps"] = found["sampling_per_token_logps"]
        return found

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        """Return TRL's sampler with another order."""
        own: Any = super()._get_train_sampler(dataset)
        return EpochSampler(
            own.data_source, own.mini_repeat_count, own.batch_size, own.repeat_count, own.shuffle, own.seed
        )

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        """Write no card; `evoalign export` writes one."""
