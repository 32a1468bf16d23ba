# SPDX-License-Identifier: Apache-2.0
"""The config of a run, with its smaller sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from evoalign.config.base import FORMAT_VERSION, Count, Every, Place, Section, Seed, listed, named
from evoalign.config.decoding import EvaluationConfig, SamplingConfig, shared
from evoalign.config.engines import DEFAULT, ENGINES, EngineConfig
from evoalign.config.es import EsConfig, StoppingConfig
from evoalign.config.grpo import GrpoConfig
from evoalign.config.joint import DECODING, Chosen, likeliest, refusal
from evoalign.config.outside import INSIDE, MODEL, TRACKER
from evoalign.config.scorer import ScorerConfig
from evoalign.config.spaces import FACTS, SECTIONS, FullConfig, LoraConfig, LowrankConfig, SpaceConfig, SpaceSection
from evoalign.config.task import GraderConfig, TaskConfig
from evoalign.errors import ConfigError, shown


class ModelConfig(Section):
    """The model that the run starts from: a folder, a hub name, or `tiny`, the small model that comes with the package.

    A folder may hold a model, a PEFT adapter, an export, a run or a saved mean of one. Adapters are first merged into
    their base.
    """

    name: Annotated[str, MODEL] = "tiny"
    """A folder, a hub name, or `tiny`."""
    revision: Annotated[str | None, INSIDE] = None
    """Branch, tag or commit of a hub model. Set a commit where the run has to be repeated. None: the default branch."""
    base: Annotated[str | None, MODEL] = Field(default=None, min_length=1, exclude_if=lambda value: value is None)
    """Folder or hub name of an adapter's base model. None: the one that the adapter's own files name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype in which the model is served. `auto`: float32 on a CPU, bfloat16 on a GPU."""

    @model_validator(mode="before")
    @classmethod
    def _runs_no_code(cls, tree: object) -> object:
        """Accept `trust_remote_code: false` of earlier configs, the only value there was."""
        if not isinstance(tree, Mapping):
            return tree
        model = dict(cast("Mapping[str, Any]", tree))
        if model.pop("trust_remote_code", False) is not False:
            raise ConfigError("model.trust_remote_code cannot be set: a model's own Python files are never run")
        return model

    def served_dtype(self, *, on_gpu: bool) -> str:
        """Return the dtype in which the model is served."""
        return ("bfloat16" if on_gpu else "float32") if self.dtype == "auto" else self.dtype

    @property
    def trained_dtype(self) -> str:
        """Dtype of the weights that GRPO trains: float32 unless set, as mixed precision needs it."""
        return "float32" if self.dtype == "auto" else self.dtype


class CheckpointConfig(Section):
    """Which means are saved during training. The journal alone can rebuild any mean; a checkpoint makes that faster."""

    every: Every | None = None
    """Generations between checkpoints; 0: only at a stop and at the end. None: 10 with space `lora`, whose checkpoints
    are small, and 0 with other spaces."""
    keep_last: Count = 2
    """Number of most recent checkpoints to keep."""
    keep_best: bool = True
    """Also save and keep the mean with the best reward on the validation split, evaluated every `evaluation.every`
    generations."""


TRACKERS = {
    "tensorboard": "evoalign.tracking.tensorboard:TensorBoard",
    "trackio": "evoalign.tracking.trackio:Trackio",
    "wandb": "evoalign.tracking.wandb:WeightsAndBiases",
}
"""The classes of the trackers that come with the package, by library."""


def _tracker(name: str) -> str:
    if name not in TRACKERS and ":" not in name:
        raise ValueError(f"unknown tracker {shown(name)}; use {', '.join(TRACKERS)} or package.module:Class")
    return name


Trackers = list[Annotated[str, AfterValidator(_tracker)]]


class TrackingConfig(Section):
    """Experiment trackers that get the metrics, and which completions are saved."""

    backends: Annotated[Trackers, listed(Trackers), TRACKER] = Field(default_factory=list)
    """Trackers: `tensorboard`, `trackio` or `wandb`, which need the extra of their name, or a custom
    `package.module:Class`. A single one needs no list."""
    project: Annotated[str, INSIDE] = "evoalign"
    """Name of the project at the trackers."""
    name: Annotated[str | None, INSIDE] = None
    """Name of the run at the trackers. None: the last part of `output_dir`."""
    completions_every: Every = 10
    """Generations between parquet files with the completions of the best, median and worst member, and with several
    rewards between histograms of these; 0: none."""


class ChecksConfig(Section):
    """Checks and measurements that a run makes of itself."""

    canary_every: Every = 25
    """Generations between canaries, which test that the engine applies each member's own weights. 0: only at the
    start."""
    control_every: Every = 10
    """Generations between A/A controls, which score the unperturbed model twice to measure the noise floor. 0: no
    controls."""
    kl_every: Every = 0
    """Generations, or steps of GRPO, between measurements of the KL divergence from the base model, which need memory
    for a second copy of the model. 0: no measurements."""
    kl_prompts: Count = 32
    """Prompts of the test split in each KL measurement, sampled at temperature 1."""
    kl_tokens: Count = 2000
    """Sample the prompts of a KL measurement until this many tokens are generated, at most 64 times per prompt."""
    placebo: Annotated[int, Field(ge=0, le=10**6)] | None = None
    """Placebos to evaluate at the end of a run of ES: the run replayed with shuffled coefficients, which separates
    learning from drift. None: up to 5, as long as they cost less than a tenth of the run's tokens. 0: no placebos."""
    perplexity: bool | None = None
    """Whether to measure, at the end, the perplexity of the test completions under the base model. It needs memory for
    a second copy of the model. None: true where the engine runs in this process."""


