# SPDX-License-Identifier: Apache-2.0
"""Parts of a run from its config, checked in order of cost so that bad input is reported early."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from evoalign import engines, evaluation, optimizer, spaces, tasks, tokens
from evoalign.config import Config, from_dict, load
from evoalign.config.joint import DECODING
from evoalign.cost import estimate
from evoalign.engines import Engine
from evoalign.engines.specs import refuse_not_finite, specs_of_config
from evoalign.errors import ConfigError, DataError, EvoalignError, ModelError, is_out_of_memory, shown
from evoalign.evaluation import Evaluation
from evoalign.rewards import scorer
from evoalign.rewards.objective import Objective, refuse_by_prompt
from evoalign.rollouts import Run
from evoalign.rundir.journal import Journal
from evoalign.spaces import Space
from evoalign.tasks import Data, Split, Task
from evoalign.tasks.grading import with_validation
from evoalign.tasks.joint import Settings
from evoalign.tokens import Tokens
from evoalign.types import Example, Facts, Layout, TensorSpec

ConfigLike = Config | Mapping[str, Any] | str | Path
Reward = Callable[..., Any]
Rewards = Reward | Sequence[Reward]


@dataclass(frozen=True, slots=True)
class Served:
    """A model in an engine that is ready for a space. Close it after use."""

    config: Config
    tokens: Tokens
    engine: Engine
    space: Space
    layout: Layout
    facts: Facts

    def close(self) -> None:
        """Free the model."""
        self.engine.close()


@dataclass(frozen=True, slots=True)
class Parts(Served):
    """Everything a run needs. Close it: it holds the model and, for user-defined rewards, a worker process."""

    task: Task
    data: Data
    objective: Objective
    settings: Settings = field(default_factory=Settings)

    @property
    def state(self) -> dict[str, float]:
        """State of the objective and of the settings, as the journal records it."""
        return {**self.objective.state, **self.settings.state}

    @property
    def decoding(self) -> Config:
        """The config with the sampling that the likeliest settings name."""
        return self.config.decoded(self.settings.chosen(self.settings.mode()))

    def rows(self, split: Split) -> Sequence[Example]:
        """Return the rows of a split under the likeliest settings."""
        return self.settings.under(self.data.of(split), self.settings.mode())

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the state that a run recorded. Raises ResumeError for that of another objective or other settings."""
        ours = {name: value for name, value in state.items() if name in self.settings.state}
        self.settings.restore(ours)
        self.objective.restore({name: value for name, value in state.items() if name not in ours})

    @property
    def max_score(self) -> float:
        """The highest score, where one is known: the task's `max_reward`, unless another objective than the task's own
        makes the scores."""
        return self.task.max_reward if self.objective is self.task.weighted else math.inf

    def evaluate(self, split: Split = "test") -> Evaluation:
        """Evaluate the mean on a split."""
        how = self.decoding.evaluation
        return evaluation.evaluate(self.engine, self.tokens, self.task, self.rows(split), how)

    def run(
        self,
        journal: Journal,
        evaluate_mean: Callable[[], Mapping[str, float] | None] | None = None,
        plateaus: Callable[[], int] | None = None,
    ) -> Run:
        """Return what the loop needs, writing to a journal; see `Run`."""
        return Run(
            self.config, self.task, self.data.train, self.engine, self.tokens, journal, self.objective,
            evaluate_mean, plateaus, self.settings,
        )  # fmt: skip

    def close(self) -> None:
        self.engine.close()
        self.task.close()


def object_given(task: object, reward: object) -> str | None:
    """Return "task" or "reward" if that was passed as a Python object, else None."""
    return "task" if task is not None else "reward" if reward is not None else None


def as_config(config: ConfigLike) -> Config:
    """Return a validated Config from any of its forms. Raises ConfigError."""
    if isinstance(config, str | Path):
        config = load(config)
    return engines.read(config if isinstance(config, Config) else from_dict(config))


