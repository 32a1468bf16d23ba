# SPDX-License-Identifier: Apache-2.0
"""How completions are drawn: in training, and in evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, model_validator

from evoalign.config.base import Count, Every, Section, listed
from evoalign.config.outside import INSIDE
from evoalign.errors import shown


def _temperature(value: float) -> float:
    if 0 < value < 1e-6:
        raise ValueError("logits cannot be divided by that; 0 is greedy, and else it should be at least 0.000001")
    return value


Stops = list[Annotated[str, Field(min_length=1)]]
AnySeed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class SamplingConfig(Section):
    """How training's completions are drawn. What is not set here is as `evaluation` has it."""

    max_tokens: Count = 128
    temperature: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False), AfterValidator(_temperature)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(ge=1e-9, le=1)] = 1.0
    stop: Annotated[Stops, listed(Stops), INSIDE] = Field(default_factory=list)
    """Texts at which a completion ends, beside the model's own stop tokens; see `keep_stop`."""
    keep_stop: bool | None = Field(default=None, exclude_if=lambda value: value is None)
    """Whether the text of `stop` that ended a completion is part of it, as an answer's closing tag has to be that a
    reward looks for; None is false. Written down only where it is set."""


class EvaluationConfig(SamplingConfig):
    """How the mean is evaluated: its decoding, and what is repeated.

    `max_tokens`, `stop` and `keep_stop` that are not set here are as `sampling` has them; the temperature is 0 unless
    it is set.
    """

    samples: Annotated[int, Field(ge=1, le=10**6)] = 1
    seeds: Annotated[list[AnySeed], Field(min_length=1)] = Field(default_factory=lambda: [0])
    every: Every = 0
    """Evaluate the mean on the test split each so many generations; 0: only before and after."""

    @model_validator(mode="after")
    def _draws(self) -> EvaluationConfig:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"evaluation.seeds {shown(self.seeds)} names a seed twice")
        if self.temperature == 0 and (self.samples > 1 or len(self.seeds) > 1):
            raise ValueError("samples and seeds only repeat a greedy completion; set evaluation.temperature above 0")
        return self


def shared(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config's tree in which what one of the two sections sets holds for the other too.

    Configs of earlier releases have training's decoding in `evaluation`.
    """
    both = [tree.get(name, {}) for name in ("sampling", "evaluation")]
    if not all(isinstance(section, Mapping) for section in both):
        return tree  # the check of its type says what it should be
    sampling, evaluation = (dict(cast(Mapping[str, Any], section)) for section in both)
    for name in ("max_tokens", "stop", "keep_stop"):
        if name in sampling:
            evaluation.setdefault(name, sampling[name])
    for name in SamplingConfig.model_fields:
        if name in evaluation:
            sampling.setdefault(name, evaluation[name])
    found = {"sampling": sampling, "evaluation": evaluation}
    return {**tree, **{name: section for name, section in found.items() if section or name in tree}}
