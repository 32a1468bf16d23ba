# SPDX-License-Identifier: Apache-2.0
"""The base model from its files, and its distance from the model that a server serves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evoalign.config import Config
from evoalign.engines.base import Completion
from evoalign.engines.hash import weights_hash
from evoalign.engines.specs import mean_abs, reached, refuse_quantised, specs_of, specs_of_config
from evoalign.engines.transformers.engine import load_model
from evoalign.models.files import refuse_pickles
from evoalign.models.origin import model_path
from evoalign.models.quantised import files_hash
from evoalign.types import TensorSpec

PROBES = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a miller who had three sons, and",
    "def fibonacci(n):",
)
PROBE_TOKENS = 8
"""Prompts on which a server is compared with the files, and how many tokens of each."""
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 0.01, torch.bfloat16: 0.08, torch.float16: 0.02}
"""Maximum mean difference, over `PROBES`, between log-probabilities of a server and of transformers, in nats.

Measured with the tiny model on a CPU: 0.010 in bfloat16 (SGLang; 0.009 between attentions of transformers; 0.020 with
the worst of 13 other groups of prompts), 0.001 in float16 and 5e-7 in float32, where GPUs may compute with the mantissa
of float16. Noise of 3 % of the mean weight moves the tiny model's by 0.04 to 0.08, of 6 % by more than any bound.
Activations in FP8 (vLLM) move those of the tiny model by 0.085 and those of SmolLM2-135M by 0.093: such a server is not
compared.
"""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """`model` is the transformers model; None for dummy weights, and for a quantised base that nothing compares.

    `hash` is the `weights_hash` of its `parameters`; a quantised base has the hash of its files.
    """

    model: Any
    parameters: dict[str, torch.Tensor]
    specs: list[TensorSpec]
    hash: str

    def distance(self, prompt: Sequence[int], completion: Completion) -> float:
        """Return the mean difference between a server's log-probabilities and the model's, in nats.

        It is infinite for a completion that the model cannot generate: an empty one, or tokens that it does not have.
        """
        ids = completion.token_ids
        if not ids or max(ids) >= self.model.get_input_embeddings().weight.shape[0]:
            return math.inf
        tokens = torch.tensor([[*prompt, *ids]])
        with torch.no_grad():
            logits = self.model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
        ours = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].tolist()
        return sum(abs(a - b) for a, b in zip(ours, completion.logprobs or (), strict=True)) / len(ours)


def load_base(config: Config, dtype: torch.dtype, *, dummy: bool, compared: bool = True) -> BaseModel:
    """Load the base model on the CPU; for `dummy` weights only names and shapes. Raises ModelError, ConfigError.

    A quantised base is read as numbers only if it is `compared` with a running server.
    """
    if dummy:
        specs = specs_of_config(config)
        return BaseModel(None, {}, specs, weights_hash((s.name, torch.zeros(0)) for s in specs))
    if refuse_quantised(config, dtype) is not None:
        path, revision = model_path(config.model), config.model.revision
        refuse_pickles(path, revision)
        digest = files_hash(path, revision, config.model.name)
        return BaseModel(load_model(config.model, dtype) if compared else None, {}, specs_of_config(config), digest)
    model = load_model(config.model, dtype)
    parameters = {name: p.data for name, p in model.named_parameters()}
    return BaseModel(model, parameters, reached(config, specs_of(model, mean_abs)), weights_hash(parameters.items()))