def with_form(config: Config, run: Path | None = None) -> Config:
    """Return the config with the `task.prompt` that a custom task leaves open: that of `run`, or the model's.

    It is `chat` if the tokenizer has a chat template, else None, which is `raw` for text. A run of an earlier release
    recorded None, and its text prompts stay raw.
    """
    if config.task.prompt is not None:
        return config
    form = None
    with suppress(EvoalignError):  # whatever cannot be read is reported where it is used
        if not tasks.takes_any_form(config.task):
            return config
        made = None if run is None or not (run / "config.yaml").is_file() else load([run / "config.yaml"]).task
        if made is not None and tasks.is_same(made, config.task):
            form = made.prompt
        elif tokens.load(config.model).tokenizer.chat_template:
            form = "chat"
    return config.model_copy(update={"task": config.task.model_copy(update={"prompt": form})})


def assemble(config: Config, task: Task | None = None, reward: Rewards | None = None) -> Parts:
    """Load and check everything, cheapest first."""
    chosen, data = task_and_data(config, task, reward)
    try:
        objective = chosen.objective()
        _refuse_memory(config)
        served = serve(config)
    except BaseException:
        chosen.close()
        raise
    kept = {f.name: getattr(served, f.name) for f in fields(served)}
    return Parts(**kept, task=chosen, data=data, objective=objective, settings=Settings.of(config))


def _refuse_memory(config: Config) -> None:
    """Raise ModelError if weights and mean exceed the free memory, before they are loaded."""
    if estimate.on_gpu(config) or not config.engine.serves_here:
        return
    refused, dtype = None, estimate.served_dtype(config)
    with suppress(Exception):  # of the model's files or of a custom space: reported where the weights are loaded
        specs = specs_of_config(config)
        refused = estimate.refusal(config, specs, layout_of(spaces.create(config), specs, dtype), dtype)
    if refused is not None:
        raise ModelError(refused)


def serve(config: Config) -> Served:
    """Load the model and make the engine ready for the config's space."""
    config = engines.read(config)
    tokens_ = tokens.load(config.model, config.task.template_kwargs)
    engine = engines.create(config, tokens_)
    try:
        space, layout, facts = start(config, engine)
    except BaseException:
        engine.close()
        raise
    return Served(config, tokens_, engine, space, layout, facts)


def task_and_data(config: Config, task: Task | None, reward: Rewards | None) -> tuple[Task, Data]:
    """Return the task and its splits. Close the task: user-defined code scores in a separate process."""
    rewards = None if reward is None else ([reward] if callable(reward) else list(reward))
    if task is not None and rewards is not None:
        raise ConfigError("give a task or a reward, not both: a task has its own reward")
    made = task or tasks.create(config.task, rewards)
    if config.task.fitness is not None and made.set_objective is None:
        raise ConfigError(
            f"task.fitness {config.task.fitness} does not apply to the given task {made.name}; make that task with "
            "TaskConfig(fitness=...)"
        )
    tasks.refuse_unread(made, config.task.settings)
    _refuse_odd_commands(made)
    _refuse_cut_answers(config, made)
    made.take_scorer(config.scorer)
    made.take_run(config.grader, is_serial=config.deterministic is True)
    chosen = tasks.isolate(made, config.grader)
    try:
        objective = chosen.objective()  # one that cannot be made is refused here, a dry run's too
        if config.es_ is not None:
            refuse_by_prompt(objective, config.es)
        custom = config.task.objective is not None and config.task.objective.name != "weighted_sum"
        if config.task.settings and (objective.asks_mean or custom):
            raise ConfigError(
                f"objective {objective.name} may read the rows, which differ by member with task.settings; remove the "
                "settings, or set task.objective: weighted_sum"
            )
        if chosen.player == "given":
            _refuse_sampling(config, chosen)
        data = chosen.load_data(config.seed)
        for split, examples in (("training", data.train), ("test", data.test)):
            if not examples:
                raise DataError(f"task {chosen.name}: the {split} split is empty; give it at least one example")
        data = with_validation(chosen, data, config.task)
        if config.follows_validation is not None and not data.validation:
            raise ConfigError(
                f"{config.follows_validation} needs a validation split, and task {chosen.name} has none: set "
                "task.validation_size or task.validation_data; the test split is never used for it"
            )
        data = Settings.of(config).split(data, 0)
        _ = [examples[0] for examples in (data.train, data.test, data.validation) if examples]  # refuses taken names
    except BaseException:
        chosen.close()
        raise
    return chosen, data


