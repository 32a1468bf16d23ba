# SPDX-License-Identifier: Apache-2.0
"""TRL's trainer with our model, tokens and data, as the section `grpo` has it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from evoalign.baselines import settings
from evoalign.config import Config, LoraConfig
from evoalign.engines.transformers.engine import load_model
from evoalign.errors import ConfigError
from evoalign.rundir.directory import RunDir
from evoalign.tasks import Data, Task
from evoalign.tokens import Tokens


def make_trainer(
    config: Config,
    tokens: Tokens,
    task: Task,
    data: Data,
    reward: Callable[..., list[float]],
    rollouts: Callable[..., dict[str, Any]],
) -> Any:
    """The trainer, its model loaded. `rollouts` draws completions where TRL does not. Raises ConfigError."""
    from datasets import Dataset
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.trainer_callback import PrinterCallback

    from evoalign.baselines.trainer import Trainer

    folder = RunDir(Path(config.output_dir)).path / "trainer"
    arguments = _arguments(config, folder)
    settings.check_prompts(config, len(data.train), arguments.world_size)
    model = _model(config)
    try:
        with warnings.catch_warnings(), _reference_of(config, model):
            warnings.simplefilter("ignore")  # of what it calls experimental, and of names that it will drop
            trainer = Trainer(
                tokens,
                corrected=config.grpo.rollouts == "es" and config.grpo.off_policy == "clip",
                model=model,
                reward_funcs=[reward],
                args=arguments,
                train_dataset=Dataset.from_dict({"row": range(len(data.train))}),
                processing_class=tokens.tokenizer,
                peft_config=_peft(config.lora) if config.grpo.tune == "lora" else None,
                rollout_func=rollouts if config.grpo.rollouts != "trl" else None,
            )
    except (ImportError, ValueError) as error:
        raise ConfigError(f"grpo: TRL refuses it: {' '.join(str(error).split())}") from error
    finally:
        with suppress(OSError):  # the trainer makes its folder at once; nothing is to be left of a refused run
            folder.rmdir()
    if trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled():  # by the launcher
        raise ConfigError(settings.SPLIT)
    trainer.remove_callback(PrinterCallback)
    trainer.data_collator = cast(Any, partial(_asked, task, data))  # TRL's own gives back the list, too
    return trainer


def _asked(task: Task, data: Data, rows: list[dict[str, int]]) -> list[dict[str, Any]]:
    """A batch as TRL takes it. Prompts are made as they are asked: all of many rows fill the memory."""
    return [{"prompt": task.prompt(data.train[row["row"]]), "row": row["row"]} for row in rows]


def _arguments(config: Config, folder: Path) -> Any:
    from evoalign.baselines.trainer import GRPOConfig, keep_one_gpu

    on_cpu, known = settings.trains_on_cpu(config), settings.fields_of(GRPOConfig)
    try:
        arguments = GRPOConfig(**settings.arguments(config, folder, on_cpu=on_cpu, known=known))
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"grpo: {' '.join(str(error).split())}") from error
    keep_one_gpu(arguments)
    return arguments


def _model(config: Config) -> Any:
    """Weights that train."""
    model = load_model(config.model, getattr(torch, config.model.trained_dtype))
    return model.requires_grad_(True).train()


def _peft(lora: LoraConfig) -> Any:
    from peft import LoraConfig as Peft

    return Peft(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT accepts a float
        target_modules=lora.target_modules or "all-linear",
        layers_to_transform=lora.target_layers,
    )


@contextmanager
def _reference_of(config: Config, model: Any) -> Generator[None]:
    """TRL loads the reference of `grpo.beta` by the model's name, of whatever revision: here, the very files it has."""
    if config.grpo.beta == 0 or config.grpo.tune == "lora":
        yield
        return
    from transformers.utils.hub import cached_file

    name = model.config._name_or_path
    file = cached_file(name, "config.json", revision=config.model.revision, local_files_only=True)
    if file is not None:
        model.config._name_or_path = str(Path(file).parent)
    try:
        yield
    finally:
        model.config._name_or_path = name
