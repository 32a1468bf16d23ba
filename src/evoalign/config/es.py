# SPDX-License-Identifier: Apache-2.0
"""The evolution strategy."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from evoalign.config.base import Count, Delta, Positive, Section, Share, named

NO_ES = "missing setting es; es needs at least sigma or noise_multiplier"


BY_PROMPT = ("centered",)
"""Shapings that need the scores by prompt; the others take each member's mean over prompts."""


class OptimizerConfig(Section):
    """How the ES gradient becomes a step. Momentum and Adam keep state of the mean's size: `lora` only."""

    name: Literal["sgd", "momentum", "adam"] = "sgd"
    momentum: Share = 0.9
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Positive = 1e-8


class ScheduleConfig(Section):
    """A factor over the run, from 1 at generation 0 to `floor` at the last one; of a plateau, `floor` at the least."""

    name: Literal["constant", "linear", "cosine", "plateau"] = "constant"
    floor: Annotated[float, Field(ge=1e-12, le=1)] = 0.1
    patience: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """For `plateau`, which needs it: after so many evaluations of the validation split in a row that bring no better
    reward, the factor is multiplied by `factor`, and they are counted anew."""
    factor: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.5, exclude_if=lambda value: value == 0.5)
    """For `plateau`. Written down only where it is set."""
    min_delta: Delta = Field(default=0.0, exclude_if=lambda value: value == 0.0)
    """For `plateau`: a reward is better where it is above the best one before it by more than this. Written down only
    where it is set."""

    @model_validator(mode="after")
    def _of_a_plateau(self) -> ScheduleConfig:
        if self.name == "plateau" and self.patience is None:
            raise ValueError("a plateau needs its patience: how many evaluations of the validation split it waits")
        odd = [name for name in ("patience", "factor", "min_delta") if name in self.model_fields_set]
        if self.name != "plateau" and odd and any(getattr(self, n) != type(self).model_fields[n].default for n in odd):
            raise ValueError(f"{', '.join(odd)}: for name: plateau alone, not for {self.name}; leave it out")
        return self


Schedule = Annotated[ScheduleConfig, BeforeValidator(named, json_schema_input_type=str | ScheduleConfig)]


START = (
    "to begin with, es.sigma: 0.01 in space lora and 0.001 in others, with half of it as es.learning_rate; "
    "`evoalign probe` measures what fits"
)
"""What is said to those who set no width: there is no default, since none fits all models and spaces."""


class EsConfig(Section):
    """The evolution strategy. Exactly one of `sigma` and `noise_multiplier` sets the width of the noise."""

    num_generations: Count = 30
    population_size: Annotated[int, Field(ge=2, le=10**7)] = 30
    learning_rate: Positive = 0.0005
    sigma: Positive | None = None
    noise_multiplier: Positive | None = None
    shaping: Literal["zscore", "centered", "ranks", "identity"] = "zscore"
    antithetic: bool = False
    optimizer: Annotated[OptimizerConfig, BeforeValidator(named, json_schema_input_type=str | OptimizerConfig)] = Field(
        default_factory=OptimizerConfig
    )
    sigma_schedule: Schedule = Field(default_factory=ScheduleConfig)
    learning_rate_schedule: Schedule = Field(default_factory=ScheduleConfig)
    decay: Share = 0.0
    """Share of the distance to the starting weights taken back each generation."""

    @model_validator(mode="after")
    def _one_width(self) -> EsConfig:
        if (self.sigma is None) == (self.noise_multiplier is None):
            start = f"; {START}" if self.sigma is None else ""
            raise ValueError(f"set exactly one of es.sigma and es.noise_multiplier{start}")
        if self.antithetic and self.population_size % 2:
            raise ValueError(f"es.antithetic needs an even es.population_size, not {self.population_size}")
        if self.learning_rate_schedule.name == "plateau":
            raise ValueError("es.learning_rate_schedule: plateau is for es.sigma_schedule alone; use linear or cosine")
        return self

    @property
    def width(self) -> float:
        """`sigma` or `noise_multiplier`: what multiplies the scale of each tensor at generation 0."""
        return cast(float, self.sigma if self.sigma is not None else self.noise_multiplier)

    @property
    def eta(self) -> float:
        """Step in units of the noise's standard deviation at generation 0."""
        return self.learning_rate / self.sigma if self.sigma is not None else self.learning_rate