def _refuse_sampling(config: Config, task: Task) -> None:
    """Raise ConfigError for settings that generate or repeat completions, for a task that gives them."""
    if not config.engine.scores_given:
        raise ConfigError(
            f"task {task.name} scores given completions, which engine {config.engine.name} does not do as it is set; "
            "set engine.name transformers and engine.decoder library (with ray: engine.replica.decoder)"
        )
    drawn = config.evaluation
    repeats = {"task.samples": config.task.samples or 1, "evaluation.samples": drawn.samples,
               "evaluation.seeds": len(drawn.seeds)}  # fmt: skip
    unused = [f"task.settings.{name}" for name in DECODING if name in config.task.settings]
    if unused := [*unused, *(name for name, count in repeats.items() if count > 1)]:
        raise ConfigError(f"task {task.name} samples nothing: remove {', '.join(unused)}")


def _refuse_odd_commands(task: Task) -> None:
    """Raise ConfigError if the task's `commands` are not a mapping of strings."""
    commands: Any = task.commands
    if not isinstance(commands, Mapping) or not all(isinstance(t, str) for pair in commands.items() for t in pair):
        raise ConfigError(
            f"task {task.name}: its commands are {shown(commands)}; return a mapping of command to purpose"
        )


def _refuse_cut_answers(config: Config, task: Task) -> None:
    """Raise ConfigError for a stop text that would cut off the tag by which the task finds the answer."""
    for section, settings in (("sampling", config.sampling), ("evaluation", config.evaluation)):
        for stop in settings.stop if task.graded_text else ():
            cut = stop in task.graded_text or task.graded_text in stop
            if cut and not (settings.keep_stop and task.graded_text in stop):
                raise ConfigError(
                    f"{section}.stop {shown(stop)}: a completion would end before the {task.graded_text} that task "
                    f"{task.name} looks for; set sampling.stop: ['{task.graded_text}'] and sampling.keep_stop: true"
                )


def check_scorer(config: Config, task: Task) -> None:
    """Raise ModelError, ConfigError if the models that score would not load. No weights are read."""
    if task.asks_scorer and config.scorer is not None:
        scorer.check(config.scorer)


def start(config: Config, engine: Engine) -> tuple[Space, Layout, Facts]:
    """Make an engine ready for the config's space. Raises ModelError if the memory does not suffice.

    Without a section `es` the mean is served and cannot be moved.
    """
    space = spaces.create(config)
    specs = engine.specs()
    refuse_not_finite(specs)
    layout = layout_of(space, specs, engine.dtype)
    moved_by = optimizer.create(config.es, layout) if config.es_ is not None else None
    space = spaces.adapted(space, moved_by)
    try:
        facts = engine.start(space, layout, moved_by, config.decays)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"the {layout.parameters:,} numbers that space {space.name} evolves do not fit the memory; {space.smaller}"
        ) from error
    return space, layout, facts


def layout_of(space: Space, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
    """Return the tensors that evolve. Raises ModelError if there are none."""
    layout = space.layout(specs, dtype)
    if not layout.tensors:
        raise ModelError(
            f"space {space.name} finds nothing to evolve: the chosen layers have no nn.Linear matrix; "
            "use space full, or another model"
        )
    return layout
