# SPDX-License-Identifier: Apache-2.0
"""A model from its configuration alone, its weights unread."""

from __future__ import annotations

from typing import Any

import torch

from evoalign.config import ModelConfig
from evoalign.errors import ModelError
from evoalign.models.files import refuse_hooks, why_not
from evoalign.models.origin import described


def model_config(config: ModelConfig) -> Any:
    """The model's own configuration as transformers has it. Raises ModelError."""
    from transformers import AutoConfig

    path, revision = described(config)
    refuse_hooks(path, revision)
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except Exception as error:  # of a file that may say anything
        raise ModelError(f"model {config.name}: {why_not(error)}") from error


def empty_model(config: ModelConfig) -> Any:
    """The model from its configuration alone, its tensors without numbers. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    hf = model_config(config)
    check_layers(config.name, hf)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf, trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelError(
            f"model {config.name} ({hf.model_type}) is not a causal language model that can be made: {why_not(error)}"
        ) from error


def check_layers(name: str, config: Any) -> None:
    """Raise ModelError for a model of no layers, by whichever name: the library makes one without a word."""
    count = int(getattr(config.get_text_config(), "num_hidden_layers", 1))
    if count < 1:
        raise ModelError(f"model {name}: its config.json has {count} layers; fetch it again")
