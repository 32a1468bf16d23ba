# SPDX-License-Identifier: Apache-2.0
"""Every setting, in one nested, typed tree. Imports no torch, so that reading and checking a config is instant.

A config is YAML. Later files win over earlier ones, `--set a.b=c` wins over files. A key that does not exist is
refused with the nearest name that does; every section that is present is checked, used or not.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from evoalign.errors import ConfigError

FORMAT_VERSION = 1
NO_ES = "missing setting es; es needs at least sigma or noise_multiplier"

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Modules = Annotated[list[str], Field(min_length=1)]
Layers = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys refused; a number may be written as text, as YAML reads 1e-3."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), serialize_by_alias=True)


def _named(value: object) -> object:
    """`cosine` is short for `{name: cosine}`."""
    return {"name": value} if isinstance(value, str) else value


class SpaceConfig(BaseModel):
    """Where the noise lives: a built-in name, or `package.module:Class` with settings of its own."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "lora"

    @model_validator(mode="after")
    def _own_settings_only_for_own_spaces(self) -> SpaceConfig:
        if ":" in self.name:
            return self
        if self.name not in ("lora", "lowrank", "full"):
            raise ValueError(f"unknown space {self.name!r}; use lora, lowrank, full or package.module:Class")
        if self.model_extra:
            raise ValueError(f"{self.name} takes its settings in the section {self.name}: not under space")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Settings of a space of one's own."""
        return dict(self.model_extra or {})


class TaskConfig(Section):
    """What is asked and what counts as good. `name` may be `package.module:Class`."""

    name: str = "conciseness"
    train_data: str | None = None
    test_data: str | None = None
    """A JSON, JSONL or parquet file, or (for `custom`) a hub data set as `hub:NAME` or `hub:NAME:SPLIT`."""
    split: Literal["seeded", "first_last"] = "seeded"
    """How one file is split when there is no `test_data`: a seeded 80/20, or first `train_size`, last `test_size`."""
    train_size: PositiveInt | None = None
    test_size: PositiveInt | None = None
    prompt: Literal["raw", "chat", "short"] | None = None
    """The form of the prompt; None is the task's own default."""
    batch_size: PositiveInt | None = None
    """Training examples a generation; None takes all of them."""
    strip: bool = True
    """Strip white space around a completion before it is scored."""
    rewards: list[str] = Field(default_factory=list)
    """For `custom`: import paths `package.module:function` or `file.py:function` of reward functions."""
    reward_weights: list[float] | None = None


class ModelConfig(Section):
    """A folder, a hub name, or `tiny`: the small base model that comes with the package."""

    name: str = "tiny"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on the CPU, bfloat16 on a GPU."""
    trust_remote_code: Literal[False] = False


class LoraConfig(Section):
    """Noise on the factors of a LoRA adapter, W + (alpha / rank) B A."""

    rank: PositiveInt = 1
    alpha: PositiveFloat = 2.0
    target_layers: Layers | None = None
    target_modules: Modules | None = None
    """Last parts of module names, such as q_proj; None takes every linear matrix of the layers."""
    evolve: Literal["b", "ab"] = "b"
    init_scale: PositiveFloat = 1.0
    """`ab` only: the noise of generation 0 is this many times wider."""


class LowrankConfig(Section):
    """Rank-r noise on the linear matrices themselves, W + (s / sqrt(r)) B A (EGGROLL, arXiv 2511.16652)."""

    rank: PositiveInt = 1
    target_layers: Layers | None = None
    target_modules: Modules | None = None
    """Last parts of module names, such as q_proj; None takes every linear matrix of the layers."""


class FullConfig(Section):
    """Dense Gaussian noise on all tensors (Qiu et al., arXiv 2509.24372)."""

    exclude: list[str] | None = None
    """Tensors whose name contains one of these stay as they are. None: norm weights, where served in half precision."""


class OptimizerConfig(Section):
    """How the ES gradient becomes a step. Momentum and Adam keep state of the mean's size: `lora` only."""

    name: Literal["sgd", "momentum", "adam"] = "sgd"
    momentum: Share = 0.9
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: PositiveFloat = 1e-8


