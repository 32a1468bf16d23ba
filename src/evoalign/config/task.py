# SPDX-License-Identifier: Apache-2.0
"""What is asked, and how rewards of the user's own are run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from evoalign.config.base import Count, Gib, Place, Section, Texts, named
from evoalign.config.outside import CODE, DATA, INSIDE, SCRIPT
from evoalign.errors import shown

Weight = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]


class ObjectiveConfig(BaseModel):
    """How rewards become scores: `weighted_sum`, or `package.module:Class` or `file.py:Class` and its own settings."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: Annotated[str, CODE]

    @property
    def options(self) -> dict[str, Any]:
        """What the objective is made with."""
        return dict(self.model_extra or {})


TASKS = {
    "conciseness": "evoalign.tasks.conciseness:Conciseness",
    "countdown": "evoalign.tasks.countdown.task:Countdown",
    "custom": "evoalign.tasks.custom:Custom",
    "gsm8k": "evoalign.tasks.mathematics.gsm8k:Gsm8k",
    "math": "evoalign.tasks.mathematics.competition:Math",
    "safety": "evoalign.tasks.safety.task:Safety",
}
"""The shipped tasks and where their classes are."""
WITH_SETTINGS = frozenset({"safety"})
"""Those with settings of their own, which their classes say and check, as those of other classes are."""
OBJECTIVES = {
    "lagrangian": "evoalign.tasks.safety.objective:Lagrangian",
    "weighted_sum": "evoalign.rewards.objective:WeightedSum",
}
"""The shipped objectives and where their classes are."""


class TaskConfig(Section):
    """What is asked and what counts as good. `name` may be `package.module:Class`, with settings of its own."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, CODE] = "conciseness"
    train_data: Annotated[Place | None, DATA] = None
    test_data: Annotated[Place | None, DATA] = None
    """A JSON, JSONL, CSV, TSV or parquet file, a folder of such files or of `save_to_disk` (`FOLDER:SPLIT`), or a hub
    data set as `hub:NAME`, `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`."""
    columns: Annotated[dict[str, str], INSIDE] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """Columns under other names: with `{prompt: question}` the file's `question` is the task's `prompt`. Written down
    only where it is set."""
    split: Literal["seeded", "first_last"] = "seeded"
    """How one file is split when there is no `test_data`: a seeded 80/20, or first `train_size`, last `test_size`."""
    train_size: Count | None = None
    test_size: Count | None = None
    validation_data: Annotated[Place | None, DATA] = Field(default=None, exclude_if=lambda value: value is None)
    """Examples to choose by: a file or a hub data set as for `test_data`. What is chosen, such as the best mean on the
    way or the settings of a search, is chosen on these and never on the test split. Written
    down only where it is set."""
    validation_size: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """With `validation_data`, its first rows. Without, so many rows are taken from the training split and not trained
    on: those that follow the first `train_size`, or else the last. Written down only where it is set."""
    prompt: Literal["raw", "chat", "short", "chat_opened", "conversation"] | None = None
    """The form of the prompt; None is the task's own default. `chat_opened` (`countdown`) is `chat` with the beginning
    of the answer, `conversation` (`safety`) a text with the words USER and ASSISTANT. `raw` has no messages, and so no
    `system_prompt`."""
    system_prompt: Annotated[str | None, INSIDE] = Field(
        default=None, min_length=1, exclude_if=lambda value: value is None
    )
    """The system message of chat prompts that have none of their own. Written down only where it is set."""
    batch_size: Count | None = None
    """Training examples a generation; None takes all of them."""
    samples: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """Completions that each member gives to each of them, as pass@k of `fitness` needs; None is 1. More need
    `sampling.temperature` above 0. GRPO has `grpo.num_generations`. Written down only where it is set."""
    strip: bool = True
    """Strip white space around a completion before it is scored."""
    grading: Literal["strict", "lenient"] = Field(default="strict", exclude_if=lambda value: value == "strict")
    """For `countdown`: how an answer may be written. `strict` is what the published graders read; `lenient` reads other
    signs, LaTeX, markdown and a result after `=`, too. Written down only where it is lenient."""
    rewards: Annotated[Texts, SCRIPT] = Field(default_factory=list)
    """For `custom`: import paths `package.module:function` or `file.py:function` of reward functions, and paths of
    scripts: executable files that read JSON lines and print numbers. One alone needs no list."""
    reward_weights: list[Weight] | None = None
    gold: Annotated[str | None, INSIDE] = Field(default=None, min_length=1, exclude_if=lambda value: value is None)
    """For `custom`: the column that has a right answer, by which a reward that wrong answers earn is told; it scores
    nothing. Written down only where it is set."""
    objective: Annotated[
        ObjectiveConfig | None, BeforeValidator(named, json_schema_input_type=str | ObjectiveConfig | None)
    ] = Field(default=None, exclude_if=lambda value: value is None)
    """None is the task's own, which is the weighted sum. Written down only where it is set: a run without one has the
    config, and so the journal, that it always had."""

    fitness: Annotated[str | None, SCRIPT] = Field(default=None, min_length=1, exclude_if=lambda value: value is None)
    """An import path `package.module:function` or `file.py:function`: one number for all that a member answered in a
    generation, which takes the place of the mean of its rewards. Written down only where it is set."""

    @property
    def files(self) -> tuple[str | None, ...]:
        """Where its rows are: for training, test and validation."""
        return self.train_data, self.test_data, self.validation_data

    def asked(self, examples: int) -> int:
        """Completions of one member in a generation, of so many training examples."""
        return min(self.batch_size or examples, examples) * (self.samples or 1)

    @property
    def options(self) -> dict[str, Any]:
        """Settings of a task's own."""
        return dict(self.model_extra or {})

    @field_validator("columns")
    @classmethod
    def _once(cls, columns: dict[str, str]) -> dict[str, str]:
        for there in columns.values():
            names = [name for name, column in columns.items() if column == there]
            if len(names) > 1:
                raise ValueError(f"{' and '.join(names)} both take the column {there}; name it once")
        return columns

    @model_validator(mode="after")
    def _known(self) -> TaskConfig:
        if self.name in TASKS.keys() - WITH_SETTINGS and self.options:
            raise ValidationError.from_exception_data(
                "task", [{"type": "extra_forbidden", "loc": (k,), "input": v} for k, v in self.options.items()]
            )
        if self.fitness is not None and self.objective is not None:
            raise ValueError("task.fitness and task.objective both say what members are ranked by; set one of them")
        if self.fitness is not None and ":" not in self.fitness:
            raise ValueError(f"task.fitness {shown(self.fitness)}: write package.module:function or file.py:function")
        return self


class GraderConfig(Section):
    """How reward functions of the user's own are run. The rewards of built-in tasks are pure and run in place."""

    isolated: bool = True
    """In a worker process that can be killed. false: in this process, without a time limit."""
    timeout: Annotated[float, Field(ge=1e-3, le=1e7, allow_inf_nan=False)] = 60.0
    """Seconds that one call of the reward functions may take."""
    retries: Annotated[int, Field(ge=0, le=10**6)] = 2
    """How often a call that timed out, died or raised is made again before the run stops."""
    batch: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """Completions that they are given at once, which are scored as soon as they are there, while others are decoded.
    For functions that look at each completion alone: it is part of the run. None: all of a generation, which nothing
    can overlap. Written down only where it is set."""
    memory_gib: Gib | None = None
    """GiB that the worker, and each process that it starts, may allocate beyond what it starts with; None is half of
    the machine's memory. A call that needs more fails. Linux only."""
