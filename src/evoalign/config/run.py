# SPDX-License-Identifier: Apache-2.0
"""The whole of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from evoalign.config.base import FORMAT_VERSION, Count, Every, Place, Section, Seed, listed, named
from evoalign.config.decoding import EvaluationConfig, SamplingConfig, shared
from evoalign.config.engines import DEFAULT, ENGINES, EngineConfig
from evoalign.config.es import NO_ES, EsConfig
from evoalign.config.grpo import GrpoConfig
from evoalign.config.model import ModelConfig
from evoalign.config.outside import INSIDE, TRACKER
from evoalign.config.scorer import ScorerConfig
from evoalign.config.spaces import (
    SECTIONS,
    FullConfig,
    LoraConfig,
    LowrankConfig,
    SpaceConfig,
    SpaceSection,
)
from evoalign.config.stopping import StoppingConfig
from evoalign.config.task import GraderConfig, TaskConfig
from evoalign.errors import ConfigError, shown


class CheckpointConfig(Section):
    """What is saved on the way. The journal alone rebuilds the mean; a checkpoint makes that faster."""

    every: Every | None = None
    """Generations between checkpoints; 0: only at a stop and at the end. None: 10 where the mean is an adapter, as
    with `lora`, for it is small, and 0 with the other spaces."""
    keep_last: Count = 2
    """The latest so many stay."""
    keep_best: bool = True
    """The best mean by `evaluation.every` is saved and stays too."""


TRACKERS = {
    "tensorboard": "evoalign.tracking.tensorboard:TensorBoard",
    "trackio": "evoalign.tracking.trackio:Trackio",
    "wandb": "evoalign.tracking.wandb:WeightsAndBiases",
}
"""Where the trackers that are shipped lie, by the name of their library."""


def _tracker(name: str) -> str:
    if name not in TRACKERS and ":" not in name:
        raise ValueError(f"unknown tracker {shown(name)}; use {', '.join(TRACKERS)} or package.module:Class")
    return name


Trackers = list[Annotated[str, AfterValidator(_tracker)]]


class TrackingConfig(Section):
    """Who else is told what metrics.jsonl records, and which completions are kept."""

    backends: Annotated[Trackers, listed(Trackers), TRACKER] = Field(default_factory=list)
    """tensorboard, trackio, wandb, each of which needs the extra of its name; or one's own, `package.module:Class`. One
    alone needs no list."""
    project: Annotated[str, INSIDE] = "evoalign"
    name: Annotated[str | None, INSIDE] = None
    """The run's name there; None is the last part of `output_dir`."""
    completions_every: Every = 10
    """Generations between parquet files with the completions of the best, median and worst member; 0: none."""


class ChecksConfig(Section):
    """What a run asks of itself while it trains."""

    canary_every: Every = 25
    """Generations between canaries, which prove that members differ; one runs at the start. 0: only that one."""
    control_every: Every = 10
    """Generations between A/A controls, which score the unperturbed model twice: the noise floor. 0: none."""
    kl_every: Every = 0
    """Generations, or steps of GRPO, between measurements of the divergence from the base model. 0: none. It takes a
    second copy of the model."""
    kl_prompts: Count = 32
    """Prompts of the test split that such a measurement answers, at temperature 1."""
    kl_tokens: Count = 2000
    """Each of these prompts is answered again until so many tokens are there, 64 times at the most."""
    placebo: Annotated[int, Field(ge=0, le=10**6)] | None = None
    """Placebos at the end of a run of ES, which tell learning from drift: the run replayed with shuffled coefficients.
    None: up to 5, as many as cost under a tenth of the run by count of tokens. 0: none."""
    perplexity: bool | None = None
    """Whether the base model is asked at the end how likely it finds the completions of the test split. It takes a
    second copy of the model. None: where the engine serves in this process."""


