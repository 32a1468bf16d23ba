# SPDX-License-Identifier: Apache-2.0
"""Sampling of completions, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, model_validator

from evoalign.config.base import Count, Every, Section, listed
from evoalign.config.outside import INSIDE
from evoalign.errors import shown


def _temperature(value: float) -> float:
    if 0 < value < 1e-6:
        raise ValueError("use 0 for greedy decoding, or at least 0.000001")
    return value


Stops = list[Annotated[str, Field(min_length=1)]]
AnySeed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class SamplingConfig(Section):
    """Sampling of the completions to train on. A setting that is missing here has its value from `evaluation`."""

    max_tokens: Count = 128
    """Longest completion, in tokens."""
    temperature: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False), AfterValidator(_temperature)] = 0.0
    """Sampling temperature; 0 is greedy decoding, with which members differ only by their weights."""
    top_p: Annotated[float, Field(ge=1e-9, le=1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability; 1 keeps all."""
    stop: Annotated[Stops, listed(Stops), INSIDE] = Field(default_factory=list)
    """Texts that end a completion, in addition to the model's stop tokens."""
    keep_stop: bool | None = Field(default=None, exclude_if=lambda value: value is None)
    """Whether the completion includes the `stop` text that ended it, such as a closing tag that a reward looks for.
    None: false."""


class EvaluationConfig(SamplingConfig):
    """Evaluation of the mean on the test split.

    `max_tokens`, `stop` and `keep_stop` that are missing here have their values from `sampling`. The temperature is 0
    unless it is set.
    """

    samples: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Completions per prompt and seed. More than 1 needs a temperature above 0."""
    seeds: Annotated[list[AnySeed], Field(min_length=1)] = Field(default_factory=lambda: [0])
    """Seeds of the sampling. The measures are means over all of them."""
    every: Every = 0
    """Generations between evaluations of the mean; 0: only before and after the training."""

    @model_validator(mode="after")
    def _draws(self) -> EvaluationConfig:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"evaluation.seeds {shown(self.seeds)} repeats a seed")
        if self.temperature == 0 and (self.samples > 1 or len(self.seeds) > 1):
            raise ValueError("samples and seeds only repeat a greedy completion; set evaluation.temperature above 0")
        return self


def shared(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tree of a config with settings of `sampling` copied to `evaluation`, and the other way round.

    Configs of earlier releases have the sampling of training in `evaluation`.
    """
    both = [tree.get(name, {}) for name in ("sampling", "evaluation")]
    if not all(isinstance(section, Mapping) for section in both):
        return tree  # refused when the sections are checked
    sampling, evaluation = (dict(cast(Mapping[str, Any], section)) for section in both)
    for name in ("max_tokens", "stop", "keep_stop"):
        if name in sampling:
            evaluation.setdefault(name, sampling[name])
    for name in SamplingConfig.model_fields:
        if name in evaluation:
            sampling.setdefault(name, evaluation[name])
    found = {"sampling": sampling, "evaluation": evaluation}
    return {**tree, **{name: section for name, section in found.items() if section or name in tree}}
