# SPDX-License-Identifier: Apache-2.0
"""The evolution strategy."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from evoalign.config.base import Count, Positive, Section, Share, named

NO_ES = "missing setting es; es needs at least sigma or noise_multiplier"


class OptimizerConfig(Section):
    """How the ES gradient becomes a step. Momentum and Adam keep state of the mean's size: `lora` only."""

    name: Literal["sgd", "momentum", "adam"] = "sgd"
    momentum: Share = 0.9
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Positive = 1e-8


class ScheduleConfig(Section):
    """A factor over the run, from 1 at generation 0 to `floor` at the last one."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    floor: Annotated[float, Field(ge=1e-12, le=1)] = 0.1


Schedule = Annotated[ScheduleConfig, BeforeValidator(named, json_schema_input_type=str | ScheduleConfig)]


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
            raise ValueError("set exactly one of es.sigma and es.noise_multiplier")
        if self.antithetic and self.population_size % 2:
            raise ValueError(f"es.antithetic needs an even es.population_size, not {self.population_size}")
        return self

    @property
    def width(self) -> float:
        """`sigma` or `noise_multiplier`: what multiplies the scale of each tensor at generation 0."""
        return cast(float, self.sigma if self.sigma is not None else self.noise_multiplier)

    @property
    def eta(self) -> float:
        """Step in units of the noise's standard deviation at generation 0."""
        return self.learning_rate / self.sigma if self.sigma is not None else self.learning_rate