class ScheduleConfig(Section):
    """A factor over the run, from 1 at generation 0 to `floor` at the last one."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    floor: Annotated[float, Field(gt=0, le=1)] = 0.1


Schedule = Annotated[ScheduleConfig, BeforeValidator(_named)]


class EsConfig(Section):
    """The evolution strategy. Exactly one of `sigma` and `noise_multiplier` sets the width of the noise."""

    num_generations: PositiveInt = 30
    population_size: Annotated[int, Field(ge=2)] = 30
    learning_rate: PositiveFloat = 0.0005
    sigma: PositiveFloat | None = None
    noise_multiplier: PositiveFloat | None = None
    shaping: Literal["zscore", "centered", "ranks", "identity"] = "zscore"
    antithetic: bool = False
    optimizer: Annotated[OptimizerConfig, BeforeValidator(_named)] = Field(default_factory=OptimizerConfig)
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


class TransformersConfig(Section):
    """The in-process engine, on the CPU or one GPU."""

    name: Literal["transformers"] = "transformers"
    device: str = "auto"
    """auto, cpu, cuda or cuda:K."""
    memory_gib: PositiveFloat | None = None
    """Room for the cache and logits of one chunk of rows. None: 2; half the free memory on a GPU that is not
    `deterministic`."""
    max_rows: PositiveInt | None = None
    """At most this many sequences in one batch; None leaves it to `memory_gib`."""
    threads: PositiveInt | None = None
    """CPU threads; None leaves torch's own choice."""


class VllmConfig(Section):
    """vLLM in this process, which all members share; needs the extra `vllm`. It takes the GPUs it finds."""

    name: Literal["vllm"]
    tensor_parallel_size: PositiveInt = 1
    """GPUs over which each matrix is split."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for the weights, the float32 master, the adapters and the cache together."""
    kv_cache_gib: PositiveFloat | None = None
    """Room for keys and values. None: what `gpu_memory_utilization` leaves; 1 on the CPU."""
    max_num_seqs: PositiveInt = 1024
    """At most this many sequences in one batch; more wait their turn."""
    max_num_batched_tokens: PositiveInt | None = None
    """At most this many tokens in one step; None leaves vLLM's own choice."""
    max_model_len: PositiveInt | None = None
    """Longest prompt and completion together; None: as many positions as the model has."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy: random weights of the model's shapes, to measure with."""
    enforce_eager: bool = False
    """No CUDA graphs: a faster start and slower steps."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """vLLM's own seed, of dummy weights. None: the run's. Completions are seeded by prompt and sample."""
    attention_backend: str | None = None
    """One of vLLM's, such as FLASH_ATTN or TRITON_ATTN; None leaves vLLM's own choice."""
    population: Literal["auto", "deep", "generic", "stock"] = "auto"
    """How rows get their members' terms. `deep`: inside the kernels of norm, rotation and activation (Qwen2, Qwen3,
    Llama). `generic`: one kernel a layer, any model. `stock`: vLLM's own multi-LoRA. auto: the first that fits."""
    members: PositiveInt | None = None
    """Adapters on the GPU at once; None: the population. A larger population takes its turns."""
    master: Literal["device", "host"] = "device"
    """Where the float32 mean of `lowrank` and `full` lies; `host` frees 4 bytes a weight and makes updates slower."""

    @property
    def device(self) -> str:
        """vLLM is built for one kind of device and takes it."""
        return "auto"


def _engine(value: object) -> object:
    """`vllm` is short for `{name: vllm}`, and no name means transformers."""
    value = _named(value)
    return {"name": "transformers", **cast(Mapping[str, Any], value)} if isinstance(value, Mapping) else value


ENGINES: dict[str, type[Section]] = {"transformers": TransformersConfig, "vllm": VllmConfig}
EngineConfig = Annotated[
    Annotated[TransformersConfig | VllmConfig, Field(discriminator="name")], BeforeValidator(_engine)
]
"""Which engine answers the prompts, and its own settings."""