class Config(Section):
    """The whole of a run."""

    format_version: Literal[1] = FORMAT_VERSION
    output_dir: Annotated[Place, INSIDE] = "runs/evoalign"  # that of a run is where the run is
    seed: Seed = 0
    deterministic: bool | None = None
    """None: true on the CPU, false on a GPU."""
    report: bool = True
    """Whether a run writes `report.html` at its end: all that it came to, in one page."""
    space: Annotated[SpaceConfig, BeforeValidator(named, json_schema_input_type=str | SpaceConfig)] = Field(
        default_factory=SpaceConfig
    )
    task: TaskConfig = Field(default_factory=TaskConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    lowrank: LowrankConfig = Field(default_factory=LowrankConfig)
    full: FullConfig = Field(default_factory=FullConfig)
    es_: EsConfig | None = Field(default=None, alias="es")
    stopping: StoppingConfig | None = Field(default=None, exclude_if=lambda value: value is None)
    """Whether the run may end before its last generation. Written down only where it is set."""
    grpo: GrpoConfig = Field(default_factory=GrpoConfig)
    engine: EngineConfig = Field(default_factory=lambda: ENGINES[DEFAULT].model_validate({}))
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    grader: GraderConfig = Field(default_factory=GraderConfig)
    scorer: ScorerConfig | None = Field(default=None, exclude_if=lambda value: value is None)
    """The models that score responses, for tasks that ask some. Written down only where it is set."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    checks: ChecksConfig = Field(default_factory=ChecksConfig)

    @property
    def es(self) -> EsConfig:
        """The section `es`. Raises ConfigError where there is none: a config for GRPO alone needs none."""
        if self.es_ is None:
            raise ConfigError(NO_ES)
        return self.es_

    @model_validator(mode="before")
    @classmethod
    def _decoding(cls, tree: Any) -> Any:
        return shared(cast(Mapping[str, Any], tree)) if isinstance(tree, Mapping) else tree

    @property
    def decays(self) -> bool:
        """Whether updates pull the mean towards where it started, which then has to be kept."""
        return self.es_ is not None and self.es_.decay > 0

    @property
    def follows_validation(self) -> str | None:
        """The setting by which the training depends on the rewards of the validation split on the way, if one does."""
        if self.stopping is not None and self.stopping.patience is not None:
            return "stopping.patience"
        if self.es_ is not None and self.es_.sigma_schedule.name == "plateau":
            return "es.sigma_schedule plateau"
        return None

    @property
    def measures_nats(self) -> bool:
        """Whether the base model is asked at the end how likely it finds what was said: `checks.perplexity`.

        Unset, where the engine serves in this process, as the second copy of the model does.
        """
        wanted = self.checks.perplexity
        return self.engine.serves_here if wanted is None else wanted

    @property
    def section(self) -> SpaceSection:
        """The settings of the space that is named, with what follows from them; of one of one's own, what is usual."""
        sections: dict[str, SpaceSection] = {name: getattr(self, name) for name in SECTIONS}
        return sections.get(self.space.name, SpaceSection())

    def unused(self, *, grpo: bool) -> list[str]:
        """Sections that a run of GRPO, or else of ES, does not read. A space of one's own may read those of all."""
        has_members = not grpo or self.grpo.rollouts == "es"
        own = has_members and type(self.section) is SpaceSection
        adapter = [self.lora] if grpo and self.grpo.tune == "lora" else []
        used = [*([self.section] if has_members else []), *adapter]
        spaces = [name for name in SECTIONS if not own and not any(getattr(self, name) is section for section in used)]
        return [*spaces, *([] if has_members else ["space", "es"]), *([] if grpo else ["grpo"])]

    def as_policy(self, *, adapter: bool, own_engine: bool = True) -> Config:
        """As a run of GRPO evaluates itself: in the dtype it trains in, and by its own engine.

        The section `space` is of no matter to it: an adapter is what the section `lora` says.
        """
        changes: dict[str, Any] = {"model": self.model.model_copy(update={"dtype": self.model.trained_dtype})}
        if adapter:
            changes |= {"space": SpaceConfig(name="lora"), "es_": None}
        if own_engine:
            changes["engine"] = self.engine.in_process()
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _together(self) -> Config:
        refusal = self.section.refusal(self.es) if self.es_ is not None else None
        if refusal is not None:
            raise ValueError(refusal)
        if self.follows_validation is not None and not self.evaluation.every:
            raise ValueError(
                f"{self.follows_validation} needs rewards on the way: set evaluation.every, such as 10, and a "
                "validation split, such as task.validation_size: 100"
            )
        if (self.task.samples or 1) > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"task.samples {self.task.samples} only repeats a greedy completion; set sampling.temperature above 0"
            )
        return self
