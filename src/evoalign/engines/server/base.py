# SPDX-License-Identifier: Apache-2.0
"""The base model from its files, as this process knows it beside a server that has its own copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evoalign.config import Config
from evoalign.engines.hash import weights_hash
from evoalign.engines.server.dialect import Said
from evoalign.engines.specs import mean_abs, specs_of, specs_of_config, without_experts
from evoalign.engines.transformers.engine import load_model
from evoalign.types import TensorSpec

PROBES = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a miller who had three sons, and",
    "def fibonacci(n):",
)
PROBED = 8
"""Prompts of which a server is asked, and how many tokens of each."""
APART: Mapping[torch.dtype, float] = {torch.float32: 0.01, torch.bfloat16: 0.08, torch.float16: 0.02}
"""Nats by which a server's log-probabilities may differ from those of transformers, in the mean over `PROBES`.

Measured with the tiny model on a CPU: 0.010 in bfloat16 (SGLang; 0.009 between attentions of transformers; 0.020 with
the worst of 13 other groups of prompts), 0.001 in float16 and 5e-7 in float32, where GPUs may compute with the mantissa
of float16. Noise of 3 % of the mean weight moves the tiny model's by 0.04 to 0.08, of 6 % by more than any bound.
"""


@dataclass(frozen=True, slots=True)
class Base:
    """`model` is one of transformers, None of dummy weights; `hash` the `weights_hash` of its `parameters`."""

    model: Any
    parameters: dict[str, torch.Tensor]
    specs: list[TensorSpec]
    hash: str

    def apart(self, prompt: Sequence[int], said: Said) -> float:
        """Mean over an answer's tokens of how far a server's log-probabilities lie from the model's own, in nats.

        Infinite for what this model does not say: nothing, or tokens that it does not have.
        """
        if not said.token_ids or max(said.token_ids) >= self.model.get_input_embeddings().weight.shape[0]:
            return math.inf
        ids = torch.tensor([[*prompt, *said.token_ids]])
        with torch.no_grad():
            logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        ours = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        return sum(abs(a - b) for a, b in zip(ours, said.logprobs or (), strict=True)) / len(ours)


def read_base(config: Config, dtype: torch.dtype, *, dummy: bool) -> Base:
    """Whole, on the CPU; of `dummy` weights their names and shapes alone. Raises ModelError."""
    if dummy:
        specs = specs_of_config(config)
        return Base(None, {}, specs, weights_hash((s.name, torch.zeros(0)) for s in specs))
    loaded = load_model(config.model, dtype)
    parameters = {name: p.data for name, p in loaded.named_parameters()}
    return Base(loaded, parameters, without_experts(specs_of(loaded, mean_abs)), weights_hash(parameters.items()))
