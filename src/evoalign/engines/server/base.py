# SPDX-License-Identifier: Apache-2.0
"""The base model from its files, as this process knows it beside a server that has its own copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evoalign.config import Config
from evoalign.engines.hash import weights_hash
from evoalign.engines.server.dialect import Said
from evoalign.engines.specs import mean_abs, specs_of, specs_of_config
from evoalign.engines.transformers.engine import load_model
from evoalign.types import TensorSpec

PROBE, PROBED = "The capital of France is", 4
APART: Mapping[torch.dtype, float] = {torch.float32: 0.02, torch.bfloat16: 0.5, torch.float16: 0.2}
"""Nats by which a server's log-probabilities may differ from those of transformers. By the served dtype."""


@dataclass(frozen=True, slots=True)
class Base:
    """`model` is one of transformers, None of dummy weights; `hash` the `weights_hash` of its `parameters`."""

    model: Any
    parameters: dict[str, torch.Tensor]
    specs: list[TensorSpec]
    hash: str

    def apart(self, prompt: Sequence[int], said: Said) -> float:
        """The largest difference of a server's log-probabilities from the model's own, in nats."""
        ids = torch.tensor([[*prompt, *said.token_ids]])
        with torch.no_grad():
            logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        ours = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        return max(abs(a - b) for a, b in zip(ours, said.logprobs or (), strict=True))


def read_base(config: Config, dtype: torch.dtype, *, dummy: bool) -> Base:
    """Whole, on the CPU; of `dummy` weights their names and shapes alone. Raises ModelError."""
    if dummy:
        specs = specs_of_config(config)
        return Base(None, {}, specs, weights_hash((s.name, torch.zeros(0)) for s in specs))
    loaded = load_model(config.model, dtype)
    parameters = {name: p.data for name, p in loaded.named_parameters()}
    return Base(loaded, parameters, specs_of(loaded, mean_abs), weights_hash(parameters.items()))
