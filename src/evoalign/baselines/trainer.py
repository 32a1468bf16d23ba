# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer where it has to fit in: the same prompt tokens as every engine, a clock, whose probabilities count.

Nothing of the algorithm is changed. The only module that imports TRL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.rollouts import derive_seed
from evoalign.tokens import Tokens
from evoalign.version import install

__all__ = ["GRPOConfig", "Trainer"]

OVERRIDDEN = ("_tokenize_prompts", "_generate", "_generate_and_score_completions", "_get_train_sampler")
"""Methods of TRL's trainer that `Trainer` stands in for. They are private: another release may not call them, and a run
would then be another without a word."""


def check_release(trainer: type = GRPOTrainer) -> None:
    """Raise ConfigError naming the methods of TRL that evoalign builds on and this release does not have."""
    missing = [f"{trainer.__name__}.{name}" for name in OVERRIDDEN if not callable(getattr(trainer, name, None))]
    if missing:
        raise ConfigError(
            f"TRL {version('trl')} has no {', '.join(missing)}, which GRPO here builds on: "
            f"{install('grpo')} gets a release that it was tested with"
        )


class EpochSampler(RepeatSampler):
    """Each epoch's order follows from the seed and its number, so that a run that goes on asks what it would have.

    Hashed together: seed 0's second order has nothing to do with seed 1's first.
    """

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        if self.shuffle:
            self.generator.manual_seed(derive_seed("order", self.seed, epoch))


class Trainer(GRPOTrainer):
    """`corrected`: completions come from others than the policy, whose probabilities are the old ones of the ratio."""

    def __init__(self, tokens: Tokens, *, corrected: bool, **arguments: Any) -> None:
        check_release()
        self.evoalign_tokens = tokens
        self.corrected = corrected
        self.rollout_seconds = 0.0
        super().__init__(**arguments)

    def _tokenize_prompts(self, prompts: Sequence[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """TRL's own would differ for messages without a chat template, or for a last message that is a beginning."""
        return [list(self.evoalign_tokens.encode(prompt)) for prompt in prompts], None, {}

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
        """As TRL's, but for the order."""
        own: Any = super()._get_train_sampler(dataset)
        return EpochSampler(
            own.data_source, own.mini_repeat_count, own.batch_size, own.repeat_count, own.shuffle, own.seed
        )

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        """None: an export has the card of the run."""


def keep_one_gpu(arguments: GRPOConfig) -> None:
    """One process drives one GPU; several are for `accelerate launch`, never for torch's DataParallel."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # pyright: ignore[reportPrivateUsage]  # there is no public way


Rollouts = Callable[[list[Any], Trainer], dict[str, Any]]
