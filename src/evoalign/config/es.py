# SPDX-License-Identifier: Apache-2.0
"""The evolution strategy, and when it stops early."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from evoalign.config.base import OWN, Count, Delta, Positive, Section, Share, named
from evoalign.config.outside import CODE
from evoalign.errors import shown


class OptimizerConfig(Section):
    """Optimizer that turns the ES gradient into a step. Momentum and Adam keep state of the size of the mean, so spaces
    `lowrank` and `full` do not take them. `cma` (CMA-ES) and `sep_cma` adapt the covariance of the noise and the step,
    for at most 2,000 and 10,000 numbers."""

    name: Literal["sgd", "momentum", "adam", "cma", "sep_cma"] = "sgd"
    """Kind of optimizer. `optimizer: adam` is short for `optimizer: {name: adam}`."""
    momentum: Share = 0.9
    """Decay rate of the velocity, for `momentum`."""
    beta1: Share = 0.9
    """Decay rate of the first moment, for `adam`."""
    beta2: Share = 0.999
    """Decay rate of the second moment, for `adam`."""
    eps: Positive = 1e-8
    """Added to the root of the second moment, for `adam`."""

    @property
    def adapts_noise(self) -> bool:
        """Whether it changes the distribution of the members, not only the step."""
        return self.name in ("cma", "sep_cma")


class ScheduleConfig(Section):
    """A factor that falls over the run, from 1 at generation 0 to `floor`."""

    name: Literal["constant", "linear", "cosine", "plateau"] = "constant"
    """Kind of schedule. `plateau` lowers the factor when the reward stops improving, and is for `es.sigma_schedule`
    only. `cosine` is short for `{name: cosine}`."""
    floor: Annotated[float, Field(ge=1e-12, le=1)] = 0.1
    """Factor at the last generation; with `plateau`, the smallest one. `constant` ignores it."""
    patience: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """For `plateau`, required: number of evaluations of the validation split in a row without a better reward, after
    which the factor is multiplied by `factor` and the count starts again."""
    factor: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.5, exclude_if=lambda value: value == 0.5)
    """For `plateau`: multiplier of the factor at each step."""
    min_delta: Delta = Field(default=0.0, exclude_if=lambda value: value == 0.0)
    """For `plateau`: how much a reward must exceed the best one before it to count as better."""

    @model_validator(mode="after")
    def _of_a_plateau(self) -> ScheduleConfig:
        if self.name == "plateau" and self.patience is None:
            raise ValueError(
                "set patience, which a plateau needs: the number of evaluations of the validation split it waits"
            )
        odd = [name for name in ("patience", "factor", "min_delta") if name in self.model_fields_set]
        if self.name != "plateau" and odd and any(getattr(self, n) != type(self).model_fields[n].default for n in odd):
            raise ValueError(f"{', '.join(odd)} is only for name: plateau, not {self.name}; remove it")
        return self


Schedule = Annotated[ScheduleConfig, BeforeValidator(named, json_schema_input_type=str | ScheduleConfig)]


SHAPINGS = ("zscore", "centered", "ranks", "truncation", "identity")
"""Built-in shapings."""


def _shaping(name: str) -> str:
    if name not in SHAPINGS and ":" not in name:
        raise ValueError(
            f"there is no shaping {shown(name)}; use {', '.join(SHAPINGS)}, or a function of your own as "
            "package.module:function or file.py:function"
        )
    return name


Shaping = Annotated[
    str, AfterValidator(_shaping), WithJsonSchema({"anyOf": [{"enum": list(SHAPINGS)}, OWN], "default": "zscore"}), CODE
]


START = (
    "to begin with, es.sigma: 0.01 in space lora and 0.001 in others, with half of it as es.learning_rate; "
    "`evoalign probe` measures what fits"
)
"""Advice where no width is set. There is no default, since none fits all models and spaces."""


RATE = 0.0005
"""Default of `es.learning_rate`."""


def _rate(value: object) -> object:
    """Accept null for the default, as for settings that may be unset: `cma` needs the rate of another file removed."""
    return RATE if value is None else value


class EsConfig(Section):
    """The evolution strategy. Set exactly one of `sigma` and `noise_multiplier`, the width of the noise."""

    num_generations: Count = 30
    """Updates of the mean."""
    population_size: Annotated[int, Field(ge=2, le=10**7)] = 30
    """Members per generation. More members give a less noisy gradient at a proportional cost."""
    learning_rate: Annotated[Positive, BeforeValidator(_rate, json_schema_input_type=Positive | None)] = RATE
    """With `es.sigma`, the alpha of arXiv 2509.24372, which includes 1/sigma: the step in units of the noise is
    `learning_rate / sigma`. With `es.noise_multiplier`, that step itself. Optimizers `cma` and `sep_cma` have none;
    null removes one that is set."""
    sigma: Positive | None = None
    """Standard deviation of the noise, the same for all tensors."""
    noise_multiplier: Positive | None = None
    """Standard deviation of the noise as a multiple of the mean |W| of each layer's target matrices."""
    shaping: Shaping = "zscore"
    """How scores become coefficients: standardized over members (`zscore`), centered per prompt (`centered`), centered
    ranks (`ranks`), equal for the best quarter and 0 for the others (`truncation`), as they are (`identity`), or by a
    function of your own, as `package.module:function` or `file.py:function`."""
    antithetic: bool = False
    """Evaluate members in pairs with opposite noise. Needs an even population."""
    optimizer: Annotated[OptimizerConfig, BeforeValidator(named, json_schema_input_type=str | OptimizerConfig)] = Field(
        default_factory=OptimizerConfig
    )
    sigma_schedule: Schedule = Field(default_factory=ScheduleConfig)
    learning_rate_schedule: Schedule = Field(default_factory=ScheduleConfig)
    decay: Share = 0.0
    """Share of the distance from the starting weights that each generation takes back: weight decay towards the
    start."""
    settings_learning_rate: Positive = Field(default=0.5, exclude_if=lambda value: value == 0.5)
    """Step size of the logits of `task.settings`, with the coefficients that move the weights. Recorded only if it is
    not 0.5."""

    @model_validator(mode="after")
    def _one_width(self) -> EsConfig:
        if (self.sigma is None) == (self.noise_multiplier is None):
            start = f"; {START}" if self.sigma is None else ""
            raise ValueError(f"set exactly one of es.sigma and es.noise_multiplier{start}")
        if self.antithetic and self.population_size % 2:
            raise ValueError(f"es.antithetic needs an even es.population_size, not {self.population_size}")
        if self.learning_rate_schedule.name == "plateau":
            raise ValueError("es.learning_rate_schedule: plateau is only for es.sigma_schedule; use linear or cosine")
        return self

    @model_validator(mode="after")
    def _adapting(self) -> EsConfig:
        if not self.optimizer.adapts_noise:
            return self
        names = ("antithetic", "decay", "learning_rate", "learning_rate_schedule", "sigma_schedule")
        if odd := [
            f"es.{name}"
            for name in names
            if getattr(self, name) != EsConfig.model_fields[name].get_default(call_default_factory=True)
        ]:
            raise ValueError(
                f"es.optimizer {self.optimizer.name} adapts width and step itself and draws members one by one; remove "
                f"{', '.join(odd)}" + (" (--set es.learning_rate=null does)" if "es.learning_rate" in odd else "")
            )
        if self.shaping == "truncation":
            raise ValueError(
                f"es.optimizer {self.optimizer.name} ranks all members, and es.shaping truncation makes most of them "
                "equal; use zscore"
            )
        if self.population_size < 4:
            raise ValueError(f"es.optimizer {self.optimizer.name} needs an es.population_size of at least 4")
        return self

    @property
    def steps(self) -> int:
        """Length of a whole run: its generations."""
        return self.num_generations

    @property
    def width(self) -> float:
        """`sigma` or `noise_multiplier`: the factor of each tensor's scale at generation 0."""
        return cast(float, self.sigma if self.sigma is not None else self.noise_multiplier)

    @property
    def eta(self) -> float:
        """Step at generation 0 in units of the noise's standard deviation."""
        if self.optimizer.adapts_noise:
            return 1.0
        return self.learning_rate / self.sigma if self.sigma is not None else self.learning_rate


class StoppingConfig(Section):
    """When a run of ES ends before `es.num_generations`: after a plateau, after a time, or whichever comes first."""

    patience: Count | None = None
    """Stop after this many evaluations of the validation split in a row without a better reward. Needs
    `evaluation.every` and a validation split. None: no limit."""
    min_delta: Delta = 0.0
    """How much a reward must exceed the best one before it to count as better."""
    max_hours: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] | None = None
    """Stop after the first generation that ends this many hours into the training, summed over all resumes. Generations
    and the evaluations between them count; loading the model, the evaluation of the start and what follows the last
    generation do not. None: no limit."""

    @model_validator(mode="after")
    def _has_limit(self) -> StoppingConfig:
        if self.patience is self.max_hours is None:
            raise ValueError("set patience, max_hours or both; leave the section out to train to the last generation")
        return self