class EvaluationConfig(Section):
    """How completions are drawn, in training and in evaluation, and what the evaluation repeats."""

    max_tokens: PositiveInt = 128
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    samples: PositiveInt = 1
    seeds: Annotated[list[int], Field(min_length=1)] = Field(default_factory=lambda: [0])
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate the mean on the test split each so many generations; 0: only before and after."""

    @model_validator(mode="after")
    def _draws(self) -> EvaluationConfig:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"evaluation.seeds {self.seeds} names a seed twice")
        if self.temperature == 0 and (self.samples > 1 or len(self.seeds) > 1):
            raise ValueError("samples and seeds only repeat a greedy completion; set evaluation.temperature above 0")
        return self


class GraderConfig(Section):
    """How reward functions of the user's own are run. The rewards of built-in tasks are pure and run in place."""

    isolated: bool = True
    """In a worker process that can be killed. false: in this process, without a time limit."""
    timeout: PositiveFloat = 60.0
    """Seconds that one call of the reward functions may take."""
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a call that timed out, died or raised is made again before the run stops."""


class CheckpointConfig(Section):
    """What is saved on the way. The journal alone rebuilds the mean; a checkpoint makes that faster."""

    every: Annotated[int, Field(ge=0)] | None = None
    """Generations between checkpoints; 0: only at a stop and at the end. None: 10 for `lora`, whose checkpoints are
    small, and 0 for the other spaces."""
    keep_last: PositiveInt = 2
    """The latest so many stay."""
    keep_best: bool = True
    """The best mean by `evaluation.every` is saved and stays too."""


class TrackingConfig(Section):
    """Who else is told what metrics.jsonl records, and which completions are kept."""

    backends: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Each needs the extra of its name."""
    project: str = "evoalign"
    name: str | None = None
    """The run's name there; None is the last part of `output_dir`."""
    completions_every: Annotated[int, Field(ge=0)] = 10
    """Generations between parquet files with the completions of the best, median and worst member; 0: none."""


class ChecksConfig(Section):
    """What a run asks of itself while it trains."""

    canary_every: Annotated[int, Field(ge=0)] = 25
    """Generations between canaries, which prove that members differ; one runs at the start. 0: only that one."""
    control_every: Annotated[int, Field(ge=0)] = 10
    """Generations between A/A controls, which score the unperturbed model twice: the noise floor. 0: none."""
    kl_every: Annotated[int, Field(ge=0)] = 0
    """Generations, or steps of GRPO, between measurements of the divergence from the base model. 0: none. It takes a
    second copy of the model."""
    kl_prompts: PositiveInt = 32
    """Prompts of the test split that such a measurement answers, at temperature 1."""


def _group(value: object) -> object:
    if isinstance(value, int) and value < 2:
        raise ValueError("a group is compared within itself, so it takes 2 completions or more")
    return value