class Config(Section):
    """The config of a run."""

    format_version: Literal[1] = FORMAT_VERSION
    """Version of the file format. There is only one so far."""
    output_dir: Annotated[Place, INSIDE] = "runs/evoalign"  # for a run, always the folder where it is
    """Folder of the run. It has to be new or empty, unless `--resume` or `--overwrite` is given."""
    seed: Seed = 0
    """Seed of the noise, the data splits, the batches and the sampling."""
    deterministic: bool | None = None
    """Whether torch uses only deterministic kernels, so that two runs have the same bits. None: true on a CPU, false on
    a GPU, where these kernels are slower."""
    report: bool = True
    """Whether a run writes `report.html` at its end, one page with its results."""
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
    """When the run may end before its last generation. None: never."""
    grpo: GrpoConfig = Field(default_factory=GrpoConfig)
    engine: EngineConfig = Field(default_factory=lambda: ENGINES[DEFAULT].model_validate({}))
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    grader: GraderConfig = Field(default_factory=GraderConfig)
    scorer: ScorerConfig | None = Field(default=None, exclude_if=lambda value: value is None)
    """Models that score completions, for tasks that use such models. None: no models."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    checks: ChecksConfig = Field(default_factory=ChecksConfig)

    @property
    def es(self) -> EsConfig:
        """The section `es`. Raises ConfigError where it is missing, as in a config for GRPO only."""
        if self.es_ is None:
            raise ConfigError(
                "missing setting es; es needs at least sigma or noise_multiplier. A config with a section grpo alone "
                "is for GRPO: evoalign grpo CONFIG, or --method grpo"
            )
        return self.es_

    def trained_by(self, method: Literal["es", "grpo"]) -> EsConfig | GrpoConfig:
        """Return the section of a training method. Raises ConfigError where it is missing.

        For GRPO a section `es` is enough: TRL's defaults apply then.
        """
        if method == "grpo" and (self.es_ is not None or "grpo" in self.model_fields_set):
            return self.grpo
        return self.es

    @model_validator(mode="before")
    @classmethod
    def _decoding(cls, tree: Any) -> Any:
        return shared(cast(Mapping[str, Any], tree)) if isinstance(tree, Mapping) else tree

    @property
    def decays(self) -> bool:
        """Whether updates pull the mean back to the starting weights, which then have to be kept."""
        return self.es_ is not None and self.es_.decay > 0

    @property
    def follows_validation(self) -> str | None:
        """The setting that makes the training depend on rewards of the validation split, or None."""
        if self.stopping is not None and self.stopping.patience is not None:
            return "stopping.patience"
        if self.es_ is not None and self.es_.sigma_schedule.name == "plateau":
            return "es.sigma_schedule plateau"
        return None

    @property
    def measures_nats(self) -> bool:
        """Whether `checks.perplexity` is on; by default where the engine runs in this process."""
        wanted = self.checks.perplexity
        return self.engine.serves_here if wanted is None else wanted

    @property
    def section(self) -> SpaceSection:
        """The section of the configured space; the defaults for a custom space."""
        sections: dict[str, SpaceSection] = {name: getattr(self, name) for name in SECTIONS}
        return sections.get(self.space.name) or FACTS.get(self.space.name, SpaceSection)()

    def decoded(self, chosen: Chosen) -> Config:
        """Return the config with the sampling, in training and evaluation, that chosen settings name."""
        changes = {name: value for name, value in chosen.items() if name in DECODING}
        if not changes:
            return self
        sampling = SamplingConfig.model_validate({**self.sampling.model_dump(), **changes})
        evaluation = EvaluationConfig.model_validate({**self.evaluation.model_dump(), **changes})
        return self.model_copy(update={"sampling": sampling, "evaluation": evaluation})

    def fixed(self, state: Mapping[str, float]) -> Config:
        """Return the config with only the likeliest option of each setting, as a saved mean is evaluated.

        `state` is the recorded one of `task.settings`.
        """
        chosen = likeliest(self.task.settings, state)
        if not chosen:
            return self
        only = {n: s.model_copy(update={s.kind: [chosen[n]]}) for n, s in self.task.settings.items()}
        task = self.task.model_copy(update={"settings": only})
        return self.decoded(chosen).model_copy(update={"task": task})

    def unused(self, *, grpo: bool) -> list[str]:
        """Return the sections that a run of GRPO, or of ES, does not read. A custom space may read those of all
        spaces."""
        has_members = not grpo or self.grpo.samples_members
        own = has_members and type(self.section) not in SECTIONS.values()
        adapter = [self.lora] if grpo and self.grpo.tune == "lora" else []
        used = [*([self.section] if has_members else []), *adapter]
        spaces = [name for name in SECTIONS if not own and not any(getattr(self, name) is section for section in used)]
        return [*spaces, *([] if has_members else ["space", "es"]), *([] if grpo else ["grpo"])]

    def as_policy(self, *, adapter: bool, own_engine: bool = True) -> Config:
        """Return the config with which a run of GRPO evaluates its policy: in the training dtype, in its own process.

        Its adapter follows from the section `lora`, whatever `space` is.
        """
        changes: dict[str, Any] = {"model": self.model.model_copy(update={"dtype": self.model.trained_dtype})}
        if adapter:
            changes |= {"space": SpaceConfig(name="lora"), "es_": None}
        if own_engine:
            changes["engine"] = self.engine.in_process()
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _together(self) -> Config:
        refused = self.section.refusal(self.es) if self.es_ is not None else None
        most, repeats = (
            min(self.sampling.max_tokens, self.evaluation.max_tokens),
            max(self.evaluation.samples, len(self.evaluation.seeds), self.task.samples or 1) > 1,
        )
        draws = None if self.es_ is None else self.es_.population_size // (2 if self.es_.antithetic else 1)
        refused = refused or refusal(self.task.settings, most, repeats, draws)
        if refused is not None:
            raise ValueError(refused)
        if self.follows_validation is not None and not self.evaluation.every:
            raise ValueError(
                f"{self.follows_validation} needs evaluations during training: set evaluation.every, such as 10, and a "
                "validation split, such as task.validation_size: 100"
            )
        if (self.task.samples or 1) > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"task.samples {self.task.samples} only repeats a greedy completion; set sampling.temperature above 0"
            )
        return self