class GrpoConfig(Section):
    """The GRPO baseline (Shao et al., arXiv 2402.03300) on TRL's GRPOTrainer, under TRL's own names.

    Prompts, test split, longest completion and rewards are those of the sections `task` and `evaluation`, so that ES
    and GRPO do the same work. A setting of TRL that is not listed goes into `trl`.
    """

    tune: Literal["full", "lora"] = "full"
    """All weights, or an adapter as the section `lora` says (rank, alpha, target_layers, target_modules)."""
    max_steps: PositiveInt = 100
    """Optimizer steps."""
    num_generations: Annotated[int, Field(ge=2), BeforeValidator(_group)] = 8
    """Completions of each prompt: the group that advantages are taken over."""
    per_device_train_batch_size: PositiveInt = 8
    """Completions in one forward and backward pass."""
    gradient_accumulation_steps: PositiveInt = 1
    """Passes to an optimizer step. A step has this times the batch size (times the processes) completions."""
    steps_per_generation: PositiveInt | None = None
    """Passes that one round of completions lasts for; None: one optimizer step."""
    num_iterations: PositiveInt = 1
    """How often each completion is trained on."""
    learning_rate: PositiveFloat = 1e-6
    lr_scheduler_type: Literal[
        "constant", "linear", "cosine", "constant_with_warmup", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
    ] = "linear"
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    warmup_ratio: Share = 0.0
    optim: str = "adamw_torch"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the base model in the loss. 0 keeps no reference model."""
    epsilon: PositiveFloat = 0.2
    epsilon_high: PositiveFloat | None = None
    delta: PositiveFloat | None = None
    scale_rewards: Literal["group", "batch", "none"] = "group"
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    mask_truncated_completions: bool = False
    temperature: PositiveFloat = 1.0
    """Of the completions to train on; those of the evaluation are drawn as `evaluation` says."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_completion_length: PositiveInt | None = None
    """None: `evaluation.max_tokens`."""
    gradient_checkpointing: bool = False
    bf16: bool | None = None
    """Mixed precision: float32 weights, bfloat16 arithmetic. None: on a GPU."""
    rollouts: Literal["trl", "engine", "es"] = "trl"
    """Where completions come from. `trl`: TRL's own generation, on transformers or vLLM. `engine`: the batched engine
    in this process, as in ES, at `temperature` and `top_p`. `es`: the group of a prompt are the greedy completions of
    as many members of a population, drawn around the present weights as the sections `space` and `es` say."""
    off_policy: Literal["clip", "none"] = "clip"
    """With `rollouts: es`: `clip` takes the member's own probabilities for the old ones of PPO's clipped ratio, `none`
    takes the completions for the policy's own."""
    use_vllm: bool = False
    """Completions come from vLLM through TRL's own integration (`rollouts: trl`); needs the extra `vllm`."""
    trl: dict[str, Any] = Field(default_factory=dict)
    """Any other field of TRL's GRPOConfig, by its name there, such as `vllm_mode` or `deepspeed`."""

    @model_validator(mode="after")
    def _whole_groups(self) -> GrpoConfig:
        passes = self.steps_per_generation or self.gradient_accumulation_steps
        if self.per_device_train_batch_size * passes % self.num_generations:
            raise ValueError(
                f"grpo.per_device_train_batch_size {self.per_device_train_batch_size} x {passes} passes is no multiple "
                f"of grpo.num_generations {self.num_generations}: a round of completions holds whole groups"
            )
        whole, step = passes * self.num_iterations, self.gradient_accumulation_steps
        if whole % step and step % whole:
            raise ValueError(
                f"a round of completions lasts for {whole} passes (grpo.steps_per_generation x grpo.num_iterations) "
                f"and a step for {step} (grpo.gradient_accumulation_steps): one must be a multiple of the other"
            )
        if self.rollouts == "es" and self.tune != "full":
            raise ValueError("grpo.rollouts es perturbs the model's own weights: it needs grpo.tune full")
        if self.rollouts != "trl" and self.use_vllm:
            raise ValueError(f"grpo.use_vllm draws completions itself: it needs grpo.rollouts trl, not {self.rollouts}")
        of_trl = ["grpo.top_k"] if self.top_k else []
        of_trl += [f"grpo.trl.{n}" for n in ("min_p", "repetition_penalty", "generation_kwargs") if n in self.trl]
        if self.rollouts != "trl" and of_trl:
            raise ValueError(
                f"{of_trl[0]} is for TRL's own generation alone: take it out, or set grpo.rollouts trl (it is "
                f"{self.rollouts})"
            )
        return self


class Config(Section):
    """The whole of a run."""

    format_version: Literal[1] = FORMAT_VERSION
    output_dir: str = "runs/evoalign"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    deterministic: bool | None = None
    """None: true on the CPU, false on a GPU."""
    space: Annotated[SpaceConfig, BeforeValidator(_named)] = Field(default_factory=SpaceConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    lowrank: LowrankConfig = Field(default_factory=LowrankConfig)
    full: FullConfig = Field(default_factory=FullConfig)
    es_: EsConfig | None = Field(default=None, alias="es")
    grpo: GrpoConfig = Field(default_factory=GrpoConfig)
    engine: EngineConfig = Field(default_factory=TransformersConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    grader: GraderConfig = Field(default_factory=GraderConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    checks: ChecksConfig = Field(default_factory=ChecksConfig)

    @property
    def es(self) -> EsConfig:
        """The section `es`. Raises ConfigError where there is none: a config for GRPO alone needs none."""
        if self.es_ is None:
            raise ConfigError(NO_ES)
        return self.es_

    @model_validator(mode="after")
    def _together(self) -> Config:
        if self.es_ is None:
            if "grpo" not in self.model_fields_set:
                raise ValueError(NO_ES)
            return self
        if self.es.optimizer.name != "sgd" and self.space.name in ("lowrank", "full"):
            raise ValueError(
                f"es.optimizer {self.es.optimizer.name} keeps state of the size of the model with space "
                f"{self.space.name}; use sgd, or space lora"
            )
        if self.space.name == "lora" and self.lora.evolve == "ab" and self.es.antithetic:
            raise ValueError(
                "es.antithetic with lora.evolve ab can never learn: from A = B = 0 the two members of a pair are the "
                "same model, since (-B)(-A) = B A; set es.antithetic false, or lora.evolve b"
            )
        return self


def load(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Read YAML files, later ones winning, then `a.b=c` overrides. Raises ConfigError."""
    return from_dict(read(files, overrides))


def read(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What `load` checks: the settings of all files and overrides together. Raises ConfigError."""
    tree: dict[str, Any] = {}
    for file in files:
        tree = _merge(tree, _read(Path(file)))
    return parse_overrides(tree, overrides)


def code_of(config: Config) -> list[str]:
    """The import paths that a config names: code that runs with it."""
    return [name for name in (config.space.name, config.task.name, *config.task.rewards) if ":" in name]


def parse_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A nested mapping with `a.b=c` overrides put in. Raises ConfigError."""
    merged = dict(tree)
    for override in overrides:
        merged = _merge(merged, _parse_override(override))
    return merged


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Check a nested mapping. Raises ConfigError naming each wrong value."""
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(cast(Mapping[str, Any], e)) for e in error.errors())) from None


def to_yaml(config: Config) -> str:
    """The resolved config, all defaults written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}; `evoalign init DIR` writes one to start from") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give the YAML file in it") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings; expected keys such as model: and es:")
    return cast(dict[str, Any], tree)


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text!r}: expected key=value, such as es.sigma=0.003")
    try:
        leaf: object = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text!r}: {value!r} is not a YAML value; quote it") from None
    if isinstance(leaf, str):  # YAML 1.1 reads 1e-3 (no dot) as a string
        leaf = _number(leaf)
    for part in reversed(key.split(".")):
        leaf = {part: leaf}
    return cast(dict[str, Any], leaf)


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        if isinstance(value, Mapping):  # `optimizer: adam`, then `optimizer.beta1`: the name stays
            old = _named(old)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(cast(Mapping[str, Any], old), cast(Mapping[str, Any], value)) if both else value
    if "sigma" in high and "noise_multiplier" not in high:  # the later width replaces the earlier one
        merged.pop("noise_multiplier", None)
    if "noise_multiplier" in high and "sigma" not in high:
        merged.pop("sigma", None)
    return merged


def _explain(error: Mapping[str, Any]) -> str:
    where, engine = _without_tag(error["loc"])
    location = ".".join(str(part) for part in where)
    if error["type"] == "extra_forbidden":
        return f"unknown setting {location}{_nearest(where, engine)}"
    if error["type"] == "missing":
        return f"missing setting {location}"
    if error["type"] == "union_tag_invalid":
        return f"{location}.name: unknown engine {error['ctx']['tag']!r}; use {' or '.join(ENGINES)}"
    message = error["msg"].removeprefix("Value error, ")
    given = error["input"]
    shown = "" if isinstance(given, dict | BaseModel) else f" (given: {given!r})"
    return f"{location}: {message}{shown}" if location else message


def _without_tag(location: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], str]:
    """A place as the user wrote it, and the engine meant: pydantic puts the engine's name after `engine`."""
    if len(location) > 1 and location[0] == "engine" and location[1] in ENGINES:
        return (location[0], *location[2:]), str(location[1])
    return location, "transformers"


def _nearest(location: tuple[str | int, ...], engine: str) -> str:
    names = _names(Config, "", engine)
    wanted = ".".join(str(part) for part in location)
    leaf = str(location[-1])
    siblings = {n.rsplit(".", 1)[-1]: n for n in names if n.rpartition(".")[0] == wanted.rpartition(".")[0]}
    near = difflib.get_close_matches(leaf, siblings, n=1)
    if near:
        return f"; did you mean {siblings[near[0]]}?"
    others = [other for other, section in ENGINES.items() if leaf in section.model_fields]
    if location[0] == "engine" and others:
        return f"; it belongs to engine {others[0]}, and engine.name is {engine}"
    elsewhere = [n for n in names if n.rsplit(".", 1)[-1] == leaf]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known here: {', '.join(sorted(siblings))}"


def _names(section: type[BaseModel], prefix: str, engine: str) -> list[str]:
    found: list[str] = []
    for name, info in section.model_fields.items():
        name = info.alias or name
        found.append(prefix + name)
        below = ENGINES[engine] if prefix + name == "engine" else EsConfig if name == "es" else info.annotation
        if isinstance(below, type) and issubclass(below, BaseModel):
            found += _names(below, f"{prefix}{name}.", engine)
    return found
